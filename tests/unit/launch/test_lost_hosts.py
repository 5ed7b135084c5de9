"""Hosts that are lost: the supervisor against scripted workers and a scripted job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from dni_runtime.documents.requests import Scale
from dni_runtime.errors import DataError
from dni_runtime.files import write_json
from dni_runtime.launch.plan import LaunchPlan, Need, WorkerPlan
from dni_runtime.launch.records import Record
from dni_runtime.launch.restarts import RestartPlan
from dni_runtime.launch.scaling import replicas_now, set_left, wanted_replicas
from dni_runtime.launch.slurm.nodes import JobNodes
from dni_runtime.launch.supervisor import Supervisor
from dni_runtime.worker.ledger import Ledger, Progress
from tests.unit.launch.test_restarts import RULES, attempts, begun
from tests.unit.launch.test_supervisor import World, events, states


class FakeHosts:
    """Hosts of which some (``gone``) are lost at some time.

    ``room``: there is another one for their modules.
    """

    def __init__(self, *, room: bool = True) -> None:
        self.gone: set[str] = set()
        self.room = room

    def lost(self, hosts: Collection[str], *, at_once: bool) -> list[str]:
        return sorted(self.gone & set(hosts))

    def place(self, workers: Sequence[WorkerPlan], worker: WorkerPlan) -> WorkerPlan:
        return worker

    def move(
        self, workers: Sequence[WorkerPlan], names: Collection[str]
    ) -> list[WorkerPlan] | None:
        there = [replace(one, node="spare") for one in workers if one.module in names]
        return there if self.room else None


@pytest.fixture
def world(record: Record) -> World:
    world = World(record)
    world.srun_lies = True
    return world


def supervisor(
    world: World, plan: LaunchPlan, hosts: FakeHosts, rules: RestartPlan = RULES
) -> Supervisor:
    nodes = ("n1", "n2", "n3")
    workers = tuple(replace(one, node=n) for one, n in zip(plan.workers, nodes, strict=True))
    plan = replace(plan, workers=workers, restart=rules)
    return Supervisor(
        world.record.run, plan, world, hosts=hosts, clock=world.clock, sleep=world.sleep
    )


def finish(world: World, at_s: float, *names: str) -> None:
    def done() -> None:
        for name in names:
            attempt = world.processes[name].worker.attempt
            report = {"attempt": attempt, "state": "finished"}
            write_json(world.record.run.worker(name), report)
            world.end(name, 0)

    world.at.append((at_s, done))


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("name", ["middle", "top"])
def test_a_module_goes_on_elsewhere(
    world: World, plan: LaunchPlan, record: Record, name: str, ends: bool
) -> None:
    """Also where srun ends with 0, as it does when its node fails, or not at all."""
    hosts = FakeHosts()
    node = {"middle": "n2", "top": "n3"}[name]
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.at.append((4, lambda: hosts.gone.add(node)))
    write_json(record.run.endpoint("bottom"), {})
    if ends:
        world.exits(4, **{name: 0})
    finish(world, 20, "bottom", "middle", "top")
    state = supervisor(world, plan, hosts).run()
    assert (state.phase, state.modules[name].restarts) == ("finished", 1)
    worker = world.processes[name].worker
    assert (worker.node, worker.resume, worker.attempt) == ("spare", "0", 2)
    (lost,) = [event for event in events(record) if event["event"] == "node_lost"]
    assert (lost["node"], lost["modules"]) == (node, [name])
    (moved,) = [event for event in events(record) if event["event"] == "worker_moved"]
    assert (moved["module"], moved["from"], moved["to"]) == (name, node, "spare")
    (again,) = [event for event in events(record) if event["event"] == "worker_restarting"]
    assert (again["delay_s"], again["reason"]) == (0.0, f"node {node} is lost")


@pytest.mark.parametrize("policy", ["on-failure", "never"])
def test_without_room_the_run_stops_to_be_resumed(
    world: World, plan: LaunchPlan, record: Record, policy: str
) -> None:
    hosts = FakeHosts(room=policy == "never")
    world.at.append((4, lambda: hosts.gone.add("n3")))
    world.exits(4, top=0)  # the tail, which would end the run
    rules = replace(RULES, policy=policy)  # type: ignore[arg-type]
    state = supervisor(world, plan, hosts, rules).run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert state.error == "node n3 lost: no room for top elsewhere"
    assert states(state) == ["stopped"] * 3
    assert [wanted for _, wanted in world.processes["bottom"].told] == ["stop"]
    assert not [event for event in events(record) if event["event"] == "worker_moved"]


def test_one_that_waits_for_its_restart_moves_too(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    hosts = FakeHosts()
    world.at.append((2, lambda: begun(world, "bottom", "middle", "top")))
    world.exits(3, middle=-9)
    world.at.append((4, lambda: hosts.gone.add("n2")))
    finish(world, 30, "bottom", "middle", "top")
    state = supervisor(world, plan, hosts, replace(RULES, backoff_s=10)).run()
    assert state.phase == "finished"
    assert attempts(record, "middle") == [1, 2]
    assert world.processes["middle"].worker.node == "spare"


def test_an_exact_chain_goes_back_as_a_whole(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    hosts = FakeHosts()
    world.at.append((4, lambda: hosts.gone.update(("n2", "n3"))))
    world.exits(4, middle=0)
    finish(world, 20, "bottom", "middle", "top")
    state = supervisor(world, plan, hosts, replace(RULES, scope="chain")).run()
    assert state.phase == "finished"
    for name, node in (("bottom", "n1"), ("middle", "spare"), ("top", "spare")):
        assert attempts(record, name) == [1, 2]
        assert world.processes[name].worker.node == node
        assert world.processes[name].worker.resume == "0"


def test_a_module_that_has_finished_is_left_alone(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    hosts = FakeHosts()
    world.at.append((4, lambda: hosts.gone.add("n1")))
    finish(world, 3, "bottom")
    finish(world, 20, "middle", "top")
    assert supervisor(world, plan, hosts).run().phase == "finished"
    assert not [event for event in events(record) if event["event"] == "node_lost"]


SHARED = {"bottom": "n1", "middle.1": "n2", "middle.2": "n3", "middle.3": "n1", "top": "n3"}


def with_replicas(
    world: World, plan: LaunchPlan, nodes: list[str], placed: dict[str, str], start: int
) -> Supervisor:
    """A supervisor of a job whose nodes have room for two workers each."""
    first = plan.workers[0]
    workers = tuple(
        replace(first, module=name, node=node, need=Need(name)) for name, node in placed.items()
    )
    plan = replace(plan, workers=workers, restart=RULES, elastic={"middle": start})
    hosts = JobNodes("7", plan, lambda job: list(nodes), world.clock)
    return Supervisor(
        world.record.run, plan, world, hosts=hosts, clock=world.clock, sleep=world.sleep
    )


def test_a_replica_gives_way_to_the_first_one(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    nodes = ["n1", "n2", "n3"]
    world.at.append((2, lambda: begun(world, *SHARED)))
    world.at.append((4, lambda: nodes.remove("n2")))
    world.exits(4, **{"middle.1": 0})
    finish(world, 20, "bottom", "middle.1", "middle.2", "top")
    state = with_replicas(world, plan, nodes, SHARED, 3).run()
    assert state.phase == "finished"
    assert state.modules["middle.3"].state == "parked"
    assert world.processes["middle.1"].worker.node == "n1"
    (lost,) = [event for event in events(record) if event["event"] == "replica_lost"]
    assert (lost["module"], lost["reason"]) == ("middle.3", "it gives way to middle.1")
    assert [one.restarts for one in state.modules.values()] == [0, 1, 0, 0, 0]


def test_a_replica_gives_its_place_to_the_first_one(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """The first one fails again and again where it is, but not where the last one was."""
    world.at.append((2, lambda: begun(world, *SHARED)))
    for at_s in (4, 6, 9, 14):
        world.exits(at_s, **{"middle.1": 1})
    finish(world, 40, "bottom", "middle.1", "middle.2", "top")
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert state.phase == "finished"
    assert state.modules["middle.3"].state == "parked"
    assert attempts(record, "middle.1") == [1, 2, 3, 4, 5]
    assert world.processes["middle.1"].worker.node == SHARED["middle.3"]
    (lost,) = [event for event in events(record) if event["event"] == "replica_lost"]
    assert lost["module"] == "middle.3"
    assert lost["reason"].startswith("its place goes to middle.1: ")
    assert [one.restarts for one in state.modules.values()] == [0, 4, 0, 0, 0]


def test_the_run_ends_without_the_last_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """Each one's place has been tried; when it is resumed all are wanted again."""
    world.at.append((2, lambda: begun(world, *SHARED)))
    for at_s in range(4, 80, 2):
        world.exits(at_s, **{"middle.1": 1})
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert (state.phase, state.failed) == ("failed", "middle.1")
    lost = [event["module"] for event in events(record) if event["event"] == "replica_lost"]
    assert lost == ["middle.3", "middle.2"]
    assert wanted_replicas(record.run, {"middle": 3}) == {"middle": 1}
    set_left(record.run, {})
    assert wanted_replicas(record.run, {"middle": 3}) == {"middle": 3}


@pytest.mark.parametrize("code", [DataError.exit_code, 79])
def test_what_fails_anywhere_costs_no_replica(
    world: World, plan: LaunchPlan, record: Record, code: int
) -> None:
    world.exits(4, **{"middle.1": code})
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert (state.phase, state.failed) == ("failed", "middle.1")
    assert not [event for event in events(record) if event["event"] == "replica_lost"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_replica_that_ended_with_its_node_is_not_restarted(
    world: World, plan: LaunchPlan, record: Record, ends: bool
) -> None:
    """Or that the supervisor has ended, who has seen the loss first; once is enough."""
    nodes = ["n1", "n2", "n3"]
    placed = SHARED | {"middle.1": "n1", "middle.3": "n2"}
    world.at.append((2, lambda: begun(world, *placed)))
    world.at.append((4, lambda: nodes.remove("n2")))
    if ends:
        world.exits(4, **{"middle.3": 1})
    finish(world, 40, "bottom", "middle.1", "middle.2", "top")
    state = with_replicas(world, plan, nodes, placed, 3).run()
    assert (state.phase, state.modules["middle.3"].state) == ("finished", "parked")
    assert attempts(record, "middle.3") == [1]
    (lost,) = [event for event in events(record) if event["event"] == "replica_lost"]
    assert (lost["module"], lost["reason"]) == ("middle.3", "node n2 lost")
    assert [event["event"] for event in events(record)].count("node_lost") == 1


def test_without_a_replica_of_the_head_all_begin_again(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """What it had read is in nobody else's hands; the others start from the newest cut."""
    first = plan.workers[0]
    names = ("bottom.1", "bottom.2", "bottom.3", "top")
    workers = tuple(replace(first, module=name) for name in names)
    plan = replace(plan, workers=workers, restart=RULES, elastic={"bottom": 3})
    world.at.append((2, lambda: begun(world, *names)))
    Ledger(record.run.ledger("bottom.2"), Progress()).close()
    world.exits(4, **{"bottom.2": DataError.exit_code})
    finish(world, 20, "bottom.1", "bottom.3", "top")
    state = Supervisor(record.run, plan, world, clock=world.clock, sleep=world.sleep).run()
    assert (state.phase, state.modules["bottom.2"].state) == ("finished", "parked")
    assert [attempts(record, name) for name in names] == [[1, 2], [1], [1, 2], [1, 2]]
    (lost,) = [event for event in events(record) if event["event"] == "replica_lost"]
    assert lost["module"] == "bottom.2"
    again = world.processes["bottom.3"].worker
    assert (again.resume, again.active) == ("0", {"bottom": (1, 3)})
    assert replicas_now(record.run, plan.elastic).active == {"bottom": (1, 3)}


def test_a_job_that_has_grown_has_room_for_a_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    nodes = ["n1", "n3"]
    placed = SHARED | {"middle.1": "n1", "middle.3": "n2"}
    started = [one for one in placed if one != "middle.3"]
    world.at.append((2, lambda: begun(world, *started)))
    world.at.append((4, lambda: Scale(replicas={"middle": 3}).write(record.run.scale)))
    world.at.append((20, lambda: nodes.append("n4")))
    finish(world, 40, *placed)
    state = with_replicas(world, plan, nodes, placed, 2).run()
    assert state.phase == "finished"
    assert world.processes["middle.3"].worker.node == "n4"
    assert [event["module"] for event in events(record) if event["event"] == "no_room"] == [
        "middle.3"
    ]
    assert not any(one.restarts for one in state.modules.values())
