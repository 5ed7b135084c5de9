"""The nodes of a running job: finding lost and new ones, and moving modules to others.

A job with ``--no-kill`` continues when one of its nodes fails: the controller removes the node from
the job for good and ends its steps (``kill_running_job_by_node_name`` in Slurm's node_mgr.c). So
the job's own list of nodes shows which are lost, whatever state the node itself has meanwhile
(DOWN, FAIL, or idle again after a reboot); a node that is silent for less than ``SlurmdTimeout`` is
still in it. An ``srun`` whose node has failed may end with exit status 0. The same list shows that
a job has become smaller or larger (scontrol(1), ``NumNodes``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from dni_runtime.errors import UnavailableError
from dni_runtime.plan.placement import Capacity
from dni_runtime.plan.plan import LaunchPlan, Need, WorkerPlan
from dni_runtime.schedulers.slurm import commands

_LOOK_S = 15.0
"""Seconds between polls; usually an ``srun`` ends first, unless this node was cut off."""

_log = logging.getLogger(__name__)


def nodes_of(job: str) -> list[str] | None:
    """Return the nodes that a job has now; None if unknown."""
    try:
        info = commands.job_infos([job]).get(job)
        if info is None or info.state != "RUNNING" or not info.nodes:
            return None
        return commands.hostnames(info.nodes)
    except UnavailableError as error:
        _log.warning("the job's nodes are unknown: %s", error)
        return None


class JobNodes:
    """The nodes that a job's workers run on, of which some can be lost."""

    def __init__(
        self,
        job: str,
        plan: LaunchPlan,
        nodes: Collection[str],  # at the job's start
        nodes_of: Callable[[str], Sequence[str] | None] = nodes_of,
        clock: Callable[[], float] = time.monotonic,  # monotonic, in seconds
    ) -> None:
        self._job = job
        self._nodes_of = nodes_of
        self._clock = clock
        self._room = room_of(plan.workers)
        self._nodes = {*nodes}
        # whether other nodes are known to be there than at first
        self.resized = any(worker.overlaps for worker in plan.workers)
        self._up: Sequence[str] = ()
        self._look_at_s = clock() + _LOOK_S

    def lost(self, hosts: Collection[str], *, at_once: bool) -> list[str]:
        """Return those of the hosts that the job is known to have lost.

        ``at_once``: query Slurm now; otherwise every ``_LOOK_S``.
        """
        if not at_once and self._clock() < self._look_at_s:
            return []
        nodes = self._nodes_of(self._job)
        self._look_at_s = self._clock() + _LOOK_S
        if not nodes:
            return []
        self._up = nodes
        self.resized |= {*nodes} != self._nodes  # for good: also when a node comes back
        return [host for host in hosts if host not in nodes]

    def move(
        self, workers: Sequence[WorkerPlan], names: Collection[str]
    ) -> list[WorkerPlan] | None:
        """Return plans of the named workers on nodes that the job still has; None without room.

        ``workers`` are the present ones, as they are placed now.
        """
        going = [worker for worker in workers if worker.module in names]
        there = self._there(worker for worker in workers if worker.module not in names)
        hosts = choose([worker.need for worker in going if worker.need], there, self._room)
        return None if hosts is None else [worker.moved(hosts[worker.module]) for worker in going]

    def place(self, workers: Sequence[WorkerPlan], worker: WorkerPlan) -> WorkerPlan | None:
        """Return the plan of a worker that is to start, if possible where it was planned.

        None: no node of the job has room. ``workers`` are as in :meth:`move`.
        """
        if not self._up:
            self.lost((), at_once=True)
        if worker.need is None or not self._up:
            return worker
        there = self._there(workers)
        planned = {node: some for node, some in there.items() if node == worker.node}
        if choose([worker.need], planned, self._room) is not None:
            return worker
        hosts = choose([worker.need], there, self._room)
        return None if hosts is None else worker.moved(hosts[worker.module])

    def _there(self, workers: Iterable[WorkerPlan]) -> dict[str, list[Need]]:
        """Return what the workers on each node of the job need."""
        needs: dict[str, list[Need]] = {node: [] for node in self._up}
        for worker in workers:
            if worker.node in needs and worker.need is not None:
                needs[worker.node].append(worker.need)
        return needs


def room_of(workers: Sequence[WorkerPlan]) -> Capacity:
    """Return the resources of each node of the job: those that the fullest one needs."""
    there: dict[str | None, list[Need]] = {}
    for worker in workers:
        if worker.need is not None:
            there.setdefault(worker.node, []).append(worker.need)
    return Capacity(
        cpus=max(sum(need.cpus for need in needs) for needs in there.values()),
        gpus=max(sum(need.gpus for need in needs) for needs in there.values()),
        memory_mib=max(sum(need.memory_mib for need in needs) for needs in there.values()),
    )


def choose(
    needs: Sequence[Need], there: Mapping[str, Sequence[Need]], room: Capacity
) -> dict[str, str] | None:
    """Choose a node for each module, the largest first: the emptiest node that has room.

    ``there`` has the needs of the modules already on each node, ``room`` the resources of each
    node. None if a module has no room.
    """
    filled = {node: list(some) for node, some in there.items()}
    chosen: dict[str, str] = {}
    for need in sorted(
        needs, key=lambda item: (item.gpus, item.memory_mib, item.cpus), reverse=True
    ):
        fitting = [node for node, some in filled.items() if room.lacks([*some, need]) is None]
        if not fitting:
            return None
        node = min(fitting, key=lambda candidate: sum(other.cpus for other in filled[candidate]))
        filled[node].append(need)
        chosen[need.module] = node
    return chosen
