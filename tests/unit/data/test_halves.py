"""Samples and labels with different owners."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dni_runtime.data import describe, locate, open_data
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataSpec
from tests.specs import float32, int64

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(30, 3)).astype(np.float32), RNG.integers(0, 4, 30)
TWO_OWNERS = """
import torch
from torch.utils.data import Dataset

class Scans(Dataset):
    def __init__(self, train, path):
        self.count = 10 if train else 3
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.full((2, 3), float(index)), torch.tensor([index])

class Outcomes(Dataset):
    num_classes = 2
    def __init__(self, train, path, late=0):
        self.count = (10 if train else 3) - late
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return index % 2
"""


def write(folder: Path, labels: int = 24) -> None:
    np.savez(folder / "x.npz", x_train=X[:24], x_eval=X[24:])
    np.savez(folder / "y.npz", y_train=np.resize(Y[:24], labels), y_eval=Y[24:])
    np.savez(folder / "both.npz", x_train=X[:24], x_eval=X[24:], y_train=Y[:24], y_eval=Y[24:])


def spec_of(**keywords: Any) -> DataSpec:
    return DataSpec.model_validate({"dataset": "npz", "batch_size": 5, **keywords})


def sequence(source: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    splits = ("train", 1), ("train", 2), ("eval", 1), ("test", 1)
    return list(itertools.chain(*(source.batches(split, epoch, 0) for split, epoch in splits)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shuffle": False, "drop_last": True},
        {"validation": 0.25, "train_limit": 16, "eval_batch_size": 4, "shuffle": False},
        {"streams": True, "validation": 6},
    ],
    ids=str,
)
def test_halves_have_the_batches_of_the_whole(tmp_path: Path, settings: dict[str, Any]) -> None:
    write(tmp_path)
    whole = sequence(open_data(spec_of(path="both.npz", **settings), tmp_path, seed=7))
    spec = spec_of(path="x.npz", labels={"path": str(tmp_path / "y.npz")}, **settings)
    assert locate(spec, tmp_path) == tmp_path / "x.npz"
    joined = open_data(spec, tmp_path, seed=7)
    head = open_data(spec.of_head, tmp_path, seed=7, half="samples")
    tail = open_data(spec.of_labels, tmp_path, seed=7, half="labels")
    assert head.has_test == tail.has_test == ("validation" in settings)
    assert head.train_batch_count == tail.train_batch_count == joined.train_batch_count
    rows = zip(whole, sequence(joined), sequence(head), sequence(tail), strict=True)
    for (x, y), (x_joined, y_joined), (x_head, y_head), (x_tail, y_tail) in rows:
        for found, wanted in ((x_joined, x), (x_head, x), (y_joined, y), (y_tail, y)):
            assert torch.equal(found, wanted)
        assert y_head.shape == x_tail.shape == (len(x), 0)


def test_two_owners_draw_the_same_samples(tmp_path: Path) -> None:
    write(tmp_path)
    spec = spec_of(path="x.npz", labels={"path": str(tmp_path / "y.npz")},
                   validation=7, train_limit=9, eval_limit=4)  # fmt: skip
    joined = open_data(spec, tmp_path, seed=7)
    head = open_data(spec.of_head, tmp_path, seed=7, half="samples")
    tail = open_data(spec.of_labels, tmp_path, seed=7, half="labels")
    rows = zip(sequence(joined), sequence(head), sequence(tail), strict=True)
    for number, ((x, y), (x_head, _), (_, y_tail)) in enumerate(rows):
        assert torch.equal(x, x_head), number
        assert torch.equal(y, y_tail), number
    assert all(head.rows(one, 1, 0) == tail.rows(one, 1, 0) for one in ("train", "eval", "test"))


def test_both_halves_of_one_data_set() -> None:
    some = {"batch_size": 100, "validation": 300, "train_limit": 900}
    spec = DataSpec.model_validate({"dataset": "digits", "labels": "tail", **some})
    whole = open_data(DataSpec.model_validate(some), Path(), seed=1)
    head = open_data(spec.of_head, Path(), seed=1, half="samples")
    tail = open_data(spec.of_labels, Path(), seed=1, half="labels")
    wanted = whole.batches("train", 3, 5)
    found = zip(head.batches("train", 3, 5), tail.batches("train", 3, 5), strict=True)
    for (x, y), ((x_head, y_head), (_, y_tail)) in zip(wanted, found, strict=True):
        assert torch.equal(x_head, x)
        assert torch.equal(y_tail, y)
        assert y_head.numel() == 0


def test_both_halves_of_a_text_are_the_same_windows(tmp_path: Path) -> None:
    """Where its first window begins is drawn for each epoch."""
    (tmp_path / "a.txt").write_text("".join(map(str, range(5000))))
    text = {"dataset": "text", "path": "a.txt", "args": {"context": 8}, "batch_size": 9}
    spec = DataSpec.model_validate({**text, "labels": {"path": str(tmp_path / "a.txt"),
                                                       "args": {"context": 8}}})  # fmt: skip
    whole = open_data(DataSpec.model_validate(text), tmp_path, seed=1)
    both = open_data(spec, tmp_path, seed=1)
    pairs = zip(whole.train_batches(2), both.train_batches(2), strict=True)
    assert all(torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in pairs)


def test_a_description_has_both(tmp_path: Path) -> None:
    write(tmp_path)
    info = describe(spec_of(path="x.npz", labels={"path": str(tmp_path / "y.npz")}), tmp_path)
    assert info.sample == float32(3)
    assert info.label == int64()
    assert (info.train_samples, info.eval_samples) == (24, 6)


def test_another_number_of_labels_is_refused(tmp_path: Path) -> None:
    write(tmp_path, labels=23)
    spec = spec_of(path="x.npz", labels={"path": str(tmp_path / "y.npz")})
    with pytest.raises(DataError, match=r"24 training samples in 'npz', but 23 labels in 'npz'"):
        describe(spec, tmp_path)


def test_a_file_without_its_half(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match="there is no array 'x_train', only y_train, y_eval"):
        describe(spec_of(path="y.npz", labels={"path": str(tmp_path / "y.npz")}), tmp_path)
    with pytest.raises(DataError, match="there is no array 'y_train', only x_train, x_eval"):
        describe(spec_of(path="x.npz", labels={"path": str(tmp_path / "x.npz")}), tmp_path)


def test_classes_of_two_owners(user_module: Any, tmp_path: Path) -> None:
    name = user_module(TWO_OWNERS)
    own = {"dataset": f"{name}:Outcomes", "path": "b"}
    spec = spec_of(dataset=f"{name}:Scans", path="a", labels=own, shuffle=False)
    info = describe(spec, tmp_path)
    assert [str(one) for one in info.samples] == ["float32[B x 2 x 3]", "int64[B x 1]"]
    assert (str(info.label), info.classes) == ("int64[B]", 2)
    head = open_data(spec.of_head, tmp_path, seed=0, half="samples")
    tail = open_data(spec.of_labels, tmp_path, seed=0, half="labels")
    (x, numbers), nothing = next(head.train_batches(1))
    assert (x[:, 0, 0].tolist(), numbers.flatten().tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert nothing.shape == (5, 0)
    assert next(tail.train_batches(1))[1].tolist() == [0, 1, 0, 1, 0]
    late = spec_of(dataset=f"{name}:Scans", path="a", labels=own | {"args": {"late": 1}})
    with pytest.raises(DataError, match=r"10 training samples in .* but 9 labels in .*Outcomes"):
        describe(late, tmp_path)


def test_rows_say_which_samples_a_batch_has() -> None:
    def source(seed: int = 1, **settings: Any) -> Any:
        return open_data(DataSpec(batch_size=100, **settings), Path(), seed=seed)

    first = source().rows("train", 1, 0)
    assert first is not None
    assert first[:2] == ("train", 0)
    assert first[3:] == (1437, 360, 0)
    assert source().rows("train", 1, 0) == first
    for other in (source(seed=2), source(shuffle=False), source(train_limit=1400)):
        assert other.rows("train", 1, 0).order != first.order
    assert source().rows("train", 2, 0) != first
    assert source().rows("train", 1, 15) is None
    assert source(validation=37).rows("test", 1, 0)[3:] == (1400, 37, 360)


def test_what_labels_may_be() -> None:
    assert spec_of(labels="head") == spec_of()
    assert not spec_of(labels="tail").splits
    assert spec_of(labels={"path": "y"}).labels.dataset == "npz"  # type: ignore[union-attr]
    again = spec_of(labels={"path": "y"})
    assert DataSpec.model_validate(again.model_dump()) == again
    with pytest.raises(ValueError, match="labels are at 'head' or 'tail'"):
        spec_of(labels="middle")
    assert again.of_head.labels.path is None  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="unknown data set 'nmist'"):
        describe(spec_of(dataset="digits", labels={"dataset": "nmist"}), Path())
