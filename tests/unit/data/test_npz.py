from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dni_runtime.data import describe, images, locate, open_data
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataSpec
from dni_runtime.spec.data import LabelsSpec
from tests.specs import float32, int64

RNG = np.random.default_rng(0)


def arrays(x: np.ndarray | None = None, **changes) -> dict[str, np.ndarray]:
    x = RNG.integers(0, 256, (12, 3, 4, 5), dtype=np.uint8) if x is None else x
    return {
        "x_train": x[:8],
        "y_train": np.arange(8) % 3,
        "x_eval": x[8:12],
        "y_eval": np.arange(4) % 3,
        **changes,
    }


def write(folder: Path, contents: dict[str, np.ndarray], **keywords) -> DataSpec:
    np.savez(folder / "data.npz", **contents)
    return DataSpec(dataset="npz", path="data.npz", batch_size=8, shuffle=False, **keywords)


def first(spec: DataSpec, base: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return next(open_data(spec, base, seed=0).train_batches(0))


def test_images_are_normalised_by_channel(tmp_path) -> None:
    contents = arrays()
    spec = write(tmp_path, contents)
    info = describe(spec, tmp_path)
    assert info.sample == float32(3, 4, 5)
    assert (info.label.dtype, info.train_samples, info.eval_samples) == ("int64", 8, 4)
    assert locate(spec, tmp_path) == tmp_path / "data.npz"
    x, y = first(spec, tmp_path)
    assert y.tolist() == contents["y_train"].tolist()
    pixels = contents["x_train"].astype(np.float64)
    mean, std = (f(pixels, axis=(0, 2, 3), keepdims=True)[0] for f in (np.mean, np.std))
    np.testing.assert_allclose(x, (pixels - mean) / std, rtol=1e-4, atol=1e-5)
    ((x, _),) = open_data(spec, tmp_path, seed=0).eval_batches()
    np.testing.assert_allclose(x, (contents["x_eval"] - mean) / std, rtol=1e-4, atol=1e-5)


def test_images_are_only_scaled_without_normalize(tmp_path) -> None:
    contents = arrays()
    x, _ = first(write(tmp_path, contents, normalize=False), tmp_path)
    assert torch.equal(x, torch.from_numpy(contents["x_train"]).float() / 255)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_flatten(tmp_path, dtype, normalize: bool) -> None:
    contents = arrays(RNG.integers(0, 256, (12, 3, 4, 5)).astype(dtype))
    flat, images = (
        write(tmp_path, contents, flatten=f, normalize=normalize) for f in (True, False)
    )
    assert describe(flat, tmp_path).sample.shape == (60,)
    assert torch.equal(first(flat, tmp_path)[0], first(images, tmp_path)[0].flatten(1))


@pytest.mark.parametrize("dtype", [">f8", "<f2", "f4"])
def test_floats(tmp_path, dtype: str) -> None:
    contents = arrays(RNG.normal(5, 2, (12, 6)).astype(dtype))
    x, _ = first(write(tmp_path, contents, normalize=False), tmp_path)
    np.testing.assert_allclose(x, contents["x_train"].astype(np.float32))
    x, _ = first(write(tmp_path, contents), tmp_path)
    assert x.dtype == torch.float32
    assert abs(x.mean().item()) < 1e-3
    assert abs(x.std(correction=0).item() - 1) < 1e-3


def test_a_constant_channel_becomes_zero(tmp_path) -> None:
    contents = arrays(np.full((12, 1, 2, 2), 7, np.uint8))
    assert not first(write(tmp_path, contents), tmp_path)[0].any()


def test_other_integers_are_indices(tmp_path) -> None:
    contents = arrays(RNG.integers(0, 50000, (12, 6), dtype=np.uint16))
    spec = write(tmp_path, contents)
    assert describe(spec, tmp_path).sample == int64(6)
    assert first(spec, tmp_path)[0].tolist() == contents["x_train"].tolist()


def test_float_labels_are_a_regression(tmp_path) -> None:
    contents = arrays(y_train=RNG.normal(size=(8, 2)), y_eval=RNG.normal(size=(4, 2)))
    spec = write(tmp_path, contents)
    info = describe(spec, tmp_path)
    assert (info.label, info.classes) == (float32(2), None)
    np.testing.assert_allclose(first(spec, tmp_path)[1], contents["y_train"], rtol=1e-6)


def test_small_integer_labels(tmp_path) -> None:
    contents = arrays(y_train=np.arange(8, dtype=np.uint8), y_eval=np.full(4, 200, np.uint8))
    spec = write(tmp_path, contents)
    assert describe(spec, tmp_path).label.dtype == "int64"
    assert first(spec, tmp_path)[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"x_train": np.zeros(3)}, "no array 'y_train', only x_train"),
        (arrays(y_train=np.zeros(7, int)), "8 samples in x_train, 7 labels in y_train"),
        (arrays(x_eval=np.zeros((4, 3, 4, 6), np.uint8)), r"samples differ.*\[4, 3, 4, 6\]"),
        (arrays(x_eval=np.zeros((4, 3, 4, 5))), "samples differ: x_train is uint8.*float64"),
        (arrays(y_eval=np.zeros(4)), "labels differ"),
        (arrays(y_train=np.array(["a"] * 8)), "holds <U1, not numbers"),
        (arrays(y_train=np.array([{}] * 8)), "holds object, not numbers"),
        (arrays(x_train=np.float32(3)), "is a single number"),
        (arrays(x_train=np.zeros((8, 0)), x_eval=np.zeros((4, 0))), "without numbers"),
        (arrays(np.full((12, 2), np.nan)), r"x_train\[0, 0\] is nan"),
        (arrays(y_train=np.ones(8), y_eval=np.array([0, 1, np.inf, 2])), r"y_eval\[2\] is inf"),
        (arrays(np.full((12, 2), 1e300)), r"x_train\[0, 0\] is inf"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, contents, message: str) -> None:
    with pytest.raises(DataError, match=f"data.npz: .*{message}"):
        open_data(write(tmp_path, contents), tmp_path, seed=0)


def test_samples_for_evaluation_alone(tmp_path) -> None:
    """They can be predicted, as raw ones are by figures of a training, but not be trained on."""
    contents = {name: one for name, one in arrays().items() if name.endswith("eval")}
    spec = write(tmp_path, contents)
    with pytest.raises(DataError, match="has no training samples"):
        describe(spec, tmp_path)
    ((x, y),) = open_data(spec, tmp_path, seed=0, predicts=True).eval_batches()
    assert (x.shape, y.tolist()) == ((4, 3, 4, 5), contents["y_eval"].tolist())
    unlabelled = write(tmp_path, {"x_eval": contents["x_eval"]})
    of_head = unlabelled.model_copy(update={"labels": LabelsSpec(dataset="npz")})
    given = {"seed": 0, "half": "samples", "predicts": True}
    ((x, y),) = open_data(of_head, tmp_path, **given).eval_batches()
    assert (len(x), y.numel()) == (4, 0)
    with pytest.raises(DataError, match=r"no array 'y_eval', only x_eval\n.*'labels: none'"):
        describe(unlabelled, tmp_path)


def test_held_out_samples_need_no_others_for_evaluation(tmp_path) -> None:
    contents = {name: one for name, one in arrays().items() if name.endswith("train")}
    with pytest.raises(DataError, match="no array 'x_eval'"):
        describe(write(tmp_path, contents), tmp_path)
    spec = write(tmp_path, contents, validation=3)
    info = describe(spec, tmp_path)
    assert (info.train_samples, info.eval_samples, info.test_samples) == (5, 3, None)
    source = open_data(spec, tmp_path, seed=0)
    assert not source.has_test
    ((x, y),) = source.eval_batches()
    assert (x.shape, y.tolist()) == ((3, 3, 4, 5), contents["y_train"][5:].tolist())
    assert list(source.test_batches()) == []
    assert source.evaluated()[1].tolist() == [5, 6, 7]
    np.savez(tmp_path / "data.npz", **contents, y_eval=[0])
    with pytest.raises(DataError, match="no array 'x_eval'"):
        describe(spec, tmp_path)


def test_missing_and_foreign_files(tmp_path) -> None:
    spec = DataSpec(dataset="npz", path="data.npz")
    with pytest.raises(DataError, match=rf"no data file '{tmp_path / 'data.npz'}'.*\n.*savez"):
        describe(spec, tmp_path)
    (tmp_path / "data.npz").write_bytes(b"not a zip file")
    with pytest.raises(DataError, match="not a readable"):
        describe(spec, tmp_path)
    with (tmp_path / "data.npz").open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DataError, match="a single array"):
        describe(spec, tmp_path)
    (tmp_path / "data.npz").unlink()
    (tmp_path / "data.npz").mkdir()
    with pytest.raises(DataError, match="not a readable"):
        describe(spec, tmp_path)
    with pytest.raises(SpecError, match="needs 'path'"):
        describe(DataSpec(dataset="npz"), tmp_path)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_truncated_file(tmp_path, part: float) -> None:
    spec = write(tmp_path, arrays())
    content = (tmp_path / "data.npz").read_bytes()
    (tmp_path / "data.npz").write_bytes(content[: int(part * len(content))])
    with pytest.raises(DataError, match=r"data\.npz: not a readable"):
        open_data(spec, tmp_path, seed=0)


def test_damaged_array(tmp_path) -> None:
    spec = write(tmp_path, arrays())
    content = bytearray((tmp_path / "data.npz").read_bytes())
    content[200] ^= 1  # within x_train: the checksum of the zip member is wrong
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(DataError, match="CRC"):
        open_data(spec, tmp_path, seed=0)


def test_digits_need_nothing() -> None:
    spec = DataSpec(shuffle=False, normalize=False, batch_size=1437)
    info = describe(spec, Path("/nowhere"))
    source = open_data(spec, Path("/nowhere"), seed=0)
    assert info == source.info
    assert (info.sample.shape, info.classes) == ((1, 8, 8), 10)
    assert (info.train_samples, info.eval_samples) == (1437, 360)
    assert locate(spec, Path()) is None
    ((x, y),) = source.train_batches(0)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert torch.equal(y.unique(), torch.arange(10))
    assert x.mean().item() == pytest.approx(images.DIGITS.mean[0], abs=5e-5)
    assert x.std(correction=0).item() == pytest.approx(images.DIGITS.std[0], abs=5e-5)
    with pytest.raises(SpecError, match="takes no path"):
        describe(DataSpec(path="digits"), Path())


def test_digits_are_scikit_learns() -> None:
    """How digits.npz was made; ``docs/data.md`` shows it too."""
    from sklearn import datasets  # slow to import

    digits = datasets.load_digits()
    order = np.random.RandomState(0).permutation(1797)
    source = open_data(DataSpec(shuffle=False, normalize=False, batch_size=1437), Path(), seed=0)
    for (x, y), part in (
        (next(source.train_batches(0)), order[:1437]),
        (next(source.eval_batches()), order[1437:]),
    ):
        assert np.array_equal(x.squeeze(1).numpy() * 16, digits.images[part])
        assert np.array_equal(y.numpy(), digits.target[part])
