"""A run's checkpoint, evaluated in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dni_runtime.api.checkpointed import (
    Checkpointed,
    check_ending,
    evaluation_data,
    predict_model,
)
from dni_runtime.core import training
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.data import open_data
from dni_runtime.errors import DataError, SpecError, UnavailableError, UsageError
from dni_runtime.measure.predictions import parse_metrics
from dni_runtime.plan.create import create_run
from dni_runtime.plan.initial import _stored
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.cuts import tensors_file
from dni_runtime.run.record import Record
from dni_runtime.spec import DataSpec
from dni_runtime.worker.checkpoint import copy_state, write_part

CHAIN = """\
name: x
data: {dataset: digits, flatten: true, batch_size: 32}
defaults: {interface: mixed, optimizer: {Adam: {lr: 0.01}}, %s}
modules:
  - name: a
    layers:
      - {Unflatten: {dim: 1, unflattened_size: [8, 8]}}
      - {Recurrent: {cell: GRU, input_size: 8, hidden_size: 8}}
      - {Dropout: {p: 0.2}}
  - name: b
    layers: [Flatten, {BatchNorm1d: {num_features: 64}}, {Linear: {in_features: 64, out_features: 10}}]
"""  # noqa: E501
CUT = 5


IMAGES = """\
name: x
data: {dataset: npz, path: own.npz, batch_size: 8, flatten: true}
defaults: {interface: exact, optimizer: {SGD: {lr: 0.1}}}
modules:
  - {name: a, layers: [{Linear: {in_features: 12, out_features: 4}}]}
  - {name: b, layers: [{Linear: {in_features: 4, out_features: 2}}]}
"""


NUMBERS = """\
name: x
data: {dataset: npz, path: own.npz, batch_size: 8}
loss: BCEWithLogitsLoss
metrics: [mse]
modules:
  - {name: a, layers: [{Linear: {in_features: 3, out_features: 4}}]}
  - {name: b, layers: [{Linear: {in_features: 4, out_features: 1}}]}
"""


def trained(folder: Path, settings: str, text: str = CHAIN) -> tuple[Checkpointed, LocalChain]:
    """A run with a checkpoint after a few batches, and the chain that made it."""
    path = folder / "chain.yaml"
    path.write_text(text % settings if settings else text)
    prepared = prepare(path)
    run = create_run(folder / "run", prepared, backend="process")
    chain = LocalChain(prepared.workers)
    batches = open_data(prepared.chain.data, folder, seed=0).train_batches(1)
    for _, (x, y) in zip(range(CUT), batches, strict=False):
        chain.train_batch(x, y)
    for step in chain.steps:
        tensors, document = copy_state(step)
        document |= {"cut": CUT, "epoch": 1, "epochs_ended": 0, "step": CUT, "samples": 32 * CUT}
        write_part(run, step.spec.module, (tensors, document))
    return Checkpointed(Record.read(run.root)), chain


@pytest.mark.parametrize("settings", ["ema: 0.5", "precision: bfloat16"])
def test_it_computes_as_the_run_does(
    tmp_path: Path, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the modules' precision, with carried states and averages; nothing that learns is made."""
    run, chain = trained(tmp_path, settings)
    source = open_data(run.record.specs()[0].data, tmp_path, seed=0)
    expected = evaluate(chain.predict, source.eval_batches(), chain.steps[-1].spec)
    monkeypatch.setattr(training, "build_optimizer", None)
    for name in ("optimization", "interfaces.synthetic", "interfaces.local"):
        monkeypatch.setattr(f"dni_runtime.core.{name}.build_optimizer", None)
    assert run.evaluate() == expected


def test_a_checkpoint_and_a_metric_may_be_named(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, "ema: 0.5")
    expected = run.evaluate(CUT, metrics=["accuracy"])
    assert run.evaluate("newest", metrics="accuracy") == expected
    assert run.predict(cut=str(CUT)).evaluate("accuracy").keys() == expected.keys()
    with pytest.raises(UsageError, match="no complete checkpoint 6; there are: 5"):
        run.export(tmp_path / "x.safetensors", "6")
    one = {"F1Score": {"task": "multiclass", "num_classes": 10}}
    assert parse_metrics(one) == parse_metrics([one])


def test_other_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Torch would repeat predictions for several labels, and take any for probabilities."""
    x, y = np.random.default_rng(0).random((24, 3), np.float32), np.arange(24)[:, None] % 2
    for name, labels in (("own", y), ("three", np.repeat(y, 3, 1)), ("signs", 2 * y - 1)):
        labels = labels.astype(np.float32)
        arrays = {"x_train": x, "y_train": labels, "x_eval": x, "y_eval": labels}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    run, _ = trained(tmp_path, "", NUMBERS)
    assert run.evaluate(data=tmp_path / "own.npz") == pytest.approx(run.evaluate())
    for name, message in (
        ("three", "of the output with one of the label"),
        ("signs", r"label \[0, 0\] is -1\.0"),
    ):
        with pytest.raises((SpecError, DataError), match=message):
            run.evaluate(data=tmp_path / f"{name}.npz", metrics=["mse"])


def images(file: Path, mean: float, dtype: str) -> np.ndarray[Any, Any]:
    """Write images (3, 2, 2) of two classes; return those for evaluation."""
    rng = np.random.default_rng(int(mean))
    x = (mean + 20 * rng.random((60, 3, 2, 2))).astype(dtype)
    y = np.arange(60) % 2
    np.savez(file, x_train=x[:40], y_train=y[:40], x_eval=x[40:], y_eval=y[40:])
    return x[40:]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_other_samples_are_normalised_as_those_of_the_training(
    tmp_path: Path, dtype: str, known: bool
) -> None:
    """By the figures of its samples, not by those of the other file."""
    images(tmp_path / "own.npz", 30, dtype)
    with np.load(tmp_path / "own.npz") as archive:
        own = archive["x_train"].astype(np.float64)
    run, _ = trained(tmp_path, "", IMAGES)
    run.export(tmp_path / "model.safetensors", CUT)
    (line,) = (one for one in (tmp_path / "model.md").read_text().splitlines() if "raw" in one)
    assert line.startswith(f"| input | raw samples {dtype}[B x 3 x 2 x 2], less ")
    figures = [float(one) for one in re.findall(r"\d+\.\d+", line)]
    assert figures == pytest.approx([*own.mean((0, 2, 3)), *own.std((0, 2, 3))], rel=1e-5)
    other = tmp_path / "other.npz"
    raw = images(other, 120, dtype)
    x = (raw - own.mean((0, 2, 3), keepdims=True)) / own.std((0, 2, 3), keepdims=True)
    with torch.no_grad():
        wanted = run.model(CUT)(torch.from_numpy(x).to(torch.float32).flatten(1))
    if not known:
        run.record = run.record.model_copy(update={"preprocessing": None})
    found = torch.as_tensor(run.predict(str(other), CUT).outputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    data = {"dataset": "npz", "path": str(other), "labels": "none"}
    for more in ({"flatten": True}, {}):  # the file says that it takes vectors
        predicted = predict_model(tmp_path / "model.safetensors", data | more)
        torch.testing.assert_close(predicted.outputs, wanted, rtol=1e-4, atol=1e-4)


def test_predictions_are_in_the_datas_order(tmp_path: Path) -> None:
    """Though ``streams`` read it row by row: 20 samples are 8 streams of 2."""
    raw = images(tmp_path / "own.npz", 30, "uint8")
    text = IMAGES.replace("flatten: true", "flatten: true, streams: true, normalize: false")
    run, _ = trained(
        tmp_path, "", text.replace("batch_size: 8", "batch_size: 8, eval_batch_size: 8")
    )
    with torch.no_grad():
        wanted = run.model(CUT)(torch.from_numpy(raw[:16] / np.float32(255)).flatten(1))
    found = run.predict(cut=CUT)
    torch.testing.assert_close(found.outputs, wanted)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1] * 8


def test_other_raw_samples_are_refused(tmp_path: Path) -> None:
    """Of another type, or with another number of channels than there are figures."""
    images(tmp_path / "own.npz", 30, "uint8")
    run, _ = trained(tmp_path, "", IMAGES)
    images(tmp_path / "other.npz", 30, "float32")
    message = r"are float32\[3, 2, 2\], and those of the training were uint8\[3, 2, 2\]"
    with pytest.raises(DataError, match=message):
        run.predict(tmp_path / "other.npz", CUT)
    with pytest.raises(DataError, match=r"are uint8\[1, 8, 8\], and those of the training were"):
        run.predict({"dataset": "digits"}, CUT)


def test_no_figures_are_guessed(tmp_path: Path) -> None:
    """A network that was trained on what a user's own class returns, and a file of raw samples."""
    images(tmp_path / "raw.npz", 30, "float32")
    its = DataSpec.model_validate({"dataset": "its:rows"})
    data = {"dataset": "npz", "path": str(tmp_path / "raw.npz")}
    new = {**data, "path": str(tmp_path / "new.npz"), "labels": "none", "normalize": True}
    np.savez(tmp_path / "new.npz", x_eval=np.ones((4, 3), np.float32))
    for one in (data, new):
        with pytest.raises(UsageError, match="how the training's samples were normalised is not"):
            evaluation_data(one, its, tmp_path)
    ((x, _),) = evaluation_data({**data, "normalize": False}, its, tmp_path).eval_batches()
    assert torch.as_tensor(x).min() >= 30


def test_a_checkpoint_of_other_layers_is_refused(tmp_path: Path) -> None:
    run, chain = trained(tmp_path, "ema: 0.5")
    step = chain.steps[-1]
    step.layers.append(torch.nn.Linear(10, 10))
    step.optimization.average = None
    tensors, document = copy_state(step)
    write_part(run.directory, "b", (tensors, document | {"cut": CUT}))
    with pytest.raises(DataError, match=r"(?s)b.safetensors' does not fit module 'b': .*3.weight"):
        run.evaluate(CUT)


def test_a_part_that_becomes_a_link(tmp_path: Path) -> None:
    """After it was looked at: what is read is still no file from elsewhere."""
    run, _ = trained(tmp_path, "ema: 0.5")
    part = tensors_file(run.directory.checkpoint(CUT, "a"))
    part.rename(tmp_path / "elsewhere.safetensors")
    part.symlink_to(tmp_path / "elsewhere.safetensors")
    for read in (run.model, run.state_dict, run.evaluate):
        with pytest.raises(DataError, match="is a link, or no plain file"):
            read(CUT)
    with pytest.raises(SpecError, match="is a link, or no plain file"):
        dict(_stored(run.directory.root, ("init", "file")))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert dict(_stored(tmp_path / "model.safetensors", ("init", "file")))


def test_onnx_may_not_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dni_runtime.api.checkpointed.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="onnx and onnxscript are not installed"):
        check_ending(tmp_path / "net.onnx", state_dict=False)


def test_other_rows_are_read_by_the_same_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "otherrows.py").write_text(
        "from pathlib import Path\n\n"
        "def rows(root):\n"
        "    count = int((Path(root) / 'count').read_text())\n"
        "    return [{'index': n, 'x': [n, -n], 'y': n % 2} for n in range(count)]\n"
    )
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "count").write_text("3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    chains = DataSpec.model_validate(
        {"dataset": "its:rows", "train": {}, "evaluation": {}, "inputs": ["x"], "label": "y"}
    )
    other = {"dataset": "otherrows:rows", "train": {"root": "here"}, "evaluation": {"root": "here"}}
    ((x, y),) = evaluation_data(other, chains, tmp_path).eval_batches()
    named = {**other, "dataset": sys.modules["otherrows"].rows}  # as Chain.split takes it
    ((again, _),) = evaluation_data(named, chains, tmp_path).eval_batches()
    assert torch.equal(torch.as_tensor(x), torch.as_tensor(again))
    with pytest.raises(SpecError, match=r"'dataset' is a Linear: .*\n.*'evaluation': \{"):
        evaluation_data(torch.nn.Linear(1, 1), chains, tmp_path)
    assert torch.as_tensor(x).tolist() == [[0, 0], [1, -1], [2, -2]]
    assert y.tolist() == [0, 1, 0]
    sys.modules.pop("otherrows")


RECURRENT = """\
name: x
data: {dataset: digits, flatten: true, batch_size: 32}
defaults: {interface: exact, optimizer: {Adam: {lr: 0.01}}%s}
modules:
  - name: a
    layers:
      - {Unflatten: {dim: 1, unflattened_size: [8, 8]}}
      - {Recurrent: {cell: GRU, input_size: 8, hidden_size: 8, synthetic: true}}
  - {name: b, layers: [Flatten, {Linear: {in_features: 64, out_features: 10}}]}
"""


@pytest.mark.parametrize("of", ["run", "net.safetensors", "state.safetensors"])
def test_a_state_that_is_carried_on_is_no_weight(tmp_path: Path, of: str) -> None:
    """A recurrent layer begins with the weights of another run's, and with zeros."""
    found, chain = trained(tmp_path, "", RECURRENT % "")
    if of != "run":
        found.export(tmp_path / of, state_dict=of.startswith("state"))
    path = tmp_path / "again.yaml"
    path.write_text(RECURRENT % f", init: {{file: {of}}}")
    run = create_run(tmp_path / "other", prepare(path), backend="process")
    weights = load_file(run.initial("a"))
    assert set(weights) == {f"1.cell.{name}" for name, _ in nn.GRU(8, 8).named_parameters()}
    for name, value in weights.items():
        assert torch.equal(value, chain.steps[0].layers.state_dict()[name])


NAMED = """\
name: x
data: {dataset: npz, path: own.npz, batch_size: 8, flatten: true}
defaults: {interface: exact, optimizer: {SGD: {lr: 0.1}}}
modules:
  - {name: a, layers: [{Linear: {in_features: 12, out_features: 12}}], init: {file: one.pt, names: {"0": w}}}
  - {name: b, layers: [{Linear: {in_features: 12, out_features: 12}}], init: {file: one.pt, names: {"0": w}}}
"""  # noqa: E501


def test_two_modules_that_were_one_tensor(tmp_path: Path) -> None:
    """A state dict has room for one of them; the other one must not be lost silently."""
    x, y = np.random.default_rng(0).random((32, 3, 4), dtype="float32"), np.arange(32) % 12
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_eval=x, y_eval=y)
    layer = nn.Linear(12, 12)
    torch.save(
        {f"w.{name}": value for name, value in layer.state_dict().items()}, tmp_path / "one.pt"
    )
    found, _ = trained(tmp_path, "", NAMED)
    with pytest.raises(UsageError, match=r"'0\..*' of module 'b' was 'w\..*', as was another one"):
        found.state_dict()
    assert sorted(found.model().state_dict()) == [
        "a.0.bias",
        "a.0.weight",
        "b.0.bias",
        "b.0.weight",
    ]
