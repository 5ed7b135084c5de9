"""The page about Python: its code runs, with real workers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dni_runtime import Chain, Run
from dni_runtime.errors import UsageError
from tests.e2e.conftest import FOREVER, PAIR, Site

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


@pytest.mark.timeout(300)
def test_the_notebook(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, in one namespace; without Jupyter, which adds nothing to them."""
    monkeypatch.chdir(site.folder)
    document = json.loads(PAGE.with_name("first-run.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first-run.ipynb", "exec"), names)
    assert names["run"].state().phase == "finished"
    assert names["figures"].accuracy > 0.9


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
    first = run.choose_cut()[0]
    run.resume()
    for state in run.states():
        if state.phase == "running":
            break
    assert run.stop().phase == "stopped"
    assert run.choose_cut()[0] > first


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
    with pytest.raises(UsageError, match="was not written by"):
        Chain.from_modules({"tail": tail}, data={"dataset": "digits"})


def test_what_cannot_be_trained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write(1)
    monkeypatch.chdir(site.folder)
    chain = Chain("chain.yaml")
    with pytest.raises(UsageError, match="epochs=0"):
        chain.train(epochs=0)
    assert not (site.folder / "runs").exists()
