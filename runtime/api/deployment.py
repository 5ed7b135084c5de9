"""A version of a service, and what answers for it: workers of its own, or this process."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dni_runtime.api.planning import plan_run
from dni_runtime.api.run import Run
from dni_runtime.core.export import load_model, read_header
from dni_runtime.errors import DniError, UnavailableError, UsageError
from dni_runtime.image.apptainer import usable_apptainer
from dni_runtime.plan.prepare import importing_from
from dni_runtime.plan.serving import serving_chain, signature_of
from dni_runtime.plan.settings import StartSettings
from dni_runtime.release.images import assembled
from dni_runtime.release.store import Store
from dni_runtime.run.documents.exits import Exits
from dni_runtime.run.rundir import socket_folder
from dni_runtime.schedulers.slurm.commands import own_job
from dni_runtime.schedulers.ssh import parse_hosts
from dni_runtime.serving.documents import Order, Settings, Version
from dni_runtime.serving.engine import Engine, InProcess
from dni_runtime.serving.front import Front
from dni_runtime.serving.protocol import Signature
from dni_runtime.spec.worker import ExitRole

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


def deploy(
    name: str, source: Path, cut: int | None, folder: Path, settings: Settings
) -> Deployment:
    """Start what answers for a version: ``source`` is a run, or an exported file."""
    version = Version(name=name, source=source, cut=cut)
    if source.is_file():
        header = read_header(source)
        signature = Signature.of(header.inputs, header.outputs)
        return Deployment(version, InProcess(load_model(source, trust=settings.trust), signature))
    trained = Run.open(source, trust=settings.trust)
    trained.check_trusted()
    cut = trained.choose_cut()[0] if cut is None else cut
    signature = signature_of(trained.record)
    version = version.model_copy(update={"cut": cut})
    if settings.in_process:
        with importing_from(trained.directory.sources):
            return Deployment(version, InProcess(trained.model(cut), signature))
    exits = _early_exits(trained, cut, settings)
    prepared = serving_chain(trained.record, cut, exits, settings.replicas)
    root = folder / name
    start = StartSettings(root, settings.backend, _images(source, settings))
    if settings.hosts is not None:
        start = replace(start, scheduler="ssh", hosts=parse_hosts(settings.hosts))
    elif settings.backend == "auto" and own_job() is not None:
        from dni_runtime.schedulers.slurm.allocation import job_here

        start = replace(start, scheduler="slurm", job=job_here(root, prepared, "info"))
    launch = plan_run(prepared, start).launch()
    assert prepared.front is not None
    assert launch.plan.front is not None
    supervisor = launch.spawn(tied=True)
    socket_folder(root, Path(launch.plan.sockets))
    front = Front(
        launch.run,
        prepared.front,
        launch.plan.front,
        signature,
        depth=len(prepared.replicas),
        exit_wait_s=settings.exit_wait_s,
    )
    version = version.model_copy(update={"run": root})
    return Deployment(version, front, Run.open(root), supervisor)


def _images(source: Path, settings: Settings) -> Path:
    """Return the folder of a network's images: a release has its own."""
    store = Store.of(source)
    if store is None or settings.backend == "process":
        return settings.images
    try:
        return assembled(usable_apptainer(), store, store.name_of(source))
    except UnavailableError:
        if settings.backend == "apptainer":
            raise
        return settings.images


def _early_exits(run: Run, cut: int, settings: Settings) -> dict[str, ExitRole]:
    """Return the exits at which samples are to leave, by module."""
    points, confidence = settings.exit_accuracy, settings.exit_confidence
    if points is None and confidence is None:
        return {}
    exits = Exits.load(run.directory.exits)
    if exits is None or exits.checkpoint != cut:
        raise UsageError(
            f"the early exits of checkpoint {cut} of run {run.name!r} have not been measured",
            hint=f"dnictl exits {run.name}",
        )
    *early, _ = exits.exits
    thresholds: Sequence[float | None] = [confidence] * len(early)
    if points is not None:
        kept = [rule for rule in exits.rules if rule.verdict == "holds"]
        kept = [rule for rule in kept if rule.points is not None and rule.points <= points]
        if not kept:
            raise UsageError(
                f"it is not shown that early exits lose at most {points:g} points",
                hint=f"see 'dnictl exits {run.name} --exit-accuracy {points:g}'; or choose "
                "--exit-confidence",
            )
        thresholds = max(kept, key=lambda rule: rule.points or 0.0).thresholds
    return {
        exit.module: ExitRole(interface=exit.head, threshold=threshold)
        for exit, threshold in zip(early, thresholds, strict=True)
        if exit.head is not None and threshold is not None
    }
