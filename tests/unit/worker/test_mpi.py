"""How workers take part in MPI: fakes of torch.distributed, which has MPI in few builds.

``tests/e2e/test_mpi.py`` runs where it has.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dni_runtime.core.resolve import worker_specs
from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.spec import parse_chain
from dni_runtime.spec.replicas import workers_of
from dni_runtime.worker import mpi
from tests.replicas import CHAIN, INFO

WORKERS = ["a", "b.1", "b.2", "c", "d.1", "d.2", "d.3"]


class Processes:
    """A communicator of MPI, of which this process is number 2 of seven in the first one."""

    made: ClassVar[list[list[int]]] = []

    def __init__(self, ranks: list[int]) -> None:
        self.made.append(ranks)
        self._ranks = ranks

    def rank(self) -> int:
        return 2

    def size(self) -> int:
        return 7

    def allreduce(self, tensors: list[Tensor]) -> Processes:
        for tensor in tensors:
            tensor *= len(self._ranks)
        return self

    def wait(self) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ranks of the communicators that are made."""
    Processes.made.clear()
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    fake = SimpleNamespace(create=Processes)
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupMPI", fake, raising=False)
    monkeypatch.setattr(mpi, "end_in_order", lambda: None)
    return Processes.made


def test_all_ranks_make_all_communicators_in_one_order(made: list[list[int]]) -> None:
    """MPI_Comm_create waits for all processes, also for those that will not be in it."""
    add, numbers = mpi.join_world(WORKERS, "b.2"), torch.ones(3)
    assert made == [[], [1, 2], [4, 5, 6]]
    assert add is not None
    add(numbers)
    assert numbers.tolist() == [2, 2, 2]


def test_one_without_replicas_is_in_none(made: list[list[int]]) -> None:
    assert mpi.join_world(["b.1", "b.2", "a", "c", "d.1", "d.2", "d.3"], "a") is None
    assert made == [[], [0, 1], [4, 5, 6]]


@pytest.mark.parametrize("own", ["b.1", "c"])
def test_ranks_that_are_not_the_workers(own: str, made: list[list[int]]) -> None:
    with pytest.raises(UsageError, match=rf"'{own}' is rank 2 of 7 in MPI, and should be \d of 7"):
        mpi.join_world(WORKERS, own)
    with pytest.raises(UsageError, match=r"is rank 2 of 7 in MPI, and should be 2 of 3"):
        mpi.join_world(WORKERS[:3], "b.2")
    assert made == [[], []]


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_a_torch_without_mpi() -> None:
    with pytest.raises(UnavailableError, match=r"this torch \(.*\) has no backend 'mpi'"):
        mpi.join_world(WORKERS, "b.2")


@pytest.mark.parametrize(("count", "backend"), [(2, "mpi"), (1, None)])
def test_all_workers_take_part_if_any_has_replicas(count: int, backend: str | None) -> None:
    text = CHAIN % ("local-sgd, backend: mpi", "delayed", "optimizer: Adam", count, "")
    workers = workers_of(worker_specs(parse_chain(text), INFO))
    assert {worker.backend for worker in workers} == {backend}
