"""The head's end of the stream: numbers, markers that are asked for, what has to come again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from dni_runtime.link import Batch, Marker, OutputLink
from dni_runtime.run.documents.requests import MarkRequest
from dni_runtime.run.lines import LineReader
from dni_runtime.run.rundir import RunDir
from dni_runtime.wire import Mark
from dni_runtime.worker.head import Head
from dni_runtime.worker.ledger import Counts, Ledger, ModuleProgress
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.stream import Item, Position
from tests.conftest import MakeSpec
from tests.integration.served import Listed

X, Y = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
RETAIN = 2


@pytest.fixture
def output(make_spec: MakeSpec) -> Iterator[OutputLink]:
    with closing(OutputLink(make_spec(retain=RETAIN), run="run")) as link:
        yield link


def at(batch: int) -> Position:
    return Position(batch=batch, step=batch)


def head(
    run: RunDir,
    make_spec: MakeSpec,
    output: OutputLink | None,
    start: Start,
    ledger: Ledger | None = None,
) -> Head:
    """A head whose stream is nothing but batches."""
    if ledger is None:
        ledger = Ledger(run.ledger("stem"), ModuleProgress())
        ledger.close()
    first = start.position.batch + 1
    stream = (Item(1, at(n), x=X, y_BY=Y) for n in range(first, 100))
    metrics = MetricsWriter(run, make_spec(), 1)
    return Head(Listed(stream), start=start, ledger=ledger, metrics=metrics, output=output)


def test_a_marker_that_is_asked_for_comes_next(run: RunDir, make_spec: MakeSpec) -> None:
    made = head(run, make_spec, None, Start())
    assert isinstance(made.next(), Batch)
    made.want(Mark.CHECKPOINT)
    made.want(Mark.STOP)
    assert made.next() == Marker(2, 0, Mark.CHECKPOINT | Mark.STOP)
    assert made.position == at(1)
    batch = made.next()
    assert isinstance(batch, Batch)
    assert (batch.id, made.position) == (3, at(2))
    (written,) = LineReader(run.marks("stem"), MarkRequest.parse).new()
    assert written == MarkRequest(id=2, mark=int(Mark.CHECKPOINT | Mark.STOP))


def test_a_marker_that_cannot_be_noted_travels(
    run: RunDir, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture
) -> None:
    made = head(run, make_spec, None, Start())
    run.marks("stem").mkdir()  # what cannot be written to
    made.want(Mark.CHECKPOINT)
    assert made.next() == Marker(1, 0, Mark.CHECKPOINT)
    assert "will not do at 1 what was requested" in caplog.text


def test_a_restarted_head_repeats_its_stream(run: RunDir, make_spec: MakeSpec) -> None:
    """What it is asked for waits until ids come that nobody has had."""
    start = Start(cut=3, restarted=True, first_id=3, position=at(2))
    MarkRequest(id=4, mark=int(Mark.CHECKPOINT)).append(run.marks("stem"))
    with closing(Ledger(run.ledger("stem"), ModuleProgress(Counts(id=5)))) as ledger:
        made = head(run, make_spec, None, start, ledger)
        made.want(Mark.STOP)
        given = []
        for _ in range(5):
            item = made.next()
            assert item is not None
            given.append(item)
            ledger.processed(item.id)
    assert [one.id for one in given] == [3, 4, 5, 6, 7]
    marks = [one.mark if isinstance(one, Marker) else None for one in given]
    assert marks == [None, Mark.CHECKPOINT, None, None, Mark.STOP]


def test_it_remembers_what_it_may_have_to_send_again(
    run: RunDir, make_spec: MakeSpec, output: OutputLink
) -> None:
    made = head(run, make_spec, output, Start())
    for _ in range(4):
        batch = made.next()
        assert isinstance(batch, Batch)
        output.send_batch(batch, batch.xs[0])
    assert made.oldest() == (1, at(0))
    output.dismiss()  # acknowledges everything; some is kept for a neighbour that restarts
    assert made.oldest() == (3, at(2))


def test_without_a_neighbour_nothing_comes_again(run: RunDir, make_spec: MakeSpec) -> None:
    made = head(run, make_spec, None, Start())
    for _ in range(4):
        made.next()
    assert made.oldest() is None
