"""How many replicas elastic modules have: what is wanted.

The number of replicas changes only when all workers start together. ``dnictl scale`` writes how
many are wanted; that file stays, so it holds for later starts of the run, too. The supervisor then
stops all workers at a common cut, and starts them there with the new numbers: the first ones of
each module. If a replica cannot be restarted, or its host is lost and no other one has room, all
workers are started at the newest complete cut with one fewer, until somebody asks for more or the
run is resumed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from dni_runtime.errors import UsageError
from dni_runtime.plan.pace import balance_of
from dni_runtime.run.documents.requests import Scale
from dni_runtime.run.rundir import RunDir
from dni_runtime.supervise.journal import Journal

BALANCE_S = 60.0
"""Seconds between two looks at what balances the chain: a change costs a restart."""

MARGIN = 1.25
"""Fewer replicas must suffice for so many times the work: batches do not always take as long."""


class Scaler:
    """Decides how many replicas each elastic module is to have, for the supervisor."""

    def __init__(
        self,
        run: RunDir,
        elastic: Mapping[str, int],  # numbers at the start of the run
        journal: Journal,
        auto: Sequence[str] = (),  # modules whose number follows what balances the chain
    ) -> None:
        self._run = run
        self._elastic = elastic
        self._auto = auto
        self._journal = journal
        self._balance_s = time.monotonic() + BALANCE_S

    def look(self) -> dict[str, int]:
        """Return how many replicas are wanted now, and record a change."""
        self._balance()
        state, found = self._journal.state, Scale.peek(self._run.scale)
        if found is None and state.wanted:  # it cannot be read now
            return state.wanted
        wanted = _wanted(found, self._elastic)
        if wanted != (state.wanted or self._elastic):
            self._journal.event("scale_requested", replicas=wanted)
        if wanted != state.wanted:
            state.wanted = wanted
            self._journal.write()
        return wanted

    def limit(self, counts: Mapping[str, int]) -> None:
        """Write that no more replicas than these are left; raises ``OSError``."""
        found = Scale.peek(self._run.scale) or Scale()
        wanted = wanted_replicas(self._run, self._elastic)
        left = {one: count for one, count in counts.items() if count < wanted[one]}
        if left:
            found.model_copy(update={"left": {**found.left, **left}}).write(self._run.scale)

    def _balance(self) -> None:
        """Ask for as many replicas as balance the chain, of modules that nobody else asks for."""
        run, names, now_s = self._run, list(self._journal.state.modules), time.monotonic()
        if not self._auto or now_s < self._balance_s:
            return
        self._balance_s = now_s + BALANCE_S
        asked, wanted = Scale.peek(run.scale) or Scale(), wanted_replicas(run, self._elastic)
        phases = {one.state for one in self._journal.state.modules.values()}
        if phases - {"running", "inactive"}:  # what is measured now is of a time of change
            return
        with contextlib.suppress(UsageError, OSError):
            found = balance_of(run, names, wanted, margin=MARGIN)
            own = {one: found[one] for one in self._auto if one not in asked.replicas}
            if any(wanted[one] != count for one, count in own.items()):
                ask_for(run, own, balanced=True)


def wanted_replicas(run: RunDir, elastic: Mapping[str, int]) -> dict[str, int]:
    """Return how many replicas are wanted of each elastic module."""
    return _wanted(Scale.peek(run.scale), elastic)


def _wanted(found: Scale | None, elastic: Mapping[str, int]) -> dict[str, int]:
    found = found or Scale()
    given = {**elastic, **found.balanced, **found.replicas}
    return {one: min(given[one], found.left.get(one, given[one])) for one in elastic}


def ask_for(run: RunDir, replicas: Mapping[str, int], *, balanced: bool = False) -> None:
    """Write how many replicas are wanted of some modules; raises ``OSError``.

    ``balanced``: they are what balances the chain, and may follow it further.
    """
    found = Scale.peek(run.scale) or Scale()
    asked = {one: count for one, count in found.replicas.items() if one not in replicas}
    left = {one: count for one, count in found.left.items() if balanced or one not in replicas}
    if balanced:
        after = Scale(replicas=asked, balanced={**found.balanced, **replicas}, left=left)
    else:
        after = Scale(replicas={**asked, **replicas}, balanced=found.balanced, left=left)
    after.write(run.scale)


def lift_limits(run: RunDir) -> None:
    """Forget that replicas were lost: what was lost may be there again; raises ``OSError``."""
    found = Scale.peek(run.scale)
    if found is not None and found.left:
        found.model_copy(update={"left": {}}).write(run.scale)
