"""A supervisor's watchdog: it reports stalls and decides which modules to restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dni_runtime.documents.reports import Report
from dni_runtime.documents.state import RunPhase
from dni_runtime.launch.journal import Journal
from dni_runtime.launch.plan import LaunchPlan
from dni_runtime.launch.stall import Stall, StallRule


@dataclass
class _Open:
    """A stall that is not over; its modules may have been restarted."""

    since_s: float  # time of its detection
    moves: int  # of the modules, until then
    starts: int = 0  # stalled attempts of the modules
    stall: Stall | None = None  # the newest finding


class Watchdog:
    """Maintains the run's phase ``stalled``, with the reason as its error, and its events."""

    def __init__(self, plan: LaunchPlan, journal: Journal) -> None:
        self._rule = StallRule([w.module for w in plan.workers], plan.restart.stall_s, plan.sources)
        self._restarts = plan.restart.on_stall == "restart"
        self._journal = journal
        self._open: dict[tuple[str, ...], _Open] = {}
        self._before: RunPhase = "starting"

    def look(self, now_s: float, reports: Mapping[str, Report]) -> dict[str, float]:
        """Judge the workers by their newest reports; return the modules to restart.

        Each comes with the seconds for which it has stood still. ``now_s`` is the supervisor's
        monotonic time; ``reports`` has the newest one of each module with a worker.
        """
        state, restart = self._journal.state, dict[str, float]()
        ended = [n for n, m in state.modules.items() if m.state == "finished" and n not in reports]
        found = self._rule.look(now_s, reports, ended)
        if state.phase not in ("starting", "running", "stalled") or self._journal.failing:
            return {}  # on a full disk the workers' reports stand still, too
        for stall in found:
            opened = _Open(now_s, self._rule.moves(stall.modules))
            entry = self._open.setdefault(stall.modules, opened)
            if entry.stall != stall:
                self._journal.event("run_stalled", module=stall.modules[0], reason=stall.message)
                if self._restarts:  # the two ends of a link take turns
                    name = stall.modules[entry.starts % len(stall.modules)]
                    restart[name] = self._rule.still_s(name)
                entry.starts += 1
            entry.stall = stall
        for modules, entry in list(self._open.items()):
            left_out = any(state.modules[name].state == "inactive" for name in modules)
            if left_out or self._rule.moves(modules) > entry.moves:
                del self._open[modules]
                after_s = round(now_s - entry.since_s, 1)
                self._journal.event("run_moves_again", module=modules[0], after_s=after_s)
        self._show()
        return restart

    def silent(self, seconds: float) -> list[str]:
        """Return modules whose workers have not reported for ``seconds``."""
        return self._rule.silent(seconds)

    def saves(self, name: str) -> bool:
        """Whether a worker saves its state, and makes progress with it."""
        return self._rule.saves(name)

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
