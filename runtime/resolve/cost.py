"""Estimates of modules' costs from their layers, to balance them over nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from dni_runtime.core.layers import build_module
from dni_runtime.core.training import empty_batch
from dni_runtime.spec import WorkerSpec

log = logging.getLogger(__name__)

_SAMPLES = 2
_BACKWARD = 3.0
"""Cost of both passes in forward passes: two products backward for each one forward."""


def estimated_costs(workers: Sequence[WorkerSpec]) -> dict[str, float]:
    """Estimate the operations of each module's layers per training sample.

    Multiplications and additions of products and convolutions, counted on torch's meta device,
    and one for each number that goes in and out. The gradient interface is left out. A module that
    cannot run on the meta device counts as if each parameter were multiplied once.
    """
    return {worker.module: _cost(worker) for worker in workers}


def _cost(worker: WorkerSpec) -> float:
    moved = float(
        sum(torch.Size(tensor.shape).numel() for tensor in (*worker.inputs, worker.output))
    )
    model = build_module(worker, "meta")
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            model(*(empty_batch(tensor, _SAMPLES, "meta") for tensor in worker.inputs))
        work = counter.get_total_flops() / _SAMPLES
    except Exception as error:  # a user's layer may do anything
        log.debug("module %s is not counted: %s", worker.module, error)
        work = 2.0 * sum(p.numel() for p in model.parameters())
    return _BACKWARD * work + moved
