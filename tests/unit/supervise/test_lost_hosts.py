"""Hosts that are lost: the supervisor against scripted workers and a scripted job."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from dni_runtime.errors import DataError, StoppedError, UnansweredError, UnavailableError
from dni_runtime.files import write_json
from dni_runtime.plan.plan import LaunchPlan, Need, RestartPlan, WorkerPlan
from dni_runtime.run.documents.requests import Scale
from dni_runtime.run.record import Record
from dni_runtime.schedulers.slurm.nodes import JobNodes
from dni_runtime.supervise.scaling import lift_limits, wanted_replicas
from dni_runtime.supervise.supervisor import Supervisor
from tests.unit.plan.test_restarts import RULES, attempts, begun
from tests.unit.supervise.test_supervisor import FakeProcess, World, events, states, stubborn


class FakeHosts:
    """Hosts of which some (``gone``) are lost at some time.

    ``room``: there is another one for their modules.
    """

    def __init__(self, *, room: bool = True) -> None:
        self.gone: set[str] = set()
        self.room = room
        self.resized = False
        self.asked = 0  # times that it had to be found out at once

    def lost(self, hosts: Collection[str], *, at_once: bool) -> list[str]:
        self.asked += at_once
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


def test_hosts_are_looked_for_once_when_all_stop(world: World, plan: LaunchPlan) -> None:
    """Slurm is asked for them, which takes longer than a tick."""
    hosts = FakeHosts()

    def exits(process: FakeProcess) -> None:
        after_s = {"bottom": 3, "middle": 2, "top": 1}[process.worker.module]
        world.exits(world.now + after_s, **{process.worker.module: StoppedError.exit_code})

    world.on_stop = dict.fromkeys(("bottom", "middle", "top"), exits)
    stopped = supervisor(world, plan, hosts)
    world.at.append((4, lambda: stopped.interrupt(signal.SIGTERM)))
    assert stopped.run().phase == "stopped"
    assert hosts.asked == 1


@pytest.mark.parametrize("policy", ["on-failure", "never"])
def test_without_room_the_run_stops_to_be_resumed(
    world: World, plan: LaunchPlan, record: Record, policy: str
) -> None:
    hosts = FakeHosts(room=policy == "never")
    world.at.append((4, lambda: hosts.gone.add("n3")))
    world.exits(4, top=0)  # the tail, which would end the run
    rules = RULES.model_copy(update={"policy": policy})  # type: ignore[arg-type]
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
    state = supervisor(world, plan, hosts, RULES.model_copy(update={"backoff_s": 10})).run()
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
    state = supervisor(world, plan, hosts, RULES.model_copy(update={"scope": "chain"})).run()
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
    world: World,
    plan: LaunchPlan,
    nodes: list[str],
    placed: dict[str, str],
    start: int,
    *,
    elastic: dict[str, int] | None = None,
    rules: RestartPlan = RULES,
) -> Supervisor:
    """A supervisor of a job whose nodes have room for two workers each."""
    first = plan.workers[0]
    workers = tuple(
        replace(first, module=name, node=node, need=Need(name)) for name, node in placed.items()
    )
    plan = replace(plan, workers=workers, restart=rules, elastic=elastic or {"middle": start})
    hosts = JobNodes("7", plan, tuple(nodes), lambda job: list(nodes), world.clock)
    return Supervisor(
        world.record.run, plan, world, hosts=hosts, clock=world.clock, sleep=world.sleep
    )


def lost(record: Record) -> list[tuple[str, str]]:
    """The modules that have lost a replica, each with the reason."""
    found = [event for event in events(record) if event["event"] == "replica_lost"]
    return [(event["module"], event["reason"]) for event in found]


def scaled(record: Record) -> list[dict[str, int]]:
    return [event["replicas"] for event in events(record) if event["event"] == "scaled"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_replica_goes_on_elsewhere_if_there_is_room(
    world: World, plan: LaunchPlan, record: Record, ends: bool
) -> None:
    """It alone: the others go on meanwhile."""
    nodes = ["n1", "n2", "n3", "n4"]
    world.at.append((2, lambda: begun(world, *SHARED)))
    world.at.append((4, lambda: nodes.remove("n2")))
    if ends:
        world.exits(4, **{"middle.1": 0})
    finish(world, 40, *SHARED)
    state = with_replicas(world, plan, nodes, SHARED, 3).run()
    assert state.phase == "finished"
    assert [one.restarts for one in state.modules.values()] == [0, 1, 0, 0, 0]
    assert world.processes["middle.1"].worker.node == "n4"
    assert not lost(record)
    assert not scaled(record)


def test_in_a_job_that_has_been_resized_all_steps_overlap(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """Those that move, and those that are restarted where they were, also much later."""
    nodes = ["n1", "n2", "n3", "n4"]
    started: dict[str, list[bool]] = {}

    def starts(process: FakeProcess) -> None:
        started.setdefault(process.worker.module, []).append(process.worker.overlaps)
        begun(world, process.worker.module)

    world.on_start = starts
    world.exits(3, top=1)
    world.at.append((10, lambda: nodes.remove("n2")))
    world.exits(10, **{"middle.1": 0})
    world.exits(20, top=1)
    finish(world, 40, *SHARED)
    assert with_replicas(world, plan, nodes, SHARED, 3).run().phase == "finished"
    assert started == {
        "bottom": [False],
        "middle.1": [False, True],
        "middle.2": [False],
        "middle.3": [False],
        "top": [False, False, True],
    }
    kept = LaunchPlan.read(record.run)
    assert all(worker.overlaps for worker in kept.workers)


@pytest.mark.parametrize("ends", [True, False])
def test_a_replica_gives_way_to_another_one(
    world: World, plan: LaunchPlan, record: Record, ends: bool
) -> None:
    nodes = ["n1", "n2", "n3"]
    world.at.append((2, lambda: begun(world, *SHARED)))
    world.at.append((4, lambda: nodes.remove("n2")))
    if ends:
        world.exits(4, **{"middle.1": 0})
    finish(world, 40, "bottom", "middle.1", "middle.2", "top")
    state = with_replicas(world, plan, nodes, SHARED, 3).run()
    assert state.phase == "finished"
    assert state.modules["middle.3"].state == "inactive"
    assert world.processes["middle.1"].worker.node == "n1"
    assert lost(record) == [("middle", "node n2 lost")]
    assert scaled(record) == [{"middle": 2}]
    assert [one.restarts for one in state.modules.values()] == [1, 1, 1, 0, 1]


def test_replicas_give_way_to_a_module_without_any(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """As few as possible, of the module that has most of them."""
    placed = {
        "bottom": "n1", "left.1": "n1", "left.2": "n2", "left.3": "n2",
        "right.1": "n3", "right.2": "n3", "top": "n4",
    }  # fmt: skip
    nodes = ["n1", "n2", "n3", "n4"]
    world.at.append((2, lambda: begun(world, *placed)))
    world.at.append((4, lambda: nodes.remove("n4")))
    finish(world, 40, *[name for name in placed if name != "left.3"])
    supervisor = with_replicas(world, plan, nodes, placed, 3, elastic={"left": 3, "right": 2})
    state = supervisor.run()
    assert (state.phase, state.modules["left.3"].state) == ("finished", "inactive")
    assert world.processes["top"].worker.node == "n2"
    assert lost(record) == [("left", "node n4 lost")]
    assert scaled(record) == [{"left": 2, "right": 2}]
    assert wanted_replicas(record.run, {"left": 3, "right": 4}) == {"left": 2, "right": 4}


def test_what_one_module_has_lost_limits_no_other(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """Its place may be the one that a replica of another one waits for."""
    placed = {
        "bottom": "n1", "left.1": "n2", "left.2": "n2", "right.1": "n3", "right.2": "n4",
        "side": "n3", "top": "n1",
    }  # fmt: skip
    world.on_start = lambda process: begun(world, process.worker.module)
    world.at.append((4, lambda: Scale(replicas={"right": 2}).write(record.run.scale)))
    world.exits(8, **{"left.2": DataError.exit_code})
    finish(world, 40, *[name for name in placed if name != "left.2"])
    nodes = ["n1", "n2", "n3"]
    supervisor = with_replicas(world, plan, nodes, placed, 2, elastic={"left": 2, "right": 1})
    assert supervisor.run().phase == "finished"
    assert scaled(record) == [{"left": 1, "right": 1}, {"left": 1, "right": 2}]
    assert world.processes["right.2"].worker.node == "n2"
    assert [event["module"] for event in events(record) if event["event"] == "no_room"] == [
        "right.2"
    ]


def test_without_room_for_one_replica_each_the_run_stops(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    nodes = ["n1", "n2", "n3"]
    world.at.append((2, lambda: begun(world, *SHARED)))
    for node in ("n2", "n3"):
        world.at.append((4, lambda node=node: nodes.remove(node)))  # type: ignore[misc]
    state = with_replicas(world, plan, nodes, SHARED, 3).run()
    assert (state.phase, state.exit_code) == ("stopped", 75)
    assert str(state.error).startswith("nodes n2, n3 lost: no room for middle.1, middle.2, top")
    assert not lost(record)
    assert not scaled(record)
    assert wanted_replicas(record.run, {"middle": 3}) == {"middle": 3}


def test_a_replica_takes_the_place_of_the_last_one(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """It fails again and again where it is, but not where the last one was: not at once."""
    world.at.append((2, lambda: begun(world, *SHARED)))
    for at_s in (4, 6, 9, 14, 20):
        world.exits(at_s, **{"middle.1": 1})
    world.at.append((19, lambda: begun(world, "middle.1")))
    finish(world, 40, "bottom", "middle.1", "middle.2", "top")
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert state.phase == "finished"
    assert state.modules["middle.3"].state == "inactive"
    assert attempts(record, "middle.1") == [1, 2, 3, 4, 5, 6]
    assert attempts(record, "middle.2") == [1, 5]
    assert attempts(record, "middle.3") == [1]
    assert world.processes["middle.1"].worker.node == SHARED["middle.3"]
    ((module, reason),) = lost(record)
    assert module == "middle"
    assert reason.startswith("module 'middle.1' (attempt 4) ended with exit code 1")
    assert scaled(record) == [{"middle": 2}]
    assert [one.restarts for one in state.modules.values()] == [1, 5, 1, 0, 1]


def test_the_run_fails_with_its_last_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """Each one's place has been tried; when it is resumed all are wanted again."""
    world.at.append((2, lambda: begun(world, *SHARED)))
    for at_s in range(4, 120, 2):
        world.exits(at_s, **{"middle.1": 1})
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert (state.phase, state.failed) == ("failed", "middle.1")
    assert [module for module, _ in lost(record)] == ["middle", "middle"]
    assert scaled(record) == [{"middle": 2}, {"middle": 1}]
    assert wanted_replicas(record.run, {"middle": 3}) == {"middle": 1}
    lift_limits(record.run)
    assert wanted_replicas(record.run, {"middle": 3}) == {"middle": 3}


def test_what_was_lost_is_wanted_again_at_the_next_start(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    Scale(replicas={"middle": 3}, limits={"middle": 1}).write(record.run.scale)
    finish(world, 20, *SHARED)
    assert with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 2).run().phase == "finished"
    assert world.processes["top"].worker.replicas == {"middle": 3}
    assert "middle.3" in world.processes


def test_two_that_die_at_once_cost_one_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """Whoever is left out by what has become of the other one is not started."""
    world.at.append((2, lambda: begun(world, *SHARED)))
    world.exits(4, **{"middle.1": DataError.exit_code, "middle.3": 1})
    finish(world, 40, "bottom", "middle.1", "middle.2", "top")
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert (state.phase, state.modules["middle.3"].state) == ("finished", "inactive")
    assert attempts(record, "middle.3") == [1]
    assert scaled(record) == [{"middle": 2}]


def test_all_that_cannot_be_started_at_once_cost_one_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    world.at.append((2, lambda: begun(world, *SHARED)))
    world.exits(4, **{"middle.1": 1, "middle.2": 1, "middle.3": 1})
    start, full = world.start, {"middle.1", "middle.2", "middle.3"}

    def refusing(worker: WorkerPlan) -> FakeProcess:
        if worker.attempt > 1 and worker.module in full:
            full.discard(worker.module)
            raise UnavailableError("no room for a log")
        return start(worker)

    world.start = refusing  # type: ignore[method-assign]
    finish(world, 40, "bottom", "middle.1", "middle.2", "top")
    rules = RULES.model_copy(update={"limit": 1})
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3, rules=rules).run()
    assert (state.phase, state.modules["middle.3"].state) == ("finished", "inactive")
    assert scaled(record) == [{"middle": 2}]
    assert world.processes["middle.2"].worker.attempt == world.processes["top"].worker.attempt


@pytest.mark.parametrize(
    ("code", "reports", "numbers"),
    [
        (DataError.exit_code, True, [2, 1]),
        (79, True, []),
        (DataError.exit_code, False, []),
    ],
)
def test_what_fails_anywhere_ends_the_run(
    world: World, plan: LaunchPlan, record: Record, code: int, reports: bool, numbers: list[int]
) -> None:
    """Other hosts may have what this one lacks; a module that has diverged does so anywhere."""
    if reports:  # else it has not even begun
        world.at.append((2, lambda: begun(world, *SHARED)))
    for at_s in (4, 6, 8):
        world.exits(at_s, **{"middle.1": code})
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert (state.phase, state.failed, state.exit_code) == ("failed", "middle.1", code)
    assert scaled(record) == [{"middle": one} for one in numbers]


def test_who_has_waited_in_vain_costs_no_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """The one that has not answered is broken: it may be in any module."""
    world.at.append((2, lambda: begun(world, "bottom", "middle.1", "top")))
    world.exits(4, **{"middle.2": UnansweredError.exit_code})
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert (state.phase, state.failed, state.exit_code) == ("failed", "middle.2", 70)
    assert not scaled(record)
    assert not lost(record)


def test_what_the_same_input_ends_twice_costs_no_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    world.at.append((2, lambda: begun(world, *SHARED)))

    def dies() -> None:
        attempt = world.processes["middle.1"].worker.attempt
        report = {"attempt": attempt, "state": "failed", "id": 7, "error": "index 7"}
        write_json(record.run.worker("middle.1"), report)
        world.end("middle.1", 70)

    world.at += [(4, dies), (10, dies)]
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3).run()
    assert (state.phase, state.failed) == ("failed", "middle.1")
    assert not scaled(record)


def test_whose_restarts_are_not_wanted_loses_no_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    world.exits(4, **{"middle.1": 1})
    rules = RULES.model_copy(update={"policy": "never"})
    state = with_replicas(world, plan, ["n1", "n2", "n3"], SHARED, 3, rules=rules).run()
    assert (state.phase, state.failed) == ("failed", "middle.1")
    assert not scaled(record)


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
    assert (state.phase, state.modules["middle.3"].state) == ("finished", "inactive")
    assert attempts(record, "middle.3") == [1]
    assert lost(record) == [("middle", "node n2 lost")]
    assert [event["event"] for event in events(record)].count("node_lost") == 1


def test_replicas_of_the_head_change_like_others(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """What the lost one had read is in nobody else's hands: all start from the newest cut."""
    first = plan.workers[0]
    names = ("bottom.1", "bottom.2", "bottom.3", "top")
    workers = tuple(replace(first, module=name) for name in names)
    plan = replace(plan, workers=workers, restart=RULES, elastic={"bottom": 3})
    world.at.append((2, lambda: begun(world, *names)))
    world.exits(4, **{"bottom.2": DataError.exit_code})
    finish(world, 20, "bottom.1", "bottom.2", "top")
    state = Supervisor(record.run, plan, world, clock=world.clock, sleep=world.sleep).run()
    assert (state.phase, state.modules["bottom.3"].state) == ("finished", "inactive")
    assert [attempts(record, name) for name in names] == [[1, 2], [1, 2], [1], [1, 2]]
    assert [module for module, _ in lost(record)] == ["bottom"]
    again = world.processes["bottom.2"].worker
    assert (again.resume, again.replicas) == ("0", {"bottom": 2})


@pytest.mark.parametrize("room", [True, False])
def test_a_host_that_is_lost_while_all_stop_for_other_numbers(
    world: World, plan: LaunchPlan, record: Record, room: bool
) -> None:
    """Without room the wish is given up; whoever starts then has all the time that it needs."""
    nodes = ["n1", "n2", "n3", *(["n4"] if room else [])]
    placed = SHARED | {"middle.4": "n2"}
    world.on_start = lambda process: begun(world, process.worker.module)
    world.on_stop = dict.fromkeys(placed, stubborn)
    world.at.append((4, lambda: Scale(replicas={"middle": 4}).write(record.run.scale)))
    world.at.append((8, lambda: nodes.remove("n2")))
    world.exits(8, **{"middle.1": 1})
    names = [*SHARED, "middle.4"] if room else ["bottom", "middle.1", "middle.2", "top"]
    finish(world, 120, *names)
    state = with_replicas(world, plan, nodes, placed, 3).run()
    assert state.phase == "finished"
    assert scaled(record) == [{"middle": 4 if room else 2}]
    assert wanted_replicas(record.run, {"middle": 3}) == {"middle": 4 if room else 2}
    assert [one.attempt for one in state.modules.values() if one.state == "finished"] == [
        2 for _ in names
    ]
    assert world.processes["middle.1"].worker.node == ("n4" if room else "n1")


def test_a_job_that_has_grown_has_room_for_a_replica(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    """Until then nobody is stopped for it."""
    nodes = ["n1", "n3"]
    placed = SHARED | {"middle.1": "n1", "middle.3": "n2"}
    world.on_start = lambda process: begun(world, process.worker.module)
    started = list[float]()
    world.at.append((4, lambda: Scale(replicas={"middle": 3}).write(record.run.scale)))
    world.at.append((20, lambda: nodes.append("n4")))
    world.at.append((19.8, lambda: started.extend(len(p.told) for p in world.processes.values())))
    finish(world, 60, *placed)
    state = with_replicas(world, plan, nodes, placed, 2).run()
    assert state.phase == "finished"
    assert started == [0] * 4
    assert world.processes["middle.3"].worker.node == "n4"
    assert [event["module"] for event in events(record) if event["event"] == "no_room"] == [
        "middle.3"
    ]
    assert scaled(record) == [{"middle": 3}]
    assert {one.attempt for one in state.modules.values()} == {2}


def test_as_many_new_replicas_start_as_there_is_room_for(
    world: World, plan: LaunchPlan, record: Record
) -> None:
    placed = {"bottom": "n1", "middle.1": "n1", "middle.2": "n2", "middle.3": "n2",
              "middle.4": "n3", "middle.5": "n3", "top": "n4"}  # fmt: skip
    nodes = ["n1", "n2", "n4"]
    world.on_start = lambda process: begun(world, process.worker.module)
    world.at.append((4, lambda: Scale(replicas={"middle": 5}).write(record.run.scale)))
    finish(world, 60, *[one for one in placed if one != "middle.5"])
    state = with_replicas(world, plan, nodes, placed, 2).run()
    assert (state.phase, state.modules["middle.5"].state) == ("finished", "inactive")
    assert world.processes["middle.4"].worker.node == "n4"
    assert scaled(record) == [{"middle": 4}]
    assert [event["module"] for event in events(record) if event["event"] == "no_room"] == [
        "middle.5"
    ]
    assert {one.attempt for one in state.modules.values() if one.state == "finished"} == {2}
