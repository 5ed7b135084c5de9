"""``tensorboard``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dni_runtime.files import append_line
from dni_runtime.measure.tensorboard import only_writer
from dni_runtime.run.record import Record
from tests.unit.cli.conftest import Dnictl, ended


def test_tensorboard(dnictl: Dnictl, record: Record, folder: Path) -> None:
    ended(record, "finished", 0)
    line = {"time": 1.0, "module": "top", "attempt": 1, "kind": "train", "step": 3, "loss": 0.5}
    append_line(record.run.metrics("top"), line)
    result = dnictl("tensorboard", "--follow")
    assert result.out == f"{record.run.tensorboard}: 1 new events of 1 modules\n"
    assert "tensorboard --logdir" in result.err
    assert dnictl("tensorboard", "--logdir", "logs", "--json").json == {
        "run": "small-1", "logdir": "logs/small-1", "events": {"top": 1},
    }  # fmt: skip
    assert list((folder / "logs" / "small-1" / "top").iterdir())


def test_tensorboard_without_its_package(
    dnictl: Dnictl, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    result = dnictl("tensorboard")
    assert result.code == 69
    assert "pip install 'dni-runtime[tensorboard]'" in result.err


def test_one_at_a_time(dnictl: Dnictl, record: Record) -> None:
    """Two that follow one run would each write its points."""
    ended(record, "finished", 0)
    with only_writer(record.run.tensorboard):
        refused = dnictl("tensorboard")
        assert (refused.code, refused.out) == (64, "")
        assert f"another process writes event files into '{record.run.tensorboard}'" in refused.err
        assert dnictl("tensorboard", "--logdir", "logs").code == 0
    assert dnictl("tensorboard").code == 0
