"""What ``torch.export`` does not show of a network is trained as plain torch does, or refused."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core.finite import state_finite
from dni_runtime.errors import SpecError
from dni_runtime.network.piece import Piece
from dni_runtime.network.program import Program, Section
from dni_runtime.network.source import NetworkSpec
from dni_runtime.network.tracing import trace

SOURCE = '''\
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(8))
        self.more()

    def more(self):
        pass


class Book(Base):
    """A codebook that is learnt by running means, passed straight through."""

    def more(self):
        self.register_buffer("book", torch.randn(6, 8))
        self.register_buffer("count", torch.ones(6))

    def forward(self, x):
        h = self.a(x)
        hot = torch.nn.functional.one_hot(torch.cdist(h, self.book).argmin(1), 6).float()
        q = hot @ self.book
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.book[1:] += 0.1 * (hot.t() @ h)[1:] / self.count[1:, None]
        return self.c(self.b(h + (q - h).detach()) - self.seen)


class Modes(Base):
    """Operations with and without gradients, in each other."""

    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            k = self.b(h)
            with torch.enable_grad():
                z = self.b(h) * k
        with torch.inference_mode():
            u = self.b(k + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = self.b(z)
        return self.c(z + k + u + w.float() + self.seen)


class Early(Base):
    """Statistics of the first layer, which the last one reads in eval mode."""

    def forward(self, x):
        h = self.a(x)
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(h.mean(0), 0.1)
        y = self.b(h.tanh())
        return self.c(y if self.training else y - self.seen)


class Replaces(Base):
    """A buffer gets another tensor; what it was has a part in gradients."""

    def forward(self, x):
        h = self.a(x)
        y = self.b(h * (1 + self.seen))
        if self.training:
            self.seen = (0.9 * self.seen + 0.1 * y.mean(0)).detach()
        return self.c(y.relu() + self.seen)


class Grows(Base):
    def forward(self, x):
        self.seen = torch.cat([self.seen, self.seen])
        return self.c(self.b(self.a(x)) + self.seen[:8])


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        parametrized = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.a, self.b = nn.utils.spectral_norm(nn.Linear(4, 8)), parametrized
        self.c = nn.Linear(8, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


class Momentum(Base):
    """A copy of a layer follows it; what follows is no further part of the loss."""

    def more(self):
        self.follows = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        h = self.a(x)
        if self.training:
            for mean, now in zip(self.follows.parameters(), self.b.parameters()):
                mean.data.mul_(0.9).add_(now.data, alpha=0.1)
        return self.c(self.b(h) - self.follows(h).detach() + self.seen)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, most):
        ctx.save_for_backward(x)
        ctx.most = most
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= ctx.most), None


class Signs(Base):
    def forward(self, x):
        x = Sign.apply(self.b(Sign.apply(self.a(x), 1.0)), 0.5)
        return self.c(x + self.seen)


class Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        return layer(x)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Calls(Base):
    def forward(self, x):
        return self.c(Within.apply(self.a(x), self.b))


class Checkpoints(Base):
    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.b, self.a(x), use_reentrant=True)
        return self.c(torch.utils.checkpoint.checkpoint(self.b, y, use_reentrant=False) + self.seen)


class Hooks(Base):
    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: -g)
        return self.c(self.b(h))


class Backs(Base):
    def more(self):
        self.b.register_full_backward_hook(lambda module, before, after: None)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


class Constants(Base):
    def more(self):
        self.mean = torch.arange(4.0)
        self.others = {"some": [torch.full((8,), 2.0, dtype=torch.float64)]}

    def forward(self, x):
        return self.c(self.b(self.a(x - self.mean) * self.others["some"][0].float()) + self.seen)


class Random(Base):
    def more(self):
        self.mean = torch.randn(8)

    def forward(self, x):
        return self.c(self.b(self.a(x) - self.mean))


OFFSET, SPREAD = torch.full((8,), 0.5), torch.randn(8)


class Fixed(Base):
    def forward(self, x):
        return self.c(self.b(self.a(x) - OFFSET))


class Spread(Base):
    def forward(self, x):
        return self.c(self.b(self.a(x) - SPREAD))


class OfClass(Base):
    some = torch.randn(8)

    def forward(self, x):
        return self.c(self.b(self.a(x) - self.some))


class Counts(Base):
    def more(self):
        self.steps = torch.zeros(1)

    def forward(self, x):
        self.steps += 1
        return self.c(self.b(self.a(x) * self.steps))


class Keeps(Base):
    def more(self):
        self.last = [torch.zeros(8)]

    def forward(self, x):
        h = self.a(x) + self.last[0]
        self.last[0] = h.detach().mean(0)
        return self.c(self.b(h))


class Writes(Base):
    """Changes in place, of a view and of the data."""

    def forward(self, x):
        x[:, 0] = 0
        h = self.a(x)
        y = self.b(h)
        y += h
        y[:, 1:3].mul_(2)
        return self.c(y + self.seen)


class Late(Base):
    """The first activation is changed after the second layer, and read again."""

    def forward(self, x):
        h = self.a(x)
        y = self.b(h.relu())
        h[:, 0] = 0
        return self.c(y + h)


class Unused(Base):
    def more(self):
        self.other = nn.Linear(4, 1)

    def forward(self, x):
        self.other(x)
        return self.c(self.b(self.a(x)) + self.seen)


class Encodes(nn.Module):
    """Masks of minus infinity, of a buffer and of the data; time may be first."""

    def __init__(self, first=False):
        super().__init__()
        self.first, self.words, self.c = first, nn.Embedding(9, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=not first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))

    def forward(self, ids):
        own = torch.zeros(ids.shape[0], 4)
        own[:, 3:] = float("-inf")
        own.masked_fill_(ids.eq(0), float("-inf"))
        own[:, 0] = 0
        h = self.words(ids.t() if self.first else ids)
        h = self.layers(h, mask=self.mask, src_key_padding_mask=own)
        return self.c(h.mean(0 if self.first else 1))


class Rows(nn.Module):
    """Batch and time are one dimension."""

    def __init__(self):
        super().__init__()
        self.words, self.b, self.c = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids):
        batch, time = ids.shape
        h = self.b(self.words(ids).view(batch * time, 8))
        return self.c(h.view(batch, time, 8).mean(1))
'''


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "recorded.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("recorded", None)


def program(name: str, example: str = "float32[4]", **given: Any) -> Program:
    document = {"import": f"recorded:{name}", "example": [example], **given}
    return trace(NetworkSpec.model_validate(document))


def places(found: Program) -> list[str]:
    return [name for name, cut in found.cuts.items() if cut.reason is None and "." not in name]


class InPieces:
    """A network's pieces, which train together."""

    def __init__(self, found: Program, cuts: list[str], state: dict[str, Tensor]) -> None:
        self.program, self.ends = found, [None, *cuts, None]
        document = found.spec.model_dump(by_alias=True)
        self.pieces = [Piece(document, *ends) for ends in pairwise(self.ends)]
        for piece in self.pieces:
            piece.network.load_state_dict(
                {name: state[name] for name in piece.network.state_dict()}
            )

    def __call__(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        one = self.program.train if self.pieces[0].training else self.program.eval
        values, calls, y = dict[Any, Tensor](), [], x
        for piece, ends in zip(self.pieces, pairwise(self.ends), strict=True):
            section = Section.of(one, *ends)
            given = [values[node].detach().requires_grad_() for node in section.takes]
            found = piece(*given, *([x] * len(section.data)))
            found = found if isinstance(found, tuple) else (found,)
            values |= zip(section.gives, found, strict=True)
            calls.append((section, given, found))
            y = found[0]
        return y, calls

    def step(self, x: Tensor) -> None:
        y, calls = self(x)
        gradients = {calls[-1][0].gives[0]: torch.autograd.grad(y.square().mean(), y)[0]}
        for section, given, found in reversed(calls):
            pairs = [
                (value, gradients[node])
                for node, value in zip(section.gives, found, strict=True)
                if value.requires_grad and node in gradients
            ]
            torch.autograd.backward(*zip(*pairs, strict=True))
            for node, value in zip(section.takes, given, strict=True):
                if value.grad is not None:
                    gradients[node] = gradients.get(node, 0) + value.grad


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("Book", ["a", "b", "c"]),
        ("Modes", []),
        ("Early", ["a"]),
        ("Replaces", ["a"]),
        ("Norms", ["a", "b"]),
        ("Momentum", ["a"]),
        ("Signs", ["a", "b"]),
        ("Checkpoints", ["a"]),
        ("Fixed", ["a", "b"]),
        ("Constants", ["a", "b"]),
        ("Writes", ["a", "b"]),
        ("Late", []),
        ("Unused", ["a", "b"]),
        ("Encodes", ["words", "layers"]),
        ("Encodes first", ["words", "layers"]),
        ("Rows", ["words", "b"]),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_pieces_train_as_plain_torch_does(name: str, cuts: list[str]) -> None:
    name, _, first = name.partition(" ")
    words = name in ("Encodes", "Rows")
    args = {"first": True} if first else {}
    found = program(name, "int64[4]" if words else "float32[4]", args=args)
    if name not in ("Book", "Momentum", "Checkpoints", "Modes", "Unused"):
        assert places(found) == cuts
    assert set(cuts) <= {*places(found), "c"}
    torch.manual_seed(0)
    plain = getattr(importlib.import_module("recorded"), name)(**args)
    pieces = InPieces(found, [one for one in cuts if one != "c"], copy.deepcopy(plain.state_dict()))
    x = torch.randint(0, 9, (6, 4)) if words else torch.randn(6, 4)
    own = [p for piece in pieces.pieces for p in piece.parameters()]
    optimizers = [torch.optim.SGD(some, 0.1) for some in (plain.parameters(), own)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(x.clone()).square().mean().backward()
        pieces.step(x.clone())
        for optimizer in optimizers:
            optimizer.step()
    for piece in pieces.pieces:
        piece.eval()
        assert state_finite(piece)
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(pieces(x.clone())[0], plain(x.clone()), rtol=1e-6, atol=1e-6)
    wanted = plain.state_dict()
    assert set(wanted) == {name for one in pieces.pieces for name in one.network.state_dict()}
    for piece in pieces.pieces:
        for name, value in piece.network.state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Grows", "gives the buffer 'seen' another shape"),
        ("Calls", r"recorded.py:\d+\): the autograd.Function Within takes a Linear"),
        ("Hooks", r"recorded.py:\d+\): 'forward' registers a hook on a tensor"),
        ("Backs", "a backward hook on 'b'"),
        ("Random", "a tensor 'mean' .* is another one each time"),
        ("Spread", r"a tensor 'recorded.SPREAD' .* each time that .*recorded\.py is read"),
        ("OfClass", r"a tensor 'recorded.OfClass.some' .* each time that .*recorded\.py is read"),
        ("Counts", "a tensor 'steps' .* which 'forward' changes"),
        ("Keeps", r"a tensor 'last\[0\]' .* which 'forward' changes"),
    ],
)
def test_what_is_refused(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        program(name)


@pytest.mark.parametrize(
    ("name", "cut", "reason"),
    [
        ("Early", "b", "both sides use 'seen', which 'forward' changes"),
        ("Late", "a", "is changed in place later"),
        ("Norms", "b.parametrizations.weight", r"shape \(8, 8\) passes, which does not have the"),
    ],
)
def test_where_a_network_cannot_be_cut(name: str, cut: str, reason: str) -> None:
    found = program(name)
    with pytest.raises(SpecError, match=reason):
        found.cut(cut)
    assert f"not after {cut}" in (found.obstacles or "")


def test_masks_are_finite_and_weights_are_not() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert state_finite(layer)
    layer.mask[0] = torch.nan
    assert not state_finite(layer)
    layer.mask[0] = 0
    with torch.no_grad():
        layer.bias[0] = -torch.inf
    assert not state_finite(layer)
