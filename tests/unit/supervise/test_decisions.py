"""What the exit of a worker means, row by row as docs/operations.md lists it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import DamagedError, DivergedError, DniError, StoppedError
from dni_runtime.supervise.decisions import Action, Exit, conclusion, decide

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
DAMAGED, STOPPED, FAILED = DamagedError.exit_code, StoppedError.exit_code, DniError.exit_code
TERM = 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("facts", "stopping", "action", "ending"),
    [
        ({"exit_code": FAILED, "due": True, "lost": True}, False, Action.NOTHING, "failed"),
        ({"exit_code": FAILED, "lost": True, "asked": True}, False, Action.MOVE, "failed"),
        ({"exit_code": 0, "lost": True, "finished": True}, False, Action.MOVE, "failed"),
        ({"exit_code": FAILED, "lost": True}, True, Action.STOP, "stopped"),
        ({"exit_code": STOPPED, "asked": True}, False, Action.RESTART_NOW, "stopped"),
        ({"exit_code": 137, "asked": True}, False, Action.RESTART_NOW, "failed"),
        (
            {"exit_code": STOPPED, "asked": True, "torn": True},
            False,
            Action.RESTART_ALL,
            "stopped",
        ),
        ({"exit_code": 137, "asked": True, "torn": True}, False, Action.RESTART_ALL, "failed"),
        (
            {"exit_code": 0, "asked": True, "torn": True, "finished": True},
            False,
            Action.NOTHING,
            "finished",
        ),
        ({"exit_code": STOPPED, "asked": True, "torn": True}, True, Action.STOP, "stopped"),
        ({"exit_code": STOPPED, "torn": True}, False, Action.STOP, "stopped"),
        ({"exit_code": 0, "asked": True, "finished": True}, False, Action.NOTHING, "finished"),
        ({"exit_code": STOPPED, "asked": True}, True, Action.STOP, "stopped"),
        ({"exit_code": DAMAGED, "older_cut": True}, False, Action.FALL_BACK, "failed"),
        ({"exit_code": DAMAGED, "older_cut": True}, True, Action.FAIL, "failed"),
        ({"exit_code": DAMAGED}, False, Action.FAIL, "failed"),
        ({"exit_code": 137, "may_restart": True}, False, Action.RESTART, "failed"),
        (
            {"exit_code": FAILED, "may_restart": True, "repeated": True},
            False,
            Action.FAIL,
            "failed",
        ),
        ({"exit_code": 137}, False, Action.FAIL, "failed"),
        ({"exit_code": 1, "may_restart": True, "reported": False}, False, Action.FAIL, "failed"),
        ({"exit_code": 137, "may_restart": True}, True, Action.FAIL, "failed"),
        ({"exit_code": 137, "killed": True}, True, Action.STOP, "stopped"),
        ({"exit_code": TERM}, True, Action.STOP, "stopped"),
        ({"exit_code": TERM}, False, Action.FAIL, "failed"),
        ({"exit_code": 0}, True, Action.STOP, "stopped"),
        ({"exit_code": 0, "may_restart": True}, False, Action.RESTART, "failed"),
        ({"exit_code": STOPPED}, False, Action.STOP, "stopped"),
        ({"exit_code": 0, "finished": True}, False, Action.NOTHING, "finished"),
        ({"exit_code": 0, "finished": True}, True, Action.NOTHING, "finished"),
    ],
)
def test_every_row(facts: dict[str, Any], stopping: bool, action: Action, ending: str) -> None:
    worker = Exit(**facts)
    assert worker.ending(stopping=stopping) == ending
    assert decide(worker, stopping=stopping) is action


def test_the_page_lists_every_action_in_this_order() -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = [cells[2].strip() for cells in rows if len(cells) == 4]
    table = [action.value for action in Action]
    assert [one for one in shown if one in table] == [
        Action.NOTHING.value, *table[1:], Action.NOTHING.value,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("failed", "workers", "killed_by", "whole", "expected"),
    [
        (None, ["finished", "finished"], None, True, ("finished", 0)),
        (None, ["finished", "finished"], None, False, ("stopped", STOPPED)),
        (None, ["stopped", "finished"], None, True, ("stopped", STOPPED)),
        (None, ["finished", "stopped"], None, True, ("stopped", STOPPED)),
        (None, ["finished", "stopped"], signal.SIGINT, True, ("stopped", 130)),
        (137, ["finished", "finished"], None, True, ("failed", FAILED)),
        (DivergedError.exit_code, ["stopped"], None, True, ("failed", DivergedError.exit_code)),
        (66, ["stopped"], None, True, ("failed", 66)),
    ],
)
def test_how_a_run_ends(
    failed: int | None,
    workers: list[str],
    killed_by: int | None,
    whole: bool,
    expected: tuple[str, int],
) -> None:
    assert conclusion(failed, workers, killed_by, whole=lambda: whole) == expected
