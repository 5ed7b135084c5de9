"""Gradients from an activation to what it was computed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dni_runtime.wire import Part


def backward(
    h: Tensor,
    g: Tensor | None,
    *,
    inputs: Sequence[Tensor] | None = None,
    retain: bool = False,
) -> None:
    """Sum up gradients in ``Tensor.grad``, from ``g`` at ``h`` (None: ``h`` is the loss).

    Args:
        h: Where to start.
        g: The gradient there.
        inputs: Tensors that need gradients (default: all leaves).
        retain: Whether the graph is needed again.
    """
    if not h.requires_grad or inputs == []:
        return
    root = h if g is None else _Root.apply(h, g)  # type: ignore[no-untyped-call]  # torch
    root.backward(inputs=inputs, retain_graph=retain)


def per_sample(g_BX: Tensor | None, part: Part) -> Tensor | None:
    """Return the gradient per sample, given that of the mean over a whole batch."""
    return None if g_BX is None else g_BX.mul_(part.samples).contiguous()


class _Root(torch.autograd.Function):
    """A scalar whose gradient at ``h`` is ``g``: ``torch.autograd.backward(h, g)``.

    torch's function compares their shapes with sympy, whose import takes 0.3 s of CPU and 40 MiB.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return h.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        (g,) = ctx.saved_tensors
        return g, None
