"""Random samples in the shapes that the networks take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate


class Drawn(Dataset[Any]):
    """Samples of the given inputs, and a label each.

    An input or a label is written as its type and shape. An integer's classes follow:
    ``int64[16] < 100``. ``mask[16]`` has ones at its beginning, and zeros for what is padded;
    ``share[1]`` lies between 0 and 1.
    """

    def __init__(self, train: bool, inputs: Sequence[str], label: str, count: int = 32) -> None:
        draw = torch.Generator().manual_seed(int(train))
        self.xs = [_draw(one, count, draw) for one in inputs]
        self.y = _draw(label, count, draw)
        if "<" in label:
            self.num_classes = int(label.rpartition("<")[2])

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        xs = tuple(x[index] for x in self.xs)
        return (xs if len(xs) > 1 else xs[0]), self.y[index]


def shorter(rows: list[tuple[Any, Tensor]], length: int) -> Any:
    """Make a batch, of whose length a part is left out, as if its rows were no longer."""
    xs, y = default_collate(rows)
    inputs = xs if isinstance(xs, list) else [xs]
    left = max(length * (2 + int(inputs[0].sum()) % 7) // 8, 2)
    y = y if y.is_floating_point() or y.dim() < 2 else y[:, :left]
    inputs = [x[:, :left] for x in inputs]
    return (tuple(inputs) if len(inputs) > 1 else inputs[0]), y


def _draw(text: str, count: int, draw: torch.Generator) -> Tensor:
    kind, sizes, classes = re.fullmatch(r"(\w+)\[([\d, ]*)\](?: < (\d+))?", text).groups()  # type: ignore[union-attr]
    shape = [count, *map(int, re.findall(r"\d+", sizes))]
    if kind == "mask":
        lengths = torch.randint(shape[1] // 4, shape[1] + 1, (count, 1), generator=draw)
        return (torch.arange(shape[1]) < lengths).long()
    if kind == "int64":
        return torch.randint(0, int(classes), shape, generator=draw)
    return (torch.rand if kind == "share" else torch.randn)(shape, generator=draw)
