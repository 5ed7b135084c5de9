"""How far a module is, and the record of what it has processed in the whole run.

A worker that is killed loses what it had learned since its last snapshot, but not the count of what
it had acknowledged: the ledger is one small record, written before each acknowledgement into the
same page of a file, which the kernel keeps when the process is gone (a crash of the host may lose
the newest counts). Sums of an evaluation that do not fit are in a file beside it.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from dni_runtime.errors import DiskError
from dni_runtime.files import is_full, open_file, opened, peek_json, write_json

log = logging.getLogger(__name__)

RECORD_BYTES = 4096
"""One page: a write of it is never seen in part."""

_FILE = "file"
"""Key of the file with an evaluation's sums, if they do not fit into the page."""


@dataclass
class Counts:
    """What a module has processed, over all its attempts: the content of its record."""

    id: int = 0  # the last one that was processed
    step: int = 0  # training batches, each counted once
    samples: int = 0  # of training
    epoch: int = 0  # the newest one of training
    epoch_batches: int = 0  # training batches of that epoch
    evaluation: dict[str, Any] | None = None  # sums of an unfinished one (Evaluation.to_dict)
    attempt: int = 0  # that has counted last

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a record; return None if it is missing, unfinished or damaged."""
        try:
            with opened(path) as file:
                document = json.loads(file.read(RECORD_BYTES))
            known = {item.name for item in fields(cls)}
            counts = cls(**{k: v for k, v in document.items() if k in known})
            if counts.evaluation is not None and _FILE in counts.evaluation:
                counts.evaluation = peek_json(path.with_name(counts.evaluation[_FILE])) or None
            return counts
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None


@dataclass
class ModuleProgress:
    """How far a module is; only its ledger changes it.

    A module that was restarted alone repeats what is counted: it is behind its counts for a while.
    """

    counts: Counts = field(default_factory=Counts)
    id: int = 0  # position in the stream
    epoch: int = 0  # the newest one up to there
    epochs_ended: int = 0  # EPOCH markers that it has received

    @property
    def step(self) -> int:
        """Training batches so far, each counted once."""
        return self.counts.step

    @property
    def samples(self) -> int:
        return self.counts.samples


class Ledger:
    """The owner of a module's progress, and the writer of its record."""

    def __init__(self, path: Path, progress: ModuleProgress, attempt: int = 1) -> None:
        self.progress = progress
        progress.counts.attempt = attempt
        self._path = path
        self._file: int | None = None
        self._complaint: OSError | None = None
        self.write()
        if self._complaint is not None:  # a later attempt must know that this one started
            hint = "make room on the disk" if is_full(self._complaint) else None
            raise DiskError(f"{str(path)!r} cannot be written: {self._complaint}", hint=hint)

    @classmethod
    def reopen(cls, path: Path, progress: ModuleProgress, attempt: int = 1) -> Self:
        """Continue the record of an earlier attempt, if it is newer than the checkpoint's."""
        counts = Counts.read(path)
        if counts is not None and counts.id >= progress.counts.id:
            progress.counts = counts
        return cls(path, progress, attempt)

    def new(self, id: int) -> bool:
        """Whether a message has not been counted yet."""
        return id > self.progress.counts.id

    def at(self, id: int, epoch: int = 0) -> None:
        """Note the position of a message that is done, or is about to be."""
        self.progress.id, self.progress.epoch = id, max(epoch, self.progress.epoch)

    def end_epochs(self, epoch: int) -> int:
        """Note the end of an epoch; return how many have ended since this was last called."""
        newly = max(epoch - self.progress.epochs_ended, 0)
        self.progress.epochs_ended += newly
        return newly

    def keep_evaluation(self, sums: dict[str, Any] | None) -> None:
        """Note the sums of the unfinished evaluation, for the next record; None: there is none."""
        self.progress.counts.evaluation = sums

    def trained(self, id: int, epoch: int, samples: int, *, ends: bool = True) -> None:
        """Count a training batch, or a part of one, unless it was counted before.

        ``ends``: it is a whole batch, or the last part of one.
        """
        counts = self.progress.counts
        if id <= counts.id:
            return
        if epoch != counts.epoch:
            counts.epoch, counts.epoch_batches = epoch, 0
        counts.step += ends
        counts.samples += samples
        counts.epoch_batches += ends
        self.processed(id)

    def processed(self, id: int) -> None:
        """Note that everything up to ``id`` is about to be acknowledged."""
        if self.new(id):
            self.progress.counts.id = id
            self.write()

    def write(self) -> None:
        """Write the record into the file; if that fails, warn once and keep trying."""
        record = json.dumps(vars(self.progress.counts)).encode()
        try:
            if self._file is None:
                self._file = open_file(self._path, os.O_RDWR | os.O_CREAT)
            if len(record) >= RECORD_BYTES:
                record = self._without_evaluation()
            os.pwrite(self._file, record.ljust(RECORD_BYTES - 1) + b"\n", 0)
            self._complaint = None
        except OSError as error:
            if self._complaint is None:
                self._complaint = error
                log.warning("counts cannot be written, a restart would lose them: %s", error)

    def _without_evaluation(self) -> bytes:
        """Return the record, with the evaluation's sums in one of two alternating files.

        The file that the previous record names stays until that record is replaced.
        """
        counts = self.progress.counts
        beside = self._path.with_name(f"{self._path.stem}.evaluation-{counts.id % 2}")
        write_json(beside, counts.evaluation, durable=False)
        return json.dumps(vars(counts) | {"evaluation": {_FILE: beside.name}}).encode()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
