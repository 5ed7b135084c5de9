"""torch's communication hooks as compressions of the gradients that a process group averages.

They are written for DistributedDataParallel, one bucket of gradients at a time
(pytorch.org/docs/stable/ddp_comm_hooks.html); here a module's gradients are one bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dni_runtime.core.replication.compression import PowerSgd
from dni_runtime.spec import Choice
from dni_runtime.spec.choices import parse_options

logging.getLogger(powerSGD_hook.__name__).setLevel(logging.WARNING)  # else a line for each step

_VANILLA_STEPS = 2  # the fewest that torch allows before steps with PowerSGD


class Bucket:
    """Gradients in one row, as hooks see them (``torch.distributed.GradBucket``)."""

    def __init__(self, row_N: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        parts = torch.split(row_N, [torch.Size(shape).numel() for shape in shapes])
        self._row_N = row_N
        self._gradients = [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self._row_N

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def hook_of(choice: Choice, shapes: Sequence[Sequence[int]]) -> Callable[[Tensor], int]:
    """Return what averages a row of gradients in place, over the default process group.

    It returns how many bytes of each replica's row have been exchanged.
    """
    if choice.name == "bfloat16":

        def averaged(row_N: Tensor) -> int:
            bucket: Any = Bucket(row_N, shapes)
            default_hooks.bf16_compress_hook(None, bucket).wait()  # type: ignore[arg-type]
            return row_N.numel() * torch.bfloat16.itemsize

        return averaged
    options = parse_options(PowerSgd.Options, choice, ("replication", "compression"))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=options.rank, start_powerSGD_iter=_VANILLA_STEPS
    )

    def averaged_by_rank(row_N: Tensor) -> int:
        before = state.total_numel_after_compression
        bucket: Any = Bucket(row_N, shapes)
        powerSGD_hook.powerSGD_hook(state, bucket).wait()
        sent = state.total_numel_after_compression - before
        return (sent or row_N.numel()) * row_N.element_size()

    return averaged_by_rank
