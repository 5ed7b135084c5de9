"""Which samples of a batch an answer is of, when some leave at exits (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dni_runtime.errors import WorkerError
from dni_runtime.serving.engine import Answer

_LOST_S = 10.0
"""Longer than a worker takes to restart, also one that this batch has killed."""


class Part(NamedTuple):
    """What an exit, or the chain's output, says of the samples that came there."""

    outputs: tuple[Tensor, ...]
    leaves_B: Tensor | None = None  # which of them are answered by it; None: all


@dataclass
class _Open:
    """A batch that has not been answered wholly."""

    id: int
    inputs: tuple[Tensor, ...]
    sent_s: float
    whole: bool
    lost_s: float = float("inf")  # when it counts as lost
    rows: Tensor | None = None  # those without an answer; None: all
    next: int = 0  # the first exit that has said nothing
    parts: dict[int, Part | None] = field(default_factory=dict)
    # what the last exit says of them, and its name
    early: tuple[str, tuple[Tensor, ...]] | None = None

    def fits(self, part: Part) -> bool:
        """Whether an exit speaks of as many samples as came there."""
        if part.leaves_B is None or self.rows is None:
            return True
        return len(part.leaves_B) == len(self.rows)


class OpenBatches:
    """Batches that are on their way through a chain.

    All exits, and the chain's output as the last one, say something of each batch: nothing, if no
    sample came there. Each knows only the samples that came there, in order. If the chain's output
    does not come, the last exit answers, at once if it was so before (*cut off*).

    If a replica and the module before it die together, batches can be lost, and a replica that
    hangs keeps what it has. Such a batch is overtaken by later ones: it is sent again, once, by
    another way if there is one, and whichever comes first answers it.
    """

    def __init__(self, exits: Sequence[str] = (), wait_s: float = float("inf")) -> None:
        self._exits, self._wait_s = exits, wait_s
        self._open: dict[int, _Open] = {}  # by position in the stream, as they were sent
        self._cut_off = False
        self._back_s = -float("inf")  # when the chain's output last came again
        self._again: set[int] = set()  # ids of those that were sent again
        self._count = 0

    def __len__(self) -> int:
        """How many are on their way, without those that wait for the chain's output alone."""
        return self._count

    @property
    def ids(self) -> list[int]:
        """Those of the open batches."""
        return list({batch.id: None for batch in self._open.values()})

    def sent(
        self,
        position: int,
        id: int,
        now_s: float,
        inputs: tuple[Tensor, ...] = (),
        *,
        whole: bool = False,
    ) -> None:
        """Note a batch; ``whole``: only the chain's output may answer it."""
        self._open[position] = _Open(id, inputs, now_s, whole)
        self._count += not whole and id not in self._again

    def lost(self, now_s: float) -> tuple[int, tuple[Tensor, ...], bool] | None:
        """Return a batch that is to be sent again now: id, inputs, and whether as a whole."""
        for batch in self._open.values():
            if batch.lost_s <= now_s:
                batch.lost_s = float("inf")
                self._again.add(batch.id)
                return batch.id, batch.inputs, batch.whole
        return None

    def came(self, position: int, number: int, part: Part | None, now_s: float) -> list[Answer]:
        """Return what follows from what an exit says of a batch; None: it has nothing for it."""
        last = number == len(self._exits)
        if last and part is not None and self._cut_off:
            self._cut_off, self._back_s = False, now_s
        batch = self._open.get(position)
        if batch is None:  # it was answered without this
            return []
        if last and part is not None:
            self._overtaken(position, now_s + _LOST_S + now_s - batch.sent_s)
        batch.parts[number] = part
        answers: list[Answer] = []
        while batch.next in batch.parts:
            part = batch.parts.pop(batch.next)
            batch.next += 1
            if part is not None and not batch.fits(part):
                self._close(position)
                error = WorkerError("a module that was restarted let other samples leave")
                return [*answers, Answer(batch.id, error=error)]
            if part is not None and (answer := self._read(batch, part)) is not None:
                answers.append(answer)
        ended = batch.next > len(self._exits)
        left_out = now_s - self._back_s < self._wait_s  # the windows may still be full
        if batch.rows is not None and not len(batch.rows):
            self._close(position)
        elif batch.early is not None and (left_out if ended else self._cut_off):
            answers.append(self._answer_early(position))
        elif ended:
            self._close(position)
            error = WorkerError("a module could not compute this batch")
            answers.append(Answer(batch.id, error=error))
        return answers

    def _overtaken(self, position: int, lost_s: float) -> None:
        """Note when those before a batch that was answered count as lost."""
        for earlier, batch in self._open.items():
            if earlier >= position:
                return
            if batch.id not in self._again:
                batch.lost_s = min(batch.lost_s, lost_s)

    def late(self, now_s: float) -> list[Answer]:
        """Return answers of exits for batches to which the chain's output does not come in time."""
        late = [
            position
            for position, batch in self._open.items()
            if batch.early is not None and now_s - batch.sent_s >= self._wait_s
        ]
        self._cut_off |= bool(late)
        return [self._answer_early(position) for position in late if position in self._open]

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until :meth:`late` or :meth:`lost` may have something."""
        first = next(iter(self._open.values()), None)
        if first is None:
            return self._wait_s
        due_s = min(first.sent_s + self._wait_s, *(one.lost_s for one in self._open.values()))
        return max(due_s - now_s, 0.01)

    def _read(self, batch: _Open, part: Part) -> Answer | None:
        """Return the answer for those samples that leave, if any do."""
        if part.leaves_B is None:
            rows, batch.rows = batch.rows, torch.empty(0, dtype=torch.long)
            return Answer(batch.id, rows, part.outputs)
        leaves_B, name = part.leaves_B, self._exits[batch.next - 1]
        rows = torch.arange(len(leaves_B)) if batch.rows is None else batch.rows
        batch.rows = rows[~leaves_B]
        if not batch.whole:
            batch.early = name, tuple(output[~leaves_B] for output in part.outputs)
        if not leaves_B.any():
            return None
        outputs = tuple(output[leaves_B] for output in part.outputs)
        return Answer(batch.id, rows[leaves_B], outputs, exit=name)

    def _close(self, position: int) -> _Open:
        batch = self._open.pop(position)
        self._count -= not batch.whole
        if batch.id in self._again:
            self._again.remove(batch.id)
            self._open = {n: one for n, one in self._open.items() if one.id != batch.id}
        return batch

    def _answer_early(self, position: int) -> Answer:
        batch = self._close(position)
        assert batch.early is not None
        name, outputs = batch.early
        return Answer(batch.id, batch.rows, outputs, exit=name, degraded=True)
