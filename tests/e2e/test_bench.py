"""``dnictl bench`` with real processes: the figures' structure and sanity, not their size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Dnictl

pytestmark = pytest.mark.e2e

CHAIN = """\
name: small
data: {dataset: digits, batch_size: 64, flatten: true}
defaults: {interface: {synthetic: {learn_every: 2}}}
modules:
  - name: bottom
    layers: [{Linear: {in_features: 64, out_features: 32}}, {BatchNorm1d: {num_features: 32}}, ReLU]
  - name: top
    layers: [{Linear: {in_features: 32, out_features: 10}}]
"""


@pytest.fixture
def shell(tmp_path: Path) -> Dnictl:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    return Dnictl(tmp_path, {"OMP_NUM_THREADS": "1"})


def spread(figure: dict[str, float]) -> float:
    assert 0 < figure["low"] <= figure["median"] <= figure["high"]
    return figure["median"]


def test_link(shell: Dnictl) -> None:
    found = shell.json(
        "bench", "link", "--size", "4KB,1MB", "--repetitions", "2", "--seconds", "0.02"
    )
    ways = [("ipc", "none"), ("tcp", "none"), ("tcp", "curve")]
    measured = [(one["transport"], one["security"], one["bytes"]) for one in found["throughput"]]
    assert measured == [(*way, size) for way in ways for size in (4096, 1 << 20)]
    for one in found["throughput"]:
        spread(one["ratio"])
        # Nothing moves a terabyte a second, and more than some bytes of what is sent arrives.
        assert 0.1 < spread(one["link"]) < 1e6
        assert 0.1 < spread(one["raw"]) < 1e6
        assert spread(one["source_cpu_us"]) < 1e6
    assert [(one["transport"], one["security"]) for one in found["latency"]] == ways
    for one in [*found["throughput"], *found["latency"]]:
        assert (one["of_plain"] is None) == (one["security"] == "none")
    for one in found["latency"]:
        assert 1 < spread(one["link"]) < 1e6
        assert 1 < spread(one["raw"]) < 1e6


def test_module(shell: Dnictl) -> None:
    done = shell.run("bench", "module", "--repetitions", "2", "--seconds", "0.02")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["bottom", "top"]
    assert lines[3].startswith("slowest: ")
    found = shell.json(
        "bench", "module", "-m", "bottom", "--repetitions", "1", "--seconds", "0.02"
    )["modules"]
    assert [one["module"] for one in found] == ["bottom"]
    assert found[0]["down_bytes"] == 64 * 32 * 4


def test_chain(shell: Dnictl) -> None:
    found = shell.json(
        "bench", "chain", "--repetitions", "2", "--seconds", "1", "--warmup", "0.2",
        "--threads", "1", "--plot", "found.png", "--out", "runs",
    )  # fmt: skip
    assert (found["chain"], found["repetitions"], found["threads"]) == ("small", 2, 1)
    chain, reference = spread(found["samples_per_s"]), spread(found["reference_samples_per_s"])
    assert spread(found["ratio"]) == pytest.approx(chain / reference, rel=1)
    assert [row["module"] for row in found["modules"]] == ["bottom", "top"]
    for row in found["modules"]:
        assert spread(row["batch_ms"]) > 0
        assert 0 < spread(row["cores"]) < 4
        assert 0 <= row["computing"] <= 1
        assert set(row["waiting"]) == {"input", "window", "gradient"}
        assert sum(row["waiting"].values()) < 1.2
    assert found["modules"][0]["lag"] > 0
    assert found["modules"][1]["lag"] is None
    assert (shell.folder / "found.png").exists()
    kept = {path.name for path in (shell.folder / "runs").iterdir()}
    assert kept == {"chain-1", "chain-2", "backprop-1", "backprop-2"}
    assert "not empty" in shell.run("bench", "chain", "--out", "runs", expect=64).stderr


def test_a_chain_that_fails(shell: Dnictl) -> None:
    (shell.folder / "broken.py").write_text(
        "import torch\n\n\nclass Broken(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if x.device.type != 'meta' and self.training and len(x) == 64:\n"
        "            raise RuntimeError('broken on purpose')\n"
        "        return super().forward(x)\n"
    )
    layer = "{import: broken:Broken, args: {in_features: 32,"
    text = CHAIN.replace("{Linear: {in_features: 32,", layer)
    (shell.folder / "chain.yaml").write_text(text)
    done = shell.run("bench", "chain", "--seconds", "1", expect=70)
    assert "module 'top'" in done.stderr
    assert "broken on purpose" in done.stderr
