"""Hosts for workers that are new, or whose host is lost or keeps failing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dni_runtime.plan.plan import LaunchPlan, WorkerPlan
from dni_runtime.schedulers.slurm.nodes import JobNodes
from dni_runtime.spec.named import module_of, number_of, takes_part
from dni_runtime.supervise.journal import Journal
from dni_runtime.supervise.pool import WorkerPool


class Mover:
    """Finds hosts for workers, for the supervisor."""

    def __init__(
        self,
        hosts: JobNodes | None,  # None: they cannot be lost
        plan: LaunchPlan,
        pool: WorkerPool,
        journal: Journal,
        shrink: Callable[[Mapping[str, int], str], None],  # starts all with fewer replicas
    ) -> None:
        self.lost: dict[str, str] = {}  # hosts of workers that have not been judged since
        self._hosts = hosts
        self._plan = plan
        self._pool = pool
        self._journal = journal
        self._shrink = shrink
        self._without_room: set[str] = set()

    def room_for(self, replicas: Mapping[str, int]) -> dict[str, int]:
        """Return as many of these replicas as hosts have room for, and plan new ones there."""
        counts, full = dict(replicas), set[str]()
        if self._hosts is None:
            return counts
        workers = self._pool.workers
        there = [name for name in workers if takes_part(name, self._pool.replicas)]
        present = [workers[name] for name in there if takes_part(name, counts)]
        for name in [name for name in workers if name not in there]:
            if not takes_part(name, counts):
                continue
            worker = workers[name]
            placed = self._hosts.place(present, worker)
            if placed is None:
                full.add(name)
                counts[module_of(name)] = number_of(name) - 1
                continue
            present.append(placed)
            if placed.node != worker.node:
                self._pool.replace(placed)
        for name in sorted(full - self._without_room):
            self._journal.event("no_room", module=name)
        self._without_room = full
        self._share_cpus(self._hosts)
        return counts

    def look(self, ended: Sequence[str], *, stopping: bool) -> str | None:
        """Find other hosts for the workers of lost hosts; return why the run must stop, if it must.

        ``ended`` are workers that have just exited without having finished.
        """
        if self._hosts is None:
            return None
        present = self._present(ended)
        at: dict[str, list[str]] = {}
        for worker in present:
            if worker.module not in self.lost and worker.node is not None:
                at.setdefault(worker.node, []).append(worker.module)
        gone = self._hosts.lost(at, at_once=bool(ended))
        self._share_cpus(self._hosts)
        if not gone:
            return None
        present = self._present(ended)
        names = [name for node in gone for name in at[node]]
        for node in gone:
            self._journal.event("node_lost", node=node, modules=at[node])
            self.lost |= {name: node for name in at[node] if name not in self._pool.due}
        where, moved = f"node{'s'[: len(gone) - 1]} {', '.join(gone)} lost", None
        counts: Mapping[str, int] = self._pool.replicas
        if not stopping and self._plan.restart.policy != "never":
            moved, counts = self._moved(self._hosts, present, names)
        for worker in moved or ():
            self._pool.replace(worker)
        self._pool.kill([name for name in names if name in self._pool.processes], where)
        if moved is None and not stopping:
            return f"{where}: no room for {', '.join(names)} elsewhere"
        if counts != self._pool.replicas:
            self._shrink(counts, where)
        return None

    def take_place_of_last(self, name: str) -> None:
        """Plan a replica on the host of its module's last replica, which will not be needed."""
        module = module_of(name)
        last = self._pool.workers[f"{module}.{self._pool.replicas[module]}"]
        worker = self._pool.workers[name]
        if last.node is not None and last.node != worker.node:
            self._pool.replace(worker.moved(last.node))

    def _share_cpus(self, hosts: JobNodes) -> None:
        """Let all steps that start from now on overlap, if the job has been resized."""
        if hosts.resized:
            self._pool.overlap()

    def _moved(
        self, hosts: JobNodes, present: Sequence[WorkerPlan], names: Sequence[str]
    ) -> tuple[list[WorkerPlan] | None, dict[str, int]]:
        """Find hosts for workers; as many replicas as necessary give way, of their modules first.

        Return the new plans (None: there is no room), and the numbers of replicas.
        """
        counts, going = dict(self._pool.replicas), set[str]()
        modules = {module_of(name) for name in names}
        while True:
            staying = [worker for worker in present if worker.module not in going]
            plans = hosts.move(staying, [name for name in names if name not in going])
            several = [module for module, count in counts.items() if count > 1]
            if plans is not None or not several:
                return plans, counts
            module = min(
                several, key=lambda candidate: (candidate not in modules, -counts[candidate])
            )
            going.add(f"{module}.{counts[module]}")
            counts[module] -= 1

    def _present(self, more: Sequence[str] = ()) -> list[WorkerPlan]:
        """Return the plans of the workers that run, will be restarted, or are named."""
        there = {*self._pool.processes, *self._pool.due, *more}
        return [worker for name, worker in self._pool.workers.items() if name in there]
