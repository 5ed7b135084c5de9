"""What Python says where the command line has checked an option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dni_runtime.api.chain import Chain
from dni_runtime.api.run import Run
from dni_runtime.errors import UsageError
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.plan.settings import StartSettings


@pytest.fixture
def run(prepared: CheckedChain, tmp_path: Path) -> Run:
    """A run that has not begun."""
    return Run.open(create_run(tmp_path / "runs" / "one", prepared, backend="process").root)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.resume(12), "no complete checkpoint '12'"),
        (lambda run: Run.find(Path("no-such"), run.directory.root.parent), "no run 'no-such'"),
        (lambda run: run.serve(http={"port": 9000}), "serve.. has no 'http'"),
        (lambda run: run.serve(source="elsewhere"), "serve.. has no 'source'"),
        (lambda run: StartSettings(Path("x"), "docker"), "'backend' is 'docker'"),
        (lambda run: StartSettings(Path("x"), log_level="loud"), "'log_level' is 'loud'"),
    ],
)
def test_wrong_words(run: Run, call: Callable[[Run], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(run)


def test_a_run_to_carry_on_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layer = "Linear: {in_features: 64, out_features: 10}"
    Path("chain.yaml").write_text(
        f"name: x\ndata: {{flatten: true}}\nmodules: [{{name: a, layers: [{layer}]}}]\n"
    )
    with pytest.raises(UsageError, match="no run 'former'"):
        Chain().train(carry="former")
