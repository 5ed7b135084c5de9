"""Random samples in the shapes that the networks take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

CLASSES, VOCABULARY, TOKENS = 10, 100, 16


class _Drawn(Dataset[Any]):
    def __init__(self, train: bool = True) -> None:
        self.count = 256 if train else 64
        self.draw = torch.Generator().manual_seed(int(train))

    def __len__(self) -> int:
        return self.count


class Pictures(_Drawn):
    """Images of CIFAR's size, and a class each."""

    num_classes = CLASSES

    def __init__(self, train: bool = True) -> None:
        super().__init__(train)
        self.x = torch.randn(self.count, 3, 32, 32, generator=self.draw)
        self.y = torch.randint(0, CLASSES, (self.count,), generator=self.draw)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Masks(Pictures):
    """The same images, and a mask each."""

    num_classes = None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], (self.x[index, :1] > 0).float()


class Tokens(_Drawn):
    """Tokens, and the next ones."""

    num_classes = VOCABULARY

    def __init__(self, train: bool = True) -> None:
        super().__init__(train)
        self.x = torch.randint(0, VOCABULARY, (self.count, TOKENS + 1), generator=self.draw)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index, :-1], self.x[index, 1:]


class Sentences(_Drawn):
    """Tokens with a mask of those that are there, and a class of three."""

    num_classes = 3

    def __init__(self, train: bool = True) -> None:
        super().__init__(train)
        self.x = torch.randint(0, VOCABULARY, (self.count, TOKENS), generator=self.draw)
        lengths = torch.randint(4, TOKENS + 1, (self.count, 1), generator=self.draw)
        self.mask = (torch.arange(TOKENS) < lengths).long()
        self.y = torch.randint(0, 3, (self.count,), generator=self.draw)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (self.x[index], self.mask[index]), self.y[index]
