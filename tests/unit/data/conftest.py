"""Files in the formats that the data sets are published in, written small."""

from __future__ import annotations

import gzip
import itertools
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


class IdxFolder:
    """Four IDX files of random pixels."""

    def __init__(self, folder: Path, *, train: int, evaluation: int, gz: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        self.folder, self.gz = folder, gz
        self.arrays = {
            name: rng.integers(0, 10 if "labels" in name else 256, shape, dtype=np.uint8)
            for name, shape in zip(
                IDX_NAMES,
                ((train, 28, 28), (train,), (evaluation, 28, 28), (evaluation,)),
                strict=True,
            )
        }
        for name, array in self.arrays.items():
            self.write_array(name, array)

    def file(self, name: str) -> Path:
        return self.folder / (f"{name}.gz" if self.gz else name)

    def write_array(self, name: str, array: np.ndarray) -> None:
        self.write(name, idx_bytes(array))

    def write(self, name: str, content: bytes) -> None:
        self.file(name).write_bytes(gzip.compress(content) if self.gz else content)


@pytest.fixture
def idx_folder(tmp_path: Path) -> Callable[..., IdxFolder]:
    def make(train: int = 21, evaluation: int = 9, *, gz: bool = True) -> IdxFolder:
        return IdxFolder(tmp_path / "images", train=train, evaluation=evaluation, gz=gz)

    return make


_numbers = itertools.count()


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The bytes that Python 2.7's cPickle wrote with protocol 2 for such a batch.

    str is SHORT_BINSTRING or BINSTRING there, which Python 3 can read but not write.
    """

    def string(value: bytes) -> bytes:
        if len(value) < 256:
            return pickle.SHORT_BINSTRING + bytes([len(value)]) + value
        return pickle.BINSTRING + struct.pack("<i", len(value)) + value

    def integer(value: int) -> bytes:
        return pickle.BININT + struct.pack("<i", value)

    def name(module: str, attribute: str) -> bytes:
        return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()

    empty = name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray")
    empty += integer(0) + pickle.TUPLE1 + string(b"b") + pickle.TUPLE3 + pickle.REDUCE
    dtype = name("numpy", "dtype") + string(b"u1") + integer(0) + integer(1) + pickle.TUPLE3
    dtype += pickle.REDUCE + pickle.MARK + integer(3) + string(b"|")
    dtype += 3 * pickle.NONE + integer(-1) + integer(-1) + integer(0) + pickle.TUPLE + pickle.BUILD
    shape = integer(pixels.shape[0]) + integer(pixels.shape[1]) + pickle.TUPLE2
    state = pickle.MARK + integer(1) + shape + dtype + pickle.NEWFALSE
    state += string(pixels.tobytes()) + pickle.TUPLE + pickle.BUILD
    entries = string(b"batch_label") + string(b"testing batch 1 of 1")
    entries += string(b"labels") + pickle.EMPTY_LIST + pickle.MARK
    entries += b"".join(integer(label) for label in labels) + pickle.APPENDS
    entries += string(b"data") + empty + state
    body = pickle.EMPTY_DICT + pickle.MARK + entries + pickle.SETITEMS
    return pickle.PROTO + b"\x02" + body + pickle.STOP


class CifarFolder:
    """Five training batches and a test batch of random pixels."""

    def __init__(self, folder: Path, *, per_file: int) -> None:
        folder.mkdir(parents=True)
        rng = np.random.default_rng(1)
        self.folder = folder
        self.pixels: dict[str, np.ndarray] = {}
        self.labels: dict[str, list[int]] = {}
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
            self.pixels[name] = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
            self.labels[name] = rng.integers(0, 10, per_file).tolist()
            self.write(name, self.pixels[name], self.labels[name])

    def write(self, name: str, pixels: np.ndarray, labels: list[int]) -> None:
        (self.folder / name).write_bytes(python2_pickle(pixels, labels))


@pytest.fixture
def cifar_folder(tmp_path: Path) -> CifarFolder:
    return CifarFolder(tmp_path / "cifar" / "cifar-10-batches-py", per_file=4)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module beside a chain.yaml in ``tmp_path``; gives its name, new in each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(source: str, name: str | None = None) -> str:
        name = name or f"userdata_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("userdata_"):
            del sys.modules[name]
