"""A small vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ViT(nn.Module):
    """Patches of an image as tokens.

    Args:
        channels: Channels of the images.
        size: Their height and width.
        patch: That of a patch.
        classes: Classes.
        dim: Features of a token.
        depth: Blocks.
        heads: Heads of attention.
    """

    def __init__(
        self, channels: int, size: int, patch: int, classes: int,
        dim: int = 48, depth: int = 4, heads: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, dim))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(depth)
            )
        )
        self.norm, self.top = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.top(self.norm(self.blocks(tokens)).mean(1))
        return scores
