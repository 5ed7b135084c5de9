"""The product's own supervisor in the simulation: what starts workers for it, and starts it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dni_runtime.errors import DniError
from dni_runtime.files import write_json
from dni_runtime.plan.plan import LaunchPlan, RestartPlan, WorkerPlan
from dni_runtime.run.documents.state import ModuleState, RunState
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.processes import Process as Started
from dni_runtime.spec import WorkerSpec
from dni_runtime.supervise.supervisor import Supervisor
from tests.simulation.world import Process, World

GRACE_S = 20.0


class Worker:
    """A worker's process, as its supervisor sees it."""

    pid = 0  # that of no process

    def __init__(self, world: World, process: Process) -> None:
        self.process = process
        self.code: int | None = None
        self._world = world

    def poll(self) -> int | None:
        self._world.check_alive()
        return self.code

    def kill(self) -> None:
        self._world.check_alive()
        self.end(-signal.SIGKILL)

    def vanish(self) -> None:
        """It is killed, and what stands for it here does not notice."""
        self._world.kill(self.process)

    def end(self, code: int) -> None:
        """It has ended, or is ended so."""
        if self.code is None:
            self.code = code
            self._world.kill(self.process)


class Adopted:
    """A worker of a supervisor that was killed: its exit code is not known."""

    pid = 0

    def __init__(self, worker: Worker | None) -> None:
        self._worker = worker

    def poll(self) -> int | None:
        alive = self._worker is not None and self._worker.poll() is None
        return None if alive else -signal.SIGKILL

    def kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()


class Starter:
    """Starts the workers of a supervisor; ``workers`` has the newest of each module."""

    def __init__(self, world: World, start: Callable[[WorkerPlan], Worker]) -> None:
        self.workers: dict[str, tuple[int, Worker]] = {}
        self._world = world
        self._start = start

    def start(self, worker: WorkerPlan) -> Worker:
        self._world.check_alive()
        started = self._start(worker)
        self.workers[worker.module] = worker.attempt, started
        return started

    def adopt(self, worker: WorkerPlan, module: ModuleState) -> Adopted:
        attempt, found = self.workers.get(worker.module, (0, None))
        if found is not None and attempt != module.attempt:
            found.kill()  # as it does with Slurm's steps
            found = None
        return Adopted(found)

    def kill_all(self, workers: Mapping[str, Started]) -> None:
        for one in workers.values():
            one.kill()

    def gone(self, modules: Collection[str]) -> list[str]:
        return [name for name in modules if not self.workers[name][1].process.alive]


class Hosts:
    """The hosts of a run, each with room for one worker; those that are ``gone`` are so for good.

    ``spare`` of them have none at first.
    """

    resized = False

    def __init__(self, world: World, workers: Collection[str], spare: int) -> None:
        self.gone: dict[str, float] = {}  # when it is known that they are
        self.hopeless: set[str] = set()  # those on which nothing starts, until they are mended
        self._world = world
        self._all = [*map(self.of, workers), *(f"spare host {one}" for one in range(spare))]

    @staticmethod
    def of(worker: str) -> str:
        """Return the host that a worker has at first."""
        return f"host of {worker}"

    def lose(self, host: str, known_after_s: float) -> None:
        """A host is lost, which is known a while later."""
        self.gone.setdefault(host, self._world.now_s + known_after_s)

    def free(self, used: Collection[str | None]) -> list[str]:
        """Return the hosts with room, as far as is known."""
        return [one for one in self._all if one not in used and not self._known(one)]

    def lost(self, hosts: Collection[str], *, at_once: bool) -> list[str]:
        return [one for one in hosts if self._known(one)]

    def move(
        self, workers: Sequence[WorkerPlan], names: Collection[str]
    ) -> list[WorkerPlan] | None:
        moving = [one for one in workers if one.module in names]
        free = self.free([one.node for one in workers if one.module not in names])
        if len(free) < len(moving):
            return None
        return [one.moved(host) for one, host in zip(moving, free, strict=False)]

    def place(self, workers: Sequence[WorkerPlan], worker: WorkerPlan) -> WorkerPlan | None:
        free = self.free([one.node for one in workers])
        if worker.node in free:
            return worker
        return worker.moved(free[0]) if free else None

    def _known(self, host: str) -> bool:
        return self.gone.get(host, self._world.now_s + 1) <= self._world.now_s


class Supervision:
    """Supervisors of one run, one after the other, and whoever resumes it.

    ``phase`` is how the run has ended, as the newest supervisor says, or None while it goes on;
    ``problem`` an error that no restart could have mended.
    """

    def __init__(
        self,
        world: World,
        run: RunDir,
        specs: tuple[WorkerSpec, ...],
        start: Callable[[WorkerPlan], Worker],
        spare: int = 0,
    ) -> None:
        self.hosts = Hosts(world, [spec.module for spec in specs], spare)
        self.phase: str | None = None
        self.problem: str | None = None
        self.process = Process("supervisor", "first")
        self._world = world
        self._run = run
        self._specs = specs
        self._starter = Starter(world, start)
        self._supervisor: Supervisor | None = None
        self._attempt = 0
        self._resumed = 0

    @property
    def states(self) -> set[str]:
        """The states of all workers, as a supervisor sees them that is there and does nothing."""
        supervisor = self._supervisor
        if supervisor is None or not self.process.alive or self.phase is not None:
            return set()
        if supervisor.state.restart_reason is not None or supervisor.state.phase == "stopping":
            return set()
        return {module.state for module in supervisor.state.modules.values()}

    def begin(self) -> None:
        """Start all workers, as ``up`` and ``resume`` do: on as many hosts as before."""
        self.phase = None
        self.hosts.gone.clear()
        self.hosts.hopeless.clear()
        self._attempt = max(RunState.read(self._run).last_attempt, self._attempt) + 1
        self._serve(None)

    def stop(self) -> None:
        """SIGTERM; only the first one."""
        if self._supervisor is not None:
            self._supervisor.interrupt(signal.SIGTERM)
            self._supervisor = None

    def kill(self) -> None:
        """SIGKILL; another one follows, as in a batch script."""
        if self.phase is not None or not self.process.alive or self._supervisor is None:
            return
        self._world.kill(self.process)
        self._supervisor = None
        self._world.at(self._world.random.uniform(0.1, 3.0), self._follow)

    def _follow(self) -> None:
        state = self._state()
        if state is not None and state.attempt == self._attempt and state.phase != "new":
            self._serve(state)
            return
        for _, worker in self._starter.workers.values():  # it was killed before it had begun
            worker.end(-signal.SIGKILL)
        self.begin()

    def _state(self) -> RunState | None:
        """The state as it was left; its processes are not on this machine."""
        return RunState.peek(self._run.state)

    def _serve(self, adopt: RunState | None) -> None:
        self.process = Process("supervisor", "first")

        def body() -> None:
            try:
                if adopt is None:
                    write_json(self._run.plan, self._plan().to_json())
                self._supervisor = supervisor = Supervisor(
                    self._run,
                    LaunchPlan.read(self._run),
                    self._starter,
                    hosts=self.hosts,
                    adopt=adopt,
                    clock=time.monotonic,
                    sleep=self._world.wait,
                )
                state = supervisor.run()
            except (DniError, OSError) as error:
                self._over("failed", getattr(error, "exit_code", 74), str(error))
            else:
                failed = state.modules.get(state.failed or "")
                self._over(state.phase, failed.exit_code if failed else None, state.error)

        self._world.spawn(self.process, body)

    def _over(self, phase: str, code: int | None, error: str | None) -> None:
        """The run has ended: somebody resumes it if that may help."""
        self.phase, self._supervisor = phase, None
        if phase == "finished":
            return
        self._resumed += 1
        if code in (64, 65, 76, 78, 79) or self._resumed > 20:
            self.problem = f"{phase} ({code}): {error}"
        else:
            self._world.at(self._world.random.uniform(0.1, 5.0), self.begin)

    def _plan(self) -> LaunchPlan:
        attempt, sockets = self._attempt, Path(f"{self._run.root}/sockets")
        workers = tuple(
            WorkerPlan(
                run=str(self._run.root),
                module=spec.module,
                attempt=attempt,
                ipc=str(sockets),
                log=str(self._run.log(spec.module, attempt)),
                first=attempt,
                node=self.hosts.of(spec.module),
            )
            for spec in self._specs
        )
        scope: Any = "chain" if any(spec.exact for spec in self._specs) else "module"
        rules = RestartPlan(policy="on-failure", limit=30, backoff_max_s=5.0, scope=scope)
        return LaunchPlan(
            str(self._run.root),
            "process",
            str(sockets),
            GRACE_S,
            workers,
            restart=rules,
            sources={
                one.module: tuple(link.source for link in one.links_in) for one in self._specs
            },
            elastic=self._specs[0].elastic,
        )
