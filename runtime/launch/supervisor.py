"""Watches the workers of one run from their start to the end of the last one."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from dni_runtime.errors import DniError, StoppedError
from dni_runtime.launch.plan import OWN, LaunchPlan, WorkerPlan
from dni_runtime.launch.processes import LocalStarter, Process, Starter
from dni_runtime.launch.restarts import Patience
from dni_runtime.launch.state import (
    HEARTBEAT_S,
    ModuleState,
    RunState,
    process_birth,
    shell_status,
)
from dni_runtime.rundir import RunDir, append_line, read_json, socket_folder

TICK_S = 0.2
_REFRESH_S = 1.0
# Beyond a worker's own deadline for its checkpoint: python, torch and a container have to go down.
_LEAVE_S = 15.0
# In a broken chain a checkpoint that is under way may still be completed by what is in the queues.
_BROKEN_GRACE_S = 5.0
_COMING = ("restarting", "starting", "connecting")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger(__name__)


class Supervisor:
    """Starts a plan's workers, watches them and keeps the run's state.

    A worker that dies is started again as the plan's ``restart`` says, from its own newest state,
    while its neighbours go on or wait for it. Where that cannot help, or has been tried too often,
    the run ends: the others are told to stop, so that they keep their checkpoints. The first
    SIGINT, SIGTERM or SIGHUP (or ``stop.json``) stops all workers cleanly, a second one kills them.

    Args:
        run: The run directory.
        plan: What to start.
        starter: How to start it.
        clock: Seconds that only go forward.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        run: RunDir,
        plan: LaunchPlan,
        starter: Starter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._plan = plan
        self._starter = starter or LocalStarter()
        self._clock = clock
        self._sleep = sleep
        self._processes: dict[str, Process] = {}
        self._signals: list[int] = []
        self._stop_reason: str | None = None
        self._asked_to_stop = False
        self._linger_until: float | None = None
        self._hurry_at: float | None = None
        self._kill_at: float | None = None
        self._killed_by: int | None = None
        self._killed: set[str] = set()
        self._workers = {worker.module: worker for worker in plan.workers}
        self._patience = {worker.module: Patience() for worker in plan.workers}
        self._due: dict[str, float] = {}
        self._leaving: dict[str, float] = {}
        self._warnings: dict[str, str] = {}
        self._complained = False
        self._refresh_at = 0.0
        self._written_at = 0.0
        attempt = plan.workers[0].attempt
        self.state = RunState.begin(
            plan.backend, attempt, [worker.module for worker in plan.workers]
        )

    def run(self, observe: Callable[[RunState], None] | None = None) -> RunState:
        """Supervise until the last worker has ended.

        Args:
            observe: Called after each look at the workers, a few times a second, and at the end.

        Returns:
            The final state: ``finished``, ``stopped`` or ``failed``, with an exit code.

        Raises:
            DniError: A worker cannot be started. Those that were, have been ended.
        """
        with self._catching_signals():
            try:
                self._start()
                while self._processes or self._due:
                    self._sleep(TICK_S)
                    self._look()
                    if observe is not None:
                        observe(self.state)
                remove_traces(
                    self._run, Path(self._plan.sockets)
                )  # before anybody hears of the end
                self._conclude()
                if observe is not None:
                    observe(self.state)
            except BaseException as error:
                self._abandon(error)
                remove_traces(self._run, Path(self._plan.sockets))
                raise
        return self.state

    def interrupt(self, number: int) -> None:
        """Note a signal; safe in a signal handler."""
        self._signals.append(number)

    # --- starting ------------------------------------------------------------------------------

    def _start(self) -> None:
        self._run.create()
        self._run.stop_request.unlink(missing_ok=True)
        socket_folder(self._run.root, Path(self._plan.sockets))
        if self._plan.keys:
            self._make_keys()
        for worker in self._plan.workers:  # what an earlier attempt left
            self._run.endpoint(worker.module).unlink(missing_ok=True)
            self._run.worker(worker.module).unlink(missing_ok=True)
            self._run.restart_request(worker.module).unlink(missing_ok=True)
        self._event("run_started", attempt=self.state.attempt, backend=self._plan.backend)
        self._write()
        for worker in self._plan.workers:
            self._start_worker(worker)
        self._write()

    def _start_worker(self, worker: WorkerPlan) -> None:
        module = self.state.modules[worker.module]
        module.attempt, module.log = worker.attempt, worker.log
        module.exit_code = module.signal = None
        process = self._starter.start(worker)
        self._processes[worker.module] = process
        module.state, module.pid = "starting", process.pid
        module.born = process_birth(process.pid)
        self._event("worker_started", module=worker.module, attempt=worker.attempt, pid=process.pid)

    # --- watching ------------------------------------------------------------------------------

    def _look(self) -> None:
        self._obey()
        if self._clock() >= self._refresh_at:
            self._refresh_at = self._clock() + _REFRESH_S
            self._refresh()
        self._reap()
        self._start_due()
        if self._linger_until is not None and self._clock() >= self._linger_until:
            self._stop("the tail has finished, others have not")
        if self._hurry_at is not None and self._clock() >= self._hurry_at:
            self._hurry_at = None
            for process in self._processes.values():
                process.send(signal.SIGTERM)
        if self._kill_at is not None and self._clock() >= self._kill_at:
            self._kill("it did not leave in time")
        for name, kill_at in self._leaving.items():
            if self._clock() >= kill_at and name in self._processes and name not in self._killed:
                self._kill_one(name, "it did not leave in time")
        if self._clock() - self._written_at >= HEARTBEAT_S:
            self._write()

    def _obey(self) -> None:
        signals, self._signals = self._signals, []
        if signals:
            name = signal.Signals(signals[0]).name
            if not self._asked_to_stop:
                self._asked_to_stop = True
                self._stop(f"{name} received")
            else:
                self._killed_by = signals[0]
                self._kill(f"second {name} received")
        request = read_json(self._run.stop_request) if self._run.stop_request.exists() else None
        if request:
            self._asked_to_stop = True
            self._stop("'dnictl stop' was called", request.get("timeout_s"))
            if request.get("kill"):
                self._kill("'dnictl stop' ran out of patience")

    def _refresh(self) -> None:
        changed = False
        for name, module in self.state.modules.items():
            if name not in self._processes:
                continue
            report = read_json(self._run.worker(name)) or {}
            if report.get("attempt") != module.attempt:
                continue
            self._note_warning(name, report.get("warning"))
            if report.get("state") != module.state:
                module.state = report["state"]
                changed = True
            patience = self._patience[name]
            if module.state == "running" and patience.running_since_s is None:
                patience.running_since_s = self._clock()
                self._event("worker_running", module=name, attempt=module.attempt)
        if self.state.phase == "starting" and all(
            module.state in ("running", "finished") for module in self.state.modules.values()
        ):
            self.state.phase = "running"
            self._event("run_running")
        self._heed_requests()
        if changed:
            self._write()

    def _note_warning(self, name: str, warning: str | None) -> None:
        if warning != self._warnings.get(name):
            self._warnings.pop(name, None)
            if warning is not None:
                self._warnings[name] = warning
                self._event("worker_warning", module=name, warning=warning)

    def _heed_requests(self) -> None:
        """Modules that somebody wants to be started again (``dnictl restart``)."""
        with contextlib.suppress(OSError):
            for path in self._run.requests.iterdir():
                name = path.name.removeprefix("restart-")
                path.unlink(missing_ok=True)
                if name in self._processes and name not in self._leaving:
                    self._ask_to_leave(name)

    def _ask_to_leave(self, name: str) -> None:
        if self._stop_reason is not None:
            return
        self._event("restart_requested", module=name)
        self._leaving[name] = self._clock() + self._plan.stop_grace_s + _LEAVE_S
        self._processes[name].send(signal.SIGUSR1)

    def _reap(self) -> None:
        ended: list[str] = []
        for name, process in list(self._processes.items()):
            returncode = process.poll()
            if returncode is not None:
                del self._processes[name]
                module = self.state.modules[name]
                module.exit_code, module.signal = shell_status(returncode)
                ended.append(name)
        # Whoever was killed from outside comes first: its neighbours' errors are consequences.
        for name in sorted(ended, key=lambda name: self.state.modules[name].signal is None):
            self._judge(name, self.state.modules[name])
        if ended:
            self._write()

    def _judge(self, name: str, module: ModuleState) -> None:
        """Decide what the end of one worker means for the run."""
        told = self._stop_reason is not None
        # SIGTERM ends a worker that is still importing torch, before it can catch it; the second
        # one ends it at any time.
        obeyed = told and (name in self._killed or module.exit_code == 128 + signal.SIGTERM)
        asked = self._leaving.pop(name, None) is not None and not told
        if module.exit_code == 0:
            module.state = "finished"
        elif module.exit_code == StoppedError.exit_code or obeyed:
            module.state = "stopped"
        else:
            module.state = "failed"
        self._event(
            "worker_ended",
            module=name,
            attempt=module.attempt,
            state=module.state,
            exit_code=module.exit_code,
            signal=module.signal,
        )
        if name in self._due:  # with the whole chain
            module.state = "restarting"
        elif asked and module.state != "finished":
            self._killed.discard(name)
            self._start_again(name, 0.0, "'dnictl restart' was called")
        elif module.state == "failed" and not told and self._may_start_again(name, module):
            pass
        elif module.state == "failed":
            if self.state.failed is None:
                self.state.failed = name
                self.state.error = how_it_ended(name, module)
            self._stop(how_it_ended(name, module), broken=True)
        elif module.state == "stopped":
            self._stop(how_it_ended(name, module))
        elif name == self._plan.workers[-1].module and (self._processes or self._due):
            # The tail saw the end of the stream: the others have nothing left to wait for.
            self._linger_until = self._clock() + self._plan.stop_grace_s

    # --- starting again ------------------------------------------------------------------------

    def _may_start_again(self, name: str, module: ModuleState) -> bool:
        """Have a worker that has died started again, unless that cannot help."""
        plan, patience = self._plan.restart, self._patience[name]
        assert module.exit_code is not None
        if module.signal is None and not self._run.worker(name).exists():
            return False  # it could not even say that it starts: nor will the next one
        delay_s = patience.delay_s(plan, module.exit_code, self._clock())
        if delay_s is None:
            return False
        self._linger_until = None
        if plan.scope == "module":
            self._start_again(name, delay_s, how_it_ended(name, module))
            return True
        # What the module has lost would be missed by those that wait for its gradients.
        for other in self._plan.workers:
            process = self._processes.pop(other.module, None)
            if process is not None:
                process.kill()
                while process.poll() is None:
                    self._sleep(TICK_S)
            self._start_again(other.module, delay_s, how_it_ended(name, module), resume="auto")
        return True

    def _start_again(
        self, name: str, delay_s: float, reason: str, *, resume: str | None = None
    ) -> None:
        worker, module = self._workers[name], self.state.modules[name]
        if resume is None:
            # A worker that had not come to its state yet has not taken its place in the stream.
            report = read_json(self._run.worker(name)) or {}
            begun = report.get("attempt") == worker.attempt and report.get("begun", False)
            resume = OWN if begun else worker.resume
        self._workers[name] = worker.again(worker.attempt + 1, resume=resume)
        self._due[name] = self._clock() + delay_s
        module.state = "restarting"
        module.restarts += 1
        self._event(
            "worker_restarting",
            module=name,
            attempt=worker.attempt + 1,
            delay_s=delay_s,
            reason=reason,
        )

    def _start_due(self) -> None:
        ready = [name for name, due in self._due.items() if self._clock() >= due]
        for name in ready:
            del self._due[name]
            self._start_worker(self._workers[name])
        if ready:
            self._write()

    def _give_up_restarts(self) -> None:
        """Whoever was about to be started again is not, because the run is being stopped."""
        for name in self._due:
            self.state.modules[name].state = "stopped"
        self._due.clear()

    # --- ending --------------------------------------------------------------------------------

    def _stop(self, reason: str, grace_s: float | None = None, *, broken: bool = False) -> None:
        """Tell all workers to leave; in a broken chain no new checkpoint can be completed."""
        if broken:
            self._hurry_at = self._clock() + _BROKEN_GRACE_S
        if self._stop_reason is not None:
            return
        on_their_way = (m.restarts and m.state in _COMING for m in self.state.modules.values())
        if self._due or any(on_their_way):
            self._hurry_at = self._clock() + _BROKEN_GRACE_S
        self._give_up_restarts()
        self._stop_reason = reason
        self.state.phase = "stopping"
        self._event("run_stopping", reason=reason)
        self._write()
        grace_s = self._plan.stop_grace_s if grace_s is None else grace_s
        self._kill_at = self._clock() + grace_s + _LEAVE_S
        for process in self._processes.values():
            process.send(signal.SIGTERM)

    def _kill(self, reason: str) -> None:
        self._due.clear()
        for name in self._processes:
            if name not in self._killed:
                self._kill_one(name, reason)

    def _kill_one(self, name: str, reason: str) -> None:
        self._killed.add(name)
        self._event("worker_killed", module=name, reason=reason)
        self._processes[name].kill()

    def _conclude(self) -> None:
        tail = self.state.modules[self._plan.workers[-1].module]
        if self.state.failed is not None:
            self.state.phase, self.state.exit_code = "failed", DniError.exit_code
        elif tail.state == "finished":
            self.state.phase, self.state.exit_code = "finished", 0
        else:
            self.state.phase = "stopped"
            by = self._killed_by
            self.state.exit_code = StoppedError.exit_code if by is None else 128 + by
            self.state.error = self._stop_reason
        self.state.ended = time.time()
        self._event("run_ended", state=self.state.phase, exit_code=self.state.exit_code)
        self._write()

    def _abandon(self, error: BaseException) -> None:
        """The supervisor itself cannot go on: leave nothing running behind."""
        self._kill("the supervisor failed")
        self.state.phase = "failed"
        self.state.exit_code = error.exit_code if isinstance(error, DniError) else 70
        self.state.error = str(error) or type(error).__name__
        self.state.ended = time.time()
        self._event("run_ended", state="failed", error=self.state.error)
        self._write()

    def _make_keys(self) -> None:
        from dni_runtime.link import keys  # zmq: only where links may be encrypted

        for worker in self._plan.workers:
            keys.make(self._run, worker.module)

    # --- records -------------------------------------------------------------------------------

    def _event(self, event: str, **details: Any) -> None:
        _log.info("%s %s", event, details)
        with self._tolerating_a_full_disk():
            append_line(self._run.events, {"time": time.time(), "event": event, **details})

    def _write(self) -> None:
        self._written_at = self._clock()
        with self._tolerating_a_full_disk():
            self.state.write(self._run)

    @contextlib.contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("the run directory cannot be written: %s", error)

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self.interrupt(number)

        # What the caller ignores stays ignored (nohup, background jobs of a shell script).
        caught = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        previous = {one: signal.signal(one, handle) for one in caught}
        try:
            yield
        finally:
            for one, handler in previous.items():
                signal.signal(one, handler)


def remove_traces(run: RunDir, sockets: Path) -> None:
    """Remove what only living workers need: their sockets and keys."""
    with contextlib.suppress(OSError):
        for entry in sockets.iterdir():
            entry.unlink()
        sockets.rmdir()
    if run.keys.exists():
        from dni_runtime.link import keys  # zmq: only where links may be encrypted

        keys.remove(run)


def how_it_ended(name: str, module: ModuleState) -> str:
    """One clause on the end of a worker."""
    if module.signal is not None:
        how = f"was killed by {module.signal}"
    elif module.state == "stopped":
        how = "stopped"
    else:
        how = f"ended with exit code {module.exit_code}"
    return f"module {name!r} (attempt {module.attempt}) {how}"
