"""Replicas of the head: one stream, whatever is asked for, and whoever is restarted when."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.data import describe, open_data
from dni_runtime.errors import DataError
from dni_runtime.link import Batch, Marker
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec, parse_chain
from dni_runtime.spec.edge import replica_of
from dni_runtime.spec.replicas import with_replicas, workers_of
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker import head as head_module
from dni_runtime.worker.head import Head, Rounds
from dni_runtime.worker.ledger import Counts, Ledger, ModuleProgress
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.stream import Position, Stream

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


def specs(replicas: int | str) -> list[WorkerSpec]:
    chain = parse_chain(CHAIN % replicas)
    workers = workers_of(worker_specs(chain, describe(chain.data, Path())))
    heads = [one for one in workers if one.head is not None]
    return [with_replicas(one, one.elastic) for one in heads[: heads[0].elastic["a"]]]


class Site:
    """The replicas of a head, without links; what each one has supplied, by id."""

    def __init__(self, run: RunDir, replicas: int | str) -> None:
        self.run, self.specs = run, specs(replicas)
        run.create()
        self.found: list[dict[int, Batch | Marker]] = [{} for _ in self.specs]
        self.positions: list[dict[int, Position]] = [{} for _ in self.specs]
        self.heads = [self.started(number) for number in range(len(self.specs))]

    def started(self, number: int, again: tuple[int, Start] | None = None) -> Head:
        spec = self.specs[number]
        counted, start = again or (0, Start(begun=7))
        assert spec.head is not None
        source = open_data(spec.head.data, Path(), seed=spec.seed)
        stream = Stream(source, spec.head, start.position, shared=len(self.specs) > 1)
        metrics = MetricsWriter(self.run, spec, 1)
        path = self.run.ledger(spec.module)
        with closing(Ledger(path, ModuleProgress(Counts(id=counted)))) as ledger:
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

    def killed(self, number: int, draw: random.Random) -> None:
        """Restart a replica from some older state; it may not have counted its newest item."""
        past = self.positions[number]
        ids = [0, *sorted(past)]
        counted = ids[max(len(ids) - 1 - draw.randint(0, 1), 0)]
        id = draw.choice([one for one in ids if one <= counted])
        position = past.get(id, Position())
        start = Start(cut=id, restarted=True, first_id=id + 1, position=position, begun=7)
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
    """Whether or not there may be more of them in another start."""
    draw = random.Random(seed)
    replicas = draw.choice((2, 2, 3))
    site = Site(RunDir(tmp_path), f"{{start: {replicas}, most: 4}}" if seed % 2 else replicas)
    assert len(site.heads) == replicas
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


def result(rounds: Rounds) -> tuple[int, Mark] | None:
    return None if rounds.agreed is None else (rounds.agreed.id, Mark(rounds.agreed.mark))


def test_nobody_passes_its_id_before_all_have_said_theirs(run: RunDir) -> None:
    one, two = (Rounds(run, spec, 3, [10, 2, None]) for spec in specs(2))
    one.join(5, Mark.CHECKPOINT)
    assert (one.holds(4), one.holds(5), one.holds(6)) == (False, True, True)
    assert not two.holds(6)
    two.look()
    assert two.called
    two.join(9, Mark.CHECKPOINT | Mark.STOP)
    agreed = 9, Mark.CHECKPOINT | Mark.STOP
    assert result(two) == agreed
    assert one.agreed is None
    one.look()
    assert result(one) == agreed
    assert not one.holds(9)
    later = Rounds(run, specs(2)[0], 4, [10, 2, None])
    assert (later.joined, later.called) == (None, False), "lines of an earlier start do not count"


def test_the_only_head_of_this_start_needs_nobody(tmp_path: Path) -> None:
    site = Site(RunDir(tmp_path), "{start: 1, most: 2}")
    assert [one.module for one in site.specs] == ["a.1"]
    site.turn(0)
    site.heads[0].want(Mark.CHECKPOINT | Mark.STOP)
    site.turn(0)
    first, second = site.found[0].values()
    assert isinstance(first, Batch)
    assert isinstance(second, Marker)
    assert (first.id, second.id) == (1, 2), "all batches are its own"
    assert Mark.STOP in second.mark


def test_who_ends_the_stream_lets_the_others_go_on_until_their_own_end(run: RunDir) -> None:
    one, two = (Rounds(run, spec, 3, [1]) for spec in specs(2))
    one.join(9, Mark.END)
    two.look()
    assert not two.called
    two.join(5, Mark.CHECKPOINT)
    assert result(two) == (9, Mark.END | Mark.CHECKPOINT)


def test_streams_of_different_lengths_are_an_error(run: RunDir) -> None:
    one, two = specs(2)
    Rounds(run, one, 1, [10, 2, None])
    with pytest.raises(DataError, match=r"'a.2' has \[9, 2, None\] samples .* 'a.1' has \[10,"):
        Rounds(run, two, 1, [9, 2, None])


def test_a_full_disk_holds_replicas_until_there_is_room(run: RunDir) -> None:
    one, two = (Rounds(run, spec, 1, [1]) for spec in specs(2))
    path = run.marks("a.1")
    kept = path.read_bytes()
    path.unlink()
    path.mkdir()
    one.join(4, Mark.CHECKPOINT)
    assert (one.holds(4), one.written) == (True, False)
    path.rmdir()
    path.write_bytes(kept + b'{"begun": 1, "rou')  # cut short
    for _ in range(3):
        one.look()
    assert one.written
    two.look()
    two.join(2)
    assert result(two) == (4, Mark.CHECKPOINT)
