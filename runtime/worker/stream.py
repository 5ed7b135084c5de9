"""The head's stream: what is sent down the chain, and where it resumes after a restart."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from dni_runtime.core.chain import parts_of
from dni_runtime.core.forward import Inputs
from dni_runtime.core.losses import ChainLoss
from dni_runtime.data import DataSource
from dni_runtime.data.splits import Batch
from dni_runtime.spec import HeadRole
from dni_runtime.wire import Mark, Mode, Part, Rows

NOTHING = Mark(0)
Phase = Literal["train", "eval", "test", "end"]


@dataclass(frozen=True)
class Position:
    """A position at which the stream resumes."""

    epoch: int = 1  # from 1
    phase: Phase = "train"  # what comes next: batches of this kind, or the end
    batch: int = 0  # training batches of this epoch that have been sent
    step: int = 0  # training batches of the whole run that have been sent
    eval_batch: int = 0  # evaluation or test batches of this evaluation that have been sent
    saved: bool = False  # the markers due at this step have been sent
    part: int = 0  # parts of the next training batch that have been sent
    # step of the newest SYNC marker after which all replicas have the same weights: SYNC alone may
    # leave them different
    synced: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def next_epoch(self) -> Position:
        """Return the position before the next epoch."""
        return Position(epoch=self.epoch + 1, step=self.step, synced=self.synced)

    def sync(self, role: HeadRole) -> Mark:
        """Return SYNC for a marker here, if there are replicas and they have trained since one."""
        return Mark.SYNC if role.sync_steps and self.step > self.synced else NOTHING


@dataclass(frozen=True)
class Item:
    """An item of the stream: a batch, or a marker if ``x`` is None.

    Without ``x`` and ``mark`` it is a batch that another replica of the head reads.
    """

    epoch: int
    position: Position  # after this item
    mode: Mode = Mode.TRAIN
    mark: Mark = NOTHING
    x: Inputs | None = None
    y_BY: Tensor | None = None
    part: Part | None = None
    rows: Rows | None = None  # if the labels stay at the tail


class Items(Protocol):
    """Where the head's items come from: batches and markers, from a position on."""

    takes: bool  # whether the next item, if it is a batch, is to be read here
    # of training, evaluation and test, if the stream is shared: all replicas need the same
    samples: list[int | None]

    def __next__(self) -> Item:
        """Return the next item; the last one has END."""

    def end(self) -> None:
        """Send no more training batches."""

    def close(self) -> None:
        """Read no more."""


class Stream(Iterator[Item]):
    """The items of a data set, from a position on.

    Per epoch: training batches, an EPOCH marker, evaluation batches and an EVAL marker; after the
    last evaluation, if there is a test set, test batches and a TEST marker; at the very end an END
    marker. CHECKPOINT is added to the markers for which the spec asks. Between training batches
    there are SYNC and CHECKPOINT markers after as many steps as it asks for. Replicas share before
    each evaluation, checkpoint and end.

    ``shared``: other replicas of the head read some of the batches. ``loss`` weighs parts of a
    batch; None if the labels are not here.
    """

    def __init__(
        self,
        source: DataSource,
        role: HeadRole,
        start: Position = Position(),
        *,
        shared: bool = False,
        loss: ChainLoss | None = None,
    ) -> None:
        self.takes = True
        info = source.info
        samples = [info.train_samples, info.eval_samples, info.test_samples]
        self.samples = samples if shared else []
        self._source, self._role, self._shared, self._loss = source, role, shared, loss
        self._early = False
        self._items = self._from(start)

    def __next__(self) -> Item:
        return next(self._items)

    def end(self) -> None:
        """Let only the test set and the end follow."""
        self._early = True

    def close(self) -> None:
        self._items.close()  # stops reading ahead

    def _from(self, at: Position) -> Generator[Item, None, None]:
        role, tested = self._role, self._source.has_test
        while at.phase != "end":
            epoch = at.epoch
            if at.phase == "train":
                at = yield from self._train(at)
                if self._early:
                    at = replace(at, phase="test" if tested else "end")
                    if at.sync(role):
                        at = replace(at, synced=at.step)
                        yield Item(epoch, at, mark=Mark.SYNC | Mark.CHECKPOINT)
            last = epoch >= role.epochs or at.step == role.steps
            if at.phase == "train":
                evaluates = role.eval_every > 0 and (last or epoch % role.eval_every == 0)
                every = role.checkpoint.every_epochs
                saves = every > 0 and epoch % every == 0 and not last  # END saves the last one
                saves |= role.selects and evaluates
                mark = Mark.EPOCH | at.sync(role) | (Mark.CHECKPOINT if saves else NOTHING)
                at = replace(at, synced=at.step)
                at = replace(at, phase="eval") if evaluates else _next(at, last)
                yield Item(epoch, at, mark=mark)
            if at.phase == "eval":
                at = yield from self._evaluate(at)
                tests = last and tested
                at = replace(at, phase="test", eval_batch=0) if tests else _next(at, last)
                yield Item(epoch, at, mark=Mark.EVAL)
            if at.phase == "test":
                at = _next((yield from self._evaluate(at)), last=True)
                yield Item(epoch, at, mark=Mark.TEST)
        yield Item(at.epoch, at, mark=Mark.END | Mark.CHECKPOINT)

    def _evaluate(self, at: Position) -> Generator[Item, None, Position]:
        """Yield an evaluation's remaining batches; return the position after them."""
        for batch in self._batches(at, at.eval_batch):
            x, y_BY = batch or (None, None)
            rows = self._rows(at, at.eval_batch)
            at = replace(at, eval_batch=at.eval_batch + 1)
            yield Item(at.epoch, at, mode=Mode.EVAL, x=x, y_BY=y_BY, rows=rows)
        return at

    def _batches(self, at: Position, start: int) -> Iterator[Batch | None]:
        if not self._shared:
            return self._source.batches(at.phase, at.epoch, start)
        return self._source.some_batches(at.phase, at.epoch, start, lambda: self.takes)

    def _rows(self, at: Position, number: int) -> Rows | None:
        """Return which samples a batch has, if the labels stay at the tail."""
        if self._role.data.labels is None:
            return None
        return self._source.rows(at.phase, at.epoch, number)

    def _train(self, at: Position) -> Generator[Item, None, Position]:
        """Yield an epoch's remaining training batches; return the position after them."""
        role, sends = self._role, max(self._source.train_batch_count - at.batch, 0)
        if role.steps is not None:
            sends = min(sends, max(role.steps - at.step, 0))
        saves, syncs = role.checkpoint.every_steps, role.sync_steps
        if not sends or self._early:
            return at
        batches = self._batches(at, at.batch)
        for _ in range(sends):
            due = Mark.CHECKPOINT if saves and at.step % saves == 0 else NOTHING
            if due or (syncs and at.step % syncs == 0):
                due |= at.sync(role)
            if due and at.batch and not at.saved:
                at = replace(at, saved=True, synced=at.synced if due == Mark.SYNC else at.step)
                yield Item(at.epoch, at, mark=due)
                if self._early:
                    break
            x, y_BY = next(batches) or (None, None)
            rows = self._rows(at, at.batch)
            after = replace(at, batch=at.batch + 1, step=at.step + 1, saved=False, part=0)
            if role.micro_batches == 1 or x is None or y_BY is None:
                yield Item(at.epoch, after, x=x, y_BY=y_BY, rows=rows)
            else:
                parts = list(parts_of(x, y_BY, role.micro_batches, self._loss))
                for number, (part, some, y) in enumerate(parts[at.part :], start=at.part + 1):
                    then = after if number == len(parts) else replace(at, part=number)
                    yield Item(at.epoch, then, x=some, y_BY=y, part=part, rows=rows)
            at = after
            if self._early:
                break
        return at


def _next(at: Position, last: bool) -> Position:
    if last:
        return replace(at, phase="end", eval_batch=0)
    return at.next_epoch()
