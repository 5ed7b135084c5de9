"""Supervision of one run's workers, from their start until the last one has exited."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dni_runtime.cuts import remove_temporaries
from dni_runtime.errors import DamagedError, DivergedError, DniError, StoppedError
from dni_runtime.launch.interrupts import catching_signals
from dni_runtime.launch.journal import Journal, bound_log, how_it_ended
from dni_runtime.launch.lease import Lease, LeaseError
from dni_runtime.launch.plan import LaunchPlan
from dni_runtime.launch.pool import LEAVE_S, TICK_S, WorkerPool
from dni_runtime.launch.processes import Hosts, LocalStarter, Starter
from dni_runtime.launch.restarts import Backoff
from dni_runtime.launch.runtime_files import prepare_runtime_files, remove_runtime_files
from dni_runtime.launch.state import ModuleState, RunState
from dni_runtime.launch.watchdog import Watchdog
from dni_runtime.rundir import COMING, RunDir, peek_json

_REFRESH_S, _LOGS_S = 1.0, 60.0
_SILENT_S = 30.0  # without a report of a worker, which writes one every few seconds
# In a broken chain, queued messages may still complete a checkpoint that has begun.
_BROKEN_GRACE_S = 5.0


class Supervisor:
    """Starts a plan's workers, watches them and keeps the run's state.

    A worker that dies is restarted according to the plan's ``restart``, from its own newest state,
    while its neighbours continue or wait. If a restart cannot help, or the limit is reached, the
    run ends: the other workers are stopped cleanly and keep their checkpoints. The first SIGINT,
    SIGTERM or SIGHUP (or ``stop.json``) stops all workers cleanly, a second one kills them.
    Workers of a lost host are restarted on other hosts; if these have no room, the run stops and
    can be resumed.

    Args:
        run: The run directory.
        plan: The workers to start.
        starter: Starts them; by default on this host.
        hosts: The hosts of the workers, if a host can be lost.
        lease: The ownership of the run; released at the end.
        adopt: State of a run whose supervisor was killed; its running workers are taken over.
        clock: Monotonic time in seconds.
        sleep: Sleeps for the given seconds.
    """

    def __init__(
        self,
        run: RunDir,
        plan: LaunchPlan,
        starter: Starter | None = None,
        *,
        hosts: Hosts | None = None,
        lease: Lease | None = None,
        adopt: RunState | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._plan = plan
        self._clock = clock
        self._signals: list[int] = []
        self._stop_reason: str | None = None
        self._asked_to_stop = False
        self._linger_until: float | None = None
        self._hurry_at: float | None = None
        self._kill_at: float | None = None
        self._killed_by: int | None = None
        self._backoff = {worker.module: Backoff() for worker in plan.workers}
        self._hosts = hosts
        self._lost: dict[str, str] = {}
        self._told: dict[tuple[str, str], Any] = {}
        self._refresh_at = self._logs_at = self._ask_at = 0.0
        self._adopts = adopt is not None
        new = RunState.begin(plan.backend, plan.workers[0].attempt, self._backoff)
        self.state = new if adopt is None else adopt.taken_over()
        self._lease = lease
        self._journal = Journal(run, self.state, clock, lease)
        self._watchdog = Watchdog(plan, self._journal)
        starter = starter or LocalStarter()
        self._pool = WorkerPool(run, plan, starter, self._journal, clock=clock, sleep=sleep)
        self._sleep = sleep

    def run(self, observe: Callable[[RunState], None] | None = None) -> RunState:
        """Supervise until the last worker has ended.

        Args:
            observe: Called after each poll of the workers, a few times a second, and at the end.

        Returns:
            The final state: ``finished``, ``stopped`` or ``failed``, with an exit code.

        Raises:
            DniError: A worker cannot be started; those already started have been killed.
        """
        sockets = Path(self._plan.sockets)
        with catching_signals(self.interrupt):
            try:
                self._start()
                while self._pool:
                    self._sleep(TICK_S)
                    self._look()
                    if observe is not None:
                        observe(self.state)
                with contextlib.suppress(OSError):
                    remove_temporaries(self._run, self.state.modules)
                remove_runtime_files(self._run, sockets)  # before the end is reported
                self._conclude()
                if observe is not None:
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
        if self._adopts:
            return self._pool.adopt()
        prepare_runtime_files(self._run, self._plan)
        self._journal.event("run_started", attempt=self.state.attempt, backend=self._plan.backend)
        self._pool.start_all()

    def _look(self) -> None:
        self._journal.check()
        self._obey()
        if self._clock() >= self._refresh_at:
            self._refresh_at = self._clock() + _REFRESH_S
            self._refresh()
        if self._clock() >= self._logs_at:
            self._logs_at = self._clock() + _LOGS_S
            for worker in self._pool.workers.values():
                bound_log(Path(worker.log))
        self._reap()
        for name, error in self._pool.start_due().items():
            self._could_not_start(name, error)
        if self._linger_until is not None and self._clock() >= self._linger_until:
            self._stop("the tail has finished, other modules have not")
        if self._hurry_at is not None and self._clock() >= self._hurry_at:
            self._hurry_at = None
            self._pool.hurry_all()
        if self._kill_at is not None and self._clock() >= self._kill_at:
            self._pool.kill_all("it did not exit in time")
        self._pool.see_off()
        self._pool.remind()
        self._journal.heartbeat()

    def _obey(self) -> None:
        signals, self._signals = self._signals, []
        if signals:
            name = signal.Signals(signals[0]).name
            if not self._asked_to_stop:
                self._asked_to_stop = True
                self._stop(f"{name} received")
            else:
                self._killed_by = signals[0]
                self._pool.kill_all(f"second {name} received")
        request = peek_json(self._run.stop_request)
        if request:
            self._asked_to_stop = True
            self._stop("'dnictl stop' was called", request.get("timeout_s"))

    def _refresh(self) -> None:
        changed = False
        reports: dict[str, dict[str, Any]] = {}
        for name, module in self.state.modules.items():
            if name not in self._pool.processes:
                continue
            report = peek_json(self._run.worker(name))
            reports[name] = report if report.get("attempt") == module.attempt else {}
            if not reports[name]:
                continue
            self._tell_of(name, report)
            if report.get("state") != module.state:
                module.state = report["state"]
                changed = True
            backoff = self._backoff[name]
            if module.state == "running" and backoff.running_since_s is None:
                backoff.running_since_s = self._clock()
                self._journal.event("worker_running", module=name, attempt=module.attempt)
        if self.state.phase == "starting" and all(
            module.state in ("running", "finished") for module in self.state.modules.values()
        ):
            self.state.phase = "running"
            self._journal.event("run_running")
        self._heed_requests()
        if changed:
            self._journal.write()
        for name, still_s in self._watchdog.look(self._clock(), reports).items():
            self._backoff[name].stood_still(still_s)
            self._pool.kill([name], f"on_stall: restart, after {still_s:.0f} s without progress")
        if self._clock() >= self._ask_at and (silent := self._watchdog.silent(_SILENT_S)):
            self._ask_at = self._clock() + _SILENT_S
            self._pool.kill_gone(silent)

    def _tell_of(self, name: str, report: Mapping[str, Any]) -> None:
        """Record a worker's new findings as events."""
        diverged, warning = report.get("diverged"), report.get("warning")
        if self._told.get((name, "diverged")) != diverged:
            self._told[name, "diverged"] = diverged
            if diverged is not None:
                self._journal.event("worker_diverged", module=name, **diverged)
        if self._told.get((name, "warning")) != warning:
            self._told[name, "warning"] = warning
            if warning is not None:
                self._journal.event("worker_warning", module=name, warning=warning)

    def _heed_requests(self) -> None:
        """Handle requests to restart modules (``dnictl restart``)."""
        with contextlib.suppress(OSError):
            for name in self._run.wanted_restarts():
                self._run.restart_request(name).unlink(missing_ok=True)
                if name in self._pool.processes and self._stop_reason is None:
                    self._pool.ask_to_leave(name)

    def _reap(self) -> None:
        ended = self._pool.reap()
        if self._hosts is not None:
            self._mind_hosts(self._hosts, [name for name in ended if not self._complete(name)])
        for name in ended:
            self._judge(name, self.state.modules[name])
        if ended:
            self._journal.write()

    def _judge(self, name: str, module: ModuleState) -> None:
        """Decide what the exit of one worker means for the run."""
        told = self._stop_reason is not None
        # SIGTERM kills a worker that is still importing torch and has no handler yet.
        driven = name in self._pool.killed or name in self._pool.hurried
        obeyed = told and (driven or module.exit_code in (0, 128 + signal.SIGTERM))
        asked = self._pool.has_left(name) and not told
        lost = self._lost.pop(name, None)
        if lost is not None:  # however its process ended
            module.state = "stopped" if told else "failed"
        elif self._complete(name):
            module.state = "finished"
        elif module.exit_code == StoppedError.exit_code or obeyed:
            module.state = "stopped"
        else:
            module.state = "failed"
        self._journal.event(
            "worker_ended",
            module=name,
            attempt=module.attempt,
            state=module.state,
            exit_code=module.exit_code,
            signal=module.signal,
        )
        self._tell_of(name, report := peek_json(self._run.worker(name)))
        how = how_it_ended(name, module, report.get("error"))
        if name in self._pool.due:  # the whole chain is restarted
            module.state = "restarting"
        elif lost is not None and not told:
            self._linger_until = None
            self._backoff[name] = Backoff()
            self._start_again(name, 0.0, f"node {lost} is lost")
        elif asked and module.state != "finished":
            self._pool.start_again(name, 0.0, "'dnictl restart' was called")
        elif module.exit_code == DamagedError.exit_code and not told and self._pool.fall_back(name):
            self._lost.clear()
        elif module.state == "failed" and not told and self._may_start_again(name, module):
            pass
        elif module.state == "failed":
            if self.state.failed is None:
                self.state.failed, self.state.error = name, how
            self._stop(how, broken=True)
        elif module.state == "stopped":
            self._stop(how)
        elif name == self._plan.workers[-1].module and self._pool:
            # The tail has seen the end of the stream: the others have nothing left to do.
            self._linger_until = self._clock() + self._plan.stop_grace_s

    def _may_start_again(self, name: str, module: ModuleState) -> bool:
        """Restart a worker that has died; return False if that cannot help."""
        plan, backoff = self._plan.restart, self._backoff[name]
        assert module.exit_code is not None
        if module.signal is None and module.exit_code and not self._run.worker(name).exists():
            return False  # it died before its first report, as the next one would
        delay_s = backoff.delay_s(plan, module.exit_code, self._clock())
        if delay_s is None:
            return False
        self._linger_until = None
        self._start_again(name, delay_s, how_it_ended(name, module))
        return True

    def _could_not_start(self, name: str, error: DniError) -> None:
        """Retry later: the disk may be full, or the host's limit of processes reached."""
        module = self.state.modules[name]
        module.state, module.exit_code = "failed", error.exit_code
        delay_s = self._backoff[name].delay_s(self._plan.restart, DniError.exit_code, self._clock())
        if delay_s is not None:
            self._start_again(name, delay_s, error.message)
            return
        self.state.failed, self.state.error = name, error.message
        self._stop(error.message, broken=True)

    def _start_again(self, name: str, delay_s: float, reason: str) -> None:
        if self._plan.restart.scope == "module":
            self._pool.start_again(name, delay_s, reason)
        else:  # its neighbours wait for gradients of batches that it has lost
            self._lost.clear()
            self._pool.start_all_again(delay_s, reason)

    def _complete(self, name: str) -> bool:
        """Whether a worker that has exited reported that it had finished."""
        module, report = self.state.modules[name], peek_json(self._run.worker(name))
        said = (report.get("attempt"), report.get("state"))
        return module.exit_code == 0 and said == (module.attempt, "finished")

    def _mind_hosts(self, hosts: Hosts, ended: Sequence[str]) -> None:
        """Find other hosts for the modules of lost hosts.

        Args:
            hosts: The hosts of the workers.
            ended: Modules whose workers have just exited without having finished.
        """
        here = {*self._pool.processes, *self._pool.due, *ended}
        at: dict[str, list[str]] = {}
        for name in self._pool.workers:
            node = self._pool.workers[name].node
            if name in here and name not in self._lost and node is not None:
                at.setdefault(node, []).append(name)
        gone = hosts.lost(at, at_once=bool(ended))
        if not gone:
            return
        names = [name for node in gone for name in at[node]]
        for node in gone:
            self._journal.event("node_lost", node=node, modules=at[node])
            self._lost |= {name: node for name in at[node] if name not in self._pool.due}
        where = f"node{'s'[: len(gone) - 1]} {', '.join(gone)} lost"
        if self._stop_reason is None:
            found = None
            if self._plan.restart.policy != "never":
                found = hosts.move(list(self._pool.workers.values()), names)
            if found is None:
                self._stop(f"{where}: no room for {', '.join(names)} elsewhere", broken=True)
            for worker in found or ():
                self._pool.replace(worker)
        self._pool.kill([name for name in names if name in self._pool.processes], where)

    def _stop(self, reason: str, grace_s: float | None = None, *, broken: bool = False) -> None:
        """Stop all workers; soon if the chain is broken: it cannot complete a new checkpoint."""
        if broken:
            self._hurry_at = self._clock() + _BROKEN_GRACE_S
        if self._stop_reason is not None:
            if grace_s is not None and self._kill_at is not None:  # a shorter grace
                self._kill_at = min(self._kill_at, self._clock() + grace_s + LEAVE_S)
            return
        on_their_way = (m.restarts and m.state in COMING for m in self.state.modules.values())
        if self._pool.due or any(on_their_way):
            self._hurry_at = self._clock() + _BROKEN_GRACE_S
        self._pool.give_up_restarts()
        self._stop_reason = reason
        self.state.phase = "stopping"
        self._journal.event("run_stopping", reason=reason)
        self._journal.write()
        grace_s = self._plan.stop_grace_s if grace_s is None else grace_s
        self._kill_at = self._clock() + grace_s + LEAVE_S
        self._pool.stop_all()

    def _conclude(self) -> None:
        tail = self.state.modules[self._plan.workers[-1].module]
        if self.state.failed is not None:
            code = self.state.modules[self.state.failed].exit_code
            own = code if code == DivergedError.exit_code else DniError.exit_code
            self.state.phase, self.state.exit_code = "failed", own
        elif tail.state == "finished":
            self.state.phase, self.state.exit_code = "finished", 0
            self.state.error = None
        else:
            self.state.phase = "stopped"
            by = self._killed_by
            self.state.exit_code = StoppedError.exit_code if by is None else 128 + by
            self.state.error = self._stop_reason
        self.state.ended = time.time()
        self._journal.event("run_ended", state=self.state.phase, exit_code=self.state.exit_code)
        self._journal.write()

    def _abandon(self, error: BaseException) -> None:
        """Kill all workers after an error of the supervisor itself."""
        self._pool.kill_all("the supervisor failed")
        self.state.phase = "failed"
        self.state.exit_code = error.exit_code if isinstance(error, DniError) else 70
        self.state.error = str(error) or type(error).__name__
        self.state.ended = time.time()
        self._journal.event("run_ended", state="failed", error=self.state.error)
        self._journal.write()
