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
    """Meanings of a marker, which can be combined.

    Attributes:
        EPOCH: A training epoch is complete.
        EVAL: Its evaluation is complete.
        CHECKPOINT: Write a checkpoint at this cut.
        STOP: Exit after this marker; the run can be resumed.
        END: Training has finished.
        ASKED: A module has requested the checkpoint and may exit there.
        TEST: The evaluation of the test set is complete.
        MISSED: The batches since the message before it, up to its own id, were left out.
        SYNC: The replicas of each module share what they have learnt.
        SCALE: From the next id on other replicas take the batches.
    """

    EPOCH = 1
    EVAL = 2
    CHECKPOINT = 4
    STOP = 8
    END = 16
    ASKED = 32
    TEST = 64
    MISSED = 128
    SYNC = 256
    SCALE = 512
