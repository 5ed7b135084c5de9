"""A supervisor's records of its run: the state and the events."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dni_runtime.errors import (
    CheckpointError,
    DataError,
    DiskError,
    DivergedError,
    DniError,
    WorkerError,
)
from dni_runtime.files import write_json
from dni_runtime.run.documents.events import Event, EventKind
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.documents.state import HEARTBEAT_S, ModuleState, RunState
from dni_runtime.run.lease import Lease, LeaseError
from dni_runtime.run.lines import last_lines
from dni_runtime.run.rundir import RunDir

_log = logging.getLogger(__name__)

AGAIN = ", as before: the same error at the same position of the stream"
"""Ends the description of a worker that its input has ended twice."""

LOG_BYTES = 64 << 20
"""Size at which a worker's log is copied to ``LOG.1`` and emptied."""


class Journal:
    """Writes the state and the events of a run; tolerates a full disk."""

    def __init__(
        self,
        run: RunDir,
        state: RunState,
        clock: Callable[[], float],  # monotonic, in seconds
        lease: Lease | None = None,  # None: no other supervisor can exist
    ) -> None:
        self.state = state
        self._lease = lease
        self._silent = False
        self._run = run
        self._clock = clock
        self._written_at = 0.0
        self._complained = False
        self.trouble: str | None = None  # why the last write of the state failed

    def check(self) -> None:
        """Check that the run still belongs to this supervisor; if not, never write again."""
        if self._lease is not None and not self._silent:
            try:
                self._lease.check()
            except LeaseError:
                self._silent = True
                raise

    def event(self, event: EventKind, **fields: Any) -> None:
        """Add a line to the run's events; the fields are those of ``Event``."""
        _log.info("%s %s", event, fields)
        self.check()
        if self._silent:
            return
        with self._tolerating_a_full_disk():
            Event(time=time.time(), event=event, **fields).append(self._run.events)

    def damaged(self, problem: str) -> None:
        """Record that a checkpoint is damaged and an older one is used."""
        _log.warning("%s; an older checkpoint is used", problem)
        self.event("checkpoint_damaged", reason=problem)

    def write(self) -> None:
        self.check()
        if self._silent:
            return
        self._written_at = self._clock()
        with self._tolerating_a_full_disk():
            if self._lease is not None:
                self._lease.beat()  # first: it needs no room
            self.state.save(self._run)
            self.trouble = None

    def write_json(self, path: Path, document: dict[str, Any]) -> bool:
        """Write another file of the run; return whether that has worked."""
        self.check()
        if not self._silent:
            with self._tolerating_a_full_disk():
                write_json(path, document)
                return True
        return False

    def heartbeat(self) -> None:
        """Write the state if the last write is ``HEARTBEAT_S`` ago."""
        if self._clock() - self._written_at >= HEARTBEAT_S:
            self.write()

    @contextlib.contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.trouble = f"the run directory cannot be written: {error}"
            if not self._complained:
                self._complained = True
                _log.warning("%s", self.trouble)


def bound_log(path: Path) -> None:
    """Limit the size of a worker's log, to which its process continues to append."""
    with contextlib.suppress(OSError):
        if path.stat().st_size >= LOG_BYTES:
            shutil.copy2(path, _before(path))
            os.truncate(path, 0)


def remove_log(path: Path) -> None:
    """Remove a worker's log, with what it held before it was emptied."""
    for file in (path, _before(path)):
        with contextlib.suppress(OSError):
            file.unlink()


def _before(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


def how_it_ended(name: str, module: ModuleState, error: str | None = None) -> str:
    """Return a clause on the end of a worker; its own error if it has diverged."""
    if module.exit_code == DivergedError.exit_code and error:
        return error.partition("\n")[0]
    if module.signal is not None:
        how = f"was killed by {module.signal}"
    elif module.state == "stopped":
        how = "stopped"
    else:
        how = f"ended with exit code {module.exit_code}"
        how += " before it had finished" if module.exit_code == 0 else ""
        how += ": it could not write its files" if module.exit_code == DiskError.exit_code else ""
    return f"module {name!r} (attempt {module.attempt}) {how}"


def failure(run: RunDir, state: RunState) -> DniError | None:
    """Return the error that a run ended with; None if it did not fail."""
    name = state.failed
    if state.phase == "lost":
        return WorkerError(
            state.error or f"the supervisor of run {run.root.name!r} is gone",
            hint=f"dnictl resume {run.root}",
        )
    if state.phase != "failed":
        return None
    if name is None or name not in state.modules:
        error = WorkerError(state.error or f"run {run.root.name!r} failed")
        error.exit_code = state.exit_code or error.exit_code  # type: ignore[misc]
        return error
    module = state.modules[name]
    report = Report.read(run.worker(name)).of(module.attempt)
    how, said = how_it_ended(name, module), state.error or ""
    if module.exit_code is None or f"{name!r} cannot be started" in said:
        how = said  # nothing else is known: there was no room for it, or there was no process
    more = said.removeprefix(how) if said.startswith(how) else ""
    lines = [how + (f": {report.error}" if report.error else "") + more]
    lines.append(f"  log: {module.log}")
    lines += [f"  | {line}" for line in last_lines(Path(module.log))]
    lines.append("  The other modules were stopped; complete checkpoints are kept.")
    hints = {
        DataError.exit_code: "correct the data, then start a new run, or resume this one",
        DivergedError.exit_code: "change the chain, by a lower learning rate or clipped gradients; "
        f"then 'dnictl up --carry {run.root}'",
    }
    kinds: dict[int | None, type[DniError]] = {
        kind.exit_code: kind for kind in (DivergedError, DataError, CheckpointError)
    }
    code = state.exit_code or module.exit_code
    hint = hints.get(code or 0, f"dnictl resume {run.root}")
    if (state.error or "").endswith(AGAIN):
        hint = "correct the cause: a run that is resumed would end there again"
    return kinds.get(code, WorkerError)("\n".join(lines), hint=hint)
