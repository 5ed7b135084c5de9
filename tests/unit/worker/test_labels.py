"""The tail's own labels: of batches in any order, and never of other samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.core.losses import ChainLoss
from dni_runtime.data import DataSource, open_data
from dni_runtime.errors import DataError
from dni_runtime.link import Batch
from dni_runtime.packing import no_labels
from dni_runtime.spec import CheckpointSpec, Choice, DataSpec, HeadRole
from dni_runtime.wire import Part
from dni_runtime.worker.labels import Labels
from dni_runtime.worker.stream import Stream
from tests.specs import float32, int64

DATA = DataSpec.model_validate(
    {"labels": "tail", "batch_size": 64, "train_limit": 200, "validation": 100, "eval_limit": 50}
)

LOSS = ChainLoss(
    Choice(name="CrossEntropyLoss", args={"weight": [1.0, 2.0] * 5}), float32(10), int64()
)


def source(half: Any = None, seed: int = 1, **settings: Any) -> DataSource:
    spec = DATA.model_copy(update=settings)
    return open_data(spec.of_labels if half == "labels" else spec, Path(), seed=seed, half=half)


def sent(
    data: DataSource, micro_batches: int = 1, spec: DataSpec = DATA, loss: ChainLoss | None = None
) -> list[Batch]:
    """What the head sends."""
    role = HeadRole(
        samples=(float32(1, 8, 8),),
        data=spec,
        epochs=2,
        steps=None,
        eval_every=1,
        checkpoint=CheckpointSpec(),
        micro_batches=micro_batches,
    )
    return [
        Batch(id, item.epoch, item.mode, (), item.y_BY, item.part, (), item.rows)
        for id, item in enumerate(Stream(data, role, loss=loss), start=1)
        if item.y_BY is not None
    ]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_each_batch_gets_its_labels(micro_batches: int) -> None:
    labels = Labels(source("labels"), LOSS)
    with_labels = sent(source(), micro_batches, loss=LOSS)
    without = sent(source("samples"), micro_batches)
    assert len(without) == 2 * (4 * micro_batches + 1) + 1
    for wanted, batch in zip(with_labels, without, strict=True):
        assert batch.y.shape == (len(wanted.y), 0)
        complete = labels.complete(batch)
        assert torch.equal(complete.y, wanted.y)
        assert complete.part == wanted.part
    weighted = [one.part for one in with_labels if one.part is not None and one.part.shares]
    assert bool(weighted) == (micro_batches > 1)  # a part may have its share by chance
    shuffled = torch.randperm(len(without), generator=torch.Generator().manual_seed(1)).tolist()
    for number in shuffled:  # after restarts, and where batches were left out
        assert torch.equal(labels.complete(without[number]).y, with_labels[number].y)
    labels.close()


def test_those_that_follow_are_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own = source("labels")
    begun: list[tuple[str, int, int]] = []
    real = own.batches
    monkeypatch.setattr(own, "batches", lambda *at: begun.append(at) or real(*at))
    labels = Labels(own, LOSS)
    for batch in sent(source("samples")):
        labels.complete(batch)
    assert begun == [("train", 1, 0), ("eval", 1, 0), ("train", 2, 0), ("eval", 2, 0),
                     ("test", 2, 0)]  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"train_limit": 199}, "the head uses 199 training samples, but there are labels of 200"),
        ({"validation": 90}, "the head uses 90 evaluation samples, but there are labels of 100"),
        ({"eval_limit": 49}, "the head uses 49 test samples, but there are labels of 50"),
        ({"seed": 2}, "batch 0 of 'train' .* has other samples at the head than here"),
        ({"shuffle": False}, "batch 0 of 'train' .* has other samples"),
        ({"batch_size": 32}, "batch 0 of 'train' .* has other samples"),
    ],
    ids=str,
)
def test_labels_of_other_samples_are_refused(theirs: dict[str, Any], said: str) -> None:
    """At the first batch, before anything is trained on it."""
    labels = Labels(source("labels"), LOSS)
    with pytest.raises(DataError, match=said):
        labels.complete(sent(source("samples", **theirs))[0])


def test_a_batch_of_another_size_is_refused() -> None:
    labels, first = Labels(source("labels"), LOSS), sent(source("samples"))[0]
    with pytest.raises(DataError, match="batch 0 of 'train' has 64 samples"):
        labels.complete(replace(first, y=no_labels(65)))
    with pytest.raises(DataError, match="batch 0 of 'train' has 80 samples, but 64 labels"):
        labels.complete(replace(first, y=no_labels(16), part=Part(0, 80)))
