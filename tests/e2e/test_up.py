"""Whole runs by ``dnictl`` with real workers: train, watch, stop, kill, resume, export."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy
import pytest
import torch

import dni_runtime
from dni_runtime.data import open_data
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir, socket_path
from dni_runtime.spec import DataSpec
from tests.e2e.conftest import ENDS, FOREVER, MODULES, PAIR, Site, eventually, sessions_of
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TWICE = """\
from torch import nn

class Twice(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x
"""


def accuracy_of(model: torch.nn.Module) -> float:
    spec = DataSpec(dataset="digits", batch_size=64, flatten=True)
    source = open_data(spec, Path(), seed=0)
    right = total = 0
    with torch.no_grad():
        for x_BX, y_B in source.eval_batches():
            right += int((model(x_BX).argmax(1) == y_B).sum())
            total += len(y_B)
    return right / total


def test_a_chain_is_trained_and_taken_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with an odd name, with a layer of the user's that the run takes along."""
    folder = tmp_path / 'it\'s a, folder: "quoted"'
    folder.mkdir()
    (folder / "twice.py").write_text(TWICE)
    site = Site(folder)
    chain = site.write(epochs=8)
    twice = (
        "[{import: 'twice:Twice', args: {factor: 2}}, {Linear: {in_features: 64, out_features: 10"
    )
    text = chain.read_text().replace("[{Linear: {in_features: 64, out_features: 10", twice)
    chain.write_text(text)
    done = site.run("up", chain, "--backend", "process")
    lines = done.stderr.splitlines()
    assert lines[0].endswith(": starting")
    epochs = [line.split(":")[0] for line in lines if line.startswith("epoch")]
    assert epochs == [f"epoch {one}/8" for one in range(1, 9)]
    assert "accuracy" in done.stdout
    figures = site.json("status")
    assert (figures["state"], figures["exit_code"]) == ("finished", 0)
    assert (figures["epoch"], len(figures["evaluations"])) == (8, 8)
    assert figures["accuracy"] > 0.9
    assert figures["step"] == figures["total_steps"]
    assert [module["state"] for module in figures["modules"]] == ["finished"] * 3
    assert all(module["exit_code"] == 0 for module in figures["modules"])

    assert (site.latest.sources / "twice.py").is_file()
    (folder / "twice.py").unlink()
    monkeypatch.syspath_prepend(site.latest.sources)
    for name in ("model.safetensors", "model.pt2"):
        site.run("export", "-o", name)
        model = dni_runtime.load(folder / name, trust=True)
        assert accuracy_of(model) == pytest.approx(figures["accuracy"], abs=1e-6)

    assert [run["state"] for run in site.json("ps")] == ["finished"]
    assert site.run("wait").stdout.startswith(f"{figures['run']}: finished")
    assert "epoch 8" in site.run("logs", "top").stdout
    assert "has finished" in site.run("resume", expect=64).stderr


def test_signs_that_it_works(site: Site) -> None:
    """Figures of the synthesizer, late gradients, windows and early heads, here and in events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    site.run("up", site.write(epochs=15), "--backend", "process", "-d")
    logs = site.start("logs", "-f")
    follower = site.start("tensorboard", "--follow", "--json")
    site.run("wait")
    said, err = logs.communicate(timeout=30)
    assert logs.returncode == 0, err
    assert "top    | " in said
    assert "epoch 15:" in said
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0, err
    figures = site.json("status")
    bottom, middle, top = figures["modules"]
    for links, module in ((2, bottom), (1, middle)):
        assert module["evaluation"]["accuracy"] > 0.8
        assert module["head_accuracy"] is None or module["head_accuracy"] > 0.8
        assert 0 < module["window_fill"] <= 1
        lines = list(read_lines(site.latest.metrics(module["module"])))
        train = [line for line in lines if line["kind"] == "train"]
        measured = [line for line in train if line["synthesizer_cosine"] is not None]
        # In the end the digits are learned, gradients are noise, and nothing predicts them.
        assert min(line["synthesizer_error"] for line in measured) < 1
        assert max(line["synthesizer_cosine"] for line in measured) > 0.3
        late = [line["lag_max"] for line in train if line["lag_max"] is not None]
        assert max(late) <= 8 * links  # true gradients pass through all links below
        evaluations = [line for line in lines if line["kind"] == "eval"]
        assert [line["epoch"] for line in evaluations] == list(range(1, 16))
        assert evaluations[-1]["accuracy"] == module["evaluation"]["accuracy"]
        assert all(sum(line["waiting"].values()) < 1.05 for line in train)
    assert top["head_accuracy"] is None
    assert top["memory_peak_bytes"] >= top["memory_bytes"] > 1 << 20
    assert "window" not in top["waiting"]

    events = json.loads(out)
    assert events["events"].keys() == set(MODULES)
    assert site.json("tensorboard")["events"] == dict.fromkeys(MODULES, 0)
    read = {}
    for module in MODULES:
        read[module] = EventAccumulator(str(Path(events["logdir"]) / module))
        read[module].Reload()
    last = read["top"].Scalars("eval/accuracy")[-1]
    assert (last.step, last.value) == (figures["step"], pytest.approx(figures["accuracy"]))
    assert len(read["bottom"].Scalars("head/accuracy")) == 15
    assert {"synthesizer/cosine", "gradients/lag", "window/fill"} <= set(
        read["middle"].Tags()["scalars"]
    )


def test_a_killed_worker_is_reported_and_the_run_goes_on_later(site: Site) -> None:
    chain = site.write(6, "restart: {limit: 0}", slow=True)
    process = site.start("up", chain, "--backend", "process")
    site.wait_for_checkpoint()
    pid = RunState.read(site.latest).modules["middle"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 70, err
    assert "failed" in out
    assert "module 'middle' (attempt 1) was killed by SIGKILL" in err
    assert "logs/middle.1.log" in err
    assert "| 20" in err  # the end of its log
    assert "→ dnictl resume " in err

    before = site.cuts()
    assert before
    figures = site.json("resume")
    assert (figures["state"], figures["attempt"]) == ("finished", 2)
    assert figures["step"] == figures["total_steps"]
    epochs = [one["epoch"] for one in figures["evaluations"]]
    assert epochs == list(range(1, 7)), "each epoch counts once"
    assert figures["accuracy"] > 0.9
    started = [e for e in read_lines(site.latest.events) if e["event"] == "worker_started"]
    assert [e["attempt"] for e in started] == [1, 1, 1, 2, 2, 2]
    assert "resumes at" in site.run("logs", "middle").stdout


def test_stop_and_resume_in_the_background(site: Site) -> None:
    chain = site.write(FOREVER, slow=True, chain=PAIR)
    done = site.run("up", chain, "--backend", "process", "-d")
    name = done.stdout.strip()
    assert name == site.latest.root.name
    site.wait_for_checkpoint(ENDS)
    eventually("it runs", lambda: site.figures.state == "running")
    eventually(
        "all modules report steps", lambda: all(module.step for module in site.figures.modules)
    )
    assert site.run("wait", "--timeout", "0.1", expect=124).stderr.count("still running") == 1
    assert "already" in site.run("up", chain, "--run-dir", f"runs/{name}", expect=64).stderr

    assert site.json("stop") == {"run": name, "state": "stopped", "exit_code": 75}
    site.run("wait", expect=75)
    newest = site.cuts(ENDS)[-1]

    both = [site.start("resume", "-d") for _ in range(2)]  # one of them owns the run
    said = {process.wait(60): process.communicate() for process in both}
    assert sorted(said) == [0, 64], said
    assert f"the run '{name}' belongs to process" in said[64][1]
    site.wait_for_checkpoint(ENDS)
    assert site.cuts(ENDS)[-1] > newest
    starts = [line for line in read_lines(site.latest.events) if line["event"] == "run_started"]
    assert [line["attempt"] for line in starts] == [1, 2]
    resumed = site.run("logs", "bottom").stdout
    assert f"resumes at {newest} of the stream" in resumed
    assert site.run("stop").stdout == f"{name}: stopped\n"


def test_a_signal_stops_after_a_checkpoint_and_a_second_one_kills(site: Site) -> None:
    chain = site.write(FOREVER, slow=True, chain=PAIR)
    process = site.start("up", chain, "--backend", "process")
    for number in (signal.SIGINT, signal.SIGTERM):
        site.wait_for_checkpoint(ENDS)
        before = site.cuts(ENDS)[-1]
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 75, err
        assert "stopped" in out
        assert "dnictl resume" in err
        assert site.cuts(ENDS)[-1] > before
        assert "Traceback" not in err
        process = site.start("resume")
    site.wait_for_checkpoint(ENDS)
    # A worker that is not able to obey, so that the first signal cannot end the run.
    top = RunState.read(site.latest).modules["top"].pid
    assert top is not None
    os.kill(top, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    eventually("it is stopping", lambda: site.figures.state == "stopping")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert site.cuts(ENDS)


def test_two_modules_by_hand(site: Site) -> None:
    chain = site.write(2, chain=PAIR)
    site.run("run", "top", "--run-dir", "r", "--dry-run", "--backend", "process")
    workers = [
        site.start("run", name, "-f", chain, "--run-dir", "r", "--backend", "process")
        for name in ENDS
    ]
    for worker in workers:
        _, err = worker.communicate(timeout=90)
        assert worker.returncode == 0, err
    assert complete_cuts(RunDir(site.folder / "r"), ENDS)
    assert not socket_path(site.folder / "r").exists()


IN_CONTAINERS = """\
name: boxed
data: {dataset: npz, path: "sets, of mine/points.npz", batch_size: 32}
epochs: 100000
image: {torch: "%s"}
modules:
  - name: bottom
    layers: [{Linear: {in_features: 8, out_features: 32}}, {BatchNorm1d: {num_features: 32}}, ReLU]
  - name: top
    layers:
      - {import: "mine:Twice", args: {factor: 2}}
      - Linear: {in_features: 32, out_features: 2}
"""


@pytest.fixture
def boxed(site: Site, tool: Apptainer) -> Site:
    """A chain with a layer and a data file of the user's own, and its images."""
    (site.folder / "mine.py").write_text(TWICE)
    sets = site.folder / "sets, of mine"
    sets.mkdir()
    random = numpy.random.default_rng(0)
    x = random.normal(size=(512, 8)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int64")
    numpy.savez(sets / "points.npz", x_train=x, y_train=y, x_eval=x[:256], y_eval=y[:256])
    torch_version = metadata.version("torch").split("+")[0]
    (site.folder / "chain.yaml").write_text(IN_CONTAINERS % f"torch=={torch_version}")
    site.run("build", timeout_s=800)
    return site


@pytest.mark.apptainer
@pytest.mark.timeout(1200)
def test_containers_are_killed_stopped_and_resumed(boxed: Site) -> None:
    process = boxed.start("up")
    boxed.wait_for_checkpoint(modules=["bottom", "top"])
    status = boxed.json("status")
    assert status["backend"] == "apptainer"
    assert len(sessions_of(boxed.folder)) >= 8
    os.kill(RunState.read(boxed.latest).modules["bottom"].pid or 0, signal.SIGKILL)
    eventually(
        "it has been restarted",
        lambda: (
            [(m.restarts, m.state) for m in boxed.figures.modules]
            == [(1, "running"), (0, "running")]
        ),
    )
    process.kill()  # the supervisor
    process.communicate(timeout=30)
    assert boxed.json("status")["state"] == "unsupervised"
    boxed.run("resume", "-d")  # stops what goes on by itself
    eventually("it runs", lambda: boxed.figures.state == "running")
    assert boxed.json("stop")["exit_code"] == 75
    eventually("no container is left", lambda: not sessions_of(boxed.folder), 20)
    epoch = boxed.figures.epoch or 0
    boxed.run("resume", "-d")
    eventually("it goes on", lambda: (boxed.figures.epoch or 0) > epoch + 10)
    assert boxed.json("stop")["exit_code"] == 75
    figures = boxed.json("status")
    assert (figures["attempt"], figures["accuracy"] > 0.9) == (4, True)
    boxed.run("export", "-o", "m.pt2")

    chain = boxed.folder / "chain.yaml"
    chain.write_text(chain.read_text().replace("factor: 2", "factor: 3"))
    assert "from another spec of module 'top'" in boxed.run("up", expect=65).stderr
    assert boxed.json("up", "--backend", "process", "--dry-run")["backend"] == "process"


COMPILED = """
import torch
from torch import nn

class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 16)
        self.fast = torch.compile(self.inner, backend="aot_eager")

    def forward(self, x):
        return torch.relu(self.fast(x))
"""


def test_a_module_that_compiles(site: Site) -> None:
    """Its worker has the real torch._dynamo from the start, as by default."""
    site = replace(site, environ={"DNI_QUICK_START": ""})
    (site.folder / "compiled.py").write_text(COMPILED)
    (site.folder / "chain.yaml").write_text(
        "name: compiles\ndata: {dataset: digits, batch_size: 64, flatten: true}\nmodules:\n"
        "  - {name: bottom, layers: [{import: 'compiled:Compiled'}]}\n"
        "  - {name: top, layers: [{Linear: {in_features: 16, out_features: 10}}]}\n"
    )
    figures = site.json("up", "--backend", "process")
    assert (figures["state"], figures["epoch"]) == ("finished", 1)
    site.run("export", "-o", "model.safetensors")
