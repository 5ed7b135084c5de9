"""Pieces of a network compute what it computes, and have its tensors under its own names."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dni_runtime.core.export import connect
from dni_runtime.errors import SpecError
from dni_runtime.network.piece import Piece, tie
from dni_runtime.network.program import Section
from dni_runtime.network.recording import mode_on, under
from dni_runtime.network.source import NetworkSpec, NetworkWrapper, build_network, read_tensor
from dni_runtime.network.tracing import trace
from tests.specs import float32, int64

SOURCE = '''\
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(size, size, 3, padding=1), nn.BatchNorm1d(size)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return self.relu(y)


class Skips(nn.Module):
    """A residual network with a skip from its beginning to its end."""

    def __init__(self, size=4):
        super().__init__()
        self.stem = nn.Conv1d(2, size, 1)
        self.first, self.second, self.third = Block(size), Block(size), Block(size)
        self.drop, self.top = nn.Dropout(0.3), nn.Linear(2 * size, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        begin = self.stem(x)
        y = self.third(self.second(self.first(begin)))
        y = F.dropout(y, 0.2, self.training) * torch.tensor([2.0])
        return self.top(self.drop(torch.cat([y.mean(2), begin.mean(2)], 1)))


class Tied(nn.Module):
    """A language model with tied embeddings, and a mask."""

    def __init__(self, words=7, size=4):
        super().__init__()
        self.words, self.places = nn.Embedding(words, size), nn.Embedding(5, size)
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.head = nn.Linear(size, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("order", torch.arange(5), persistent=False)

    def forward(self, tokens, mask):
        h = self.words(tokens) + self.places(self.order[: tokens.shape[1]])
        wide = mask.unsqueeze(2).expand(-1, -1, h.shape[2]).float()
        h = self.first(h).tanh() * wide
        return {"logits": self.head(self.second(h).tanh() * wide)}


class Peeks(Tied):
    """Uses its tied weights where no gradient is asked for, and for what has none."""

    def forward(self, tokens, mask):
        h = self.first(self.words.weight.detach()[tokens])
        signs = (self.head.weight > 0).float()
        return {"logits": self.second(h.tanh()) @ (signs + self.head.weight.data).t()}


class Severed(Tied):
    """The gradient of the first layer stops; that of the words, used again, does not."""

    def forward(self, tokens, mask):
        h = self.first(self.words(tokens))
        return {"logits": self.head(self.second(h.detach()).tanh())}


class Watched(Tied):
    """Under no_grad, ``flatten`` of two dimensions returns its tensor as it is."""

    def forward(self, tokens, mask):
        h = self.first(self.words(tokens[:, 0]))
        with torch.no_grad():
            self.seen = h.flatten(0, -2).mean()
        return {"logits": self.head(self.second(h).tanh())}


class Reads(nn.Module):
    """A text of any length, unless ``how`` asks for one."""

    def __init__(self, how):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Parameter(torch.randn(12, 4))
        self.first, self.last, self.how = nn.Linear(4, 4), nn.Linear(4, 3), how

    def forward(self, tokens):
        h = self.words(tokens) + self.places[: tokens.shape[1]]
        if self.how == "flat":
            h = h.reshape(h.shape[0], 5, 4)
        elif self.how == "long" and tokens.shape[1] > 3:
            h = -h
        elif self.how == "many" and tokens.numel() > 12:
            h = -h
        elif self.how == "even" and tokens.shape[1] % 2:
            h = -h
        elif self.how == "wide":
            h = torch.stack([h, h], 2)
        h = self.first(h).tanh().mean(1)
        return self.last(h * tokens.shape[1]) + torch.ones(tokens.shape[1]).sum()


class Bends(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        h = self.first(x)
        if h.sum() > 0:
            h = -h
        return self.second(h)


class Five(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)

    def forward(self, x):
        return self.first(x).reshape(5, 2)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.bend = nn.Linear(2, 2), nn.Tanh()

    def forward(self, x):
        return self.bend(self.first(x).sum(0)) * x


class Still(nn.Module):
    """Keeps its norm in eval mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Fails(nn.Module):
    def __init__(self, size):
        super().__init__()
        raise RuntimeError(f"no size {size}")


class Pair(NamedTuple):
    logits: torch.Tensor
    aux: torch.Tensor


@dataclass(slots=True)
class Both:
    logits: torch.Tensor
    aux: torch.Tensor


class Output(OrderedDict):
    """As transformers has it: items, attributes, and indices."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__.update(items)

    def __getitem__(self, key):
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


FORMS = {
    "tuple": lambda y, aux, train: (y, aux),
    "list": lambda y, aux, train: [aux, y],
    "keys": lambda y, aux, train: {"head": {"b": aux}, "head.a": y, 3: y},
    "pair": lambda y, aux, train: Pair(y, aux),
    "both": lambda y, aux, train: Both(y, aux),
    "output": lambda y, aux, train: Output(logits=y, hidden=(aux, aux)),
    "nested": lambda y, aux, train: {"aux": aux, "outputs": [Both([y, aux], aux), "words"]},
    "train": lambda y, aux, train: Pair(y, aux) if train else y,
    "eval": lambda y, aux, train: y if train else (aux, y),
    "many": lambda y, aux, train: {"all": [y] * 8, "last": aux},
    "only": lambda y, aux, train: {"logits": y, "hidden": None},
    "none": lambda y, aux, train: None,
}


class Gives(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.first, self.last, self.form = nn.Linear(2, 4), nn.Linear(4, 3), form
        self.aux = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x):
        h = self.first(x).tanh()
        aux = self.aux(h)
        return FORMS[self.form](self.last(h), aux, self.training)


def number():
    return 3
'''


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "piecewise.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("piecewise", None)


def network(name: str, *example: str, **given: Any) -> NetworkSpec:
    document = {"import": f"piecewise:{name}", "example": example, **given}
    return NetworkSpec.model_validate(document)


SKIPS = "Skips", "float32[2, 6]"
TIED = "Tied", "int64[5]", "bool[5]"
NAMES = {"takes": ("tokens", "mask"), "returns": "logits"}


def build(spec: NetworkSpec, cuts: Sequence[str], **given: Any) -> list[Piece]:
    ends = [None, *cuts, None]
    pieces = []
    for number, (after, until) in enumerate(pairwise(ends)):
        torch.manual_seed(0)  # the same weights as the others
        own = {key: value[number] for key, value in given.items()}
        pieces.append(Piece(spec.model_dump(by_alias=True), after, until, **own))
    return pieces


def run(spec: NetworkSpec, pieces: Sequence[Piece], cuts: Sequence[str], *xs: Tensor) -> Tensor:
    ends, values = [None, *cuts, None], dict[Any, Tensor]()
    one = trace(spec).train if pieces[0].training else trace(spec).eval
    output: Any = None
    for piece, after, until in zip(pieces, ends, ends[1:], strict=False):
        section = Section.of(one, after, until)
        given = [values[node] for node in section.takes] + [xs[place] for place in section.data]
        output = piece(*given)
        outputs = output if isinstance(output, tuple) else (output,)
        values |= zip(section.gives, outputs, strict=True)
    assert isinstance(output, Tensor)
    return output


def alike(pieces: Sequence[Piece], whole: nn.Module) -> set[str]:
    """Check that pieces have the network's statistics and gradients; return what they have."""
    names = set[str]()
    for piece in pieces:
        state = piece.network.state_dict()
        for name, value in state.items():
            assert torch.equal(value, whole.state_dict()[name]), name
        for name, p in piece.network.named_parameters():
            wanted = whole.get_parameter(name).grad
            assert (p.grad is None) == (wanted is None), name
            assert p.grad is None or torch.equal(p.grad, wanted), name  # type: ignore[arg-type]
        names |= set(state)
    return names


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "cuts", [(), ("stem",), ("first", "second"), ("stem", "first.conv", "third")]
)
def test_pieces_are_the_network(cuts: tuple[str, ...], train: bool) -> None:
    spec = network(*SKIPS)
    pieces, x = build(spec, cuts), torch.randn(4, 2, 6)
    torch.manual_seed(0)
    whole = build_network(spec)
    for one in (whole, *pieces):
        one.train(train)
    torch.manual_seed(1)
    expected = whole(x)
    torch.manual_seed(1)  # dropout
    found = run(spec, pieces, cuts, x)
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert alike(pieces, whole) == set(whole.state_dict())


def test_what_follows_from_the_data_is_computed_again() -> None:
    spec = network(*TIED, **NAMES)
    section = Section.of(trace(spec).train, "first", None)
    assert section.data == [1]  # the mask
    assert len(section.takes) == 1
    assert Section.of(trace(spec).train, None, "words").data == [0]


@pytest.mark.parametrize("cuts", [("words",), ("words", "first")])
def test_batches_of_another_length(cuts: tuple[str, ...]) -> None:
    """What a piece needs of the length comes with a value that has it, or with the data."""
    spec = network("Reads", "int64[<=5]", args={"how": "any"})  # as long as the traced batch
    assert [str(one) for one in trace(spec).cuts["words"].values] == ["float32[B x <=5 x 4]"]
    assert NetworkSpec.model_validate(spec.to_yaml()) == spec
    assert [Section.of(trace(spec).train, cut, None).data for cut in ("words", "first")] == [[], []]
    assert Section.of(trace(spec).train, "last", None).data == [0], "only its length"
    torch.manual_seed(0)
    whole = build_network(spec)
    for length in (5, 4, 2, 1, 12):
        pieces, tokens = build(spec, cuts), torch.randint(0, 7, (4, length))
        found, expected = run(spec, pieces, cuts, tokens), whole(tokens)
        assert torch.equal(found, expected)
        whole.zero_grad()
        expected.square().sum().backward()
        found.square().sum().backward()
        assert alike(pieces, whole) == set(whole.state_dict())


def test_a_length_that_is_a_constant_is_refused() -> None:
    assert trace(network("Reads", "int64[5]", args={"how": "flat"}))
    message = "'data.max_length' lets .* and piecewise:Reads takes 5 as a constant"
    with pytest.raises(SpecError, match=message):
        trace(network("Reads", "int64[<=5]", args={"how": "flat"}))


@pytest.mark.parametrize(
    ("how", "example", "sizes", "lengths"),
    [
        ("long", "int64[<=5]", set(), {2, 3}),
        ("even", "int64[<=5]", set(), {2, 4}),
        ("many", "int64[<=5]", {2}, {2}),
        ("many", "int64[5]", {2}, set()),
        ("any", "int64[<=5]", set(), set()),
    ],
)
def test_sizes_for_which_a_trace_may_not_hold(
    how: str, example: str, sizes: set[int], lengths: set[int]
) -> None:
    traced = trace(network("Reads", example, args={"how": how})).train
    assert traced.doubts(traced.batch, range(2, 9)) == sizes
    assert traced.doubts(traced.lengths, range(2, 5)) == lengths


def test_tied_weights_travel() -> None:
    spec, cuts = network(*TIED, **NAMES), ("first",)
    lends, borrows = [["words.weight"], []], [{}, {"words.weight": 1}]
    pieces = build(spec, cuts, lends=lends, borrows=borrows, rows=[4, 4])
    torch.manual_seed(0)
    whole = build_network(spec)
    assert set(pieces[1].network.state_dict()) == {"second.weight", "second.bias"}
    assert {"words.weight", "head.weight"} < set(pieces[0].network.state_dict())
    tokens, mask = torch.randint(0, 7, (4, 5)), torch.rand(4, 5) < 0.7
    first, second = pieces
    h, rows = first(tokens)[0], first(tokens)[1]
    assert rows.shape == (4, 7)
    found, expected = second(h, rows, mask), whole(tokens, mask)["logits"]
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(first.lent("words.weight").grad, whole.words.weight.grad)


def test_tied_weights_that_get_no_gradient_get_none_of_zeros() -> None:
    """An optimizer with weight decay would change them, which plain torch does not."""
    given = {"lends": [["words.weight"], []], "borrows": [{}, {"words.weight": 1}], "rows": [4, 4]}
    first, second = build(network("Peeks", *TIED[1:], **NAMES), ("first",), **given)
    *_, h, lent = first(torch.randint(0, 7, (4, 5)))
    assert h.requires_grad
    assert not lent.requires_grad
    assert second(h, lent).requires_grad


@pytest.mark.parametrize(("name", "passes"), [("Severed", False), ("Watched", True)])
def test_what_gets_no_gradient_gets_none_of_zeros(name: str, passes: bool) -> None:
    given = {"lends": [["words.weight"], []], "borrows": [{}, {"words.weight": 1}], "rows": [4, 4]}
    (first, _) = build(network(name, *TIED[1:], **NAMES), ("first",), **given)
    h, lent = first(torch.randint(0, 7, (4, 5)))
    assert h.requires_grad is passes
    assert lent.requires_grad


def test_a_small_batch_uses_the_newest_tied_weights() -> None:
    spec = network(*TIED, **NAMES)
    given = {"lends": [["words.weight"], []], "borrows": [{}, {"words.weight": 1}], "rows": [4, 4]}
    first, second = build(spec, ("first",), **given)
    tokens, mask = torch.randint(0, 7, (4, 5)), torch.ones(4, 5, dtype=torch.bool)
    with torch.no_grad():
        first.lent("words.weight").mul_(2)
        second(*first(tokens), mask)
        some = [one[:2] for one in (*first(tokens), mask)]
        torch.testing.assert_close(second(*some), second(*first(tokens), mask)[:2])
        first.lent("words.weight").mul_(2)
        some = [one[:2] for one in (*first(tokens), mask)]
        before = second(*some)
        tie([first, second])  # in one process
        after = second(*some)
        torch.testing.assert_close(after, second(*first(tokens), mask)[:2])
        assert not torch.allclose(before, after)


def test_tied_weights_may_be_given_before_any_batch() -> None:
    given = {"lends": [["words.weight"], []], "borrows": [{}, {"words.weight": 1}], "rows": [4, 4]}
    first, second = build(network(*TIED, **NAMES), ("first",), **given)
    tokens, mask = torch.randint(0, 7, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        first.lent("words.weight").mul_(2)
        away = second(*first(tokens), mask)
        lent = {"0.borrowed.words.weight": first.lent("words.weight")}
        layers = torch.nn.Sequential(second)
        assert not layers.load_state_dict(lent, strict=False).unexpected_keys
        assert layers.load_state_dict(lent, strict=False).missing_keys == [*layers.state_dict()]
        here = second(*first(tokens), mask)
        tie([first, second])
        torch.testing.assert_close(here, second(*first(tokens), mask))
    assert not torch.allclose(away, here)


def test_pieces_with_tied_weights_are_a_program_of_any_batch() -> None:
    """As the network itself: the weight that they share is not cut into rows any more."""
    given = {"lends": [["words.weight"], []], "borrows": [{}, {"words.weight": 1}], "rows": [4, 4]}
    first, second = build(network(*TIED, **NAMES), ("first",), **given)
    parts = {"a": nn.Sequential(first), "b": nn.Sequential(second)}
    values = [(0, number) for number in range(len(first(torch.zeros(4, 5, dtype=torch.int64))))]
    model = connect(parts, [[], values], [[0], [1]]).eval()
    tokens, mask = torch.randint(0, 7, (9, 5)), torch.ones(9, 5, dtype=torch.bool)
    sizes = ({0: torch.export.Dim.DYNAMIC},) * 2
    program = torch.export.export(model, (tokens[:2], mask[:2]), dynamic_shapes=sizes).module()
    for size in (1, 3, 9):
        x = tokens[:size], mask[:size]
        torch.testing.assert_close(program(*x), model(*x))


@pytest.mark.parametrize(
    ("traced", "device", "used"), [("cpu", "cuda", "cuda"), ("cuda", "cpu", "cuda")]
)
def test_autocast_of_the_inputs_device(traced: str, device: str, used: str) -> None:
    """A block that its author keeps in float32 by ``torch.autocast(x.device.type, enabled=False)``.

    It was traced on the CPU. There is no GPU here: only which device is chosen is looked at.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CUDA is not available
        mode = mode_on(device, partial(torch.autocast, traced, torch.bfloat16, False, None))
    assert isinstance(mode, torch.autocast)
    assert mode.device == used
    run = under(torch.Tensor.matmul, (partial(torch.autocast, "cpu", torch.bfloat16, False, None),))
    x = torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert (run(x, x).dtype, (x @ x).dtype) == (torch.float32, torch.bfloat16)


def test_it_can_be_copied_and_needs_no_memory() -> None:
    spec = network(*SKIPS)
    (piece,) = build(spec, ())
    other = copy.deepcopy(piece).eval()
    with torch.no_grad():
        for one in other.parameters():
            one.zero_()
    x = torch.randn(4, 2, 6)
    assert other(x).abs().max() == 0
    assert piece.eval()(x).abs().max() > 0
    with torch.device("meta"):
        empty = Piece(spec.model_dump(by_alias=True), "first", "second")
    assert empty(torch.empty(2, 4, 6, device="meta")).shape == (2, 4, 6)


def test_a_network_may_have_a_train_of_its_own() -> None:
    """It names what another piece has, and what it does is in the operations."""
    spec, cuts, x = network("Still", "float32[2]"), ("first", "norm"), torch.randn(4, 2)
    pieces = build(spec, cuts)
    torch.manual_seed(0)
    whole = build_network(spec).train()
    for mode in (False, True):
        for one in (whole, *pieces):
            one.train(mode)
        assert [one.training for one in pieces] == [mode] * 3
        assert torch.equal(run(spec, pieces, cuts, x), whole(x))


@pytest.mark.parametrize(
    ("form", "returns"),
    [
        ("tuple", 0),
        ("list", "-1"),
        ("keys", "head.a"),
        ("keys", 3),
        ("pair", "logits"),
        ("pair", "0"),
        ("both", "logits"),
        ("output", "logits"),
        ("output", 0),
        ("nested", "outputs.0.logits.0"),
        ("train", 0),
        ("train", "logits"),
        ("eval", "1"),
        ("only", None),
    ],
)
def test_one_of_several_outputs(form: str, returns: str | int | None) -> None:
    spec = network("Gives", "float32[2]", args={"form": form}, returns=returns)
    assert NetworkSpec.model_validate(spec.to_yaml()) == spec
    cuts, x = ("first",), torch.randn(4, 2)
    pieces = build(spec, cuts)
    torch.manual_seed(0)
    plain: Any = build_network(spec)
    for mode in (True, False):
        for one in (plain, *pieces):
            one.train(mode).zero_grad()
        h = plain.first(x).tanh()
        expected, found = plain.last(h), run(spec, pieces, cuts, x)
        plain.aux(h)  # whose statistics are the network's, too
        assert torch.equal(found, expected)
        assert torch.equal(NetworkWrapper(plain, spec).train(False)(x), expected) or mode
        expected.square().sum().backward()
        found.square().sum().backward()
        alike(pieces, plain)


@pytest.mark.parametrize(
    ("form", "returns", "message", "hint"),
    [
        ("tuple", None, "returns tuple in train mode", "'0', '1'"),
        ("train", None, "returns Pair in train mode", "'logits', 'aux'"),
        ("eval", None, "returns tuple in eval mode", "'0', '1'"),
        ("eval", 2, "returns tuple in eval mode, without a tensor '2'", "'0', '1'"),
        ("both", "logit", "Both in train mode, without a tensor 'logit'", "'logits', 'aux'"),
        ("keys", "head", "without a tensor 'head'", "'head.a', '3', 'head.b'"),
        ("nested", "outputs.1", "without a tensor 'outputs.1'",
         "'aux', 'outputs.0.aux', 'outputs.0.logits.0', 'outputs.0.logits.1'"),
        ("many", "all", "without a tensor 'all'",
         "'last', " + ", ".join(f"'all.{number}'" for number in range(7)) + " …"),
        ("none", None, "returns NoneType in train mode", None),
    ],
)  # fmt: skip
def test_outputs_that_are_no_tensor_are_listed(
    form: str, returns: str | int | None, message: str, hint: str | None
) -> None:
    with pytest.raises(SpecError) as caught:
        trace(network("Gives", "float32[2]", args={"form": form}, returns=returns))
    assert caught.value.message.startswith("piecewise:Gives: forward returns ")
    assert caught.value.message.endswith(message)
    expected = "there is no tensor in it" if hint is None else f"(--returns): {hint}"
    assert (caught.value.hint or "").endswith(expected)


def test_cuts_have_names() -> None:
    cuts = trace(network(*SKIPS)).cuts
    assert cuts["third.relu"].name == "third"  # one place
    assert "drop" in cuts
    first = cuts["first"]
    assert first.values == (float32(4, 6),) * 2  # and the skip's


@pytest.mark.parametrize(
    ("document", "cuts", "message"),
    [
        (SKIPS, {"until": "frist"}, "cannot be cut after 'frist'.*did you mean 'first'"),
        (SKIPS, {"after": "third", "until": "first"}, "'first' does not end after 'third'"),
        (SKIPS, {"lends": ["top.weight"], "until": "first"}, "does not use a parameter 'top"),
        (("Bends", "float32[2]"), {}, r"cannot be traced \(.*piecewise.py:\d+\): it decides by"),
        (("Five", "float32[2]"), {}, "works for batches of 5 samples only"),
        (
            ("Sums", "float32[2]"),
            {"until": "bend"},
            r"shape \(2,\) passes, which does not have the",
        ),
        (("number", "float32[2]"), {}, "returns int, not a torch.nn.Module"),
        (("Skip", "float32[2]"), {}, r"piecewise\.py has no class or function 'Skip'"),
        (("Skips", "float32[3, 6]"), {}, "cannot be traced .*expected input"),
        (("Skips", "float33[3, 6]"), {}, "'float33.3, 6.' is not a type and a shape"),
    ],
)
def test_errors(document: tuple[str, ...], cuts: dict[str, Any], message: str) -> None:
    name, *example = document
    with pytest.raises(SpecError) as caught:
        Piece({"import": f"piecewise:{name}", "example": example}, **cuts)
    text = str(caught.value).replace("\n", " ")
    assert re.search(message, text), text


def test_a_constructor_that_fails() -> None:
    spec = network("Fails", "float32[2]", args={"size": 3})
    with pytest.raises(SpecError, match=r"Fails\(size=3\) failed .*RuntimeError: no size 3"):
        build_network(spec)


def test_samples_are_read() -> None:
    assert read_tensor("float32[]") == float32()
    assert read_tensor("int64[3,4]") == int64(3, 4)


def test_the_wrapped_network_takes_names() -> None:
    spec = network(*TIED, **NAMES)
    whole = build_network(spec)
    given = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(NetworkWrapper(whole, spec)(*given), whole(*given)["logits"])
    assert isinstance(whole, nn.Module)
