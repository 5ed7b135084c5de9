"""Requests that wait, and the batches that they become; pure: the caller tells the time.

There is no timer: what has come while the last batch was computed is the next one. Rows are
counted, not requests: a request with more rows than a batch takes is cut, and its answer joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from dni_runtime.errors import DniError, RequestError, WorkerError
from dni_runtime.serving.engine import Answer
from dni_runtime.serving.protocol import Signature, empty
from dni_runtime.serving.settings import Settings
from dni_runtime.wire import holds


@dataclass(eq=False, slots=True)
class Job:
    """A request's rows, from when they come until ``done`` is called, once.

    It is over when all rows are answered, when it fails, or when its client has gone.
    """

    inputs: tuple[Tensor, ...]
    rows: int
    done: Callable[[], None]
    arrived: float
    deadline: float
    whole: bool  # no row may leave at an exit
    missing: int  # rows without an answer
    exits: list[str | None]  # of each row
    answered: bytearray  # which rows are, if they are answered in parts
    outputs: tuple[Tensor, ...] = ()
    degraded: bool = False  # some rows are answered by an earlier exit, in need
    error: Exception | None = None
    over: bool = False
    taken: int = 0  # rows that are in batches


class Part(NamedTuple):
    """Rows of a request in a batch."""

    job: Job
    begin: int  # in the request
    rows: int


@dataclass(eq=False, slots=True)
class Batch:
    """Rows that are computed together."""

    id: int
    parts: list[Part]
    rows: int
    inputs: tuple[Tensor, ...]
    sent: float
    open: set[int]  # rows without an answer
    error: Exception | None = None  # it has failed

    @property
    def whole(self) -> bool:
        """Whether no row may leave at an exit."""
        return self.parts[0].job.whole


def _as_long(job: Job, other: Job) -> bool:
    pairs = zip(job.inputs, other.inputs, strict=True)
    return all(one.shape[1:] == two.shape[1:] for one, two in pairs)


class Rates:
    """How many requests clients send: on average so many a second, and as many at once."""

    def __init__(self, rate: float) -> None:
        self._each_s, self._burst_s = 1 / rate, (max(rate, 1) - 1) / rate
        self._due: dict[str, float] = {}  # when a client may send, had it sent none at once

    def admit(self, client: str, now: float) -> None:
        """Count a request; raises ``RequestError`` with status 429 if it comes too early."""
        due = max(self._due.pop(client, now), now)
        early_s = due - now - self._burst_s
        self._due[client] = due if early_s > 0 else due + self._each_s
        while (first := next(iter(self._due))) != client and self._due[first] <= now:
            del self._due[first]
        if early_s > 0:
            text = f"this client sends more than {1 / self._each_s:g} requests a second"
            raise RequestError(429, text, retry_after_s=ceil(early_s))


class Queue:
    """Requests to an engine with this signature."""

    def __init__(self, signature: Signature, settings: Settings) -> None:
        self._signature = signature
        self._settings = settings
        outputs = zip(signature.outputs.values(), empty(signature.outputs, 0), strict=True)
        self._outputs = [(spec, output.dtype) for spec, output in outputs]
        self._varies = any(spec.varying for spec in signature.inputs.values())
        self._id = 0  # of the last batch
        self._jobs: dict[Job, None] = {}  # that are not over, by deadline
        self._waiting: dict[Job, None] = {}  # those with rows in no batch
        self._apart: deque[list[Part]] = deque()  # batches of their own: probes, and second tries
        self._sent: dict[int, Batch] = {}
        self._batch_s = 0.0  # mean, of late
        self.waiting = 0  # rows in no batch

    def __len__(self) -> int:
        """Return how many requests are not over."""
        return len(self._jobs)

    def put(
        self, inputs: tuple[Tensor, ...], now: float, done: Callable[[], None], whole: bool = False
    ) -> Job:
        """Add a request; ``whole`` ones go first, in a batch of their own.

        Raises ``RequestError`` with status 429 or 413 if too many rows would wait.
        """
        rows, most = len(inputs[0]), self._settings.max_waiting
        if rows > most:
            text = f"{rows} rows are more than may wait ({most})"
            raise RequestError(413, text, hint="send them in several requests")
        if self.waiting + rows > most and not whole:
            text = f"{self.waiting} rows wait, and no more than {most} may"
            later_s = max(1, ceil(self.waiting / self._settings.max_batch * self._batch_s))
            raise RequestError(429, text, hint="send it again later", retry_after_s=later_s)
        deadline = now + self._settings.deadline_s
        exits: list[str | None] = [None] * rows
        job = Job(inputs, rows, done, now, deadline, whole, rows, exits, bytearray(rows))
        self._jobs[job] = None
        if whole:
            job.taken = rows
            self._apart.append([Part(job, 0, rows)])
        else:
            self._waiting[job] = None
            self.waiting += rows
        return job

    def leave(self, job: Job) -> None:
        """Forget a request whose client has gone."""
        if not job.over:
            self._end(job)
            self._forget()

    def close(self) -> bool:
        """Fail all requests; return whether there were none."""
        jobs = [*self._jobs]
        for job in jobs:
            text = "the version that computes the answer was stopped"
            self._finish(job, RequestError(503, text, retry_after_s=1))
        return not jobs

    def take(self, now: float) -> Batch | None:
        """Return the next batch, if there are rows for one now."""
        if self._apart:
            return self._batch(self._apart.popleft(), now)
        if not self._waiting or now < self._due():
            return None
        parts, room = list[Part](), self._settings.max_batch
        for job in self._waiting:
            if parts and self._varies and not _as_long(job, parts[0].job):
                continue
            part = Part(job, job.taken, min(room, job.rows - job.taken))
            parts.append(part)
            room -= part.rows
            job.taken += part.rows
            self.waiting -= part.rows
            if not room:
                break
        for part in parts:
            if part.job.taken == part.job.rows:
                del self._waiting[part.job]
        return self._batch(parts, now)

    def answer(self, answer: Answer, now: float) -> Batch | None:
        """Hand an engine's answer to those who wait for it; return its batch if it is awaited.

        If a batch of several requests fails, smaller ones are tried, and so on: only the request
        that makes it fail gets the error.
        """
        batch = self._sent.get(answer.id)
        if batch is None:
            return None
        rows = None if answer.rows is None else answer.rows.tolist()
        error = answer.error or self._misfit(batch, answer, rows)
        if error is not None:
            self._fail(batch, error)
            return batch
        begin = 0
        for part in batch.parts:
            if rows is None:
                outputs = tuple(output[begin : begin + part.rows] for output in answer.outputs)
                self._fill(part.job, range(part.begin, part.begin + part.rows), outputs, answer)
            else:
                chosen = [n for n, row in enumerate(rows) if begin <= row < begin + part.rows]
                outputs = tuple(output[chosen] for output in answer.outputs)
                shift = part.begin - begin
                self._fill(part.job, [rows[n] + shift for n in chosen], outputs, answer)
            begin += part.rows
        batch.open.difference_update(range(batch.rows) if rows is None else rows)
        if not batch.open:
            self._batch_s += 0.1 * (now - batch.sent - self._batch_s)
            del self._sent[batch.id]
        self._forget()
        return batch

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has passed."""
        while self._jobs and (job := next(iter(self._jobs))).deadline <= now:
            waited = "its rows wait" if job.taken < job.rows else "it is being computed"
            text = f"not answered within {self._settings.deadline_s:g} s: {waited}"
            self._finish(job, RequestError(504, text))
            self._forget()

    def next_at(self, *, room: bool) -> float | None:
        """Return when ``expire`` or, if the engine has room, ``take`` will have something to do."""
        times = [job.deadline for job in self._jobs][:1]
        if room and self._waiting:
            times.append(self._due())
        return min(times, default=None)

    def _due(self) -> float:
        first = next(iter(self._waiting))
        full = self.waiting >= self._settings.max_batch
        return first.arrived + (0.0 if full else self._settings.batch_wait_s)

    def _batch(self, parts: list[Part], now: float) -> Batch:
        self._id += 1
        inputs = tuple(
            torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            for pieces in (
                [part.job.inputs[n][part.begin : part.begin + part.rows] for part in parts]
                for n in range(len(self._signature.inputs))
            )
        )
        rows = len(inputs[0])
        batch = Batch(self._id, parts, rows, inputs, now, {*range(rows)})
        self._sent[batch.id] = batch
        return batch

    def _misfit(self, batch: Batch, answer: Answer, rows: list[int] | None) -> DniError | None:
        """Return what is wrong with an answer, if it does not fit its batch and the signature."""
        count = batch.rows if rows is None else len(rows)
        if rows is not None and not (
            len(set(rows)) == count and all(0 <= row < batch.rows for row in rows)
        ):
            return WorkerError(f"the answer has rows {rows} of a batch of {batch.rows}")
        fits = len(answer.outputs) == len(self._outputs) and all(
            (len(output), output.dtype) == (count, dtype)
            and holds(spec.shape, spec.varying, output.shape[1:])
            for output, (spec, dtype) in zip(answer.outputs, self._outputs, strict=True)
        )
        if fits or not count:
            return None
        outputs = [(tuple(output.shape), output.dtype) for output in answer.outputs]
        expected = [((count, *spec.sizes), dtype) for spec, dtype in self._outputs]
        return WorkerError(f"the model's outputs are {outputs} instead of {expected}")

    def _fill(
        self, job: Job, rows: Sequence[int], outputs: tuple[Tensor, ...], answer: Answer
    ) -> None:
        """Put a part of an answer into the request's own; of a row, the first one counts."""
        if job.over or not rows:
            return
        job.degraded |= answer.degraded
        if len(rows) == job.missing == job.rows and isinstance(rows, range):  # usually: no copies
            job.outputs, job.exits, job.missing = outputs, [answer.exit] * job.rows, 0
        else:
            if not job.outputs:
                sizes = ((job.rows, *output.shape[1:]) for output in outputs)
                job.outputs = tuple(map(Tensor.new_empty, outputs, sizes))
            new = [n for n, row in enumerate(rows) if not job.answered[row]]
            places = [rows[n] for n in new]
            for whole, output in zip(job.outputs, outputs, strict=True):
                whole[places] = output[new]
            for row in places:
                job.answered[row] = True
                job.exits[row] = answer.exit
            job.missing -= len(new)
        if not job.missing:
            self._finish(job)

    def _fail(self, batch: Batch, error: Exception) -> None:
        batch.error = error
        batch.open.clear()
        del self._sent[batch.id]
        if len(batch.parts) > 1:
            # Not by halves: it may be that each batch that fails kills a worker.
            parts, size = batch.parts, isqrt(len(batch.parts))
            self._apart += [parts[n : n + size] for n in range(0, len(parts), size)]
        elif not batch.parts[0].job.over:
            self._finish(batch.parts[0].job, error)
        self._forget()

    def _finish(self, job: Job, error: Exception | None = None) -> None:
        self._end(job)
        job.error = error
        job.done()

    def _end(self, job: Job) -> None:
        job.over = True
        del self._jobs[job]
        if job in self._waiting:
            del self._waiting[job]
            self.waiting -= job.rows - job.taken

    def _forget(self) -> None:
        """Forget batches and parts that nobody waits for any more."""
        apart = ([part for part in parts if not part.job.over] for parts in self._apart)
        self._apart = deque(parts for parts in apart if parts)
        sent = self._sent.values()
        for id in [batch.id for batch in sent if all(part.job.over for part in batch.parts)]:
            del self._sent[id]
