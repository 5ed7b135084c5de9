"""Workers that start on another host: theirs is lost or no good, or they are to join."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dni_runtime.launch.journal import Journal
from dni_runtime.launch.plan import LaunchPlan, WorkerPlan
from dni_runtime.launch.pool import WorkerPool
from dni_runtime.launch.processes import Hosts
from dni_runtime.spec.members import number_of
from dni_runtime.spec.named import module_of


class Mover:
    """Finds hosts for workers, for the supervisor.

    Args:
        hosts: The hosts; None: they cannot be lost.
        plan: The run's plan.
        pool: The workers.
        journal: The run's events.
        lose: Goes on without a replica, and says why; returns whether that is possible.

    Attributes:
        lost: The lost hosts of workers that have not been judged since, by module.
    """

    def __init__(
        self,
        hosts: Hosts | None,
        plan: LaunchPlan,
        pool: WorkerPool,
        journal: Journal,
        lose: Callable[[str, str], bool],
    ) -> None:
        self.lost: dict[str, str] = {}
        self._hosts = hosts
        self._plan = plan
        self._pool = pool
        self._journal = journal
        self._lose = lose

    def place(self, name: str) -> bool:
        """Find a host for a replica that is to join; return whether one has room."""
        if self._hosts is None:
            return True
        old = self._pool.workers[name]
        worker = self._hosts.place(self._present(), old)
        if worker is not None and (worker.node, worker.gained) != (old.node, old.gained):
            self._pool.replace(worker)
        return worker is not None

    def look(self, ended: Sequence[str], *, stopping: bool) -> str | None:
        """Find other hosts for the modules of lost hosts.

        Args:
            ended: Modules whose workers have just exited without having finished.
            stopping: Whether the run is being stopped.

        Returns:
            Why the run must stop; None: it need not.
        """
        if self._hosts is None:
            return None
        present = self._present(ended)
        at: dict[str, list[str]] = {}
        settled = {*self.lost, *self._pool.parking}
        for worker in present:
            if worker.module not in settled and worker.node is not None:
                at.setdefault(worker.node, []).append(worker.module)
        gone = self._hosts.lost(at, at_once=bool(ended))
        if not gone:
            return None
        names = [name for node in gone for name in at[node]]
        for node in gone:
            self._journal.event("node_lost", node=node, modules=at[node])
            self.lost |= {name: node for name in at[node] if name not in self._pool.due}
        why, where = None, f"node{'s'[: len(gone) - 1]} {', '.join(gone)} lost"
        if not stopping:
            found = None
            if self._plan.restart.policy != "never":
                found = self._hosts.move(present, names)
                if found is None:
                    # the others may have room, without those that the run can do without
                    names = [name for name in names if not self._lose(name, where)]
                    found = self._make_room(self._hosts, present, names)
            if found is None:
                why = f"{where}: no room for {', '.join(names)} elsewhere"
            for worker in found or ():
                self._pool.replace(worker)
        self._pool.kill([name for name in names if name in self._pool.processes], where)
        return why

    def give_place(self, name: str, why: str) -> bool:
        """Let another replica give its place to the first one, which has failed at its own.

        Args:
            name: The worker that has failed: nothing happens unless it is such a first replica.
            why: How it has ended.

        Returns:
            Whether one has done so.
        """
        if number_of(name) > 1:
            return False
        own = self._pool.workers[name]
        for other in reversed(self._present()):
            if other.module in (name, *self._pool.parking):
                continue
            of_it = module_of(other.module) == module_of(name)
            if of_it and self._lose(other.module, f"its place goes to {name}: {why}"):
                if other.node is not None and other.node != own.node:
                    self._pool.replace(own.moved(other.node, gained=other.gained))
                return True
        return False

    def _make_room(
        self, hosts: Hosts, present: Sequence[WorkerPlan], names: Sequence[str]
    ) -> list[WorkerPlan] | None:
        """Find hosts for modules, to which replicas that the run can do without give way."""
        own, head = {module_of(name) for name in names}, module_of(next(iter(self._pool.workers)))
        spare = [
            one.module
            for one in present
            if module_of(one.module) in self._plan.elastic
            and module_of(one.module) != head  # else all would begin again
            and number_of(one.module) > 1
            and one.module not in (*names, *self.lost, *self._pool.parking)
        ]
        spare.sort(key=lambda name: (module_of(name) not in own, -number_of(name)))
        for count in range(len(spare) + 1):
            going = spare[:count]
            found = hosts.move([one for one in present if one.module not in going], names)
            if found is not None:
                for name in going:
                    self._lose(name, f"it gives way to {', '.join(names)}")
                return found
        return None

    def _present(self, more: Sequence[str] = ()) -> list[WorkerPlan]:
        """Return the plans of the workers that run, will be restarted, or are named."""
        there = {*self._pool.processes, *self._pool.due, *more}
        return [worker for name, worker in self._pool.workers.items() if name in there]
