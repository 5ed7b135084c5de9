"""Replicas of the head: one stream, whatever is asked for, and whoever is restarted when."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.core.resolve import worker_specs
from dni_runtime.data import describe, open_data
from dni_runtime.documents.requests import Replicas
from dni_runtime.errors import DataError
from dni_runtime.link import Batch, Marker, change_of
from dni_runtime.rundir import RunDir
from dni_runtime.spec import WorkerSpec, parse_chain
from dni_runtime.spec.edge import replica_of
from dni_runtime.spec.members import Members, first_replicas
from dni_runtime.spec.replicas import workers_of
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker import head as head_module
from dni_runtime.worker.head import Head
from dni_runtime.worker.ledger import Counts, Ledger, Progress
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.rounds import Insertion, Rounds
from dni_runtime.worker.stream import Position, Stream
from tests.lines import read_lines

CHAIN = """\
name: net
epochs: 2
checkpoint: {every_steps: 5}
replication: {every: 3}
data: {dataset: digits, flatten: true, batch_size: 128, eval_batch_size: 128}
modules:
- {name: a, replicas: %s, layers: [{Linear: {in_features: 64, out_features: 10}}]}
- {name: b, layers: [{Linear: {in_features: 10, out_features: 10}}]}
"""


ELASTIC = "{start: 1, most: 2}"


def specs(replicas: int | str) -> list[WorkerSpec]:
    chain = parse_chain(CHAIN % replicas)
    workers = workers_of(worker_specs(chain, describe(chain.data, Path())))
    return [one for one in workers if one.head is not None]


class Site:
    """The replicas of a head, without links; what each one has supplied, by id."""

    def __init__(self, run: RunDir, replicas: int | str) -> None:
        self.run, self.specs = run, specs(replicas)
        run.create()
        self.starts = [Start() for _ in self.specs]
        self.found: list[dict[int, Batch | Marker]] = [{} for _ in self.specs]
        self.positions: list[dict[int, Position]] = [{} for _ in self.specs]
        self.heads = [self.started(number) for number in range(len(self.specs))]

    def started(self, number: int, again: tuple[int, Start] | None = None) -> Head:
        spec = self.specs[number]
        members = Members(first_replicas(spec.elastic))
        waits = not members.takes(spec.module, 1)
        counted, start = again or (0, Start(begun=7, members=members, waits=waits))
        self.starts[number] = start
        assert spec.head is not None
        source = open_data(spec.head.data, Path(), seed=spec.seed)
        stream = Stream(source, spec.head, start.position, shared=len(self.specs) > 1)
        metrics = MetricsWriter(self.run, spec, 1)
        path = self.run.ledger(spec.module)
        with closing(Ledger(path, Progress(Counts(id=counted)))) as ledger:
            return Head(stream, start=start, ledger=ledger, metrics=metrics, output=None)

    def over(self, number: int) -> bool:
        ends = Mark.END | Mark.STOP
        return any(
            isinstance(one, Marker) and one.mark & ends for one in self.found[number].values()
        )

    def turn(self, number: int) -> None:
        """Let a replica supply an item, if it can."""
        item = self.heads[number].next()
        if item is not None:
            before = self.found[number].setdefault(item.id, item)
            assert type(before) is type(item), "an id keeps its meaning"
            self.positions[number][item.id] = self.heads[number].position
            if isinstance(item, Marker) and Mark.SCALE in item.mark:
                self.starts[number].members.learn(item.id, *change_of(item.body))

    def killed(self, number: int, draw: random.Random) -> None:
        """Restart a replica from some older state; it may not have counted its newest item."""
        past = self.positions[number]
        ids = [0, *sorted(past)]
        counted = ids[max(len(ids) - 1 - draw.randint(0, 1), 0)]
        id = draw.choice([one for one in ids if one <= counted])
        position = past.get(id, Position())
        start = Start(cut=id, again=True, first_id=id + 1, position=position, begun=7)
        self.heads[number] = self.started(number, (counted, start))


def all_batches(site: Site) -> list[Any]:
    """The training batches of both epochs, as one head would read them."""
    spec = site.specs[0]
    assert spec.head is not None
    source = open_data(spec.head.data, Path(), seed=spec.seed)
    return [batch for epoch in (1, 2) for batch in source.train_batches(epoch)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "LOOK_S", 0.0)


@pytest.mark.parametrize("seed", [0, 3, 5, 10])
def test_all_replicas_supply_one_stream(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    replicas = draw.choice((2, 2, 3))
    site = Site(RunDir(tmp_path), replicas)
    wishes = [Mark.CHECKPOINT, Mark.CHECKPOINT | Mark.ASKED, Mark.CHECKPOINT | Mark.STOP, None]
    for _ in range(5000):
        number = draw.randrange(replicas)
        if all(map(site.over, range(replicas))):
            break
        if draw.random() < 0.02 and not site.over(number):
            wish = draw.choice(wishes if seed % 3 == 0 else wishes[:2])
            site.heads[number].end_early() if wish is None else site.heads[number].want(wish)
        elif draw.random() < 0.03 and not site.over(number):
            site.killed(number, draw)
        elif not site.over(number):
            site.turn(number)
    assert all(map(site.over, range(replicas)))
    first, *others = [
        {id: one.mark for id, one in found.items() if isinstance(one, Marker)}
        for found in site.found
    ]
    assert all(one == first for one in others), "the same markers at the same ids"
    batches = [
        {id: one for id, one in found.items() if isinstance(one, Batch)} for found in site.found
    ]
    for number, own in enumerate(batches, start=1):
        assert all(replica_of(id, replicas) == number for id in own), "each its own"
    every = {id: one for own in batches for id, one in own.items()}
    assert sum(map(len, batches)) == len(every)
    assert sorted([*every, *first]) == list(range(1, max(first) + 1)), "nothing is left out"
    trained = [every[id] for id in sorted(every) if every[id].mode is Mode.TRAIN]
    whole = all_batches(site)
    if seed % 3:
        assert len(trained) == len(whole)
    for ours, (x, y_BY) in zip(trained, whole, strict=False):
        assert torch.equal(ours.xs[0], torch.as_tensor(x))  # type: ignore[arg-type]
        assert torch.equal(ours.y, y_BY)


def test_nobody_passes_its_id_before_all_have_said_theirs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    one, two = (Rounds(run, spec, 3, [10, 2, None]) for spec in specs(2))
    one.join(Insertion(5, Mark.CHECKPOINT))
    assert (one.holds(4), one.holds(5), one.holds(6)) == (False, True, True)
    assert not two.holds(6)
    two.look()
    assert two.called
    two.join(Insertion(9, Mark.CHECKPOINT | Mark.STOP, body={"before": {}}))
    agreed = Insertion(9, Mark.CHECKPOINT | Mark.STOP)
    assert two.agreed == agreed, "what stops changes nothing else"
    assert one.agreed is None
    one.look()
    assert one.agreed == agreed
    assert not one.holds(9)
    later = Rounds(run, specs(2)[0], 4, [10, 2, None])
    assert (later.joined, later.called) == (None, False), "lines of an earlier start do not count"


def joins(site: Site, after: int = 4) -> int:
    """Let the second replica of the head join, after some items; return the marker's id."""
    for _ in range(after):
        site.turn(0)
    Replicas(active={"a": (1, 2)}).write(site.run.replicas)
    while not site.found[1]:
        site.turn(0)
        site.turn(1)
    (id,) = site.found[1]
    site.starts[1].waits = False
    site.heads[1].begin(id, site.positions[0][id])
    return id


def test_a_replica_of_the_head_joins_and_leaves(tmp_path: Path) -> None:
    site = Site(RunDir(tmp_path), ELASTIC)
    joined = joins(site)
    for _ in range(3):
        site.turn(0)
        site.turn(1)
    Replicas(active={"a": (1,)}).write(site.run.replicas)
    there = [0, 1]
    while there:
        for number in there:
            site.turn(number)
        if 1 in there and not site.starts[1].members.has("a.2"):
            there.remove(1)
        there = [one for one in there if not site.over(one)]
    one, two = site.found
    left = max(two)
    changes = {id for id, it in one.items() if isinstance(it, Marker) and Mark.SCALE in it.mark}
    assert changes == {joined, left}, "who leaves or joins gets the marker, too"
    *_, last = read_lines(site.run.marks("a.1"))
    assert (last["mark"], last["heads"]) == (int(Mark.END), [1]), "nobody joins from there on"
    batches = {id: it for own in (one, two) for id, it in own.items() if isinstance(it, Batch)}
    assert {id for id in two if id in batches} == {
        id for id in batches if joined < id < left and replica_of(id, 2) == 2
    }
    assert sorted({*one, *two}) == [*range(1, max(one) + 1)], "nothing is left out"
    trained = [batches[id] for id in sorted(batches) if batches[id].mode is Mode.TRAIN]
    whole = all_batches(site)
    assert len(trained) == len(whole)
    for ours, (x, _) in zip(trained, whole, strict=True):
        assert torch.equal(ours.xs[0], torch.as_tensor(x))  # type: ignore[arg-type]


def test_a_replica_that_dies_as_it_joins_sends_the_marker_again(tmp_path: Path) -> None:
    site = Site(RunDir(tmp_path), ELASTIC)
    joined = joins(site)
    first = site.found[1].pop(joined)
    members = Members({"a": (1,)})
    members.learn(joined, {"a": (1,)}, {"a": (1, 2)})
    position = site.positions[0][joined]
    start = Start(joined, again=True, first_id=joined, position=position, members=members, begun=7)
    site.heads[1] = site.started(1, (joined - 1, start))
    site.turn(1)
    assert site.found[1] == {joined: first}
    assert isinstance(first, Marker)
    assert change_of(first.body) == ({"a": (1,)}, {"a": (1, 2)})


def test_what_an_earlier_attempt_may_have_used_is_known_by_the_agreed_changes(
    tmp_path: Path,
) -> None:
    """Also if it has died before it has noted the change."""
    site = Site(RunDir(tmp_path), ELASTIC)
    wanted = next(id for id in range(4, 20) if [replica_of(id + n, 2) for n in (1, 2)] == [2, 1])
    joined = joins(site, after=wanted - 1)
    assert joined == wanted
    before = Members({"a": (1,)})
    start = Start(1, again=True, first_id=2, position=site.positions[0][1], members=before, begun=7)
    site.heads[0] = site.started(0, (joined, start))
    site.heads[0].want(Mark.CHECKPOINT | Mark.ASKED)
    asked = list[int]()
    while not asked:
        site.turn(0)
        site.heads[1].look()
        marks = {id: it.mark for id, it in site.found[0].items() if isinstance(it, Marker)}
        asked = [id for id, mark in marks.items() if Mark.ASKED in mark]
    assert asked > [joined + 2], "after its own next batch"


def test_nothing_joins_after_the_end(tmp_path: Path) -> None:
    """Where one replica has closed the stream, a change that another one wants is void."""
    run = RunDir(tmp_path)
    run.create()
    one, two, three = (Rounds(run, spec, 3, [1]) for spec in specs("{start: 2, most: 3}"))
    one.join(Insertion(9, Mark.END, heads=(1, 2)))
    two.look()
    assert not two.called, "it may go on until its own end"
    two.join(Insertion(5, body={"before": {"a": [1, 2]}, "after": {"a": [1, 2, 3]}}, heads=(1, 2)))
    three.look()
    assert three.agreed == Insertion(9, Mark.END)
    assert list(three.results) == [Insertion(9, Mark.END)]


def test_streams_of_different_lengths_are_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    one, two = specs(2)
    Rounds(run, one, 1, [10, 2, None])
    with pytest.raises(DataError, match=r"'a.2' has \[9, 2, None\] samples .* 'a.1' has \[10,"):
        Rounds(run, two, 1, [9, 2, None])


def test_a_full_disk_holds_replicas_until_there_is_room(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    one, two = (Rounds(run, spec, 1, [1]) for spec in specs(2))
    path = run.marks("a.1")
    kept = path.read_bytes()
    path.unlink()
    path.mkdir()
    one.join(Insertion(4, Mark.CHECKPOINT))
    assert (one.holds(4), one.written) == (True, False)
    path.rmdir()
    path.write_bytes(kept + b'{"begun": 1, "rou')  # cut short
    for _ in range(3):
        one.look()
    assert one.written
    two.look()
    two.join(Insertion(2))
    assert two.agreed == Insertion(4, Mark.CHECKPOINT)
