"""Blocks of drawn networks, as users write them; a network's file holds the source of those it has.

A block keeps the shape of what it gets: vectors ``[B, D]``, sequences ``[B, T, D]``, or maps
``[B, C, H, W]``. It keeps its arguments in attributes, as ``Chain.from_modules`` needs it.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Double(nn.Module):
    """Begins a network that computes in float64, whatever its data are."""

    def forward(self, x):
        return x.double()


class Replaced(nn.Module):
    """A running mean that forward replaces."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
        return x - self.mean


class Watched(nn.Module):
    """A running mean that changes in place under ``no_grad``."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.flatten(0, -2).mean(0), alpha=0.1)
        return x - self.seen


class Decorated(nn.Module):
    """The same with a decorator, and a number of calls."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.register_buffer("seen", torch.ones(size))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def watch(self, x):
        self.calls += 1
        self.seen += 0.1 * (x.flatten(0, -2).square().mean(0) - self.seen)

    def forward(self, x):
        if self.training:
            self.watch(x)
        return x / (self.seen + 0.5).sqrt()


class Codebook(nn.Module):
    """Vector quantization, whose codebook follows running means."""

    def __init__(self, size, words=4):
        super().__init__()
        self.size, self.words = size, words
        self.register_buffer("book", torch.randn(words, size))
        self.register_buffer("count", torch.ones(words))
        self.register_buffer("total", self.book.clone())

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        hot = F.one_hot(torch.cdist(flat, self.book).argmin(-1), self.words).to(x.dtype)
        q = (hot @ self.book).view_as(x)
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hot.t() @ flat, alpha=0.1)
                self.book.copy_(self.total / self.count.clamp(min=1e-3).unsqueeze(1))
        return x + (q - x).detach()


class Rounded(nn.Module):
    """Straight through by detach."""

    def forward(self, x):
        return x + ((x * 4).round() / 4 - x).detach()


class SignFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


class Signs(nn.Module):
    """Straight through by a function with a backward of its own."""

    def forward(self, x):
        return SignFunction.apply(x)


class ReversalFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.factor * g, None


class Reversal(nn.Module):
    """A gradient that is turned round, as in domain adaptation."""

    def __init__(self, factor=0.5):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return ReversalFunction.apply(x, self.factor)


class InPlace(nn.Module):
    """Changes its own result in place."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        y = self.inner(x)
        y += x
        return y.relu_()


class ChangesInput(nn.Module):
    """Changes in place what it gets."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        x += 0.5
        return self.inner(x).tanh()


class Plain(nn.Module):
    """Normalises by tensors that are plain attributes."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.mean, self.scale = torch.full((size,), 0.25), torch.linspace(0.5, 1.5, size)

    def forward(self, x):
        return (x - self.mean) * self.scale


class Positions(nn.Module):
    """Adds a buffer that the state dict has not, and a parameter."""

    def __init__(self, tokens, size):
        super().__init__()
        self.tokens, self.size = tokens, size
        order = torch.arange(tokens).unsqueeze(1) / torch.arange(1, size + 1)
        self.register_buffer("waves", order.sin(), persistent=False)
        self.learnt = nn.Parameter(0.1 * torch.randn(tokens, size))

    def forward(self, x):
        return x + self.waves + self.learnt


class Doubled(nn.Module):
    """A layer in float64 among others."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size, dtype=torch.float64)

    def forward(self, x):
        return self.inner(x.double()).float().tanh()


class Halved(nn.Module):
    """A layer in bfloat16 among others."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.inner(x.bfloat16()).float()


class Recomputed(nn.Module):
    """A layer that is computed again for its gradient."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return checkpoint(lambda y: self.inner(y).tanh(), x, use_reentrant=False)


class Side(nn.Module):
    """An auxiliary branch, which learns but sends no gradient on."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.side = nn.Linear(size, size)

    def forward(self, x):
        return x + self.side(x.detach()).tanh()


class Extractor(nn.Module):
    """A frozen layer under no_grad beside a trained one."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.fixed, self.learnt = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        with torch.no_grad():
            y = self.fixed(x)
        return self.learnt(x + y).tanh()


class Severed(nn.Module):
    """Sends no gradient on at all."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return self.inner(x.detach()).tanh()


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Twice(nn.Module):
    """One layer used twice, and a parameter that nothing uses."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.inner(self.inner(x).tanh()).tanh()


class Alike(nn.Module):
    """Two layers with one weight."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Normed(nn.Module):
    """A parametrized layer."""

    def __init__(self, size, kind):
        super().__init__()
        self.size, self.kind = size, kind
        wrap = {
            "weight": nn.utils.parametrizations.weight_norm,
            "spectral": nn.utils.parametrizations.spectral_norm,
            "orthogonal": nn.utils.parametrizations.orthogonal,
            "old-spectral": nn.utils.spectral_norm,
        }[kind]
        self.inner = wrap(nn.Linear(size, size))

    def forward(self, x):
        return self.inner(x).tanh()


class Spectrum(nn.Module):
    """A filter of complex weights."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.filter = nn.Parameter(torch.randn(size // 2 + 1, dtype=torch.cfloat) * 0.5)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=-1) * self.filter, n=x.shape[-1], dim=-1)


class Mixture(nn.Module):
    """Experts, of which each position uses the best."""

    def __init__(self, size, experts=3):
        super().__init__()
        self.size, self.experts = size, experts
        self.gate = nn.Linear(size, experts)
        self.inner = nn.ModuleList(nn.Linear(size, size) for _ in range(experts))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        best = share.topk(1, dim=-1)
        every = torch.stack([one(x) for one in self.inner], -2)
        index = best.indices.unsqueeze(-1).expand(*x.shape[:-1], 1, x.shape[-1])
        return (every.gather(-2, index).squeeze(-2) * best.values).tanh()


class Branches(nn.Module):
    """Takes another way in eval mode."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.main, self.other = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        if self.training:
            return self.main(x).tanh() + 0.1 * self.other(x)
        return self.main(x).tanh()


class Rolled(nn.Module):
    """Views that are not contiguous."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return self.inner(x).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).roll(1, -1)


class Written(nn.Module):
    """Writes into a new tensor by index."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        y = torch.zeros_like(x)
        y[..., 1:] = self.inner(x)[..., :-1]
        y[..., 0] = 1.0
        return y


class Recurs(nn.Module):
    """A recurrent layer of torch's."""

    def __init__(self, size, kind="LSTM"):
        super().__init__()
        self.size, self.kind = size, kind
        self.inner = getattr(nn, kind)(size, size, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Attends(nn.Module):
    """Attention with torch's fused function."""

    def __init__(self, size, causal=True):
        super().__init__()
        self.size, self.causal = size, causal
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Masked(nn.Module):
    """Attention by hand, with a buffer of minus infinity as mask."""

    def __init__(self, tokens, size):
        super().__init__()
        self.tokens, self.size = tokens, size
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        mask = torch.triu(torch.full((tokens, tokens), float("-inf")), 1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.size) + self.mask
        return x + self.out(scores.softmax(-1) @ v)


class Multihead(nn.Module):
    """torch's own attention; unfused if it has to give its weights."""

    def __init__(self, size, weights=False):
        super().__init__()
        self.size, self.weights = size, weights
        self.inner = nn.MultiheadAttention(size, 2, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=self.weights)[0]


class TimeFirst(nn.Module):
    """Works with the time as first dimension."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.turn, self.inner, self.back = nn.Identity(), nn.GRU(size, size), nn.Identity()

    def forward(self, x):
        x = self.turn(x.transpose(0, 1))
        return self.back(self.inner(x)[0].transpose(0, 1))


class AlongTime(nn.Module):
    """A convolution over the sequence."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.inner = nn.Conv1d(size, size, 3, padding=1)

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2).tanh()


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.conv, self.norm = nn.Conv2d(size, size, 3, padding=1), nn.BatchNorm2d(size)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return F.relu(y, inplace=True)


class Squeeze(nn.Module):
    """Gates of channels by their means."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.gate = nn.Linear(size, size)

    def forward(self, x):
        return x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]


class WholeMaps(nn.Module):
    """Works at another resolution."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.conv = nn.Conv2d(size, size, 1)

    def forward(self, x):
        y = F.max_pool2d(self.conv(x), 2)
        return x + F.interpolate(y, scale_factor=2.0, mode="nearest")


class Drops(nn.Module):
    """Drops values by the function."""

    def __init__(self, p=0.3):
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.dropout(x, self.p, self.training)


class Noise(nn.Module):
    """Adds noise in training."""

    def __init__(self, scale=0.1):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x + self.scale * torch.randn_like(x) if self.training else x


class MeanOfTokens(nn.Module):
    """From a sequence to a vector."""

    def forward(self, x):
        return x.mean(1)


class MeanOfMaps(nn.Module):
    """From maps to a vector."""

    def forward(self, x):
        return x.mean((2, 3))
