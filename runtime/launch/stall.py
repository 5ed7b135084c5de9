"""When a run has stalled: pure decisions on its workers' reports, by the clock of their reader.

A module stands still when its position in the stream has not changed for a while. Whoever stands
still waits for a neighbour, or does something itself. A module that waits for one that does
something waits rightly. What is left are the causes:

==================  ===============================================================  ==============
the module          is                                                               stalled after
==================  ===============================================================  ==============
is not there        restarted, or at its end                                     never
waits for ``data``  right: sources may be as slow as they like                       never
says nothing        stopped, cut off, or held up by code that lets no thread run     its limit
does something      hung: in one batch, a checkpoint, an evaluation's end, a start   its limit
waits for another   of a pair that wait for each other: what one sent was lost       ``stall_s``
waits for ``input`` not sent what the module upstream has sent on and gone past      ``stall_s``
waits for another   the last one: that one has finished                              ``stall_s``
==================  ===============================================================  ==============

A module's limit is ``stall_s`` or 20 times its longest batch, whichever is longer; for its start,
its first batch, checkpoints, ends of evaluations and its own end at least 10 times ``stall_s``.
Reports are compared by change, never by the times in them: the clocks of hosts differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SLOW = 20
"""So many times its longest batch a module may take for another one."""

PATIENT = 10
"""So many times ``stall_s`` may be taken by what happens rarely, and may take long."""

GAP_S = 5.0
"""Of a longer time without a look only so much counts: the reader itself was suspended."""

_RARE = {
    "start": "has been starting",
    "checkpoint": "has been writing a checkpoint",
    "evaluation": "has been at the end of an evaluation",
}
_WAITS = {
    "input": "input",
    "window": "room in the window of its link",
    "gradient": "gradients",
}

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Stall:
    """What stands still, and why.

    Attributes:
        modules: The modules that wait for nothing else, downstream first: one that hangs, or the
            two of a link. The first one is restarted.
        starts: Which start of each it is.
        message: One sentence for people.
    """

    modules: tuple[str, ...]
    starts: tuple[int, ...]
    message: str = field(compare=False)


@dataclass
class _Seen:
    """What has been seen of one start of a module; times in seconds in which the supervisor looked.

    Attributes:
        report: The newest report; empty before the first.
        changed_s: When it changed.
        moved_s: When the module's phase or its position changed.
        moves: How often its position did.
        longest_s: Its longest batch, but for the first.
        passed_s: When the module upstream was seen to go past a position that this one stays at.
    """

    report: Report
    changed_s: float
    moved_s: float
    moves: int = 0
    longest_s: float = 0.0
    passed_s: float | None = None

    @property
    def phase(self) -> str:
        return str(self.report.get("state", "starting"))

    @property
    def doing(self) -> str:
        # an image of an older version does not say what it does
        return str(self.report.get("doing", "" if self.report else "start"))

    @property
    def id(self) -> int:
        return int(self.report.get("id", 0))


class StallRule:
    """Follows the reports of a run's workers.

    Args:
        modules: The modules, head first.
        stall_s: ``restart.stall_s`` of the chain.
    """

    def __init__(self, modules: Sequence[str], stall_s: float) -> None:
        self._modules = modules
        self._stall_s = stall_s
        self._seen: dict[str, _Seen] = {}
        self._moves = dict.fromkeys(modules, 0)
        self._looked_s: float | None = None
        self._now_s = 0.0

    def look(
        self, now_s: float, reports: Mapping[str, Report], finished: Collection[str] = ()
    ) -> list[Stall]:
        """What has stalled, as far as the reports until now tell.

        Args:
            now_s: The reader's time, in seconds of a clock that only goes forward.
            reports: The newest report of each module that has a worker; empty before the first.
            finished: Modules that have come to their end, and have no worker any more.
        """
        if self._looked_s is not None:
            self._now_s += min(now_s - self._looked_s, GAP_S)
        self._looked_s = now_s
        for name in self._modules:
            self._note(name, reports.get(name))
        for upstream, name in zip(self._modules, self._modules[1:], strict=False):
            self._note_passed(self._seen.get(upstream), self._seen.get(name))
        found = [self._judge(index, finished) for index in range(len(self._modules))]
        return list(dict.fromkeys(stall for stall in found if stall is not None))

    def moves(self, modules: Collection[str]) -> int:
        """How often these have gone on in the stream, over all of their starts."""
        return sum(self._moves[name] for name in modules)

    def silent(self, seconds: float) -> list[str]:
        """Modules whose reports have not changed for so long, ten times that before the first."""
        return [
            name
            for name, seen in self._seen.items()
            if self._now_s - seen.changed_s >= seconds * (1 if seen.report else PATIENT)
        ]

    def still_s(self, name: str) -> float:
        """Seconds for which a module has stood still."""
        seen = self._seen.get(name)
        return 0.0 if seen is None else self._now_s - seen.moved_s

    def _note(self, name: str, report: Report | None) -> None:
        if report is None:
            self._seen.pop(name, None)
            return
        seen = self._seen.get(name)
        if seen is None or report.get("attempt") != seen.report.get("attempt"):
            self._seen[name] = _Seen(report, self._now_s, self._now_s)
            return
        if report == seen.report:
            return
        before = replace(seen)
        seen.report, seen.changed_s = report, self._now_s
        if (seen.phase, seen.id) == (before.phase, before.id):
            return
        seen.moved_s, seen.passed_s = self._now_s, None
        if seen.phase != "running" or before.phase != "running":
            return  # it only tells where it begins
        if before.doing == "batch" and before.moves:
            seen.longest_s = max(seen.longest_s, float(before.report.get("doing_s", 0.0)))
        seen.moves += 1
        self._moves[name] += 1

    def _note_passed(self, upstream: _Seen | None, seen: _Seen | None) -> None:
        if upstream is None or seen is None or seen.passed_s is not None:
            return
        just_now = upstream.moves > 0 and upstream.moved_s == self._now_s
        waits = seen.phase == "running" and seen.doing == "input"
        if just_now and waits and upstream.id > seen.id:
            seen.passed_s = self._now_s

    def _judge(self, index: int, finished: Collection[str]) -> Stall | None:
        name = self._modules[index]
        seen, still_s = self._seen.get(name), self.still_s(name)
        if seen is None or still_s < self._stall_s or seen.phase == "stopping":
            return None  # it is killed if that takes too long
        limit_s = max(self._stall_s, SLOW * seen.longest_s)
        patient_s = max(limit_s, PATIENT * self._stall_s)
        if not seen.moves:
            limit_s = patient_s
        after = f"for {still_s:.0f} s, after {seen.id} of the stream"
        if seen.phase in ("finished", "stopped", "failed"):
            message = f"module {name!r} has {seen.phase}, and its process has not ended"
            return self._one(name, f"{message} for {still_s:.0f} s", still_s >= patient_s)
        if seen.report and self._silent(seen):
            message = f"the worker of module {name!r} has said nothing {after}: its process is "
            message += "stopped, or cut off from the run directory"
            return self._one(name, message, still_s >= limit_s)
        if seen.phase == "connecting":  # it gives up by itself
            return None
        if seen.doing == "batch":
            message = f"module {name!r} has been busy with one batch {after}"
            return self._one(name, message, still_s >= limit_s)
        if seen.doing in _RARE:
            message = f"module {name!r} {_RARE[seen.doing]} {after}"
            return self._one(name, message, still_s >= patient_s)
        if seen.doing in _WAITS:
            return self._waits(index, finished, after)
        return None

    def _one(self, name: str, message: str, stalled: bool) -> Stall | None:
        return Stall((name,), self._starts(name), message) if stalled else None

    def _waits(self, index: int, finished: Collection[str], after: str) -> Stall | None:
        name, seen = self._modules[index], self._seen[self._modules[index]]
        for_input = seen.doing == "input"
        at = index - 1 if for_input else index + 1
        if not 0 <= at < len(self._modules):
            return None
        other = self._modules[at]
        message = f"module {name!r} waits for {_WAITS[seen.doing]} from {other!r} {after}"
        if other in finished:
            return self._one(name, f"{message}; that has finished", True)
        its = self._seen.get(other)
        if its is None or its.phase != "running":
            return None
        back = its.doing in _WAITS and (its.doing == "input") != for_input
        passed_s = seen.passed_s if for_input else None
        if passed_s is not None and self._now_s - passed_s >= self._stall_s:
            message += f", which is at {its.id}"
        elif back and not self._silent(its) and self.still_s(other) >= self._stall_s:
            message += f", which waits for {_WAITS[its.doing]} after {its.id}"
        else:
            return None
        upper = (its if for_input else seen).report
        stands = "stands" if upper.get("connected") else "does not stand"
        message += f"; their link {stands}, messages not acknowledged: {upper.get('in_flight', 0)}"
        below_first = (name, other) if for_input else (other, name)
        return Stall(below_first, self._starts(*below_first), message)

    def _silent(self, seen: _Seen) -> bool:
        return self._now_s - seen.changed_s >= self._stall_s / 2

    def _starts(self, *names: str) -> tuple[int, ...]:
        return tuple(int(self._seen[name].report.get("attempt", 0)) for name in names)
