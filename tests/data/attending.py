"""Networks with attention in several spellings, whose modules take several inputs."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Fused(nn.Module):
    """Torch's function, which is not fused if it has dropout."""

    def __init__(self, p=0.1):
        super().__init__()
        self.maps, self.p = nn.Linear(8, 24), p

    def forward(self, x, context, mask):
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.maps(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        mask = mask[:, None, None].bool()
        return F.scaled_dot_product_attention(q, k, v, mask, p).transpose(1, 2).flatten(2)


class Masked(nn.Module):
    """Plain operations, a mask of minus infinity and dropout, as in BERT."""

    def __init__(self):
        super().__init__()
        self.maps, self.dropout = nn.Linear(8, 24), nn.Dropout(0.1)

    def forward(self, x, context, mask):
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.maps(x).chunk(3, -1))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(4)
        scores = scores.masked_fill(~mask[:, None, None].bool(), torch.finfo(scores.dtype).min)
        shares = self.dropout(F.softmax(scores, -1))
        return torch.matmul(shares, v).transpose(1, 2).flatten(2)


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.Linear(8, 24)

    def forward(self, x, context, mask):
        q, k, v = self.maps(x).chunk(3, -1)
        return torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", q, k).softmax(2), v)


class Cross(nn.Module):
    """Queries of one input; keys and values of another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x, context, mask):
        shares = self.drop(torch.bmm(self.q(x), self.k(context).transpose(1, 2)).softmax(-1))
        return torch.bmm(shares, self.v(context))


class Torchs(nn.Module):
    """Torch's layer, with queries of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)
        self.queries = nn.Parameter(torch.zeros(5, 8))

    def forward(self, x, context, mask):
        return self.layer(self.queries.expand(x.shape[0], 5, 8), context, context)[0]


class Gate(nn.Module):
    """No attention: shares of features, and maps of tokens; weights that may be tied."""

    def __init__(self):
        super().__init__()
        self.maps, self.back, self.tokens = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(5, 5)

    def forward(self, x, context, mask):
        return self.tokens(self.back(x * self.maps(context).softmax(-1)).mT).mT


class Net(nn.Module):
    """Embeddings, which stay tied, a context, all of the above in a row, and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.context = nn.Embedding(7, 8), nn.Linear(8, 8)
        kinds = Gate, Fused, Masked, Einsum, Cross, Torchs
        self.begin, self.mix = nn.Linear(8, 8), nn.ModuleList(kind() for kind in kinds)
        self.mix[0].maps.weight = self.mix[0].back.weight = self.begin.weight
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, mask):
        h = self.embed(tokens)
        context = self.context(h).tanh()
        h = self.begin(h).sigmoid()
        for one in self.mix:
            h = self.norm(h + one(h, context, mask))
        return self.head(h)


class Shares(nn.Module):
    def forward(self, q, k):
        return torch.matmul(q, k.mT).softmax(-1)


class Product(nn.Module):
    def forward(self, shares, v):
        return torch.matmul(shares, v)


class Spread(nn.Module):
    """Attention whose three operations lie in modules between which it can be cut."""

    def __init__(self):
        super().__init__()
        self.embed, self.maps = nn.Embedding(7, 8), nn.Linear(8, 24)
        self.shares, self.product, self.head = Shares(), Product(), nn.Linear(8, 7)

    def forward(self, tokens, mask):
        q, k, v = self.maps(self.embed(tokens)).chunk(3, -1)
        return self.head(self.product(self.shares(q, k), v).tanh())
