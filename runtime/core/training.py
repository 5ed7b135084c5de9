"""Optimizers and schedules by name; seeds."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from dni_runtime.core.optimizers import LAMB, LARS, Muon
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.choices import Location, call, find_class

OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    name: cls
    for name, cls in vars(optim).items()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
} | {"LAMB": LAMB, "LARS": LARS, "Muon": Muon}
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
AUTO = "auto"
"""As an argument of a schedule: the length of the training."""

_OF_SCHEDULES = {"SequentialLR": True, "ChainedScheduler": False}
"""Schedules made of ``schedules``, and whether they take the optimizer first."""


def module_seed(seed: int, index: int) -> int:
    """Return the seed of a module's own random numbers, spread over 63 bits."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextlib.contextmanager
def seeded(start: int | Tensor) -> Iterator[Any]:
    """Seed torch's CPU generator (or set its state) inside the block, and restore it after that.

    Yields a function that reads the generator's state.
    """
    before = torch.get_rng_state()
    if isinstance(start, Tensor):
        torch.set_rng_state(start)
    else:
        torch.manual_seed(start)
    try:
        yield torch.get_rng_state
    finally:
        torch.set_rng_state(before)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of torch's generators, on the CPU and on a GPU."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Put torch's generators into a state of :func:`random_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def sparse_parameters(layers: nn.Module) -> frozenset[int]:
    """Return the ids of parameters whose gradients are sparse."""
    return frozenset(
        id(layer.weight)
        for layer in layers.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    )


_ON = ("cuda",)
_FUSED = dict.fromkeys((torch.float32, torch.float64), ("cpu", "cuda"))
"""Where fused optimizers are chosen: on the CPU, that of SGD steps wrongly in bfloat16 (2.13)."""


def build_optimizer(
    choice: Choice,
    parameters: Iterable[nn.Parameter] | Sequence[dict[str, Any]],
    location: Location = (),
    *,
    sparse: Collection[int] = (),  # of :func:`sparse_parameters`
) -> optim.Optimizer:
    """Make an optimizer, fused if torch has a fused one and the spec does not decide it.

    For parameters on the meta device, which are those of a module being checked, a step is tried
    with small ones of the same kinds.
    """
    cls = find_class(choice.name, "optimizer", OPTIMIZERS, optim.Optimizer, location)
    args = dict(choice.args)
    if isinstance(betas := args.get("betas"), list) and {*map(type, betas)} == {int, float}:
        args["betas"] = [float(beta) for beta in betas]  # torch takes no 0 beside a 0.999
    params: list[Any] = list(parameters)
    every: list[nn.Parameter] = [
        p for entry in params for p in (entry["params"] if isinstance(entry, dict) else [entry])
    ]
    if (
        "fused" in inspect.signature(cls).parameters
        and not {"fused", "foreach", "differentiable"} & set(args)
        and not any(id(p) in sparse for p in every)
        and all(p.is_floating_point() and p.device.type in _FUSED.get(p.dtype, _ON) for p in every)
    ):
        args["fused"] = True
    at = (*location, choice.name)
    optimizer = call(cls, args, name=choice.name, location=at, positional=(params,))
    for group in optimizer.param_groups if cls is optim.SGD and args.get("fused") else ():
        if group["momentum"] and not group["dampening"]:
            for p in group["params"]:  # else it fails where one has a gradient later than others
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    if any(p.is_meta for p in every):
        _try_a_step(choice, every, at, sparse)
    return cast("optim.Optimizer", optimizer)


def _try_a_step(
    choice: Choice, parameters: Sequence[nn.Parameter], at: Location, sparse: Collection[int]
) -> None:
    """Update stand-ins on the CPU: optimizers do not work on the meta device."""
    with torch.device("cpu"):
        standing_in, also_sparse = [], set()
        for p in parameters:
            stand_in = nn.Parameter(torch.zeros([min(size, 2) for size in p.shape], dtype=p.dtype))
            stand_in.grad = torch.zeros_like(stand_in)
            if id(p) in sparse:
                row = torch.zeros_like(stand_in[:1]).detach()
                stand_in.grad = torch.sparse_coo_tensor(
                    torch.tensor([[0]]), row, stand_in.shape, check_invariants=True
                )
                also_sparse.add(id(stand_in))
            standing_in.append(stand_in)
        optimizer = build_optimizer(choice, standing_in, at[:-1], sparse=also_sparse)
        try:
            optimizer.step()
        except TypeError as error:
            if "closure" not in str(error):
                raise _refusal(choice, error, at) from None
            raise SpecError(
                f"{choice.name} needs a closure: it computes the loss several times in a step",
                location=at,
                hint="a module has one gradient for each batch; use another one, such as Adam",
            ) from None
        except Exception as error:
            raise _refusal(choice, error, at) from None


def _refusal(choice: Choice, error: Exception, at: Location) -> SpecError:
    return SpecError(f"{choice.name} cannot update the parameters: {error}", location=at)


def build_schedule(
    choice: Choice,
    optimizer: optim.Optimizer,
    location: Location = (),
    *,
    length: int | None = None,  # in its steps, what ``auto`` stands for; None: not known
) -> lr_scheduler.LRScheduler:
    """Make a learning-rate schedule; ``schedules`` of SequentialLR are choices themselves.

    In a schedule that begins at a milestone ``auto`` is what is left from there on.
    """
    cls = find_class(choice.name, "schedule", SCHEDULES, lr_scheduler.LRScheduler, location)
    if issubclass(cls, lr_scheduler.OneCycleLR):
        cls = type(cls.__name__, (_KeepsItsLastRate, cls), {})
    at = (*location, choice.name)
    args = dict(choice.args)
    for key in [key for key, value in args.items() if value == AUTO]:
        if length is None:
            raise SpecError(
                f"{key}: auto needs the length of the training, which is not known",
                location=(*at, key),
                hint="give a number, or the chain's 'steps'",
            )
        args[key] = length
    milestones = args.get("milestones", [])
    if not isinstance(milestones, list) or any(type(one) is not int for one in milestones):
        raise SpecError(
            f"{choice.name} needs whole numbers as 'milestones', as [5, 8], not {milestones!r}",
            location=(*at, "milestones"),
        )
    positional: list[Any] = [optimizer]
    if choice.name in _OF_SCHEDULES:
        begins = dict(enumerate(milestones, start=1))
        inner = [
            build_schedule(
                schedule,
                optimizer,
                (*at, "schedules", number),
                length=None if length is None else max(length - begins.get(number, 0), 1),
            )
            for number, schedule in enumerate(_choices(args.pop("schedules", None), at))
        ]
        positional = [optimizer, inner] if _OF_SCHEDULES[choice.name] else [inner]
    made = call(cls, args, name=choice.name, location=at, positional=positional)
    return cast("lr_scheduler.LRScheduler", made)


class _KeepsItsLastRate(lr_scheduler.OneCycleLR):
    """After its end, where torch's raises an error; within other schedules, too."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self.total_steps:
            return super().get_lr()
        return [group["lr"] for group in self.optimizer.param_groups]


def has_auto(value: Any) -> bool:
    """Return whether a schedule, or a part of its description, says ``auto``."""
    if isinstance(value, Choice):
        value = value.args
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(has_auto, value)) if isinstance(value, list | tuple) else value == AUTO


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


def torch_dtype(name: str) -> torch.dtype:
    return cast("torch.dtype", getattr(torch, name))


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, in the same memory; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def split_like(row_N: Tensor, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Cut a row of real numbers into tensors like some parameters."""
    at = 0
    for p in parameters:
        p_real = real(p.detach())
        part = row_N[at : at + p_real.numel()].view_as(p_real).to(p_real)
        at += p_real.numel()
        yield torch.view_as_complex(part.clone()) if p.is_complex() else part


def empty_batch(spec: TensorSpec, batch: int, device: str | torch.device) -> Tensor:
    """Return zeros in the shape of a batch; ``device="meta"`` takes no memory."""
    return torch.zeros((batch, *spec.shape), dtype=torch_dtype(spec.dtype), device=device)
