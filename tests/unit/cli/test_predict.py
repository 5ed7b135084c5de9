"""``dnictl predict``: outputs, metrics and the confusion matrix, as torch computes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy, mse_loss

from dni_runtime.api.checkpointed import Checkpointed
from dni_runtime.core.step import ModuleStep
from dni_runtime.data import open_data
from dni_runtime.errors import UsageError
from dni_runtime.measure.predictions import Predictions
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.record import Record
from dni_runtime.spec import Choice
from dni_runtime.worker.checkpoint import copy_state, write_part
from tests.unit.cli.conftest import Dnictl

CHAIN = """\
name: x
data: {dataset: digits, flatten: true, batch_size: 32, eval_limit: 100}
modules:
  - {name: a, layers: [{Linear: {in_features: 64, out_features: 8}}, {BatchNorm1d: {num_features: 8}}]}
  - {name: b, layers: [{Linear: {in_features: 8, out_features: 10}}]}
"""  # noqa: E501


def trained(folder: Path, chain: str) -> Checkpointed:
    (folder / "chain.yaml").write_text(chain)
    prepared = prepare(folder / "chain.yaml")
    made = create_run(folder / "runs" / "one", prepared, backend="process")
    for worker in prepared.workers:
        tensors, document = copy_state(ModuleStep(worker))
        write_part(made, worker.module, (tensors, document | {"cut": 5}))
    return Checkpointed(Record.read(made.root))


@pytest.fixture
def run(folder: Path) -> Checkpointed:
    return trained(folder, CHAIN)


def loaded(file: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(file) as arrays:
        return dict(arrays)


def test_figures_do_not_depend_on_a_picture(dnictl: Dnictl, run: Checkpointed) -> None:
    for more in ([], ["--json"]):
        undrawn = dnictl("predict", "one", "--confusion", "x.foo", *more)
        assert undrawn.code == 64
        assert "cannot be drawn" in undrawn.err
        assert "accuracy" in undrawn.out


def test_a_run(dnictl: Dnictl, run: Checkpointed, folder: Path) -> None:
    """On its own evaluation samples, and on all of them under other metrics."""
    said = dnictl("predict", "one", "-o", "p.npz", "--json").json
    arrays = loaded(folder / "p.npz")
    batches = list(open_data(run.record.specs()[0].data, folder, seed=0).eval_batches())
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    with torch.no_grad():
        p = run.model()(x)
    torch.testing.assert_close(torch.from_numpy(arrays["outputs"]), p)
    assert (arrays["labels"] == y.numpy()).all()
    assert (said["samples"], said["shape"], said["checkpoint"]) == (100, [10], 5)
    assert said["evaluation"]["loss"] == pytest.approx(float(cross_entropy(p, y)))
    assert said["evaluation"] == pytest.approx(run.evaluate())
    counts = np.zeros((10, 10), int)
    for label, one in zip(y.tolist(), p.argmax(1).tolist(), strict=True):
        counts[label, one] += 1
    assert said["confusion"] == counts.tolist()
    assert run.predict().plot().axes[0].get_ylabel() == "label"

    whole = dnictl("predict", "--data", "digits", "--metrics", "top5", "--json").json
    assert whole["samples"] > 100
    assert list(whole["evaluation"]) == ["loss", "top5"]
    assert whole["evaluation"] == pytest.approx(run.evaluate(data="digits", metrics=["top5"]))
    assert dnictl("predict", "--metrics", "mae").code == 78
    said = dnictl("predict", "-o", "p.txt")
    assert (said.code, "'p.txt' cannot be written: end its name in .npz" in said.err) == (64, True)
    assert "data.batchsize: unknown key" in dnictl("predict", "--data", "{batchsize: 3}").err


OWN = """\
import torch
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __init__(self, root=None, scale=1):
        self.x = torch.ones(8, 64) if root is None else scale * torch.load(root)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], 0
"""


def test_other_samples_of_an_own_class(dnictl: Dnictl, folder: Path) -> None:
    """A path starts in the working directory; other keywords are the chain's."""
    (folder / "own.py").write_text(OWN)
    (folder / "data").mkdir()
    x = torch.randn(9, 64)
    for name, count in (("train", 8), ("eval", 4), ("other", 9)):
        torch.save(x[:count], folder / "data" / name)
    data = (
        "dataset: own:Numbers, train: {root: data/train}, evaluation: {root: data/eval, scale: 2}"
    )
    run = trained(folder, re.sub(r"dataset: digits.*100", data, CHAIN))
    dnictl("predict", "--data", "{evaluation: {root: data/other}}", "-o", "p.npz")
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(loaded(folder / "p.npz")["outputs"]), run.model()(2 * x)
        )
    run.export("m.safetensors")
    alone = "{dataset: own:Numbers, evaluation: {root: data/other, scale: 2}}"
    dnictl("predict", "m.safetensors", "--data", alone, "-o", "q.npz")
    assert loaded(folder / "q.npz")["outputs"].shape == (9, 10)
    chain = re.sub(
        r"dataset: digits.*100", "dataset: own:Numbers, train: {}, evaluation: {}", CHAIN
    )
    (folder / "pathless").mkdir()
    (folder / "pathless" / "own.py").write_text(OWN)
    trained(folder / "pathless", chain)
    said = dnictl("predict", "--runs", "pathless/runs", "--data", "data").err
    assert "'data' names no other data" in said
    assert "data.evaluation" in dnictl("predict", "--data", "{evaluation: data/other}").err


def test_an_exported_file(dnictl: Dnictl, run: Checkpointed, folder: Path) -> None:
    """On data with labels, and on data that have none."""
    run.export(folder / "m.safetensors")
    card = (folder / "m.md").read_text()
    metadata, page = card.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(metadata)["library_name"] == "dni-runtime"
    assert "| module a | Linear, BatchNorm1d; Adam; mixed gradients |" in page
    assert 'dni_runtime.load("m.safetensors")' in page
    (folder / "m.md").write_text("my own notes")
    run.export(folder / "m.pt", state_dict=True)
    run.export(folder / "s.safetensors", state_dict=True)
    for weights in ("s.safetensors", "s.pt"):
        dnictl("export", "--state-dict", "-o", weights)
        assert "without --state-dict" in dnictl("predict", weights, "--data", "digits").err
    assert (folder / "m.md").read_text() == "my own notes"
    x, y = torch.randn(30, 64), torch.arange(30) % 10
    train, new = {"x_train": x[:8], "y_train": y[:8]}, {"x_eval": x[8:], "y_eval": y[8:]}
    np.savez(folder / "d.npz", **{name: one.numpy() for name, one in (train | new).items()})
    data = "{dataset: npz, path: d.npz, normalize: false}"
    said = dnictl("predict", "m.safetensors", "--data", data, "-o", "p.npz", "--json").json
    with torch.no_grad():
        p = run.model()(x[8:])
    torch.testing.assert_close(torch.from_numpy(loaded(folder / "p.npz")["outputs"]), p)
    assert said["evaluation"]["loss"] == pytest.approx(float(cross_entropy(p, y[8:])))
    np.savez(folder / "n.npz", x_train=x[:8].numpy(), x_eval=x[8:].numpy())
    data = data.replace("d.npz", "n.npz, labels: none")
    out = dnictl("predict", "m.safetensors", "--data", data, "-o", "q.npz").out
    assert out == "22 samples, wrote q.npz\n"
    assert list(loaded(folder / "q.npz")) == ["outputs"]
    np.savez(folder / "new.npz", x_eval=x[8:].numpy())  # as those that somebody has to predict
    data = data.replace("n.npz", "new.npz")
    dnictl("predict", "m.safetensors", "--data", data, "-o", "new-p.npz")
    np.testing.assert_allclose(loaded(folder / "new-p.npz")["outputs"], p, rtol=1e-5, atol=1e-6)
    assert "no data is named" in dnictl("predict", "m.safetensors").err
    assert dnictl("predict", "m.safetensors", "--data", "digits").out.startswith("360 samples\n")
    result = dnictl("predict", "m.safetensors", "--data", "{dataset: digits, flatten: false}")
    assert result.code == 66
    assert "does not take these samples, float32[1, 8, 8]: mat1 and mat2" in result.err


TWO = """\
import torch

class Two(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), x[:, :2]

def numbers(train):
    return [(torch.full((64,), n / 9), (n % 10, n % 2)) for n in range(40)]
"""


def test_an_exported_file_of_several_outputs(dnictl: Dnictl, folder: Path) -> None:
    """They are laid in one row; nobody knows what they are worth."""
    (folder / "two.py").write_text(TWO)
    last = "import: 'two:Two', args: {in_features: 8, out_features: 10}"
    losses = ", ".join(f"{{loss: CrossEntropyLoss, output: {n}, label: {n}}}" for n in (0, 1))
    text = CHAIN.replace("Linear: {in_features: 8, out_features: 10}", last)
    text = text.replace("dataset: digits, flatten: true", "dataset: 'two:numbers'")
    run = trained(folder, text.replace("modules:", f"losses: [{losses}]\nmodules:"))
    run.export(folder / "m.safetensors")
    command = ("predict", "m.safetensors", "--trust", "--data", "two:numbers", "-o", "p.npz")
    said = dnictl(*command, "--json").json
    assert (said["shape"], said["evaluation"], said["confusion"]) == ([12], None, None)
    arrays = loaded(folder / "p.npz")
    np.testing.assert_allclose(arrays["outputs"], run.predict("two:numbers").outputs, rtol=1e-5)
    assert arrays["labels"].shape == (40, 2)


def test_data_are_not_replaced_by_predictions(
    dnictl: Dnictl, run: Checkpointed, folder: Path
) -> None:
    x = np.zeros((3, 1, 8, 8), np.uint8)
    np.savez("new.npz", x_train=x, x_eval=x)
    command = ("predict", "--data", "{dataset: npz, path: new.npz, labels: none}", "-o", "new.npz")
    said = dnictl(*command)
    assert (said.code, "'new.npz' already exists" in said.err) == (64, True), said.err
    assert loaded(folder / "new.npz").keys() == {"x_train", "x_eval"}
    assert dnictl(*command, "--force").code == 0
    assert loaded(folder / "new.npz").keys() == {"outputs"}


def test_figures_that_are_not_numbers_are_null(
    dnictl: Dnictl, run: Checkpointed, folder: Path
) -> None:
    """JSON has no NaN: the mean over no label."""
    x, y = np.zeros((3, 1, 8, 8), np.uint8), np.full(3, -100)
    np.savez("ignored.npz", x_train=x, y_train=np.arange(3), x_eval=x, y_eval=y)
    data = "{dataset: npz, path: ignored.npz}"
    said = dnictl("predict", "one", "--data", data, "--json").json
    assert said["evaluation"] == {"loss": None, "accuracy": None}
    assert "loss nan, accuracy nan" in dnictl("predict", "one", "--data", data).out


def test_labels_that_the_network_lacks(dnictl: Dnictl, run: Checkpointed, folder: Path) -> None:
    """The outputs are kept; a file with new samples only needs no training batch."""
    x, y = np.zeros((3, 1, 8, 8), np.uint8), np.array([1, 10, 2])
    np.savez("more.npz", x_train=x[:1], y_train=y[:1], x_eval=x, y_eval=y)
    said = dnictl("predict", "one", "--data", "{dataset: npz, path: more.npz}", "-o", "p.npz")
    assert (said.code, "label [1] is 10" in said.err) == (66, True), said.err
    assert len(loaded(folder / "p.npz")["outputs"]) == 3


def test_rows_of_some_samples_are_numbered(run: Checkpointed, folder: Path) -> None:
    found = run.predict()
    assert found.numbers is not None
    assert len(found.numbers) == 100
    found.save(folder / "p.npz")
    arrays, whole = loaded(folder / "p.npz"), run.predict("digits")
    assert whole.numbers is None
    assert torch.equal(whole.outputs[torch.from_numpy(arrays["numbers"])], found.outputs)


def test_numbers_are_no_classes() -> None:
    p, y = torch.randn(6, 2), torch.randn(6, 2)
    found = Predictions.of(lambda x: p, [(p, y)], torch.arange(6), Choice(name="MSELoss"))
    expected = {"loss": float(mse_loss(p, y)), "mae": float((p - y).abs().mean())}
    assert found.evaluate(["mae"]) == pytest.approx(expected)
    assert found.classes is None
    with pytest.raises(UsageError, match="needs labels that are classes"):
        found.confusion()
    batches = [(p, torch.empty(6, 0))]
    alone = Predictions.of(lambda x: p, batches, torch.arange(6), Choice(name="MSELoss"))
    with pytest.raises(UsageError, match="no labels to compare with"):
        alone.evaluate()
