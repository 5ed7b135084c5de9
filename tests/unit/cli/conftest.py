"""Running dnictl in this process: its exit code and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dnictl.main import main


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


Dnictl = Callable[..., Result]
WriteChain = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and no settings from outside."""
    monkeypatch.chdir(tmp_path)
    for name in ("DNICTL_RUNS", "DNICTL_IMAGES", "DNICTL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def dnictl(folder: Path, capsys: pytest.CaptureFixture[str]) -> Dnictl:
    """Run a command line in the empty folder."""

    def run(*arguments: str | Path) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Result(caught.value.code, out, err)

    return run


CHAIN = """\
name: small
seed: 1
data: {dataset: digits, batch_size: 64, flatten: true}
epochs: 2
defaults:
  optimizer: {Adam: {lr: 0.002}}
modules:
  - name: bottom
    layers:
      - Linear: {in_features: 64, out_features: 32}
      - BatchNorm1d: {num_features: 32}
      - ReLU
  - name: top
    layers:
      - Linear: {in_features: 32, out_features: 10}
"""


@pytest.fixture
def write_chain(folder: Path) -> WriteChain:
    """Write chain.yaml, with pieces of the text replaced."""

    def write(*changes: tuple[str, str]) -> Path:
        text = CHAIN
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        path = folder / "chain.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def record(write_chain: WriteChain, folder: Path) -> Record:
    """A run that has been made and not started."""
    create_run(folder / "runs" / "small-1", prepare(write_chain()), backend="process")
    return Record.read(folder / "runs" / "small-1")


def ended(record: Record, phase: str, code: int, **more: object) -> RunState:
    """Let a run come to its end (or to whatever phase it is), 65 s after its start."""
    state = RunState.begin("process", 1, record.modules)
    state.phase, state.exit_code = phase, code  # type: ignore[assignment]
    state.ended = state.started + 65
    for name, value in more.items():
        setattr(state, name, value)
    state.save(record.run)
    return state
