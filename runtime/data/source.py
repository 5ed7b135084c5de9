"""Splits of a data set, and their batches in a reproducible order.

Shape suffixes: N samples of a split, B samples of a batch.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dni_runtime.data.ahead import in_processes, in_thread
from dni_runtime.data.augment import Augmentation, derived_seed, seeded
from dni_runtime.errors import DataError
from dni_runtime.packing import no_labels
from dni_runtime.spec import DataInfo, DataSpec
from dni_runtime.wire import Rows

logger = logging.getLogger(__name__)

Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]
"""Samples (B, …), float32 unless the data set holds integers, and labels (B, …), int64 or float32.

Samples with several inputs are a tuple of tensors. All are new tensors without other references.
Where one half is elsewhere, samples or labels are (B, 0).
"""

Half = Literal["samples", "labels"]
"""What is read of a data set whose samples and labels have different owners."""


class Split(Protocol):
    """The training or the evaluation samples."""

    slow: ClassVar[bool] = False  # loading a batch is so slow that reading ahead pays off

    def __len__(self) -> int:
        """N, the number of samples."""
        ...

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples of these numbers (int64, (B,)), in the order given."""
        ...

    def in_epoch(self, rng: np.random.Generator) -> Split:
        """Return the samples as one epoch uses them, possibly varied with ``rng``."""
        return self

    def held_out(self) -> Split:
        """Return the samples as evaluations use those held out for validation."""
        return self


@dataclass(frozen=True)
class MemorySplit(Split):
    """Samples in memory.

    8-bit images stay 8-bit and are normalised batch by batch: a quarter of the memory and loading
    time of float32, and batches take no longer (gathering rows is memory-bound).
    """

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


@dataclass(frozen=True)
class Halves(Split):
    """Samples and labels with different owners: of two splits, of which one may be absent here."""

    # Where they come from; None: there are none, and batches of them are ``[B, 0]``.
    samples: Split | None
    labels: Split | None  # likewise

    @property
    def slow(self) -> bool:  # type: ignore[override]  # of one class elsewhere
        """Whether one of them is slow."""
        return any(one.slow for one in (self.samples, self.labels) if one is not None)

    def __len__(self) -> int:
        one = self.samples or self.labels
        assert one is not None
        return len(one)

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples and labels of these numbers."""
        nothing = no_labels(len(order_B))
        x = nothing if self.samples is None else self.samples.batch(order_B)[0]
        return x, nothing if self.labels is None else self.labels.batch(order_B)[1]

    def in_epoch(self, rng: np.random.Generator) -> Halves:
        """Return both as one epoch uses them, varied by the same random numbers."""
        return Halves(
            *(one and one.in_epoch(copy.deepcopy(rng)) for one in (self.samples, self.labels))
        )

    def held_out(self) -> Halves:
        """Return both as evaluations use those held out for validation."""
        return Halves(*(one and one.held_out() for one in (self.samples, self.labels)))


@dataclass(frozen=True)
class Found:
    """A data set that exists but is not loaded yet."""

    info: DataInfo  # before ``flatten``, with all samples; None for unknown counts
    path: Path | None  # its folder or file; None: it needs none
    load: Callable[[], tuple[Split, Split]]  # reads the training and the evaluation samples


def resolve(path: str, base: Path) -> Path:
    """Return ``data.path`` as an absolute path: expand ``~``, start relative paths at ``base``."""
    return (base / Path(path).expanduser()).resolve()


def used(info: DataInfo, spec: DataSpec) -> DataInfo:
    """Return a data set's description after limits, validation part and ``flatten``."""
    sample = info.sample
    if spec.flatten:
        sample = sample.model_copy(update={"shape": (prod(sample.shape),)})
    train_samples, eval_samples = info.train_samples, _least(info.eval_samples, spec.eval_limit)
    test_samples = None
    if spec.validation is not None:
        eval_samples, test_samples = None, eval_samples
        if train_samples is not None:
            eval_samples = spec.held_out(train_samples)
            if eval_samples >= train_samples:
                raise DataError(
                    f"data set {spec.dataset!r}: data.validation {spec.validation} holds out "
                    f"{eval_samples} of {train_samples} training samples: none are left",
                    hint="lower data.validation",
                )
            train_samples -= eval_samples
    train_samples = _least(train_samples, spec.train_limit)
    if train_samples is not None and spec.train_batches(train_samples) == 0:
        raise DataError(
            f"data set {spec.dataset!r}: {train_samples} training samples do not fill one batch of "
            f"{spec.batch_size} (drop_last: {str(spec.drop_last).lower()}"
            f"{', streams: true' if spec.streams else ''})",
            hint="lower data.batch_size, raise data.train_limit, or set data.drop_last: false",
        )
    return info.model_copy(
        update={
            "sample": sample,
            "train_samples": train_samples,
            "eval_samples": eval_samples,
            "test_samples": test_samples,
        }
    )


def _least(count: int | None, limit: int | None) -> int | None:
    return count if count is None or limit is None else min(count, limit)


class DataSource:
    """Training and evaluation batches of one data set."""

    def __init__(
        self,
        info: DataInfo,
        train: Split,  # with the samples held out for validation
        evaluation: Split,  # the test set if there is a validation part
        spec: DataSpec,
        *,
        seed: int,  # at least 0
        augment: Augmentation | None = None,
    ) -> None:
        counts = {"train_samples": len(train), "eval_samples": len(evaluation)}
        self.info = used(info.model_copy(update=counts), spec)  # with the samples that are used
        self.has_test = spec.validation is not None  # evaluations use held-out training samples
        self._train, self._evaluation, self._spec, self._seed = train, evaluation, spec, seed
        self._augment = augment
        self._ordered: tuple[tuple[str, int], Sequence[Tensor]] = ("", 0), ()
        samples = self.info.train_samples or 0
        self.train_batch_count = spec.train_batches(samples)
        whole = spec.drop_last or spec.streams
        if samples > self.train_batch_count * spec.batch_size and not whole:
            logger.info(
                "data set %s: the last of %d training samples is left out of each epoch: "
                "a batch of one sample cannot be batch-normalised",
                spec.dataset,
                samples,
            )

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the training batches of one epoch from ``start`` on; those before are not read.

        Only the epoch and the seed determine the order, so that batch *k* of an epoch is the same
        after a restart.
        """
        return self.batches("train", epoch, start)

    def eval_batches(self, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one evaluation, in the data set's order; the last may be smaller.

        There are as many streams as samples allow, up to ``eval_batch_size``, all of one length.
        Batches before ``start`` are not read.
        """
        return self.batches("eval", 0, start)

    def test_batches(self, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of the test set, likewise; none if there is no validation part."""
        return self.batches("test", 0, start)

    def batches(self, split: str, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of ``train``, ``eval`` or ``test`` from one on."""
        part, orders_B = self._part(split, epoch)
        trains, processes = split == "train", self._spec.workers
        if not (trains and processes and (part.slow or self._augment)):
            return self._read(part, orders_B, epoch if trains else None, start)

        def make(number: int) -> Batch:
            # Nothing else in this process uses torch's global generator: data sets may use it.
            with seeded(self._seed, epoch, number, 1):
                batch = part.batch(orders_B[number])
            return self._finished(batch, epoch, number)

        numbers = range(start, len(orders_B))
        return in_processes(make, numbers, processes, seed=derived_seed(self._seed, epoch))

    def some_batches(
        self, split: str, epoch: int, start: int, takes: Callable[[], bool]
    ) -> Iterator[Batch | None]:
        """Yield the same batches, with None in place of those that are not to be read.

        ``takes`` is called before each one, and returns whether to read it.
        """
        part, orders_B = self._part(split, epoch)
        for number in range(start, len(orders_B)):
            if takes():
                batch = part.batch(orders_B[number])
                yield self._finished(batch, epoch if split == "train" else None, number)
            else:
                yield None

    def _part(self, split: str, epoch: int) -> tuple[Split, Sequence[Tensor]]:
        """Return the samples of ``train``, ``eval`` or ``test``, and their order by batches."""
        if split == "train":
            return self._epoch(epoch)
        held_out = split == "eval" and self.has_test
        return self._train.held_out() if held_out else self._evaluation, self._in_order(split)

    def _epoch(self, epoch: int) -> tuple[Split, Sequence[Tensor]]:
        """Return the training samples as an epoch uses them, and their order by batches."""
        samples, spec, split = self.info.train_samples or 0, self._spec, self._train
        orders_B: Sequence[Tensor]
        if spec.streams:
            orders_B = _dealt(samples, spec.batch_size)
        elif spec.shuffle:
            rng = np.random.default_rng([self._seed, epoch])
            orders_B = torch.split(torch.from_numpy(rng.permutation(samples)), spec.batch_size)
            split = split.in_epoch(rng)
        else:
            orders_B = torch.split(torch.arange(samples), spec.batch_size)
        return split, orders_B[: self.train_batch_count]

    def _in_order(self, name: str) -> Sequence[Tensor]:
        """Return the order by batches of the evaluation or the test set."""
        samples, first = self.info.test_samples or 0, 0
        if name == "eval":
            samples = self.info.eval_samples or 0
            first = len(self._train) - samples if self.has_test else 0
        if not samples:
            return ()
        if self._spec.streams:
            orders_B: Sequence[Tensor] = _dealt(samples, min(samples, self._spec.eval_size))
        else:
            orders_B = torch.split(torch.arange(samples), self._spec.eval_size)
        return [first + order_B for order_B in orders_B]

    @property
    def splits(self) -> dict[str, Split]:
        """All samples, without limits, order and augmentation."""
        return {"train": self._train, "eval": self._evaluation}

    def rows(self, split: str, epoch: int, number: int) -> Rows | None:
        """Return which samples a batch of ``train``, ``eval`` or ``test`` has.

        None: there is no such batch.
        """
        key, info = (split, epoch if split == "train" else 0), self.info
        if self._ordered[0] != key:
            self._ordered = key, self._part(split, epoch)[1]
        orders_B = self._ordered[1]
        if number >= len(orders_B):
            return None
        counts = (one or 0 for one in (info.train_samples, info.eval_samples, info.test_samples))
        return Rows(split, number, zlib.crc32(orders_B[number].numpy().data), *counts)

    def _read(
        self,
        split: Split,
        orders_B: Sequence[Tensor],
        epoch: int | None,
        start: int,
    ) -> Iterator[Batch]:
        """Yield the batches of these numbers from ``start`` on; augment those of an epoch."""
        numbers = range(start, len(orders_B))
        loaded = (split.batch(orders_B[number]) for number in numbers)
        with closing(in_thread(loaded)) if split.slow else nullcontext(loaded) as batches:
            for number, batch in zip(numbers, batches, strict=False):
                yield self._finished(batch, epoch, number)

    def _finished(self, batch: Batch, epoch: int | None, number: int) -> Batch:
        # Never in the thread that reads ahead: the model uses torch's global generator, too.
        x, y = batch
        if isinstance(x, tuple):
            return batch
        if self._augment is not None and epoch is not None:
            x = self._augment(x, epoch, number)
        return (x.reshape(len(x), -1), y) if self._spec.flatten else (x, y)


def _dealt(samples: int, rows: int) -> tuple[Tensor, ...]:
    """Split sample numbers into streams: row b of batch k is b * (samples // rows) + k."""
    length = samples // rows
    return torch.arange(rows * length).reshape(rows, length).t().contiguous().unbind()
