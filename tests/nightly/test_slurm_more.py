"""On the real Slurm of three hosts: variants of what CI shows."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from dni_runtime import Run
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.measure.reference import opened
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from tests.e2e.conftest import PAUSE, PAUSES, Dnictl, dnictl, run, slurm, tool
from tests.e2e.test_slurm import eventually, kill, started_again
from tests.e2e.test_slurm_failures import begin, finished

__all__ = ["dnictl", "slurm", "tool"]

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(300)]


def test_a_job_is_requeued_in_mid_epoch(dnictl: Dnictl, slurm: str) -> None:
    """Without a word to the run, which goes on from its newest complete checkpoint."""
    root, job = begin(dnictl, slurm)
    assert run(["scontrol", "requeue", job]).returncode == 0
    started_again(job)
    figures = finished(dnictl, root)
    assert (figures["attempt"], figures["job"]) == (2, job)


DIAMOND = """\
name: diamond
data: {{dataset: digits, batch_size: 64, flatten: true, drop_last: true}}
epochs: 5
stop_grace_s: 10
restart: {{backoff_s: 0.1, snapshot_s: 1}}
links: {{interface: {network}}}
image: {{torch: "torch=={torch}"}}
defaults: {{interface: exact, optimizer: {{Adam: {{lr: 0.002}}}}, resources: {{memory: 800M}}}}
modules:
  - {{name: stem, layers: [{{Linear: {{in_features: 64, out_features: 64}}}}, ReLU, {pause}]}}
  - {{name: left, layers: [{{Linear: {{in_features: 64, out_features: 32}}}}, ReLU]}}
  - {{name: right, inputs: stem, layers: [{{Linear: {{in_features: 64, out_features: 32}}}}, Tanh]}}
  - {{name: top, inputs: [left, right, stem], layers: [Concat, {{Linear: {{in_features: 128, out_features: 10}}}}]}}
"""  # noqa: E501


@pytest.mark.apptainer
def test_a_diamond_in_containers_on_three_hosts(
    tool: Apptainer, slurm: str, dnictl: Dnictl
) -> None:
    """A worker in the middle is killed: after its restart the weights are backpropagation's."""
    (dnictl.folder / "pause.py").write_text(PAUSE)
    torch_version = version("torch").split("+")[0]
    text = DIAMOND.format(network=slurm, torch=torch_version, pause=PAUSES)
    (dnictl.folder / "chain.yaml").write_text(text)
    dnictl.run("build")
    said = dnictl.run("submit", "--nodes", "3", "--backend", "apptainer", "--parsable").stdout
    name, _, _ = said.strip().partition(";")
    root = RunDir(dnictl.folder / "runs" / name)
    eventually("a checkpoint", lambda: complete_cuts(root, ["stem", "left", "right", "top"]))
    kill(dnictl.folder, "right")
    figures = dnictl.json("wait")
    assert figures["state"] == "finished"
    assert {one["host"] for one in figures["modules"]} == {"n1", "n2", "n3"}
    assert any(one["restarts"] for one in figures["modules"])
    with opened(Record.read(root.root), 1) as (chain, _, reference, source):
        for epoch in range(1, chain.epochs + 1):
            for x, y in source.train_batches(epoch):
                reference.train_batch(x, y)
    found = Run.open(root.root).model().state_dict().values()
    for ours, theirs in zip(found, reference.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
