"""MNIST's images as two inputs: their upper and their lower halves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Halves(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """See the module's description; ``path`` is the folder of MNIST's four files."""

    num_classes = 10

    def __init__(self, train: bool, path: str) -> None:
        folder, part = Path(path), "train" if train else "t10k"
        pixels = _idx(folder / f"{part}-images-idx3-ubyte", 16).reshape(-1, 784)
        self.x_NP = (torch.from_numpy(pixels).float() - 33.3) / 78.6
        self.y_N = torch.from_numpy(_idx(folder / f"{part}-labels-idx1-ubyte", 8)).long()

    def __len__(self) -> int:
        return len(self.y_N)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x_P = self.x_NP[index]
        return (x_P[:392], x_P[392:]), self.y_N[index]


def _idx(file: Path, header_bytes: int) -> np.ndarray:
    return np.fromfile(file, np.uint8, offset=header_bytes)
