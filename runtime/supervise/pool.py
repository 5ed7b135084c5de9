"""The worker processes of one run; what their exits mean is decided by the supervisor.

It is one file because it is one class: the processes, and what is known of each.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from dni_runtime.errors import DniError
from dni_runtime.plan.plan import AUTO, LaunchPlan, WorkerPlan
from dni_runtime.run.cuts import forget, newest_cut
from dni_runtime.run.documents.reports import ENDED, Control, Order, Report
from dni_runtime.run.documents.state import process_birth, shell_status
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.processes import Process, Starter
from dni_runtime.spec.named import takes_part
from dni_runtime.supervise.journal import Journal, how_it_ended, remove_log

TICK_S = 0.2

STOP_TICK_S = 0.05
"""The same while all workers are stopping, and somebody waits for the last one."""

LEAVE_S = 15.0
"""Seconds after a worker's deadline for its checkpoint: Python, torch and a container must exit."""

LOGS = 20
"""Number of newest logs kept per module, besides its first one."""

REPORT_S = 5.0
"""Seconds until what a worker has written last must be visible here (nfs(5), "lookupcache")."""

_REMIND_S = 5.0
"""Seconds between two attempts to write what a worker is told."""

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

_log = logging.getLogger(__name__)


class WorkerPool:
    """Starts, stops, kills and restarts the workers of a plan.

    A worker is told what is wanted of it by a document (``reports.Control``), which it reads about
    twice a second, a head more often. A worker that cannot be told is killed when its time is over.
    """

    def __init__(
        self,
        run: RunDir,
        plan: LaunchPlan,
        starter: Starter,
        journal: Journal,
        *,
        clock: Callable[[], float],  # monotonic, in seconds
        sleep: Callable[[float], None],
    ) -> None:
        self.processes: dict[str, Process] = {}  # the running ones, by module
        self.due: dict[str, float] = {}  # times of the scheduled restarts
        self.killed: set[str] = set()  # by the pool
        self._run = run
        self._plan = plan
        self._starter = starter
        self._journal = journal
        self._modules = journal.state.modules
        self._clock = clock
        self._sleep = sleep
        # plan of each module's next start
        self.workers = {worker.module: worker for worker in plan.workers}
        self._shutdown: dict[str, float] = {}
        self._untold: dict[str, Order] = {}
        self._ended_s: dict[str, float] = {}
        self._plan_is_kept = True
        self._remind_at = 0.0

    def __bool__(self) -> bool:
        """Whether any worker runs or will be restarted."""
        return bool(self.processes or self.due)

    def start(self, name: str) -> None:
        """Start a module's worker; raises ``DniError`` if that fails."""
        worker, module = self.workers[name], self._modules[name]
        module.attempt, module.log = worker.attempt, worker.log
        module.exit_code = module.signal = None
        self._tell(name, "run")
        process = self._starter.start(worker)
        self.processes[name] = process
        module.state, module.pid = "starting", process.pid
        module.born = process_birth(process.pid)
        self._journal.event("worker_started", module=name, attempt=worker.attempt, pid=process.pid)
        self._journal.write()  # for a supervisor that takes over

    @property
    def replicas(self) -> dict[str, int]:
        """How many replicas each elastic module has in this start of the workers."""
        return next(iter(self.workers.values())).replicas

    def start_all(self, counts: Mapping[str, int]) -> None:
        """Start all workers, with these numbers of replicas; by default at the newest cut."""
        cut = int(self._plan.resume) if self._plan.resume.isdecimal() else 0
        if self._plan.resume == AUTO:
            cut = self._newest_cut(None)
            for name, worker in self.workers.items():
                self.workers[name] = worker.restarted(worker.attempt, resume=str(cut))
        names = self._to_start(cut, counts)
        self.keep_plan()
        self._journal.write()
        for name in names:
            self.start(name)

    def _to_start(self, cut: int, counts: Mapping[str, int]) -> list[str]:
        """Return who takes part when all start at a cut with these numbers of replicas."""
        names = list[str]()
        for name, worker in self.workers.items():
            self.workers[name] = replace(worker, replicas=dict(counts))
            if takes_part(name, counts):
                names.append(name)
            else:
                self._modules[name].state = "inactive"
                self.due.pop(name, None)
                forget(self._run, [name], lambda other: other > cut)
        return names

    def adopt(self) -> None:
        """Take over the workers that a former supervisor started, ended ones included.

        It may have been killed between its writing of the plan and of the state.
        """
        living = []
        for name, module in self._modules.items():
            worker = self.workers[name]
            if not takes_part(name, worker.replicas):
                module.state = "inactive"
                continue
            newest = worker.attempt == module.attempt
            if newest and module.state == "finished" and not module.exit_code:
                continue
            process = self._starter.adopt(worker, module)
            self.processes[name] = process
            if process.poll() is None:
                living.append(name)
        self._journal.event("run_adopted", modules=living)
        self._journal.write()

    def _ended(self, name: str) -> int:
        """Return the exit code of a worker by its last report; minus SIGKILL if it does not say."""
        report = Report.read(self._run.worker(name)).of(self._modules[name].attempt)
        if report.state == "finished":
            return 0
        return -signal.SIGKILL if report.exit_code is None else report.exit_code

    def keep_plan(self) -> None:
        """Record the current plan of each worker, for a supervisor that takes over."""
        plan = replace(self._plan, workers=tuple(self.workers.values()))
        self._plan_is_kept = self._journal.write_json(self._run.plan, plan.to_json())

    def start_due(self) -> dict[str, DniError]:
        """Start the modules that are due; return the errors of those that cannot be started.

        The plan is written first: a supervisor that takes over must know of the restart.
        """
        if self.due and not self._plan_is_kept:
            self.keep_plan()
        if not self._plan_is_kept:
            return {}
        ready = [name for name, due in self.due.items() if self._clock() >= due]
        failed = {}
        for name in ready:
            del self.due[name]
            try:
                self.start(name)
            except DniError as error:
                failed[name] = error
        return failed

    def restart(self, name: str, delay_s: float, reason: str) -> None:
        """Restart a worker that has ended, at its own newest state; the reason is for the event."""
        worker = self.workers[name]
        self._plan_restart(worker.restarted(worker.attempt + 1), delay_s, reason)
        self.keep_plan()

    def _plan_restart(self, plan: WorkerPlan, delay_s: float, reason: str) -> None:
        """Replace a worker that has ended by its next start; the caller keeps the plan."""
        name = plan.module
        worker, module = self.workers[name], self._modules[name]
        self.workers[name] = plan
        if worker.attempt >= LOGS + 1:
            remove_log(self._run.log(name, worker.attempt - LOGS + 1))
        self._forget(name)
        self.due[name] = self._clock() + delay_s
        module.state = "restarting"
        module.restarts += 1
        self._journal.event(
            "worker_restarting", module=name, attempt=plan.attempt, delay_s=delay_s, reason=reason
        )

    def _forget(self, name: str) -> None:
        """Forget what was to become of a worker that has ended."""
        self.killed.discard(name)
        self._shutdown.pop(name, None)
        self._untold.pop(name, None)

    def restart_all(
        self,
        delay_s: float,
        reason: str,
        *,
        below: int | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Kill all workers and restart them from the newest complete cut.

        ``below`` is a damaged cut: only earlier ones are used. ``counts`` are the new numbers of
        replicas; by default they stay.
        """
        self._starter.kill_all(self.processes)
        until_s = self._clock() + LEAVE_S
        while alive := [name for name, process in self.processes.items() if process.poll() is None]:
            if self._clock() >= until_s:  # the kernel waits for a disk or a driver
                _log.warning("killed, but still there: %s", ", ".join(alive))
                break
            self._sleep(TICK_S)
            self._journal.heartbeat()
        self.processes.clear()
        cut = self._newest_cut(below)
        # one number, by which the replicas of a head know what belongs to this start
        attempt = 1 + max(worker.attempt for worker in self.workers.values())
        for name in self._to_start(cut, self.replicas if counts is None else counts):
            plan = self.workers[name].restarted(attempt, resume=str(cut))
            self._plan_restart(plan, delay_s, reason)
        self.keep_plan()  # once, for all: it names each worker

    def may_fall_back(self, name: str) -> bool:
        """Whether a module may start at an older cut: the user has not asked for this one."""
        return self.workers[name].resume != self._plan.resume

    def fall_back(self, name: str) -> None:
        """Restart all modules at an older cut, because one module's part is damaged."""
        worker = self.workers[name]
        problem = Report.read(self._run.worker(name)).error
        problem = problem or how_it_ended(name, self._modules[name])
        self._journal.damaged(problem)
        # One that was restarted alone has read its own states, which may be of other cuts.
        began = worker.attempt == worker.first and worker.resume.isdecimal()
        below = int(worker.resume) if began else None
        self.restart_all(0.0, problem, below=below)

    def _newest_cut(self, below: int | None) -> int:
        """Choose one cut for all modules: on their own they might choose different ones."""
        cut, damaged = newest_cut(self._run, list(self.workers), below=below)
        for problem in damaged:
            self._journal.damaged(str(problem))
        return cut

    def replace(self, worker: WorkerPlan) -> None:
        """Start a module on another host from its next attempt on."""
        old = self.workers[worker.module]
        self.workers[worker.module] = worker
        self.keep_plan()
        # the old address may not be reachable from the new host
        self._run.endpoint(worker.module).unlink(missing_ok=True)
        if old.node != worker.node:
            moved = {"from": old.node, "to": worker.node}
            self._journal.event("worker_moved", module=worker.module, **moved)

    def overlap(self) -> None:
        """Let all workers share CPUs with others from their next attempts on."""
        if not all(worker.overlaps for worker in self.workers.values()):
            for name, worker in self.workers.items():
                self.workers[name] = replace(worker, overlaps=True)
            self.keep_plan()

    def give_up_restarts(self) -> None:
        """Cancel all restarts that are due."""
        for name in self.due:
            self._modules[name].state = "stopped"
        self.due.clear()

    def ask_to_leave(self, name: str) -> None:
        """Tell a worker to save its state and exit; it is killed if it takes too long."""
        if name not in self._shutdown:
            self._journal.event("restart_requested", module=name)
            self._shutdown[name] = self._clock() + self._plan.stop_grace_s + LEAVE_S
            self._tell(name, "restart")

    def has_left(self, name: str) -> bool:
        """Return whether an exited worker was told to exit; clear the request."""
        return self._shutdown.pop(name, None) is not None

    def kill_late(self, saves: Callable[[str], bool]) -> None:
        """Kill workers that did not exit in time; one that still ``saves`` something gets more."""
        now = self._clock()
        self._shutdown |= {
            name: max(kill_at, now + LEAVE_S)
            for name, kill_at in self._shutdown.items()
            if saves(name)
        }
        late = [name for name, kill_at in self._shutdown.items() if now >= kill_at]
        self.kill([name for name in late if name in self.processes], "it did not exit in time")

    def stop_all(self) -> None:
        """Tell all workers to exit after a checkpoint."""
        for name in self.processes:
            self._tell(name, "stop")

    def remind(self) -> None:
        """Write again what could not be written."""
        if self._untold and self._clock() >= self._remind_at:
            for name, order in list(self._untold.items()):
                self._tell(name, order)

    def _tell(self, name: str, order: Order) -> None:
        self._untold.pop(name, None)
        try:
            control = Control(attempt=self._modules[name].attempt, order=order)
            control.write(self._run.control(name))
        except OSError as error:  # the disk is full, or not available
            _log.warning("module %s cannot be told to %s: %s", name, order, error)
            self._untold[name] = order
            self._remind_at = self._clock() + _REMIND_S

    def kill(self, names: Iterable[str], reason: str) -> None:
        """Kill workers, each once."""
        fresh = [name for name in names if name not in self.killed]
        for name in fresh:
            self.killed.add(name)
            self._journal.event("worker_killed", module=name, reason=reason)
        if fresh:
            self._starter.kill_all({name: self.processes[name] for name in fresh})

    def kill_gone(self, modules: Iterable[str]) -> None:
        """Kill the local processes of workers that have exited on other hosts."""
        gone = self._starter.gone([name for name in modules if name in self.processes])
        self.kill(gone, "its step has ended, but its srun has not")

    def kill_all(self, reason: str) -> None:
        """Kill all workers and cancel all restarts."""
        self.due.clear()
        self.kill(self.processes, reason)

    def reap(self) -> list[str]:
        """Collect the workers that have exited: their modules, killed ones first."""
        ended: list[str] = []
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code in _KILLED:  # what it has said of its end comes before
                code = self._ended(name)
            if code is not None and not self._awaits_report(name, code):
                del self.processes[name]
                module = self._modules[name]
                module.exit_code, module.signal = shell_status(code)
                ended.append(name)
        # Killed ones first: their neighbours' errors are consequences.
        return sorted(ended, key=lambda name: self._modules[name].signal is None)

    def _awaits_report(self, name: str, code: int) -> bool:
        """Whether a worker has ended well, but its last report may not be visible here yet."""
        if code:
            return False
        if Report.read(self._run.worker(name)).of(self._modules[name].attempt).state in ENDED:
            self._ended_s.pop(name, None)
            return False
        since_s = self._ended_s.setdefault(name, self._clock())
        if self._clock() < since_s + REPORT_S:
            return True
        del self._ended_s[name]
        return False
