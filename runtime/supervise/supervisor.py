"""Supervision of one run's workers, from their start until the last one has exited.

It is one file because it is one loop; what it decides is in ``decisions.py``, and what it does to
workers in ``pool.py`` and ``scaling.py``.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dni_runtime.errors import (
    CheckpointError,
    DiskError,
    DivergedError,
    DniError,
    StoppedError,
    UnansweredError,
)
from dni_runtime.plan.plan import Backoff, LaunchPlan
from dni_runtime.run.cuts import NOT_OVER, document_file, is_over, remove_temporaries
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.requests import Stop
from dni_runtime.run.documents.state import COMING, ModuleState, RunState
from dni_runtime.run.lease import Lease, LeaseError
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.interrupts import catching_signals
from dni_runtime.schedulers.processes import LocalStarter, Starter
from dni_runtime.schedulers.runtime_files import prepare_runtime_files, remove_runtime_files
from dni_runtime.schedulers.slurm.nodes import JobNodes
from dni_runtime.spec.named import module_of
from dni_runtime.supervise.decisions import Action, Exit, conclusion, decide
from dni_runtime.supervise.journal import AGAIN, Journal, bound_log, how_it_ended
from dni_runtime.supervise.moving import Mover
from dni_runtime.supervise.pool import LEAVE_S, REPORT_S, STOP_TICK_S, TICK_S, WorkerPool
from dni_runtime.supervise.scaling import Scaler, lift_limits, wanted_replicas
from dni_runtime.supervise.stall import Watchdog

_REFRESH_S, _LOGS_S = 1.0, 60.0
_SILENT_S = 30.0  # without a report of a worker, which writes one every few seconds
_OF_OTHERS = (DiskError.exit_code, UnansweredError.exit_code)  # no fault of the module that says so
# In a broken chain, queued messages may still complete a checkpoint that has begun.
_BROKEN_GRACE_S = 5.0


class Supervisor:
    """Starts a plan's workers, watches them and keeps the run's state.

    A worker that dies is restarted according to the plan's ``restart``, from its own newest state,
    while its neighbours continue or wait. If a restart cannot help, or the limit is reached, all
    start with fewer replicas; if there are no more to leave out, the run ends: the other workers
    are stopped cleanly and keep their checkpoints. The first SIGINT, SIGTERM or SIGHUP (or
    ``stop.json``) stops all workers cleanly, a second one kills them. Workers of a lost host are
    restarted on other hosts; if these have no room, replicas are left out, and if none can be, the
    run stops and can be resumed.
    """

    def __init__(
        self,
        run: RunDir,
        plan: LaunchPlan,
        starter: Starter | None = None,  # None: of processes of this host
        *,
        hosts: JobNodes | None = None,  # of the workers, if a host can be lost
        lease: Lease | None = None,  # released at the end
        # of a run whose supervisor was killed; its running workers are taken over
        adopt: RunState | None = None,
        clock: Callable[[], float] = time.monotonic,  # monotonic, in seconds
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._plan = plan
        self._clock = clock
        self._signals: list[int] = []
        self._stop_reason: str | None = None
        self._asked_to_stop = False
        self._kill_at = self._kill_at_last = math.inf
        self._killed_by: int | None = None
        self._failed_code: int | None = None  # of the module that failed first
        self._no_room: str | None = None  # the newest end of a worker that a full disk has caused
        self._backoff = {worker.module: Backoff() for worker in plan.workers}
        self._reported: dict[tuple[str, str], Any] = {}
        self._refresh_at = self._logs_at = self._ask_at = 0.0
        self._adopts = adopt is not None
        new = RunState.begin(plan.backend, plan.workers[0].attempt, self._backoff)
        self.state = new if adopt is None else adopt.taken_over()
        self._lease = lease
        self._journal = Journal(run, self.state, clock, lease)
        self._watchdog = Watchdog(plan, self._journal)
        starter = starter or LocalStarter()
        self._pool = WorkerPool(run, plan, starter, self._journal, clock=clock, sleep=sleep)
        self._mover = Mover(hosts, plan, self._pool, self._journal, self._shrink)
        self._scaler = Scaler(run, plan.elastic, self._journal, plan.auto)
        self._sleep = sleep

    def run(self, observe: Callable[[RunState], None] | None = None) -> RunState:
        """Supervise until the last worker has ended; return the final state, with an exit code.

        ``observe`` gets the state first, then a few times a second, after each poll, and at the
        end. If a worker cannot be started at first, those already started are killed.
        """
        sockets, observe = Path(self._plan.sockets), observe or (lambda state: None)
        with catching_signals(self.interrupt):
            try:
                observe(self.state)
                self._start()
                while self._pool:
                    self._sleep(STOP_TICK_S if self._stopping else TICK_S)
                    self._look()
                    observe(self.state)
                with contextlib.suppress(OSError):
                    remove_temporaries(self._run, self.state.modules)
                remove_runtime_files(self._run, sockets)  # before the end is reported
                self._conclude()
                observe(self.state)
            except BaseException as error:
                self._abandon(error)
                if not isinstance(error, LeaseError):  # else the new owner needs them
                    remove_runtime_files(self._run, sockets)
                raise
            finally:
                if self._lease is not None:
                    self._lease.release()
        return self.state

    def interrupt(self, number: int) -> None:
        """Note a signal; safe in a signal handler."""
        self._signals.append(number)

    def _start(self) -> None:
        with contextlib.suppress(OSError):
            self.state.keep_room_for_end(self._run)
        if self._adopts:
            self._pool.adopt()
            if self.state.restart_reason is not None:
                self._stop_for_restart(self.state.restart_reason)
            return
        prepare_runtime_files(self._run, self._plan)
        self._journal.event("run_started", attempt=self.state.attempt, backend=self._plan.backend)
        if self._plan.elastic:
            lift_limits(self._run)  # what was lost may be there again
        self._pool.start_all(wanted_replicas(self._run, self._plan.elastic))

    def _look(self) -> None:
        self._journal.check()
        self._handle_signals()
        due = self._clock() >= self._refresh_at
        if due:
            self._refresh_at = self._clock() + _REFRESH_S
            self._refresh()
        if self._plan.elastic and self._stop_reason is None:
            before, replicas = self.state.scale, self._scaler.look()
            if due or replicas != before:
                self._scale(replicas)
        if self._clock() >= self._logs_at:
            self._logs_at = self._clock() + _LOGS_S
            for worker in self._pool.workers.values():
                bound_log(Path(worker.log))
        self._reap()
        self._restart_if_all_have_stopped()
        for name, error in self._pool.start_due().items():
            if self.state.modules[name].state != "inactive" and name not in self._pool.due:
                self._could_not_start(name, error)
        self._kill_late()
        self._pool.remind()
        self._journal.heartbeat()

    @property
    def _stopping(self) -> bool:
        """Whether all workers are to stop, for good or to be restarted together."""
        return self._stop_reason is not None or self.state.restart_reason is not None

    def _handle_signals(self) -> None:
        signals, self._signals = self._signals, []
        if signals:
            name = signal.Signals(signals[0]).name
            if not self._asked_to_stop:
                self._asked_to_stop = True
                self._stop(f"{name} received")
            else:
                self._killed_by = signals[0]
                self._pool.kill_all(f"second {name} received")
        request = Stop.peek(self._run.stop_request)
        if request is not None:
            self._asked_to_stop = True
            self._stop("'dnictl stop' was called", request.timeout_s)

    def _refresh(self) -> None:
        changed = False
        reports: dict[str, Report] = {}
        for name, module in self.state.modules.items():
            if name not in self._pool.processes:
                continue
            report = reports[name] = Report.read(self._run.worker(name)).of(module.attempt)
            if not report:
                continue
            self._record_findings(name, report)
            if report.state != module.state:
                module.state = report.state
                changed = True
            runs = module.state == "running"
            if runs and self._backoff[name].runs(module.attempt, self._clock()):
                self._journal.event("worker_running", module=name, attempt=module.attempt)
                self._no_room = None
        if self.state.phase == "starting" and all(
            module.state in ("running", "finished", "inactive")
            for module in self.state.modules.values()
        ):
            self.state.phase = "running"
            self._journal.event("run_running")
        self._handle_restart_requests()
        if changed:
            self._journal.write()
        for name, still_s in self._watchdog.look(self._clock(), reports).items():
            self._backoff[name].stood_still(still_s)
            self._pool.kill([name], f"on_stall: restart, after {still_s:.0f} s without progress")
        if self._clock() >= self._ask_at and (silent := self._watchdog.rule.silent(_SILENT_S)):
            self._ask_at = self._clock() + _SILENT_S
            self._pool.kill_gone(silent)

    def _record_findings(self, name: str, report: Report) -> None:
        """Record a worker's new findings as events."""
        diverged, warning = report.diverged, report.warning
        if self._reported.get((name, "diverged")) != diverged:
            self._reported[name, "diverged"] = diverged
            if diverged is not None:
                self._journal.event("worker_diverged", module=name, **diverged.to_dict())
        if self._reported.get((name, "warning")) != warning:
            self._reported[name, "warning"] = warning
            if warning is not None:
                self._journal.event("worker_warning", module=name, warning=warning)

    def _handle_restart_requests(self) -> None:
        """Handle requests to restart modules (``dnictl restart``)."""
        with contextlib.suppress(OSError):
            for name in self._run.wanted_restarts():
                self._run.restart_request(name).unlink(missing_ok=True)
                if name in self._pool.processes and not self._stopping:
                    self._pool.ask_to_leave(name)

    def _kill_late(self) -> None:
        """Kill workers that do not exit in time; who still saves something gets more."""
        if any(map(self._watchdog.rule.saves, self._pool.processes)):
            self._kill_at = max(self._kill_at, self._clock() + LEAVE_S)
        if self._clock() >= min(self._kill_at, self._kill_at_last):
            self._pool.kill_all("it did not exit in time")
        self._pool.kill_late(self._watchdog.rule.saves)

    def _reap(self) -> None:
        ended = self._pool.reap()
        torn = [name for name in ended if not self._ended_as_told(name)]
        why = self._mover.look(torn, stopping=self._stop_reason is not None)
        if why is not None:
            self._stop(why, broken=True)
        for name in ended:
            self._judge(name, self.state.modules[name])
        if ended:
            self._journal.write()

    def _judge(self, name: str, module: ModuleState) -> None:
        """Record the exit of one worker, and do what ``decide`` says."""
        if module.state == "inactive":  # left out since
            return
        restarting = self.state.restart_reason is not None
        stopping, pool = self._stopping, self._pool
        node, code = self._mover.lost.pop(name, None), module.exit_code
        assert code is not None
        report = Report.read(self._run.worker(name)).of(module.attempt)
        exited = Exit(
            code,
            finished=self._complete(name),
            # one that dies before its first report would do so again
            reported=bool(module.signal or not code or self._run.worker(name).exists()),
            lost=node is not None,
            killed=name in pool.killed,
            asked=pool.has_left(name),
            torn=self._plan.restart.scope == "chain" and not self._left_at_cut(name, code, report),
            due=name in pool.due,
            older_cut=pool.may_fall_back(name),
            may_restart=self._backoff[name].allows(self._plan.restart, code, self._clock()),
            repeated=code == DniError.exit_code
            and self._backoff[name].repeats(report.error, report.id),
        )
        module.state = exited.ending(stopping=stopping)
        self._journal.event(
            "worker_ended",
            module=name,
            attempt=module.attempt,
            state=module.state,
            exit_code=module.exit_code,
            signal=module.signal,
        )
        self._record_findings(name, report)
        how = how_it_ended(name, module, report.error) + (AGAIN if exited.repeated else "")
        if code == DiskError.exit_code:
            self._no_room = how
        if restarting and self._stop_reason is None:
            if module.state == "failed":  # the others cannot get to the cut any more
                self._kill_at = min(self._kill_at, self._clock() + _BROKEN_GRACE_S)
            return
        match decide(exited, stopping=stopping):
            case Action.NOTHING if exited.due:
                module.state = "restarting"
            case Action.MOVE:
                self._backoff[name] = Backoff()
                self._restart(name, 0.0, f"node {node} is lost")
            case Action.RESTART_ALL:
                self._restart_all(0.0, "'dnictl restart' was called")
            case Action.RESTART_NOW:
                pool.restart(name, 0.0, "'dnictl restart' was called")
            case Action.FALL_BACK:
                pool.fall_back(name)
                self._mover.lost.clear()
            case Action.RESTART:
                self._restart_later(name, code, how_it_ended(name, module))
            case Action.FAIL:
                self._fail(name, code, how, alike=exited.repeated or not exited.reported)
            case Action.STOP:
                self._stop(how)

    def _could_not_start(self, name: str, error: DniError) -> None:
        """Retry later: the disk may be full, or the host's limit of processes reached."""
        module = self.state.modules[name]
        module.state, module.exit_code = "failed", error.exit_code
        code = DniError.exit_code
        if self._backoff[name].allows(self._plan.restart, code, self._clock()):
            self._restart_later(name, code, error.message)
        else:
            self._fail(name, code, error.message)

    def _fail(self, name: str, exit_code: int, how: str, *, alike: bool = False) -> None:
        """Go on with one replica of its module fewer, if others would not fail alike; else stop."""
        module, now = module_of(name), self._pool.replicas
        may = self._stop_reason is None and self._plan.restart.policy != "never"
        # who has waited for another one in vain is not the one that is broken
        alike = alike or exit_code in (DivergedError.exit_code, UnansweredError.exit_code)
        if may and not alike and now.get(module, 1) > 1:
            self._mover.take_place_of_last(name)
            self._backoff[name] = Backoff()
            return self._shrink({**now, module: now[module] - 1}, how)
        if self.state.failed is None:
            self._failed_code = exit_code
            self.state.failed, self.state.error = name, how
        self._stop(how, broken=True)

    def _restart_later(self, name: str, exit_code: int, reason: str) -> None:
        delay_s = self._backoff[name].delay_s(self._plan.restart, exit_code, self._clock())
        assert delay_s is not None  # the rules allow it
        self._restart(name, delay_s, reason)

    def _restart(self, name: str, delay_s: float, reason: str) -> None:
        if self._plan.restart.scope == "module":
            self._pool.restart(name, delay_s, reason)
        else:  # its neighbours wait for gradients of batches that it has lost
            self._restart_all(delay_s, reason)

    def _restart_all(
        self, delay_s: float, reason: str, counts: Mapping[str, int] | None = None
    ) -> None:
        before = self._pool.replicas
        self._mover.lost.clear()
        self._pool.restart_all(delay_s, reason, counts=counts)
        self.state.restart_reason, self._kill_at = None, math.inf
        if self._pool.replicas != before:
            self._journal.event("scaled", replicas=self._pool.replicas)

    def _shrink(self, counts: Mapping[str, int], reason: str) -> None:
        """Restart all workers, with fewer replicas until somebody asks for more."""
        before = self._pool.replicas
        fewer = {module: count for module, count in counts.items() if count < before[module]}
        for module in fewer:
            self._journal.event("replica_lost", module=module, reason=reason)
        with contextlib.suppress(OSError):  # a full disk: as many are tried when it has room
            self._scaler.limit(fewer)
        self._restart_all(0.0, reason, counts)

    def _scale(self, replicas: Mapping[str, int]) -> None:
        """Stop all workers at a cut if other numbers of replicas are wanted, and there is room."""
        states = {module.state for module in self.state.modules.values()}
        if self.state.restart_reason is not None or states - {"running", "inactive"}:
            return
        if (
            replicas != self._pool.replicas
            and self._mover.room_for(replicas) != self._pool.replicas
        ):
            self._stop_for_restart("other numbers of replicas are wanted")

    def _stop_for_restart(self, reason: str) -> None:
        self.state.restart_reason = reason
        self._journal.write()  # first: a supervisor that takes over knows, too
        self._kill_at = self._clock() + self._plan.stop_grace_s + LEAVE_S
        self._pool.stop_all()

    def _restart_if_all_have_stopped(self) -> None:
        reason = self.state.restart_reason
        if reason is None or self._stop_reason is not None or self._pool.processes:
            return
        if all(module.state in ("finished", "inactive") for module in self.state.modules.values()):
            self.state.restart_reason = None  # the run was over before
            return
        self._restart_all(0.0, reason, self._mover.room_for(self._scaler.look()))

    def _ended_as_told(self, name: str) -> bool:
        """Whether a worker's exit says nothing of its host, which may be lost otherwise.

        While all stop, that is asked once: when the last one has exited.
        """
        stopped = self.state.modules[name].exit_code == StoppedError.exit_code
        others = self._stopping and bool(self._pool.processes)
        return (stopped and others) or self._complete(name)

    def _left_at_cut(self, name: str, code: int, report: Report) -> bool:
        """Whether a worker has stopped at a checkpoint: then nothing is lost with it."""
        part = self._run.checkpoint(report.id, name)
        return code == StoppedError.exit_code and document_file(part).exists()

    def _complete(self, name: str) -> bool:
        """Whether a worker that has exited reported that it had finished."""
        module, report = self.state.modules[name], Report.read(self._run.worker(name))
        return module.exit_code == 0 and report.of(module.attempt).state == "finished"

    def _stop(self, reason: str, grace_s: float | None = None, *, broken: bool = False) -> None:
        """Stop all workers; soon if the chain is broken: it cannot complete a new checkpoint."""
        first = self._stop_reason is None
        on_their_way = (m.restarts and m.state in COMING for m in self.state.modules.values())
        if broken or (first and (self._pool.due or any(on_their_way))):
            patience_s = _BROKEN_GRACE_S
        elif first or grace_s is not None:
            patience_s = (self._plan.stop_grace_s if grace_s is None else grace_s) + LEAVE_S
        else:
            return
        self._kill_at = min(self._kill_at, self._clock() + patience_s)
        if grace_s is not None:  # somebody's own limit
            self._kill_at_last = min(self._kill_at_last, self._clock() + patience_s)
        if not first:
            return
        self._pool.give_up_restarts()
        self._stop_reason = reason
        self.state.phase = "stopping"
        self._journal.event("run_stopping", reason=reason)
        self._journal.write()
        self._pool.stop_all()

    def _blame_disk(self, name: str) -> None:
        """Say what is wrong with the disk, if that may have ended a worker, or its neighbour.

        A worker that says nothing may have had no room for it.
        """
        report = Report.read(self._run.worker(name)).of(self.state.modules[name].attempt)
        mute = not report.error or self._failed_code in _OF_OTHERS
        if mute and (trouble := self._journal.trouble or self._no_room):
            self._failed_code = CheckpointError.exit_code
            if trouble not in (how := self.state.error or ""):
                self.state.error = f"{how}; {trouble}"

    def _conclude(self) -> None:
        if self.state.failed is not None:
            self._blame_disk(self.state.failed)
        self.state.phase, self.state.exit_code = conclusion(
            self._failed_code,
            [module.state for module in self.state.modules.values() if module.state != "inactive"],
            self._killed_by,
            whole=self._is_whole,
        )
        if self.state.phase == "finished":
            self.state.error = None
        elif self.state.phase == "stopped":
            self.state.error = self._stop_reason or NOT_OVER
        self.state.ended = time.time()
        self._journal.event("run_ended", state=self.state.phase, exit_code=self.state.exit_code)
        self._journal.write()

    def _is_whole(self) -> bool:
        """Whether the checkpoint at the end of the stream is complete; it may show late."""
        until_s = self._clock() + REPORT_S
        while not is_over(self._run, list(self.state.modules)):
            if self._clock() >= until_s:
                return False
            self._sleep(TICK_S)
        return True

    def _abandon(self, error: BaseException) -> None:
        """Kill all workers after an error of the supervisor itself."""
        self._pool.kill_all("the supervisor failed")
        self.state.phase = "failed"
        kind = CheckpointError if isinstance(error, OSError) else DniError
        self.state.exit_code = error.exit_code if isinstance(error, DniError) else kind.exit_code
        self.state.error = str(error) or type(error).__name__
        self.state.ended = time.time()
        self._journal.event("run_ended", state="failed", error=self.state.error)
        self._journal.write()
