"""Peers whose processes have parts of the network: torch's pipelining schedules."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers.build import EVALUATION, cross_entropy, example, in_eval_mode
from peers.contenders import SCHEDULES, V_SHAPED
from peers.networks import Network


def owners(name: str, processes: int) -> list[int]:
    """Which process has each stage of a pipelining schedule."""
    class_name, per_process, _ = SCHEDULES[name]
    ranks = list(range(processes))
    if per_process == 1:
        return ranks
    return ranks + (ranks[::-1] if class_name in V_SHAPED else ranks)


class Pipelined:
    """One process of a schedule of torch.distributed.pipelining."""

    period = 1

    def __init__(
        self,
        name: str,  # of the schedule
        network: Network,  # whole
        modules: Mapping[int, nn.Module],  # this process's stages, by their numbers
        rank: int,
        processes: int,  # in all
        optimizer: Any,  # of all its stages
        shapes: Sequence[tuple[int, ...]],  # of one sample behind each stage
    ) -> None:
        from torch.distributed import pipelining

        class_name, per_process, micro_batches = SCHEDULES[name]
        schedules = importlib.import_module("torch.distributed.pipelining.schedules")
        self._owners = owners(name, processes)
        self._modules, self._rank, self._shapes = modules, rank, shapes
        # Examples, because torch finds shapes out by a step on uninitialised memory, which would
        # end up in BatchNorm's running figures.
        size = network.batch // micro_batches
        examples = [example(network, size), *(torch.empty(size, *s) for s in shapes)]
        stages = [
            pipelining.PipelineStage(
                module,
                i,
                len(self._owners),
                torch.device("cpu"),
                input_args=examples[i].requires_grad_(i > 0),
                output_args=examples[i + 1].requires_grad_(),
            )
            for i, module in modules.items()
        ]
        self._schedule = getattr(schedules, class_name)(
            stages[0] if per_process == 1 else stages, micro_batches, loss_fn=cross_entropy
        )
        self._optimizer = optimizer
        self._first, self._last = 0 in modules, len(self._owners) - 1 in modules
        # Both ends read: neither inputs nor labels need to travel.
        self.reads = self._first or self._last

    def step(self, x_BX: Tensor | None, y_BY: Tensor | None) -> None:
        self._optimizer.zero_grad()
        arguments = (x_BX,) if self._first else ()
        if self._last:
            self._schedule.step(*arguments, target=y_BY, losses=[])
        else:
            self._schedule.step(*arguments)
        self._optimizer.step()

    def predict(self, x_BX: Tensor) -> Tensor | None:
        return predict_in_stages(self._modules, self._owners, self._rank, self._shapes, x_BX)


def predict_in_stages(
    modules: Mapping[int, nn.Module],  # this process's stages, by their numbers
    owners: Sequence[int],  # the process that has each stage
    rank: int,
    shapes: Sequence[tuple[int, ...]],  # of one sample behind each stage
    x_BX: Tensor,  # only their number matters if stage 0 is elsewhere
) -> Tensor | None:
    """A network's output in eval mode, in the process that has the last stage; else None."""
    h_BH: Tensor | None = None
    for stage, module in modules.items():
        if stage == 0:
            h_BH = x_BX
        elif owners[stage - 1] != rank:
            h_BH = torch.empty((len(x_BX), *shapes[stage - 1]))
            dist.recv(h_BH, owners[stage - 1], tag=EVALUATION)
        assert h_BH is not None
        h_BH = in_eval_mode(module, h_BH)
        if stage + 1 == len(owners):
            return h_BH
        if owners[stage + 1] != rank:
            dist.send(h_BH, owners[stage + 1], tag=EVALUATION)
    return None
