"""Layers of a causal transformer (Vaswani et al. 2017, with the normalisation before each part).

Shape suffixes: B samples, T tokens, D features, V values of a token, H heads, K features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embed(nn.Module):
    """Tokens, at most ``context`` in a sample, as vectors, to which learned positions are added."""

    def __init__(self, vocabulary: int, dim: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(context, dim))

    def forward(self, x_BT: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(x_BT) + self.positions[: x_BT.shape[1]]
        return embedded


class Block(nn.Module):
    """Attention of each token to those before it, then two layers for each; heads share ``dim``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} cannot be shared by {heads} heads")
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.queries_keys_values = nn.Linear(dim, 3 * dim)
        self.attention_output = nn.Linear(dim, dim)
        self.layers = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, h_BTD: Tensor) -> Tensor:
        h_BTD = h_BTD + self._attend(self.attention_norm(h_BTD))
        out_BTD: Tensor = h_BTD + self.layers(h_BTD)
        return out_BTD

    def _attend(self, h_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BTD in self.queries_keys_values(h_BTD).chunk(3, dim=-1)
        )
        found_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        output: Tensor = self.attention_output(found_BHTK.transpose(1, 2).flatten(-2))
        return output


class Head(nn.Sequential):
    """A score for each value of the next token."""

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, vocabulary))
