"""CIFAR-10 in its published form for Python: six pickled batches (Krizhevsky 2009).

The format (https://www.cs.toronto.edu/~kriz/cifar.html): each file is a pickled dict with ``data``,
a uint8 array (n, 3072) of 1024 red, 1024 green and 1024 blue pixels in row-major order, and
``labels``, a list of n numbers 0 to 9.

A pickle is a program, but the unpickler here does not run it: stand-in classes for the few names
that these files use only record their arguments, and every other name is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dni_runtime.data.memory import MemorySplit, image_info, image_split
from dni_runtime.data.paths import find_folder
from dni_runtime.data.source import Found
from dni_runtime.errors import DataError
from dni_runtime.spec import DataSpec

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_CLASSES = 10
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_EVAL = ("test_batch",)
# Of the 50,000 training images divided by 255, per channel (red, green, blue).
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)
_HINT = (
    "set data.path to the unpacked folder cifar-10-batches-py of the published "
    "cifar-10-python.tar.gz (data_batch_1 to data_batch_5 and test_batch)"
)


def find_cifar10(spec: DataSpec, base: Path) -> Found:
    """Find the six files; the number of images is known only after loading."""
    folder = find_folder(
        spec,
        base,
        files=[(name,) for name in (*_TRAIN, *_EVAL)],
        known=("cifar-10-batches-py",),
        hint=_HINT,
    )

    def load() -> tuple[MemorySplit, MemorySplit]:
        train, evaluation = (
            image_split(*_read_all(folder, names), spec, mean=_MEAN, std=_STD)
            for names in (_TRAIN, _EVAL)
        )
        return train, evaluation

    info = image_info(_SHAPE, classes=_CLASSES, train_samples=None, eval_samples=None)
    return Found(info, folder, load)


def _read_all(folder: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    parts = [_read(folder / name) for name in names]
    x_NP = torch.cat([x for x, _ in parts])
    return x_NP.reshape(-1, *_SHAPE), torch.cat([y for _, y in parts])


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Return the pixels (n, 3072) uint8 and labels (n,) int64 of one file."""
    try:
        with path.open("rb") as stream:
            # Python 2 wrote these files; its str is bytes (pickle.Unpickler, "encoding").
            content = _Unpickler(stream, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error.message}", hint=error.hint) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    # "unpickling can raise other exceptions as well" (pickle.UnpicklingError): a damaged file is
    # a random program of the pickle machine.
    except Exception as error:
        raise DataError(
            f"{path}: truncated or not a pickled batch: {type(error).__name__}: {error}",
            hint="unpack the published archive again",
        ) from None
    if not isinstance(content, dict):
        raise _foreign(path, f"a {type(content).__name__} instead of a dict")
    entries = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    pixels, labels = entries.get("data"), entries.get("labels")
    if not isinstance(pixels, _Array) or not isinstance(labels, list):
        raise _foreign(path, f"no 'data' array and 'labels' list, but {sorted(map(str, entries))}")
    x_NP = pixels.tensor(path)
    if x_NP.ndim != 2 or x_NP.shape[1] != _PIXELS or x_NP.shape[0] != len(labels):
        raise _foreign(path, f"'data' of shape {tuple(x_NP.shape)} with {len(labels)} labels")
    wrong = [y for y in labels if type(y) is not int or not 0 <= y < _CLASSES]
    if wrong:
        raise _foreign(path, f"label {wrong[0]!r}; 0 to {_CLASSES - 1} expected")
    return x_NP, torch.tensor(labels, dtype=torch.int64)


def _foreign(path: Path, what: str) -> DataError:
    return DataError(f"{path}: not a CIFAR-10 batch: {what}", hint=_HINT)


class _Dtype:
    """Stand-in for ``numpy.dtype``."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and the like, which do not matter for bytes."""


class _Array:
    """Stand-in for ``numpy.ndarray`` and the function that reconstructs one."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def tensor(self, path: Path) -> Tensor:
        """Return the array if it holds unsigned bytes (fields: numpy.ndarray.__reduce__)."""
        if not (isinstance(self.state, tuple) and len(self.state) == 5):
            raise _foreign(path, "an array without contents")
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _Dtype) or dtype.name not in (b"u1", "u1", b"|u1", "|u1"):
            raise _foreign(path, f"an array of {getattr(dtype, 'name', dtype)!r}; u1 expected")
        whole = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if not whole or len(shape) != 2 or fortran or not isinstance(raw, bytes):
            raise _foreign(path, f"an array of shape {shape!r} (Fortran order: {fortran!r})")
        if shape[0] * shape[1] != len(raw):
            raise _foreign(path, f"{len(raw)} bytes for an array of shape {shape!r}")
        if not raw:
            return torch.empty(shape, dtype=torch.uint8)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(shape)


def _encode(text: object, encoding: object) -> bytes:
    """Stand-in for ``_codecs.encode``, which Python 3 uses for bytes in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"text encoded as {encoding!r}")
    return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise DataError(
                f"refused: the file asks for {module}.{name}, which no CIFAR-10 batch needs",
                hint="do not use this file: loading it with another program may run its code",
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"persistent id {pid!r}")
