"""How figures look to people."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dni_runtime.measure.figures import ModuleFigures, RunFigures
from dni_runtime.run.documents.metrics import Evaluation, EvaluationLine
from dnictl.show import Column, chain_line, documents, modules_table, quantity, table, waits


@pytest.mark.parametrize(
    ("waiting", "shown"),
    [
        ({}, "-"),
        ({"input": 0.002}, "-"),
        ({"input": 0.1, "window": 0.62}, "window 62 %"),
        ({"gradient": 1.0}, "gradient 100 %"),
    ],
)
def test_the_reason_that_matters(waiting: Mapping[str, float], shown: str) -> None:
    assert waits(waiting) == shown


def test_a_table_and_its_json_follow_from_the_columns() -> None:
    columns: list[Column[SimpleNamespace]] = [
        Column("module", "name"),
        quantity("bytes", lambda row: row.size, "{:,}".format, title="size"),
        Column("hash", lambda row: "ab", title=""),
        Column("note", lambda row: f"\x1b{row.size}", in_json=False),
    ]
    rows = [SimpleNamespace(name="head", size=1000), SimpleNamespace(name="tail", size=2)]
    assert documents(columns, rows) == [
        {"module": "head", "bytes": 1000, "hash": "ab"},
        {"module": "tail", "bytes": 2, "hash": "ab"},
    ]
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(table(columns, rows))
    assert [line.rstrip() for line in captured.get().splitlines()] == [
        "module   size  note", r"head    1,000  \u001b1000", r"tail        2  \u001b2",
    ]  # fmt: skip


def run_figures(*modules: ModuleFigures, **more: Any) -> RunFigures:
    figures: dict[str, Any] = {
        "run": "r", "path": "", "chain": "c", "backend": "process", "state": "running",
        "attempt": 1, "created": 0, "started": 0, "ended": None, "exit_code": None, "error": None,
        "epoch": 1, "epochs": 2, "step": 3, "total_steps": None, "accuracy": 0.5, "loss": 1,
        "evaluations": (), "samples_per_s": None, "eta_s": None, "modules": modules,
    }  # fmt: skip
    return RunFigures(**figures | more)


@pytest.mark.parametrize(
    ("test", "shown"),
    [
        (None, "epoch 1/2, accuracy 50.00 %"),
        ({"accuracy": 0.4, "loss": 2.0}, "epoch 1/2, accuracy 50.00 %, test accuracy 40.00 %"),
        ({"mae": 3.0, "loss": 2.0}, "epoch 1/2, accuracy 50.00 %, test loss 2.0"),
    ],
)
def test_the_chain_in_one_line(test: dict[str, float] | None, shown: str) -> None:
    line = None if test is None else EvaluationLine(kind="test", **test)  # type: ignore[arg-type]
    assert chain_line(run_figures(test=line)) == shown


def test_a_wide_row_fits_into_100_columns() -> None:
    busy = ModuleFigures(
        module="lower-half", state="stopping", attempt=1, step=1_234_567,
        samples_per_s=123_456.0, loss=0.001234,
        evaluation=Evaluation.model_validate({"accuracy": 1}),
        synthesizer_cosine=-0.0123, lag=14.27, gradients_lost=0.1234,
        waiting={"gradient": 1.0},
    )  # fmt: skip
    tail = ModuleFigures(module="tail", state="running", attempt=1, step=3)
    figures = run_figures(busy, tail)
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(modules_table(figures))
    head, first, last = captured.get().splitlines()
    assert head.split() == [
        "module", "state", "step", "accuracy", "samples/s", "loss", "cosine", "lag", "lost",
        "waits",
    ]  # fmt: skip
    assert first.split()[2:] == [
        *("1,234,567", "100.00", "%", "123,456", "0.00123", "-0.0123", "14.3", "12.3", "%"),
        *("gradient", "100", "%"),
    ]
    assert "…" not in first
    assert last.split() == [
        "tail", "running", "3", "50.00", "%", "-", "-", "-", "-", "-", "-",
    ]  # fmt: skip


def test_counters_are_shown_if_there_is_something() -> None:
    calm = ModuleFigures(module="a", state="running", attempt=1, missed=0)
    restarted = ModuleFigures(module="b", state="running", attempt=2, restarts=1, replayed=1200)
    console = Console(width=120, highlight=False)
    with console.capture() as captured:
        console.print(modules_table(run_figures(calm, restarted)))
    head, first, last = captured.get().splitlines()
    assert head.split()[-3:] == ["waits", "replayed", "restarts"]
    assert (first.split()[-2:], last.split()[-2:]) == (["-", "-"], ["1,200", "1"])


def test_of_modules_that_are_served_their_time_is_shown() -> None:
    served = ModuleFigures(
        module="a", state="running", attempt=1, step=70, samples_per_s=9.0, compute_s=0.0123
    )
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(modules_table(run_figures(served)))
    head, row = captured.get().splitlines()
    assert head.split()[-2:] == ["samples/s", "s/batch"]
    assert row.split()[-1] == "0.0123"
