"""Where replicas begin if there are more or fewer of them than at the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import CheckpointError
from dni_runtime.run.cuts import document_file
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import DataInfo, WorkerSpec
from dni_runtime.spec.replicas import with_replicas, workers_of
from dni_runtime.worker import checkpoint, resume
from dni_runtime.worker.ledger import Counts, Ledger, ModuleProgress
from dni_runtime.worker.options import load_spec
from dni_runtime.worker.resume import Start, begin, progress_document
from dni_runtime.worker.start import WorkerStart
from dni_runtime.worker.stream import Position
from tests.specs import float32, int64, specs_of

CHAIN = """\
name: x
defaults: {interface: mixed, accumulate: 4, schedule: {StepLR: {step_size: 1}}}
modules:
- {name: a, replicas: {start: 1, most: 2}, layers: [{Linear: {in_features: 4, out_features: 4}}]}
- {name: b, replicas: {start: 2, most: 3}, schedule_every: batch,
   layers: [{Linear: {in_features: 4, out_features: 3}}]}
- {name: c, layers: [{Linear: {in_features: 3, out_features: 3}}]}
"""
INFO = DataInfo(sample=float32(4), label=int64(), classes=3)
ALL = ["a.1", "a.2", "b.1", "b.2", "b.3", "c"]


def replicas(module: str, count: int) -> list[WorkerSpec]:
    """Return the specs of a module's replicas in a start with so many of them."""
    workers = workers_of(specs_of(CHAIN, INFO))
    assert [one.module for one in workers] == ALL
    own = [one for one in workers if one.module.startswith(module)]
    return [with_replicas(one, {module: count}) for one in own[:count]]


@dataclass
class Begun:
    """A replica that has begun."""

    start: Start
    counts: Counts
    step: ModuleStep

    @property
    def weight(self) -> float:
        return float(next(self.step.layers.parameters()).detach().flatten()[0])


def failed(error: CheckpointError) -> None:
    pytest.fail(str(error))


def write(
    run: RunDir, spec: WorkerSpec, cut: int, counts: Counts, *, weight: float | None = None
) -> None:
    """A replica's part of a cut: weights tell at which, and an update has been begun."""
    made = ModuleStep(spec)
    first = next(made.layers.parameters())
    with torch.no_grad():
        first.fill_(cut if weight is None else weight)
    first.grad = torch.ones_like(first)
    made.optimization.gathered, made.batches = 1, 40
    if made.shared is not None:
        made.shared.samples = 7
    position = Position(epoch=2, batch=9, step=11, eval_batch=2) if spec.head else None
    oldest = (cut - 1, Position(epoch=2, batch=8, step=10)) if spec.head else None
    tensors, own = checkpoint.copy_state(made)
    tensors["random.device"] = torch.zeros(16, dtype=torch.uint8)  # as if it ran on a GPU
    progress = ModuleProgress(counts, id=cut, epoch=2, epochs_ended=1)
    own |= progress_document(progress, over=False, position=position, oldest=oldest)
    writer = checkpoint.CheckpointWriter(run, spec.module, ALL, 2, failed)
    writer.write(cut, tensors, own)
    writer.close()


def write_all(run: RunDir, module: str, count: int, cut: int = 10) -> list[Counts]:
    """The parts of all replicas of a module; return what each one has counted."""
    counted = [
        Counts(id=cut, step=5 + n, samples=40 + n, epoch=2, epoch_batches=2 + n)
        for n in range(count)
    ]
    for spec, counts in zip(replicas(module, count), counted, strict=True):
        write(run, spec, cut, counts)
    return counted


def started(
    run: RunDir, spec: WorkerSpec, wanted: str = "10", *, attempt: int = 4, trains: int = 0
) -> Begun:
    """Begin, as in the attempt 4 all have; then train on some batches, and be killed."""
    step = ModuleStep(spec)
    start, ledger = begin(wanted, spec, run, step, ALL, attempt=attempt, first=4)
    for id in range(start.cut + 1, start.cut + 1 + trains):
        ledger.trained(id, 2, 8)
    ledger.close()
    return Begun(start, ledger.progress.counts, step)


def totals(counted: list[Counts]) -> tuple[int, int, int]:
    return (
        sum(one.step for one in counted),
        sum(one.samples for one in counted),
        sum(one.epoch_batches for one in counted),
    )


@pytest.mark.parametrize("wanted", ["10", "auto"])
def test_a_new_replica_takes_the_first_ones_weights_but_not_its_counts(
    run: RunDir, wanted: str
) -> None:
    before = write_all(run, "b", 2)
    for module in ("a", "c"):
        write_all(run, module, 1)
    if wanted == "10":  # left from an earlier start, in which there was a third one
        write(run, replicas("b", 3)[2], 10, Counts(id=10, step=99, epoch=2), weight=-1.0)
    first, second, new = (started(run, spec, wanted) for spec in replicas("b", 3))
    assert [one.weight for one in (first, second, new)] == [10.0] * 3
    assert new.counts == Counts(id=10, epoch=2, attempt=4)
    assert totals([one.counts for one in (first, second, new)]) == totals(before)
    assert [(one.step, one.samples) for one in (first.counts, second.counts)] == [(5, 40), (6, 41)]
    assert (new.start.cut, new.start.restarted, new.start.begun) == (10, False, 4)
    assert new.step.batches == first.step.batches == 40, "its schedules go on with the others'"
    assert new.step.optimization.schedules[0].state_dict() == (
        first.step.optimization.schedules[0].state_dict()
    )


def test_a_new_replica_has_learnt_nothing_yet(run: RunDir) -> None:
    """What the first one has gathered, or drawn, stays with it."""
    write_all(run, "b", 2)
    first, _, new = replicas("b", 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    made = started(run, new).step
    assert torch.equal(torch.get_rng_state(), before), "random numbers are its own"
    assert made.shared is not None
    assert made.shared.samples == 0
    assert made.optimization.gathered == 0
    assert all(p.grad is None for p in made.layers.parameters())
    made = started(run, first).step
    assert not torch.equal(torch.get_rng_state(), before)
    assert made.shared is not None
    assert (made.shared.samples, made.optimization.gathered) == (7, 1)
    assert next(made.layers.parameters()).grad is not None


def test_random_numbers_of_a_gpu_are_its_own(run: RunDir) -> None:
    write_all(run, "b", 2)
    first, _, new = replicas("b", 3)
    of_first, of_new = (resume._at_cut("10", run, one, ALL) for one in (first, new))
    assert of_first is not None
    assert of_new is not None
    assert "random.device" in of_first[0]
    assert "random.device" not in of_new[0]


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_replica_goes_on_with_the_counts_of_those_left_out(
    run: RunDir, count: int
) -> None:
    before = write_all(run, "b", 3)
    found = [started(run, spec) for spec in replicas("b", count)]
    assert totals([one.counts for one in found]) == totals(before)
    assert all(one.counts.step == was.step for one, was in zip(found[1:], before[1:], strict=False))
    assert [one.weight for one in found] == [10.0] * count
    optimization = found[0].step.optimization
    assert optimization.gathered == 1 + 3 - count, "also with what they have gathered"
    gathered = next(found[0].step.layers.parameters()).grad
    assert gathered is not None
    assert torch.equal(gathered, torch.full_like(gathered, 1 + 3 - count))
    write(run, replicas("b", count)[0], 20, found[0].counts)
    assert started(run, replicas("b", count)[0], "20").counts.step == found[0].counts.step


@pytest.mark.parametrize(
    ("first", "other", "wanted"),
    [((2, 3), (2, 4), (2, 7)), ((2, 3), (1, 9), (2, 3)), ((1, 9), (2, 4), (2, 4))],
)
def test_batches_of_the_newest_epoch_are_those_of_all(
    run: RunDir, first: tuple[int, int], other: tuple[int, int], wanted: tuple[int, int]
) -> None:
    """Replicas begin an epoch with the first batch of it that each one gets."""
    for spec, (epoch, batches) in zip(replicas("b", 2), (first, other), strict=True):
        write(run, spec, 10, Counts(id=10, epoch=epoch, epoch_batches=batches))
    counts = started(run, replicas("b", 1)[0]).counts
    assert (counts.epoch, counts.epoch_batches) == wanted


def test_replicas_that_are_left_out_and_come_again(run: RunDir) -> None:
    """From three to one and back: the sum stays, and nobody's batches count twice."""
    before = write_all(run, "b", 3)
    alone = started(run, replicas("b", 1)[0], trains=2)
    write(run, replicas("b", 1)[0], 12, alone.counts)
    assert document_file(run.checkpoint(10, "b.3")).exists()
    found = [started(run, spec, "12", attempt=4) for spec in replicas("b", 3)]
    step, samples, batches = totals(before)
    assert totals([one.counts for one in found]) == (step + 2, samples + 16, batches + 2)
    assert [one.weight for one in found] == [12.0] * 3


@pytest.mark.parametrize("earlier", [None, 5, 10])
def test_a_new_replica_that_died_before_its_first_checkpoint_begins_where_all_did(
    run: RunDir, earlier: int | None
) -> None:
    """With what it has counted since; parts of a start before that are not its state any more."""
    write_all(run, "b", 2)
    spec = replicas("b", 3)[2]
    if earlier is not None:
        write(run, spec, earlier, Counts(id=earlier, step=99, epoch=1), weight=-1.0)
    if earlier == 10:  # in a start with as many replicas it would be the one to begin with
        assert started(run, spec).counts.step == 0
    started(run, spec, trains=3)
    again = started(run, spec, attempt=5)
    assert (again.start.restarted, again.start.cut, again.start.begun) == (True, 10, 4)
    assert again.weight == 10.0
    assert (again.counts.id, again.counts.step, again.counts.samples) == (13, 3, 24)
    assert again.counts.epoch_batches == 3
    assert again.step.shared is not None
    assert again.step.shared.samples == 0
    (schedule,) = again.step.optimization.schedules
    assert schedule.last_epoch == 3, "it catches up"


def test_who_has_taken_the_counts_of_others_has_them_once(run: RunDir) -> None:
    """Also if it dies before its first checkpoint."""
    before = write_all(run, "b", 3)
    spec, other = replicas("b", 2)
    first = started(run, spec, trains=2)
    again = started(run, spec, attempt=5)
    assert (again.start.restarted, again.start.cut, again.counts.step) == (
        True,
        10,
        first.counts.step,
    )
    second = started(run, other)
    step, samples, _ = totals(before)
    assert totals([again.counts, second.counts])[:2] == (step + 2, samples + 16)
    write(run, spec, 12, again.counts)
    assert started(run, spec, attempt=6).counts == Counts(**{**vars(again.counts), "attempt": 6})


def test_a_new_replica_of_the_head_begins_at_the_firsts_position(run: RunDir) -> None:
    """An evaluation that the cut lies within begins anew, and nothing before it is sent again."""
    write_all(run, "a", 1)
    first, new = replicas("a", 2)
    for spec in (first, new):
        begun = started(run, spec, trains=1).start
        assert (begun.restarted, begun.first_id) == (False, 11)
        assert begun.position == Position(epoch=2, batch=9, step=11, eval_batch=0)
        again = started(run, spec, attempt=5).start
        assert (again.restarted, again.first_id, again.position) == (True, 11, begun.position)


def test_one_that_has_a_state_of_its_own_again_goes_on_with_that(run: RunDir) -> None:
    write_all(run, "b", 2)
    spec = replicas("b", 3)[2]
    begun = started(run, spec, trains=3)
    made: dict[str, Any] = {"id": 12, "step": 2, "samples": 16, "epoch": 2, "epoch_batches": 2}
    write(run, spec, 12, Counts(**made))
    again = started(run, spec, attempt=5)
    assert (again.start.cut, again.weight) == (12, 12.0)
    assert again.counts.step == begun.counts.step


def test_a_ledger_of_an_earlier_start_says_nothing_of_this_one(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that comes again, and dies before it has begun, begins with the others."""
    monkeypatch.setattr(resume, "_LAG_S", 0.1)
    write_all(run, "b", 2)
    spec = replicas("b", 3)[2]
    Ledger(run.ledger("b.3"), ModuleProgress(Counts(id=25, step=20)), attempt=3).close()
    found = started(run, spec, attempt=5)
    assert (found.start.restarted, found.counts.step, found.weight) == (False, 0, 10.0)


@pytest.mark.parametrize(("given", "count"), [({}, 2), ({"a": 1, "b": 3}, 3)])
def test_a_worker_is_told_how_many_replicas_there_are(
    run: RunDir, given: dict[str, int], count: int
) -> None:
    """By default, as many as the chain begins with; its record has all that there may be."""
    workers = workers_of(specs_of(CHAIN, INFO))
    run.spec("b.1").write_text(workers[2].to_json())
    found = load_spec(WorkerStart(str(run.root), "b.1", replicas=given))
    assert (workers[2].replicas, found.replicas) == (3, count)
    assert found == replicas("b", count)[0].model_copy(update={"sources": found.sources})
    assert [link.source for link in found.links_in] == ["a.1"]
    assert [link.route for link in found.links_in] == [((count, 1),)]
