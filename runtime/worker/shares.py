"""Evaluations that several replicas of the tail have counted together.

Batches of an evaluation go to the replicas by their ids, as all batches do. At the marker after
them each replica but the first appends its sums to a file of its own in the run directory, and the
first, which reports the whole, waits for those of all others. A replica that leaves does so at the
marker after which it takes no batches. The lines stay, so that a replica that is restarted finds
them, or writes the same ones again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from dni_runtime.documents.shares import Share
from dni_runtime.lines import LineReader
from dni_runtime.link import Marker
from dni_runtime.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.members import Members
from dni_runtime.spec.named import module_of, worker_name
from dni_runtime.wire import Mark
from dni_runtime.worker.ledger import Counts

log = logging.getLogger(__name__)

GATHER_MS = 50
"""Milliseconds between two looks at what the others have written, or attempts to write."""


class Shares:
    """The parts of evaluations, as one replica of the tail sees them.

    ``begun`` is the start of the whole chain that this is: lines of others do not count. ``lost``
    returns whether a replica is gone for good.
    """

    def __init__(
        self,
        run: RunDir,
        spec: WorkerSpec,
        begun: int,
        members: Members,
        lost: Callable[[str], bool],
    ) -> None:
        module = module_of(spec.module)
        others = [worker_name(module, one + 1, spec.replicas) for one in range(1, spec.replicas)]
        self.reports = spec.replica == 1  # this is the replica that reports the whole
        self._run, self._name, self._begun = run, spec.module, begun
        self._members, self._lost = members, lost
        readers = others if self.reports else []
        self._readers = {name: LineReader(run.shares(name), Share.parse) for name in readers}
        self._found: dict[int, dict[str, Share]] = {}
        self._look_s = 0.0

    def due(self, marker: Marker) -> bool:
        """Whether this replica gives its part, or the first one gathers those of others."""
        if Mark.SCALE not in marker.mark:
            return True
        return self.reports or not self._members.takes(self._name, marker.id + 1)

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

    def others(self, marker: Marker) -> list[Share] | None:
        """Return the parts of the others at a marker; None before all are there."""
        id, takes = marker.id, self._members.takes
        wanted = [name for name in self._readers if takes(name, id) and not self._lost(name)]
        if Mark.SCALE in marker.mark:
            wanted = [name for name in wanted if not takes(name, id + 1)]
        if self._due():
            for name, reader in self._readers.items():
                with contextlib.suppress(OSError):
                    for share in reader.new():
                        if share.begun == self._begun and share.id >= id:
                            self._found.setdefault(share.id, {})[name] = share
        found = self._found.get(id, {})
        if not found.keys() >= {*wanted}:
            return None
        self._found = {one: own for one, own in self._found.items() if one > id}
        return list(found.values())

    def rested(self, id: int) -> int:
        """Return the training batches until marker ``id`` of the replicas that take none there."""
        found = 0
        for name in [name for name in self._readers if not self._members.takes(name, id)]:
            counted = Counts.read(self._run.ledger(name))
            steps = [step for at, step, _ in (counted.left if counted else ()) if at <= id]
            found += steps[-1] if steps else 0
        return found

    def _due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return False
        self._look_s = now_s + GATHER_MS / 1000
        return True
