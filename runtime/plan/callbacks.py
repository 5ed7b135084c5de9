"""Callbacks: users' own code that is told what happens in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dni_runtime.run.documents.metrics import EvaluationLine
from dni_runtime.run.documents.state import RunState
from dni_runtime.spec import Choice
from dni_runtime.spec.choices import Location, check_keywords, find_class


@dataclass(frozen=True)
class StartedRun:
    """A run, as its callbacks see it."""

    name: str
    folder: Path
    settings: dict[str, Any]  # the chain, with all defaults
    attempt: int  # 1; more if the run was resumed


class Callback:
    """Base class of callbacks, whose methods are called one after the other, in a thread.

    A chain names them as ``callbacks: [package.module:Class]``, or with keywords of the constructor
    as ``{import: package.module:Class, args: {…}}``. They run on the host, in the process that
    supervises the run, and hold up neither that nor the training. An exception becomes an event of
    the run (``callback_failed``); later calls are made nevertheless.
    """

    def on_start(self, run: StartedRun) -> None:
        """The run starts, or is resumed: then in another process, by a new object."""

    def on_evaluation(self, evaluation: EvaluationLine) -> None:
        """The chain has been evaluated.

        Args:
            evaluation: ``epoch``, ``step`` (training batches so far), ``samples``, ``figures`` (the
                loss and each metric by name), and ``kind``: ``eval``, or ``test`` at the end.
        """

    def on_checkpoint(self, cut: int, folder: Path) -> None:
        """A checkpoint is complete.

        Args:
            cut: Its position in the stream, as ``dnictl export --from`` takes it.
            folder: Its folder; later checkpoints replace it.
        """

    def on_end(self, state: RunState) -> None:
        """The run has ended.

        Args:
            state: ``phase`` (``finished``, ``stopped`` or ``failed``), ``exit_code`` and ``error``.
        """


def callback_class(choice: Choice, index: int) -> type[Callback]:
    """Import the class of a chain's n-th callback; ``SpecError`` if it or a keyword is wrong."""
    location: Location = ("callbacks", index)
    cls = find_class(choice.name, "callback", {}, Callback, location)
    check_keywords(cls, choice.args, name=choice.name, location=(*location, "args"))
    return cls
