"""``bench module`` and ``doctor --network`` of this host: structure and sanity of figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import Dnictl
from tests.e2e.test_slurm_doctor import CHAIN as ACROSS
from tests.e2e.test_slurm_doctor import sane

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


def test_links_of_this_host_alone(tmp_path: Path) -> None:
    environ = {name: "" for name in os.environ if name.startswith("SLURM_JOB")}
    dnictl = Dnictl(tmp_path, environ)
    (tmp_path / "chain.yaml").write_text(ACROSS.format(network="ib0", security="auto"))
    done = dnictl.run("doctor", "--network", "chain.yaml", "--json")
    assert "this host alone" in done.stderr
    found = json.loads(done.stdout)
    assert found["job"] is None
    ipc, tcp = found["links"]
    assert (ipc["transport"], ipc["encrypted"]) == ("ipc", False)
    assert (tcp["transport"], tcp["encrypted"]) == ("tcp", True)
    for link in (ipc, tcp):
        sane(link)
