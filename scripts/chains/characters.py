"""Python's own reference as characters, and a block that sees what stands before each of them."""

from __future__ import annotations

from collections import Counter
from pydoc_data.topics import topics
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

CHARACTERS = 63
"""The most frequent ones; all others are one more class."""


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text, and for each character the one after it.

    Args:
        train: The first nine tenths, or the rest.
        length: Characters of a piece.

    Attributes:
        classes: Names of the classes.
    """

    def __init__(self, train: bool, length: int = 32) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        known = [one for one, _ in Counter(text).most_common(CHARACTERS)]
        self.classes = [*known, "other"]
        numbers = {one: number for number, one in enumerate(known)}
        found = torch.tensor([numbers.get(one, CHARACTERS) for one in text])
        cut = len(found) * 9 // 10
        self._text, self._length = (found[:cut] if train else found[cut:]), length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, last = index * self._length, (index + 1) * self._length
        return self._text[first:last], self._text[first + 1 : last + 1]


class Before(nn.Module):
    """A convolution over each token and those before it, and a residual layer over its features.

    Args:
        features: Of a token.
        width: Tokens that it sees.
    """

    def __init__(self, features: int, width: int = 5) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Conv1d(features, features, width)
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(2))
        self.features = nn.Sequential(
            nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, features)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Shapes stay."""
        before = F.pad(self.norms[0](x_BTC).mT, (self.width - 1, 0))
        x_BTC = x_BTC + F.gelu(self.tokens(before)).mT
        return cast("Tensor", x_BTC + self.features(self.norms[1](x_BTC)))
