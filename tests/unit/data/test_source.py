from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from dni_runtime.data import DataSource, describe, open_data
from dni_runtime.data.splits import MemorySplit
from dni_runtime.errors import DataError
from dni_runtime.spec import DataInfo, DataSpec
from tests.specs import float32, int64


def source(
    train: int = 10, evaluation: int = 7, *, seed: int = 3, classes: int = 1000, **keywords: object
) -> DataSource:
    """Samples that are their own numbers, as are their labels if there are as many classes."""
    spec = DataSpec.model_validate({"batch_size": 4, **keywords})
    info = DataInfo(sample=float32(1), label=int64())
    splits = [
        MemorySplit(torch.arange(n, dtype=torch.float32).unsqueeze(1), torch.arange(n) % classes)
        for n in (train, evaluation)
    ]
    return DataSource(info, *splits, spec, seed=seed)


def labels(batches: object) -> list[list[int]]:
    return [y.tolist() for _, y in batches]  # type: ignore[attr-defined]


def test_an_epoch_has_every_sample_once_and_pairs_stay_together() -> None:
    batches = list(source().train_batches(0))
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(10))
    for x, y in batches:
        assert x.squeeze(1).tolist() == y.tolist()


@pytest.mark.parametrize("start", [0, 1, 2, 3, 9])
def test_start_skips_batches_and_changes_nothing_else(start: int) -> None:
    assert labels(source().train_batches(5, start)) == labels(source().train_batches(5))[start:]


def test_order_depends_on_seed_and_epoch_only() -> None:
    one = source()
    first = labels(one.train_batches(0))
    assert labels(one.train_batches(1)) != first
    torch.manual_seed(99)
    assert labels(one.train_batches(0)) == first
    assert labels(source(seed=4).train_batches(0)) != first
    assert labels(source(seed=2**63 - 1).train_batches(0)) != first


def test_without_shuffle_the_order_is_the_files() -> None:
    assert labels(source(shuffle=False).train_batches(7)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("samples", "drop_last", "sizes"),
    [
        (8, False, [4, 4]),
        (9, False, [4, 4]),  # a single sample cannot be batch-normalised
        (10, False, [4, 4, 2]),
        (10, True, [4, 4]),
        (4, True, [4]),
        (2, False, [2]),
    ],
)
def test_last_batch(samples: int, drop_last: bool, sizes: list[int]) -> None:
    one = source(samples, drop_last=drop_last)
    assert [len(y) for _, y in one.train_batches(0)] == sizes
    assert one.train_batch_count == len(sizes)


def test_a_dropped_single_sample_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dni_runtime.data"):
        one = source(9)
        list(one.train_batches(0))
        list(one.train_batches(1))
    assert [r.getMessage() for r in caplog.records] == [
        "data set digits: the last of 9 training samples is left out of each epoch: "
        "a batch of one sample cannot be batch-normalised"
    ]


def test_batches_of_one_by_choice_stay() -> None:
    one = source(3, batch_size=1)
    assert one.train_batch_count == len(list(one.train_batches(0))) == 3


@pytest.mark.parametrize(
    ("samples", "keywords"), [(3, {"drop_last": True}), (1, {}), (10, {"train_limit": 1})]
)
def test_less_than_one_batch_is_an_error(samples: int, keywords: dict[str, object]) -> None:
    hint = "drop_last: false" if keywords.get("drop_last") else "left out.*data.batch_size: 1"
    with pytest.raises(DataError, match=rf"do not fill one batch of 4.*\n.*{hint}"):
        source(samples, **keywords)


def test_no_training_samples_are_an_error() -> None:
    with pytest.raises(DataError, match="has no training samples"):
        source(0)


def test_too_few_samples_show_before_anything_is_loaded() -> None:
    with pytest.raises(DataError, match="1437 training samples do not fill one batch of 2000"):
        describe(DataSpec(batch_size=2000, drop_last=True), Path())


def test_limits() -> None:
    one = source(train_limit=6, eval_limit=3, shuffle=False)
    assert (one.info.train_samples, one.info.eval_samples) == (6, 3)
    assert sorted(torch.cat([y for _, y in one.train_batches(0)]).tolist()) == list(range(6))
    assert labels(one.eval_batches()) == [[0, 1, 2]]
    assert source(train_limit=600).info.train_samples == 10


def test_evaluation_reads_all_in_order() -> None:
    one = source(evaluation=7, eval_batch_size=3)
    assert labels(one.eval_batches()) == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(list(source(evaluation=17).eval_batches())) == 2  # four training batches each
    assert list(source(evaluation=0).eval_batches()) == []


@settings(deadline=None)
@given(
    samples=st.integers(2, 200),
    classes=st.integers(1, 7),
    validation=st.none() | st.integers(1, 60),
    limits=st.tuples(st.none() | st.integers(2, 200), st.none() | st.integers(1, 60)),
    seed=st.integers(0, 2**63 - 1),
)
def test_samples_that_are_not_all_used_are_drawn(
    samples, classes, validation, limits, seed
) -> None:
    held = validation or 0
    assume(samples - held >= 2)
    keywords = {"validation": validation, "train_limit": limits[0], "eval_limit": limits[1]}
    keywords |= {"batch_size": 1, "classes": classes, "seed": seed}
    one = source(samples, 60, **keywords)

    def read(batches: object) -> list[int]:
        return [int(x) for x_B, _ in batches for x in x_B]  # type: ignore[attr-defined]

    train, evaluated, tested = (read(one.batches(name, 1, 0)) for name in ("train", "eval", "test"))
    assert len({*train}) == len(train) == min(samples - held, limits[0] or samples)
    assert evaluated == sorted(evaluated)
    assert len(evaluated) == (held or min(60, limits[1] or 60))
    assert len(tested) == (min(60, limits[1] or 60) if validation else 0)
    if validation:
        assert not {*train} & {*evaluated}
    for numbers, among in ((evaluated, samples if validation else 60), (tested, 60)):
        for number in range(classes if numbers else 0):
            share = len(range(number, among, classes)) * len(numbers) / among
            assert abs(sum(n % classes == number for n in numbers) - share) < 1
    again = source(samples, 60, **keywords)
    assert (read(again.eval_batches()), read(again.train_batches(1))) == (evaluated, train)
    alone = {"train": train, "eval": evaluated, "test": tested}
    assert one.one_class({}) == [name for name, some in alone.items() if classes == 1 < len(some)]


def test_another_seed_draws_other_samples() -> None:
    drawn = [source(1000, classes=5, validation=20, seed=seed) for seed in (1, 2)]
    first, second = ([x.tolist() for x, _ in one.eval_batches()] for one in drawn)
    assert first != second


@settings(deadline=None)
@given(
    samples=st.integers(2, 120),
    tested=st.integers(0, 20),
    validation=st.integers(1, 60) | st.floats(0.01, 0.9),
    limit=st.none() | st.integers(2, 120),
    streams=st.booleans(),
    epoch=st.integers(0, 9),
)
def test_without_shuffle_the_last_training_samples_are_held_out(
    samples, tested, validation, limit, streams, epoch
) -> None:
    keywords = {"batch_size": 1, "eval_batch_size": 3, "train_limit": limit, "streams": streams}
    keywords["shuffle"] = False
    held = validation if isinstance(validation, int) else max(int(samples * validation), 1)
    assume(held < samples)
    one = source(samples, tested, validation=validation, **keywords)
    left = min(samples - held, limit or samples)
    assert one.has_test == (tested > 0)
    assert (one.info.train_samples, one.info.eval_samples) == (left, held)
    assert one.info.test_samples == (tested or None)
    train = [y for (y,) in labels(one.train_batches(epoch))]
    assert sorted(train) == list(range(left))

    def read(batches: object) -> list[int]:
        found = labels(batches)
        ordered = zip(*found, strict=True) if streams else found
        return [y for row in ordered for y in row]

    rows = min(held, 3) if streams else 1
    assert read(one.eval_batches()) == list(range(samples - held, samples - held % rows))
    rows = min(tested, 3) or 1 if streams else 1
    assert read(one.test_batches()) == list(range(tested - tested % rows))


def test_without_validation_there_is_no_test_set() -> None:
    one = source()
    assert not one.has_test
    assert one.info.test_samples is None
    assert list(one.test_batches()) == []


@pytest.mark.parametrize("validation", [0, -1, 1.0, 0.0, 1.5, True, "some", [1]])
def test_a_validation_part_is_a_number_or_a_share(validation: object) -> None:
    with pytest.raises(ValidationError, match="neither a number of samples nor a share below 1"):
        DataSpec.model_validate({"validation": validation})


@pytest.mark.parametrize("validation", [10, 11])
def test_a_validation_part_that_leaves_nothing(validation: int) -> None:
    with pytest.raises(DataError, match=rf"{validation} of 10 training samples: none.*\n.*valid"):
        source(10, validation=validation)
    spec = DataSpec(validation=1500)
    with pytest.raises(DataError, match="1500 of 1437 training samples"):
        describe(spec, Path())
    assert describe(DataSpec(validation=0.25), Path()).eval_samples == 359


@settings(deadline=None)
@given(
    samples=st.integers(1, 200),
    rows=st.integers(1, 9),
    eval_rows=st.integers(1, 9),
    epoch=st.integers(0, 99),
    data=st.data(),
)
def test_streams_go_on_from_batch_to_batch(samples, rows, eval_rows, epoch, data) -> None:
    assume(samples >= rows)
    keywords = {"streams": True, "batch_size": rows, "eval_batch_size": eval_rows}
    one = source(samples, samples, **keywords)
    batches = labels(one.train_batches(epoch))
    length = samples // rows
    assert one.train_batch_count == length
    assert batches == [[b * length + k for b in range(rows)] for k in range(length)]
    start = data.draw(st.integers(0, length))
    assert labels(one.train_batches(epoch, start)) == batches[start:]
    streams = list(zip(*labels(one.eval_batches()), strict=True))
    assert len(streams) == min(eval_rows, samples)
    read = [number for stream in streams for number in stream]
    assert read == list(range(len(read)))
    assert samples - len(read) < len(streams)


def test_streams_are_not_shuffled() -> None:
    with pytest.raises(ValidationError, match="streams keep the data's order"):
        DataSpec(streams=True, shuffle=True)
    spec = DataSpec(streams=True, shuffle=False)
    assert DataSpec(streams=True) == spec == DataSpec.model_validate_json(spec.model_dump_json())
    with pytest.raises(DataError, match=r"3 training samples .* of 4 \(.*streams: true\)"):
        source(3, streams=True)


@pytest.mark.parametrize("keywords", [{}, {"normalize": False}, {"shuffle": False}])
def test_batches_are_new_tensors(keywords: dict[str, object]) -> None:
    spec = DataSpec.model_validate({"batch_size": 100, "flatten": True, **keywords})
    one = open_data(spec, Path(), seed=0)

    def everything() -> list[Tensor]:
        both = (*one.train_batches(0), *one.eval_batches())
        return [part for batch in both for part in batch]

    before = everything()
    kept = [part.clone() for part in before]
    for part in before:
        part.zero_()
    for part, expected in zip(everything(), kept, strict=True):
        assert torch.equal(part, expected)
