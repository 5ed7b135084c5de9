"""Calling a run's callbacks, in its supervisor's process."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from queue import SimpleQueue
from typing import Any, Self

from dni_runtime.errors import DniError, with_causes
from dni_runtime.plan.callbacks import Callback, StartedRun, callback_class
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.events import Event
from dni_runtime.run.documents.metrics import parse_evaluation
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.lease import LeaseError
from dni_runtime.run.lines import LineReader
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import Choice
from dni_runtime.spec.replicas import tails_of

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_END_S = 60.0  # for calls that are still to be made when the run has ended


Observe = Callable[[RunState], None]


@contextlib.contextmanager
def calling_back(run: RunDir, state: RunState, observe: Observe | None) -> Iterator[Observe | None]:
    """Call a run's callbacks while it goes on, and at its end, from what observes its state.

    Not at the end of one that another supervisor has taken over: that calls its own.
    """
    callbacks = Callbacks.of(run, state.attempt)
    if callbacks is None:
        yield observe
        return

    def look(state: RunState) -> None:
        callbacks.look(state)
        if observe is not None:
            observe(state)

    try:
        yield look
    except LeaseError:
        raise
    except BaseException:
        callbacks.end(state)
        raise
    callbacks.end(state)


class _Told(Document):
    """What the callbacks of a run have been told, in earlier attempts, too."""

    time: float = 0.0  # of the newest evaluation
    step: int = -1  # the largest
    cut: int = 0  # the newest checkpoint


class Callbacks:
    """Finds out what a run's callbacks have to be told, and calls them in a thread.

    One that hangs holds up neither the supervisor nor the training.
    """

    def __init__(
        self, run: RunDir, record: RunRecord, callbacks: Sequence[Callback], started: StartedRun
    ) -> None:
        self._run, self._modules, self._callbacks = run, record.modules, callbacks
        self._told = _Told.peek(run.told) or _Told()
        self._lines = LineReader(run.metrics(tails_of(record.modules)[0]), parse_evaluation)
        self._calls: SimpleQueue[tuple[Callable[[Callback], None], _Told] | None] = SimpleQueue()
        self._failures: dict[str, str] = {}
        self._look_at_s = 0.0
        self._thread = threading.Thread(target=self._work, name="callbacks", daemon=True)
        self._thread.start()
        self._call(methodcaller("on_start", started))

    @classmethod
    def of(cls, run: RunDir, attempt: int) -> Self | None:
        """Return those of a run that starts; None if its chain names none, or none can be made."""
        record = RunRecord.load(run.record)
        settings: dict[str, Any] = json.loads(run.chain.read_bytes())
        choices = [Choice.model_validate(one) for one in settings.get("callbacks", ())]
        if record is None or not choices:
            return None
        sys.path.insert(0, str(run.sources))  # for what is imported in their calls, too
        callbacks = []
        for index, choice in enumerate(choices):
            try:
                callbacks.append(callback_class(choice, index)(**choice.args))
            except (Exception, SystemExit) as error:
                _record_failure(run, choice.name, error)
        started = StartedRun(run.root.name, run.root, settings, attempt)
        return cls(run, record, callbacks, started) if callbacks else None

    def look(self, state: RunState) -> None:
        """Tell what is new, about once a second."""
        if state.active and time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_S
        with contextlib.suppress(OSError, DniError):  # what cannot be read now is told later
            self._look()

    def _look(self) -> None:
        for line in self._lines.new():
            told = self._told
            if line.time > told.time or line.step > told.step:
                newest = {"time": max(line.time, told.time), "step": max(line.step, told.step)}
                self._told = told.model_copy(update=newest)
                self._call(methodcaller("on_evaluation", line))
        before = range(self._told.cut + 1)  # these are not read again
        for cut in complete_cuts(self._run, self._modules, before):
            if cut > self._told.cut:
                self._told = self._told.model_copy(update={"cut": cut})
                folder = self._run.checkpoint(cut, "x").parent
                self._call(methodcaller("on_checkpoint", cut, folder))

    def end(self, state: RunState) -> None:
        """Tell how the run has ended, and wait until all calls are made."""
        self.look(state)
        self._call(methodcaller("on_end", state))
        self._calls.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            late = TimeoutError(f"they have not returned within {_END_S:.0f} s")
            _record_failure(self._run, "callbacks", late)

    def _call(self, call: Callable[[Callback], None]) -> None:
        self._calls.put((call, self._told))

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, told = item
            for one in self._callbacks:
                try:
                    call(one)
                except (Exception, SystemExit) as error:
                    name = f"{type(one).__module__}:{type(one).__qualname__}"
                    if self._failures.get(name) != str(error):
                        self._failures[name] = str(error)
                        _record_failure(self._run, name, error)
            with contextlib.suppress(OSError):  # a full disk: they may be told again
                told.write(self._run.told, durable=False)


def _record_failure(run: RunDir, name: str, error: BaseException) -> None:
    log.warning("callback %s failed", name, exc_info=error)
    with contextlib.suppress(OSError):
        fields = {"event": "callback_failed", "what": name, "error": with_causes(error)}
        Event.model_validate({"time": time.time(), **fields}).append(run.events)
