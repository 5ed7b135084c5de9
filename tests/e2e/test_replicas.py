"""Modules with replicas, as real workers: beside the same in one process, killed, stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dni_runtime import Run
from dni_runtime.core.step import ModuleStep
from dni_runtime.data import open_data
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.metrics import EvaluationLine, read_metrics
from dni_runtime.run.documents.state import RunState
from dni_runtime.spec import DataSpec, parse_chain
from dni_runtime.spec.edge import replica_of
from dni_runtime.spec.replicas import workers_of
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker.checkpoint import read
from dni_runtime.worker.stream import Stream
from tests.e2e.conftest import PAUSE, PAUSES, Site, eventually
from tests.e2e.workers import largest_difference, reference_weights
from tests.lines import read_lines
from tests.replicas import share

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAIN = """\
name: net
seed: 3
data: {dataset: digits, flatten: true, batch_size: 32}
epochs: %(epochs)d
restart: {backoff_s: 0.1, snapshot_s: 1}
links: %(links)s
replication: {strategy: %(strategy)s, every: 6}
defaults: {interface: %(interface)s, optimizer: {Adam: {lr: 0.005}}}
modules:
- {name: stem, replicas: %(heads)d, layers: [{Linear: {in_features: 64, out_features: 32}}, {BatchNorm1d: {num_features: 32}}, ReLU]}
- {name: wide, replicas: 3, layers: [{Linear: {in_features: 32, out_features: 32}}, {BatchNorm1d: {num_features: 32}}, ReLU%(pause)s]}
- {name: deep, replicas: 2, layers: [{Linear: {in_features: 32, out_features: 32}}, ReLU]}
- {name: top, replicas: %(tails)d, inputs: [deep, stem], layers: [Concat, {Linear: {in_features: 64, out_features: 10}}]}
"""  # noqa: E501
CURVE = "{transport: tcp, interface: lo, security: curve}"
WORKERS = ["stem", "wide.1", "wide.2", "wide.3", "deep.1", "deep.2", "top"]


def write(
    site: Site, *, strategy: str = "local-sgd", interface: str = "mixed", links: str = "{}",
    epochs: int = 3, slow: bool = False, heads: int = 1, tails: int = 1,
) -> Path:  # fmt: skip
    (site.folder / "pause.py").write_text(PAUSE)
    path = site.folder / "chain.yaml"
    given = {"strategy": strategy, "interface": interface, "links": links, "epochs": epochs}
    pause = f", {PAUSES}" if slow else ""
    path.write_text(CHAIN % {**given, "heads": heads, "tails": tails, "pause": pause})
    return path


def in_one_process(run: Run) -> dict[str, ModuleStep]:
    """Train the same chain here, without links; its modules must not need gradients from below."""
    chain, modules = run.record.specs()
    steps = {one.module: ModuleStep(one) for one in workers_of(modules)}
    source = open_data(chain.data, run.directory.sources, seed=chain.seed)
    head = modules[0].head
    assert head is not None
    for id, item in enumerate(Stream(source, head), start=1):
        if Mark.SYNC in item.mark:
            for name, count in (("wide", 3), ("deep", 2)):
                replicas = [steps[f"{name}.{one + 1}"] for one in range(count)]
                share(replicas, id, full=item.mark != Mark.SYNC)
        if item.x is None or item.y_BY is None or item.mode is not Mode.TRAIN:
            continue
        assert isinstance(item.x, Tensor)
        first = h = trained(steps["stem"], id, item.x, item.y_BY)
        for name, count in (("wide", 3), ("deep", 2)):
            h = trained(steps[f"{name}.{replica_of(id, count)}"], id, h, item.y_BY)
        trained(steps["top"], id, (h, first), item.y_BY)
    return steps


def trained(step: ModuleStep, id: int, x: Any, y_BY: Tensor) -> Tensor:
    h_BH = step.forward(id, x)
    step.update(y_BY)
    return h_BH


def test_it_is_the_same_in_one_process(site: Site) -> None:
    """With local interfaces nothing depends on time, whatever the workers and links do."""
    strategy = "{diloco: {lr: 0.5}}, compression: {top-k: {share: 0.2}}"
    path = write(site, strategy=strategy, interface="local", links=CURVE)
    site.run("up", path, "--backend", "process")
    run = Run.open(site.latest.root)
    assert list(run.modules) == WORKERS
    found, wanted = run.model().state_dict(), in_one_process(run)
    for number, (name, ours) in enumerate(found.items()):
        module, _, rest = name.partition(".")
        worker = next(one for one in WORKERS if one.partition(".")[0] == module)
        theirs = wanted[worker].layers.state_dict()[rest]
        assert torch.allclose(ours, theirs, atol=1e-5), (number, name)
    steps = {one.module: one.step for one in run.status().modules}
    assert sum(steps[f"wide.{one}"] or 0 for one in (1, 2, 3)) == steps["top"] == 3 * 45
    evaluated = run.evaluate()
    assert evaluated["accuracy"] == pytest.approx(run.status().accuracy)


SMALL = """\
name: small
seed: 3
data: {dataset: digits, flatten: true, batch_size: %(batch)d, drop_last: true}
epochs: %(epochs)d
replication: {strategy: %(strategy)s, every: 4}
defaults: {interface: delayed, accumulate: %(accumulate)d, optimizer: {Adam: {lr: 0.005}}}
modules:
- {name: stem, layers: [{Linear: {in_features: 64, out_features: 32}}, ReLU]}
- {name: wide, replicas: %(replicas)d, accumulate: 1, layers: [{Linear: {in_features: 32, out_features: 32}}, ReLU]}
- {name: top, layers: [{Linear: {in_features: 32, out_features: 10}}]}
"""  # noqa: E501


def small(
    strategy: str, *, batch: int = 32, accumulate: int = 1, replicas: int = 2, epochs: int = 3
) -> str:
    given = {"strategy": strategy, "batch": batch, "accumulate": accumulate, "replicas": replicas}
    return SMALL % {**given, "epochs": epochs}


def test_all_reduce_is_training_with_large_batches_in_one_process(site: Site) -> None:
    """Backpropagation through the whole chain: a point waits for all gradients before it."""
    path = site.folder / "chain.yaml"
    path.write_text(small("all-reduce", accumulate=4))
    site.run("up", path, "--backend", "process")
    same_as_large_batches(Run.open(site.latest.root))


def same_as_large_batches(run: Run, epochs: int = 3) -> None:
    chain = parse_chain(small("local-sgd", batch=128, replicas=1, epochs=epochs))
    wanted = reference_weights(chain, 11 * chain.epochs)
    assert largest_difference(run.model().state_dict(), wanted) < 1e-5


def test_a_process_group_begins_again_without_a_trace(site: Site) -> None:
    """A replica is killed in the middle: the weights are those of a run without that."""
    path = site.folder / "chain.yaml"
    path.write_text(small("all-reduce, backend: gloo", accumulate=4, epochs=18))
    site.run("up", path, "--backend", "process", "-d")
    run = Run.open(site.latest.root)
    eventually("training", lambda: (run.status().step or 0) > 100)
    said = site.run("restart", "wide.2", expect=64).stderr
    assert "'wide.2' is in a process group (gloo), which no replica can leave" in said
    assert len(list(site.latest.groups)) == 1
    os.kill(int(RunState.read(site.latest).modules["wide.2"].pid or 0), signal.SIGKILL)
    site.run("wait")
    assert run.status().state == "finished"
    assert {one.restarts for one in RunState.read(site.latest).modules.values()} == {1}
    same_weights(run, 2)
    same_as_large_batches(run, epochs=18)
    assert not site.latest.groups


def test_a_parameter_server_learns_and_nobody_waits_for_others(site: Site) -> None:
    path = site.folder / "chain.yaml"
    path.write_text(small("parameter-server", replicas=3))
    site.run("up", path, "--backend", "process")
    run = Run.open(site.latest.root)
    same_weights(run, 3)
    assert (run.status().accuracy or 0) > 0.8


def same_weights(run: Run, replicas: int) -> None:
    """All replicas of ``wide`` have the same weights in the newest checkpoint."""
    cut = run.choose_cut()
    first, *others = (
        read(run.directory.checkpoint(cut, f"wide.{one + 1}"))[0] for one in range(replicas)
    )
    for name, value in first.items():
        if name.startswith("layers.") and value.is_floating_point():
            assert all(torch.equal(other[name], value) for other in others), name


def test_any_replica_may_be_killed(site: Site) -> None:
    """The others go on, no batch is lost, and all replicas end with the same weights."""
    strategy = "{diloco: {lr: 0.5, momentum: 0.5}}"
    path = write(site, strategy=strategy, slow=True, epochs=8, heads=2, tails=2, links=CURVE)
    site.run("up", path, "--backend", "process", "-d")
    run = Run.open(site.latest.root)
    for name in ("wide.1", "stem.2", "deep.2", "top.1", "top.2"):
        step = run.status().step or 0
        eventually("training goes on", lambda s=step: (run.status().step or 0) > s + 8)
        before = RunState.read(site.latest).modules[name]
        os.kill(int(before.pid or 0), signal.SIGKILL)
        eventually(
            f"{name} is back",
            lambda n=name, r=before.restarts: RunState.read(site.latest).modules[n].restarts > r,
        )
    restarts = RunState.read(site.latest).modules["wide.3"].restarts
    assert "wide.3" in site.run("restart", "wide.3").stdout
    eventually(
        "a restart", lambda: RunState.read(site.latest).modules["wide.3"].restarts > restarts
    )
    site.run("wait")
    figures = run.status()
    assert figures.state == "finished"
    assert "wide.3" in site.run("logs", "wide.3").stdout
    shown = site.run("logs", "wide", "--tail", "30").stdout
    assert all(f"wide.{one}" in shown for one in (1, 2, 3))
    same_weights(run, 3)
    steps = {one.module: one.step or 0 for one in figures.modules}
    every = 8 * 45
    assert steps["stem.1"] + steps["stem.2"] == steps["top.1"] + steps["top.2"] == every
    assert figures.step == figures.evaluations[-1].step == every
    assert [one.samples for one in figures.evaluations] == [360] * 8
    assert sum(steps[f"wide.{one}"] for one in (1, 2, 3)) == every
    assert sum(steps[f"deep.{one}"] for one in (1, 2)) == every
    assert figures.accuracy is not None
    assert figures.accuracy > 0.85


def test_the_run_goes_on_without_a_replica(site: Site) -> None:
    """The first one fails again and again: all start with one fewer, and no batch is left out."""
    path, broken = write(site, slow=True, epochs=12), site.folder / "broken"
    path.write_text(path.read_text().replace("backoff_s: 0.1", "backoff_s: 0.1, limit: 2"))
    fails = f"if 'wide.1' in sys.argv and Path({str(broken)!r}).exists(): raise MemoryError"
    pause = PAUSE.replace("        if self.training", f"        {fails}\n        if self.training")
    (site.folder / "pause.py").write_text(f"import sys\nfrom pathlib import Path\n{pause}")
    site.run("up", path, "--backend", "process", "-d")
    run = Run.open(site.latest.root)
    eventually("it trains", lambda: (run.status().step or 0) > 30)
    broken.touch()
    eventually("a loss", lambda: [one for one in run.events() if one.event == "replica_lost"])
    broken.unlink()
    (lost,) = [one.model_dump() for one in run.events() if one.event == "replica_lost"]
    assert lost["module"] == "wide"
    assert "'wide.1'" in lost["reason"]
    step = run.status().step or 0
    eventually("it trains on", lambda: (run.status().step or 0) > step + 30)
    states = dict.fromkeys(WORKERS, "running") | {"wide.3": "inactive"}
    eventually(
        "two of three replicas run",
        lambda: {one.module: one.state for one in run.status().modules} == states,
    )
    run.stop()
    site.run("resume", "-d")
    eventually("all train", lambda: {one.state for one in run.status().modules} == {"running"})
    site.run("wait")
    same_weights(run, 3)
    figures = run.status()
    assert figures.step == 12 * 45
    steps = {one.module: one.step or 0 for one in figures.modules}
    assert sum(steps[f"wide.{one}"] for one in (1, 2, 3)) == 12 * 45
    assert figures.accuracy is not None
    assert figures.accuracy > 0.85


def test_what_validate_shows(site: Site) -> None:
    rows = site.json("validate", write(site))["modules"]
    assert [row["replicas"] for row in rows] == [1, 3, 2, 1]
    error = site.run("validate", write(site, interface="exact"), expect=78).stderr
    assert "waits for gradients (exact)" in error
    assert "replicas: 1" in error


def test_the_number_of_replicas_changes(site: Site) -> None:
    """1, 3, a stop, 2, 3: all start at one cut each time, and every batch is counted once."""
    epochs, slow = 18, site.folder / "slow"
    path = write(site, links=CURVE, slow=True, epochs=epochs)
    slow.touch()
    while_slow = f"self.training and Path({str(slow)!r}).exists()"
    pause = PAUSE.replace("0.03", "0.5").replace("self.training", while_slow)
    (site.folder / "pause.py").write_text("from pathlib import Path\n" + pause)
    text = path.read_text().replace("replicas: 3", "replicas: {start: 1, most: 3}")
    for ends in ("stem", "top"):
        text = text.replace(f"{ends}, replicas: 1", f"{ends}, replicas: {{start: 1, most: 2}}")
    path.write_text(text)
    site.run("up", path, "--backend", "process", "-d")
    run = Run.open(site.latest.root)

    def trains() -> int:
        return run.status().step or 0

    def states() -> dict[str, str]:
        return {name: one.state for name, one in RunState.read(site.latest).modules.items()}

    eventually("it trains", lambda: trains() > 10)
    before = RunState.read(site.latest).modules
    late = ("stem.2", "wide.2", "wide.3", "top.2")
    assert [before[one].state for one in late] == ["inactive"] * 4
    assert "inactive" in site.run("status").stdout
    assert "1 to 2" in site.run("scale", "deep=3", expect=64).stderr
    assert "1 to 3" in site.run("scale", "wide=4", expect=64).stderr
    assert "wide: 3" in site.run("scale", "stem=2", "wide=3", "top=2").stdout
    eventually("all train", lambda: set(states().values()) == {"running"})
    step = trains()
    eventually("it trains", lambda: trains() > step + 12)
    assert {(one.attempt, one.restarts) for one in RunState.read(site.latest).modules.values()} == {
        (2, 1)
    }
    run.stop()
    site.run("resume", "-d")
    eventually("all train", lambda: set(states().values()) == {"running"})
    fewer = {"stem": 1, "wide": 2, "deep": 2, "top": 1}
    assert site.json("scale", "stem=1", "wide=2", "top=1")["replicas"] == fewer
    without = dict.fromkeys(("stem.2", "wide.3", "top.2"), "inactive")
    expected = dict.fromkeys(before, "running") | without
    eventually("three are left out", lambda: states() == expected)
    site.run("scale", "stem=2", "wide=3", "top=2")
    eventually("they come again", lambda: set(states().values()) == {"running"})
    slow.unlink()
    site.run("wait")
    figures = run.status()
    assert figures.state == "finished"
    steps = {one.module: one.step or 0 for one in figures.modules}
    every = epochs * 45
    for name, count in (("stem", 2), ("wide", 3), ("top", 2)):
        own = [steps[f"{name}.{one + 1}"] for one in range(count)]
        assert min(own) > 0
        assert sum(own) == every
    evaluated = list(read_metrics(site.latest.metrics("top.1"), EvaluationLine))
    assert {line.samples for line in evaluated} == {360}
    assert evaluated[-1].step == every
    assert {one.event for one in run.events()} >= {"scale_requested", "scaled"}
    same_weights(run, 2)
    assert figures.accuracy is not None
    assert figures.accuracy > 0.85


HEADS = """\
name: net
seed: 3
data: {dataset: npz, path: 'owner-{replica}.npz', batch_size: 32, normalize: false}
epochs: 10
checkpoint: {every_epochs: 0}  # a restart asks for one
restart: {backoff_s: 0.1}
replication: {strategy: local-sgd, every: 6}
defaults: {interface: local, optimizer: {Adam: {lr: 0.005}}}
modules:
- {name: stem, replicas: 2, layers: [{Linear: {in_features: 64, out_features: 32}}, ReLU, %s]}
- {name: wide, replicas: 2, layers: [{Linear: {in_features: 32, out_features: 32}}, ReLU]}
- {name: top, replicas: 2, layers: [{Linear: {in_features: 32, out_features: 10}}]}
"""


def write_owners(site: Site) -> None:
    """Two halves of the digits, and the layer that waits."""
    digits = open_data(DataSpec(flatten=True, batch_size=2000, shuffle=False), Path(), seed=0)
    (x, y), (x_eval, y_eval) = next(digits.train_batches(1)), next(digits.eval_batches())
    for owner in (1, 2):
        own = {"x_train": x[owner - 1 : 1436 : 2], "y_train": y[owner - 1 : 1436 : 2]}  # type: ignore[index]
        np.savez(site.folder / f"owner-{owner}.npz", **own, x_eval=x_eval, y_eval=y_eval)  # type: ignore[arg-type]
    (site.folder / "pause.py").write_text(PAUSE)


def test_heads_with_data_of_their_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two owners, of whom one is restarted: the same as in one process that has both data sets."""
    write_owners(site)
    (site.folder / "chain.yaml").write_text(HEADS % PAUSES)
    site.run("up", "chain.yaml", "--backend", "process", "-d")
    run = Run.open(site.latest.root)
    eventually("it trains", lambda: (run.status().step or 0) > 8)
    run.restart("stem.2")
    eventually("a restart", lambda: RunState.read(site.latest).modules["stem.2"].restarts == 1)
    site.run("wait")
    assert {one.module: one.restarts for one in run.status().modules if one.restarts} == {
        "stem.2": 1
    }
    read = {one.module: one.data for one in LaunchPlan.read(site.latest).workers}
    assert read["stem.2"] == str(site.folder / "owner-2.npz")
    assert read["wide.1"] is None
    lines = [list(read_lines(site.latest.marks(f"stem.{one}")))[1:-1] for one in (1, 2)]
    asked = [max(one["id"], other["id"]) for one, other in zip(*lines, strict=True)]
    assert len(asked) == 1, "the restart needs a checkpoint, at one id of both"
    steps = {one.module: one.step or 0 for one in run.status().modules}
    every = 10 * 23
    assert steps["stem.1"] + steps["stem.2"] == steps["wide.1"] + steps["wide.2"] == every
    assert steps["top.1"] + steps["top.2"] == run.status().step == every
    assert run.evaluate()["accuracy"] == pytest.approx(run.status().accuracy)
    chain, modules = run.record.specs()
    monkeypatch.syspath_prepend(site.folder)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    wanted = {one.module: ModuleStep(one) for one in workers_of(modules)}
    sources = [
        open_data(chain.data.at(run.record.data).of_replica(one), site.folder, seed=3)
        for one in (1, 2)
    ]
    head = modules[0].head
    assert head is not None
    id = 0
    for both in zip(*(Stream(source, head) for source in sources), strict=True):
        id += 1
        while id in asked:
            share_all(wanted, id, full=True)
            id += 1
        if Mark.SYNC in both[0].mark:
            share_all(wanted, id, full=both[0].mark != Mark.SYNC)
        item = both[replica_of(id, 2) - 1]
        if item.x is not None and item.y_BY is not None and item.mode is Mode.TRAIN:
            h: Any = item.x
            for name in ("stem", "wide", "top"):
                h = trained(wanted[f"{name}.{replica_of(id, 2)}"], id, h, item.y_BY)
    for name, ours in run.model().state_dict().items():
        module, _, rest = name.partition(".")
        step = wanted[f"{module}.1"]
        assert torch.allclose(ours, step.layers.state_dict()[rest], atol=1e-5), name


def test_without_a_replica_of_the_first_module_all_go_on_from_a_checkpoint(site: Site) -> None:
    """Its data is gone, so it cannot be restarted: the other one takes all further batches."""
    write_owners(site)
    text = (HEADS % PAUSES).replace("every_epochs: 0", "every_epochs: 1")
    text = text.replace("stem, replicas: 2", "stem, replicas: {start: 2, most: 2}")
    (site.folder / "chain.yaml").write_text(text)
    site.run("up", "chain.yaml", "--backend", "process", "-d")
    run = Run.open(site.latest.root)
    eventually("a checkpoint", lambda: complete_cuts(run.directory, run.modules))
    (site.folder / "owner-2.npz").unlink()
    os.kill(int(RunState.read(site.latest).modules["stem.2"].pid or 0), signal.SIGKILL)
    site.run("wait")
    figures = run.status()
    assert figures.state == "finished"
    (lost,) = [one for one in run.events() if one.event == "replica_lost"]
    assert lost.model_dump()["module"] == "stem"
    phases = {one.module: one.state for one in figures.modules}
    assert phases.pop("stem.2") == "inactive"
    assert set(phases.values()) == {"finished"}
    steps = {one.module: one.step or 0 for one in figures.modules}
    for name in ("stem", "wide", "top"):
        assert steps[f"{name}.1"] + steps[f"{name}.2"] == 10 * 23
    assert figures.accuracy is not None
    assert figures.accuracy > 0.85


def share_all(steps: dict[str, ModuleStep], id: int, *, full: bool) -> None:
    for name in ("stem", "wide", "top"):
        share([steps[f"{name}.{one}"] for one in (1, 2)], id, full=full)
