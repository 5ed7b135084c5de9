"""Real runs with checkpoints that are damaged, late, or beside other files."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from safetensors.torch import load_file

import dni_runtime
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from tests.e2e.conftest import CHAIN, ENDS, PAIR, Site
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event["event"] == kind]


SLOW = """\
import os, time
from torch import nn

fsync = os.fsync

def slow(file):
    if "/checkpoints/" in (name := os.readlink(f"/proc/self/fd/{file}")) and "safetensors" in name:
        time.sleep(20)
    fsync(file)

os.fsync = slow

class Same(nn.Module):
    def forward(self, h):
        return h
"""
"""A layer of a worker to whose disk nothing gets in less than 20 seconds."""


def test_a_slow_last_checkpoint_is_part_of_the_run(site: Site) -> None:
    """Longer than twice ``stop_grace_s`` and what a worker has to exit: the tail is long gone."""
    chain = CHAIN.replace("stop_grace_s: 20", "stop_grace_s: 1\ncheckpoint: {every_epochs: 0}")
    slow = site.write(
        2,
        chain=chain.replace("ReLU]\n  - name: top", "ReLU, {import: 'slow:Same'}]\n  - name: top"),
    )
    (site.folder / "slow.py").write_text(SLOW)
    done = site.run("up", slow, "--backend", "process")
    assert ": finished after" in done.stdout
    assert site.figures.state == "finished"
    assert [module.state for module in site.figures.modules] == ["finished"] * 3
    assert not events(site.latest, "worker_killed")
    ended = {event["module"]: event["time"] for event in events(site.latest, "worker_ended")}
    assert ended["middle"] - ended["top"] > 17
    site.run("export", "-o", "model.safetensors")
    assert load_file(site.folder / "model.safetensors")


def test_a_damaged_checkpoint_is_passed_over(site: Site) -> None:
    """A flipped bit sends all modules to the cut before; foreign and half-written files do not."""
    site.run("up", site.write(4, chain=PAIR), "--backend", "process")
    run = site.latest
    *_, old, new = complete_cuts(run, ENDS)
    state = RunState.read(run)
    state.phase = "stopped"  # as if its last checkpoint were not its end
    state.save(run)
    damaged = run.checkpoint(new, "top").with_suffix(".safetensors")
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    foreign = shutil.copytree(damaged.parent, damaged.parent.with_suffix(".bak"))
    half_written = run.checkpoint(old, "bottom").with_name(".bottom.safetensors.host.0123abcd")
    half_written.touch()

    refused = site.run("export", "-o", "model.safetensors", expect=72)
    assert f"module 'top' in checkpoint {new}" in refused.stderr
    assert f"--from: {old}" in refused.stderr
    refused = site.run("resume", "--from", str(new), expect=72)
    assert f"module 'top' in checkpoint {new}" in refused.stderr
    away = damaged.rename(site.folder / "away")
    for command in (["export", "-o", "model.safetensors"], ["predict"]):
        said = site.run(*command).stderr
        assert f"warning: the part of module 'top' in checkpoint {new}" in said
        assert f"; using checkpoint {old}" in said
    away.rename(damaged)

    site.run("resume")
    started = [event["attempt"] for event in events(run, "worker_started")]
    assert started == [1, 1, 2, 2, 3, 3]
    for name in ENDS:
        assert f"resumes at {old} of the stream" in run.log(name, 3).read_text()
    (event,) = events(run, "checkpoint_damaged")
    assert f"module 'top' in checkpoint {new}" in event["reason"]
    assert foreign.is_dir()
    assert not half_written.exists()
    assert complete_cuts(run, ENDS)[-1] == new
    document = json.loads(run.checkpoint(new, "top").with_suffix(".json").read_text())
    assert document["version"] == dni_runtime.__version__
