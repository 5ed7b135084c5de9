"""The best evaluation, its checkpoint, and when to stop."""

from __future__ import annotations

import errno
import math

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.run.cuts import best_cut
from dni_runtime.run.documents.evaluations import Best
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import DataInfo, SelectionRole
from dni_runtime.worker.evaluations import Selection
from tests.specs import float32, int64, linear, specs_of

CHAIN = "name: small\nmetrics: [accuracy]\n%s\n" + linear(6, 5, 3)
INFO = DataInfo(sample=float32(6), label=int64(), classes=3)


def selection(run: RunDir, cut: int = 0, rises: bool = True, min_delta: float = 0.0) -> Selection:
    role = SelectionRole(metric="m", rises=rises, patience=2, min_delta=min_delta)
    return Selection(run, role, "b", cut)


def walk(chosen: Selection, values: list[float], first: int = 1) -> list[bool]:
    ends = []
    for epoch, value in enumerate(values, start=first):
        chosen.checkpoint(10 * epoch)
        ends.append(chosen.evaluated({"loss": 0.0, "m": value}, epoch))
    return ends


@pytest.mark.parametrize(
    ("rises", "values", "best", "ends"),
    [
        (True, [0.5, 0.7, 0.6, 0.7], 20, [False, False, False, True]),
        (False, [0.5, 0.7, 0.4, 0.6], 30, [False, False, False, False]),
        (True, [math.nan, 0.1, math.inf], 20, [False, False, False]),
    ],
)
def test_the_best_and_when_to_stop(
    run: RunDir, rises: bool, values: list[float], best: int, ends: list[bool]
) -> None:
    assert best_cut(run) is None
    assert walk(selection(run, rises=rises), values) == ends
    assert best_cut(run) == best
    found = Best.load(run.best)
    assert found is not None
    assert (found.epoch, found.metric) == (best // 10, "m")


def test_a_small_gain_is_none(run: RunDir) -> None:
    assert walk(selection(run, min_delta=0.1), [0.5, 0.55, 0.59]) == [False, False, True]
    assert best_cut(run) == 10


def test_a_restarted_tail_goes_on(run: RunDir) -> None:
    walk(selection(run), [0.5, 0.4])
    assert walk(selection(run, cut=25), [0.45], first=3) == [True]
    assert best_cut(run) == 10


def test_an_evaluation_that_comes_again_is_counted_once(run: RunDir) -> None:
    """All modules go back to the checkpoint before it."""
    walk(selection(run), [0.5])
    assert walk(selection(run, cut=10), [0.5, 0.4]) == [False, False]
    assert walk(selection(run, cut=20), [0.4], first=2) == [False]
    assert walk(selection(run, cut=20), [0.4, 0.3], first=2) == [False, True]


def test_what_came_after_an_older_checkpoint_is_forgotten(run: RunDir) -> None:
    assert walk(selection(run), [0.5, 0.4, 0.3]) == [False, False, True]
    assert walk(selection(run, cut=15), [0.4, 0.3], first=2) == [False, True]
    assert best_cut(run) == 10


def test_patience_counts_from_the_start_where_nothing_is_good(run: RunDir) -> None:
    assert walk(selection(run), [math.nan]) == [False]
    assert best_cut(run) is None
    assert walk(selection(run, cut=15), [math.nan], first=2) == [True]


def test_a_full_disk_is_no_reason_to_stop(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, durable: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    chosen = selection(run)
    with monkeypatch.context() as patch:
        patch.setattr("dni_runtime.run.documents.base.write_json", full)
        assert walk(chosen, [0.5]) == [False]
    assert "No space left" in caplog.text
    assert walk(chosen, [0.4], first=2) == [False]
    assert best_cut(run) == 10


def test_a_tail_that_begins_at_a_snapshot(run: RunDir) -> None:
    """What is evaluated then are the weights of the checkpoint before it."""
    run.checkpoint(20, "b").parent.mkdir(parents=True)
    run.checkpoint(20, "b").with_suffix(".json").touch()
    selection(run, cut=23).evaluated({"m": 0.5}, 2)
    assert best_cut(run) == 20


def test_what_lies_behind_the_cut_does_not_count(run: RunDir) -> None:
    walk(selection(run), [0.5, 0.9])
    walk(selection(run, cut=15), [0.6], first=2)
    assert Best.load(run.best) == Best(metric="m", cut=20, epoch=2, value=0.6)


def test_a_record_without_a_finite_evaluation(run: RunDir) -> None:
    """It names no checkpoint."""
    Best(metric="m", worse=(10,)).write(run.best)
    assert best_cut(run) is None
    assert walk(selection(run, cut=10), [0.5], first=2) == [False]
    assert best_cut(run) == 20


def test_what_is_selected_by() -> None:
    def role(text: str) -> SelectionRole | None:
        tail = specs_of(CHAIN % text, INFO)[-1].tail
        assert tail is not None
        return tail.selection

    assert role("") is None
    first = role("selection: {}")
    assert first is not None
    assert (first.metric, first.rises, first.patience) == ("accuracy", True, None)
    loss = role("selection: {metric: loss, patience: 3}")
    assert loss is not None
    assert (loss.metric, loss.rises, loss.patience) == ("loss", False, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selection: {metric: acuracy}", "did you mean 'accuracy'"),
        ("selection: {}\neval_every: 0", "needs evaluations"),
        ("selection: {patience: 0}", "patience"),
    ],
)
def test_selections_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        specs_of(CHAIN % text, INFO)
    assert message in str(caught.value)
