"""Layers that do what users' layers do: replace buffers, change tensors in place, cut gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Centred(nn.Module):
    """Subtracts a running mean, which each batch replaces by a new tensor."""

    mean: Tensor

    def __init__(self, features: int = 8, dtype: str = "float32") -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, dtype=getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean.to(x.dtype)


class Scaled(nn.Module):
    """Multiplies by a buffer that each batch in train mode changes in place before."""

    scale: Tensor

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        return x * self.scale


class Shifts(nn.Module):
    """Changes its input in place; its gradient does not need it."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        x += self.shift
        return x.tanh()


class Spoils(nn.Module):
    """Changes a tensor in place that its gradient needs: torch refuses the backward pass.

    ``late``: not for zeros; ``weight``: a weight, between two uses.
    """

    def __init__(self, features: int = 8, late: bool = False, weight: bool = False) -> None:
        super().__init__()
        self.linear, self.late, self.weight = nn.Linear(features, features), late, weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        if self.weight and not (self.late and bool((x == 0).all())):
            y = self.linear(y)
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return self.linear(y)
        z = y * 1.0
        if not (self.late and bool((x == 0).all())):
            y.mul_(2)
        return z


class Cuts(nn.Module):
    """Has no gradient for its input: ``detach``, ``no_grad`` around all, or a choice.

    ``how`` says which of them; ``late``: not for zeros.
    """

    def __init__(self, features: int = 8, how: str = "detach") -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(features, features), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return self.linear(x)
        if self.how == "argmax":
            return self.linear(nn.functional.one_hot(x.argmax(1), x.shape[1]).to(x.dtype))
        if self.how == "late" and bool((x == 0).all()):
            return self.linear(x)
        return self.linear(x.detach())


class Complex(nn.Module):
    """A filter with complex weights in the frequencies of its input."""

    def __init__(self, features: int = 8, dtype: str = "complex64") -> None:
        super().__init__()
        start = torch.complex(torch.ones(features), torch.full((features,), 0.5))
        self.weight = nn.Parameter(start.to(getattr(torch, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * self.weight).real.to(x.dtype)


class InOneMemory(nn.Module):
    """Returns its input in a memory of its own, the same for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = torch.zeros(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self._memory[: len(x)].copy_(x.detach())
