"""Gradients from an activation to what it was computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dni_runtime.errors import SpecError

IN_PLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)
"""How autograd's message begins."""


def backward(
    h: Tensor,
    g: Tensor | None,
    *,
    inputs: Sequence[Tensor] | None = None,  # None: all leaves
    retain: bool = False,  # the graph is needed again
) -> None:
    """Sum up gradients in ``Tensor.grad``, from ``g`` at ``h`` (None: ``h`` is the loss)."""
    if not h.requires_grad or inputs == []:
        return
    root = h if g is None else _Root.apply(h, g)  # type: ignore[no-untyped-call]  # torch
    root.backward(inputs=inputs, retain_graph=retain)


def changed_in_place(place: str, error: RuntimeError) -> SpecError | None:
    """Return the error if code changed a tensor that its gradient needs; None for others."""
    if IN_PLACE not in str(error):
        return None
    what = str(error).split(". Hint:")[0].removeprefix(IN_PLACE).lstrip(": ")
    return SpecError(
        f"{place} changes a tensor in place that its gradient needs: {what}",
        hint="make a new one there, as 'y = y * 2' does instead of 'y *= 2' or 'y.mul_(2)'",
    )


def separate(parameters: Iterable[Tensor]) -> None:
    """Let each gradient have a memory of its own, before more is added to it.

    Autograd may leave one memory as several, as for ``a`` and ``b`` of ``a[None] + b[None]``.
    """
    seen: set[int] = set()
    for p in parameters:
        if p.grad is None or p.grad.layout is not torch.strided:
            continue
        memory = p.grad.untyped_storage().data_ptr()
        if memory in seen:
            p.grad = p.grad.clone()
        seen.add(memory)


class _Root(torch.autograd.Function):
    """A scalar whose gradient at ``h`` is ``g``: ``torch.autograd.backward(h, g)``.

    torch's function compares their shapes with sympy, whose import takes 0.3 s of CPU and 40 MiB.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return h.new_zeros(())

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor) -> tuple[Tensor, None]:
        (g,) = ctx.saved_tensors
        return g, None
