"""Versions of a model, each with its engine and its queue, and which one answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

from dni_runtime.errors import RequestError, UnavailableError, UsageError
from dni_runtime.serving.engine import Answer, Engine
from dni_runtime.serving.figures import VersionFigures
from dni_runtime.serving.protocol import Request
from dni_runtime.serving.queue import Job, Queue
from dni_runtime.serving.settings import Settings


class Version:
    """One version of the model. All methods run in the thread of the event loop.

    It is *ready* if a batch has gone through the whole engine within ``probe_s`` seconds. If
    requests do not show that, a *probe* does: a batch of its own, of which no row leaves early.
    """

    def __init__(self, name: str, engine: Engine, settings: Settings) -> None:
        self.name = name  # in paths and answers
        self.engine = engine
        self.figures = VersionFigures()
        self._probe_s = settings.probe_s
        self._sample = engine.signature.zeros()
        self._queue = Queue(engine.signature, settings)
        self._loop = asyncio.get_running_loop()
        self._proved = -float("inf")  # when a batch had gone through the whole engine
        self._probe: Job | None = None
        self._probe_error: Exception | None = None  # of the last one that has ended
        self._probing = self._loop.call_soon(self._probe_if_needed)
        self._next: asyncio.TimerHandle | None = None
        self._next_at = 0.0
        self._scheduled = False
        engine.answered = self._answered

    @property
    def ready(self) -> bool:
        """Whether a batch has gone through the whole engine of late."""
        return monotonic() - self._proved <= self._probe_s

    @property
    def problem(self) -> str:
        """Why it is not ready."""
        text = f"no batch has gone through all modules in the last {self._probe_s:g} s"
        error = self._probe_error
        return text if error is None else f"{text}; the last probe failed: {error}"

    @property
    def idle(self) -> bool:
        """Whether no request is on its way; probes do not count."""
        return len(self._queue) <= (self._probe is not None and not self._probe.over)

    async def answer(self, request: Request, future: asyncio.Future[None]) -> Job:
        """Return the request's answer; an exception that is set in the future ends it.

        Raises ``RequestError`` if it cannot be answered.
        """
        job = self._queue.put(request.inputs, monotonic(), lambda: _settle(future))
        if not self._scheduled:  # once what else has come is in the queue, too
            self._scheduled = True
            self._loop.call_soon(self._send)
        try:
            await future
        finally:
            self._queue.leave(job)
        if job.error is not None:
            if isinstance(job.error, RequestError):
                raise job.error
            text = f"the model failed: {type(job.error).__name__}: {job.error}"
            raise RequestError(500, text) from job.error
        return job

    def close(self) -> bool:
        """Stop the engine; return whether all requests were answered."""
        self._probing.cancel()
        if self._next is not None:
            self._next.cancel()
        if self._probe is not None:
            self._queue.leave(self._probe)
        self.engine.close()
        return self._queue.close()

    def observe(self) -> VersionFigures:
        """Return the figures as of now."""
        self.figures.ready = int(self.ready)
        self.figures.waiting_rows = self._queue.waiting
        return self.figures

    def _answered(self, answer: Answer) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._take, answer)

    def _take(self, answer: Answer) -> None:
        now, figures = monotonic(), self.figures
        batch = self._queue.answer(answer, now)
        rows = len(answer.outputs[0]) if answer.outputs else 0
        if answer.degraded:
            figures.degraded += rows
        elif answer.exit is not None:
            figures.exits[answer.exit] = figures.exits.get(answer.exit, 0) + rows
        elif rows and (batch is None or batch.error is None):
            # Also if nobody waits for it any more: it shows that the modules respond.
            self._proved = now
        if batch is not None and not batch.open:
            figures.batch_rows.add(batch.rows)
            figures.batch_s.add(now - batch.sent)
        self._send()

    def _send(self) -> None:
        """Give the engine what it has room for."""
        self._scheduled = False
        now = monotonic()
        self._queue.expire(now)
        while (room := self.engine.room() > 0) and (batch := self._queue.take(now)):
            try:
                self.engine.submit(batch.id, batch.inputs, whole=batch.whole)
            except Exception as error:  # that batch's failure, not the server's
                self._queue.answer(Answer(batch.id, error=error), now)
        at = self._queue.next_at(room=room)
        if at is not None and (self._next is None or at < self._next_at):
            if self._next is not None:
                self._next.cancel()
            self._next, self._next_at = self._loop.call_later(at - now, self._on_time), at

    def _on_time(self) -> None:
        self._next = None
        self._send()

    def _probe_if_needed(self) -> None:
        now = monotonic()
        if self._probe is not None and now - self._probe.arrived > self._probe_s:
            if not self._probe.over:
                self._count_probe("late")
            self._queue.leave(self._probe)
        if now - self._proved > self._probe_s / 3 and (self._probe is None or self._probe.over):
            sample = tuple(x.clone() for x in self._sample)  # a network may change its input
            self._probe = self._queue.put(sample, now, self._probed, whole=True)
            self._send()
        self._probing = self._loop.call_later(self._probe_s / 3, self._probe_if_needed)

    def _probed(self) -> None:
        self._probe_error = None if self._probe is None else self._probe.error
        self._count_probe("answered" if self._probe_error is None else "failed")

    def _count_probe(self, result: str) -> None:
        self.figures.probes[result] = self.figures.probes.get(result, 0) + 1


class _Table(NamedTuple):
    """Which versions answer requests that name none."""

    default: str
    canary: str | None = None
    share: float = 0.0  # of the requests that the canary gets


class Versions:
    """The versions of a model; they can change while requests are answered.

    All methods run in the thread of the event loop (``Server.call``). The first version that is
    added is the default one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._versions: dict[str, Version] = {}
        self._table: _Table | None = None
        self._unnamed = 0  # requests without an id

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def __getitem__(self, name: str) -> Version:
        """Return a version; raises ``RequestError`` with status 404."""
        if name not in self._versions:
            hint = f"versions: {', '.join(self._versions)}"
            raise RequestError(404, f"there is no version {name[:60]!r}", hint=hint)
        return self._versions[name]

    @property
    def default(self) -> Version:
        """The version that answers requests which name none."""
        if self._table is None:
            raise RequestError(503, "there is no version yet", retry_after_s=1)
        return self._versions[self._table.default]

    def choose(self, id: str | None) -> Version:
        """Return the version for a request that names none: one id always gets the same.

        A canary that is not ready gets none.
        """
        version, table = self.default, self._table
        if table is None or table.canary is None:
            return version
        if id is None:
            self._unnamed += 1
            id = str(self._unnamed)
        drawn = zlib.crc32(id.encode()) / 2**32
        canary = self._versions[table.canary]
        return canary if drawn < table.share and canary.ready else version

    def add(self, name: str, engine: Engine) -> Version:
        """Add a version, which is asked by its name only, and begin to probe it."""
        if name in self._versions:
            raise UsageError(f"there is a version {name!r}", hint="give the new one another name")
        version = Version(name, engine, self._settings)
        self._versions[name] = version
        self._table = self._table or _Table(name)
        return version

    def switch(self, default: str, *, canary: str | None = None, share: float = 0.0) -> None:
        """Say which version answers requests that name none, and which one a share of them.

        Raises ``UnavailableError`` if one that had no such requests is not ready (nothing has
        changed), ``UsageError`` if the canary takes or returns something else than the default.
        """
        chosen = [self[name] for name in (default, canary) if name is not None]
        for version in chosen:
            if not (version.ready or self._asked(version.name)):
                raise UnavailableError(f"version {version.name!r} is not ready: {version.problem}")
        if len({str(version.engine.signature) for version in chosen}) > 1:
            raise UsageError(
                f"versions {default!r} and {canary!r} take or return different things",
                hint="switch all requests at once, or let clients name the version",
            )
        self._table = _Table(default, canary, share)

    async def drained(self, name: str) -> None:
        """Wait until no request of a version is on its way."""
        while not self[name].idle:
            await asyncio.sleep(0.02)

    async def remove(self, name: str, timeout_s: float) -> bool:
        """Stop a version when it has answered what it has; see ``Server.remove``."""
        if self._asked(name):
            raise UsageError(f"version {name!r} answers requests", hint="switch to another first")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.drained(name)
        return self._versions.pop(name).close()

    def _asked(self, name: str) -> bool:
        """Whether a version gets requests that name none."""
        return self._table is not None and name in (self._table.default, self._table.canary)

    def close(self) -> None:
        """Stop all engines."""
        for version in self._versions.values():
            version.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
