"""The page about Python: its code runs, with real workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dni_runtime import Chain, Run
from dni_runtime.errors import UsageError
from tests.e2e.conftest import FOREVER, Site

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
    run: Run = names["run"]
    assert not run.model().training
    assert [event["event"] for event in run.events()][:1] == ["run_started"]
    with pytest.raises(UsageError, match="has finished"):
        run.resume()
    with pytest.raises(UsageError, match="has no module 'nobody'"):
        run.restart("nobody")


@pytest.mark.timeout(300)
def test_stop_and_resume(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write(FOREVER)
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


def test_what_cannot_be_trained(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write(1)
    monkeypatch.chdir(site.folder)
    chain = Chain("chain.yaml")
    with pytest.raises(UsageError, match="epochs=0"):
        chain.train(epochs=0)
    assert not (site.folder / "runs").exists()
