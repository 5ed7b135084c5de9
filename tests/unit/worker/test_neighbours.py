"""Finding the neighbours, against fake links, real records, and a clock that the waits move."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dni_runtime.errors import EncryptionError, UnavailableError
from dni_runtime.files import peek_json, write_json
from dni_runtime.run.documents.reports import Endpoint, Report
from dni_runtime.run.keys import KeyPair, Keyring, KnownKeys
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import LinksSpec, WorkerSpec
from dni_runtime.worker import neighbours
from dni_runtime.worker.neighbours import (
    CONNECT_SLICE_S,
    LOOK_S,
    QUIET_S,
    Neighbours,
    publish,
    withdraw,
)
from tests.conftest import MakeSpec

TIMEOUT_S = 30.0
HERE, THERE = "tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"
KEY = b"k" * 40


class World:
    """A run directory, two links, and a clock that the waits move.

    ``at`` maps seconds to what happens then; ``answers`` tells how the module downstream answers at
    an address: by an error, or not at all (None: it accepts).
    """

    def __init__(self, run: RunDir, spec: WorkerSpec) -> None:
        self.run = run
        self.spec = spec
        self.now_s = 100.0
        self.at: dict[float, Callable[[], None]] = {}
        self.answers: dict[str, Callable[[], Exception | None]] = {}
        self.reads = Counter[int]()
        self.tried: list[tuple[str, bytes | None, float]] = []
        self.moved: list[tuple[str, bytes | None]] = []
        self.greeted = 0
        self.dismissed = self.peer = False
        # of the link downstream
        self.lost, self.connected, self.in_flight, self.heard_s = False, True, 0, self.now_s
        self.target, self.source, self.links, self.number = "tail", "stem", [self], 1
        self.address: str | None = HERE

    @property
    def age_s(self) -> float:
        return self.now_s - 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds
        for moment in sorted(self.at):
            if moment <= self.age_s:
                self.at.pop(moment)()

    def connect(
        self, address: str, *, deadline_s: float, server_key: bytes | None, stop: Any
    ) -> None:
        self.tried.append((address, server_key, self.age_s))
        answer = self.answers.get(address, lambda: UnavailableError("no answer"))()
        if answer is None:
            return
        assert 0 < deadline_s <= CONNECT_SLICE_S
        stop()
        self.sleep(deadline_s)
        raise answer

    def move(self, address: str, server_key: bytes | None) -> None:
        self.moved.append((address, server_key))
        self.address = address

    def dismiss(self) -> None:
        self.dismissed = True

    def greet(self) -> bool:
        return self.peer

    def listen(self) -> None:
        """Also who is known already may be restarted, and wait for an answer."""
        self.greeted += 1

    def wait_for_peer(self, deadline_s: float, stop: Callable[[], bool]) -> None:
        end_s = self.now_s + deadline_s
        while not self.peer:
            stop()
            if self.now_s >= end_s:
                raise UnavailableError("nobody")
            self.sleep(min(1.0, end_s - self.now_s))

    def record(self, address: str = HERE, **fields: Any) -> None:
        write_json(self.run.endpoint("tail"), {"address": address, **fields}, durable=False)

    def report(self, module: str, state: str) -> None:
        Report.model_validate({"attempt": 1, "state": state}).write(self.run.worker(module))

    def supervisor(self, state: str, module: str = "tail", restarts: int = 1) -> None:
        modules = {module: {"restarts": restarts, "state": state}}
        write_json(self.run.state, {"updated": self.now_s, "modules": modules}, durable=False)

    def neighbours(
        self,
        *,
        restarted: bool = False,
        address: str | None = None,
        until_s: float = 1e9,
        since: int = 0,
        keys: Keyring | None = None,
    ) -> Neighbours:
        made = Neighbours(
            self.spec,
            self.run,
            address=address,
            restarted=restarted,
            stop=lambda: self.age_s >= until_s,
            since=since,
            keys=keys,
        )
        made.callers.append(self)  # type: ignore[arg-type]
        return made


MakeWorld = Callable[[str], World]


@pytest.fixture
def make_world(tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """Make the world of one module."""

    def make(module: str) -> World:
        run = RunDir(tmp_path)
        run.create()
        made = World(run, make_spec(module, links=LinksSpec(connect_timeout_s=TIMEOUT_S)))
        clock = SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep, time=made.monotonic)
        monkeypatch.setattr(neighbours, "time", clock)
        read = neighbours.fresh_endpoint

        def fresh_endpoint(path: Path) -> Endpoint:
            made.reads[int(made.age_s)] += 1
            return read(path)

        monkeypatch.setattr(neighbours, "fresh_endpoint", fresh_endpoint)
        return made

    return make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world("stem")


def connect(world: World, **settings: Any) -> None:
    link: Any = world
    world.neighbours(**settings).connect(link)


def look(world: World, known: Neighbours) -> None:
    link: Any = world
    known.look(link)


def test_a_record_of_before_all_were_started(world: World) -> None:
    """The module may have had other links then: its address may be that of another one now."""
    world.answers[HERE] = lambda: None
    world.record("tcp://127.0.0.1:9", attempt=2)
    world.at[20.0] = lambda: world.record(attempt=3)
    connect(world, since=3)
    ((address, _, at_s),) = world.tried
    assert address == HERE
    assert at_s >= 20


def test_a_record_that_comes_late(world: World) -> None:
    """Its address and key are used; the module upstream is answered meanwhile."""
    world.answers[HERE] = lambda: None
    world.at[20.0] = lambda: world.record(public_key=KEY.decode())
    connect(world)
    ((address, key, at_s),) = world.tried
    assert (address, key) == (HERE, KEY)
    assert 20 <= at_s < 21.1
    assert world.greeted > 100


def test_a_record_with_another_key_than_the_one_given_is_not_used(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Any module can write it; a shared file system may also show one of both late."""
    keys = KnownKeys(KeyPair.new(), {"tail": KEY})
    world.answers[HERE] = lambda: None
    world.record(THERE, public_key="x" * 40)
    world.at[20.0] = lambda: world.record(HERE, public_key=KEY.decode())
    connect(world, keys=keys)
    ((address, key, at_s),) = world.tried
    assert (address, key) == (HERE, KEY)
    assert at_s >= 20
    assert caplog.text.count("the endpoint record of tail is not used") == 1
    known = world.neighbours(keys=keys)
    world.lost = True
    world.record(THERE, public_key="x" * 40, attempt=2)
    look(world, known)
    assert not world.moved
    world.record(THERE, public_key=KEY.decode(), attempt=2)
    world.now_s += LOOK_S
    look(world, known)
    assert world.moved == [(THERE, KEY)]


def test_an_address_that_was_given_needs_no_record(world: World) -> None:
    world.answers[THERE] = lambda: None
    world.record(HERE)
    connect(world, address=THERE)
    assert world.tried == [(THERE, None, 0.0)]
    assert not world.reads


def test_a_module_that_moves_before_it_answers(world: World) -> None:
    """Its record is read again after each slice."""
    world.answers[THERE] = lambda: None
    world.record(HERE)
    world.at[7.0] = lambda: world.record(THERE)
    connect(world)
    assert world.tried == [
        (HERE, None, 0.0),
        (HERE, None, 3.0),
        (HERE, None, 6.0),
        (THERE, None, 9.0),
    ]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_module_that_does_not_answer_is_named(world: World, recorded: bool) -> None:
    if recorded:
        world.record()
    with pytest.raises(UnavailableError) as caught:
        connect(world)
    assert world.age_s == pytest.approx(TIMEOUT_S, abs=0.1)
    where = f"at {HERE}" if recorded else f"no endpoint in {str(world.run.endpoint('tail'))!r}"
    for word in ("'tail'", "'stem'", where, f"{TIMEOUT_S:.0f} s"):
        assert word in caught.value.message
    assert "dnictl logs tail" in str(caught.value.hint)


def test_encryption_that_does_not_match_is_an_error_only_in_the_end(world: World) -> None:
    """Keys may appear late, too."""
    world.answers[HERE] = lambda: EncryptionError("another key")
    world.record()
    with pytest.raises(EncryptionError, match="another key"):
        connect(world)
    assert world.age_s >= TIMEOUT_S


def test_a_module_that_is_gone_after_its_encryption_failed(world: World) -> None:
    """The newest failure counts."""
    world.answers[HERE] = lambda: EncryptionError("another key")
    world.record()
    world.at[20.0] = lambda: world.answers.clear()
    with pytest.raises(UnavailableError):
        connect(world)


def test_a_module_that_is_being_restarted_gets_more_time(world: World) -> None:
    """As long as a supervisor says so, and lives."""
    world.record()
    for moment in range(0, 200, 10):
        world.at[float(moment)] = lambda: world.supervisor("restarting")
    world.at[200.0] = lambda: world.answers.__setitem__(HERE, lambda: None)
    connect(world)
    assert 200 <= world.age_s < 210


@pytest.mark.parametrize(
    ("state", "restarts", "end_s"),
    [("restarting", 1, 90), ("starting", 1, 90), ("connecting", 2, 90),
     ("running", 1, 30), ("failed", 1, 30), ("starting", 0, 30)],
)  # fmt: skip
def test_who_is_waited_for_longer(world: World, state: str, restarts: int, end_s: int) -> None:
    """A supervisor that writes nothing for a minute counts as dead."""
    world.record()
    world.supervisor(state, restarts=restarts)
    with pytest.raises(UnavailableError):
        connect(world)
    assert end_s <= world.age_s <= end_s + 6


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, False),
        ({"tail": ("restarting", 1)}, True),
        ({"tail": ("connecting", 0)}, False),
        ({"tail": ("connecting", 0), "side": ("restarting", 1)}, True),
        ({"tail": ("connecting", 0), "side": ("running", 1)}, False),
        ({"tail": ("running", 1), "side": ("restarting", 1)}, False),
        ({"side": ("restarting", 1)}, False),
    ],
)
def test_a_neighbour_may_wait_itself_for_one_that_is_restarted(
    world: World, states: dict[str, tuple[str, int]], expected: bool
) -> None:
    """At the first start of all nobody is restarted: who does not come then never will."""
    modules = {name: {"state": state, "restarts": n} for name, (state, n) in states.items()}
    write_json(world.run.state, {"updated": world.now_s, "modules": modules}, durable=False)
    assert world.neighbours().expected("tail") == expected


def test_a_supervisor_that_writes_nothing_for_a_minute_restarts_nobody(world: World) -> None:
    """Of its clock, which may differ from this host's, only the changes count."""
    known = world.neighbours()
    modules = {"tail": {"state": "restarting", "restarts": 1}}

    def beat(updated: float) -> None:
        write_json(world.run.state, {"updated": updated, "modules": modules}, durable=False)

    beat(1e6)
    assert known.expected("tail")
    world.sleep(59)
    assert known.expected("tail")
    world.sleep(2)
    assert not known.expected("tail")
    beat(7.0)
    assert known.expected("tail")


@pytest.mark.parametrize("restarted", [True, False])
def test_a_module_downstream_that_has_finished(world: World, restarted: bool) -> None:
    """A report of an earlier start does not count when all modules start."""
    world.report("tail", "finished")
    connect(world, restarted=restarted, until_s=5.0)
    assert world.dismissed == restarted
    assert (world.age_s == 0) == restarted


def test_a_worker_that_is_stopped_connects_no_more(world: World) -> None:
    connect(world, until_s=2.0)
    assert world.age_s == pytest.approx(2, abs=0.1)
    assert world.tried == []
    assert not world.dismissed


def test_a_worker_looks_for_its_neighbour_by_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' records cost it nothing, and the longer it waits the more seldom it looks."""
    for number in range(200):
        write_json(world.run.endpoint(f"other{number}"), {"address": HERE}, durable=False)
    listed, original = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": listed.append(path) or original(path))
    connect(world, until_s=29.0)
    assert listed == []
    assert 5 <= world.reads[0] <= 20
    assert all(world.reads[second] <= 2 for second in range(10, 29))
    assert sum(world.reads.values()) < 80


def wait_for_upstream(world: World, *, restarted: bool = False) -> bool:
    link: Any = world
    return world.neighbours(restarted=restarted).wait_for_upstream(link)


def test_a_module_upstream_that_comes(make_world: MakeWorld) -> None:
    world = make_world("tail")
    world.at[12.0] = lambda: setattr(world, "peer", True)
    assert wait_for_upstream(world)
    assert world.age_s == 12


@pytest.mark.parametrize("restarted", [True, False])
def test_who_is_known_may_ask_again_meanwhile(make_world: MakeWorld, restarted: bool) -> None:
    """In a graph all may wait for one that is restarted, and it for one whose answer was lost."""
    world = make_world("tail")
    world.at[12.0] = lambda: setattr(world, "peer", True)
    known, link = world.neighbours(restarted=restarted), cast("Any", world)
    known.callers.append(link)
    assert known.wait_for_upstream(link)
    assert (world.greeted > 10) != restarted


def test_a_module_upstream_that_does_not_come(make_world: MakeWorld) -> None:
    world = make_world("tail")
    world.report("stem", "finished")  # by an earlier start
    with pytest.raises(UnavailableError, match="nobody"):
        wait_for_upstream(world)
    assert world.age_s == TIMEOUT_S


def test_a_module_upstream_that_is_being_restarted(make_world: MakeWorld) -> None:
    world = make_world("tail")
    world.supervisor("restarting", "stem")
    world.at[50.0] = lambda: setattr(world, "peer", True)
    assert wait_for_upstream(world)
    assert world.age_s == 50


def test_a_module_upstream_that_has_finished(make_world: MakeWorld) -> None:
    world = make_world("tail")
    world.at[7.0] = lambda: world.report("stem", "finished")
    assert not wait_for_upstream(world, restarted=True)
    assert world.age_s == 10


def test_all_modules_upstream_are_waited_for(make_world: MakeWorld) -> None:
    """One that has finished leaves the others to be answered."""
    world = make_world("tail")
    world.report("stem", "finished")
    asked: list[float] = []
    other = SimpleNamespace(
        source="side", wait_for_peer=lambda deadline_s, stop: asked.append(deadline_s)
    )
    world.links.append(other)  # type: ignore[arg-type]
    assert not wait_for_upstream(world, restarted=True)
    assert len(asked) == 1


def test_a_link_that_lives_costs_nothing(world: World) -> None:
    known = world.neighbours()
    world.in_flight = 1
    for _ in range(1000):
        world.sleep(0.1)
        world.heard_s = world.now_s - QUIET_S / 2
        look(world, known)
    world.in_flight, world.heard_s = 0, 0.0  # nothing to answer
    world.sleep(LOOK_S)
    look(world, known)
    assert not world.reads


@pytest.mark.parametrize("why", ["lost", "silent"])
def test_a_silent_neighbours_record_is_read_twice_a_second(world: World, why: str) -> None:
    known = world.neighbours()
    world.record()
    world.lost, world.in_flight, world.heard_s = why == "lost", int(why == "silent"), 0.0
    for _ in range(1000):
        look(world, known)
        world.sleep(0.01)
    assert 18 <= sum(world.reads.values()) <= 20
    assert not world.moved


def test_a_given_address_is_kept(world: World) -> None:
    """ZeroMQ itself reconnects to it."""
    known = world.neighbours(address=HERE)
    world.lost, world.connected = True, False
    look(world, known)
    assert not world.moved
    assert not world.reads


@pytest.mark.parametrize(
    ("address", "attempt", "connected", "moves"),
    [
        (HERE, 1, False, False),  # ZeroMQ itself reconnects
        (HERE, 2, False, True),  # restarted; ZeroMQ might wait long before it connects again
        (HERE, 2, True, False),
        (THERE, 2, False, True),
        (THERE, 2, True, True),
    ],
)
def test_a_neighbour_that_was_restarted(
    world: World, address: str, attempt: int, connected: bool, moves: bool
) -> None:
    known, link = world.neighbours(), world
    world.lost, world.connected = True, False
    world.record(attempt=1)
    look(link, known)
    first = list(world.moved)
    world.moved.clear()
    world.connected, world.lost = connected, not connected
    world.in_flight, world.heard_s = 1, world.now_s - 10
    world.record(address, attempt=attempt, public_key=KEY.decode())
    world.sleep(LOOK_S)
    look(link, known)
    assert world.moved == ([(address, KEY)] if moves else [])
    assert first == [(HERE, None)]  # its attempt was not known before


def test_a_lost_neighbour_without_a_record(world: World) -> None:
    world.lost = True
    look(world, world.neighbours())
    assert world.moved == []
    assert not world.dismissed


@pytest.mark.parametrize("restarted", [True, False])
def test_a_lost_neighbour_that_has_finished(world: World, restarted: bool) -> None:
    world.lost = True
    world.report("tail", "finished")
    look(world, world.neighbours(restarted=restarted))
    assert world.dismissed == restarted


@pytest.mark.parametrize(
    ("report", "supervisor", "remains"),
    [
        ("running", None, True),
        ("stopping", None, True),
        ("finished", None, False),
        ("stopped", None, False),
        ("failed", None, False),
        (None, None, False),
        ("failed", "restarting", True),
        (None, "starting", True),
        ("failed", "failed", False),
    ],
)
def test_who_remains(
    world: World, report: str | None, supervisor: str | None, remains: bool
) -> None:
    if report is not None:
        world.report("tail", report)
    if supervisor is not None:
        world.supervisor(supervisor)
    assert world.neighbours().remains("tail") == remains


@pytest.mark.parametrize("clock", [0.0, 1e12])
def test_a_supervisor_whose_clock_differs(world: World, clock: float) -> None:
    """That it goes on writing counts, and not what time it thinks it is."""
    known = world.neighbours()
    assert not known.expected("tail")
    modules = {"tail": {"restarts": 1, "state": "restarting"}}
    for beat in range(30):
        write_json(world.run.state, {"updated": clock + 10 * beat, "modules": modules})
        assert known.expected("tail")
        world.sleep(10)
    world.sleep(51)
    assert not known.expected("tail")


def test_each_link_leads_to_the_address_made_for_it(make_world: MakeWorld, tmp_path: Path) -> None:
    """To a module with several; its public key comes with them, if links are encrypted."""
    world = make_world("tail")
    keys: Any = SimpleNamespace(pair=SimpleNamespace(public=KEY))
    spec = world.spec.model_copy(update={"links": LinksSpec(security="curve")})
    publish(world.run, spec, 1, {"4": THERE, "7": HERE}, keys)
    for number, address in ((4, THERE), (7, HERE)):
        world = make_world("stem")
        world.number = number
        world.answers[address] = lambda: None
        connect(world)
        assert world.tried == [(address, KEY, 0.0)]


def test_a_record_is_withdrawn_by_its_own_attempt_only(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    world = make_world("tail")
    keys: Any = None  # ipc is never encrypted
    path = world.run.endpoint("tail")
    publish(world.run, world.spec, 2, {"1": "ipc:///tmp/tail.sock"}, keys)
    record = peek_json(path)
    assert (record["attempt"], record["pid"], record["public_key"]) == (2, os.getpid(), None)
    withdraw(world.run, world.spec, 1)
    assert path.exists()
    withdraw(world.run, world.spec, 2)
    assert not path.exists()
