"""``dnictl compare`` with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Dnictl, eventually, processes_of

pytestmark = pytest.mark.e2e

CHAIN = """\
name: small
data: {dataset: digits, batch_size: 64, flatten: true, drop_last: true, validation: 0.2}
epochs: 6
defaults: {optimizer: {Adam: {lr: 0.002}}, schedule: {StepLR: {step_size: 3}}}
modules:
  - name: bottom
    layers: [{Linear: {in_features: 64, out_features: 32}}, {BatchNorm1d: {num_features: 32}}, ReLU]
  - name: top
    layers: [{Linear: {in_features: 32, out_features: 10}}]
"""


def test_compare(tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    shell = Dnictl(tmp_path, {"OMP_NUM_THREADS": "1"})
    done = shell.run(
        "compare", "--interfaces", "exact,synthetic,none", "--out", "c", "--threads", "1"
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "method", "backprop", "exact", "synthetic", "none",
    ]  # fmt: skip
    found = json.loads((tmp_path / "c" / "result.json").read_text())
    curves = {
        trial["method"]: [value for _, _, value in trial["points"]] for trial in found["trials"]
    }
    assert all(len(curve) == 6 for curve in curves.values())
    assert done.stdout.splitlines()[0].split()[1:4] == ["accuracy", "test", "accuracy"]
    tests = {row["method"]: row["test"] for row in found["rows"]}
    assert tests["exact"] == pytest.approx(tests["backprop"], abs=2e-6)
    assert tests["none"] < tests["synthetic"]
    assert tests["exact"] != curves["exact"][-1], "other samples"
    assert curves["exact"] == pytest.approx(curves["backprop"], abs=2e-6), (
        "the same batches, seeds and schedules"
    )
    assert curves["none"][-1] < curves["synthetic"][-1]
    assert all(row["samples_per_s"] > 0 for row in found["rows"])
    assert (tmp_path / "c" / "curves.png").exists()
    assert "already holds a run" in shell.run(
        "compare", "--interfaces", "exact", "--out", "c", expect=64
    ).stderr  # fmt: skip


def test_strategies(tmp_path: Path) -> None:
    middle = CHAIN[CHAIN.index("  - name: bottom") : CHAIN.index("  - name: top")]
    middle = middle.replace("bottom", "middle").replace("in_features: 64", "in_features: 32")
    text = CHAIN.replace("epochs: 6", "epochs: 3").replace(
        "  - name: top", middle + "  - name: top"
    )
    (tmp_path / "chain.yaml").write_text(text)
    shell = Dnictl(tmp_path, {"OMP_NUM_THREADS": "1"})
    found = shell.json("compare", "--strategies", "local-sgd", "--out", "c", "--threads", "1")
    accuracy = {row["method"]: row["mean"] for row in found["rows"]}
    assert list(accuracy) == ["backprop", "no-replicas", "local-sgd"]
    assert min(accuracy.values()) > 0.5
    assert (tmp_path / "c" / "local-sgd-0" / "metrics" / "middle.2.jsonl").exists()


@pytest.mark.parametrize(
    ("where", "said"), [("==", "plain backpropagation failed"), ("!=", "module 'top'")]
)
def test_a_layer_that_fails(tmp_path: Path, where: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(
        "import sys\n\nimport torch\n\n\nclass Broken(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if x.device.type != 'meta' and self.training and len(x) == 64:\n"
        f"            if sys.argv[1:2] {where} ['reference']:\n"
        "                raise RuntimeError('broken on purpose')\n"
        "        return super().forward(x)\n"
    )
    layer = "{import: broken:Broken, args: {in_features: 32,"
    text = CHAIN.replace("{Linear: {in_features: 32,", layer)
    (tmp_path / "chain.yaml").write_text(text)
    done = Dnictl(tmp_path).run("compare", "--interfaces", "synthetic", "--out", "c", expect=70)
    assert said in done.stderr
    assert "broken on purpose" in done.stderr


def test_the_reference_ends_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text(CHAIN.replace("epochs: 6", "epochs: 1000000"))
    out = tmp_path / "c"
    compare = Dnictl(tmp_path).start("compare", "--interfaces", "none", "--out", out)
    eventually("backpropagation trains", lambda: list(out.glob("*/metrics/backprop.jsonl")))
    assert len(processes_of(tmp_path)) == 2
    compare.terminate()
    compare.communicate()
    eventually("nothing is left behind", lambda: not processes_of(tmp_path), 15)
