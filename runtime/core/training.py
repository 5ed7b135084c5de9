"""Optimizers and schedules by name, with LARS and LAMB for large batches; seeds."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.choices import Location, call, find_class

_Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]


class _LayerWise(optim.Optimizer):
    """An optimizer for large batches, whose steps are in proportion to the weights.

    Each tensor's step is scaled by a trust ratio of norms, which keeps large learning rates stable.
    The ratio is 1 if a norm is 0, as of new biases, and in groups with ``adapt=False``, which
    biases and the parameters of normalisations usually are.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            largest = 1.0 if name in ("momentum", "betas") else float("inf")
            for number in value if name == "betas" else (value,):
                if not 0 <= number < largest:
                    bound = " and less than 1" if largest == 1 else ""
                    raise ValueError(f"{name} is {value}, but must be at least 0{bound}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's returns the loss of a closure, which no module has
        """Make one step; ``closure`` is not used."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in params]
            if any(g.is_sparse for g in gradients):
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            if params:
                self._update(group, params, gradients)

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def _state(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return a state in each parameter's shape; it begins with zeros."""
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [state[name] for state in states]


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888, algorithm 1)::

        v = m v + lr (eta |w| / (|g| + beta |w|)) (g + beta w),   w = w - v

    where m is ``momentum``, beta ``weight_decay`` and eta ``trust_coefficient``. Without ``adapt``,
    it is SGD with momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            params, defaults | {"trust_coefficient": trust_coefficient, "adapt": adapt}
        )

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        steps = torch._foreach_add(gradients, params, alpha=group["weight_decay"])
        if group["adapt"]:
            weights, slopes = _norms(params), _norms(gradients)
            below = slopes + group["weight_decay"] * weights
            _scale(steps, group["trust_coefficient"] * weights, below, weights * slopes != 0)
        velocities = self._state(params, "momentum_buffer")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps, alpha=group["lr"])
        torch._foreach_sub_(params, velocities)


class LAMB(_LayerWise):
    """Layer-wise adaptive moments (You et al. 2019, arXiv:1904.00962, algorithm 2)::

        u = m / (sqrt(v) + eps) + lambda w,   w = w - lr (|w| / |u|) u

    where m and v are Adam's means, corrected for their start at zero, and lambda is
    ``weight_decay``. Without ``adapt``, it is AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"adapt": adapt})

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        first, second = group["betas"]
        means, squares = self._state(params, "exp_avg"), self._state(params, "exp_avg_sq")
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        counts = []
        for p in params:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            counts.append(self.state[p]["step"])
        below = torch._foreach_div(squares, [1 - second**count for count in counts])
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, group["eps"])
        steps = torch._foreach_div(means, [1 - first**count for count in counts])
        torch._foreach_div_(steps, below)
        torch._foreach_add_(steps, params, alpha=group["weight_decay"])
        if group["adapt"]:
            weights, lengths = _norms(params), _norms(steps)
            _scale(steps, weights, lengths, weights * lengths != 0)
        torch._foreach_add_(params, steps, alpha=-group["lr"])


def _norms(tensors: _Tensors) -> Tensor:
    """Return the Euclidean norm of each of N tensors, ``[N]``."""
    return torch.stack(torch._foreach_norm(tensors))


def _scale(steps: _Tensors, above_N: Tensor, below_N: Tensor, where_N: Tensor) -> None:
    """Multiply steps by a ratio, where it has a value."""
    ratios_N = torch.where(where_N, above_N / below_N, torch.ones_like(above_N))
    torch._foreach_mul_(steps, list(ratios_N.unbind()))


OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    name: cls
    for name, cls in vars(optim).items()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
} | {"LAMB": LAMB, "LARS": LARS}
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
    positional: list[Any] = [optimizer]
    if choice.name in _OF_SCHEDULES:
        milestones = args.get("milestones")
        begins = dict(enumerate(milestones if isinstance(milestones, list) else (), start=1))
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
    """Return torch's dtype of a name in a spec."""
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
