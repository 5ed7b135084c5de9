"""``dnictl doctor`` on a real Slurm of three hosts: the nodes, and the network between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import run

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(180)]

CHAIN = """\
name: digits
data: {{dataset: digits, batch_size: 64, flatten: true}}
links: {{interface: {network}, security: {security}}}
placement: {{strategy: explicit, map: {{bottom: 0, middle: 1, top: 1}}}}
defaults: {{resources: {{memory: 800M}}}}
modules:
  - {{name: bottom, layers: [{{Linear: {{in_features: 64, out_features: 32}}}}, ReLU]}}
  - {{name: middle, layers: [{{Linear: {{in_features: 32, out_features: 32}}}}, ReLU]}}
  - {{name: top, layers: [{{Linear: {{in_features: 32, out_features: 10}}}}]}}
"""


def inside(
    folder: Path, nodes: int, *arguments: str, expect: int = 0
) -> subprocess.CompletedProcess[str]:
    """``dnictl doctor`` in an allocation of the first nodes, once they are free."""
    done = run(
        ["salloc", "--quiet", f"--nodelist=n[1-{nodes}]", "--ntasks-per-node=1",
         "--cpus-per-task=1", "--mem=1G", f"--chdir={folder}", sys.executable, "-m", "dnictl",
         "doctor", *arguments],
        timeout_s=150,
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def sane(link: dict[str, Any]) -> None:
    assert link["error"] is None
    assert 1 < link["round_trip_us"] <= link["round_trip_p99_us"] < 1e7
    assert set(link["mb_per_s"]) == {str(1 << 20), str(16 << 20)}
    assert all(0.1 < rate < 1e6 for rate in link["mb_per_s"].values())


def test_all_pairs_of_an_allocation(slurm: str, tmp_path: Path) -> None:
    found = json.loads(inside(tmp_path, 3, "--network", "--interface", slurm, "--json").stdout)
    assert found["job"].isdigit()
    pairs = {(link["source"], link["sink"]): link for link in found["links"]}
    assert set(pairs) == {("n1", "n2"), ("n1", "n3"), ("n2", "n3")}
    for (_, sink), link in pairs.items():
        sane(link)
        assert link["address"].startswith(f"tcp://10.77.0.{sink[1]}:")
        assert (link["encrypted"], link["interface"]) == (True, slurm)


def test_the_links_of_a_chain(slurm: str, tmp_path: Path) -> None:
    """One crosses nodes, unencrypted because the chain says so; the other stays on its node."""
    (tmp_path / "chain.yaml").write_text(CHAIN.format(network=slurm, security="none"))
    found = json.loads(inside(tmp_path, 2, "--network", "chain.yaml", "--json").stdout)
    over, within = found["links"]
    assert (over["source"], over["sink"], over["transport"]) == ("n1", "n2", "tcp")
    assert (within["source"], within["sink"], within["transport"]) == ("n2", "n2", "ipc")
    for link in (over, within):
        sane(link)
        assert not link["encrypted"]


def test_nodes_that_cannot_be_joined_are_named(slurm: str, tmp_path: Path) -> None:
    """Everybody has loopback, and nobody reaches another host's."""
    done = inside(tmp_path, 2, "--network", "--interface", "lo", expect=69)
    assert "n1 → n2, network interface lo, tcp://127.0.0.1:" in done.stderr
    assert "within 10 s" in done.stderr
    assert "Traceback" not in done.stderr
    row = done.stdout.splitlines()[1].split()
    assert row[:2] == ["n1", "n2"]
    assert row[-4:] == ["-"] * 4


def test_an_interface_that_no_node_has(slurm: str, tmp_path: Path) -> None:
    done = inside(tmp_path, 2, "--network", "--interface", "10.99.0.0/24", expect=69)
    assert "n1 → n2, network interface 10.99.0.0/24: " in done.stderr
    assert "no address in the network '10.99.0.0/24'" in done.stderr


def test_the_nodes_check_themselves(
    slurm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the site's prologue; what all have in common stands once."""
    found = json.loads(inside(tmp_path, 3, "--nodes", "--json").stdout)
    assert (found["ready"], list(found["nodes"])) == (True, ["n1", "n2", "n3"])
    for checks in found["nodes"].values():
        statuses = {check["name"]: check["status"] for check in checks}
        assert statuses["python"] == statuses["torch"] == "ok"
        assert "inside job" in next(c["detail"] for c in checks if c["name"] == "slurm")

    profiles = tmp_path / "dnictl" / "profiles"
    profiles.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (profiles / "odd.yaml").write_text(
        "prologue: |\n  if [ $(hostname) = n2 ]; then echo no such module >&2; exit 3; fi\n"
    )
    done = inside(tmp_path, 2, "--nodes", "--profile", "odd", expect=69)
    assert "✗ node              n2: " in done.stdout
    assert "no such module" in done.stdout
    assert "✓ python            n1: " in done.stdout
    assert done.stdout.endswith("cannot be used here: see node\n")
