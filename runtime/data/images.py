"""Images with a class each: the digits in this package, MNIST, Fashion-MNIST, CIFAR-10.

MNIST's format is IDX (http://yann.lecun.com/exdb/mnist, "FILE FORMATS"): two zero bytes, the type
of the elements (8: unsigned byte), the number of dimensions, each dimension as a big-endian 32-bit
integer, then the elements in row-major order.

CIFAR-10 (Krizhevsky 2009; https://www.cs.toronto.edu/~kriz/cifar.html) is six pickled dicts with
``data``, a uint8 array (n, 3072) of 1024 red, 1024 green and 1024 blue pixels in row-major order,
and ``labels``, a list of n numbers 0 to 9. A pickle is a program, but the unpickler here does not
run it: a stand-in for the few names that these files use only records its arguments, and every
other name is refused.

Shape suffixes: N samples of a split, C channels, H height, W width, P pixels of all channels.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from dni_runtime.data.source import Found, resolve
from dni_runtime.data.splits import MemorySplit
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec

_CLASSES = 10


@dataclass(frozen=True)
class _Images:
    """Properties of one set; mean and std are of the training pixels, scaled to [0, 1]."""

    shape: tuple[int, int, int]  # (C, H, W)
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]  # likewise
    largest: float = 255.0  # value of a white pixel

    def split(self, x_N: Tensor, y_N: Tensor, spec: DataSpec) -> MemorySplit:
        """Return 8-bit images; ``normalize: false`` scales them to [0, 1] only."""
        x_NCHW, y_N = x_N.reshape(-1, *self.shape).contiguous(), y_N.to(torch.int64)
        if not spec.normalize:
            return MemorySplit(x_NCHW, y_N, None, torch.tensor(self.largest, dtype=torch.float32))
        mean_C11, std_C11 = (
            torch.tensor(v, dtype=torch.float32).reshape(-1, 1, 1) * self.largest
            for v in (self.mean, self.std)
        )
        return MemorySplit(x_NCHW, y_N, mean_C11, std_C11)

    def info(self, train_samples: int | None, eval_samples: int | None) -> DataInfo:
        return DataInfo(
            sample=TensorSpec(shape=self.shape, dtype="float32"),
            label=TensorSpec(shape=(), dtype="int64"),
            classes=_CLASSES,
            train_samples=train_samples,
            eval_samples=eval_samples,
        )


# Of the 1,437 training images of digits.npz divided by 16; the test of this module computes them.
DIGITS = _Images((1, 8, 8), (0.3054,), (0.3759,), largest=16.0)


def find_digits(spec: DataSpec, base: Path) -> Found:
    """Return the 8x8 digits in this package (source and licence: ``docs/data.md``)."""
    if spec.path is not None:
        raise SpecError(
            f"data set 'digits' takes no path ({spec.path!r}): it is part of this package",
            location=("data", "path"),
            hint="arrays of your own: {dataset: npz, path: FILE}",
        )

    def load() -> tuple[MemorySplit, MemorySplit]:
        with as_file(files("dni_runtime.data") / "digits.npz") as path, np.load(path) as archive:
            train, evaluation = (
                DIGITS.split(torch.from_numpy(archive[x]), torch.from_numpy(archive[y]), spec)
                for x, y in (("x_train", "y_train"), ("x_eval", "y_eval"))
            )
        return train, evaluation

    return Found(DIGITS.info(1437, 360), None, load)


def find_published(spec: DataSpec, base: Path) -> Found:
    """Find the files of a published set, and check what can be checked without reading them."""
    published = PUBLISHED[spec.dataset]
    folder, found = _find_files(spec, base, published)
    train = [found[name] for name in published.train]
    evaluation = [found[name] for name in published.evaluation]

    def load() -> tuple[MemorySplit, MemorySplit]:
        train_split, eval_split = (
            published.split(*published.read(paths), spec) for paths in (train, evaluation)
        )
        return train_split, eval_split

    return Found(published.info(*map(published.count, (train, evaluation))), folder, load)


def _find_files(spec: DataSpec, base: Path, published: _Published) -> tuple[Path, dict[str, Path]]:
    """Return the folder that holds all files of a data set, and the files by name.

    It is ``data.path`` if that is set, or a folder of a known name in it; else a known one.
    """
    known, hint = published.known, published.hint
    if spec.path is not None:
        root = resolve(spec.path, base)
        folders = [root, *(root / name for name in known if not Path(name).is_absolute())]
    else:
        folders = [Path(name) for name in known if Path(name).is_absolute()]
    if not folders:
        raise DataError(
            f"data set {spec.dataset!r} needs 'data.path', the folder of its files", hint=hint
        )
    seen: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            seen.append(f"{folder} ({'not a folder' if folder.exists() else 'does not exist'})")
            continue
        found = {
            name: path
            for name in (*published.train, *published.evaluation)
            for path in (folder / f"{name}.gz", folder / name)  # the last one counts
            if path.is_file()
        }
        missing = [n for n in (*published.train, *published.evaluation) if n not in found]
        if not missing:
            return folder, found
        seen.append(f"{folder} (lacks {', '.join(missing)})")
    raise DataError(
        f"the files of data set {spec.dataset!r} were not found; looked in {'; '.join(seen)}",
        hint=hint,
    )


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


@contextmanager
def _idx(path: Path, dimensions: int) -> Iterator[tuple[tuple[int, ...], BinaryIO]]:
    """Open an IDX file; give the shape in its header, and the elements to read."""
    expected = 0x08 << 8 | dimensions
    try:
        with _open(path) as stream:
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
            yield struct.unpack(f">{dimensions}I", start[4:]), stream
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(
                f"{path} cannot be read: {error.strerror}", hint="check its permissions"
            ) from None
        raise DataError(
            f"{path}: truncated or damaged: {error}",
            hint="download the file again; compare its size",
        ) from None


def _count_idx(paths: Sequence[Path]) -> int:
    """Return the number of samples, according to the headers of both files."""
    images, labels = paths
    with _idx(images, 3) as ((count, *size), _):
        pass
    if size != [28, 28]:
        raise DataError(
            f"{images}: images of {size[0]} x {size[1]} pixels; 28 x 28 expected",
            hint="for other images use the data set 'npz' or your own class",
        )
    with _idx(labels, 1) as ((label_count,), _):
        pass
    if label_count != count:
        raise DataError(
            f"{labels}: {label_count} labels for the {count} images of {images.name}",
            hint="the two files belong to different sets; download both again",
        )
    return count


def _read_idx(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    x_N, y_N = _elements(paths[0], 3), _elements(paths[1], 1)
    if len(y_N) and int(y_N.max()) >= _CLASSES:
        raise DataError(
            f"{paths[1]}: label {int(y_N.max())}; labels 0 to {_CLASSES - 1} expected",
            hint="the file is of another data set, or altered; download it again",
        )
    return x_N, y_N


def _elements(path: Path, dimensions: int) -> Tensor:
    """Return the elements as a uint8 tensor of the shape in the header."""
    with _idx(path, dimensions) as (shape, stream):
        size = math.prod(shape)
        elements = stream.read(size + 1)
    if len(elements) != size:
        what = "more" if len(elements) > size else f"only {len(elements)}"
        raise DataError(
            f"{path}: {what} bytes of elements, but its header announces {size}",
            hint="the file is truncated or altered; download it again",
        )
    return _bytes(elements).reshape(shape)


def _bytes(raw: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(raw), dtype=np.uint8))


def _read_cifar(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    parts = [_read_batch(path) for path in paths]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Return the pixels (N, P) uint8 and labels (N,) int64 of one file."""
    try:
        with _open(path) as stream:
            # Python 2 wrote these files; its str is bytes (pickle.Unpickler, "encoding").
            content = _Unpickler(stream, encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{path}: {error.message}", hint=error.hint) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    # "unpickling can raise other exceptions as well" (pickle.UnpicklingError): a damaged file is
    # a random program of the pickle machine.
    except Exception as error:
        raise DataError(
            f"{path}: truncated or not a pickled batch: {type(error).__name__}: {error}",
            hint="unpack the published archive again",
        ) from None
    try:
        return _batch_of(content)
    except ValueError as error:
        raise DataError(f"{path}: not a CIFAR-10 batch: {error}", hint=_CIFAR_HINT) from None


def _batch_of(content: object) -> tuple[Tensor, Tensor]:
    """Return the pixels and labels in an unpickled file; raise ``ValueError`` if it has others."""
    if not isinstance(content, dict):
        raise ValueError(f"a {type(content).__name__} instead of a dict")
    entries = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    pixels, labels = entries.get("data"), entries.get("labels")
    if not isinstance(pixels, _Recorded) or not isinstance(labels, list):
        raise ValueError(f"no 'data' array and 'labels' list, but {sorted(map(str, entries))}")
    state = pixels.state if isinstance(pixels.state, tuple) else ()
    _, shape, dtype, fortran, raw = state if len(state) == 5 else (None,) * 5  # ndarray.__reduce__
    kind = dtype.args[0] if isinstance(dtype, _Recorded) and dtype.args else None
    if kind not in (b"u1", "u1", b"|u1", "|u1"):
        raise ValueError(f"an array of {kind!r}; u1 expected")
    expected = len(labels), math.prod(PUBLISHED["cifar10"].shape)
    if (
        shape != expected
        or fortran
        or not isinstance(raw, bytes)
        or len(raw) != math.prod(expected)
    ):
        raise ValueError(
            f"'data' of shape {shape!r} (Fortran order: {fortran!r}) with {len(labels)} labels"
        )
    if wrong := [y for y in labels if type(y) is not int or not 0 <= y < _CLASSES]:
        raise ValueError(f"label {wrong[0]!r}; 0 to {_CLASSES - 1} expected")
    return _bytes(raw).reshape(expected), torch.tensor(labels, dtype=torch.int64)


class _Recorded:
    """Stand-in for NumPy's arrays and types, and the function that reconstructs an array."""

    def __init__(self, *args: object) -> None:
        self.args, self.state = args, object()

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: object, encoding: object) -> bytes:
    """Stand-in for ``_codecs.encode``, which Python 3 uses for bytes in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"text encoded as {encoding!r}")
    return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Recorded,
    ("numpy._core.multiarray", "_reconstruct"): _Recorded,
    ("numpy", "ndarray"): _Recorded,
    ("numpy", "dtype"): _Recorded,
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


@dataclass(frozen=True, kw_only=True)
class _Published(_Images):
    """A set that is read from a folder of its published files, ``.gz`` or not."""

    train: tuple[str, ...]
    evaluation: tuple[str, ...]
    read: Callable[[Sequence[Path]], tuple[Tensor, Tensor]]  # pixels and labels of either
    count: Callable[[Sequence[Path]], int | None]  # samples, before they are read
    hint: str
    known: tuple[str, ...] = ()  # folders: absolute ones, or in ``data.path``


def _mnist(mean: float, std: float, hint: str, *known: str) -> _Published:
    return _Published(
        shape=(1, 28, 28),
        mean=(mean,),
        std=(std,),
        train=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        evaluation=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
        read=_read_idx,
        count=_count_idx,
        hint=hint,
        known=known,
    )


_CIFAR_HINT = (
    "set data.path to the unpacked folder cifar-10-batches-py of the published "
    "cifar-10-python.tar.gz (data_batch_1 to data_batch_5 and test_batch)"
)

PUBLISHED = {
    # All 60,000 training images give 0.13066 and 0.30811.
    "mnist": _mnist(
        0.1307,
        0.3081,
        "set data.path to the folder of the four published IDX files (.gz or not): "
        "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
        "t10k-labels-idx1-ubyte",
    ),
    # All 60,000 training images give 0.28604 and 0.35302.
    "fashion-mnist": _mnist(
        0.2860,
        0.3530,
        "install Debian's package dataset-fashion-mnist, or download the four published IDX "
        "files (as for mnist) and set data.path to their folder",
        "/usr/share/datasets/fashion-mnist",  # Debian's dataset-fashion-mnist
    ),
    # Mean and standard deviation of all 50,000 training images: of red, green and blue.
    "cifar10": _Published(
        shape=(3, 32, 32),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        evaluation=("test_batch",),
        read=_read_cifar,
        count=lambda paths: None,
        hint=_CIFAR_HINT,
        known=("cifar-10-batches-py",),
    ),
}
