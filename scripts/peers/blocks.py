"""The layers of ``lm`` that torch.nn does not have; chain files name them by import path.

Shape suffixes: B batch, T tokens, D width, V vocabulary, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embed(nn.Module):
    """Token embeddings plus learned positions.

    Args:
        vocabulary: How many tokens there are.
        context: Most tokens in a sample.
        width: Features of a token.
    """

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens_VD = nn.Parameter(0.02 * torch.randn(vocabulary, width))
        self.positions_TD = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, x_BT: Tensor) -> Tensor:
        return F.embedding(x_BT, self.tokens_VD) + self.positions_TD[: x_BT.shape[1]]


class Block(nn.Module):
    """A causal transformer block: x + attn(LN x), then x + mlp(LN x) (Radford et al. 2019).

    Args:
        width: Features of a token.
        heads: Attention heads; divides ``width``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(x_BTD)

    def _attend(self, x_BTD: Tensor) -> Tensor:
        q_BHTE, k_BHTE, v_BHTE = (
            part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BTD in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        return self.project(y_BHTE.transpose(1, 2).flatten(2))
