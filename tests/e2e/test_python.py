"""The page about Python: its code runs, with real workers."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dni_runtime import Chain, Run
from dni_runtime.errors import UsageError
from tests.e2e.conftest import FOREVER, PAIR, Site, missing

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


@pytest.mark.timeout(300)
def test_the_page(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.run("init", "--template", "mlp")
    monkeypatch.chdir(site.folder)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["state"].phase == "finished"
    assert [epoch for epoch, _ in names["curve"]] == [1, 2, 3, 4]
    assert names["curve"][-1][1] > 0.7
    assert names["logits"].shape == (5, 10)
    assert names["result"]["accuracy"] == pytest.approx(names["curve"][-1][1])
    assert [name for name, _ in names["model"].named_children()] == ["bottom", "top"]
    assert (site.folder / "curves.png").stat().st_size > 1000
    run: Run = names["run"]
    assert not run.model().training
    assert [event.event for event in run.events()][:1] == ["run_started"]
    with pytest.raises(UsageError, match="has finished"):
        run.resume()
    with pytest.raises(UsageError, match="has no module 'nobody'"):
        run.restart("nobody")


def kinds(cell: Any) -> list[str]:
    """What a cell of a notebook has put out, beside warnings."""
    outputs = [one for one in cell.get("outputs", ()) if one.get("name") != "stderr"]
    return [f"{one.output_type} {sorted(one.get('data', ()))}" for one in outputs]


@pytest.mark.timeout(600)
def test_the_notebook(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel runs it: the tutorial's classes, in cells; the curve while a run goes on."""
    if find_spec("nbclient") is None or find_spec("ipykernel") is None:
        missing("nbclient and ipykernel are not installed")
    from nbclient import NotebookClient
    from nbformat import NO_CONVERT, read

    notebook = read(PAGE.with_name("first-run.ipynb"), NO_CONVERT)
    kept = [kinds(cell) for cell in notebook.cells]
    monkeypatch.setenv("PYTHONPATH", "")
    resources = {"metadata": {"path": str(site.folder)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    assert [kinds(cell) for cell in notebook.cells] == kept, "its outputs are in the repository"
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    classes, *calls, _, last = outputs
    assert f"# shapes.py\n{classes}\n```" in PAGE.with_name("tutorial.md").read_text()
    lines = [line for source in calls for line in source.splitlines() if line]
    lines += [line for line in last.splitlines() if "load_state_dict" in line]
    assert len(lines) <= 12, "instead of the loop"
    watched = [output for source, output in outputs.items() if ".watch()" in source]
    assert len(watched) == 3
    for output in watched:
        assert "image/png" in output[0]["data"], "the newest picture"
    assert "tensor([[" in str(outputs["run.predict().confusion()"])
    (plotted,) = outputs["slower.plot()"]
    assert "image/png" in plotted["data"]
    accuracy = re.search(r"accuracy ([0-9.]+) after 12 epochs", str(outputs))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9


@pytest.mark.timeout(300)
def test_stop_and_resume(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write(FOREVER, slow=True, chain=PAIR)
    monkeypatch.chdir(site.folder)
    run = Chain("chain.yaml").train(backend="process")
    for state in run.states():
        if state.phase == "running":
            break
    run.restart(run.modules[0])
    assert run.stop().phase == "stopped"
    first = run.choose_cut()
    run.resume()
    for state in run.states():
        if state.phase == "running":
            break
    assert run.stop().phase == "stopped"
    assert run.choose_cut() > first


@pytest.mark.timeout(300)
def test_modules_begin_with_their_weights(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site.folder)
    head, middle = nn.Sequential(nn.Linear(64, 16), nn.Tanh()), nn.Linear(16, 8)
    tail = nn.Bilinear(16, 8, 10)
    settings: dict[str, Any] = {"defaults": {"optimizer": {"SGD": {"lr": 1e-30}}}}
    chain = Chain.from_modules(
        {"head": head, "middle": middle, "tail": tail},
        data={"dataset": "digits", "batch_size": 64, "flatten": True},
        inputs={"tail": ["head", "middle"]},
        **settings,
    )
    run = chain.train(backend="process")
    assert run.wait(120).phase == "finished"
    trained, given = run.model().state_dict(), nn.Sequential(head, middle, tail).state_dict()
    assert all(torch.equal(*pair) for pair in zip(trained.values(), given.values(), strict=True))
    with pytest.raises(UsageError, match="'inputs' names 'top', which is not one of the modules"):
        Chain.from_modules({"tail": tail}, data={"dataset": "digits"}, inputs={"top": ["tail"]})
    site.write(1)
    message = r"'chain\.yaml' exists, and dni_runtime\.Chain\.from_modules did not write it"
    with pytest.raises(UsageError, match=message):
        Chain.from_modules({"tail": tail}, data={"dataset": "digits"})


def test_what_cannot_be_trained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write(1)
    monkeypatch.chdir(site.folder)
    chain = Chain("chain.yaml")
    with pytest.raises(UsageError, match="epochs=0"):
        chain.train(epochs=0)
    assert not (site.folder / "runs").exists()


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import Dataset

from dni_runtime import Chain

class Points(Dataset):
    num_classes = 2

    def __init__(self, count, seed):
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "label": int(self.x[index].sum() > 0)}

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU())

    def forward(self, x):
        return self.layers(x)

if __name__ == "__main__":
    torch.manual_seed(0)
    chain = Chain.from_modules(
        {"body": Net(), "top": nn.Linear(16, 2)},
        data={"dataset": Points, "train": {"count": 512, "seed": 1},
              "evaluation": {"count": 64, "seed": 2}, "batch_size": 32},
        path="mine.yaml",
        epochs=8,
    )
    run = chain.train(backend="process")
    state = run.wait()
    result = run.evaluate()
    print(state.phase, result["accuracy"])
    Net().load_state_dict(run.model().body[0].state_dict())
"""


@pytest.mark.timeout(300)
def test_a_script_with_classes_of_its_own(site: Site) -> None:
    """Network and data set in the script that trains; evaluated in the same process."""
    (site.folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=site.folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    phase, accuracy = done.stdout.splitlines()[0].split()
    assert phase == "finished"
    assert float(accuracy) > 0.8
