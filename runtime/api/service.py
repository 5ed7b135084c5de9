"""The process of a service: a network's versions, and what answers for each, behind one address."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dni_runtime.api.answering import PlannedDeployment, plan_deployment
from dni_runtime.api.run import Run
from dni_runtime.api.services import order_of, state_of
from dni_runtime.errors import DniError, UnavailableError, UsageError, WorkerError
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
        self._default: Deployment | None = None  # what answers requests that name no version
        self._canary: Deployment | None = None  # what gets a part of them
        self._former: Version | None = None  # the default before this one
        self._ending: list[threading.Thread] = []  # of versions that have answered all
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
                order_of(self._folder).unlink(missing_ok=True)  # to a service that was killed
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
                for thread in self._ending:
                    thread.join()
        self._write(phase="ended")

    def _write(self, **changes: object) -> None:
        versions = (*self._gone, *(one.version for one in self._deployments.values()))
        state = self._state.model_copy(update={"versions": versions, **changes})
        now = time.time()
        if state != self._state or changes or now - state.updated > BEAT_S:
            self._state = state.model_copy(update={"updated": now})
            try:
                self._state.write(state_of(self._folder))
            except OSError:  # a full disk ends no service: it is written at the next look
                self._state = state.model_copy(update={"updated": 0.0})

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
            except (DniError, OSError) as error:
                self._answer(order, str(error))
        self._write()
        return True

    def _answer(self, order: Order | None, error: str | None) -> None:
        """Say how an order has ended."""
        if order is not None:
            self._write(order=order.id, error=error)

    def _carry_out(self, order: Order) -> None:
        if self._of("starting"):
            raise UsageError("a version is being started", hint="wait for it, or stop the service")
        if self._canary is not None and order.what != "update":
            winner = self._canary if order.what == "promote" else self._default
            assert winner is not None
            assert self._server is not None
            seen = self._server.versions[winner.version.name]
            if winner is self._canary and not seen.ready:
                text = f"version {seen.name} is not ready: {seen.problem}"
                raise UnavailableError(text, hint="wait for it, or --rollback")
            self._divide(winner)
            self._answer(order, None)
        elif self._canary is not None:
            raise UsageError(
                f"version {self._canary.version.name} is a canary",
                hint="decide about it first: --promote or --rollback",
            )
        elif order.what == "update":
            self._update(order)
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
        """The versions in a state, in their order."""
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
                text = f"no answer in {self._settings.ready_s:g} s: {seen.problem}"
                self._end(deployment, failure or text)
            case "starting" if seen.ready:
                self._take_over(deployment)
            # While another one starts, a version that has failed keeps its place for it.
            case "ready" if failure and not self._of("starting"):
                self._end(deployment, failure)
            case "ready":
                deployment.note(error=None if seen.ready else seen.problem)
            case "draining" if failure or late or seen.idle:
                self._end(deployment, None)

    def _take_over(self, deployment: Deployment) -> None:
        """Give a version that answers what it was started for: all requests, or a part of them."""
        order, name = deployment.order, deployment.version.name
        try:
            if order is None or order.canary is None or self._default is None:
                self._divide(deployment)
            else:
                self._divide(self._default, deployment, order.canary)
        except DniError as error:  # nothing has changed
            self._end(deployment, str(error))
            return
        self._told(f"{self._folder.name}: version {name} answers")
        self._write(phase="running")
        self._answer(order, None)

    def _divide(
        self, default: Deployment, canary: Deployment | None = None, percent: float = 0.0
    ) -> None:
        """Give a canary these percent of the requests, and a default the others.

        Other versions answer what they have, and end.
        """
        assert self._server is not None
        first, second = default.version.name, None if canary is None else canary.version.name
        switch = self._server.versions.switch
        self._server.call(switch, first, canary=second, share=percent / 100)
        if self._default not in (None, default):
            self._former = self._default.version
        self._default, self._canary = default, canary
        for other in self._of("ready"):
            other.note(state="draining", share=0.0)
            other.until_s = time.monotonic() + self._settings.drain_s
        default.note(state="ready", share=100 - percent)
        if canary is not None:
            canary.note(state="ready", share=percent)

    def _end(self, deployment: Deployment, error: str | None) -> None:
        """End a version, whose failure is that of the service if no other answers."""
        assert self._server is not None
        name = deployment.version.name
        del self._deployments[name]
        deployment.note(state="failed" if error else "stopped", error=error, share=0.0)
        if error and deployment.order is not None:
            self._answer(deployment.order, f"version {name} failed: {error}")
        if deployment is self._canary:
            assert self._default is not None
            self._divide(self._default)
        elif deployment is self._default or self._default is None:
            self._replace(deployment)
        if not self._server.remove(name, _TICK_S) and not error:
            deployment.note(error=self._cut)
        self._gone = (*self._gone, deployment.version)
        self._ending.append(threading.Thread(target=deployment.stop, name=f"end of {name}"))
        self._ending[-1].start()

    def _replace(self, failed: Deployment) -> None:
        """Have another version answer: the canary, else the newest that has still requests."""
        others = [*self._of("draining"), *self._of("ready")]
        for other in reversed(others):
            if other.failure() is None:
                with contextlib.suppress(DniError):  # it does not answer any more either
                    self._divide(other)
                    return
        self._gone = (*self._gone, failed.version)
        failed.stop()
        name, error = failed.version.name, failed.version.error
        raise WorkerError(f"version {name} of {self._folder.name!r} failed: {error}")

    def _drain(self) -> None:
        self._write(phase="draining")
        if self._server is not None and not self._server.stop(self._settings.drain_s):
            self._write(error=self._cut)
            self._told(f"{self._folder.name}: {self._cut}")

    @property
    def _cut(self) -> str:
        return f"requests were cut off that had no answer after {self._settings.drain_s:g} s"
