"""The tail's own labels: for each batch those of the samples that the head has taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from dni_runtime.core.losses import ChainLoss
from dni_runtime.data import DataSource
from dni_runtime.errors import DataError
from dni_runtime.link import Batch
from dni_runtime.wire import Rows


class Labels:
    """Labels of batches, in any order; those that follow each other are read ahead.

    The source has the head's settings; the chain's loss weighs parts of a batch.
    """

    def __init__(self, source: DataSource, loss: ChainLoss) -> None:
        self._source, self._loss = source, loss
        self._at: tuple[str, int, int] | None = None  # split, epoch and number of the newest
        self._batches: Iterator[Any] = iter(())
        self._y_BY: Tensor

    def complete(self, batch: Batch) -> Batch:
        """Return a batch with its labels; the head must have the same samples in the same order."""
        rows, part = batch.rows, batch.part
        assert rows is not None  # the link accepts no other batch
        at = rows.split, batch.epoch, rows.number
        if at != self._at:
            self._check(rows, batch.epoch)
            if self._at is None or at != (*self._at[:2], self._at[2] + 1):
                self._batches = self._source.batches(*at)
            _, self._y_BY = next(self._batches)
            self._at = at
        first = 0 if part is None else part.first
        samples = len(self._y_BY) if part is None else part.samples
        y_BY = self._y_BY[first : first + len(batch.y)]
        if len(y_BY) != len(batch.y) or samples != len(self._y_BY):
            raise DataError(
                f"batch {rows.number} of {rows.split!r} has {samples} samples, but "
                f"{len(self._y_BY)} labels"
            )
        if part is not None:
            part = part._replace(shares=self._loss.shares(y_BY, self._y_BY))
        return replace(batch, y=y_BY, part=part)

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches = iter(())

    def _check(self, theirs: Rows, epoch: int) -> None:
        ours = self._source.rows(theirs.split, epoch, theirs.number)
        if ours == theirs:
            return
        counts = self._source.info
        for name, count, expected in (
            ("training", counts.train_samples, theirs.train),
            ("evaluation", counts.eval_samples, theirs.evaluation),
            ("test", counts.test_samples, theirs.test),
        ):
            if (count or 0) != expected:
                raise DataError(
                    f"the head uses {expected} {name} samples, but there are labels of "
                    f"{count or 0}",
                    hint="both need the same samples in the same order, and the same limits",
                )
        raise DataError(
            f"batch {theirs.number} of {theirs.split!r} (epoch {epoch}) has other samples at the "
            "head than here",
            hint="both need the same 'seed' and 'data' settings: build all images from one chain "
            "file",
        )
