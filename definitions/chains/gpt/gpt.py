"""A small GPT (Radford et al. 2019) whose output layer has the embeddings as its weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention, then two layers for each token.

    Args:
        dim: Features of a token.
        heads: Heads of attention.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.queries_keys_values, self.attended = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.norm1(h)).chunk(3, dim=-1)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.attended(found.transpose(1, 2).flatten(-2))
        out: Tensor = h + self.narrow(F.gelu(self.wide(self.norm2(h))))
        return out


class GPT(nn.Module):
    """A causal transformer.

    Args:
        vocabulary: Values of a token.
        context: Most tokens in a sample.
        dim: Features of a token.
        depth: Blocks.
        heads: Heads of attention.
    """

    def __init__(
        self, vocabulary: int, context: int, dim: int = 128, depth: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        for one in (self.words, self.places):
            nn.init.normal_(one.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.top = nn.Linear(dim, vocabulary, bias=False)
        self.top.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        scores: Tensor = self.top(self.norm(self.blocks(h)))
        return scores
