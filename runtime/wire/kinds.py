"""What a message can be: kinds, modes and markers (docs/wire.md, "Message")."""

from __future__ import annotations

from enum import IntEnum, IntFlag

PROTOCOL_VERSION = 2


class Kind(IntEnum):
    """What a message is for."""

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
    """What a module does with a batch."""

    TRAIN = 0
    EVAL = 1
    PREDICT = 2


class Mark(IntFlag):
    """What a marker says; several may be said at once.

    Attributes:
        EPOCH: A training epoch is complete.
        EVAL: Its evaluation is complete.
        CHECKPOINT: Write a checkpoint at this cut.
        STOP: Leave after this; the run can be resumed.
        END: Training has finished.
        ASKED: The checkpoint is one that a module has asked for, which may leave at it.
        TEST: The evaluation of the test set is complete.
    """

    EPOCH = 1
    EVAL = 2
    CHECKPOINT = 4
    STOP = 8
    END = 16
    ASKED = 32
    TEST = 64
