"""What validate, up and Python say of a chain's own data, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.data import open_data
from dni_runtime.errors import DataError, DniError, SpecError
from dni_runtime.plan import trial
from dni_runtime.plan.prepare import CheckedChain, prepare

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype(np.float32)
Y = np.arange(24) % 3

CHAIN = """\
name: small
data: {{dataset: npz, path: data.npz, batch_size: 8, {data}}}
loss: {loss}
{more}
modules:
  - name: a
    interface: {interface}
    layers: [{first}, ReLU]
  - name: b
    layers: [{last}]
"""
LINEAR = "{Linear: {in_features: 6, out_features: 5}}"
SETTINGS: dict[str, Any] = {
    "data": "", "loss": "CrossEntropyLoss", "more": "", "interface": "exact", "first": LINEAR,
    "last": "{Linear: {in_features: 5, out_features: 3}}",
}  # fmt: skip
ONE = {"last": "{Linear: {in_features: 5, out_features: 1}}"}


def at(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., CheckedChain]:
    def check(x: np.ndarray = X, y: np.ndarray = Y, **settings: Any) -> CheckedChain:
        np.savez(
            tmp_path / "data.npz", x_train=x[:16], y_train=y[:16], x_eval=x[16:], y_eval=y[16:]
        )
        path = tmp_path / "chain.yaml"
        path.write_text(CHAIN.format(**SETTINGS | settings))
        return prepare(path)

    return check


BCE = {"loss": "BCEWithLogitsLoss", **ONE}
MAPS = {
    "first": "{Conv2d: {in_channels: 1, out_channels: 4, kernel_size: 1}}",
    "last": "{Conv2d: {in_channels: 4, out_channels: 3, kernel_size: 1}}",
}
SQUARES = RNG.normal(size=(24, 1, 4, 4)).astype(np.float32)
MASKS = RNG.integers(0, 3, (24, 4, 4))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"x": at(X, (3, 2), np.nan)}, DataError, r"x_train\[3, 2\] is nan"),
        ({"x": at(X, (20, 1), np.inf)}, DataError, r"x_eval\[4, 1\] is inf"),
        ({"y": Y + 1}, DataError, r"y_train\[2\] is 3.* 0 to 2\n.*class 0 has no sample"),
        ({"y": at(Y, 5, 7)}, DataError, r"y_train\[5\] is 7.*\n.*8 outputs.*ignore_index: 7"),
        ({"y": at(Y, 20, 255)}, DataError, r"y_eval\[4\] is 255.*\n.*ignore_index: 255"),
        ({"y": at(Y, 9, -1)}, DataError, r"y_train\[9\] is -1.*\n  → correct .*ignore_index: -1"),
        ({"y": Y.astype(np.float32)}, SpecError, "number of a class .* float32"),
        ({"y": Y[:, None]}, SpecError, r"number of a class .*int64\[B x 1\]"),
        ({"x": SQUARES, "y": MASKS[:, None], **MAPS}, SpecError, r"class .*int64\[B x 1 x 4 x 4\]"),
        ({"x": SQUARES, "y": MASKS[:, 2:], **MAPS}, SpecError, r"class .*int64\[B x 2 x 4\]"),
        ({"x": SQUARES, "y": at(MASKS, (2, 1, 3), 3), **MAPS}, DataError, r"y_train\[2, 1, 3\]"),
        ({"x": (X * 9).astype(int)}, SpecError, r"'a' fails .*int64.*\n.*as float32"),
        ({"y": X[:, :3], "loss": "MSELoss", **ONE}, SpecError, r"float32\[B x 1\] .*\[B x 3\]"),
        ({"y": X[:, 0], "loss": "MSELoss"}, SpecError, r"float32\[B x 3\] .*float32\[B\]"),
        ({"y": Y, **BCE}, DataError, r"y_train\[2\] is 2, but BCEWithLogitsLoss takes 0 to 1"),
        ({"y": X[:, :1], "more": "metrics: [mae]"}, SpecError, "number of a class"),
        ({"y": X[:, 0], **ONE, "loss": f"{{import: '{__name__}:Paired'}}"}, SpecError, "one shape"),
        ({"x": X[:0], "y": Y[:0]}, DataError, "has no training samples"),
        ({"loss": f"{{import: '{__name__}:Root'}}"}, SpecError, "the loss of the first samples is"),
        ({"y": at(Y % 2, 0, 0), "loss": "BCELoss", "x": 99 * X, **ONE}, SpecError,
         "BCELoss takes outputs from 0 to 1.*'Sigmoid'"),
    ],
)  # fmt: skip
def test_refused(
    check: Callable[..., CheckedChain], given: dict[str, Any], kind: type[DniError], message: str
) -> None:
    given = {"data": "normalize: false", **given}
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        check(**given)
    assert re.search(r"chain\.yaml:\d+", str(caught.value))


class Paired(torch.nn.Module):
    """A user's loss that forgets that its arguments differ in shape."""

    def forward(self, p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (p - y).square().mean()


class Root(torch.nn.Module):
    def forward(self, p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (p - 100).sqrt().mean()


class Whole(torch.nn.Module):
    """A user's loss that does not."""

    def forward(self, p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (p.squeeze(1) - y).square().mean()


@pytest.mark.parametrize(
    "given",
    [
        {"x": X.astype(np.float64), "y": Y.astype(np.uint8)},
        {"x": (X * 9).astype(np.uint8)},
        {"y": at(Y, 5, 255), "loss": "{CrossEntropyLoss: {ignore_index: 255}}"},
        {"y": at(Y, slice(0, 16), -100)},
        {"y": np.eye(3, dtype=np.float32)[Y]},
        {"x": SQUARES, "y": at(MASKS, (2, 1), 9), "loss": "{NLLLoss: {ignore_index: 9}}", **MAPS},
        {"y": Y, "loss": "SmoothL1Loss", "more": "metrics: [mae]", **ONE},
        {"y": Y - 7, "loss": "MSELoss", **ONE},
        {"y": Y % 2, **BCE},
        {"y": np.eye(3, dtype=int)[Y], "loss": "BCEWithLogitsLoss"},
        {"y": X[:, 0], **ONE, "loss": f"{{import: '{__name__}:Whole'}}"},
        {"x": (X * 9).astype(int) % 5, "last": "{Linear: {in_features: 30, out_features: 3}}",
         "first": "{Embedding: {num_embeddings: 5, embedding_dim: 5}}, {Flatten: {}}"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("interface", ["exact", "mixed"])
def test_right(check: Callable[..., CheckedChain], given: dict[str, Any], interface: str) -> None:
    prepared = check(**given, interface=interface)
    assert prepared.looked is not None
    assert prepared.looked.checked[1:3] == ("16 of 16 samples (train)", "8 of 8 samples (eval)")
    assert not prepared.looked.unchecked


def test_a_set_without_samples_is_warned_about(check: Callable[..., CheckedChain]) -> None:
    prepared = check(x=X[:16], y=Y[:16])
    assert prepared.looked is not None
    assert prepared.looked.warnings == ("there are no samples for evaluation",)


@pytest.mark.parametrize("loss", ["MSELoss", "BCEWithLogitsLoss"])
def test_labels_without_the_axis_of_the_output(
    check: Callable[..., CheckedChain], loss: str
) -> None:
    """Torch would broadcast, and compare each prediction with each label."""
    more = "metrics: [mse]\ndefaults: {optimizer: {SGD: {lr: 0.1}}}"
    prepared = check(y=Y % 2, loss=loss, more=more, **ONE)
    chain = LocalChain(prepared.workers)
    network = torch.nn.Sequential(*[layer for step in chain.steps for layer in step.layers])
    copy = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    copy.load_state_dict(network.state_dict())
    of_torch = {"MSELoss": F.mse_loss, "BCEWithLogitsLoss": F.binary_cross_entropy_with_logits}[
        loss
    ]
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
    for x, y in open_data(prepared.chain.data, prepared.base, seed=0).train_batches(1):
        optimizer.zero_grad()
        expected = of_torch(copy(x)[:, 0], y.float())
        expected.backward()
        optimizer.step()
        assert chain.train_batch(x, y) == pytest.approx(expected.item(), rel=1e-5)
        evaluation = EvaluationSums.of(chain.steps[-1])
        evaluation.add(chain.predict(x), y)
        error = F.mse_loss(copy(x)[:, 0], y.float())
        assert evaluation.result()["mse"] == pytest.approx(error.item())
    for ours, theirs in zip(network.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


OWN = """\
import torch


class Points(torch.utils.data.Dataset):
    def __init__(self, train):
        self.x = torch.randn(100, 6)
        self.y = torch.arange(100) % 3
        {change}

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.x[index], self.y[index]
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("self.x[70, 3] = float('nan')", r"train: sample \[70, 3\] is nan"),
        ("self.y[71] = 3", r"train: label \[71\] is 3"),
        ("self.y += 1", "class 0 has no sample"),
    ],
)
def test_a_class_of_the_users_own(tmp_path: Path, change: str, message: str) -> None:
    module = f"points{abs(hash(change))}"
    (tmp_path / f"{module}.py").write_text(OWN.format(change=change))
    text = CHAIN.format(**SETTINGS).replace("npz, path: data.npz", f"'{module}:Points'")
    (tmp_path / "chain.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "chain.yaml")


FORGETS = """\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 5)
        {first}

    def forward(self, x):
        h = self.line(x)
        {then}
"""
BUFFER = "self.register_buffer('seen', torch.zeros(5){})"
MOVES = """\
if self.training: self.seen = 0.5 * self.seen + h.detach().mean(0)
        return h + self.seen"""


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (BUFFER.format(""), MOVES, None),
        (BUFFER.format(", persistent=False"), MOVES, r"no checkpoint holds: .* of '0\.seen'"),
        ("self.seen = torch.zeros(5)", MOVES, "no checkpoint holds: seen of '0'"),
        ("self.calls = 0", "self.calls += 1\n        return h / self.calls", "calls of '0'"),
        ("self.map = None", "self.map = h\n        return h", None),
        (
            "self.mask = None",
            "if self.mask is None: self.mask = torch.ones(5)\n        return h * self.mask",
            None,
        ),
        (
            "self.register_buffer('rows', torch.zeros(0, 5))",
            "self.rows = torch.cat([self.rows, h.detach()])\n        return h",
            "cannot load its own state",
        ),
        (
            "self.get_extra_state = lambda: {'calls': 1}\n"
            "    def get_extra_state(self): return {'calls': 1}\n"
            "    def set_extra_state(self, state): pass",
            "return h",
            "is no tensor",
        ),
        (
            "",
            "return h if self.training else h.argmax(1)",
            "returns a tensor of shape .4,. for 4 samples in eval mode",
        ),
        ("", "return [h]", "returns a list of one tensor"),
        ("", "return h.t()", r"(?s)as first dimension.*transpose\(0, 1\)"),
    ],
)
def test_layers_compute_what_checkpoints_hold(
    tmp_path: Path,
    check: Callable[..., CheckedChain],
    first: str,
    then: str,
    message: str | None,
) -> None:
    module = f"layers{abs(hash((first, then)))}"
    (tmp_path / f"{module}.py").write_text(FORGETS.format(first=first, then=then))
    given = {"first": f"{{import: '{module}:Layer'}}", "interface": "none"}
    if message is None:
        assert check(**given).looked is not None
        return
    with pytest.raises(SpecError, match=message):
        check(**given)


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({"loss": "NLLLoss"}, "NLLLoss takes logarithms of probabilities: end with 'LogSoftmax'"),
        ({"loss": "NLLLoss", "last": SETTINGS["last"] + ", {LogSoftmax: {dim: 1}}"}, None),
        ({"last": SETTINGS["last"] + ", {LogSoftmax: {dim: 1}}"}, None),
        (
            {"last": SETTINGS["last"] + ", {Softmax: {dim: 1}}"},
            "CrossEntropyLoss computes the softmax itself: leave out the last 'Softmax'",
        ),
    ],
)
def test_outputs_that_are_no_probabilities_are_warned_about(
    check: Callable[..., CheckedChain], given: dict[str, Any], warning: str | None
) -> None:
    looked = check(**given).looked
    assert looked is not None
    assert looked.warnings == (() if warning is None else (warning,))


def test_what_is_too_large_is_said(
    check: Callable[..., CheckedChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LARGEST_PARAMETERS", 10)
    looked = check().looked
    assert looked is not None
    assert "parameters" in looked.unchecked[0]
    monkeypatch.setattr(trial, "LARGEST_BYTES", 10)
    looked = check().looked
    assert looked is not None
    assert looked.checked == ("names, keywords and shapes",)
    assert "the data" in looked.unchecked[0]


def test_samples_of_one_class_are_warned_about(check: Callable[..., CheckedChain]) -> None:
    looked = check(y=np.where(np.arange(24) < 16, Y, 1)).looked
    assert looked is not None
    assert looked.warnings == ("all samples for evaluation are of one class",)
    looked = check(y=np.arange(24) // 8, data="eval_limit: 4").looked  # the last eight: one class
    assert looked is not None
    assert looked.warnings == ("all samples for evaluation are of one class",)
    looked = check(y=np.sort(Y), data="validation: 4").looked
    assert looked is not None
    assert looked.warnings == ("all samples for the test at the end are of one class",)
    looked = check(y=np.sort(Y), data="validation: 4, shuffle: false").looked  # the last four
    assert looked is not None
    assert looked.warnings[0] == "all samples for evaluation are of one class"


IN_ORDER = """\
import torch

class InOrder(torch.utils.data.Dataset):  # it does not tell its classes
    def __init__(self, train, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.ones(6) * index, index // 40
"""


@pytest.mark.parametrize(
    ("count", "data", "loss", "parts"),
    [
        (40, "", "CrossEntropyLoss", ["training", "evaluation"]),
        (80, "", "CrossEntropyLoss", []),
        (80, "shuffle: false, eval_limit: 8", "CrossEntropyLoss", ["evaluation"]),
        (40, "", "MSELoss", []),  # its labels are numbers
    ],
)
def test_one_class_is_found_where_all_samples_are_read(
    count: int, data: str, loss: str, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in_order.py").write_text(IN_ORDER)
    last = ONE if loss == "MSELoss" else {}
    text = CHAIN.format(**SETTINGS | last | {"data": data, "loss": loss})
    path = tmp_path / "chain.yaml"
    own = f"'in_order:InOrder', args: {{count: {count}}}"
    path.write_text(text.replace("npz, path: data.npz", own))
    looked = prepare(path).looked
    assert looked is not None
    assert [one for one in looked.warnings if "one class" in one] == [
        f"all samples for {part} are of one class" for part in parts
    ]


def test_an_evaluation_of_what_was_learnt_is_warned_about(tmp_path: Path) -> None:
    source = IN_ORDER.replace("self, train, count", "self, count")
    (tmp_path / "in_one_order.py").write_text(source)
    path = tmp_path / "chain.yaml"

    def told(data: str) -> list[str]:
        text = CHAIN.format(**SETTINGS | {"data": data})
        path.write_text(text.replace("npz, path: data.npz", "'in_one_order:InOrder'"))
        looked = prepare(path).looked
        assert looked is not None
        return [one for one in looked.warnings if "it has learnt" in one]

    assert told("train: {count: 80}, evaluation: {count: 80}") != []
    assert told("train: {count: 80}, evaluation: {count: 60}") == []
    assert told("train: {count: 80}, validation: 0.1") == []
