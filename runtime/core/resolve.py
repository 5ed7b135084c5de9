"""From a chain's spec to what each worker needs: defaults, shapes and contracts.

Every module is built on torch's meta device and run on a batch without memory, so that a wrong
name, keyword or shape is an error before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dni_runtime.core.choices import Location
from dni_runtime.core.interfaces import Boundary, build_interface, default_interface
from dni_runtime.core.interfaces import resolve_interface as find_interface
from dni_runtime.core.layers import build_layers
from dni_runtime.core.losses import ChainLoss, class_axis
from dni_runtime.core.metrics import check_metrics
from dni_runtime.core.shapes import BATCH, Inferred, infer_shapes
from dni_runtime.core.training import (
    build_optimizer,
    build_schedule,
    empty_batch,
)
from dni_runtime.errors import SpecError
from dni_runtime.spec import (
    ChainSpec,
    Choice,
    DataInfo,
    HeadRole,
    ModuleSpec,
    TailRole,
    TensorSpec,
    WorkerSpec,
)
from dni_runtime.spec.worker import retained

DEFAULT_OPTIMIZER = Choice(name="Adam", args={"lr": 0.001})


def resolved_chain(chain: ChainSpec, info: DataInfo) -> ChainSpec:
    """The chain with every module's settings filled in; what ``dnictl config`` prints.

    Args:
        chain: The chain.
        info: What its data looks like.

    Raises:
        SpecError: A layer, gradient interface or option is unknown or does not fit.
    """
    return _resolve(chain, infer_shapes(chain, info), info)


def _resolve(chain: ChainSpec, inferred: Sequence[Inferred], info: DataInfo) -> ChainSpec:
    modules = []
    for index, module in enumerate(chain.modules):
        interface = None
        if index < len(chain.modules) - 1:
            own = module.interface is not None
            at: Location = ("modules", index, "interface") if own else ("defaults", "interface")
            choice = chain.setting(index, "interface") or default_interface(inferred[index].attends)
            interface = find_interface(choice, at).choice
        modules.append(
            ModuleSpec(
                name=module.name,
                layers=module.layers,
                interface=interface,
                optimizer=chain.setting(index, "optimizer") or DEFAULT_OPTIMIZER,
                schedule=chain.setting(index, "schedule"),
                schedule_every=chain.setting(index, "schedule_every") or "epoch",
                device=chain.setting(index, "device") or "cpu",
                precision=chain.setting(index, "precision") or "float32",
                cpus=chain.resources(index).cpus,
                resources=chain.resources(index),
            )
        )
    update = {"modules": tuple(modules), "defaults": type(chain.defaults)()}
    prediction = inferred[-1].output
    if "metrics" not in chain.model_fields_set and class_axis(prediction, info.label) is None:
        update["metrics"] = ()  # the default needs class labels
    return chain.model_copy(update=update)


def worker_specs(chain: ChainSpec, info: DataInfo) -> tuple[WorkerSpec, ...]:
    """Check the whole chain and give each worker its spec.

    Args:
        chain: The chain.
        info: What its data looks like.

    Raises:
        SpecError: Something is unknown, misspelt or does not fit; ``location`` says where.
    """
    if chain.data.batch_size < 2:
        _refuse_batchnorm(chain)
    inferred = infer_shapes(chain, info)
    full = _resolve(chain, inferred, info)
    activations = [one.output for one in inferred]
    prediction = activations[-1]
    loss = _check_loss(full, prediction, info)
    check_metrics(full.metrics, loss, prediction, info.label)
    interfaces = [
        None if module.interface is None else find_interface(module.interface)
        for module in full.modules
    ]
    every = [0 if interface is None else interface.every for interface in interfaces]
    blocks = [interface is not None and interface.blocks for interface in interfaces]
    late = [0] * len(interfaces)
    for index in range(len(interfaces) - 2, -1, -1):
        below = interfaces[index + 1]
        late[index] = full.links.window + (late[index + 1] if below and below.defers else 0)
    workers = []
    last = len(full.modules) - 1
    for index, module in enumerate(full.modules):
        assert module.optimizer is not None
        assert module.schedule_every is not None
        assert module.device is not None
        assert module.precision is not None
        assert module.cpus is not None
        workers.append(
            WorkerSpec(
                chain=full.name,
                module=module.name,
                index=index,
                layers=module.layers,
                interface=module.interface,
                optimizer=module.optimizer,
                schedule=module.schedule,
                schedule_every=module.schedule_every,
                loss=full.loss,
                seed=full.seed,
                device=module.device,
                precision=module.precision,
                cpus=module.cpus,
                input=info.sample if index == 0 else activations[index - 1],
                output=activations[index],
                label=info.label,
                prediction=prediction,
                classes=info.classes,
                batch_limit=full.data.largest_batch,
                upstream=full.modules[index - 1].name if index else None,
                downstream=full.modules[index + 1].name if index < last else None,
                gradients_in=every[index],
                late=late[index],
                gradients_out=every[index - 1] if index else 0,
                links=full.links,
                retain=retained(full, index),
                blocks=blocks[index],
                attends=inferred[index].attends,
                snapshot_s=full.restart.snapshot_s if full.restart.policy != "never" else 0.0,
                keep=full.checkpoint.keep,
                stop_grace_s=full.stop_grace_s,
                head=None
                if index
                else HeadRole(
                    data=full.data,
                    epochs=full.epochs,
                    steps=full.steps,
                    eval_every=full.eval_every,
                    checkpoint=full.checkpoint,
                ),
                tail=TailRole(metrics=full.metrics) if index == last else None,
            )
        )
    _check_training(chain, workers)
    _check_links(chain, workers)
    return tuple(workers)


def parameter_counts(workers: Sequence[WorkerSpec]) -> dict[str, int]:
    """Trainable parameters of each module's layers."""
    counts = {}
    with torch.device("meta"):
        for worker in workers:
            layers = build_layers(worker.layers)
            counts[worker.module] = sum(p.numel() for p in layers.parameters() if p.requires_grad)
    return counts


def _check_loss(chain: ChainSpec, prediction: TensorSpec, info: DataInfo) -> ChainLoss:
    loss = ChainLoss(chain.loss, prediction, info.label, ("loss",))
    p_BP = empty_batch(prediction, BATCH, "cpu").requires_grad_()
    y_BY = empty_batch(info.label, BATCH, "cpu")
    hint = f"the tail gives {prediction}, labels are {info.label}"
    try:
        value = loss(p_BP, y_BY)
        adds_up = ":" in chain.loss.name and _adds_up(loss, p_BP, y_BY)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(
            f"{chain.loss.name} does not fit the chain's output: {reason}",
            location=("loss",),
            hint=hint,
        ) from None
    if value.dim() != 0:
        raise SpecError(
            f"{chain.loss.name} gives {tuple(value.shape)}, not a scalar",
            location=("loss",),
            hint=hint,
        )
    if adds_up:
        raise SpecError(
            f"{chain.loss.name} is a sum over the batch: for twice the samples it is twice as high",
            location=("loss",),
            hint="divide by the number of samples; gradients between modules are per sample",
        )
    if loss.is_cross_entropy and info.classes is not None and (loss.scores or 0) < info.classes:
        raise SpecError(
            f"the tail gives {prediction}, but the data has {info.classes} classes",
            location=("modules", len(chain.modules) - 1, "layers"),
            hint=f"end with a layer of {info.classes} outputs",
        )
    return loss


def _adds_up(loss: ChainLoss, p_BP: Tensor, y_BY: Tensor) -> bool:
    """Whether a loss is a sum over the batch instead of a mean."""
    p_BP = torch.rand(p_BP.shape, generator=torch.Generator().manual_seed(0)).to(p_BP.dtype)
    once = float(loss(p_BP, y_BY))
    twice = float(loss(torch.cat([p_BP, p_BP]), torch.cat([y_BY, y_BY])))
    return math.isclose(twice, 2 * once, rel_tol=1e-4) and abs(once) > 1e-6


def _check_training(chain: ChainSpec, workers: Sequence[WorkerSpec]) -> None:
    """Make optimizers, schedules and interfaces once, so that their errors come now."""
    for worker in workers:
        at = ("modules", worker.index)
        parameters = [nn.Parameter(torch.zeros(1))]
        optimizer = build_optimizer(
            worker.optimizer, parameters, _place(chain, worker.index, "optimizer")
        )
        if worker.schedule is not None:
            build_schedule(worker.schedule, optimizer, _place(chain, worker.index, "schedule"))
        if worker.interface is not None:
            if not worker.output.dtype.startswith(("float", "bfloat")):
                raise SpecError(
                    f"the module gives {worker.output}, which has no gradient",
                    location=(*at, "layers"),
                    hint="cut the chain where activations are floating-point numbers",
                )
            with torch.device("meta"):
                build_interface(
                    worker.interface,
                    Boundary.of(worker),
                    _place(chain, worker.index, "interface"),
                )


def _check_links(chain: ChainSpec, workers: Sequence[WorkerSpec]) -> None:
    for worker in workers:
        if worker.blocks and chain.links.on_loss == "continue":
            raise SpecError(
                f"module {worker.module!r} takes no other batch before the true gradient has come "
                "(its interface waits for it), so it cannot continue without its neighbour",
                location=("links", "on_loss"),
                hint="'on_loss: wait', or another gradient interface",
            )
    for field in ("dtype", "gradient_dtype"):
        if getattr(chain.links, field) != "int8-channel":
            continue
        for worker in workers[:-1]:
            if not worker.output.shape:
                raise SpecError(
                    f"'int8-channel' needs channels, but module {worker.module!r} gives "
                    f"{worker.output}",
                    location=("links", field),
                    hint="'int8' has one scale for the whole tensor",
                )


def _place(chain: ChainSpec, index: int, field: str) -> Location:
    """Where a module's setting stands: with the module, or with the defaults."""
    own = getattr(chain.modules[index], field) is not None
    return ("modules", index, field) if own else ("defaults", field)


def _refuse_batchnorm(chain: ChainSpec) -> None:
    for index, module in enumerate(chain.modules):
        for number, layer in enumerate(module.layers):
            if layer.type.startswith("BatchNorm"):
                raise SpecError(
                    f"{layer.type} needs batches of more than one sample, batch_size is 1",
                    location=("modules", index, "layers", number),
                )
