"""Where the modules of a lost node go: pure decisions, and what the job's nodes say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dni_runtime.plan.placement import Capacity
from dni_runtime.plan.plan import LaunchPlan, Need, WorkerPlan
from dni_runtime.schedulers.slurm.nodes import JobNodes, choose, room_of

NODES = ("n1", "n2", "n3")
ROOM = Capacity(cpus=4, gpus=1, memory_mib=4000)


def test_the_largest_goes_first_to_the_emptiest_node() -> None:
    needs = (Need("a", 1, 0, 100), Need("b", 2, 0, 3000), Need("c", 1, 1, 100))
    there = {"n1": [Need("x", 1, 0, 500)], "n2": [Need("y", 2, 0, 2000)]}
    assert choose(needs, there, ROOM) == {"c": "n1", "b": "n1", "a": "n2"}


@pytest.mark.parametrize(
    "need", [Need("a", cpus=4), Need("a", gpus=2), Need("a", memory_mib=3600), Need("a", cpus=5)]
)
def test_no_room(need: Need) -> None:
    there = {"n1": [Need("x", 1, 0, 500)], "n2": [Need("y", 2, 0, 2000)]}
    assert choose([need], there, ROOM) is None
    assert choose([need], {}, ROOM) is None


def placed(worker: WorkerPlan, node: str, need: Need) -> WorkerPlan:
    return replace(worker, node=node, need=need, transport="ipc")


@pytest.fixture
def job(plan: LaunchPlan) -> LaunchPlan:
    """``bottom`` fills n1; ``middle`` is alone on n2, ``top`` on n3, each with room for another."""
    sizes = (("n1", 2), ("n2", 1), ("n3", 1))
    workers = tuple(
        placed(worker, node, Need(worker.module, cpus, 0, 1000 * cpus))
        for worker, (node, cpus) in zip(plan.workers, sizes, strict=True)
    )
    return replace(plan, workers=workers)


def test_each_node_has_what_the_fullest_needs(job: LaunchPlan) -> None:
    assert room_of(job.workers) == Capacity(cpus=2, gpus=0, memory_mib=2000)


def test_a_plan_keeps_what_its_workers_need(job: LaunchPlan) -> None:
    assert LaunchPlan.from_json(job.to_json()) == job


class Job:
    """What Slurm would say of a job's nodes, and when it is asked."""

    def __init__(self, nodes: Sequence[str] | None) -> None:
        self.nodes = nodes
        self.asked: list[float] = []
        self.now_s = 0.0

    def __call__(self, job: str) -> Sequence[str] | None:
        assert job == "7"
        self.asked.append(self.now_s)
        return self.nodes

    def clock(self) -> float:
        return self.now_s


def test_a_node_that_left_the_job_is_lost(job: LaunchPlan) -> None:
    slurm = Job(["n1", "n2", "n3"])
    nodes = JobNodes("7", job, NODES, slurm, slurm.clock)
    assert nodes.lost(["n2"], at_once=True) == []
    slurm.nodes = ["n1", "n3"]
    assert nodes.lost(["n1", "n2", "n3"], at_once=True) == ["n2"]
    (moved,) = nodes.move(job.workers, ["middle"]) or ()
    assert moved == job.workers[1].moved("n3")


def test_without_room_nothing_moves(job: LaunchPlan) -> None:
    nodes = JobNodes("7", job, NODES, lambda _: ["n1", "n2"])
    assert nodes.lost(["n3"], at_once=True) == ["n3"]
    assert [one.node for one in nodes.move(job.workers, ["top"]) or ()] == ["n2"]
    nodes = JobNodes("7", job, NODES, lambda _: ["n1"])
    assert nodes.lost(["n2", "n3"], at_once=True) == ["n2", "n3"]
    assert nodes.move(job.workers, ["middle", "top"]) is None


def test_where_slurm_says_nothing_nothing_is_lost(job: LaunchPlan) -> None:
    for silent in (None, []):
        nodes = JobNodes("7", job, NODES, lambda _, silent=silent: silent)  # type: ignore[misc]
        assert nodes.lost(["n2"], at_once=True) == []


def test_without_a_reason_slurm_is_seldom_asked(job: LaunchPlan) -> None:
    slurm = Job(["n1", "n3"])
    nodes = JobNodes("7", job, NODES, slurm, slurm.clock)
    for now in range(40):
        slurm.now_s = float(now)
        nodes.lost(["n2"], at_once=now == 20)
    assert slurm.asked == [15, 20, 35]


def test_a_moved_worker_listens_on_tcp(job: LaunchPlan) -> None:
    moved = job.workers[1].moved("n3")
    assert (moved.node, moved.transport) == ("n3", "tcp")
    head = replace(job.workers[0], transport=None).moved("n3")
    assert (head.node, head.transport) == ("n3", None)


def test_one_that_joins_starts_where_it_was_planned_or_where_there_is_room(job: LaunchPlan) -> None:
    slurm = Job(["n1", "n2", "n3"])
    nodes = JobNodes("7", job, NODES, slurm, slurm.clock)
    bottom, middle, top = job.workers
    assert nodes.place([bottom, top], middle) == middle
    slurm.nodes = ["n1", "n3"]
    nodes.lost([], at_once=True)
    assert nodes.place([bottom, top], middle) == middle.moved("n3")
    wide = placed(middle, "n2", Need("middle", 2, 0, 1000))
    assert nodes.place([bottom, top], wide) is None
    slurm.nodes = ["n1", "n3", "n4"]
    nodes.lost([], at_once=True)
    assert nodes.place([bottom, top], wide) == wide.moved("n4")
    slurm.nodes = ["n1", "n2", "n3"]
    nodes.lost([], at_once=True)
    assert nodes.place([bottom, top], wide) == wide


@pytest.mark.parametrize("other", [["n1", "n3"], ["n1", "n2", "n3", "n4"], ["n1", "n2", "n4"]])
def test_a_job_has_been_resized_once_it_has_had_other_nodes(
    job: LaunchPlan, other: list[str]
) -> None:
    slurm = Job(["n1", "n2", "n3"])
    nodes = JobNodes("7", job, NODES, slurm, slurm.clock)
    nodes.lost([], at_once=True)
    assert not nodes.resized
    slurm.nodes = other
    nodes.lost([], at_once=True)
    assert nodes.resized
    slurm.nodes = ["n1", "n2", "n3"]
    nodes.lost([], at_once=True)
    assert nodes.resized, "Slurm gives its steps no CPUs any more"


def test_nodes_that_no_worker_runs_on_do_not_resize_a_job(job: LaunchPlan) -> None:
    nodes = JobNodes("7", job, (*NODES, "n4"), lambda _: ["n1", "n2", "n3", "n4"])
    nodes.lost([], at_once=True)
    assert not nodes.resized


def test_who_takes_over_knows_that_the_job_has_been_resized(job: LaunchPlan) -> None:
    workers = tuple(replace(one, overlaps=True) for one in job.workers)
    assert JobNodes("7", replace(job, workers=workers), NODES, lambda _: None).resized
