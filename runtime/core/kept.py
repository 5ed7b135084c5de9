"""The batches of a module whose gradient is still to come.

Shapes: B batch, H the module's activation, Y a label.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from dni_runtime.core.passes import ForwardPass
from dni_runtime.wire import Part


@dataclass
class Kept:
    """A batch, or a part of one, whose gradient is still to come."""

    h_BH: Tensor  # detached
    y_BY: Tensor
    part: Part
    number: int  # of the batch, among those of this module
    forward: ForwardPass | None = None  # if the gradient goes back through it
    g_BH: Tensor | None = None  # the signal that was used at once and is to be corrected


class KeptBatches:
    """Batches, or parts of them, by their ids in the stream.

    Beyond ``size``, older ones are dropped; None keeps all, because waiting bounds them.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def numbers(self) -> set[int]:
        """The batches' numbers."""
        return {kept.number for kept in self._kept.values()}

    @property
    def passes(self) -> int:
        """Number of forward passes that gradients are still to go back through."""
        return sum(kept.forward is not None for kept in self._kept.values())

    def add(self, id: int, kept: Kept) -> int:
        """Keep a batch; return how many are dropped for it."""
        self._kept[id] = kept
        dropped = 0 if self.size is None else max(len(self._kept) - self.size, 0)
        for _ in range(dropped):
            self._kept.popitem(last=False)
        return dropped

    def take(self, id: int) -> Kept | None:
        """Return a batch, which is not kept any longer; None if it was not."""
        return self._kept.pop(id, None)

    def drop(self, until: int | None) -> int:
        """Drop all batches, or those until an id; return how many."""
        lost = [id for id in self._kept if until is None or id <= until]
        for id in lost:
            del self._kept[id]
        return len(lost)
