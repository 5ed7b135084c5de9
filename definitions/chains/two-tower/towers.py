"""Two towers, as of a recommender: one for each input; and pairs of digits to train them on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Pairs(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Pairs of scikit-learn's digits; half of them show the same digit.

    Args:
        train: Whether these are the training samples.
    """

    num_classes = 2

    def __init__(self, train: bool) -> None:
        from dni_runtime.data import open_data
        from dni_runtime.spec.model import DataSpec

        source = open_data(DataSpec(dataset="digits", flatten=True), ".", seed=0)
        batches = source.train_batches(1) if train else source.eval_batches()
        parts = [(x if isinstance(x, Tensor) else x[0], y) for x, y in batches]
        self.x = torch.cat([x for x, _ in parts])
        self.y = torch.cat([y for _, y in parts])
        self.places = [torch.nonzero(self.y == digit).flatten() for digit in range(10)]
        self.count = len(self.y) * (4 if train else 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        first, draw = index % len(self.y), torch.Generator().manual_seed(index)
        others = self.places[int(self.y[first])] if index % 2 else torch.arange(len(self.y))
        second = int(others[int(torch.randint(len(others), (), generator=draw))])
        return (self.x[first], self.x[second]), (self.y[first] == self.y[second]).long()


def tower(width: int) -> nn.Sequential:
    """Return the layers of one tower."""
    return nn.Sequential(
        nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
    )  # fmt: skip


class TwoTowers(nn.Module):
    """A tower for each input, and layers that compare what they say.

    Args:
        width: Features of a tower.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.left, self.right = tower(width), tower(width)
        self.top = nn.Sequential(
            nn.Linear(2 * width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        left, right = self.left(x), self.right(other)
        scores: Tensor = self.top(torch.cat([left * right, (left - right).abs()], 1))
        return scores
