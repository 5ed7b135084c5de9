"""The runtime without one of its mends: drawn cases have to find what they were made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.replication import SharedWeights
from dni_runtime.network import piece
from dni_runtime.network.piece import Piece


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def parts_by_samples() -> Any:
    """A part of a batch counts by its samples, whatever the loss counts."""
    return _replaced(ChainLoss, "shares", lambda self, y_BY, whole_BY: ())


def buffers_once() -> Any:
    """Replicas share the buffers that there were at the beginning, replaced or not."""
    real = SharedWeights._tensors.fget  # type: ignore[attr-defined]  # a property

    def first(self: SharedWeights) -> list[Tensor]:
        found: list[Tensor] = self.__dict__.setdefault("first", real(self))
        return found

    return _replaced(SharedWeights, "_tensors", property(first))


def network_trains() -> Any:
    """The network's own ``train`` is called in each piece, whatever that has of it."""
    return _replaced(Piece, "train", super(Piece, Piece).train)


def modes_lost() -> Any:
    """What forward does under ``no_grad`` is done as everything else."""
    return _replaced(piece, "under", lambda operation, modes: operation)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "parts-by-samples": parts_by_samples,
    "buffers-once": buffers_once,
    "network-trains": network_trains,
    "modes-lost": modes_lost,
}
