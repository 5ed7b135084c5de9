"""How the head's replicas agree on the id of a marker that nobody planned, such as a stop.

The replicas of the head run the same stream, each for its own share of the batches. So a marker
that is requested while they run must get an id that none of them has passed. Each writes lines into
a file of its own, which the others read. The first line of a *round* says what one of them wants,
and the lowest id that it has not used; each other one adds its line when it sees that. Nobody uses
the id of its own line, or a later one, before the round is complete. Then the marker gets the
highest of these ids. The lines stay, so that a restarted replica finds the same result.

A head without replicas is alone in its rounds: they are complete at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dni_runtime.errors import DataError
from dni_runtime.run.documents.requests import MarkRequest
from dni_runtime.run.lines import LineReader
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Mark
from dni_runtime.worker.stream import NOTHING

log = logging.getLogger(__name__)

_SAMPLES = -1
"""The round that only says how many samples a replica has: their streams must have one length."""


@dataclass(frozen=True)
class Insertion:
    """What is wanted in the stream, and where; of one replica, or agreed by all."""

    id: int  # of one replica: the lowest that it has not used
    mark: Mark = NOTHING  # empty: none
    ends: bool = False  # training is to end from there on
    samples: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, line: MarkRequest) -> Self:
        """Return what a line of a file says."""
        return cls(line.id, Mark(line.mark), line.ends, line.samples)


class Rounds:
    """The rounds of one replica of the head.

    ``begun`` is the start of the whole chain that this is: lines of others do not count.
    ``samples`` are the numbers of samples of this replica's data; all replicas need the same.
    """

    def __init__(
        self, run: RunDir, spec: WorkerSpec, begun: int, samples: Sequence[int | None] = ()
    ) -> None:
        self._begun, self._own = begun, spec.module
        self._paths = {name: run.marks(name) for name in spec.siblings}
        self._lines: dict[str, dict[int, Insertion]] = {name: {} for name in spec.siblings}
        self._samples = tuple(samples)
        self._written, self._newest = _SAMPLES, Insertion(0, samples=self._samples)
        self.alone = len(self._paths) == 1
        self.passed = 0  # rounds whose result is behind this replica
        self._last = _SAMPLES  # the newest round that has a line
        self._read()
        if not self.alone and not self.written:
            self._write()

    @property
    def written(self) -> bool:
        """Whether the newest line of this replica is in its file."""
        return self._written in self._lines[self._own]

    @property
    def joined(self) -> Insertion | None:
        """The line of this replica in the present round; None before it has one."""
        if self._last < self.passed:
            return None
        in_file = self._lines[self._own].get(self.passed)
        return self._newest if self._written == self.passed else in_file

    @property
    def called(self) -> bool:
        """Whether a replica wants something in the present round."""
        lines = self._of(self.passed).values()
        return any(line.mark & ~Mark.END or line.ends for line in lines)

    @property
    def agreed(self) -> Insertion | None:
        """The result of the present round, if it is complete."""
        return None if self._last < self.passed else self._result(self.passed)

    def _of(self, number: int) -> dict[str, Insertion]:
        """Return the lines of a round."""
        return {name: lines[number] for name, lines in self._lines.items() if number in lines}

    def _result(self, number: int) -> Insertion | None:
        lines = self._of(number)
        if lines.keys() != self._lines.keys():
            return None
        mark, insertions = NOTHING, lines.values()
        for insertion in insertions:
            mark |= insertion.mark
        return Insertion(
            max(insertion.id for insertion in insertions),
            mark,
            any(insertion.ends for insertion in insertions),
        )

    def holds(self, id: int) -> bool:
        """Whether an id must not be used before the present round is complete."""
        joined = self.joined
        return joined is not None and id >= joined.id and self.agreed is None

    def join(self, insertion: Insertion) -> None:
        """Write this replica's line of the present round.

        If that fails, a replica tries again when it looks. A head that is alone goes on: a full
        disk is no reason to stop training.
        """
        self._written, self._newest = self.passed, insertion
        self._last = max(self._last, self.passed)
        self._write()

    def look(self) -> None:
        """Read what the others have written."""
        self._read()
        if not self.written:
            self._write()

    def _write(self) -> None:
        insertion, number = self._newest, self._written
        line = MarkRequest(
            begun=self._begun,
            round=number,
            id=insertion.id,
            mark=int(insertion.mark),
            ends=insertion.ends,
            samples=insertion.samples,
        )
        try:
            line.append(self._paths[self._own])
        except OSError as error:
            log.warning("a restarted head will not do at %d what was requested: %s", line.id, error)
        if self.alone:
            self._lines[self._own][number] = insertion
        else:
            self._read()

    def _read(self) -> None:
        for name, path in self._paths.items():
            with contextlib.suppress(OSError):
                for line in LineReader(path, MarkRequest.parse).new():
                    if line.begun == self._begun:
                        self._lines[name].setdefault(line.round, Insertion.of(line))
                        self._last = max(self._last, line.round)
        for name, lines in self._lines.items():
            if (said := lines.get(_SAMPLES)) and said.samples != self._samples:
                raise DataError(
                    f"{self._own!r} has {[*self._samples]} samples for training, evaluation and "
                    f"test, but {name!r} has {[*said.samples]}",
                    hint="all replicas of the head need as many: see data.train_limit and "
                    "data.eval_limit",
                )
