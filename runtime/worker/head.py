"""The head's end of the stream: it numbers items, and records what it may have to resend."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence

from dni_runtime.core.forward import as_inputs
from dni_runtime.errors import DataError
from dni_runtime.link import Batch, Marker
from dni_runtime.run.documents.requests import MarkRequest
from dni_runtime.run.lines import LineReader
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.edge import replica_of
from dni_runtime.wire import Mark
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.stream import NOTHING, Item, Items, Position

log = logging.getLogger(__name__)

_SAMPLES = -1
"""The round that only says how many samples a replica has: their streams must have one length."""


class Rounds:
    """How the head's replicas agree on the id of a marker that nobody planned, such as a stop.

    The replicas of the head run the same stream, each for its own share of the batches. So a marker
    that is requested while they run must get an id that none of them has passed. Each writes lines
    into a file of its own, which the others read. The first line of a *round* says what one of them
    wants, and the lowest id that it has not used; each other one adds its line when it sees that.
    Nobody uses the id of its own line, or a later one, before the round is complete. Then the
    marker gets the highest of these ids. The lines stay, so that a restarted replica finds the same
    result. A head without replicas is alone in its rounds: they are complete at once.

    ``begun`` is the start of the whole chain that this is: lines of others do not count.
    ``samples`` are the numbers of samples of this replica's data; all replicas need the same.
    """

    def __init__(
        self, run: RunDir, spec: WorkerSpec, begun: int, samples: Sequence[int | None] = ()
    ) -> None:
        self._begun, self._own = begun, spec.module
        self._paths = {name: run.marks(name) for name in spec.siblings}
        self._lines: dict[str, dict[int, MarkRequest]] = {name: {} for name in spec.siblings}
        self._samples = tuple(samples)
        self._newest = self._line(_SAMPLES, 0, samples=self._samples)
        self.alone = len(self._paths) == 1
        self.passed = 0  # rounds whose result is behind this replica
        self._last = _SAMPLES  # the newest round that has a line
        self._read()
        if not self.alone and not self.written:
            self._write()

    def _line(
        self,
        number: int,
        id: int,
        mark: Mark = NOTHING,
        *,
        ends: bool = False,
        samples: tuple[int | None, ...] = (),
    ) -> MarkRequest:
        return MarkRequest(
            begun=self._begun, round=number, id=id, mark=int(mark), ends=ends, samples=samples
        )

    @property
    def written(self) -> bool:
        """Whether the newest line of this replica is in its file."""
        return self._newest.round in self._lines[self._own]

    @property
    def joined(self) -> MarkRequest | None:
        """The line of this replica in the present round; None before it has one."""
        if self._last < self.passed:
            return None
        in_file = self._lines[self._own].get(self.passed)
        return self._newest if self._newest.round == self.passed else in_file

    @property
    def called(self) -> bool:
        """Whether a replica wants something in the present round."""
        return any(Mark(line.mark) & ~Mark.END or line.ends for line in self._present)

    @property
    def agreed(self) -> MarkRequest | None:
        """The result of the present round, if it is complete."""
        lines = [] if self._last < self.passed else self._present
        if len(lines) < len(self._paths):
            return None
        mark = NOTHING
        for line in lines:
            mark |= Mark(line.mark)
        ends = any(line.ends for line in lines)
        return self._line(self.passed, max(line.id for line in lines), mark, ends=ends)

    @property
    def _present(self) -> list[MarkRequest]:
        number = self.passed
        return [lines[number] for lines in self._lines.values() if number in lines]

    def holds(self, id: int) -> bool:
        """Whether an id must not be used before the present round is complete."""
        joined = self.joined
        return joined is not None and id >= joined.id and self.agreed is None

    def join(self, id: int, mark: Mark = NOTHING, *, ends: bool = False) -> None:
        """Write this replica's line of the present round.

        If that fails, a replica tries again when it looks. A head that is alone goes on: a full
        disk is no reason to stop training.
        """
        self._newest = self._line(self.passed, id, mark, ends=ends)
        self._last = max(self._last, self.passed)
        self._write()

    def look(self) -> None:
        """Read what the others have written."""
        self._read()
        if not self.written:
            self._write()

    def _write(self) -> None:
        line = self._newest
        try:
            line.append(self._paths[self._own])
        except OSError as error:
            log.warning("a restarted head will not do at %d what was requested: %s", line.id, error)
        if self.alone:
            self._lines[self._own][line.round] = line
        else:
            self._read()

    def _read(self) -> None:
        for name, path in self._paths.items():
            with contextlib.suppress(OSError):
                for line in LineReader(path, MarkRequest.parse).new():
                    if line.begun == self._begun:
                        self._lines[name].setdefault(line.round, line)
                        self._last = max(self._last, line.round)
        for name, lines in self._lines.items():
            if (said := lines.get(_SAMPLES)) and said.samples != self._samples:
                raise DataError(
                    f"{self._own!r} has {[*self._samples]} samples for training, evaluation and "
                    f"test, but {name!r} has {[*said.samples]}",
                    hint="all replicas of the head need as many: see data.train_limit and "
                    "data.eval_limit",
                )


LOOK_S = 0.5
"""Seconds between two looks at what the head's other replicas want."""


class Head:
    """Supplies the head's batches and markers, as the link from upstream does for other modules.

    A replica of the head numbers all items, and supplies all markers and the batches that are its
    own, by their ids.
    """

    def __init__(
        self,
        stream: Items,  # from the start's position on
        *,
        start: Start,
        ledger: Ledger,
        metrics: MetricsWriter,
        output: Fanout | None,  # None in a chain of one module
    ) -> None:
        # position: of the stream, after the newest item that was supplied
        self.position = self._cursor = start.position
        spec = metrics.spec
        self._role = role = spec.head
        self._takes = (0,) if role is None else role.takes
        self._route = spec.replicas, spec.replica
        self._stream = stream
        self._rounds = Rounds(metrics.run, spec, start.begun, stream.samples)
        self._progress = ledger.progress
        self._used = self._used_before() if start.restarted else ledger.progress.counts.id
        self._metrics = metrics
        self._output = output
        self._next_id = start.first_id
        self._wanted = NOTHING
        self._ends_early = False
        self._ends = False
        self._read: Item | None = None
        self._before: deque[tuple[int, Position]] = deque()
        self._look_s = 0.0

    def end_early(self) -> None:
        """End training as soon as possible."""
        self._ends_early = True

    def want(self, mark: Mark) -> None:
        """Put a marker into the stream as soon as possible."""
        self._wanted |= mark

    @property
    def waits(self) -> bool:
        """Whether the next id must wait until the head's replicas agree where a marker goes."""
        return not self._rounds.alone and self._rounds.holds(self._next_id)

    def look(self, *, asks: bool = True) -> None:
        """Agree with the head's other replicas on what is wanted; call it repeatedly.

        With ``asks`` also ask them for something: not while a marker is not done with, which may be
        what is wanted.
        """
        rounds = self._rounds
        if not rounds.alone and time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + LOOK_S
            rounds.look()
        quiet = not (self._wanted or self._ends_early)
        if rounds.joined is not None or (rounds.alone and quiet) or rounds.agreed is not None:
            return
        wants = asks and (self._wanted or self._ends_early)
        if not (wants or rounds.called):
            return
        # An id that an earlier attempt may have used keeps its meaning.
        id = max(self._next_id, self._used + 1)
        if self._cursor.part or (rounds.alone and id > self._next_id):
            return  # no marker goes between the parts of a batch
        rounds.join(id, self._wanted, ends=self._ends_early)
        self._wanted, self._ends_early = NOTHING, False

    def next(self) -> Batch | Marker | None:
        """Return the next item, numbered; None while the head's replicas have to agree on one."""
        while True:
            self.look()
            id = self._next_id
            if self.waits:
                return None
            marker = self._asked_for(id)
            if marker is not None:
                return marker
            if self._ends and self._cursor.part == 0 and self._cursor.phase == "train":
                self._ends = False
                self._stream.end()
            item = self._item(id)
            if Mark.END in item.mark and not self._closed(id):
                self._read = item
                return None
            if item.x is None and not item.mark:  # of another replica
                self._next_id, self._cursor = id + 1, item.position
                continue
            self._supply(id, item.position)
            if item.x is None or item.y_BY is None:
                return Marker(id, item.epoch, item.mark)
            data = as_inputs(item.x)
            xs = tuple(data[one] for one in self._takes)
            return Batch(id, item.epoch, item.mode, xs, item.y_BY, item.part, data, item.rows)

    def _asked_for(self, id: int) -> Marker | None:
        """Return the marker that was asked for, if it goes here."""
        rounds = self._rounds
        while (agreed := rounds.agreed) is not None and agreed.id <= id:
            rounds.passed += 1
            self._ends |= agreed.ends
            if agreed.id == id and agreed.mark:
                mark = Mark(agreed.mark)
                if self._role is not None:
                    mark |= self._cursor.sync(self._role)
                self._supply(id, self._cursor)
                return Marker(id, self._progress.epoch, mark)
        return None

    def _item(self, id: int) -> Item:
        """Return the stream's next item; read it only if it is a batch of this replica's own."""
        if self._read is not None:
            item, self._read = self._read, None
            return item
        self._stream.takes = self._owns(id)
        self._metrics.now("data")
        began = time.monotonic()
        item = next(self._stream)
        self._metrics.waiting_s["data"] += time.monotonic() - began
        return item

    def _closed(self, id: int) -> bool:
        """Say that nothing goes before the end of the stream any more; return whether all know."""
        if self._rounds.alone:
            return True
        if self._rounds.joined is None:
            self._rounds.join(id + 1, Mark.END)
        return self._rounds.written

    def _owns(self, id: int) -> bool:
        replicas, replica = self._route
        return replica_of(id, replicas) == replica

    def _used_before(self) -> int:
        """Return the last id that an earlier attempt may have used.

        These are also those after the last one that it has counted, up to its own next batch.
        """
        used = self._progress.counts.id + 1
        while not self._owns(used):
            used += 1
        return used

    def oldest(self) -> tuple[int, Position] | None:
        """Return the oldest id that may have to be resent, and the position before it."""
        self._forget()
        return self._before[0] if self._before else None

    def _supply(self, id: int, position: Position) -> None:
        """Note that an item is supplied."""
        self._before.append((id, self._cursor))
        self._next_id, self._cursor, self.position = id + 1, position, position
        self._forget()

    def _forget(self) -> None:
        first = self._next_id if self._output is None else self._output.first
        while self._before and self._before[0][0] < first:
            self._before.popleft()
