"""Federated averaging: the mean of a share of the replicas."""

from __future__ import annotations

import random

from pydantic import Field
from torch import Tensor

from dni_runtime.core.optimization import Optimization
from dni_runtime.core.replication.base import Strategy, Sync
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import Frozen


class Federated(Strategy):
    """All go on with the mean of those that are drawn for the round, weighted by samples.

    FedAvg (McMahan et al. 2016, arXiv:1602.05629, algorithm 1). What the others have learnt in the
    round is dropped; here they pass on their batches meanwhile, so they train, too.
    """

    class Options(Frozen):
        """The share of the replicas that take part in a round: the paper's C."""

        share: float = Field(default=0.5, gt=0, le=1)

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        assert isinstance(options, Federated.Options)
        self._share = options.share

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        self._spec = spec

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor | None:
        spec = self._spec
        count = max(round(self._share * spec.replicas), 1)
        draw = random.Random(f"{spec.seed} {spec.index} {sync.id}")
        drawn = draw.sample(range(1, spec.replicas + 1), count)
        return own_P if spec.replica in drawn else None
