"""MNIST and Fashion-MNIST in their published IDX format.

The format (http://yann.lecun.com/exdb/mnist, "FILE FORMATS"): two zero bytes, the type of the
elements (8: unsigned byte), the number of dimensions, each dimension as a big-endian 32-bit
integer, then the elements in row-major order.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from dni_runtime.data.memory import MemorySplit, image_info, image_split
from dni_runtime.data.paths import existing, find_folder
from dni_runtime.data.source import Found
from dni_runtime.errors import DataError
from dni_runtime.spec import DataSpec

_UNSIGNED_BYTE = 0x08
_SIDE = 28
_CLASSES = 10
_PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_EVAL_PARTS = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class _Published:
    """Properties of one set; mean and std are of the training pixels divided by 255."""

    mean: float
    std: float
    known: tuple[str, ...]
    hint: str


_SETS = {
    # All 60,000 training images give 0.13066 and 0.30811.
    "mnist": _Published(
        mean=0.1307,
        std=0.3081,
        known=(),
        hint="set data.path to the folder of the four published IDX files (.gz or not): "
        "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
        "t10k-labels-idx1-ubyte",
    ),
    # All 60,000 training images give 0.28604 and 0.35302.
    "fashion-mnist": _Published(
        mean=0.2860,
        std=0.3530,
        known=("/usr/share/datasets/fashion-mnist",),  # Debian's dataset-fashion-mnist
        hint="install Debian's package dataset-fashion-mnist, or download the four published IDX "
        "files (as for mnist) and set data.path to their folder",
    ),
}


def find_idx(spec: DataSpec, base: Path) -> Found:
    """Find ``mnist`` or ``fashion-mnist`` and check the headers of its four files."""
    published = _SETS[spec.dataset]
    folder = find_folder(
        spec,
        base,
        files=[(name, f"{name}.gz") for name in (*_PARTS, *_EVAL_PARTS)],
        known=published.known,
        hint=published.hint,
    )
    train = [existing(folder, (name, f"{name}.gz")) for name in _PARTS]
    evaluation = [existing(folder, (name, f"{name}.gz")) for name in _EVAL_PARTS]

    def load() -> tuple[MemorySplit, MemorySplit]:
        train_split, eval_split = (
            image_split(
                _read(images, 3).unsqueeze(1),
                _labels(labels),
                spec,
                mean=[published.mean],
                std=[published.std],
            )
            for images, labels in (train, evaluation)
        )
        return train_split, eval_split

    info = image_info(
        (1, _SIDE, _SIDE),
        classes=_CLASSES,
        train_samples=_count(*train),
        eval_samples=_count(*evaluation),
    )
    return Found(info, folder, load)


def _count(images: Path, labels: Path) -> int:
    """Return the number of samples, according to the headers of both files."""
    count, height, width = _shape(images, 3)
    if (height, width) != (_SIDE, _SIDE):
        raise DataError(
            f"{images}: images of {height} x {width} pixels; {_SIDE} x {_SIDE} expected",
            hint="for other images use the data set 'npz' or your own class",
        )
    (label_count,) = _shape(labels, 1)
    if label_count != count:
        raise DataError(
            f"{labels}: {label_count} labels for the {count} images of {images.name}",
            hint="the two files belong to different sets; download both again",
        )
    return count


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _header(path: Path, stream: BinaryIO, dimensions: int) -> tuple[int, ...]:
    expected = _UNSIGNED_BYTE << 8 | dimensions
    start = stream.read(4 + 4 * dimensions)
    magic = int.from_bytes(start[:4], "big")
    if len(start) >= 4 and magic != expected:
        raise DataError(
            f"{path}: not an IDX file of {dimensions}-dimensional bytes: it begins with "
            f"0x{magic:08x} instead of 0x{expected:08x}",
            hint="is it another file under this name? download it again",
        )
    if len(start) < 4 + 4 * dimensions:
        raise EOFError(f"it ends after {len(start)} bytes, within its header")
    return struct.unpack(f">{dimensions}I", start[4:])


def _shape(path: Path, dimensions: int) -> tuple[int, ...]:
    try:
        with closing(_open(path)) as stream:
            return _header(path, stream, dimensions)
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, error) from None


def _read(path: Path, dimensions: int) -> Tensor:
    """Return the elements as a uint8 tensor of the shape in the header."""
    try:
        with closing(_open(path)) as stream:
            shape = _header(path, stream, dimensions)
            size = math.prod(shape)
            elements = bytearray(stream.read(size + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, error) from None
    if len(elements) != size:
        what = "more" if len(elements) > size else f"only {len(elements)}"
        raise DataError(
            f"{path}: {what} bytes of elements, but its header announces {size}",
            hint="the file is truncated or altered; download it again",
        )
    if not size:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(elements, dtype=torch.uint8).reshape(shape)


def _labels(path: Path) -> Tensor:
    y_N = _read(path, 1)
    if len(y_N) and int(y_N.max()) >= _CLASSES:
        raise DataError(
            f"{path}: label {int(y_N.max())}; labels 0 to {_CLASSES - 1} expected",
            hint="the file is of another data set, or altered; download it again",
        )
    return y_N.to(torch.int64)


def _broken(path: Path, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"{path} cannot be read: {error.strerror}", hint="check its permissions")
    return DataError(
        f"{path}: truncated or damaged: {error}", hint="download the file again; compare its size"
    )
