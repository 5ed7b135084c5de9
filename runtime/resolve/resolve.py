"""From a chain's spec to what each worker needs: defaults, shapes and contracts.

Every module is built on torch's meta device and run on a batch without memory, so that a wrong
name, keyword or shape is an error before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dni_runtime.core.interfaces import ResolvedInterface, Timing, default_interface
from dni_runtime.core.interfaces import resolve_interface as find_interface
from dni_runtime.core.labels import class_axis, pairs
from dni_runtime.core.layers import build_module
from dni_runtime.core.losses import build_loss, sum_of
from dni_runtime.core.metrics import check_metrics, rises
from dni_runtime.core.optimization import freeze, trained_parameters
from dni_runtime.errors import SpecError
from dni_runtime.packing import row_of
from dni_runtime.resolve.checks import (
    check_accumulation,
    check_labels,
    check_links,
    check_single_samples,
    check_training,
    micro_batches_of,
)
from dni_runtime.resolve.loss import check_loss
from dni_runtime.resolve.replication import (
    check_replicas,
    elastic_of,
    lr_scale,
    resolve_replication,
)
from dni_runtime.resolve.shapes import ModuleOutputs, data_of, infer_shapes, taken_of
from dni_runtime.spec import (
    ChainSpec,
    Choice,
    DataInfo,
    EdgeSpec,
    HeadRole,
    ModuleSpec,
    SelectionRole,
    TailRole,
    WorkerSpec,
)
from dni_runtime.spec.choices import Location
from dni_runtime.spec.load import suggestion
from dni_runtime.spec.modules import TrainingSpec
from dni_runtime.spec.running import ReplicationSpec
from dni_runtime.spec.worker import retained

DEFAULT_OPTIMIZER = Choice(name="Adam", args={"lr": 0.001})
LATE_OPTIMIZER = Choice(name="Adam", args={"lr": 0.001, "betas": [0.0, 0.999]})
"""The default if true gradients are any number of updates late: momentum would add to that."""


def resolved_chain(chain: ChainSpec, info: DataInfo) -> ChainSpec:
    """Return the chain with every module's settings, as ``dnictl config`` prints it."""
    return _resolve(chain, infer_shapes(chain, info), info)


def _resolve(chain: ChainSpec, inferred: Sequence[ModuleOutputs], info: DataInfo) -> ChainSpec:
    modules = list[ModuleSpec]()
    graph, unmoved = chain.graph, set[int]()  # modules with nothing trained in them or upstream
    for index, module in enumerate(chain.modules):
        freeze(
            layers := nn.Sequential(*inferred[index].layers), chain.setting(index, "freeze") or ()
        )
        if not any(trained_parameters(layers)) and unmoved.issuperset(graph.sources[index]):
            unmoved.add(index)
        interface, optimizer = None, DEFAULT_OPTIMIZER
        if index < len(chain.modules) - 1:
            explicit = module.interface is not None
            at: Location = (
                ("modules", index, "interface") if explicit else ("defaults", "interface")
            )
            choice = chain.setting(index, "interface") or default_interface(
                inferred[index].attends or bool(inferred[index].output.varying),
                labelled=chain.data.labels is None,
            )
            resolved = find_interface(choice, at)
            if index in unmoved and choice.name not in ("none", "local"):
                # No gradient has a reader, but batches are cut for all modules.
                parts = {"micro_batches": resolved.needs.micro_batches}
                resolved = find_interface(Choice(name="none", args=parts), at)
            interface = resolved.choice
            if resolved.timing is Timing.DEFERRED and resolved.needs.max_late is None:
                optimizer = LATE_OPTIMIZER
        settings = _settings(chain, index, interface, optimizer)
        modules.append(module.model_copy(update=settings))
    update: dict[str, Any] = {"modules": tuple(modules), "defaults": type(chain.defaults)()}
    update["replication"] = resolve_replication(chain)
    prediction = inferred[-1].output
    numbers = chain.losses is None and pairs(build_loss(chain.loss, ("loss",)))
    if "metrics" not in chain.model_fields_set and (
        numbers or len(inferred[-1].outputs) > 1 or class_axis(prediction, info.label) is None
    ):
        update["metrics"] = ()  # the default needs class labels
    return chain.model_copy(update=update)


def _settings(
    chain: ChainSpec, index: int, interface: Choice | None, optimizer: Choice
) -> dict[str, Any]:
    """Return all settings of a module; ``optimizer`` is that of a module that names none."""
    written = {name: chain.setting(index, name) for name in TrainingSpec.model_fields}
    written = {name: value for name, value in written.items() if value is not None}
    resources = chain.resources(index)
    values = {"optimizer": optimizer, **written, "interface": interface, "cpus": resources.cpus}
    more = {"init": chain.setting(index, "init"), "resources": resources}
    return {**dict(TrainingSpec(**values)), **more}


def worker_specs(chain: ChainSpec, info: DataInfo) -> tuple[WorkerSpec, ...]:
    """Check the whole chain and return each worker's spec."""
    inferred = infer_shapes(chain, info)
    full = _resolve(chain, inferred, info)
    activations = [module.output for module in inferred]
    prediction = activations[-1]
    chosen = full.loss
    if full.losses is not None:
        outputs, labels = inferred[-1].outputs, info.labels or (info.label,)
        if any(one.varying for one in (*outputs, *labels)):
            raise SpecError(
                "several losses need outputs and labels of one length",
                location=("losses",),
                hint="pad to one length, without 'data.max_length'",
            )
        chosen = sum_of(full.losses, outputs, labels)
    loss = check_loss(full, chosen, prediction, info)
    merged = full.modules[-1].most > 1
    check_metrics(full.metrics, loss, prediction, info.label, merged=merged)
    interfaces = [
        None if module.interface is None else find_interface(module.interface)
        for module in full.modules
    ]
    micro_batches = micro_batches_of(chain, interfaces)
    check_replicas(chain, interfaces, micro_batches)
    labelled = full.data.labels is None
    if not labelled:
        check_labels(chain, interfaces)
    replicated = any(module.most > 1 for module in full.modules)
    elastic = elastic_of(full) if replicated else {}
    cuts = _cuts(full, interfaces, micro_batches)
    graph = full.graph
    samples = info.train_samples
    per_epoch = None if samples is None else full.data.train_batches(samples)
    check_accumulation(chain, chain.total_batches(per_epoch))
    taken = [data_of(full, index, info) for index in range(len(full.modules))]
    edges: dict[tuple[int, int], EdgeSpec] = {}
    for (source, target), number in graph.numbers.items():
        learns = source in graph.sources[target]
        outputs = taken_of(full, (source, target), inferred[source].outputs) if learns else ()
        whole = outputs == inferred[source].outputs
        edges[source, target] = EdgeSpec(
            source=full.modules[source].name,
            target=full.modules[target].name,
            number=number,
            tensor=row_of(outputs) if learns else None,
            takes=() if whole else graph.takes.get((source, target), ()),
            outputs=outputs if len(outputs) > 1 else (),
            data=taken[target] if source == 0 else (),
            samples=tuple(info.samples[number] for number in taken[target]) if source == 0 else (),
            labelled=labelled,
            **(cuts[source] if learns else NO_GRADIENTS).of_links,
        )
    sharing = _sharing(full.replication)
    workers = []
    last = len(full.modules) - 1
    for index, module in enumerate(full.modules):
        interface = interfaces[index]
        sources = tuple(edges[source, index] for source in graph.links[index])
        workers.append(
            WorkerSpec(
                **{name: getattr(module, name) for name in TrainingSpec.model_fields},
                **(sharing if module.most > 1 else {}),
                chain=full.name,
                module=module.name,
                index=index,
                layers=module.layers,
                initial=module.init is not None,
                loss=chosen,
                seed=full.seed,
                sources=sources,
                targets=tuple(edges[ends] for ends in sorted(edges) if ends[0] == index),
                output=activations[index],
                outputs=inferred[index].packed,
                label=info.label,
                prediction=prediction,
                classes=loss.scores if info.classes is None else info.classes,
                batch_limit=full.data.largest_batch,
                gradients_in=cuts[index].gradients,
                late=cuts[index].late,
                links=full.links,
                retain=retained(full, index),
                max_late=None if interface is None else interface.needs.max_late,
                attends=inferred[index].attends,
                snapshot_s=full.restart.snapshot_s if full.restart.policy != "never" else 0.0,
                keep=full.checkpoint.keep,
                on_nan=full.on_nan,
                stop_grace_s=full.stop_grace_s,
                head=None
                if index
                else HeadRole(
                    samples=info.samples,
                    takes=taken[0],
                    data=full.data.of_head,
                    epochs=full.epochs,
                    steps=full.steps,
                    eval_every=full.eval_every,
                    checkpoint=full.checkpoint,
                    micro_batches=micro_batches,
                    selects=full.selection is not None,
                    sync_steps=full.replication.every if replicated else None,
                ),
                tail=None
                if index < last
                else TailRole(
                    metrics=full.metrics,
                    selection=_selection(full),
                    labels=None if labelled else full.data.of_labels,
                ),
                replicas=module.most,
                elastic=elastic,
                length=full.length(module.schedule_every or "epoch", per_epoch),
            )
        )
    check_training(chain, workers, micro_batches)
    check_links(chain, workers)
    if chain.data.batch_size < 2:
        check_single_samples(workers)
    return tuple(workers)


@dataclass(frozen=True)
class _Cut:
    """Gradients sent up across the cut below a module."""

    gradients: int = 0  # that of every n-th batch is sent; 0: none
    bootstrapped: bool = False  # from the error signal of the module below, at once
    awaited: bool = False  # by an update, at the module above the cut or further up
    resend: int = 0  # how many may be awaited before another batch is taken
    late: int = 0  # batches by which a gradient may be late

    @property
    def of_links(self) -> dict[str, Any]:
        """The fields of an ``EdgeSpec``."""
        return {name: value for name, value in vars(self).items() if name != "late"}


NO_GRADIENTS = _Cut()


def _cuts(
    chain: ChainSpec, interfaces: Sequence[ResolvedInterface | None], micro_batches: int
) -> list[_Cut]:
    """Return what is sent up to each module's output: gradients for it, or to send on."""
    cuts: list[_Cut] = []
    graph = chain.graph
    for index, interface in enumerate(interfaces):
        if interface is None:
            cuts.append(NO_GRADIENTS)
            continue
        below = [interfaces[target] for target in graph.targets[index]]
        relayed = [cuts[source] for source in graph.sources[index] if not cuts[source].bootstrapped]
        passes_on = math.gcd(*(cut.gradients for cut in relayed))
        every = math.gcd(interface.needs.every, passes_on)
        bootstraps = interface.needs.bootstrapped and not passes_on
        signal = all(reader is not None and reader.timing.signals for reader in below)
        awaited = interface.timing.applies or any(cut.awaited and cut.gradients for cut in relayed)
        cuts.append(
            _Cut(
                gradients=every,
                bootstrapped=bool(every) and bootstraps and signal,
                awaited=bool(every) and awaited,
                resend=max(
                    _waited_for(interface) * micro_batches,
                    *(cut.resend for cut in relayed if cut.gradients),
                    0,
                ),
            )
        )
    for index in range(len(cuts) - 2, -1, -1):
        replicas = max(chain.modules[target].most for target in graph.targets[index])
        late = chain.links.window * replicas
        if not cuts[index].bootstrapped:
            late += max(cuts[target].late for target in graph.targets[index])
        cuts[index] = replace(cuts[index], late=late)
    return cuts


def _waited_for(interface: ResolvedInterface) -> int:
    """Return how many gradients a module may await before it takes another batch."""
    max_late = interface.needs.max_late
    return 0 if max_late is None else max_late + 1


def _sharing(replication: ReplicationSpec) -> dict[str, Any]:
    """Return how replicas share their weights, as fields of a ``WorkerSpec``."""
    strategy, compression = replication.strategy, replication.compression
    return {
        "strategy": strategy,
        "compression": compression,
        "sharing": tuple(
            choice for choice in (strategy, compression) if choice and ":" in choice.name
        ),
        "backend": replication.backend,
        "lr_scale": lr_scale(replication),
    }


def _selection(chain: ChainSpec) -> SelectionRole | None:
    """Return how the tail selects the best evaluation."""
    selection = chain.selection
    if selection is None:
        return None
    known = {metric.name: metric for metric in chain.metrics}
    name = selection.metric or (chain.metrics[0].name if chain.metrics else "loss")
    if name != "loss" and name not in known:
        raise SpecError(
            f"metric {name!r} is not evaluated",
            location=("selection", "metric"),
            hint=suggestion(name, ["loss", *known]),
        )
    up = rises(known[name]) if name in known else False
    if up is None:
        raise SpecError(
            f"metric {name!r} does not say whether higher is better",
            location=("selection", "metric"),
            hint="set the attribute 'higher_is_better' of its class, or select by another one",
        )
    if chain.eval_every == 0:
        raise SpecError("'selection' needs evaluations", location=("eval_every",))
    return SelectionRole(
        metric=name, rises=up, patience=selection.patience, min_delta=selection.min_delta
    )


def parameter_counts(workers: Sequence[WorkerSpec]) -> dict[str, int]:
    """Count the trainable parameters of each module's layers."""
    return {
        worker.module: sum(
            p.numel() for p in build_module(worker, "meta").parameters() if p.requires_grad
        )
        for worker in workers
    }
