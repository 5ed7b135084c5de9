"""The error tree: every failure that a user can cause or can do something about.

::

    DniError                     70  EX_SOFTWARE
    ├── UsageError               64  EX_USAGE        a command line that cannot be carried out
    ├── ImageError               65  EX_DATAERR      wrong, foreign or tampered image
    ├── DataError                66  EX_NOINPUT      data that is missing or malformed
    ├── UnavailableError         69  EX_UNAVAILABLE  a program, device, port or interface is missing
    │   └── UnansweredError      68  EX_NOHOST       a neighbour that has not answered
    ├── BuildError               70  EX_SOFTWARE     an image build failed
    ├── WorkerError              70  EX_SOFTWARE     a worker failed during a run
    │   └── DiskError            73  EX_CANTCREAT    a worker cannot write a file of its run
    ├── CheckpointError          74  EX_IOERR        a checkpoint cannot be written or read
    │   └── DamagedError         72  EX_OSFILE       a part of a checkpoint is cut off or altered
    ├── StoppedError             75  EX_TEMPFAIL     stopped before the end; the run can be resumed
    ├── DivergedError            79                  a loss, gradient or weight is not finite
    ├── WireError                76  EX_PROTOCOL     a message that cannot be accepted
    ├── RequestError             76  EX_PROTOCOL     a request over HTTP that is not answered
    ├── HandshakeError           76  EX_PROTOCOL     two modules that do not fit together
    │   └── EncryptionError      76  EX_PROTOCOL     two modules that cannot agree on encryption
    └── SpecError                78  EX_CONFIG       a chain.yaml that cannot be used

Exit codes are those of sysexits(3), which end at 78; a worker that exits with one of ``LASTING`` is
not restarted, because it would fail in the same way again. ``__str__`` composes an error's text,
``hint`` is what to do next; only ``dnictl`` and the worker's entry point print errors.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

LASTING = frozenset({64, 65, 66, 68, 69, 72, 74, 76, 78, 79, 126, 127})
"""Exit codes of failures that a restart cannot fix (126, 127: the program does not exist)."""


class DniError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        message: What is wrong, naming file, field and value.
        location: The chain's setting that it is about, as keys and indices; empty for none.
        hint: What to do next, or None.
    """

    exit_code: ClassVar[int] = 70
    tail: Sequence[str] = ()

    def __init__(
        self, message: str, *, location: Sequence[str | int] = (), hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.location = tuple(location)
        self.hint = hint

    @property
    def path(self) -> str:
        """The location as text, such as ``modules[1].layers[0].Linear``."""
        text = ""
        for part in self.location:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text

    @property
    def where(self) -> str:
        """What the text begins with: where the error is; empty if that is not known."""
        return self.path

    def __str__(self) -> str:
        lines = [": ".join(filter(None, (self.where, self.message)))]
        lines += [f"  | {line}" for line in self.tail]
        return "\n".join([*lines, *([] if self.hint is None else [f"  → {self.hint}"])])


class UsageError(DniError):
    """A command line that cannot be carried out."""

    exit_code = 64


class ImageError(DniError):
    """An image belongs to another spec, lacks a required signature, or was altered."""

    exit_code = 65


class DataError(DniError):
    """A data set is missing, incomplete or malformed."""

    exit_code = 66


class UnavailableError(DniError):
    """A required program, device, network interface or port is missing."""

    exit_code = 69


class UnansweredError(UnavailableError):
    """Another module of the run, or another replica, has not answered in time."""

    exit_code = 68


class BuildError(DniError):
    """Building an image failed.

    Attributes:
        tail: The last lines that the builder printed.
    """

    def __init__(self, message: str, *, tail: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.tail = tuple(tail)


class WorkerError(DniError):
    """A worker exited before its run finished."""


class DiskError(WorkerError):
    """A worker cannot write a file of its run; it can be restarted when the disk has room."""

    exit_code = 73


class CheckpointError(DniError):
    """A checkpoint cannot be written, is incomplete, or belongs to another module."""

    exit_code = 74


class DamagedError(CheckpointError):
    """A part of a checkpoint is missing, cut off or altered; older checkpoints may be intact."""

    exit_code = 72


class StoppedError(DniError):
    """The run was stopped before its end; it can be resumed from its checkpoint."""

    exit_code = 75


class DivergedError(DniError):
    """A loss, gradient or weight is not finite (NaN or infinite)."""

    exit_code = 79


class WireError(DniError):
    """A message is malformed or breaks the contract of its link.

    Attributes:
        reason: A short word for counters, such as ``truncated``, ``version`` or ``shape``.
        version: The protocol version of the message, if it is another one.
    """

    exit_code = 76

    def __init__(self, reason: str, message: str, *, version: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.version = version


class RequestError(DniError):
    """A request over HTTP that is wrong, or cannot be answered now.

    Attributes:
        status: The status of the response.
        place: Which part of the request it is about, such as ``inputs[0].data``; empty: all of it.
        retry_after_s: After how many seconds it may be answered if it is sent again, or None.
    """

    exit_code = 76

    def __init__(
        self,
        status: int,
        message: str,
        *,
        place: str = "",
        hint: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.place = place
        self.retry_after_s = retry_after_s

    @property
    def where(self) -> str:
        return self.place


class HandshakeError(DniError):
    """The two ends of a link do not belong together (protocol, spec or shapes differ)."""

    exit_code = 76


class EncryptionError(HandshakeError):
    """The two ends of a link lack each other's keys, or only one of them encrypts."""


class SpecError(DniError):
    """A chain specification cannot be used.

    Attributes:
        file: The file's name, or None for a spec that was not read from a file.
        line: One-based line in the file, or None.
    """

    exit_code = 78

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        location: Sequence[str | int] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, location=location, hint=hint)
        self.file = file
        self.line = line

    @property
    def where(self) -> str:
        place = (self.file or "") + ("" if self.line is None else f":{self.line}")
        return ": ".join(filter(None, (place, self.path)))


def with_causes(error: BaseException) -> str:
    """Return the text of an error and of those that have caused it, the first cause last."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 10:
        text = f"{type(cause).__name__}: {cause}"
        if text not in texts and not isinstance(cause, DniError):  # of an earlier try
            texts.append(text)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return ", caused by ".join(texts)


_OURS = "dnictl", "dni_runtime"
_EXITING = "click", "argparse", "rich"  # they exit for whoever calls them


def unreadable(file: Path, error: Exception) -> str:
    """Return what is wrong with a file, which is named once."""
    return f"{str(file)!r} cannot be read: {getattr(error, 'strerror', None) or error}"


def exited(error: SystemExit) -> SpecError | None:
    """Return the error that a user's code ends the program; None if the program itself does."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _OURS:
            return None
        if package not in _EXITING:
            return SpecError(
                f"{frame.f_code.co_filename}:{line} ends the program: sys.exit({error.code!r})",
                hint="raise an error there, which would be told with its place",
            )
    return None


NEEDED = "click", "numpy", "pydantic", "rich", "safetensors", "torch", "yaml", "zmq"


def hidden_package() -> UsageError | None:
    """Return the error that one of the packages needed is a single file of somebody else's."""
    for name in NEEDED:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not file.endswith("__init__.py"):
            return hides(file, name)
    return None


def hides(file: str, name: str) -> UsageError:
    """Return the error that a file is imported instead of a package."""
    return UsageError(
        f"{file!r} hides the package {name!r}, which this program needs",
        hint="give it another name",
    )
