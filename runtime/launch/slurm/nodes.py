"""The nodes of a running job: which are lost, and where their modules go.

A job with ``--no-kill`` goes on when one of its nodes fails: the controller takes the node out of
the job, for good, and ends the steps there (``kill_running_job_by_node_name`` in Slurm's
node_mgr.c). So the job's own list of nodes tells what is lost, whatever the node itself is called
meanwhile (DOWN, FAIL, or idle again after a reboot), and a node that is merely silent for less than
``SlurmdTimeout`` is still there. An ``srun`` whose node has failed may end with exit status 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from dni_runtime.errors import UnavailableError
from dni_runtime.launch.plan import LaunchPlan, WorkerPlan
from dni_runtime.launch.slurm import commands
from dni_runtime.launch.slurm.placement import Capacity, Need

_LOOK_S = 15.0
"""Between two looks without a reason: Slurm tells ``srun``, unless this node was cut off then."""

_log = logging.getLogger(__name__)


def nodes_of(job: str) -> list[str] | None:
    """The nodes that a job has now; None where Slurm does not say."""
    try:
        info = commands.job_infos([job]).get(job)
        if info is None or info.state != "RUNNING" or not info.nodes:
            return None
        return commands.hostnames(info.nodes)
    except UnavailableError as error:
        _log.warning("the job's nodes are not known: %s", error)
        return None


class JobNodes:
    """The nodes of one job.

    Args:
        job: Its id.
        plan: What was placed on them at the job's start.
        nodes_of: Gives the nodes that the job has now.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        job: str,
        plan: LaunchPlan,
        nodes_of: Callable[[str], Sequence[str] | None] = nodes_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._nodes_of = nodes_of
        self._clock = clock
        self._room = room_of(plan.workers)
        self._up: Sequence[str] = ()
        self._look_at_s = clock() + _LOOK_S

    def lost(self, hosts: Collection[str], *, at_once: bool) -> list[str]:
        """Those of the hosts that the job has lost, as far as that is known.

        Args:
            hosts: Names of nodes.
            at_once: Whether there is a reason to ask Slurm now.
        """
        if not at_once and self._clock() < self._look_at_s:
            return []
        found = self._nodes_of(self._job)
        self._look_at_s = self._clock() + _LOOK_S
        if not found:
            return []
        self._up = found
        return [host for host in hosts if host not in found]

    def move(
        self, workers: Sequence[WorkerPlan], names: Collection[str]
    ) -> list[WorkerPlan] | None:
        """The named workers on nodes that the job still has; None where there is no room.

        Args:
            workers: All workers of the run, as they are placed now.
            names: Modules of those that must go elsewhere.
        """
        needs: dict[str, list[Need]] = {node: [] for node in self._up}
        for worker in workers:
            if worker.module not in names and worker.node in needs and worker.need is not None:
                needs[worker.node].append(worker.need)
        going = [worker for worker in workers if worker.module in names]
        found = choose([worker.need for worker in going if worker.need], needs, self._room)
        return None if found is None else [on_node(one, found[one.module]) for one in going]


def room_of(workers: Sequence[WorkerPlan]) -> Capacity:
    """What each node of the job was asked for: what the fullest one needs."""
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
    """A node for each of some modules, the largest first, on the emptiest node that has room.

    Args:
        needs: What they ask for.
        there: What the modules of each node ask for.
        room: What each node has.

    Returns:
        The node of each module; None where one finds no room.
    """
    filled = {node: list(some) for node, some in there.items()}
    chosen: dict[str, str] = {}
    for need in sorted(needs, key=lambda one: (one.gpus, one.memory_mib, one.cpus), reverse=True):
        fitting = [node for node, some in filled.items() if room.lacks([*some, need]) is None]
        if not fitting:
            return None
        node = min(fitting, key=lambda one: sum(other.cpus for other in filled[one]))
        filled[node].append(need)
        chosen[need.module] = node
    return chosen


def on_node(worker: WorkerPlan, node: str) -> WorkerPlan:
    """The same worker on another node, where it listens on tcp: its neighbours may be anywhere.

    What stood beside it on its old node, and so talked to it over ipc, moves as well.
    """
    argv = list(worker.argv)
    argv[argv.index(f"--nodelist={worker.node}")] = f"--nodelist={node}"
    if "--transport" in argv:
        argv[argv.index("--transport") + 1] = "tcp"
    return replace(worker, argv=tuple(argv), node=node)
