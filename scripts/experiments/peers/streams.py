"""Real data for training to an accuracy: a data set of short epochs, MNIST, and text.

Chain files name :class:`Stream` by import path.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

CHUNK = 1 << 16
HELD_OUT = 16
"""One chunk of a text in so many is for evaluation."""

EVAL_WINDOWS = 512


class Stream(Dataset[tuple[Tensor, Tensor]]):
    """Samples of an ``.npz`` file in epochs of any length, for evaluation after so many batches.

    Training samples come in an order of its own, which goes on from epoch to epoch: all of them
    have come before one comes again. Which numbers are asked for makes no difference. In the
    file, images are bytes, tokens int64; ``length`` is the training samples in an epoch.
    """

    def __init__(self, train: bool, path: str, length: int, seed: int) -> None:
        with np.load(path) as arrays:
            part = "train" if train else "eval"
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
            if x.dtype == np.uint8:  # normalised, with the training images' figures
                pixels = arrays["x_train"]
                self._mean, self._std = float(pixels.mean()), float(pixels.std())
        self._x_N, self._y_N = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
        self.num_classes = int(self._y_N.max()) + 1 if self._y_N.ndim == 1 else 256
        self._length = length if train else len(x)
        self._random = np.random.default_rng(seed) if train else None
        self._order_N = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """As many samples, which is how torch's DataLoader asks for a batch."""
        numbers_B = torch.from_numpy(self._next(indices))
        x_BX, y_BY = self._x_N[numbers_B], self._y_N[numbers_B]
        if x_BX.dtype == torch.uint8:
            x_BX = x_BX.to(torch.float32).sub_(self._mean).div_(self._std)
        return list(zip(x_BX.unbind(), y_BY.unbind(), strict=True))

    def _next(self, indices: list[int]) -> Any:
        if self._random is None:
            return np.asarray(indices)
        while len(self._order_N) < len(indices):
            order_N = self._random.permutation(len(self._x_N))
            self._order_N = np.concatenate([self._order_N, order_N])
        numbers_B, self._order_N = np.split(self._order_N, [len(indices)])
        return numbers_B


def write_mnist(folder: Path, mnist: str) -> Path:
    """MNIST, the four IDX files in a folder, as an ``.npz`` file."""
    from dni_runtime.data import open_data
    from dni_runtime.spec import DataSpec

    spec = DataSpec(
        dataset="mnist", path=mnist, batch_size=60_000, eval_batch_size=10_000, shuffle=False,
        normalize=False,
    )  # fmt: skip
    source = open_data(spec, folder, seed=0)
    arrays = {}
    for part, read in (("train", source.train_batches(1)), ("eval", source.eval_batches())):
        x_BX, y_BY = next(iter(read))
        arrays[f"x_{part}"] = x_BX.mul(255).round().to(torch.uint8).numpy()
        arrays[f"y_{part}"] = y_BY.numpy()
    np.savez(folder / "mnist.npz", **arrays)
    return folder / "mnist.npz"


def write_text(folder: Path, text: bytes, context: int) -> Path:
    """A text as windows of so many characters, each with the character that follows.

    Each byte is a character. One chunk of 64 KB in 16 is held out; of shorter texts chunks are
    smaller.
    """
    chunk = min(CHUNK, len(text) // HELD_OUT)
    if chunk <= context:
        raise ValueError(f"a text of {len(text)} bytes is too short for windows of {context}")
    found: dict[str, list[Any]] = {"train": [], "eval": []}
    for number, start in enumerate(range(0, len(text) - context, chunk)):
        data = np.frombuffer(text[start : start + chunk], dtype=np.uint8).astype(np.int64)
        count = (len(data) - 1) // context
        pair = [data[i : count * context + i].reshape(count, context) for i in (0, 1)]
        found["eval" if number % HELD_OUT == HELD_OUT - 1 else "train"].append(pair)
    arrays = {}
    for part, pairs in found.items():
        x, y = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        if part == "eval":
            few = np.linspace(0, len(x) - 1, min(len(x), EVAL_WINDOWS)).astype(np.int64)
            x, y = x[few], y[few]
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    np.savez(folder / "text.npz", **arrays)
    return folder / "text.npz"


def library_text() -> bytes:
    """The sources of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts))
    return b"\n".join(file.read_bytes() for file in files)
