"""Which batches a worker that predicts may have died of."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.worker.predictor import Suspicion


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trying"


def starts(file: Path, *batches: int) -> list[bool]:
    """Begin with these batches, after a restart; the worker dies of the last one, if any."""
    suspicion = Suspicion(file, restarted=True)
    return [suspicion.clears(id) for id in batches]


def test_a_batch_of_which_two_workers_died_is_not_computed_again(file: Path) -> None:
    assert Suspicion(file, restarted=False).clears(12)
    assert not file.exists()
    assert starts(file, 12) == starts(file, 12) == [True]
    assert starts(file, 12, 13) == [False, True]


@pytest.mark.parametrize("others", [(101, 102, 103), (101, 101, 101)])
def test_others_that_are_answered_before_it_do_not_hide_it(
    file: Path, others: tuple[int, ...]
) -> None:
    """They come by another link: another one after each restart, or the same one again."""
    for other in others[:2]:
        assert starts(file, other, 12) == [True, True]
    assert starts(file, others[2], 12, 104) == [True, False, True]
    assert starts(file, 12) == [False], "it may come again if the worker dies of another one"


def test_what_was_survived_may_be_computed_again(file: Path) -> None:
    for other in range(101, 106):
        assert starts(file, 12) == [True]
        assert starts(file, 12, other) == [True, True]


def test_two_that_kill_in_turn_are_both_found(file: Path) -> None:
    for id in (12, 13, 12, 13):
        assert starts(file, id) == [True]
    assert starts(file, 12, 13, 14) == [False, False, True]


def test_what_is_noted_is_bounded_and_forgotten(file: Path) -> None:
    for id in range(1, 100):
        starts(file, id)
    assert len(file.read_text().split()) == 2 * 16
    assert all(starts(file, *range(1000, 1101)))
    assert not file.exists()


@pytest.mark.parametrize("text", ["", "12", "12 2 7", "\xff 2", "a b"])
def test_a_file_that_cannot_be_read_is_no_suspicion(file: Path, text: str) -> None:
    file.write_text(text)
    assert starts(file, 12) == [True]
