"""The head's stream: order, markers, and going on from any position."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from dni_runtime.data import open_data
from dni_runtime.spec import CheckpointSpec, DataSpec, HeadRole
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker.stream import Item, Position, Stream
from tests.specs import float32

DATA = DataSpec(dataset="digits", flatten=True, batch_size=64, train_limit=200, eval_limit=100)


TESTED = DATA.model_copy(update={"validation": 300, "eval_batch_size": 90})


def role(
    epochs: int = 2,
    steps: int | None = None,
    eval_every: int = 1,
    every_steps: int | None = None,
    micro_batches: int = 1,
    data: DataSpec = DATA,
) -> HeadRole:
    return HeadRole(
        samples=(float32(1, 8, 8),),
        data=data,
        epochs=epochs,
        steps=steps,
        eval_every=eval_every,
        checkpoint=CheckpointSpec(every_steps=every_steps),
        micro_batches=micro_batches,
    )


def run(given: HeadRole, start: Position | None = None) -> list[Item]:
    source = open_data(given.data, Path(), seed=1)
    return list(Stream(source, given) if start is None else Stream(source, given, start))


def shape(stream: list[Item]) -> list[str]:
    words = []
    for item in stream:
        if item.x is None:
            words.append("|".join(flag.name or "" for flag in Mark if flag in item.mark))
        else:
            words.append("train" if item.mode is Mode.TRAIN else "eval")
    return [f"{len(list(group))} {word}" for word, group in itertools.groupby(words)]


def test_two_epochs() -> None:
    assert shape(run(role())) == [
        *("4 train", "1 EPOCH|CHECKPOINT", "1 eval", "1 EVAL"),
        *("4 train", "1 EPOCH", "1 eval", "1 EVAL", "1 CHECKPOINT|END"),
    ]


def test_steps_end_within_an_epoch() -> None:
    stream = run(role(epochs=9, steps=6, eval_every=0))
    assert shape(stream) == [
        *("4 train", "1 EPOCH|CHECKPOINT", "2 train", "1 EPOCH", "1 CHECKPOINT|END")
    ]
    assert stream[-1].position.step == 6


def test_checkpoints_between_batches() -> None:
    assert shape(run(role(epochs=1, eval_every=0, every_steps=3))) == [
        *("3 train", "1 CHECKPOINT", "1 train", "1 EPOCH", "1 CHECKPOINT|END")
    ]


@pytest.mark.parametrize("data", [DATA, TESTED])
def test_an_early_end(data: DataSpec) -> None:
    """No training batch follows, but the test set and the end."""
    source = open_data(data, Path(), seed=1)
    stream = Stream(source, role(epochs=9, data=data))
    seen = [next(stream) for _ in range(10)]
    stream.end()
    rest = list(stream)
    tests = ["2 eval", "1 TEST"] if data is TESTED else []
    assert shape(rest) == [*tests, "1 CHECKPOINT|END"]
    assert rest[-1].position.step == seen[-1].position.step
    for number, item in enumerate(rest[:-1]):
        again = list(Stream(source, role(epochs=9, data=data), item.position))
        assert shape(again) == shape(rest[number + 1 :])


def test_an_early_end_after_any_item() -> None:
    """A restarted head goes on with what the former process has sent."""
    given = role(epochs=9, every_steps=2, micro_batches=2)
    source = open_data(given.data, Path(), seed=1)
    whole = list(itertools.islice(Stream(source, given), 40))
    for number, item in enumerate(whole):
        if item.position.part or item.position.phase != "train":
            continue  # where no end is put into the stream
        stream, again = Stream(source, given), Stream(source, given, item.position)
        for _ in range(number + 1):
            next(stream)
        stream.end()
        again.end()
        assert shape(list(stream)) == shape(list(again)) == ["1 CHECKPOINT|END"]


def test_replicas_are_equal_before_what_needs_it() -> None:
    """SYNC alone may leave them different, so a point with more follows before each of those."""
    given = role(epochs=1, every_steps=3, data=TESTED).model_copy(update={"sync_steps": 2})
    stream = [word for word in shape(run(given)) if word.split()[1] not in ("eval", "EVAL")]
    batches = open_data(TESTED, Path(), seed=1).train_batch_count
    assert batches == 4
    assert stream == [
        *("2 train", "1 SYNC", "1 train", "1 CHECKPOINT|SYNC", "1 train"),
        *("1 EPOCH|SYNC", "1 TEST", "1 CHECKPOINT|END"),
    ]
    assert [item.position.synced for item in run(given) if Mark.SYNC in item.mark] == [0, 3, 4]
    early = Stream(open_data(TESTED, Path(), seed=1), given)
    seen = [next(early) for _ in range(3)]
    assert seen[-1].mark == Mark.SYNC
    early.end()
    assert shape(list(early)) == ["1 CHECKPOINT|SYNC", "2 eval", "1 TEST", "1 CHECKPOINT|END"]


def test_a_shared_stream_reads_its_own_batches_alone() -> None:
    """All items keep their places, whoever reads them."""
    given, whole = role(data=TESTED), run(role(data=TESTED))
    stream = Stream(open_data(TESTED, Path(), seed=1), given, shared=True)
    for number, theirs in enumerate(whole):
        stream.takes = bool(number % 3)
        ours = next(stream)
        assert (ours.position, ours.mark, ours.mode) == (theirs.position, theirs.mark, theirs.mode)
        read = theirs.x is not None and stream.takes
        assert (ours.x is not None, ours.y_BY is not None) == (read, read)
        if ours.x is not None and theirs.x is not None:
            assert torch.equal(torch.as_tensor(ours.x), torch.as_tensor(theirs.x))


def test_a_checkpoint_before_each_evaluation() -> None:
    given = role(epochs=3, eval_every=2).model_copy(update={"selects": True})
    markers = [item.mark for item in run(given) if item.x is None]
    assert [Mark.CHECKPOINT in mark for mark in markers if Mark.EPOCH in mark] == [True] * 3


def test_batches_in_parts() -> None:
    whole, cut = run(role(epochs=1)), run(role(epochs=1, micro_batches=4))
    assert shape(cut)[0] == "16 train"
    parts = [item for item in cut if item.part is not None]
    assert [item.part.samples for item in parts if item.part] == [64] * 12 + [8] * 4
    batches = [item.x for item in whole if item.mode is Mode.TRAIN and item.x is not None]
    assert torch.equal(torch.cat([i.x for i in parts if i.x is not None]), torch.cat(batches))
    steps = [item.position.step for item in parts]
    assert steps == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_the_test_set_comes_once_at_the_end() -> None:
    stream = run(role(data=TESTED))
    assert shape(stream) == [
        *("4 train", "1 EPOCH|CHECKPOINT", "4 eval", "1 EVAL"),
        *("4 train", "1 EPOCH", "4 eval", "1 EVAL", "2 eval", "1 TEST", "1 CHECKPOINT|END"),
    ]
    digits = open_data(DATA, Path(), seed=1)
    tested = torch.cat([item.y_BY for item in stream[-4:-2] if item.y_BY is not None])
    assert torch.equal(tested, torch.cat([y for _, y in digits.eval_batches()]))
    within = shape(run(role(epochs=9, steps=5, eval_every=9, data=TESTED)))
    assert within[-4:] == ["1 EVAL", "2 eval", "1 TEST", "1 CHECKPOINT|END"]
    assert "1 TEST" not in shape(run(role(eval_every=0, data=TESTED)))


@pytest.mark.parametrize(
    "given",
    [
        role(every_steps=2),
        role(epochs=3, steps=7),
        role(eval_every=2),
        role(data=TESTED),
        role(every_steps=2, micro_batches=4),
    ],
)
def test_goes_on_exactly_after_any_item(given: HeadRole) -> None:
    whole = run(given)
    for number, item in enumerate(whole[:-1]):
        rest = run(given, item.position)
        expected = whole[number + 1 :]
        assert [one.position for one in rest] == [one.position for one in expected]
        for ours, theirs in zip(rest, expected, strict=True):
            assert (ours.mode, ours.mark, ours.epoch) == (theirs.mode, theirs.mark, theirs.epoch)
            if ours.x is not None and theirs.x is not None:
                assert torch.equal(ours.x, theirs.x)
