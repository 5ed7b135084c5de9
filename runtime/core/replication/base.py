"""The protocol of strategies, by which the replicas of a module learn together.

At each SYNC marker every replica offers what it has learnt, as one row of numbers; the first one
takes the mean of all, makes of it what all go on with, and sends that to the others.

Shapes: P trained parameters of the module: its layers', then those of the gradient interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dni_runtime.core.optimization import Optimization
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import Frozen


class Sync(NamedTuple):
    """A point of the stream where replicas share.

    Attributes:
        id: Its position, the same after each restart.
        full: Whether all must go on with the same weights, because an evaluation, a checkpoint or
            the end follows.
    """

    id: int
    full: bool


class Strategy(nn.Module):
    """What a replica offers, what the first one makes of it, and what each takes of that.

    Buffers are part of a checkpoint. A choice must follow from the marker's id, the seed and the
    buffers, so that a restarted replica makes it again.

    Args:
        options: Its options.
        start_P: The parameters, as one row, before the first batch.

    Attributes:
        options: Its options.
        per_step: Whether each point is one step of the optimizer, so that ``every`` is the number
            of replicas if the chain does not say it.
        waits: Whether replicas wait for each other at each point: only ``parameter-server`` does
            not.
        dense: Whether it needs gradients that are not sparse.
        common: Whether all have the same parameters and statistics after a full point. Else each
            takes the row of another one, and nothing is made of them.
        feedback: Whether what compression leaves out of an offer is added to the next one.
        asks: Whether this replica asks that all offer their rows at the next point.
        asked: Whether one has asked so at the last point.
        gradients: How many numbers at the beginning of an offer are gradients.
    """

    class Options(Frozen):
        """The strategy's keywords in ``chain.yaml``."""

    per_step: ClassVar[bool] = False
    waits: ClassVar[bool] = True
    dense: ClassVar[bool] = False
    common: ClassVar[bool] = True
    feedback: ClassVar[bool] = True

    def __init__(self, options: Any, start_P: Tensor) -> None:
        super().__init__()
        self.options = options
        self.asks = self.asked = False
        self.gradients = 0

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        """Note which replica this is, and what updates its layers; called once, at the start."""

    def pull(self, h_BH: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return what is added to the error signal of a batch, per sample; None: nothing.

        Args:
            h_BH: The module's activation, detached.
            activation: Returns the activation of the batch, given other parameters ``[P]``.
        """
        return None

    def weight(self, samples: int) -> float:
        """Return this replica's weight in the mean; called before :meth:`offer`.

        Args:
            samples: Samples that it was trained on since it took the last result.
        """
        return float(samples)

    def joined(self, own_P: Tensor) -> None:
        """Begin with the buffers of another replica, without what is that one's own.

        Args:
            own_P: The parameters, which are the same in both.
        """

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor | None:
        """Return what this replica contributes to the mean; None: nothing, so no row is sent.

        Args:
            own_P: Its parameters.
            sync: The point.
        """
        return own_P

    def agree(self, mean_P: Tensor) -> Tensor:
        """Return what all take: at the first replica, or at each of a process group.

        Args:
            mean_P: The weighted mean of what was offered.
        """
        return mean_P

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        """Return the parameters that this replica goes on with.

        Args:
            own_P: Its parameters.
            agreed_P: The result of :meth:`agree`.
        """
        return agreed_P

    def other(self, replicas: int) -> int:
        """Return the distance, in the ring of all replicas, to the replica whose row is taken.

        Only for strategies without a common row.

        Args:
            replicas: Number of those that share, two or more.
        """
        return 1

    def base(self, agreed_P: Tensor) -> Tensor:
        """Return a row near to the next offer, from which its difference is compressed."""
        return agreed_P


def mean_of(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of rows; if all weights are 0, the mean.

    A row of weight 0 is left out: it may have infinities, as masks have, and 0 times one is NaN.
    """
    shares = torch.tensor(weights, dtype=torch.float64)
    shares = shares / shares.sum() if shares.any() else torch.full_like(shares, 1 / len(rows))
    counted = [(row, share) for row, share in zip(rows, shares, strict=True) if share]
    factors = torch.stack([share for _, share in counted]).to(torch.float32)
    return (torch.stack([row for row, _ in counted]) * factors[:, None]).sum(0)
