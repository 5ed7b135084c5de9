"""The body of a BATCH: which samples it has (docs/wire.md, "Stream")."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as brief
from typing import NamedTuple

from dni_runtime.errors import WireError
from dni_runtime.wire.codec import SIZE_LIMIT
from dni_runtime.wire.message import Body, Message, Mode

SPLITS = ("train", "eval", "test")


class Part(NamedTuple):
    """Samples of a training batch that are sent together (a micro-batch)."""

    first: int  # number of the first sample, from 0
    samples: int  # of the whole batch
    # what share of the batch each loss counts in it, of its valid labels or of their weights;
    # empty: as many as it has of the samples
    shares: tuple[float, ...] = ()

    def ends_with(self, count: int) -> bool:
        """Return whether a part of ``count`` samples is the batch's last."""
        return self.first + count >= self.samples


class Rows(NamedTuple):
    """A digest of the numbers of a batch's samples.

    The owner of the labels finds them by ``split`` and ``number``, and compares the rest with its
    own data.
    """

    split: str  # one of SPLITS
    number: int  # of the batch in its epoch or evaluation, from 0
    order: int  # CRC-32 of the samples' numbers in their order
    train: int  # number of training samples; likewise the next two
    evaluation: int
    test: int


def body_of(part: Part | None, rows: Rows | None) -> dict[str, Body]:
    """Return the body of a BATCH."""
    body: dict[str, Body] = {}
    if part is not None:
        body["part"] = [part.first, part.samples, *part.shares]
    if rows is not None:
        body["rows"] = [*rows]
    return body


def samples_of(message: Message) -> tuple[Part | None, Rows | None]:
    """Return which samples a BATCH has: its part of a training batch, and its place in the data.

    Raises ``WireError`` (``body``) if the body is not valid in a BATCH.
    """
    if not message.body:
        return None, None
    body = dict(message.body)
    part = _part(body.pop("part")) if "part" in body else None
    rows = _rows(body.pop("rows")) if "rows" in body else None
    if body or (part is not None and message.mode is not Mode.TRAIN):
        raise _wrong(message.body)
    return part, rows


def _part(value: Body) -> Part:
    match value:
        case [int(first), int(samples), *shares]:
            fractions = [share for share in shares if isinstance(share, float) and 0 <= share <= 1]
            fits = len(fractions) == len(shares) and {type(first), type(samples)} == {int}
            if fits and 0 <= first < samples <= SIZE_LIMIT:
                return Part(first, samples, tuple(fractions))
    raise _wrong({"part": value})


def _rows(value: Body) -> Rows:
    match value:
        case [str(split), *numbers] if split in SPLITS and len(numbers) == len(Rows._fields) - 1:
            counts = [number for number in numbers if type(number) is int and 0 <= number < 1 << 63]
            if len(counts) == len(numbers):
                return Rows(split, *counts)
    raise _wrong({"rows": value})


def _wrong(body: Mapping[str, Body]) -> WireError:
    return WireError("body", f"BATCH with {brief(dict(body))}")
