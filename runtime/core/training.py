"""Optimizers, schedules, losses and metrics by name, and seeds."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from dni_runtime.core.choices import Location, call, find_class
from dni_runtime.errors import SpecError
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
    # These need callables or the loss, which a name with keywords cannot carry.
    and name not in {"LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau"}
}
_OF_SCHEDULES = {"SequentialLR": True, "ChainedScheduler": False}
"""Schedules of other ``schedules``, and whether the optimizer comes before them."""
LOSSES: dict[str, type[nn.Module]] = {
    name: cls
    for name, cls in vars(nn).items()
    if isinstance(cls, type)
    and issubclass(cls, nn.modules.loss._Loss)
    and "reduction" in inspect.signature(cls).parameters
}

Metric = Callable[[Tensor, Tensor], Tensor]


def _accuracy(p_BC: Tensor, y_BY: Tensor) -> Tensor:
    return (p_BC.argmax(1) == y_BY).float().mean()


def _top5(p_BC: Tensor, y_BY: Tensor) -> Tensor:
    top = p_BC.topk(min(5, p_BC.shape[1]), 1).indices
    return (top == y_BY.unsqueeze(1)).any(1).float().mean()


METRICS: dict[str, Metric] = {
    "accuracy": _accuracy,
    "top5": _top5,
    "mae": lambda p_BP, y_BY: (p_BP - y_BY).abs().mean(),
    "mse": lambda p_BP, y_BY: (p_BP - y_BY).square().mean(),
}
"""Means over a batch, of predictions and labels."""


def module_seed(seed: int, index: int) -> int:
    """The seed of a module's own random numbers, spread over 63 bits."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def build_optimizer(
    choice: Choice,
    parameters: Iterable[nn.Parameter] | Sequence[dict[str, Any]],
    location: Location = (),
) -> optim.Optimizer:
    """Make an optimizer, fused where torch has a fused one and the spec does not decide it.

    Args:
        choice: Its name and keywords.
        parameters: What it updates, or groups of that with options of their own.
        location: Where the choice stands in the spec.

    Raises:
        SpecError: Unknown optimizer or keyword, or a value that it refuses.
    """
    cls = find_class(choice.name, "optimizer", OPTIMIZERS, optim.Optimizer, location)
    args = dict(choice.args)
    params: list[Any] = list(parameters)
    every: list[Tensor] = [
        p for one in params for p in (one["params"] if isinstance(one, dict) else [one])
    ]
    if (
        "fused" in inspect.signature(cls).parameters
        and not {"fused", "foreach", "differentiable"} & set(args)
        and all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in every)
    ):
        args["fused"] = True
    at = (*location, choice.name)
    return cast("optim.Optimizer", call(cls, args, name=choice.name, location=at, given=(params,)))


def build_schedule(
    choice: Choice, optimizer: optim.Optimizer, location: Location = ()
) -> lr_scheduler.LRScheduler:
    """Make a learning-rate schedule; ``schedules`` of SequentialLR are choices themselves.

    Raises:
        SpecError: Unknown schedule or keyword, or a value that it refuses.
    """
    cls = find_class(choice.name, "schedule", SCHEDULES, lr_scheduler.LRScheduler, location)
    at = (*location, choice.name)
    args = dict(choice.args)
    given: list[Any] = [optimizer]
    if choice.name in _OF_SCHEDULES:
        inner = [
            build_schedule(one, optimizer, (*at, "schedules", number))
            for number, one in enumerate(_choices(args.pop("schedules", None), at))
        ]
        given = [optimizer, inner] if _OF_SCHEDULES[choice.name] else [inner]
    made = call(cls, args, name=choice.name, location=at, given=given)
    return cast("lr_scheduler.LRScheduler", made)


def _choices(value: Any, location: Location) -> list[Choice]:
    try:
        return TypeAdapter(list[Choice]).validate_python(value)
    except ValidationError:
        raise SpecError(
            "'schedules' is not a list of schedules",
            location=location,
            hint="as in SequentialLR: {schedules: [LinearLR: {…}, CosineAnnealingLR: {…}], "
            "milestones: [100]}",
        ) from None


def build_loss(choice: Choice, location: Location = ()) -> nn.Module:
    """Make a loss that is a mean over the batch (gradients then travel per sample).

    Raises:
        SpecError: Unknown loss or keyword, or a ``reduction`` other than ``mean``.
    """
    cls = find_class(choice.name, "loss", LOSSES, nn.Module, location)
    at = (*location, choice.name)
    if choice.args.get("reduction", "mean") != "mean":
        raise SpecError(
            f"{choice.name} with reduction {choice.args['reduction']!r}",
            location=(*at, "reduction"),
            hint="allowed: 'mean'; gradients between modules are per sample",
        )
    loss = call(cls, _with_tensors(choice.args), name=choice.name, location=at)
    return cast("nn.Module", loss)


def _with_tensors(args: dict[str, Any]) -> dict[str, Any]:
    """Lists of numbers become tensors (``weight`` and ``pos_weight`` of torch's losses)."""
    return {
        key: torch.tensor(value, dtype=torch.float32) if isinstance(value, list) else value
        for key, value in args.items()
    }


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a name in a spec."""
    return cast("torch.dtype", getattr(torch, name))


def empty_batch(spec: TensorSpec, batch: int, device: str | torch.device) -> Tensor:
    """Zeros in the shape of a batch; ``device="meta"`` takes no memory."""
    return torch.zeros((batch, *spec.shape), dtype=torch_dtype(spec.dtype), device=device)
