"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.files import append_line
from dni_runtime.measure.tensorboard import Board, scalars
from dni_runtime.run.documents.metrics import parse_line
from dni_runtime.run.record import Record

Points = dict[str, list[tuple[int, float]]]


def read(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: [(point.step, round(point.value, 4)) for point in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def train(record: Record, module: str, step: int, attempt: int = 1, **more: Any) -> None:
    line = {"time": time.time(), "module": module, "attempt": attempt, "kind": "train"}
    line |= {"id": step, "epoch": 1, "step": step, "samples": 64 * step, "loss": 1 / step}
    append_line(record.run.metrics(module), line | more)


def evaluation(record: Record, module: str, step: int, **figures: float) -> None:
    line = {"time": time.time(), "module": module, "attempt": 1, "kind": "eval"}
    line |= {"id": step, "epoch": 1, "step": step, "samples": 360}
    append_line(record.run.metrics(module), line | figures)


@pytest.fixture
def board(record: Record) -> Board:
    return Board(record, record.run.tensorboard)


def shown(line: dict[str, Any], *, early: bool) -> dict[str, float]:
    parsed = parse_line(json.dumps(line).encode())
    assert parsed is not None
    return scalars(parsed, early=early)


def test_tags() -> None:
    line = {
        "time": 1.0, "module": "a", "attempt": 1, "kind": "train", "id": 3, "epoch": 1, "step": 2,
        "samples": 128, "interval_s": 1.0, "loss": 0.5, "lag": None, "synthesizer_cosine": 0.75,
        "waiting": {"input": 0.25, "window": 0.5}, "refused": {},
    }  # fmt: skip
    assert shown(line, early=True) == {
        "train/loss": 0.5,
        "synthesizer/cosine": 0.75,
        "waiting/input": 0.25,
        "waiting/window": 0.5,
    }
    line = {"time": 1.0, "kind": "eval", "step": 2, "samples": 9, "loss": None, "accuracy": 0.5}
    assert shown(line, early=True) == {"head/accuracy": 0.5}
    assert shown(line, early=False) == {"eval/accuracy": 0.5}
    assert shown(line | {"kind": "test"}, early=True) == {"head/test_accuracy": 0.5}
    assert shown(line | {"kind": "test"}, early=False) == {"test/accuracy": 0.5}
    assert shown({"kind": "start", "time": 1.0}, early=False) == {}


def test_a_folder_per_module(record: Record, board: Board) -> None:
    train(record, "bottom", 2, lag=3.0, synthesizer_cosine=0.5, window_fill=0.9)
    evaluation(record, "bottom", 2, loss=2.0, accuracy=0.25)
    train(record, "top", 4)
    evaluation(record, "top", 4, loss=1.5, accuracy=0.75)
    assert board.update() == {"bottom": 2, "top": 2}
    assert read(board.folder / "bottom") == {
        "train/loss": [(2, 0.5)],
        "gradients/lag": [(2, 3.0)],
        "synthesizer/cosine": [(2, 0.5)],
        "window/fill": [(2, 0.9)],
        "head/loss": [(2, 2.0)],
        "head/accuracy": [(2, 0.25)],
    }
    assert read(board.folder / "top") == {
        "train/loss": [(4, 0.25)],
        "eval/loss": [(4, 1.5)],
        "eval/accuracy": [(4, 0.75)],
    }


def test_only_news_is_added(record: Record, board: Board) -> None:
    train(record, "bottom", 1)
    assert board.update() == {"bottom": 1}
    before = sorted((board.folder / "bottom").iterdir())
    again = Board(record, record.run.tensorboard)
    assert (board.update(), again.update()) == ({"bottom": 0}, {"bottom": 0})
    assert sorted((board.folder / "bottom").iterdir()) == before
    evaluation(record, "bottom", 1, loss=2.0)  # at the same step: none of its points is dropped
    train(record, "bottom", 2)
    train(record, "top", 1)
    assert again.update() == {"bottom": 2, "top": 1}
    train(record, "bottom", 4)
    assert again.update() == {"bottom": 1, "top": 0}
    assert read(board.folder / "bottom") == {
        "train/loss": [(1, 1.0), (2, 0.5), (4, 0.25)],
        "head/loss": [(1, 2.0)],
    }


def test_a_file_that_was_cut_off_spoils_no_other(record: Record, board: Board) -> None:
    for step in (1, 2):
        train(record, "bottom", step)
    board.update()
    (file,) = (board.folder / "bottom").glob("*tfevents*")
    file.write_bytes(file.read_bytes()[:-3])
    train(record, "bottom", 4)
    assert Board(record, record.run.tensorboard).update() == {"bottom": 1}
    assert read(file.parent) == {"train/loss": [(1, 1.0), (4, 0.25)]}


def test_a_worker_on_a_host_whose_clock_is_behind(record: Record, board: Board) -> None:
    train(record, "bottom", 1)
    board.update()
    train(record, "bottom", 2, attempt=2, time=time.time() - 60)
    assert Board(record, record.run.tensorboard).update() == {"bottom": 1}


def test_another_run_of_the_same_name_starts_over(record: Record, board: Board) -> None:
    for step in (1, 2, 4):
        train(record, "bottom", step)
    board.update()
    record.run.metrics("bottom").unlink()
    train(record, "bottom", 8)
    later = record.model_copy(update={"created": record.created + 1})
    assert Board(later, record.run.tensorboard).update() == {"bottom": 1}
    assert read(board.folder / "bottom") == {"train/loss": [(8, 0.125)]}


def test_evaluations_of_a_replicated_tail_are_the_chains(record: Record, tmp_path: Path) -> None:
    several = record.model_copy(update={"modules": ("bottom", "top.1", "top.2")})
    for module in several.modules:
        evaluation(record, module, 2, loss=1.5)
    Board(several, tmp_path / "logs").update()
    tags = {module: list(read(tmp_path / "logs" / module)) for module in several.modules}
    assert tags == {"bottom": ["head/loss"], "top.1": ["eval/loss"], "top.2": ["eval/loss"]}


def test_a_resumed_run_takes_back_what_comes_again(record: Record, board: Board) -> None:
    for step in (1, 2, 4, 8):
        train(record, "bottom", step)
    board.update()
    train(record, "bottom", 2, attempt=2, loss=9.0)
    Board(record, record.run.tensorboard).update()
    train(record, "bottom", 4, attempt=2, loss=8.0)
    Board(record, record.run.tensorboard).update()
    assert read(board.folder / "bottom") == {"train/loss": [(1, 1.0), (2, 9.0), (4, 8.0)]}


def test_a_folder_that_cannot_be_made(record: Record, tmp_path: Path) -> None:
    train(record, "bottom", 1)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--logdir"):
        Board(record, tmp_path / "file" / "logs").update()


def test_without_the_package(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(UnavailableError, match=r"pip install 'dni-runtime\[tensorboard\]'"):
        Board(record, record.run.tensorboard)
