"""Attention is recognised by what is computed, in several spellings; names play no part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.resolve.resolve import resolved_chain, worker_specs
from dni_runtime.spec import DataInfo, parse_chain
from tests.specs import float32, int64

INFO = DataInfo(sample=float32(6, 8), label=int64(), classes=3)
MAPS = INFO.model_copy(update={"sample": float32(4, 6, 6)})
CHAIN = """\
name: net
modules:
  - {name: a, layers: [%s]}
  - {name: b, layers: [Flatten, LazyLinear: {out_features: 3}]}
"""


class Block(nn.Module):
    """Queries, keys and values of the input, and attention in one of several spellings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.maps = nn.Linear(8, 24)
        self.torchs = nn.MultiheadAttention(8, 2, batch_first=True)
        self.query = nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "module":
            return x + self.torchs(x, x, x)[0]
        if self.how == "learned queries":
            return x + self.torchs(self.query.expand(len(x), 1, 8), x, x)[0]
        q, k, v = self.maps(x).chunk(3, -1)
        return x + getattr(self, "_" + self.how)(q, k, v)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def _operators(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(8)).softmax(-1) @ v

    def _einsum(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqd,bkd->bqk", q, k)
        scores.masked_fill_(torch.ones(6, 6, device=q.device).triu(1).bool(), -1e9)
        shares = F.dropout(nn.functional.softmax(scores, dim=2), 0.1)
        return torch.einsum("bqk,bkd->bqd", shares, v)

    def _exponentials(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shares = torch.bmm(q, k.transpose(1, 2)).exp()
        return torch.bmm(shares / shares.sum(-1, keepdim=True), v)

    def _own(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Own.apply(q, k, v)  # type: ignore[no-any-return,no-untyped-call]

    def _numbers(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor = float(q.abs().max()) + 1  # which the meta device does not know
        return (q @ k.mT / factor).softmax(-1) @ v


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, 2) @ v


class SqueezeAttention(nn.Module):
    """A convolution with gates for its channels: no token looks at another's content."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return x + h * self.gate(h.mean((2, 3))).softmax(1)[:, :, None, None]


class TransformerFreeMixer(nn.Module):
    """Linear maps over tokens and features, and a softmax over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.features = nn.Linear(6, 6), nn.Linear(8, 8)
        self.gate, self.experts = nn.Linear(8, 3), nn.Parameter(torch.zeros(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(x.mT).mT
        shares = self.gate(x.mean(1)).softmax(-1)
        maps = torch.einsum("be,eij->bij", shares, self.experts)
        return x + self.features(x) @ maps


class Hidden(nn.Module):
    """Attention that cannot be watched is no error: a mode that looks at all operations fails."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("not with a mode")
        return self.scale * x


def own(name: str, **args: Any) -> str:
    return f"{{import: '{__name__}:{name}', args: {args}}}"


SPELLINGS = [
    "module", "learned queries", "fused", "operators", "einsum", "exponentials", "own", "numbers",
]  # fmt: skip
ENCODER = "{TransformerEncoderLayer: {d_model: 8, nhead: 2, dim_feedforward: 8}}"


def attends(layers: str, info: DataInfo = INFO) -> bool:
    chain = parse_chain(CHAIN % layers)
    found = worker_specs(chain, info)[0]
    default = resolved_chain(chain, info).modules[0].interface
    assert default is not None
    assert found.interface == default
    assert default.name == ("delayed" if found.attends else "mixed")
    return found.attends


@pytest.mark.parametrize(
    "layers",
    [
        *(own("Block", how=how) for how in SPELLINGS),
        ENCODER,
        f"ReLU, {{Residual: [{{Sequential: [{ENCODER}]}}]}}",
        f"{{Residual: {{layers: [ReLU], shortcut: [{own('Block', how='operators')}]}}}}",
    ],
)
def test_attention(layers: str) -> None:
    assert attends(layers)


@pytest.mark.parametrize(
    ("layers", "info"),
    [
        ("{Linear: {in_features: 8, out_features: 8}}, {LayerNorm: {normalized_shape: 8}}", INFO),
        (own("TransformerFreeMixer"), INFO),
        (own("SqueezeAttention"), MAPS),
        ("{Conv2d: {in_channels: 4, out_channels: 4, kernel_size: 3}}, {BatchNorm2d: "
         "{num_features: 4}}, Softmax2d", MAPS),
        (own("Hidden"), INFO),
    ],
)  # fmt: skip
def test_no_attention(layers: str, info: DataInfo) -> None:
    assert not attends(layers, info)
