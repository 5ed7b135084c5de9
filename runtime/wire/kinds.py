"""Kinds of messages, modes of batches, and markers (docs/wire.md, "Message")."""

from __future__ import annotations

from enum import IntEnum, IntFlag

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
