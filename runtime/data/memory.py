"""Data sets in memory: one ``index_select`` per batch.

8-bit images stay 8-bit and are normalised batch by batch: a quarter of the memory and loading time
of float32, and batches take no longer (gathering rows is memory-bound).

Shape suffixes: N samples of a split, B samples of a batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dni_runtime.data.source import Batch, Split
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec


@dataclass(frozen=True)
class MemorySplit(Split):
    """Samples in memory."""

    x: Tensor  # (N, …): uint8 images, or float32 or int64, which stay unchanged
    y: Tensor  # (N, …), int64 or float32
    # Subtracted from uint8 images, in their own units; broadcasts over a sample.
    mean: Tensor | None = None
    std: Tensor | None = None  # divisor of uint8 images after that

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples of these numbers."""
        x = self.x.index_select(0, order_B)
        if x.dtype == torch.uint8:
            x = x.to(torch.float32)
            if self.mean is not None:
                x.sub_(self.mean)
            if self.std is not None:
                x.div_(self.std)
        return x, self.y.index_select(0, order_B)


def image_split(
    x_NCHW: Tensor,  # uint8
    y_N: Tensor,  # int64
    spec: DataSpec,  # ``normalize: false`` scales to [0, 1] only
    *,
    mean: Sequence[float],  # of each channel, of pixels scaled to [0, 1]
    std: Sequence[float],  # likewise
    largest: float = 255.0,  # value of a white pixel
) -> MemorySplit:
    """Return images with one mean and one standard deviation per channel."""
    x_NCHW = x_NCHW.contiguous()
    if not spec.normalize:
        return MemorySplit(x_NCHW, y_N, None, torch.tensor(largest, dtype=torch.float32))
    mean_C11, std_C11 = (
        torch.tensor(v, dtype=torch.float32).reshape(-1, 1, 1) * largest for v in (mean, std)
    )
    return MemorySplit(x_NCHW, y_N, mean_C11, std_C11)


def image_info(
    shape: tuple[int, int, int],
    *,
    classes: int,
    train_samples: int | None,
    eval_samples: int | None,
) -> DataInfo:
    """Describe a set of images of ``shape`` (C, H, W) with one class label each."""
    return DataInfo(
        sample=TensorSpec(shape=shape, dtype="float32"),
        label=TensorSpec(shape=(), dtype="int64"),
        classes=classes,
        train_samples=train_samples,
        eval_samples=eval_samples,
    )
