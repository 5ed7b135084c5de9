"""A version of a service, and what answers for it: workers of its own, or this process."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dni_runtime.api.answering import PlannedDeployment
from dni_runtime.api.run import Run
from dni_runtime.errors import DniError
from dni_runtime.run.rundir import socket_folder
from dni_runtime.serving.documents import Order, Version
from dni_runtime.serving.engine import Engine, InProcess
from dni_runtime.serving.front import Front

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
