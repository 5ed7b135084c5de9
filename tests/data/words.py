"""A small language model whose cuts meet a skip, tied weights and a mask; and data for it."""

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate


class Words(Dataset):
    num_classes = 7

    def __init__(self, train):
        draw = torch.Generator().manual_seed(int(train))
        self.x = torch.randint(0, 7, (64, 6), generator=draw)
        self.mask = torch.rand(64, 5, generator=draw) < 0.8

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return (self.x[index, :-1], self.mask[index]), self.x[index, 1:]


def shorter(rows):
    """A batch of another length than others, as if no row were longer."""
    (tokens, mask), y = default_collate(rows)
    length = 2 + int(tokens.sum()) % 4
    return (tokens[:, :length], mask[:, :length]), y[:, :length]


class Model(nn.Module):
    """Tied embeddings, a mask, and a skip from the first layer to the last."""

    def __init__(self, size=8, words=7):
        super().__init__()
        self.size, self.words = size, words
        self.embed, self.kind = nn.Embedding(words, size), nn.Embedding(2, size)
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.begin = nn.LayerNorm(size)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, mask):
        kind = self.kind(torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device))
        begin = self.begin(self.embed(tokens) + kind)
        wide = mask.unsqueeze(2).float()
        h = torch.tanh(self.first(begin)) * wide
        h = torch.tanh(self.second(h)) * wide
        return self.head(self.norm(h + begin))
