"""The process of a service: a network's versions, and what answers for each, behind one address."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dni_runtime.api.answering import PlannedDeployment, plan_deployment
from dni_runtime.api.run import Run
from dni_runtime.api.services import order_of, state_of
from dni_runtime.errors import DniError, UsageError, WorkerError
from dni_runtime.measure.figures import MetricsReader, module_families
from dni_runtime.run.documents.state import RunState, process_birth
from dni_runtime.run.rundir import socket_folder
from dni_runtime.schedulers.interrupts import catching_signals
from dni_runtime.serving.documents import BEAT_S, Order, ServiceState, Settings, Version
from dni_runtime.serving.engine import Engine, InProcess
from dni_runtime.serving.front import Front
from dni_runtime.serving.server import Server
from dni_runtime.serving.server import serve as start_server

_TICK_S = 0.2
_STOPPED_S = 60.0  # that a supervisor may take to end when its workers have


@dataclass
class Deployment:
    """One version, and what answers for it."""

    version: Version
    engine: Engine
    run: Run | None = None  # of its workers
    supervisor: subprocess.Popen[bytes] | None = None
    order: Order | None = None  # that it is the outcome of
    until_s: float = 0.0  # by when it must be ready, or drained

    def note(self, **changes: object) -> None:
        """Change what is reported of the version."""
        self.version = self.version.model_copy(update=changes)

    def failure(self) -> str | None:
        """Why it cannot answer any more; None if it can."""
        if not isinstance(self.engine, Front) or self.run is None or self.supervisor is None:
            return None
        if self.engine.failure is not None:
            return str(self.engine.failure)
        if self.supervisor.poll() is None:
            return None
        return self.run.state().error or "its supervisor has ended"

    def stop(self) -> None:
        """End it, with its workers."""
        self.engine.close()
        if not isinstance(self.engine, Front) or self.run is None or self.supervisor is None:
            return
        self.engine.join()
        with contextlib.suppress(DniError):
            self.run.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.supervisor.wait(_STOPPED_S)


def deploy(plan: PlannedDeployment) -> Deployment:
    """Start what answers for a version."""
    if plan.run is None:
        assert plan.network is not None
        return Deployment(plan.version, InProcess(plan.network, plan.signature))
    launch, prepared = plan.run.launch(), plan.run.prepared
    assert prepared.front is not None
    assert launch.plan.front is not None
    supervisor = launch.spawn(tied=True)
    root = launch.run.root
    socket_folder(root, Path(launch.plan.sockets))
    front = Front(
        launch.run,
        prepared.front,
        launch.plan.front,
        plan.signature,
        depth=len(prepared.replicas),
        exit_wait_s=plan.exit_wait_s,
    )
    version = plan.version.model_copy(update={"run": root})
    return Deployment(version, front, Run.open(root), supervisor)


class Service:
    """Serves a network until it is told to stop: :meth:`serve`."""

    def __init__(self, folder: Path, settings: Settings, told: Callable[[str], None]) -> None:
        self._folder, self._settings, self._told = folder, settings, told
        self._signals: list[int] = []
        self._deployments: dict[str, Deployment] = {}
        self._gone: tuple[Version, ...] = ()
        self._former: Version | None = None  # the default before this one
        former = ServiceState.peek(state_of(folder))
        numbers = [] if former is None else [int(version.name) for version in former.versions]
        self._number = max(numbers, default=0)
        self._server: Server | None = None
        self._state = ServiceState(
            name=folder.name,
            pid=os.getpid(),
            born=process_birth(os.getpid()),
            host=socket.gethostname(),
            started=time.time(),
        )

    def serve(self) -> None:
        """Serve until a signal or an order to stop, then answer what is open."""
        with catching_signals(self._signals.append):
            try:
                self._write()
                first = Order(
                    id="", what="update", source=self._settings.source, cut=self._settings.cut
                )
                self._update(first)
                while not self._signals and self._look():
                    time.sleep(_TICK_S)
                self._drain()
            except BaseException as error:
                self._write(phase="failed", error=str(error))
                raise
            finally:
                if self._server is not None:  # else its thread would outlive a failure
                    self._server.stop(1)
                for deployment in self._deployments.values():
                    deployment.stop()
                    deployment.note(state="stopped", share=0.0)
        self._write(phase="ended")

    def _write(self, **changes: object) -> None:
        versions = (*self._gone, *(one.version for one in self._deployments.values()))
        state = self._state.model_copy(update={"versions": versions, **changes})
        now = time.time()
        if state != self._state or changes or now - state.updated > BEAT_S:
            self._state = state.model_copy(update={"updated": now})
            self._state.write(state_of(self._folder))

    def _look(self) -> bool:
        """Do what is due; return whether to go on."""
        for deployment in [*self._deployments.values()]:
            self._follow(deployment)
        if (order := Order.peek(order_of(self._folder))) is not None:
            order_of(self._folder).unlink(missing_ok=True)
            if order.what == "stop":
                self._write(order=order.id, error=None)
                return False
            try:
                self._carry_out(order)
            except DniError as error:
                self._answer(order, str(error))
        self._write()
        return True

    def _answer(self, order: Order | None, error: str | None) -> None:
        """Say how an order has ended."""
        if order is not None:
            self._write(order=order.id, error=error)

    def _carry_out(self, order: Order) -> None:
        active = self._of("ready")
        canary = active[1] if len(active) > 1 else None  # it gets a part of the requests
        if any(one.version.state == "starting" for one in self._deployments.values()):
            raise UsageError("a version is being started", hint="wait for it, or stop the service")
        if order.what == "update":
            self._update(order)
        elif canary is not None:
            self._prefer(canary if order.what == "promote" else active[0])
            self._answer(order, None)
        elif order.what == "promote":
            raise UsageError("there is no canary", hint="start one: --update NEW --canary 10")
        else:
            if self._former is None:
                raise UsageError("there is no version before this one")
            if self._former.changed:
                raise UsageError(
                    f"version {self._former.name} was from {str(self._former.source)!r}, which has "
                    "been written anew: name what is to answer with --update"
                )
            changes = {"source": self._former.source, "cut": self._former.cut}
            self._update(order.model_copy(update=changes))

    def _of(self, state: str) -> list[Deployment]:
        """The versions in a state, in their order: the first ready one is the default."""
        return [one for one in self._deployments.values() if one.version.state == state]

    def _update(self, order: Order) -> None:
        """Start a version; :meth:`_follow` has it take over when it answers."""
        assert order.source is not None
        self._number += 1
        name = str(self._number)
        plan = plan_deployment(name, order.source, order.cut, self._folder, self._settings)
        deployment = deploy(plan)
        deployment.order = order
        deployment.until_s = time.monotonic() + self._settings.ready_s
        self._deployments[name] = deployment
        if self._server is None:
            self._server = start_server(self._settings.http, self._figures)
            self._told(f"{self._folder.name}: {self._server.url}")
            self._write(url=self._server.url)
        self._server.call(self._server.versions.add, name, deployment.engine)

    def _figures(self) -> list[list[str]]:
        """Return the families of figures of the versions' modules."""
        runs = []
        for one in [*self._deployments.values()]:
            if one.run is not None:
                labels = {"model": self._settings.http.name, "version": one.version.name}
                state = RunState.read(one.run.directory)
                runs.append((labels, MetricsReader(one.run.record, evaluations=1).read(state)))
        return module_families(runs)

    def _follow(self, deployment: Deployment) -> None:
        """Look how a version is, and do what follows."""
        assert self._server is not None
        name, state = deployment.version.name, deployment.version.state
        seen, failure = self._server.versions[name], deployment.failure()
        late = time.monotonic() >= deployment.until_s
        match state:
            case "starting" if failure or late:
                self._end(deployment, failure or f"no answer in {self._settings.ready_s:g} s")
            case "starting" if seen.ready:
                order = deployment.order
                deployment.note(state="ready")
                if order is None or order.canary is None:
                    self._prefer(deployment)
                else:
                    self._share(order.canary)
                self._told(f"{self._folder.name}: version {name} answers")
                self._write(phase="running")
                self._answer(order, None)
            case "ready" if failure:
                self._end(deployment, failure)
            case "draining" if failure or late or seen.idle:
                self._end(deployment, None)

    def _prefer(self, winner: Deployment) -> None:
        """Give all requests to a version; the others answer what they have, and end."""
        default, *_ = ready = self._of("ready")
        if default is not winner:
            self._former = default.version
        for other in ready:
            if other is not winner:
                other.note(state="draining", share=0.0)
                other.until_s = time.monotonic() + self._settings.drain_s
        self._share(0.0)

    def _share(self, canary: float) -> None:
        """Divide the requests between the default and a canary, which gets these percent."""
        assert self._server is not None
        default, *others = self._of("ready")
        default.note(share=100 - canary)
        for other in others:
            other.note(share=canary)
        second = others[0].version.name if others else None
        switch, first = self._server.versions.switch, default.version.name
        self._server.call(switch, first, canary=second, share=canary / 100)

    def _end(self, deployment: Deployment, error: str | None) -> None:
        """End a version, whose failure is that of the service if no other answers."""
        assert self._server is not None
        name = deployment.version.name
        del self._deployments[name]
        deployment.note(state="failed" if error else "stopped", error=error, share=0.0)
        if error and not self._of("ready"):
            self._gone = (*self._gone, deployment.version)
            deployment.stop()
            raise WorkerError(f"version {name} of {self._folder.name!r} failed: {error}")
        if error and deployment.order is not None:
            self._answer(deployment.order, f"version {name} failed: {error}")
        if self._of("ready"):
            self._share(0.0)
        if not self._server.remove(name, _TICK_S) and not error:
            deployment.note(error=self._cut)
        self._gone = (*self._gone, deployment.version)
        deployment.stop()

    def _drain(self) -> None:
        self._write(phase="draining")
        if self._server is not None and not self._server.stop(self._settings.drain_s):
            self._write(error=self._cut)
            self._told(f"{self._folder.name}: {self._cut}")

    @property
    def _cut(self) -> str:
        return f"requests were cut off that had no answer after {self._settings.drain_s:g} s"
