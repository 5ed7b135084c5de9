"""A data set: its splits' batches in a reproducible order.

Shape suffixes: N samples of a split, B samples of a batch.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dni_runtime.data.ahead import in_processes, in_thread
from dni_runtime.data.augment import Augmentation, derived_seed, seeded
from dni_runtime.data.splits import Batch, Split
from dni_runtime.errors import DataError
from dni_runtime.files import expanded
from dni_runtime.spec import DataInfo, DataSpec
from dni_runtime.wire import Rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A data set that exists but is not loaded yet."""

    info: DataInfo  # before ``flatten``, with all samples; None for unknown counts
    path: Path | None  # its folder or file; None: it needs none
    load: Callable[[], tuple[Split, Split]]  # reads the training and the evaluation samples


def resolve(path: str, base: Path) -> Path:
    """Return ``data.path`` as an absolute path: expand ``~``, start relative paths at ``base``."""
    return (base / expanded(path)).resolve()


def used(info: DataInfo, spec: DataSpec) -> DataInfo:
    """Return a data set's description after limits, validation part and ``flatten``."""
    sample = info.sample
    if spec.flatten:
        sample = sample.model_copy(update={"shape": (prod(sample.shape),)})
    train_samples, eval_samples = info.train_samples, _least(info.eval_samples, spec.eval_limit)
    test_samples = None
    if spec.validation is not None:
        eval_samples, test_samples = None, eval_samples or None
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
    if train_samples == 0:
        raise DataError(
            f"data set {spec.dataset!r} has no training samples",
            hint="'x_train' and 'y_train' of an .npz file, say; 'dnictl predict' needs none",
        )
    if train_samples is not None and spec.train_batches(train_samples) == 0:
        raise DataError(
            f"data set {spec.dataset!r}: {train_samples} training samples do not fill one batch of "
            f"{spec.batch_size} (drop_last: {str(spec.drop_last).lower()}"
            f"{', streams: true' if spec.streams else ''})",
            hint="lower data.batch_size, raise data.train_limit, or set data.drop_last: false"
            if spec.drop_last or spec.streams
            else "a batch of one sample is left out: add some, raise data.train_limit, or set "
            "data.batch_size: 1",
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
        self.holds_out = spec.validation is not None  # evaluations use held-out training samples
        self.has_test = self.holds_out and len(evaluation) > 0
        self._train, self._evaluation, self._spec, self._seed = train, evaluation, spec, seed
        self._augment = augment
        self._ordered: tuple[tuple[str, int], Sequence[Tensor]] = ("", 0), ()
        self._numbers = self._chosen()
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

    def _chosen(self) -> dict[str, Tensor]:
        """Return the numbers of the samples of ``train``, ``eval`` and ``test``, in their order.

        If some are left out, the seed draws those that are used: of each class in proportion, if
        the classes are known. Of samples in order they are the first, and those held out the last.
        """
        info, train, evaluation = self.info, self._train, self._evaluation
        numbers_N = torch.arange(len(train))
        held_N = numbers_N[:0]
        if self.holds_out:
            held_N = self._drawn(train, numbers_N, info.eval_samples or 0, 1, last=True)
            rest_N = torch.ones(len(train), dtype=torch.bool)
            rest_N[held_N] = False
            numbers_N = numbers_N[rest_N]
        evaluation_N = torch.arange(len(evaluation))
        count = (info.test_samples if self.holds_out else info.eval_samples) or 0
        evaluation_N = self._drawn(evaluation, evaluation_N, count, 3)
        return {
            "train": self._drawn(train, numbers_N, info.train_samples or 0, 2),
            "eval": held_N if self.holds_out else evaluation_N,
            "test": evaluation_N if self.holds_out else evaluation_N[:0],
        }

    def _drawn(
        self, split: Split, numbers_N: Tensor, count: int, draw: int, *, last: bool = False
    ) -> Tensor:
        """Return ``count`` of a split's samples, in their order; ``draw`` is of each call."""
        size = len(numbers_N)
        if count >= size:
            return numbers_N
        if not self._spec.shuffle or split.ordered:
            return numbers_N[size - count :] if last else numbers_N[:count]
        rng = np.random.default_rng([self._seed, 0, 0, draw])
        drawn_N = numbers_N[torch.from_numpy(rng.permutation(size))]
        # If labels are a data set of their own, their owner has to draw as the head does.
        classes_N = None if self._spec.splits else split.classes()
        if classes_N is not None:
            # Every n-th one of all, class by class, has each class's share of them.
            drawn_N = drawn_N[torch.argsort(classes_N[drawn_N], stable=True)]
            drawn_N = drawn_N[(torch.arange(count) * size + size // 2) // count]
        return drawn_N[:count].sort().values

    def one_class(self, labels: Mapping[str, Tensor | None]) -> list[str]:
        """Return which of ``train``, ``eval`` and ``test`` have samples of one class alone.

        ``labels`` are those of each of :attr:`splits`, where they have been read.
        """
        names = []
        for name, numbers_N in self._numbers.items():
            part = "eval" if self._evaluates(name) else "train"
            classes_N = self.splits[part].classes()
            classes_N = labels.get(part) if classes_N is None else classes_N
            if classes_N is None or len(numbers_N) < 2 or self.info.classes == 1:
                continue
            used_N = classes_N[numbers_N]
            if bool((used_N == used_N[0]).all()):
                names.append(name)
        return names

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
        """Yield the batches of the test set, likewise; none if there is no test set."""
        return self.batches("test", 0, start)

    def evaluated(self) -> tuple[Iterator[Batch], Tensor]:
        """Return the batches of the test set, else of an evaluation, and their samples' numbers."""
        split = "test" if self.has_test else "eval"
        orders_B = self._part(split, 0)[1]
        return self.batches(split, 0, 0), torch.cat([self._numbers[split][:0], *orders_B])

    def batches(self, split: str, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of ``train``, ``eval`` or ``test`` from one on."""
        part, orders_B = self._part(split, epoch)
        trains = split == "train"
        if part.draws and not trains:  # read in turn: each evaluation has the same numbers
            batches = self.some_batches(split, 0, start, lambda: True)
            return (batch for batch in batches if batch is not None)
        # What a thread would draw depends on when, and the model draws from the same generator.
        processes = self._spec.workers or int(part.draws)
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
                with seeded(self._seed, epoch, number, 1):
                    batch = part.batch(orders_B[number])
                yield self._finished(batch, epoch if split == "train" else None, number)
            else:
                yield None

    def _part(self, split: str, epoch: int) -> tuple[Split, Sequence[Tensor]]:
        """Return the samples of ``train``, ``eval`` or ``test``, and their order by batches."""
        if split == "train":
            return self._epoch(epoch)
        part = self._evaluation if self._evaluates(split) else self._train.held_out()
        numbers_N = self._numbers[split]
        if not len(numbers_N):
            return part, ()
        if self._spec.streams:
            return part, _dealt(numbers_N, min(len(numbers_N), self._spec.eval_size))
        return part, torch.split(numbers_N, self._spec.eval_size)

    def _evaluates(self, split: str) -> bool:
        """Whether ``eval`` or ``test`` has evaluation samples, not some held out of training."""
        return split == "test" or (split == "eval" and not self.holds_out)

    def _epoch(self, epoch: int) -> tuple[Split, Sequence[Tensor]]:
        """Return the training samples as an epoch uses them, and their order by batches."""
        numbers_N, spec, split = self._numbers["train"], self._spec, self._train
        orders_B: Sequence[Tensor]
        if spec.streams:
            orders_B = _dealt(numbers_N, spec.batch_size)
        elif spec.shuffle:
            rng = np.random.default_rng([self._seed, epoch])
            order_N = torch.from_numpy(rng.permutation(len(numbers_N)))
            orders_B = torch.split(numbers_N[order_N], spec.batch_size)
            split = split.in_epoch(rng)
        else:
            orders_B = torch.split(numbers_N, spec.batch_size)
        return split, orders_B[: self.train_batch_count]

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


def _dealt(numbers_N: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Split samples into streams: row b of batch k is number b * (N // rows) + k of them."""
    length = len(numbers_N) // rows
    return numbers_N[: rows * length].reshape(rows, length).t().contiguous().unbind()
