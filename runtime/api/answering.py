"""What would answer for a version of a service: planned and checked, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from dni_runtime.api.checkpointed import Checkpointed
from dni_runtime.api.planning import PlannedRun, plan_run, scheduled
from dni_runtime.core.export import load_model, read_header
from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.image.apptainer import usable_apptainer
from dni_runtime.plan.prepare import CheckedChain, importing_from
from dni_runtime.plan.serving import serving_chain, signature_of
from dni_runtime.plan.settings import StartSettings
from dni_runtime.release.images import assembled
from dni_runtime.release.store import Store
from dni_runtime.run.documents.exits import Exits
from dni_runtime.run.record import Record
from dni_runtime.serving.documents import Settings, Version
from dni_runtime.serving.protocol import Signature
from dni_runtime.spec.edge import Preprocessing
from dni_runtime.spec.worker import ExitRole


@dataclass(frozen=True)
class PlannedDeployment:
    """What will answer for a version; nothing of it is there yet."""

    version: Version
    signature: Signature
    network: nn.Module | None  # to be computed in this process; or
    run: PlannedRun | None  # of its workers
    exit_wait_s: float


def plan_deployment(
    name: str, source: Path, cut: int | None, folder: Path, settings: Settings
) -> PlannedDeployment:
    """Plan what answers for a version: ``source`` is a run, or an exported file; writes nothing."""
    version = Version(name=name, source=source, cut=cut)
    if settings.in_process or source.is_file():
        for field in ("replicas", "exit_accuracy", "exit_confidence", "hosts"):
            if getattr(settings, field) not in (None, {}):
                raise UsageError(
                    f"{field!r} is for modules, and this is one process", hint="start it without"
                )
    if source.is_file():
        version = version.model_copy(update={"written_ns": source.stat().st_mtime_ns})
        header, network = read_header(source), load_model(source, trust=settings.trust)
        signature = Signature.of(header.inputs, header.outputs)
        signature = _asked(signature, header.preprocessing, settings)
        return PlannedDeployment(version, signature, network, None, 0.0)
    trained = Checkpointed(Record.read(source), trust=settings.trust)
    trained.check_trusted()
    cut = trained.choose_cut() if cut is None else cut
    version = version.model_copy(update={"cut": cut})
    if settings.in_process:
        signature = _signature(trained, settings)
        with importing_from(trained.directory.sources):
            return PlannedDeployment(version, signature, trained.model(cut), None, 0.0)
    signature, prepared = answering(trained, cut, settings)
    start = StartSettings(folder / name, settings.backend, _images(source, settings))
    run = plan_run(prepared, scheduled(start, prepared, settings.hosts))
    return PlannedDeployment(version, signature, None, run, settings.exit_wait_s)


def answering(
    trained: Checkpointed, cut: int, settings: Settings
) -> tuple[Signature, CheckedChain]:
    """Return what requests have to have, and the chain whose modules answer them."""
    exits = _early_exits(trained, cut, settings)
    chain = serving_chain(trained.record, cut, exits, settings.replicas)
    return _signature(trained, settings), chain


def _signature(trained: Checkpointed, settings: Settings) -> Signature:
    record = trained.record
    return _asked(signature_of(record), record.preprocessing, settings)


def _asked(signature: Signature, known: Preprocessing | None, settings: Settings) -> Signature:
    """Return what requests have to have: the network's inputs, or raw samples."""
    if not settings.preprocess:
        return signature
    if known is None:
        raise UsageError(
            "it is not known how samples of its data are made from raw ones",
            hint="omit --preprocess: clients send the network's inputs. It is known of the data "
            "sets 'npz', 'digits', 'mnist', 'fashion-mnist' and 'cifar10'",
        )
    return replace(signature, preprocessing=known)


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


def _early_exits(run: Checkpointed, cut: int, settings: Settings) -> dict[str, ExitRole]:
    """Return the exits at which samples are to leave, by module."""
    points, confidence = settings.exit_accuracy, settings.exit_confidence
    if points is None and confidence is None:
        return {}
    if None not in (points, confidence):
        raise UsageError("'exit_accuracy' and 'exit_confidence' exclude each other")
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
