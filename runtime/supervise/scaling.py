"""The numbers of replicas of elastic modules that somebody requests, or that balance the chain.

The number of replicas changes only when all workers start together. ``dnictl scale`` writes how
many are requested; that file stays, so it holds for later starts of the run, too. The supervisor
then stops all workers at a common cut, and starts them there with the new numbers: the first ones
of each module. If a replica cannot be restarted, or its host is lost and no other one has room, all
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
        """Return how many replicas are requested now, and record a change."""
        self._balance()
        state, scale = self._journal.state, Scale.peek(self._run.scale)
        if scale is None and state.scale:  # it cannot be read now
            return state.scale
        replicas = _counts(scale, self._elastic)
        if replicas != (state.scale or self._elastic):
            self._journal.event("scale_requested", replicas=replicas)
        if replicas != state.scale:
            state.scale = replicas
            self._journal.write()
        return replicas

    def limit(self, counts: Mapping[str, int]) -> None:
        """Write that no more replicas than these are left; raises ``OSError``."""
        scale = Scale.peek(self._run.scale) or Scale()
        replicas = wanted_replicas(self._run, self._elastic)
        limits = {module: count for module, count in counts.items() if count < replicas[module]}
        if limits:
            scale.model_copy(update={"limits": {**scale.limits, **limits}}).write(self._run.scale)

    def _balance(self) -> None:
        """Ask for as many replicas as balance the chain, of modules that nobody else asks for."""
        run, names, now_s = self._run, list(self._journal.state.modules), time.monotonic()
        if not self._auto or now_s < self._balance_s:
            return
        self._balance_s = now_s + BALANCE_S
        asked, replicas = Scale.peek(run.scale) or Scale(), wanted_replicas(run, self._elastic)
        phases = {module.state for module in self._journal.state.modules.values()}
        if phases - {"running", "inactive"}:  # what is measured now is of a time of change
            return
        with contextlib.suppress(UsageError, OSError):
            counts = balance_of(run, names, replicas, margin=MARGIN)
            changes = {
                module: counts[module] for module in self._auto if module not in asked.replicas
            }
            if any(replicas[module] != count for module, count in changes.items()):
                ask_for(run, changes, balanced=True)


def wanted_replicas(run: RunDir, elastic: Mapping[str, int]) -> dict[str, int]:
    """Return how many replicas are requested of each elastic module."""
    return _counts(Scale.peek(run.scale), elastic)


def _counts(scale: Scale | None, elastic: Mapping[str, int]) -> dict[str, int]:
    scale = scale or Scale()
    counts = {**elastic, **scale.balanced, **scale.replicas}
    return {
        module: min(counts[module], scale.limits.get(module, counts[module])) for module in elastic
    }


def ask_for(run: RunDir, replicas: Mapping[str, int], *, balanced: bool = False) -> None:
    """Write how many replicas are requested of some modules; raises ``OSError``.

    ``balanced``: they are what balances the chain, and may follow it further.
    """
    scale = Scale.peek(run.scale) or Scale()
    asked = {module: count for module, count in scale.replicas.items() if module not in replicas}
    limits = {
        module: count
        for module, count in scale.limits.items()
        if balanced or module not in replicas
    }
    if balanced:
        after = Scale(replicas=asked, balanced={**scale.balanced, **replicas}, limits=limits)
    else:
        after = Scale(replicas={**asked, **replicas}, balanced=scale.balanced, limits=limits)
    after.write(run.scale)


def lift_limits(run: RunDir) -> None:
    """Forget that replicas were lost: what was lost may be there again; raises ``OSError``."""
    scale = Scale.peek(run.scale)
    if scale is not None and scale.limits:
        scale.model_copy(update={"limits": {}}).write(run.scale)
