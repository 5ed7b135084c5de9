"""Six runs on a real Slurm, the best one exported, and trained further."""

from __future__ import annotations

import pytest

from dni_runtime import Run, load
from dni_runtime.run.documents.state import RunState
from tests.e2e.conftest import PAIR, Dnictl
from tests.e2e.pages import commands

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(300)]


def test_the_best_of_six_runs_on_a_cluster(
    slurm: str, dnictl: Dnictl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNICTL_IMAGES", "none")  # processes
    (dnictl.folder / "chain.yaml").write_text(
        f"{PAIR % 1}links: {{interface: {slurm}}}\n".replace(
            "Adam: {lr: 0.002}}", "Adam: {lr: 0.002}}, resources: {memory: 800M}"
        )
    )
    sweep, export = (
        line.split()
        for line in commands("goals.md", "The best of six runs on a cluster").splitlines()
    )
    done = dnictl.run(*sweep[1:])
    states = {
        run.name: RunState.read(Run.open(run).directory).phase
        for run in (dnictl.folder / "runs").iterdir()
    }
    assert len(states) == 6
    assert set(states.values()) == {"finished"}
    assert export[2] in states, "the page names a run as the sweep does"
    best = done.stdout.splitlines()[1].split()[0]
    told = done.stderr.splitlines()[-1].removeprefix("the best one: ").split()
    assert told[:3] == [*export[:2], best]
    assert Run.open(dnictl.folder / "runs" / best).job is not None
    dnictl.run("export", best, *export[3:])
    assert len(load(dnictl.folder / export[-1])) > 1
    first = Run.open(dnictl.folder / "runs" / best).job
    dnictl.run("resume", best, "--epochs", "3")  # another job, of a run that has finished
    dnictl.run("wait", best)
    again = Run.open(dnictl.folder / "runs" / best)
    assert again.job not in (None, first)
    assert [one.epoch for one in again.status().evaluations] == [1, 2, 3]
