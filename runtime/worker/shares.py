"""Evaluations that several replicas of the tail have counted together.

Batches of an evaluation go to the replicas by their ids, as all batches do. At the marker after
them each replica but the first appends its sums to a file of its own in the run directory, and the
first, which reports the whole, waits for those of all others. The lines stay, so that a replica
that is restarted finds them, or writes the same ones again.
"""

from __future__ import annotations

import contextlib
import logging
import time

from dni_runtime.run.documents.shares import Share
from dni_runtime.run.lines import LineReader
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec

log = logging.getLogger(__name__)

GATHER_MS = 50
"""Milliseconds between two looks at what the others have written, or attempts to write."""


class Shares:
    """The parts of evaluations, as one replica of the tail sees them.

    ``begun`` is the start of the whole chain that this is: lines of others do not count.
    """

    def __init__(self, run: RunDir, spec: WorkerSpec, begun: int) -> None:
        self.reports = spec.replica == 1  # this is the replica that reports the whole
        self._run, self._name, self._begun = run, spec.module, begun
        readers = spec.siblings[1:] if self.reports else ()
        self._readers = {name: LineReader(run.shares(name), Share.parse) for name in readers}
        self._found: dict[int, dict[str, Share]] = {}
        self._look_s = 0.0

    def give(self, share: Share) -> bool:
        """Write this replica's part; return whether that has worked: if not, try again."""
        if not self._due():
            return False
        try:
            share.model_copy(update={"begun": self._begun}).append(self._run.shares(self._name))
        except OSError as error:
            log.warning("the part of an evaluation cannot be written: %s", error)
            return False
        return True

    def others(self, id: int) -> list[Share] | None:
        """Return the parts of the others at a marker; None before all are there."""
        if self._due():
            for name, reader in self._readers.items():
                with contextlib.suppress(OSError):
                    for share in reader.new():
                        if share.begun == self._begun and share.id >= id:
                            self._found.setdefault(share.id, {})[name] = share
        shares = self._found.get(id, {})
        if shares.keys() != self._readers.keys():
            return None
        self._found = {at: parts for at, parts in self._found.items() if at > id}
        return list(shares.values())

    def _due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return False
        self._look_s = now_s + GATHER_MS / 1000
        return True
