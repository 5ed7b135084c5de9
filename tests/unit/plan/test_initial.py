"""Initial weights by the names of the original model, or from another run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dni_runtime.api.checkpointed import Checkpointed
from dni_runtime.core.layers import build_layers, load_initial
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DataError, SpecError
from dni_runtime.plan.create import create_run
from dni_runtime.plan.initial import write_initial
from dni_runtime.plan.prepare import CheckedChain, prepare
from dni_runtime.plan.splitting import split_chain
from dni_runtime.run.cuts import tensors_file
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.checkpoint import copy_state, write_part

CHAIN = """\
name: fine
data: {dataset: digits, flatten: true}
%s
modules:
  - name: a
    layers:
      - Linear: {in_features: 64, out_features: 8}
      - Sequential: [{BatchNorm1d: {num_features: 8}}, ReLU]
    %s
  - name: b
    layers: [{Linear: {in_features: 8, out_features: 10}}]
"""


NET = """\
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(self.stem(x).relu()).relu())
"""


def prepared(folder: Path, default: str = "", own: str = "") -> CheckedChain:
    (folder / "chain.yaml").write_text(CHAIN % (default, own))
    return prepare(folder / "chain.yaml")


@pytest.fixture
def model(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A state_dict as the original model has it, in a file."""
    torch.manual_seed(1)
    stem, norm, head = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
    parts = {"net.stem": stem, "net.norm": norm, "classifier": head}
    state = {f"{n}.{k}": v for n, m in parts.items() for k, v in m.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    return state


OWN = 'init: {file: model.safetensors, names: {"0": net.stem, "1.0": net.norm}}'


def test_by_the_original_names(tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    found = prepared(tmp_path, own=OWN)
    assert [worker.initial for worker in found.workers] == [True, False]
    run = create_run(tmp_path / "run", found, backend="process")
    layers = build_layers(found.workers[0].layers)
    load_initial(layers, run.initial("a"))
    state = layers.state_dict()
    assert torch.equal(state["0.weight"], model["net.stem.weight"])
    assert torch.equal(state["1.0.running_mean"], model["net.norm.running_mean"])
    assert not run.initial("b").exists()


def test_a_prefix_that_is_not_named_is_drawn(
    tmp_path: Path, model: dict[str, torch.Tensor]
) -> None:
    own = 'init: {file: model.safetensors, names: {"0": net.stem}}'
    run = create_run(tmp_path / "run", prepared(tmp_path, own=own), backend="process")
    assert sorted(load_file(run.initial("a"))) == ["0.bias", "0.weight"]


def test_from_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    plain = prepared(tmp_path)
    run = create_run(tmp_path / "old", plain, backend="process")
    for cut, value in ((5, 0.5), (9, 0.9)):
        for worker in plain.workers:
            state = build_layers(worker.layers).state_dict()
            tensors = {
                f"layers.{k}": torch.full_like(v, value) if v.is_floating_point() else v
                for k, v in state.items()
            }
            write_part(run, worker.module, (tensors, {"cut": cut}))
    again = prepared(tmp_path, default="defaults: {init: {file: old}}")
    new = RunDir(tmp_path / "new")
    new.create()
    write_initial(new, again.initial)
    assert float(load_file(new.initial("b"))["0.weight"][0, 0]) == pytest.approx(0.9)
    assert "1.0.num_batches_tracked" in load_file(new.initial("a"))
    damaged = tensors_file(run.checkpoint(9, "b"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.raises(SpecError, match=r"module 'b' in checkpoint 9 .* is damaged: its SHA-256"):
        prepared(tmp_path, default="defaults: {init: {file: old}}")


@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("of", ["run", "export", "state.pt", "state.safetensors"])
def test_by_the_own_names_of_a_network_that_was_split(
    tmp_path: Path, of: str, ema: float | None
) -> None:
    """What a run, an export and a state dict hold gives the same weights, however it is cut."""
    (tmp_path / "nets.py").write_text(NET)
    chain = tmp_path / "chain.yaml"
    data = {"dataset": "digits", "flatten": True}
    settings = {"data": data, "defaults": {} if ema is None else {"ema": ema}}
    two = split_chain("nets:Net", chain, settings, at=["stem"]).prepared
    run = create_run(tmp_path / "run", two, backend="process")
    for worker in two.workers:
        step = ModuleStep(worker)
        if step.optimization.average is not None:
            for parameter in step.optimization.average.module.parameters():
                parameter.data += 1
        tensors, document = copy_state(step)
        write_part(run, worker.module, (tensors, document | {"cut": 5}))
    trained = Checkpointed(Record.read(run.root))
    if of == "export":
        trained.export(tmp_path / "export.safetensors")
        card = (tmp_path / "export.md").read_text()
        assert 'load("export.safetensors", trust=True)' in card, "it imports the network"
    elif of != "run":
        trained.export(tmp_path / of, state_dict=True)
    other = tmp_path / "other.yaml"
    split_chain("nets:Net", other, {"data": data}, at=["body"])
    file = {"export": "export.safetensors"}.get(of, of)
    other.write_text(re.sub(r"file: other.safetensors", f"file: {file}", other.read_text()))
    new = create_run(tmp_path / "new", prepare(other), backend="process")
    expected = trained.state_dict()
    first = load_file(new.initial("part-1"))
    assert set(first) == {f"0.network.{name}" for name in expected if "head" not in name}
    assert all(value.equal(expected[name[10:]]) for name, value in first.items())
    with pytest.raises(SpecError, match=r"did you mean 'stem\.weight'"):
        prepare(_written(other, other.read_text().replace("0.network: ''", "0.network.stem: stm")))


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("init: {file: nothing.safetensors}", "cannot be read: No such file or directory\n"),
        ("init: {file: .}", "is not a run directory"),
        ("init: {file: model.safetensors}", "has no 'a.0.weight', for '0.weight' of module 'a'"),
        ('init: {file: model.safetensors, names: {"0": net.stm}}', "did you mean 'net.stem.weig"),
        ('init: {file: model.safetensors, names: {"0": classifier}}', r"\[10, 8\].*\[8, 64\]"),
        ('init: {file: model.safetensors, names: {"7": classifier}}', "no parameters '7'"),
        ('init: {file: model.safetensors, names: {"0": net.stem, "1.7": net.norm}}', r"'1\.7'"),
        ("init: {file: model.safetensors, strict: false}", "nothing for module 'a'"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, model: dict[str, torch.Tensor], own: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        prepared(tmp_path, own=own)
    assert "chain.yaml" in str(caught.value)
    assert "init" in str(caught.value)


def test_a_module_without_parameters_needs_nothing(
    tmp_path: Path, model: dict[str, torch.Tensor]
) -> None:
    """A part of a split network: ``defaults`` are for all; its own ``init`` is a mistake."""
    names = '{"0": net.stem, "1.0": net.norm, "1": classifier}'
    default = f"defaults: {{init: {{file: model.safetensors, names: {names}}}}}"
    last = "layers: [{Linear: {in_features: 8, out_features: 10}}]"
    text = CHAIN.replace(
        last, "layers: [ReLU]\n    %s\n  - name: c\n    " + last.replace("[", "[Flatten, ")
    )
    path = tmp_path / "chain.yaml"
    path.write_text(text % (default, "", ""))
    found = prepare(path)
    assert (len(found.initial["a"]), found.initial["b"], len(found.initial["c"])) == (7, {}, 2)
    run = create_run(tmp_path / "run", found, backend="process")
    load_initial(build_layers(found.workers[1].layers), run.initial("b"))
    path.write_text(text % ("", "", "init: {file: model.safetensors}"))
    with pytest.raises(SpecError, match="nothing for module 'b'"):
        prepare(path)


def test_what_is_not_there_may_be_drawn(tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    own = 'init: {file: model.safetensors, strict: false, names: {"0": net.stem, "1": net}}'
    assert list(prepared(tmp_path, own=own).initial["a"]) == ["0.weight", "0.bias"]


def test_layers_that_find_their_sizes(tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    lazy = CHAIN.replace("Linear: {in_features: 64, ", "LazyLinear: {")
    (tmp_path / "chain.yaml").write_text(lazy % ("", OWN))
    found = prepare(tmp_path / "chain.yaml").initial["a"]
    assert found["0.weight"].shape == (8, 64)


def test_weights_that_have_gone(tmp_path: Path, model: dict[str, torch.Tensor]) -> None:
    """A run that goes on removes its old checkpoints."""
    found = prepared(tmp_path, own=OWN).initial
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match="cannot be read any more"):
        write_initial(RunDir(tmp_path), found)


def test_a_run_directory_without_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"initial weights .* cannot be used"):
        load_initial(nn.Linear(2, 2), tmp_path / "none.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "wrong.safetensors")
    with pytest.raises(DataError, match="another module: 'other'"):
        load_initial(nn.Linear(2, 2), tmp_path / "wrong.safetensors")
