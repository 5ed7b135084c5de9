"""Optimizers that torch has not, or not fast enough: LARS and LAMB for large batches, and Muon.

The steps of LARS and LAMB are in proportion to the weights: each tensor's is scaled by a trust
ratio of norms, which keeps large learning rates stable. The ratio is 1 if a norm is 0, as of new
biases, and in groups with ``adapt=False``, which biases and normalisations' parameters usually are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

_Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]


class _ByGroup(Optimizer):
    """An optimizer that updates the parameters of a group together."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            largest = 1.0 if name in ("momentum", "betas") else math.inf
            numbers = (value,) if isinstance(value, int | float) else ()
            for number in value if name == "betas" else numbers:
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


class LARS(_ByGroup):
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


class LAMB(_ByGroup):
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


class Muon(_ByGroup):
    """Momentum whose singular values are made one, for matrices (Jordan et al. 2024)::

        b = m b + (1 - m) g,   u = NS((1 - m) g + m b),   w = (1 - lr lambda) w - lr c u

    where NS are ``ns_steps`` Newton-Schulz iterations, and c fits the step to the matrix:
    ``original`` is sqrt(max(1, rows / columns)), ``match_rms_adamw`` 0.2 sqrt(max(rows, columns)),
    which makes the step as large as AdamW's, so that both have one rate (Liu et al. 2025,
    arXiv:2502.16982). Arguments and state are those of ``torch.optim.Muon`` (2.9), which older
    ones have not, and which iterates in bfloat16. So does this one on GPUs; on CPUs that takes 14
    to 40 times as long as float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,  # None: as ``original``
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn is {adjust_lr_fn!r}, but must be 'original' or 'match_rms_adamw'"
            )
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        iterations = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}
        super().__init__(
            params, defaults | {"nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn} | iterations
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2 or p.is_complex():
                    raise ValueError(
                        f"Muon updates real matrices, but one parameter is "
                        f"{'complex' if p.is_complex() else ' x '.join(map(str, p.shape))}"
                    )

    def _update(self, group: dict[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        momentum, lr = group["momentum"], group["lr"]
        means = self._state(params, "momentum_buffer")
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        steps: _Tensors = means
        if group["nesterov"]:
            steps = torch._foreach_lerp(gradients, means, momentum)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, p in enumerate(params):
            alike.setdefault(tuple(p.shape), []).append(number)
        for (rows, columns), numbers in alike.items():
            steps_NRC = torch.stack([steps[number] for number in numbers])
            steps_NRC = _orthogonal(
                steps_NRC, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            scale = math.sqrt(max(1, rows / columns))
            if group["adjust_lr_fn"] == "match_rms_adamw":
                scale = 0.2 * math.sqrt(max(rows, columns))
            for number, step in zip(numbers, steps_NRC.unbind(), strict=True):
                params[number].add_(step, alpha=-lr * scale)


def _orthogonal(
    x_NRC: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> Tensor:
    """Bring the singular values of matrices near one; all of the same shape, at once."""
    a, b, c = coefficients
    is_tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    narrow = torch.bfloat16 if x_NRC.is_cuda else torch.promote_types(x_NRC.dtype, torch.float32)
    x = (x_NRC.mT if is_tall else x_NRC).to(narrow)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(x_NRC.dtype)


def _norms(tensors: _Tensors) -> Tensor:
    """Return the Euclidean norm of each of N tensors, ``[N]``."""
    return torch.stack(torch._foreach_norm(tensors))


def _scale(steps: _Tensors, above_N: Tensor, below_N: Tensor, where_N: Tensor) -> None:
    """Multiply steps by a ratio, where it has a value."""
    ratios_N = torch.where(where_N, above_N / below_N, torch.ones_like(above_N))
    torch._foreach_mul_(steps, list(ratios_N.unbind()))
