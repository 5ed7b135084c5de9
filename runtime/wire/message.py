"""Messages as values, on either side of the codec (docs/wire.md, "Message")."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag
from typing import NamedTuple, TypeAlias

PROTOCOL_VERSION = 3


class Kind(IntEnum):
    """Purpose of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    BATCH = 4
    MARK = 5
    GRADIENT = 6
    ACK = 7
    DRAINED = 8
    REQUEST = 9
    BYE = 10


class Mode(IntEnum):
    """Use of a batch by the modules."""

    TRAIN = 0
    EVAL = 1
    PREDICT = 2


class Mark(IntFlag):
    """Meanings of a marker, which can be combined."""

    EPOCH = 1  # a training epoch is complete
    EVAL = 2  # its evaluation is complete
    CHECKPOINT = 4  # write a checkpoint at this cut
    STOP = 8  # exit after this marker; the run can be resumed
    END = 16  # training has finished
    ASKED = 32  # a module has requested the checkpoint and may exit there
    TEST = 64  # the evaluation of the test set is complete
    MISSED = 128  # batches since the message before it, up to its own id, were left out
    SYNC = 256  # the replicas of each module share what they have learnt


Body: TypeAlias = "bool | int | float | str | list[Body] | dict[str, Body] | None"
"""Content of a body: any JSON value."""

Buffer: TypeAlias = bytes | memoryview

NO_MARK = Mark(0)
NO_BODY: Mapping[str, Body] = {}


def nbytes(buffer: Buffer) -> int:
    """Return the bytes in a buffer (a memoryview's length counts its items)."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


class TensorEntry(NamedTuple):
    """One row of a message's tensor table."""

    name: str  # h, y or g; h_scale or g_scale; x0, x1 … for inputs of the data
    dtype: str  # torch's name
    shape: tuple[int, ...]  # with the batch dimension


class Message(NamedTuple):
    """A message of any kind; docs/wire.md lists the fields that each kind uses."""

    kind: Kind
    run: str
    source: str  # the module that sends it
    id: int = 0  # position in the stream, from 1; 0 if it has none
    epoch: int = 0  # of a batch or marker
    mode: Mode = Mode.TRAIN
    mark: Mark = NO_MARK
    ack: int = 0  # everything up to this id has been processed
    tensors: tuple[TensorEntry, ...] = ()
    buffers: tuple[Buffer, ...] = ()  # in the table's order
    body: Mapping[str, Body] = NO_BODY  # the kind's own fields
