"""Optimizers and schedules by name, and seeds."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from dni_runtime.core.choices import Location, call, find_class
from dni_runtime.spec import Choice, TensorSpec

OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    name: cls
    for name, cls in vars(optim).items()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
}
SCHEDULES: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: cls
    for name, cls in vars(lr_scheduler).items()
    if isinstance(cls, type)
    and issubclass(cls, lr_scheduler.LRScheduler)
    and cls is not lr_scheduler.LRScheduler
    and not name.startswith("_")
    # These need callables, other schedules or the loss, which a name with keywords cannot carry.
    and name not in {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"}
    and name != "ReduceLROnPlateau"
}


def module_seed(seed: int, index: int) -> int:
    """The seed of a module's own random numbers, spread over 63 bits."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def build_optimizer(
    choice: Choice, parameters: Iterable[nn.Parameter], location: Location = ()
) -> optim.Optimizer:
    """Make an optimizer, fused where torch has a fused one and the spec does not decide it.

    Raises:
        SpecError: Unknown optimizer or keyword, or a value that it refuses.
    """
    cls = find_class(choice.name, "optimizer", OPTIMIZERS, optim.Optimizer, location)
    args = dict(choice.args)
    params = list(parameters)
    if (
        "fused" in inspect.signature(cls).parameters
        and not {"fused", "foreach", "differentiable"} & set(args)
        and all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
    ):
        args["fused"] = True
    at = (*location, choice.name)
    return cast("optim.Optimizer", call(cls, args, name=choice.name, location=at, given=(params,)))


def build_schedule(
    choice: Choice, optimizer: optim.Optimizer, location: Location = ()
) -> lr_scheduler.LRScheduler:
    """Make a learning-rate schedule.

    Raises:
        SpecError: Unknown schedule or keyword, or a value that it refuses.
    """
    cls = find_class(choice.name, "schedule", SCHEDULES, lr_scheduler.LRScheduler, location)
    at = (*location, choice.name)
    return cast(
        "lr_scheduler.LRScheduler",
        call(cls, choice.args, name=choice.name, location=at, given=(optimizer,)),
    )


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name in a spec."""
    return cast("torch.dtype", getattr(torch, name))


def empty_batch(spec: TensorSpec, batch: int, device: str | torch.device) -> Tensor:
    """Zeros in the shape of a batch; ``device="meta"`` takes no memory."""
    return torch.zeros((batch, *spec.shape), dtype=torch_dtype(spec.dtype), device=device)
