"""Data sets as torch knows them: arguments of their own, rows as dicts, tuples and collated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils.data import DataLoader

from dni_runtime.data import DataSource, describe, locate, open_data, with_defaults
from dni_runtime.data.imports import import_target
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataSpec
from dni_runtime.spec.data import LabelsSpec
from tests.specs import float32, int64

SOURCE = """
import torch
from pathlib import Path
from torch.utils.data import Dataset, TensorDataset

class Folder(Dataset):
    '''As torchvision.datasets.ImageFolder: a folder of each class.'''

    def __init__(self, root, transform=None, target_transform=None):
        self.root, self.transform, self.target_transform = root, transform, target_transform
        self.classes = sorted(path.name for path in Path(root).iterdir())
        self.samples = [(path, number) for number, name in enumerate(self.classes)
                        for path in sorted((Path(root) / name).iterdir())]
        self.targets = [number for _, number in self.samples]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, y = self.samples[index]
        x = torch.tensor([float(word) for word in path.read_text().split()])
        x = x if self.transform is None else self.transform(x)
        return x, y if self.target_transform is None else self.target_transform(y)

class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return x * self.by

def picture(x):
    from PIL import Image
    return Image.new("RGB", (4, 4))

def plus(y):
    return y + 1

class Rows(Dataset):
    '''As a Hugging Face data set: rows are dicts of numbers, lists and texts.'''
    column_names = ["text", "mask", "ids", "label"]

    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        if isinstance(index, str):
            return [row[index] for row in self.rows]
        return self.rows[index]

def tokens(count, ragged=False, key="label", other=None):
    rows = []
    for n in range(count):
        length = 3 + n % 2 if ragged else 4
        row = {"text": f"row {n}", "mask": [1.0] * length, "ids": list(range(n, n + length))}
        rows.append({**row, key: n % 2, **(other or {})})
    return Rows(rows)

def pairs(count):
    return [({"ids": [n, n + 1], "text": "no"}, n % 2) for n in range(count)]

def tensors(count):
    n = torch.arange(count)
    return TensorDataset(n.float(), n.view(-1, 1) * 2, n % 3)

def pad(rows, length=None):
    length = length or max(len(row["ids"]) for row in rows)
    def padded(key):
        return torch.tensor([row[key] + [0] * (length - len(row[key])) for row in rows])
    return {"ids": padded("ids"), "mask": padded("mask"),
            "labels": torch.tensor([row["label"] for row in rows])}

def numbers(rows):
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}

def uneven(rows):
    batch = pad(rows)
    return {**batch, "mask": batch["mask"][:, : -1 if len(rows) > 1 else None]}

def tagged(rows):
    batch = pad(rows)
    return {**batch, "labels": batch["ids"] % 2}

def pad_to(length):
    return lambda rows: pad(rows, length)

def by_name(**ignored):
    return {"train": tensors(3), "test": tensors(2)}
"""


@pytest.fixture
def make(user_module: Any, tmp_path: Path) -> Any:
    name = user_module(SOURCE)

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: named(one) for key, one in value.items()}
        if isinstance(value, list):
            return [named(one) for one in value]
        return value.replace("NAME", name) if isinstance(value, str) else value

    def make(target: str, **keywords: Any) -> DataSpec:
        written = {"dataset": f"{name}:{target}", "batch_size": 4, "shuffle": False, **keywords}
        return with_defaults(DataSpec.model_validate(named(written)), tmp_path)

    return make


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for part, count in (("train", 6), ("val", 2)):
        for name, number in itertools.product(("cat", "dog"), range(count)):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(f"{number} {len(part)} {name == 'dog':d}")
    return tmp_path / "images"


FOLDERS = {"train": {"root": "images/train"}, "evaluation": {"root": "images/val"}}


def loader(dataset: Any, size: int = 4, **keywords: Any) -> list[Any]:
    """What torch's own loader returns."""
    return list(DataLoader(dataset, batch_size=size, **keywords))


def test_a_data_set_with_arguments_for_both(make: Any, images: Path, tmp_path: Path) -> None:
    spec = make("Folder", **FOLDERS)
    assert locate(spec, tmp_path) == images
    assert spec.train == {"root": "{path}/train"}  # the same in a container and on another host
    info = describe(spec, tmp_path)
    assert (info.sample, info.classes, info.train_samples, info.eval_samples) == (
        float32(3), 2, 12, 4,
    )  # fmt: skip
    moved = images.rename(tmp_path / "moved")
    source = open_data(spec.at(moved), tmp_path, seed=0)
    folder = import_target(spec.dataset, tmp_path, what="", location=())
    for part, batches in (("train", source.train_batches(1)), ("val", source.eval_batches())):
        for (x, y), (x_torch, y_torch) in zip(
            itertools.chain(batches), loader(folder(moved / part)), strict=True
        ):
            assert torch.equal(x, x_torch)
            assert torch.equal(y, y_torch)


def test_paths_in_arguments(make: Any, tmp_path: Path) -> None:
    both = {"train": {"img_dir": "a/x", "split": "train"}, "evaluation": {"img_dir": "a/y"}}
    spec = make("Folder", **both, args={"annotations_file": "a/z.csv", "profile": "a"})
    assert spec.path == str(tmp_path / "a")
    assert spec.train == {"img_dir": "{path}/x", "split": "train"}
    assert spec.evaluation == {"img_dir": "{path}/y"}
    assert spec.args == {"annotations_file": "{path}/z.csv", "profile": "a"}
    assert with_defaults(spec, tmp_path) == spec
    spec = make("Folder", path="a", train={"root": "x"}, evaluation={"root": "/elsewhere/y"})
    assert (spec.path, spec.train) == ("a", {"root": "{path}/x"})
    assert spec.evaluation == {"root": "/elsewhere/y"}  # as it is written
    spec = make("Folder", train={"root": "a"}, evaluation={"root": "a", "train": False})
    assert (spec.path, spec.train) == (str(tmp_path / "a"), {"root": "{path}"})
    (tmp_path / "linked").symlink_to("/tmp")
    spec = make("Folder", path="b", train={"root": "../linked/x"}, evaluation={"root": "y"})
    assert spec.train == {"root": str(tmp_path / "linked/x")}
    plain = DataSpec.model_validate({"dataset": "mine:Data", "path": "b", "args": {"root": "a"}})
    assert with_defaults(plain, tmp_path) == plain
    with pytest.raises(SpecError, match=r"/tmp.* and /elsewhere have no folder in common\n.*path"):
        make("Folder", train={"root": "a"}, evaluation={"root": "/elsewhere"})


def test_paths_do_not_start_where_the_user_happens_to_be(tmp_path: Path) -> None:
    args = {"root": "a", "length": 3}
    spec = with_defaults(
        DataSpec(dataset="m:D", args=args, labels=LabelsSpec(dataset="m:L", args=args)), tmp_path
    )
    assert (spec.path, spec.train, spec.args) == (None, None, args | {"root": f"{tmp_path}/a"})
    assert spec.labels is not None
    assert spec.labels.args == spec.args
    own = DataSpec(labels=LabelsSpec(dataset="m:L", path="b", args=args))
    assert with_defaults(own, tmp_path).labels == own.labels  # the class joins them itself


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"dataset": "mine:Data", "train": {}}, "'train' needs 'evaluation'.*, or 'validation'"),
        ({"dataset": "mine:Data", "evaluation": {"root": "x"}}, "'evaluation' needs 'train'"),
        ({"train": {}, "evaluation": {}}, "'train' is for a data set of your own"),
        ({"label": "y"}, "'label' is for a data set of your own"),
        ({"collate": "mine:pad"}, "'collate' is for a data set of your own"),
    ],
)
def test_settings_that_do_not_fit(written: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSpec.model_validate(written)


def test_a_missing_folder_is_named(make: Any, tmp_path: Path) -> None:
    spec = make("Folder", **FOLDERS)
    with pytest.raises(DataError, match=r"No such file or directory: '.*/images/train'") as caught:
        describe(spec, tmp_path)
    assert f"Folder(root='{tmp_path}/images/train')" in str(caught.value)


def test_images_without_a_transform(make: Any, images: Path, tmp_path: Path) -> None:
    args = {"transform": {"import": "NAME:picture"}}
    with pytest.raises(DataError, match=r"PIL\.Image.*\n.*a 'transform' that makes a tensor"):
        describe(make("Folder", **FOLDERS, args=args), tmp_path)


def test_objects_in_arguments(make: Any, images: Path, tmp_path: Path) -> None:
    transform = [{"import": "NAME:Scale", "args": {"by": 2.0}}, {"import": "torch:neg"}]
    args = {"transform": transform, "target_transform": {"import": "NAME:plus"}}
    spec = make("Folder", **FOLDERS, args=args)
    x, y = next(open_data(spec, tmp_path, seed=0).train_batches(1))
    assert x[2].tolist() == [-4.0, -10.0, 0.0]
    assert y.tolist() == [1, 1, 1, 1]
    with pytest.raises(SpecError, match=r"data\.args\.transform: .*:Scale\(\) raises TypeError"):
        describe(make("Folder", **FOLDERS, args={"transform": {"import": "NAME:Scale"}}), tmp_path)


def read(spec: DataSpec, base: Path) -> tuple[DataSource, list[Any]]:
    source = open_data(spec, base, seed=0)
    return source, list(source.train_batches(1))


def counted(count: int, **keywords: Any) -> dict[str, Any]:
    return {"train": {"count": count, **keywords}, "evaluation": {"count": 4, **keywords}}


def test_rows_that_are_dicts(make: Any, tmp_path: Path) -> None:
    """All keys that hold numbers, in the dict's order, or those named, in their own."""
    source, batches = read(make("tokens", **counted(6)), tmp_path)
    assert source.info.names == ("mask", "ids")
    assert source.info.samples == (float32(4), int64(4))
    (mask, ids), y = batches[0]
    assert mask.tolist() == [[1.0] * 4] * 4
    assert ids.tolist() == [list(range(n, n + 4)) for n in range(4)]
    assert y.tolist() == [0, 1, 0, 1]
    source, batches = read(make("tokens", **counted(6), inputs=["ids"]), tmp_path)
    assert (source.info.samples, source.info.names) == ((int64(4),), ("ids",))
    assert describe(make("tokens", **counted(6), inputs="ids"), tmp_path) == source.info
    assert batches[0][0].tolist() == ids.tolist()
    several = make("tokens", **counted(6), label=["label", "mask"])
    assert [one.shape for one in describe(several, tmp_path).labels] == [(), (4,)]
    assert describe(make("tokens", **counted(6, key="y"), label="y"), tmp_path).label == int64()


def test_rows_of_dicts_with_labels_beside_them(make: Any, tmp_path: Path) -> None:
    source, batches = read(make("pairs", **counted(6)), tmp_path)
    assert source.info.names == ("ids",)
    assert batches[0][0].tolist() == [[n, n + 1] for n in range(4)]
    assert batches[0][1].tolist() == [0, 1, 0, 1]
    assert describe(make("pairs", **counted(6), inputs=["ids"], label=[]), tmp_path) == source.info
    with pytest.raises(DataError, match="returns tuples, whose last part is the label: "):
        describe(make("pairs", **counted(6), label="ids"), tmp_path)


def test_rows_of_several_inputs_and_a_label(make: Any, tmp_path: Path) -> None:
    """A TensorDataset's rows: the last one is the label, as in a loop over a loader."""
    spec = make("tensors", **counted(6))
    _, batches = read(spec, tmp_path)
    tensors = import_target(spec.dataset, tmp_path, what="", location=())
    for ((a, b), y), expected in zip(batches, loader(tensors(6)), strict=True):
        assert all(map(torch.equal, (a, b, y), expected))


def test_collate(make: Any, tmp_path: Path) -> None:
    ragged = counted(6, ragged=True)
    with pytest.raises(DataError, match=r"failed for samples 0, 1, 2, 3: .*\n.*pad to one length"):
        read(make("tokens", **ragged), tmp_path)
    fixed = {"import": "NAME:pad_to", "args": {"length": 5}}
    spec = make("tokens", **ragged, collate=fixed)
    source, batches = read(spec, tmp_path)
    assert source.info.samples == (int64(5), float32(5))
    tokens, pad_to = (
        import_target(name, tmp_path, what="", location=())
        for name in (spec.dataset, spec.dataset.replace("tokens", "pad_to"))
    )
    expected = loader(tokens(6, ragged=True), collate_fn=pad_to(5))
    for ((ids, mask), y), one in zip(batches, expected, strict=True):
        assert all(map(torch.equal, (ids, mask, y), one.values()))
    beside = {"import": "NAME:pad", "args": {"length": 5}}  # a function of the rows and of these
    both = zip(batches, read(make("tokens", **ragged, collate=beside), tmp_path)[1], strict=True)
    assert all(torch.equal(x, other) for ((x, _), _), ((other, _), _) in both)
    whole = r"'ids' of int64\[B x 4\], but the first was int64\[B x 3\]\n.*'padding: max_length'"
    with pytest.raises(DataError, match=whole):
        read(make("tokens", **ragged, collate="NAME:pad"), tmp_path)
    with pytest.raises(
        DataError, match=r"'str'.*\n.*rows have texts, 'text': if .*:numbers does no"
    ):
        read(make("tokens", **counted(6), collate="NAME:numbers"), tmp_path)
    with pytest.raises(SpecError, match=r"data\.collate: .* has no class or function 'gone'"):
        describe(make("tokens", **ragged, collate="NAME:gone"), tmp_path)


def test_batches_have_lengths_of_their_own(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = counted(6, ragged=True)
    spec = make("tokens", **ragged, collate="NAME:pad", max_length=6)
    source, batches = read(spec, tmp_path)
    assert list(map(str, source.info.samples)) == ["int64[B x <=6]", "float32[B x <=6]"]
    assert source.info.label == int64()
    tokens, pad = (
        import_target(name, tmp_path, what="", location=())
        for name in (spec.dataset, spec.dataset.replace("tokens", "pad"))
    )
    expected = loader(tokens(6, ragged=True), collate_fn=pad)
    for ((ids, mask), y), one in zip(batches, expected, strict=True):
        assert all(map(torch.equal, (ids, mask, y), one.values()))
    tags = describe(make("tokens", **ragged, collate="NAME:tagged", max_length=6), tmp_path).label
    assert str(tags) == "int64[B x <=6]"
    short = make("tokens", **ragged, collate="NAME:pad", max_length=3)
    with pytest.raises(DataError, match=r"has samples of length 4, 'data\.max_length' is 3"):
        describe(short, tmp_path)
    with pytest.raises(DataError, match="tensors of one batch have lengths 3 and 4"):
        read(
            make("tokens", **counted(2, ragged=True), collate="NAME:uneven", max_length=6), tmp_path
        )
    monkeypatch.setattr("dni_runtime.data.user._LOOKED_AT", 1)
    message = r"'ids' of int64\[B x 4\], but 'data.max_length' expects int64\[B x <=3\]\n.*a larger"
    with pytest.raises(DataError, match=message):
        read(short, tmp_path)
    with pytest.raises(DataError, match=r"samples of float32\[B\] have no length"):
        describe(make("tensors", **counted(6), max_length=3), tmp_path)
    for name in ("flatten", "augment"):
        with pytest.raises(ValidationError, match=f"'max_length' excludes '{name}'"):
            make("tokens", max_length=3, **{name: True if name == "flatten" else ["NAME:Scale"]})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"label": "labels"},
            "no label 'labels' among their keys with numbers: 'mask', 'ids', 'label'\n.*"
            "did you mean 'label'",
        ),
        (
            {"inputs": ["idx"]},
            "no input 'idx' among their keys with numbers: 'mask', 'ids'\n.*did you mean 'ids'",
        ),
        (
            counted(6, key="y"),
            r"no label known among their keys with numbers: 'mask', 'ids', 'y'\n.*data\.label",
        ),
        (
            counted(6, other={"labels": 1}),
            "no label known among their keys with numbers: .*'labels'",
        ),
    ],
)
def test_keys_that_are_not_there(
    make: Any, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        describe(make("tokens", **{**counted(6), **more}), tmp_path)


def test_data_sets_by_name_are_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"by_name\(\) returns data sets by name: train, test\n"):
        describe(make("by_name", train={}, evaluation={}), tmp_path)


def test_classes_that_are_told_have_their_share(make: Any, images: Path, tmp_path: Path) -> None:
    for spec in (
        make("Folder", **FOLDERS, validation=6, shuffle=True),
        make("tokens", **counted(12), validation=6, shuffle=True),
    ):
        held = [y for _, y in open_data(spec, tmp_path, seed=2).eval_batches()]
        assert torch.cat(held).sum() == 3
