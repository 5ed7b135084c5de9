from __future__ import annotations

import dataclasses
import gzip
import struct
from pathlib import Path

import pytest
import torch

from dni_runtime.data import describe, images, locate, open_data
from dni_runtime.errors import DataError
from dni_runtime.spec import DataSpec
from tests.specs import float32, int64

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def spec(made, **keywords) -> DataSpec:
    return DataSpec(dataset="mnist", path=str(made.folder), batch_size=10, **keywords)


@pytest.mark.parametrize("gz", [True, False])
def test_reads_what_is_published(idx_folder, tmp_path: Path, gz: bool) -> None:
    made = idx_folder(gz=gz)
    raw = spec(made, normalize=False, shuffle=False)
    info = describe(raw, tmp_path)
    assert info.sample == float32(1, 28, 28)
    assert info.label == int64()
    assert (info.classes, info.train_samples, info.eval_samples) == (10, 21, 9)
    source = open_data(raw, tmp_path, seed=0)
    assert source.info == info
    x, y = next(source.train_batches(0))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    pixels = torch.from_numpy(made.arrays[TRAIN_IMAGES][:10])
    assert torch.equal(x, pixels.unsqueeze(1).float() / 255)
    assert y.tolist() == made.arrays[TRAIN_LABELS][:10].tolist()
    ((x, y),) = source.eval_batches()
    assert y.tolist() == made.arrays["t10k-labels-idx1-ubyte"].tolist()


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.286, 0.353)]
)
def test_normalises_with_the_training_sets_figures(idx_folder, tmp_path, name, mean, std) -> None:
    made = idx_folder()
    one = spec(made, shuffle=False).model_copy(update={"dataset": name})
    x, _ = next(open_data(one, tmp_path, seed=0).train_batches(0))
    pixels = torch.from_numpy(made.arrays[TRAIN_IMAGES][:10]).unsqueeze(1)
    torch.testing.assert_close(x, (pixels / 255 - mean) / std)


@pytest.mark.parametrize("normalize", [True, False])
def test_flatten(idx_folder, tmp_path, normalize: bool) -> None:
    made = idx_folder()
    flat, images = (spec(made, flatten=f, normalize=normalize) for f in (True, False))
    assert describe(flat, tmp_path).sample.shape == (784,)
    (x, _), (expected, _) = (
        next(open_data(s, tmp_path, seed=0).train_batches(0)) for s in (flat, images)
    )
    assert torch.equal(x, expected.flatten(1))


def test_limits_show_in_the_description(idx_folder, tmp_path) -> None:
    info = describe(spec(idx_folder(), train_limit=5, eval_limit=100), tmp_path)
    assert (info.train_samples, info.eval_samples) == (5, 9)


def test_relative_paths_start_at_the_chain(idx_folder, tmp_path) -> None:
    made = idx_folder()
    one = DataSpec(dataset="mnist", path="images")
    assert locate(one, tmp_path) == made.folder
    assert describe(one, tmp_path).train_samples == 21


def test_missing_folder_names_where_it_looked(tmp_path) -> None:
    with pytest.raises(DataError) as caught:
        describe(DataSpec(dataset="fashion-mnist", path="nowhere"), tmp_path)
    text = str(caught.value)
    assert f"{tmp_path / 'nowhere'} (does not exist)" in text
    assert "'fashion-mnist'" in text
    assert "dataset-fashion-mnist" in text


def test_missing_file_is_named(idx_folder, tmp_path) -> None:
    made = idx_folder()
    made.file(TRAIN_LABELS).unlink()
    with pytest.raises(DataError, match=rf"lacks {TRAIN_LABELS}\)"):
        describe(spec(made), tmp_path)


def test_mnist_without_a_path_says_which_files(tmp_path) -> None:
    with pytest.raises(DataError, match=r"needs 'data\.path'.*\n.*t10k-labels-idx1-ubyte"):
        describe(DataSpec(dataset="mnist"), tmp_path)


def test_the_packages_folder_is_found_by_itself(idx_folder, tmp_path, monkeypatch) -> None:
    made = idx_folder()
    package = dataclasses.replace(
        images.PUBLISHED["fashion-mnist"], known=(str(made.folder),), hint="install it"
    )
    monkeypatch.setitem(images.PUBLISHED, "fashion-mnist", package)
    assert locate(DataSpec(dataset="fashion-mnist"), tmp_path) == made.folder
    made.file(TRAIN_IMAGES).unlink()
    with pytest.raises(DataError, match="install it"):
        describe(DataSpec(dataset="fashion-mnist"), tmp_path)


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize("keep", [0, 3, 9, 15, 700, 28 * 28 * 21 + 15])
def test_truncated_files_are_named(idx_folder, tmp_path, gz: bool, keep: int) -> None:
    made = idx_folder(gz=gz)
    content = made.file(TRAIN_IMAGES).read_bytes()
    made.file(TRAIN_IMAGES).write_bytes(content[: min(keep, len(content) - 1)])
    with pytest.raises(DataError) as caught:
        open_data(spec(made), tmp_path, seed=0)
    assert str(made.file(TRAIN_IMAGES)) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 7, 8, 28])
def test_truncated_elements_inside_a_whole_gzip_file(idx_folder, tmp_path, keep: int) -> None:
    made = idx_folder()
    content = gzip.decompress(made.file(TRAIN_LABELS).read_bytes())
    made.write(TRAIN_LABELS, content[:keep])
    with pytest.raises(DataError, match=TRAIN_LABELS):
        open_data(spec(made), tmp_path, seed=0)


def change(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


@pytest.mark.parametrize(
    ("name", "at", "new", "message"),
    [
        (TRAIN_IMAGES, 3, b"\x01", "0x00000801 instead of 0x00000803"),
        (TRAIN_IMAGES, 2, b"\x0d", "0x00000d03 instead of 0x00000803"),
        (TRAIN_IMAGES, 0, b"\x89PNG", "0x89504e47 instead"),
        (TRAIN_IMAGES, 8, struct.pack(">I", 32), "32 x 28 pixels; 28 x 28 expected"),
        (TRAIN_LABELS, 4, struct.pack(">I", 20), "20 labels for the 21 images"),
        (TRAIN_IMAGES, 4, b"\xff\xff\xff\xff", "21 labels for the 4294967295 images"),
        (TRAIN_LABELS, 8, b"\x0a", "label 10; labels 0 to 9 expected"),
    ],
)
def test_foreign_files(idx_folder, tmp_path, name, at, new, message) -> None:
    made = idx_folder()
    content = gzip.decompress(made.file(name).read_bytes())
    made.write(name, change(content, at, new))
    with pytest.raises(DataError, match=message):
        open_data(spec(made), tmp_path, seed=0)


def test_elements_after_the_end(idx_folder, tmp_path) -> None:
    made = idx_folder()
    made.write(TRAIN_LABELS, gzip.decompress(made.file(TRAIN_LABELS).read_bytes()) + b"\0")
    with pytest.raises(DataError, match="more bytes of elements"):
        open_data(spec(made), tmp_path, seed=0)


def test_a_web_page_instead_of_a_gzip_file(idx_folder, tmp_path) -> None:
    made = idx_folder()
    made.file(TRAIN_IMAGES).write_bytes(b"<html>404 Not Found</html>")
    with pytest.raises(DataError, match=r"ubyte\.gz: truncated or damaged: Not a gzipped file"):
        describe(spec(made), tmp_path)
