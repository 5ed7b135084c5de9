"""Which replicas of elastic modules take batches: what is wanted, and the way there.

``dnictl scale`` writes how many replicas are wanted; that file stays, so it holds for later starts
of the run, too. While the run goes on, the supervisor compares it with ``ledger/replicas.json``,
which the head follows: it puts a SCALE marker into the stream when that file changes. ::

    a replica      how many are wanted   what happens
    parked         it is one of them     its worker starts, and waits (phase ``joining``)
    joining        it is one of them     it is added to the file: the marker comes, and it trains
    joining        others suffice        its worker is ended, unless it is in the file: the marker
                                         may be on its way
    running        others suffice        it is removed from the file: at the marker it shares what
                                         it has learnt, exits and is parked

A replica that cannot be restarted is lost: it is removed from the file at once, as fewer were
wanted, and named there, so that nobody waits for it. If it is one of the head, all modules begin
again at the newest complete cut, without it: its batches since then were in its hands alone. It is
not wanted again until somebody asks for more, or the run is started again.

The lowest numbers are the first to come and the last to go. The first replica always stays: the
others share their weights by it. If that cannot be restarted, the last one is lost in its stead
(``launch/moving.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dni_runtime.cuts import cut_folders, parts_of, written_cuts
from dni_runtime.documents.reports import Report
from dni_runtime.documents.requests import Replicas, Scale
from dni_runtime.errors import DniError, UsageError
from dni_runtime.launch.pace import balance_of
from dni_runtime.rundir import RunDir
from dni_runtime.spec.members import Active, as_body, first_replicas, number_of
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker.ledger import Counts, give_up, rest

if TYPE_CHECKING:  # which needs what is here
    from dni_runtime.launch.journal import Journal
    from dni_runtime.launch.pool import WorkerPool

BALANCE_S = 15.0
"""Seconds between two looks at what balances the chain, for modules that follow it."""

MARGIN = 1.25
"""Fewer replicas must suffice for so many times the work: batches do not always take as long."""


class Scaler:
    """Brings the replicas of elastic modules to the wanted number, for the supervisor.

    Args:
        run: The run directory.
        elastic: The elastic modules, each with its number at the start.
        pool: The workers.
        journal: The run's state and events.
        auto: Those of them whose number follows what balances the chain.
        place: Finds a host for a worker that is to start; returns whether one has room.
    """

    def __init__(
        self,
        run: RunDir,
        elastic: Mapping[str, int],
        pool: WorkerPool,
        journal: Journal,
        auto: Sequence[str] = (),
        *,
        place: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._run = run
        self._elastic = elastic
        self._auto = auto
        self._balance_s = time.monotonic() + BALANCE_S
        self._pool = pool
        self._journal = journal
        self._place = place
        self._without_room: set[str] = set()

    def look(self) -> dict[str, DniError]:
        """Take the next steps; return the errors of workers that could not be started."""
        run, elastic, state = self._run, self._elastic, self._journal.state
        self._balance()
        wanted, now = wanted_replicas(run, elastic), replicas_now(run, elastic)
        if wanted != (state.wanted or elastic):
            self._journal.event("scale_requested", replicas=wanted)
        if wanted != state.wanted:
            state.wanted = wanted
            self._journal.write()
        phases = {
            name: "stopping" if name in self._pool.parking else module.state
            for name, module in state.modules.items()
        }
        if self._over(phases):
            return {}
        missed = now.lost
        if missed and not any(_leaves(name, now.active, phases[name]) for name in phases):
            missed = still_missed(run, missed, list(phases))
        phases |= dict.fromkeys(missed, "stopping")
        steps = next_steps(wanted, now.active, state.modules, phases)
        after = Replicas(active=steps.active, lost=missed)
        if after != now:
            try:
                after.write(run.replicas)
            except OSError:
                return {}  # a full disk: later
        if after.active != now.active:
            self._journal.event("scaled", replicas=as_body(steps.active))
        for name in steps.end:
            self._pool.park(name)
        failed, full = {}, set[str]()
        for name in steps.start:
            if not self._place(name):
                full.add(name)
                continue
            try:
                self._pool.join(name)
            except DniError as error:
                failed[name] = error
        for name in sorted(full - self._without_room):
            self._journal.event("no_room", module=name)
        self._without_room = full
        return failed

    def _over(self, phases: Mapping[str, str]) -> bool:
        """Whether the head has finished, so that no marker will come; park who waits for one."""
        heads = next(iter(replicas_of(list(phases)).values()))
        if not any(phases[name] == "finished" for name in heads):
            return False
        for name, phase in phases.items():
            if phase == "joining":
                self._pool.park(name)
        return True

    def _balance(self) -> None:
        """Ask for as many replicas as balance the chain, of modules that nobody else asks for."""
        run, names, now_s = self._run, list(self._journal.state.modules), time.monotonic()
        if not self._auto or now_s < self._balance_s:
            return
        self._balance_s = now_s + BALANCE_S
        asked, wanted = Scale.peek(run.scale) or Scale(), wanted_replicas(run, self._elastic)
        phases = {one.state for one in self._journal.state.modules.values()}
        if phases - {"running", "parked"}:  # what is measured now is of a time of change
            return
        with contextlib.suppress(UsageError, OSError):
            found = balance_of(run, names, wanted, margin=MARGIN)
            own = {one: found[one] for one in self._auto if one not in asked.replicas}
            if any(wanted[one] != count for one, count in own.items()):
                ask_for(run, own, balanced=True)

    def lose(self, name: str, how: str) -> bool:
        """Go on without a replica that cannot be restarted.

        Args:
            name: The replica.
            how: Reason for the event.

        Returns:
            Whether that is possible: it is one that can leave, or that takes no batches.
        """
        run, module = self._run, module_of(name)
        now = replicas_now(run, self._elastic)
        left = without(now.active, name)
        if left is None:
            return False
        worker, counted = self._pool.workers[name], Counts.read(run.ledger(name))
        takes = number_of(name) in now.active[module] or (counted and not counted.waits)
        state = self._journal.state
        before = state.anew
        if takes and module == module_of(next(iter(self._pool.workers))):  # the head
            state.anew = "a replica of the first module is lost"
            self._journal.write()  # first: a supervisor that takes over knows, too
        # of one that leaves, too: others wait for it
        lost = now.lost | {name: max(cut_folders(run), default=0)}
        try:
            set_left(run, {**(Scale.peek(run.scale) or Scale()).left, module: len(left[module])})
            Replicas(active=left, lost=lost).write(run.replicas)
        except OSError:
            state.anew = before
            return False
        self._pool.park(name)
        if counted and worker.resume.isdecimal() and counted.attempt < (worker.first or 0):
            rest(run, name, int(worker.resume))  # it has not begun again with the others
        else:
            give_up(run, name)
        self._journal.event("replica_lost", module=name, reason=how)
        return True

    def parked(self, name: str) -> bool:
        """Whether a worker that has exited takes no batches any more; note it."""
        module = self._journal.state.modules[name]
        reported = Report.read(self._run.worker(name)).of(module.attempt).state == "parked"
        lost = module.state == "parked"  # it had ended before it was given up
        if not (reported or lost or name in self._pool.parking):
            return False
        self._pool.parking.discard(name)
        module.state = "parked"
        self._journal.event("worker_parked", module=name, attempt=module.attempt)
        return True


@dataclass(frozen=True)
class Steps:
    """What is to be done next.

    Attributes:
        active: The replicas that are to take batches.
        start: Workers to start.
        end: Workers that wait for their first batch and are not needed any more.
    """

    active: Active
    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


def wanted_replicas(run: RunDir, elastic: Mapping[str, int]) -> dict[str, int]:
    """Return how many replicas are wanted of each elastic module.

    Args:
        run: The run directory.
        elastic: The elastic modules, each with its number at the start.
    """
    found = Scale.peek(run.scale) or Scale()
    given = {**elastic, **found.balanced, **found.replicas}
    return {one: min(given[one], found.left.get(one, given[one])) for one in elastic}


def _leaves(worker: str, active: Active, phase: str) -> bool:
    """Whether a replica still has batches, or waits for some, that it took before it leaves."""
    number = number_of(worker)
    return phase == "running" and number not in active.get(module_of(worker), (number,))


def ask_for(run: RunDir, replicas: Mapping[str, int], *, balanced: bool = False) -> None:
    """Write how many replicas are wanted of some modules.

    Args:
        run: The run directory.
        replicas: The numbers.
        balanced: Whether they are what balances the chain, and may follow it further.

    Raises:
        OSError: It cannot be written.
    """
    found = Scale.peek(run.scale) or Scale()
    asked, left = (
        {one: count for one, count in counts.items() if one not in replicas}
        for counts in (found.replicas, found.left)
    )
    if balanced:
        after = Scale(replicas=asked, balanced={**found.balanced, **replicas}, left=left)
    else:
        after = Scale(replicas={**asked, **replicas}, balanced=found.balanced, left=left)
    after.write(run.scale)


def set_left(run: RunDir, left: Mapping[str, int]) -> None:
    """Write how many replicas are left of the modules that have lost some.

    Raises:
        OSError: It cannot be written.
    """
    found = Scale.peek(run.scale) or Scale()
    if found.left != left:
        found.model_copy(update={"left": dict(left)}).write(run.scale)


def replicas_now(run: RunDir, elastic: Mapping[str, int]) -> Replicas:
    """Return the replicas that the head lets take batches, or is about to, and the lost ones."""
    return Replicas.peek(run.replicas) or Replicas(active=first_replicas(elastic))


def without(active: Active, worker: str) -> Active | None:
    """Return the sets without a replica; None if the others share by it, or it is no replica."""
    module, number = module_of(worker), number_of(worker)
    if module not in active or number == 1:
        return None
    return {**active, module: tuple(one for one in active[module] if one != number)}


def still_missed(run: RunDir, lost: Mapping[str, int], workers: Sequence[str]) -> dict[str, int]:
    """Return the lost replicas that some worker may still wait for.

    Once all workers have written a cut without it, nobody does, and it may come back.

    Args:
        run: The run directory.
        lost: The lost replicas, each with the newest cut before.
        workers: All workers.
    """
    cuts = written_cuts(run, workers)
    return {
        name: before
        for name, before in lost.items()
        if not any(cut > before and name not in parts_of(run, cut, [name]) for cut in cuts)
    }


def next_steps(
    wanted: Mapping[str, int],
    active: Active,
    workers: Collection[str],
    phases: Mapping[str, str],
) -> Steps:
    """Return what is to be done next (pure).

    Args:
        wanted: How many replicas are wanted of each elastic module.
        active: Those that take batches.
        workers: All workers of the run.
        phases: Phase of each one.
    """
    start, end, after = list[str](), list[str](), dict[str, tuple[int, ...]]()
    for module, count in wanted.items():
        names = sorted((one for one in workers if module_of(one) == module), key=number_of)
        own = set(active[module])
        spare = [one for one in names if number_of(one) not in own]
        more = spare[: max(count - len(own), 0)]
        surplus = {one for one in sorted(own)[count:] if phases[f"{module}.{one}"] == "running"}
        start += [one for one in more if phases[one] == "parked"]
        end += [one for one in spare if one not in more and phases[one] == "joining"]
        ready = [number_of(one) for one in more if phases[one] == "joining"]
        after[module] = tuple(sorted([*(own - surplus), *ready]))
    return Steps(after, tuple(start), tuple(end))
