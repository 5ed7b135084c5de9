"""Detection of stalled modules, by their reports and the clock of the reports' reader.

A module stands still if its position in the stream has not changed for a while: it is busy, or
waits for a neighbour. Waiting for a busy neighbour is normal. The other cases:

===================  ==============================================================  ============
the module           explanation                                                     stalled after
===================  ==============================================================  ============
has no worker        it is being restarted, or has finished                          never
waits for ``data``   normal: a source may be slow                                    never
connects             it gives up by itself                                           never
gives another sign   it hangs, is stopped, or is cut off                             ``PATIENCE``
waits for neighbour  the neighbour waits for it, too: a message was lost             ``stall_s``
waits for ``input``  a message was lost: the module upstream has moved on            ``stall_s``
waits for neighbour  the neighbour has finished, for as long                         ``stall_s``
===================  ==============================================================  ============

Only changes of reports count, never the times in them: the clocks of hosts differ. Nobody waits too
long for a neighbour while some worker cannot use its links, as it starts or its disk is slow: that
time is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.run.documents.reports import ENDED, Report
from dni_runtime.run.documents.state import RunPhase
from dni_runtime.spec.named import module_of
from dni_runtime.supervise.journal import Journal

SLOW = 20
"""Limit of a batch, as a multiple of the module's longest batch."""

PATIENT = 10
"""Limit of rare work that may take long, as a multiple of ``stall_s``."""

GAP_S = 5.0
"""Most seconds that count between two looks; beyond, the reader itself was suspended."""

Patience = Literal["limit", "rare"]
"""``limit``: ``stall_s``, or ``SLOW`` times the module's longest batch if that is longer; ``rare``,
also until the first batch is done: the same, but at least ``PATIENT`` times ``stall_s``."""

PATIENCE: Mapping[str, tuple[Patience, str]] = {
    "finished": ("rare", "module {!r} has finished, but its process has not exited {}"),
    "failed": ("rare", "module {!r} has failed, but its process has not exited {}"),
    "stopped": ("rare", "module {!r} has stopped, but its process has not exited {}"),
    "silent": (
        "limit",
        "the worker of module {!r} has not reported {}: its process is stopped, or cut off from "
        "the run directory",
    ),
    "batch": ("limit", "module {!r} has been busy with one batch {}"),
    "replicas": ("limit", "module {!r} waits for its other replicas {}"),
    "start": ("rare", "module {!r} has been starting {}"),
    "checkpoint": ("rare", "module {!r} has made no progress with its checkpoint {}"),
    "evaluation": ("rare", "module {!r} has been at the end of an evaluation {}"),
}
"""Signs of life of a module that stands still: how long they may last, and what is said then."""

_WAITS = {
    "input": "input",
    "window": "room in the window of its link",
    "gradient": "gradients",
}


@dataclass(frozen=True)
class Stall:
    """One stall and its cause."""

    # The causes: one that hangs, or the two of a link, downstream first; they are restarted in
    # turn.
    modules: tuple[str, ...]
    starts: tuple[int, ...]  # attempt of each
    message: str = field(compare=False)  # for people


@dataclass
class _Observations:
    """Observations of one attempt of a module; times in seconds in which the supervisor looked."""

    report: Report  # the newest; empty before the first
    changed_s: float  # of the report's last change
    moved_s: float  # of the last change of the module's phase or position
    began_s: float  # of the first report of what it does now
    saved_s: float  # of the last progress with saving its state
    waited_s: float = 0.0  # since it moved, but for what is left out of waiting
    moves: int = 0  # changes of its position
    longest_s: float = 0.0  # duration of its longest batch, except the first
    # when the modules upstream had moved past the position of this one
    passed_s: float | None = None

    @property
    def phase(self) -> str:
        return self.report.state

    @property
    def doing(self) -> str:
        return self.report.doing

    @property
    def saves(self) -> bool:
        return self.report.saving is not None or self.doing == "checkpoint"

    @property
    def id(self) -> int:
        return self.report.id


class StallRule:
    """Follows the reports of a run's workers."""

    def __init__(
        self,
        modules: Sequence[str],  # head first
        stall_s: float,  # ``restart.stall_s`` of the chain
        # those that each one takes its inputs from (default: the one before)
        sources: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._modules = modules
        pairs = zip(modules[1:], modules, strict=False)
        self._sources = sources or {name: (before,) for name, before in pairs}
        self._stall_s = stall_s
        self._seen: dict[str, _Observations] = {}
        self._moves = dict.fromkeys(modules, 0)
        self._finished_s: dict[str, float] = {}
        self._looked_s: float | None = None
        self._now_s = 0.0
        self._kept = False  # some worker is kept from its links: all may wait for it

    def look(
        self, now_s: float, reports: Mapping[str, Report], finished: Collection[str] = ()
    ) -> list[Stall]:
        """Return the stalls according to the reports until now.

        ``now_s`` is the reader's monotonic time. ``reports`` has the newest one of each module that
        has a worker, empty before the first; ``finished`` are modules that have finished and whose
        workers have exited.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, GAP_S)
        self._now_s, self._looked_s = self._now_s + passed_s, now_s
        self._finished_s = {name: self._finished_s.get(name, self._now_s) for name in finished}
        for name in self._modules:
            self._note(name, reports.get(name))
        self._kept = any(map(self._kept_from_links, self._seen.values()))
        for seen in self._seen.values():
            seen.waited_s += 0.0 if self._kept else passed_s
        for name in self._modules:
            self._note_passed(name)
        stalls = [self._judge(name) for name in self._modules]
        return list(dict.fromkeys(stall for stall in stalls if stall is not None))

    def moves(self, modules: Collection[str]) -> int:
        """Return how often these modules have moved in the stream, over all attempts."""
        return sum(self._moves[name] for name in modules)

    def silent(self, seconds: float) -> list[str]:
        """Return modules without a new report for ``seconds``, ten times that before the first."""
        return [
            name
            for name, seen in self._seen.items()
            if self._now_s - seen.changed_s >= seconds * (1 if seen.report else PATIENT)
        ]

    def still_s(self, name: str) -> float:
        """Return the seconds for which a module has neither moved nor saved anything."""
        seen = self._seen.get(name)
        return 0.0 if seen is None else self._now_s - max(seen.moved_s, seen.saved_s)

    def saves(self, name: str) -> bool:
        """Whether a worker saves its state, and makes progress with it."""
        seen = self._seen.get(name)
        return (
            seen is not None
            and seen.saves
            and self._now_s - seen.changed_s < self._stall_s
            and self._now_s - seen.saved_s < PATIENT * self._stall_s
        )

    def _note(self, name: str, report: Report | None) -> None:
        if report is None:
            self._seen.pop(name, None)
            return
        seen = self._seen.get(name)
        if seen is None or report.attempt != seen.report.attempt:
            now_s = self._now_s
            self._seen[name] = _Observations(report, now_s, now_s, now_s, now_s)
            return
        if report == seen.report:
            return
        before = replace(seen)
        seen.report, seen.changed_s = report, self._now_s
        if report.doing != before.doing or report.doing_s < before.report.doing_s:
            seen.began_s = self._now_s
        if (report.saving, seen.saves) != (before.report.saving, before.saves):
            seen.saved_s = self._now_s
        if (seen.phase, seen.id) == (before.phase, before.id):
            return
        seen.moved_s, seen.passed_s, seen.waited_s = self._now_s, None, 0.0
        if seen.phase != "running" or before.phase != "running":
            return  # it only reports where it starts
        if before.doing == "batch" and before.moves:
            seen.longest_s = max(seen.longest_s, before.report.doing_s)
        seen.moves += 1
        self._moves[name] += 1

    def _note_passed(self, name: str) -> None:
        seen = self._seen.get(name)
        above = [self._seen.get(source) for source in self._sources.get(name, ())]
        if seen is None or seen.passed_s is not None or not above:
            return
        waits = seen.phase == "running" and seen.doing == "input"
        further = [source for source in above if source is not None and source.id > seen.id]
        just_now = any(source.moves > 0 and source.moved_s == self._now_s for source in further)
        if just_now and waits and len(further) == len(above):
            seen.passed_s = self._now_s

    def _judge(self, name: str) -> Stall | None:
        seen, still_s = self._seen.get(name), self.still_s(name)
        if seen is None or still_s < self._stall_s or seen.phase == "stopping":
            return None  # the supervisor kills it if that takes too long
        sign = self._sign(seen)
        if sign in _WAITS:
            return self._waits(name, f"for {still_s:.0f} s, at {seen.id} of the stream")
        if sign not in PATIENCE:
            return None
        patience, text = PATIENCE[sign]
        limit_s = max(self._stall_s, SLOW * seen.longest_s)
        if patience == "rare" or not seen.moves:
            limit_s = max(limit_s, PATIENT * self._stall_s)
        lasts_s = self._lasts_s(name, sign)
        after = f"for {lasts_s:.0f} s, at {seen.id} of the stream"
        return self._stall(text.format(name, after), name) if lasts_s >= limit_s else None

    def _sign(self, seen: _Observations) -> str:
        """Return the sign of life that a module's newest report is."""
        if seen.phase in ENDED:
            return seen.phase
        if seen.report and self._silent(seen):
            return "silent"
        return seen.phase if seen.phase == "connecting" else seen.doing

    def _lasts_s(self, name: str, sign: str) -> float:
        """Return for how long a sign has been the same; of replicas, of all that wait."""
        names = [name]
        if sign == "replicas":
            names = [other for other in self._seen if module_of(other) == module_of(name)]
            if any(self._seen[other].doing != sign for other in names):
                return 0.0
        began_s = (self._now_s - self._seen[other].began_s for other in names)
        return min(*map(self.still_s, names), *began_s)

    def _stall(self, message: str, *names: str) -> Stall:
        return Stall(names, tuple(self._seen[name].report.attempt for name in names), message)

    def _waits(self, name: str, after: str) -> Stall | None:
        if self._kept or self._seen[name].waited_s < self._stall_s:
            return None
        if self._seen[name].doing == "input":
            others = self._missing(name)
        else:  # a join that waits for another input is not the cause
            others = [other for other in self._modules if name in self._sources.get(other, ())]
            others = [other for other in others if name in self._missing(other)]
        # one that has not finished is the cause; else the last one to finish
        unfinished = [other for other in others if other not in self._finished_s]
        unfinished = unfinished or sorted(others, key=self._finished_s.__getitem__)[-1:]
        stalls = (self._waits_for(name, other, after) for other in unfinished)
        return next((stall for stall in stalls if stall is not None), None)

    def _missing(self, name: str) -> Sequence[str]:
        """Return the modules whose output a module waits for, if it waits for input."""
        its, sources = self._seen.get(name), self._sources.get(name, ())
        if its is None or its.doing != "input":
            return sources
        seen = {source: self._seen.get(source) for source in sources}
        behind = [
            source
            for source, neighbour in seen.items()
            if neighbour is None or neighbour.id <= its.id
        ]
        return behind or sources

    def _waits_for(self, name: str, other: str, after: str) -> Stall | None:
        seen = self._seen[name]
        for_input = seen.doing == "input"
        message = f"module {name!r} waits for {_WAITS[seen.doing]} from {other!r} {after}"
        if (finished_s := self._finished_s.get(other)) is not None:
            over = self._now_s - finished_s >= self._stall_s  # it may just have come to its end
            return self._stall(f"{message}, which has finished", name) if over else None
        its = self._seen.get(other)
        if its is None or its.phase != "running":
            return None
        back = its.doing in _WAITS and (its.doing == "input") != for_input
        passed_s = seen.passed_s if for_input else None
        if passed_s is not None and self._now_s - passed_s >= self._stall_s:
            message += f", which is at {its.id}"
        elif back and not self._silent(its) and self.still_s(other) >= self._stall_s:
            message += f", which waits for {_WAITS[its.doing]} at {its.id}"
        else:
            return None
        upper = (its if for_input else seen).report
        stands = "up" if upper.connected else "down"
        message += f"; the link is {stands}, unacknowledged messages: {upper.in_flight}"
        return self._stall(message, *((name, other) if for_input else (other, name)))

    def _kept_from_links(self, seen: _Observations) -> bool:
        """Whether a worker may have to send something again, but cannot: its disk is slow, say."""
        if seen.phase in ("starting", "connecting"):
            return True
        return seen.phase == "running" and (seen.doing == "checkpoint" or self._silent(seen))

    def _silent(self, seen: _Observations) -> bool:
        return self._now_s - seen.changed_s >= self._stall_s / 2


@dataclass
class _OpenStall:
    """A stall that is not over; its modules may have been restarted."""

    since_s: float  # time of its detection
    moves: int  # of the modules, until then
    starts: int = 0  # stalled attempts of the modules
    stall: Stall | None = None  # the newest finding


class Watchdog:
    """Maintains the run's phase ``stalled``, with the reason as its error, and its events."""

    def __init__(self, plan: LaunchPlan, journal: Journal) -> None:
        self.rule = StallRule([w.module for w in plan.workers], plan.restart.stall_s, plan.sources)
        self._restarts = plan.restart.on_stall == "restart"
        self._journal = journal
        self._open: dict[tuple[str, ...], _OpenStall] = {}
        self._before: RunPhase = "starting"

    def look(self, now_s: float, reports: Mapping[str, Report]) -> dict[str, float]:
        """Judge the workers by their newest reports; return the modules to restart.

        Each comes with the seconds for which it has stood still. ``now_s`` is the supervisor's
        monotonic time; ``reports`` has the newest one of each module with a worker.
        """
        state, restart = self._journal.state, dict[str, float]()
        ended = [n for n, m in state.modules.items() if m.state == "finished" and n not in reports]
        stalls = self.rule.look(now_s, reports, ended)
        if state.phase not in ("starting", "running", "stalled") or self._journal.trouble:
            return {}  # on a full disk the workers' reports stand still, too
        for stall in stalls:
            opened = _OpenStall(now_s, self.rule.moves(stall.modules))
            entry = self._open.setdefault(stall.modules, opened)
            if entry.stall != stall:
                self._journal.event("run_stalled", module=stall.modules[0], reason=stall.message)
                if self._restarts:  # the two ends of a link take turns
                    name = stall.modules[entry.starts % len(stall.modules)]
                    restart[name] = self.rule.still_s(name)
                entry.starts += 1
            entry.stall = stall
        for modules, entry in list(self._open.items()):
            left_out = any(state.modules[name].state == "inactive" for name in modules)
            if left_out or self.rule.moves(modules) > entry.moves:
                del self._open[modules]
                after_s = round(now_s - entry.since_s, 1)
                self._journal.event("run_progressing", module=modules[0], after_s=after_s)
        self._show()
        return restart

    def _show(self) -> None:
        state, stalled = self._journal.state, self._journal.state.phase == "stalled"
        if self._open:
            reasons = (entry.stall.message for entry in self._open.values() if entry.stall)
            state.error = "; ".join(reasons)  # written with the next heartbeat if it is not new
        if self._open and not stalled:
            self._before, state.phase = state.phase, "stalled"
            self._journal.write()
        elif stalled and not self._open:
            state.phase, state.error = self._before, None
            self._journal.write()
