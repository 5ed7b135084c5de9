"""Whether the modules of a chain have the gradients that others wait for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from dni_runtime.core.backward import changed_in_place
from dni_runtime.core.layers import build_module
from dni_runtime.core.shapes import BATCH
from dni_runtime.core.training import empty_batch
from dni_runtime.errors import SpecError
from dni_runtime.spec import WorkerSpec


def check_gradients(worker: WorkerSpec, own: nn.Module, learns: Collection[str]) -> None:
    """Refuse a module without a gradient that an update waits for.

    It computes zeros forward and back: on the meta device, as ``own`` is, or in memory if a layer
    needs that. Modules in ``learns`` learn from gradients, or have one upstream that does.
    """
    at, name = ("modules", worker.index, "layers"), worker.module
    # tied weights come with this many samples
    rows = max([BATCH, *(layer.args.get("rows", 1) for layer in worker.layers)])
    for device in ("meta", "cpu"):
        xs = [empty_batch(one, rows, device) for one in worker.inputs]
        awaited = {
            edge.source: x.requires_grad_()
            for x, edge in zip(xs, worker.sources, strict=False)
            if edge.awaited and edge.source in learns
        }
        layers = own
        if device == "cpu":
            layers = build_module(worker, device)
            for p, known in zip(layers.parameters(), own.parameters(), strict=True):
                p.requires_grad_(known.requires_grad)
        wanted = [*awaited.values(), *(p for p in layers.parameters() if p.requires_grad)]
        if not wanted:
            return
        try:
            h_BH = layers(*[x.clone() for x in xs])
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if h_BH.requires_grad:
                found = torch.autograd.grad(h_BH.sum(), wanted, allow_unused=True)
            break
        except Exception as error:  # of a layer that cannot run so
            changed = isinstance(error, RuntimeError) and changed_in_place(name, error)
            if changed:
                changed.location = at
                raise changed from None
    else:
        return
    hint = "leave out what cuts it ('detach', 'torch.no_grad', 'argmax'), or pass it straight "
    hint += "through; 'freeze: true' is for what is not to learn"
    if worker.tail is not None and not h_BH.requires_grad:
        raise SpecError(f"the output of module {name!r} has no gradient", location=at, hint=hint)
    for source, g_BX in zip(awaited, found, strict=False):
        if g_BX is None:
            raise SpecError(
                f"module {name!r} has no gradient for module {source!r}, which waits for it",
                location=at,
                hint=hint,
            )
