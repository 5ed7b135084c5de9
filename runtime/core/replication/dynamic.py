"""Dynamic model averaging: the mean, when a replica has drifted."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from dni_runtime.core.replication.base import Strategy, Sync
from dni_runtime.spec.named import Frozen


class Dynamic(Strategy):
    """All go on with the mean after one has drifted from their last common weights.

    Kamp et al. 2018, arXiv:1807.03210, algorithm 1, where the local condition is that the squared
    distance of the replica's parameters to the reference exceeds a threshold. Here the whole set is
    averaged, at the next point: until then only a few bytes are sent. Balancing within a part of
    the replicas, which takes more messages at each point, is left out.
    """

    class Options(Frozen):
        """The squared distance from the last common weights that asks for a mean."""

        threshold: float = Field(default=1.0, gt=0)

    reference_P: Tensor

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        assert isinstance(options, Dynamic.Options)
        self._threshold = options.threshold
        self.register_buffer("reference_P", start_P.clone())

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor | None:
        if self.asked or sync.full:
            return own_P
        self.asks = float((own_P - self.reference_P).square().sum()) > self._threshold
        return None

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self.reference_P.copy_(agreed_P)
        self.asks = False
        return agreed_P
