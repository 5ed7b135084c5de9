"""LARS and LAMB: optimizers for large batches, whose steps are in proportion to the weights.

Each tensor's step is scaled by a trust ratio of norms, which keeps large learning rates stable. The
ratio is 1 if a norm is 0, as of new biases, and in groups with ``adapt=False``, which biases and
the parameters of normalisations usually are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

_Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]


class _LayerWise(Optimizer):
    """An optimizer that updates each group's tensors together."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            largest = 1.0 if name in ("momentum", "betas") else float("inf")
            for one in value if name == "betas" else (value,):
                if not 0 <= one < largest:
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
