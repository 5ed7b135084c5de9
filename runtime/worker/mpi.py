"""The ranks of one ``mpirun`` as process groups (``replication.backend: mpi``).

MPI begins once for all ranks, so all workers take part, also those that share nothing. Each
replicated module has a communicator of its own, which torch's ``new_group`` cannot make: it returns
at once on ranks that will not be in the group, for which MPI_Comm_create waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.garbage import end_in_order
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of


def join_world(workers: Sequence[str], own: str) -> Callable[[Tensor], object] | None:
    """Begin MPI, as soon as all ranks do.

    Args:
        workers: The run's workers, by their ranks.
        own: This one.

    Returns:
        What replaces numbers by their sums over the replicas of the worker's module; None if it has
        no replicas.

    Raises:
        UnavailableError: This machine's torch was built without MPI.
        UsageError: The ranks are not the run's workers.
    """
    if not dist.is_mpi_available():
        raise UnavailableError(
            f"this torch ({torch.__version__}) has no backend 'mpi'",
            hint="use a build of torch with MPI, or set 'replication.backend: gloo'",
        )
    create = dist.distributed_c10d.ProcessGroupMPI.create
    world = create([])
    end_in_order()
    rank, size = workers.index(own), len(workers)
    if (world.rank(), world.size()) != (rank, size):
        raise UsageError(
            f"'replication.backend: mpi': {own!r} is rank {world.rank()} of {world.size()} in MPI, "
            f"and should be {rank} of {size}",
            hint="start all with the mpirun of the MPI that torch was built with, or with "
            "'srun --mpi=pmix'; 'dnictl mpi' prints the command",
        )
    groups: dict[str, Any] = {
        module: create([workers.index(one) for one in replicas])
        for module, replicas in replicas_of(workers).items()
        if len(replicas) > 1
    }
    group = groups.get(module_of(own))
    return None if group is None else lambda numbers: group.allreduce([numbers]).wait()
