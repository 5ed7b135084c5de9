"""The gradient at an output that several modules take: the sum of theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dni_runtime.packing import given_back
from dni_runtime.spec import TensorSpec

KEPT = 1 << 12
"""Batches of which some gradients, but not all, are kept."""


class _Part(NamedTuple):
    place: int
    g: Tensor
    takes: Sequence[int]


class GradientSum:
    """Adds up the gradients that several modules send for one batch.

    They are added in a fixed order, last module first, as autograd does: the sum does not depend on
    which one comes first. ``outputs`` are the module's, if it has several.
    """

    def __init__(self, consumers: int, outputs: Sequence[TensorSpec] = ()) -> None:
        self._consumers, self._outputs = consumers, outputs
        self._parts: OrderedDict[int, list[_Part]] = OrderedDict()

    def add(self, id: int, place: int, g: Tensor, takes: Sequence[int] = ()) -> Tensor | None:
        """Add one module's gradient of a batch; return the sum if all have come, else None.

        ``g`` is at what the module takes: the outputs of these numbers; none: all.
        """
        if self._consumers == 1:
            return g
        parts = self._parts.setdefault(id, [])
        parts = [part for part in parts if part.place != place] + [_Part(place, g, takes)]
        if len(parts) == self._consumers:
            del self._parts[id]
            parts.sort(key=lambda part: -part.place)
            total, *others = given_back([(part.g, part.takes) for part in parts], self._outputs)
            for other in others:
                total = total + other
            return total
        self._parts[id] = parts
        if len(self._parts) > KEPT:
            self._parts.popitem(last=False)
        return None

    def lacks(self, place: int, until: int) -> int | None:
        """Forget batches up to ``until`` that a module has sent no gradient of, and will not.

        Returns the last of these batches, if there are any.
        """
        lost = [
            id
            for id, parts in self._parts.items()
            if id <= until and all(part.place != place for part in parts)
        ]
        for id in lost:
            del self._parts[id]
        return max(lost, default=None)
