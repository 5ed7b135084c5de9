"""Better cuts for a chain file: what they keep of it, and when it is not replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dni_runtime import Chain
from dni_runtime.errors import UsageError
from dni_runtime.plan.balancing import balance_chain
from dni_runtime.plan.prepare import importing_from
from dni_runtime.spec import Choice, DataInfo, TensorSpec
from dni_runtime.split.network import cut_again, network_of
from dni_runtime.split.plan import SplitRequest
from dnictl.main import cli

NARROW = """\
from torch import nn


def build():
    layers = {f"l{number}": nn.Linear(512, 512) for number in range(8)}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), *layers.values(), nn.Linear(512, 10))
"""
CHAIN = """\
# Written by 'dnictl split', which may replace it.
name: deep
data: {dataset: digits, batch_size: 64}
image: {requirements: [click]}
defaults:
  optimizer: {SGD: {lr: 0.1}}
network: {import: "deep:build", example: ["float32[1, 8, 8]"]}
modules:
  - {name: stem, interface: exact, layers: [Piece: {until: "1"}], cpus: 1}
  - {name: head, optimizer: {SGD: {lr: 0.2}}, layers: [Piece: {after: "1"}]}
"""


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A chain whose first module does nothing but flatten."""
    (tmp_path / "deep.py").write_text(NARROW)
    (tmp_path / "chain.yaml").write_text(CHAIN)
    monkeypatch.chdir(tmp_path)
    yield Path("chain.yaml")
    sys.modules.pop("deep", None)


def test_better_cuts_keep_the_rest(chain: Path) -> None:
    found = balance_chain(chain)
    assert found.worthwhile
    assert found.faster > 1.3
    assert found.write() == chain
    document = yaml.safe_load(chain.read_text())
    assert document["image"] == {"requirements": ["click"]}
    stem, head = document["modules"]
    until = stem["layers"][0]["Piece"]["until"]
    assert "2" <= until <= "7"
    assert stem == {
        "name": "stem",
        "interface": "exact",
        "cpus": 1,
        "layers": [{"Piece": {"until": until}}],
    }
    assert head["optimizer"] == {"SGD": {"lr": 0.2}}
    assert Chain(chain).modules == ["stem", "head"]


def test_what_a_place_measures_counts(chain: Path) -> None:
    """A second module on a host that takes ten times as long gets less, a third one as before."""
    info = DataInfo(
        sample=TensorSpec(shape=(1, 8, 8), dtype="float32"),
        label=TensorSpec(shape=(), dtype="int64"),
        classes=10,
    )
    with importing_from(chain.parent.absolute()):
        spec, network = network_of("deep:build", info, args={})
        wanted = SplitRequest(at=("2", "5"), batch_size=64, interfaces=(Choice(name="exact"),) * 3)
        even = cut_again(spec, network, info, wanted)
        times = [part.seconds + part.interface_s for part in even.parts]
        found = cut_again(spec, network, info, wanted, [times[0], 10 * times[1], None])
    assert found.slowness[1] > 2 * found.slowness[0]
    assert found.better[1].numbers < even.parts[1].numbers
    assert max(found.better_seconds) < max(found.seconds)


def test_frozen_layers_stay_frozen(chain: Path) -> None:
    frozen = chain.read_text().replace("{name: stem,", "{name: stem, freeze: true,")
    chain.write_text(frozen)
    found = balance_chain(chain)
    assert [part.until for part in found.recut.better] == ["1", None]
    assert not found.worthwhile
    done = CliRunner().invoke(cli, ["balance", str(chain), "--apply"])
    assert done.exit_code == 0, done.output
    assert "as good as they can be, within 5 %: nothing is written" in done.output
    assert chain.read_text() == frozen


def test_what_is_not_replaced(chain: Path, tmp_path: Path) -> None:
    found = balance_chain(chain)
    with pytest.raises(UsageError, match="is not in the folder"):
        found.write(tmp_path / "below" / "chain.yaml")
    chain.write_text(CHAIN.replace("0.2", "0.3"))
    with pytest.raises(UsageError, match="has changed since the run"):
        found.write()
    (tmp_path / "mine.yaml").write_text("name: mine")
    with pytest.raises(UsageError, match="was not written by 'dnictl split'"):
        found.write(Path("mine.yaml"))
    assert found.write(Path("mine.yaml"), force=True).read_text() == found.text


def test_layers_are_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(
        "name: x\ndata: {dataset: digits, flatten: true}\nmodules:\n"
        "  - {name: a, layers: [{Linear: {in_features: 64, out_features: 8}}]}\n"
        "  - {name: b, layers: [{Linear: {in_features: 8, out_features: 10}}]}\n"
    )
    with pytest.raises(UsageError, match="chain 'x' is not one network that is cut into modules"):
        balance_chain(path)
