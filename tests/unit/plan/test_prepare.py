"""Checking a chain before anything is made of it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from dni_runtime.api.planning import plan_run
from dni_runtime.core.chain import LocalChain
from dni_runtime.data import open_data
from dni_runtime.errors import DataError, SpecError, UsageError
from dni_runtime.plan.prepare import importing_from, prepare, prepare_again
from dni_runtime.plan.settings import StartSettings
from dni_runtime.plan.splitting import split_chain
from dni_runtime.spec.load import parse_yaml
from tests.specs import int64

CHAIN = """\
name: small
data: {dataset: digits, flatten: true}
mounts: [{source: scratch}, {source: /data}]
image: {require_signed: key.asc}
modules:
  - name: whole
    layers: [{Linear: {in_features: 64, out_features: 10}}]
"""


def test_paths_count_from_the_folder_of_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN)
    chain = prepare(path).chain
    assert [mount.source for mount in chain.mounts] == [str(tmp_path / "scratch"), "/data"]
    assert chain.image.require_signed == str(tmp_path / "key.asc")


OWNERS = """\
name: owners
data: {dataset: npz, path: "own/{replica}.npz", batch_size: 4}
modules:
  - {name: a, replicas: 2, layers: [{Linear: {in_features: 3, out_features: 2}}]}
  - {name: b, layers: [{Linear: {in_features: 2, out_features: 2}}]}
"""


def test_each_replica_of_the_head_may_have_data_of_its_own(tmp_path: Path) -> None:
    path, own = tmp_path / "chain.yaml", tmp_path / "own"
    path.write_text(OWNERS)
    own.mkdir()

    def save(owner: int, samples: int) -> None:
        x, y = np.ones((samples, 3), np.float32), np.arange(samples) % 2
        np.savez(own / f"{owner}.npz", x_train=x, y_train=y, x_eval=x[:4], y_eval=y[:4])

    save(1, 8)
    with pytest.raises(DataError, match=r"chain.yaml:2.*own/2.npz"):
        prepare(path)
    save(2, 9)
    with pytest.raises(DataError, match=r"2.npz' has 9 training .*1.npz' has 8") as caught:
        prepare(path)
    assert "train_limit" in str(caught.value.hint)
    save(2, 8)
    prepared = prepare(path)
    assert prepared.total_steps == 2
    plan = plan_run(prepared, StartSettings(tmp_path / "run", "process")).plan
    assert [one.data for one in plan.workers] == [str(own / "1.npz"), str(own / "2.npz"), None]


ROWS = """\
import torch
from torch import nn

def rows(split, data_dir):
    draw = torch.Generator().manual_seed(len(split))
    return [
        {"text": "no", "mask": [1, 1, 0], "idx": n, "ids": ids.tolist(), "labels": n % 2}
        for n, ids in enumerate(torch.randint(0, 9, (10, 3), generator=draw))
    ]

class Begin(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids, mask=None):
        return (self.embed(ids) * mask.unsqueeze(2)).sum(1)

class Other(Begin):
    def forward(self, tokens, weights=None):
        return super().forward(tokens, weights)

def pairs(**of):
    return [(torch.ones(4), n % 2) for n in range(8)]

class Whole(Begin):
    def __init__(self):
        super().__init__()
        self.end = nn.Linear(4, 2)

    def forward(self, ids, mask=None, labels=None):
        return {"logits": self.end(super().forward(ids, mask))}
"""
DATA = """\
data:
  dataset: rows:rows
  batch_size: 4
  train: {split: train, data_dir: words}
  evaluation: {split: test, data_dir: words}
"""
BY_NAME = f"""\
name: by-name
{DATA}
defaults: {{optimizer: {{SGD: {{lr: 0.1}}}}}}
modules:
  - {{name: a, interface: exact, layers: [{{import: "rows:Begin"}}]}}
  - {{name: b, layers: [{{Linear: {{in_features: 4, out_features: 2}}}}]}}
"""


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "words").mkdir()
    (tmp_path / "rows.py").write_text(ROWS)
    yield tmp_path
    sys.modules.pop("rows", None)


def by_hand(network: nn.Module, optimizer: torch.optim.Optimizer, rows: list[Any]) -> None:
    """Train it for an epoch as a loop over torch's own loader does."""
    for row in DataLoader(rows, batch_size=4):  # type: ignore[arg-type]
        ids, mask = torch.stack(row["ids"], 1), torch.stack(row["mask"], 1)
        optimizer.zero_grad()
        F.cross_entropy(network(ids=ids, mask=mask), row["labels"]).backward()
        optimizer.step()


def test_inputs_of_dicts_go_to_arguments_of_their_names(rows: Path) -> None:
    path = rows / "chain.yaml"
    path.write_text(BY_NAME.replace("batch_size: 4", "batch_size: 4\n  shuffle: false"))
    prepared = prepare(path)
    assert prepared.data == rows / "words"  # what containers get
    assert prepared.chain.data.inputs == ("ids", "mask")
    assert prepared.workers[0].head is not None
    assert prepared.workers[0].head.data.inputs == ("ids", "mask")
    again = prepare_again(prepared, prepared.written.model_copy(update={"epochs": 2}))
    assert again.chain.data == prepared.chain.data
    chain = LocalChain(prepared.workers)
    source = open_data(prepared.chain.data, rows, seed=0)
    network = nn.Sequential()
    for step in chain.steps:
        network.extend(copy.deepcopy(step.layers))
    begin, end = network
    for x, y in source.train_batches(1):
        chain.train_batch(x, y)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    class Together(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = end(begin(ids, mask))
            return result

    sys.path.insert(0, str(rows))
    try:
        by_hand(Together(), optimizer, import_module("rows").rows("train", ""))
    finally:
        sys.path.remove(str(rows))
    trained = [p for step in chain.steps for p in step.layers.parameters()]
    assert all(map(torch.equal, trained, network.parameters()))


def test_a_network_is_split_by_the_names_of_its_arguments(rows: Path) -> None:
    settings = parse_yaml(DATA, "")[0]
    taken = split_chain("rows:Whole", rows / "split.yaml", settings, at=["embed"], returns="logits")
    assert taken.prepared.chain.data.inputs == ("ids", "mask")
    written = (rows / "split.yaml").read_text()
    assert "takes: [ids, mask]" in written or "takes:\n" in written
    assert "data_dir: words" in written  # as the user wrote it
    assert prepare(rows / "split.yaml").info.samples == (int64(3), int64(3))


@pytest.mark.parametrize("layer", ["import: 'rows:Other'", "Unflatten: {dim: 1, size: [1, 3]}"])
def test_keys_that_forward_does_not_know_are_not_guessed(rows: Path, layer: str) -> None:
    path = rows / "chain.yaml"
    layer = layer.replace("size", "unflattened_size")
    path.write_text(BY_NAME.replace('import: "rows:Begin"', layer))
    message = r"keys 'mask', 'idx', 'ids' is an argument of (Other|Unflatten)\.forward"
    with pytest.raises(SpecError, match=message + r"(.|\n)*'data.inputs'"):
        prepare(path)
    if "Other" in layer:
        with pytest.raises(SpecError, match=message):
            split_chain("rows:Other", rows / "split.yaml", parse_yaml(DATA, "")[0])
        path.write_text(path.read_text().replace("train:", "inputs: [ids, mask]\n  train:", 1))
        assert prepare(path).info.names == ("ids", "mask")


@pytest.mark.parametrize("key", ["inputs", "label"])
def test_rows_that_are_no_dicts_have_no_keys(rows: Path, key: str) -> None:
    data = DATA.replace("rows:rows", f"rows:pairs\n  {key}: [no]")
    layers = "[{Linear: {in_features: 4, out_features: 2}}]"
    path = rows / "chain.yaml"
    path.write_text(f"name: pairs\n{data}modules:\n  - {{name: a, layers: {layers}}}\n")
    with pytest.raises(SpecError, match="no dicts, and have no 'no'") as caught:
        prepare(path)
    assert caught.value.path == f"data.{key}"


NETS = """\
from importlib import import_module

from ..parts import block
from .again import Same


def build():
    return import_module(f"{__package__}.computed").Last()
"""
LAYER = """\
from torch import nn


class {}(nn.Linear):
    def __init__(self):
        super().__init__(64, {})
"""


def test_what_is_imported_is_kept_for_workers(tmp_path: Path) -> None:
    """Folders without __init__.py, relative imports, and names that are computed."""
    chain = CHAIN.replace(
        "{Linear: {in_features: 64, out_features: 10}}", "{import: 'kept.nets.main:First'}"
    )
    (tmp_path / "chain.yaml").write_text(chain)
    files = {
        "kept/nets/main.py": NETS + LAYER.format("First", 10) + "\n\nbuild()\n",
        "kept/nets/again.py": LAYER.format("Same", 64),
        "kept/nets/computed.py": LAYER.format("Last", 10),
        "kept/nets/unused.py": "",
        "kept/parts/block.py": "import kept.parts.deep.inner\n",
        "kept/parts/deep/__init__.py": "",
        "kept/parts/deep/inner.py": "",
        "kept/parts/deep/table.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sources = prepare(tmp_path / "chain.yaml").sources
    assert sorted(sources) == sorted(set(files) - {"kept/nets/unused.py"})


def test_a_copy_of_what_is_imported_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = """\
import torch


class Points(torch.utils.data.Dataset):
    def __init__(self, train): ...

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(64), 0
"""
    for folder in ("mine", "copy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "copied.py").write_text(data)
        text = CHAIN.replace("digits, flatten: true", "'copied:Points'")
        (tmp_path / folder / "chain.yaml").write_text(text)
    assert prepare(tmp_path / "mine" / "chain.yaml").info.train_samples == 16
    assert prepare(tmp_path / "copy" / "chain.yaml").info.train_samples == 16
    (tmp_path / "copy" / "copied.py").write_text(data.replace("16", "17"))
    assert prepare(tmp_path / "copy" / "chain.yaml").info.train_samples == 17
    # What the program itself has imported stays.
    monkeypatch.delitem(sys.modules, "copied")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    import_module("copied")
    with pytest.raises(SpecError, match=r"copy/copied.py is hidden by .*mine/copied.py"):
        prepare(tmp_path / "copy" / "chain.yaml")


def test_tied_weights_have_a_gradient_in_whole_batches(tmp_path: Path) -> None:
    """The template 'gpt': fewer samples than 'rows' do not carry the weights."""
    folder = files("dni_runtime.definitions") / "chains"
    (tmp_path / "chain.yaml").write_text((folder / "gpt.yaml").read_text())
    (tmp_path / "gpt.py").write_text((folder / "gpt" / "gpt.py").read_text())
    looked = prepare(tmp_path / "chain.yaml").looked
    assert looked is not None
    assert looked.checked[-1].startswith("training and evaluation of 32 ")


def test_two_runs_with_other_code_of_the_same_name(tmp_path: Path) -> None:
    """In one process each has its own; the same code is imported once."""
    codes = {"a": "VALUE = 1", "b": "VALUE = 2", "c": "VALUE = 2"}
    found = {}
    for folder, code in codes.items():
        for name in ("twice.py", "of/__init__.py"):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "of/__init__.py").write_text("")
        (tmp_path / folder / "of/inner.py").write_text(code)
        (tmp_path / folder / "twice.py").write_text("from of.inner import VALUE")
        with importing_from(tmp_path / folder):
            found[folder] = import_module("twice")
    assert [one.VALUE for one in found.values()] == [1, 2, 2]
    assert found["b"] is found["c"]
    (tmp_path / "c" / "of/inner.py").write_text("VALUE = 34")
    with importing_from(tmp_path / "c"):
        assert import_module("twice").VALUE == 34, "it has been edited"


@pytest.mark.parametrize("file", ["torch.py", "numpy/__init__.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    with (
        pytest.raises(UsageError, match=rf"{file}' hides the package '(torch|numpy)'"),
        importing_from(tmp_path),
    ):
        pass
    assert str(tmp_path) not in sys.path
