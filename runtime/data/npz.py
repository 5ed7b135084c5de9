"""Arrays in a user's NumPy ``.npz`` file.

A file holds ``x_train``, ``y_train``, ``x_eval`` and ``y_eval``, samples along the first axis.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dni_runtime.data.source import Found, resolve
from dni_runtime.data.splits import Half, MemorySplit
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec

Array = npt.NDArray[Any]

_NAMES = ("x_train", "y_train", "x_eval", "y_eval")
_HINT = (
    "write it with numpy.savez(path, x_train=…, y_train=…, x_eval=…, y_eval=…): "
    "numbers, one sample per row; the first two will do with 'data.validation'; to predict, x_eval "
    "alone, with 'labels: none'"
)


def find_npz(spec: DataSpec, base: Path, half: Half | None = None) -> Found:
    """Find a user's ``.npz`` file and check the shapes and types of its four arrays.

    8-bit samples are images, scaled to [0, 1]; floats become float32; both are then normalised with
    the training set's mean and standard deviation (of each channel if samples are (C, H, W),
    else of all values). Other integers (tokens) become int64, as labels do. With a ``half``,
    only its arrays must be there. Evaluation arrays alone have no training samples: to predict.
    """
    if spec.path is None:
        raise SpecError(
            "data set 'npz' needs 'path', its .npz file", location=("data",), hint=_HINT
        )
    path = resolve(spec.path, base)
    with _opened(path) as archive:
        absent = {"samples": "y", "labels": "x"}.get(half or "", "")
        names = [name for name in _NAMES if not absent or name[0] != absent]
        alone = None  # the part that is all there is
        if "x_eval" in archive.files and not {"x_train", "y_train"} & {*archive.files}:
            alone = "eval"
        elif spec.validation is not None and not {"x_eval", "y_eval"} & {*archive.files}:
            alone = "train"
        names = [name for name in names if alone in (None, name[2:])]
        shapes = {name: _header(path, archive, name) for name in names}
        counts = {name[2:]: shapes[name][0][0] for name in names}
        nothing = {
            name: np.empty((counts.get(name[2:], 0), *shape[1:]), dtype)
            for name in _NAMES
            if name not in shapes
            for shape, dtype in [shapes.get(f"{name[0]}_{alone}", ((0, 0), np.dtype("f4")))]
        }
        shapes |= {name: (one.shape, one.dtype) for name, one in nothing.items()}
        _check(path, shapes)

    (train_samples, *sample), x_dtype = shapes["x_train"]
    info = DataInfo(
        sample=TensorSpec(shape=tuple(sample), dtype="int64" if _is_index(x_dtype) else "float32"),
        label=TensorSpec(
            shape=shapes["y_train"][0][1:],
            dtype="float32" if shapes["y_train"][1].kind == "f" else "int64",
        ),
        train_samples=train_samples,
        eval_samples=shapes["x_eval"][0][0],
    )

    def load() -> tuple[MemorySplit, MemorySplit]:
        with _opened(path) as archive:
            arrays = nothing | {name: archive[name] for name in names}
        return _splits(path, arrays, spec)

    return Found(info, path, load)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open an ``.npz`` file without pickles; turn errors of reading it into DataError."""
    try:
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: a single array, not an .npz file", hint=_HINT)
            with archive:
                yield archive
    except FileNotFoundError:
        raise DataError(f"there is no data file {str(path)!r}", hint=_HINT) from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable .npz file: {error}", hint=_HINT) from None


def _header(path: Path, archive: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and type of an array without reading it (numpy.lib.format)."""
    if name not in archive.files:
        raise DataError(
            f"{path}: there is no array {name!r}, only {', '.join(archive.files) or 'nothing'}",
            hint=_HINT,
        )
    with archive.zip.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise DataError(f"{path}: array {name!r} is of .npy version {version}", hint=_HINT)
        shape, _, dtype = read(stream)
    if dtype.kind not in "buif":
        raise DataError(f"{path}: array {name!r} holds {dtype}, not numbers", hint=_HINT)
    if not shape or 0 in shape[1:]:
        what = "samples without numbers" if shape else "a single number"
        raise DataError(f"{path}: array {name!r} is {what}: {list(shape)}", hint=_HINT)
    return shape, dtype


def _check(path: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
    for part in ("train", "eval"):
        (x, _), (y, _) = shapes[f"x_{part}"], shapes[f"y_{part}"]
        if x[0] != y[0]:
            raise DataError(f"{path}: {x[0]} samples in x_{part}, {y[0]} labels in y_{part}")
    for kind, what in (("x", "samples"), ("y", "labels")):
        (train, train_dtype), (evaluation, eval_dtype) = (
            shapes[f"{kind}_train"],
            shapes[f"{kind}_eval"],
        )
        if train[1:] != evaluation[1:] or _kind(train_dtype) != _kind(eval_dtype):
            raise DataError(
                f"{path}: {what} differ: {kind}_train is {train_dtype}{list(train)}, "
                f"{kind}_eval is {eval_dtype}{list(evaluation)}",
                hint="the training and the evaluation arrays need the same type and shape",
            )


def _kind(dtype: np.dtype[Any]) -> str:
    return "image" if dtype == np.uint8 else "index" if _is_index(dtype) else "float"


def _is_index(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "bui" and dtype != np.uint8


def _splits(
    path: Path, arrays: dict[str, Array], spec: DataSpec
) -> tuple[MemorySplit, MemorySplit]:
    tensors = {name: _tensor(path, name, arrays[name]) for name in _NAMES}
    mean, std = _moments(arrays["x_train"]) if spec.normalize else (None, None)
    splits = []
    for part in ("train", "eval"):
        x_N, y_N = tensors[f"x_{part}"], tensors[f"y_{part}"]
        if y_N.dtype == torch.uint8:
            y_N = y_N.to(torch.int64)
        if x_N.dtype == torch.uint8 and std is None:
            std = torch.tensor(255.0)
        splits.append(MemorySplit(x_N, y_N, mean, std))
    return splits[0], splits[1]


def _moments(x: Array) -> tuple[Tensor | None, Tensor | None]:
    """Return the mean and standard deviation of samples in their units; None for indices."""
    if _is_index(x.dtype) or not x.size:
        return None, None
    axes = (0, 2, 3) if x.ndim == 4 else None
    mean = x.mean(axis=axes, dtype=np.float64, keepdims=axes is not None)
    std = x.std(axis=axes, dtype=np.float64, keepdims=axes is not None)
    std = np.where(std > 0, std, 1.0)  # a constant channel becomes 0, not NaN
    mean_T, std_T = (torch.from_numpy(np.asarray(m, dtype=np.float32)) for m in (mean, std))
    return (mean_T[0], std_T[0]) if axes is not None else (mean_T, std_T)


def _tensor(path: Path, name: str, array: Array) -> Tensor:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # which becomes infinite
            array = array.astype(np.float32, copy=False)
        for index in np.argwhere(~np.isfinite(array))[:1].tolist():
            raise DataError(
                f"{path}: {name}{index} is {array[tuple(index)]}: a value that is not finite",
                hint="correct or leave out such samples; float32 ends at 3.4e38",
            )
    elif array.dtype != np.uint8:
        array = array.astype(np.int64, copy=False)
    return torch.from_numpy(np.ascontiguousarray(array))
