"""Whose answers are whose, when samples leave at exits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dni_runtime.serving.collect import OpenBatches, Part
from dni_runtime.serving.engine import Answer


def part(rows: Tensor, leaves: list[bool] | None = None) -> Part:
    """What is said of these rows of a batch: their own numbers."""
    return Part((rows.float(),), None if leaves is None else torch.tensor(leaves))


def collected(answers: list[Answer], samples: int) -> dict[int, tuple[int, str | None]]:
    """Each row's answer and exit."""
    found: dict[int, tuple[int, str | None]] = {}
    for answer in answers:
        rows = torch.arange(samples) if answer.rows is None else answer.rows
        for row, output in zip(rows.tolist(), answer.outputs[0].tolist(), strict=True):
            assert row not in found, "answered twice"
            found[row] = int(output), answer.exit
    return found


@given(
    depths=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    order=st.permutations([0, 1, 2, 3]),
)
def test_each_sample_is_answered_where_it_leaves(depths: list[int], order: list[int]) -> None:
    """In whatever order the links bring what their ends have said."""
    batches = OpenBatches(["a", "b", "c"])
    batches.sent(1, 77, 0.0)
    there = torch.arange(len(depths))
    said: dict[int, Part | None] = {}
    for number in range(3):
        leaves = [depths[row] == number for row in there.tolist()]
        said[number] = part(there, leaves) if len(there) else None
        there = there[[not leave for leave in leaves]]
    said[3] = part(there) if len(there) else None
    answers = [answer for number in order for answer in batches.came(1, number, said[number], 0.1)]
    assert {answer.id for answer in answers} == {77}
    exits = ["a", "b", "c", None]
    wanted = {row: (row, exits[depth]) for row, depth in enumerate(depths)}
    assert collected(answers, len(depths)) == wanted
    assert not len(batches)


def test_what_a_module_could_not_compute_is_an_error() -> None:
    batches = OpenBatches(["a"])
    batches.sent(1, 5, 0.0)
    (left,) = batches.came(1, 0, part(torch.arange(3), [True, False, False]), 0.1)
    assert left.error is None
    (answer,) = batches.came(1, 1, None, 0.1)
    assert (answer.id, str(answer.error)) == (5, "a module could not compute this batch")
    assert batches.came(1, 1, None, 0.1) == []


def test_an_exit_answers_for_what_is_cut_off() -> None:
    batches = OpenBatches(["a"], wait_s=2.0)
    batches.sent(1, 10, 0.0)
    batches.sent(2, 20, 0.5, whole=True)
    assert len(batches) == 1, "a probe takes no room"
    batches.came(1, 0, part(torch.arange(3), [True, False, False]), 0.1)
    batches.came(2, 0, part(torch.arange(1), [False]), 0.1)
    assert batches.late(1.9) == []
    assert 0 < batches.wait_s(1.9) < 0.2
    (answer,) = batches.late(2.0)
    assert answer.degraded
    assert collected([answer], 3) == {1: (1, "a"), 2: (2, "a")}
    assert batches.late(9.0) == [], "a probe is answered by the chain's output alone"

    batches.sent(3, 30, 3.0)
    (answer,) = batches.came(3, 0, part(torch.arange(2), [False, False]), 0.1)
    assert answer.degraded, "at once: it is known to be cut off"
    assert batches.came(1, 1, part(torch.tensor([1, 2])), 0.1) == [], (
        "late, and the link works again"
    )
    batches.sent(4, 40, 4.0)
    assert batches.came(4, 0, part(torch.arange(2), [False, False]), 0.1) == []
    (answer,) = batches.came(4, 1, part(torch.arange(2)), 0.1)
    assert not answer.degraded
    (answer,) = batches.came(2, 1, part(torch.arange(1)), 0.1)
    assert answer.id == 20


def test_what_is_left_out_after_a_cut_is_answered_early() -> None:
    """The window behind the exit is still full when the chain's output comes again."""
    batches, stay = OpenBatches(["a"], wait_s=2.0), part(torch.arange(2), [False, False])
    batches.sent(1, 10, 0.0)
    batches.came(1, 0, stay, 0.1)
    assert batches.late(2.0)[0].degraded
    assert batches.came(1, 1, part(torch.arange(2)), 9.0) == []
    for position, at_s in ((2, 9.1), (3, 12.0)):
        batches.sent(position, position, at_s)
        batches.came(position, 0, stay, at_s)
        (answer,) = batches.came(position, 1, None, at_s)
        assert (answer.degraded, answer.error is None) == (
            (True, True) if position == 2 else (False, False)
        )
    assert not len(batches)


def test_an_exit_that_decides_otherwise_after_a_restart() -> None:
    batches = OpenBatches(["a", "b"])
    batches.sent(1, 10, 0.0)
    batches.came(1, 0, part(torch.arange(3), [True, False, False]), 0.1)
    (answer,) = batches.came(1, 1, part(torch.arange(3), [True, False, False]), 0.2)
    assert "let other samples leave" in str(answer.error)
    assert batches.came(1, 2, part(torch.arange(2)), 0.3) == []
    assert not len(batches)


def test_what_later_batches_have_overtaken_is_sent_again_once() -> None:
    x = (torch.arange(3),)
    batches = OpenBatches()
    batches.sent(1, 10, 0.0, x)
    batches.sent(2, 20, 0.0, x)
    assert batches.lost(99.0) is None, "the chain may be slow"
    assert len(batches.came(2, 0, part(x[0]), 1.0)) == 1
    assert batches.lost(11.9) is None
    assert batches.wait_s(11.9) < 0.2
    assert batches.lost(12.1) == (10, x, False)
    batches.sent(3, 10, 12.1, x)
    assert batches.lost(99.0) is None
    assert (len(batches), batches.ids) == (1, [10])
    batches.sent(4, 30, 13.0, x)
    assert len(batches.came(4, 0, part(x[0]), 13.1)) == 1
    assert batches.lost(99.0) is None, "not a third time"
    (answer,) = batches.came(1, 0, part(x[0]), 14.0)
    assert answer.id == 10
    assert (len(batches), batches.ids) == (0, [])
    assert batches.came(3, 0, part(x[0]), 14.1) == [], "the first answer counts"
