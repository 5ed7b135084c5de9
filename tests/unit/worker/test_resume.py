"""Where a worker begins: at a cut of the chain, or at its own newest state."""

from __future__ import annotations

import pytest
import torch

from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DamagedError
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import DataInfo, WorkerSpec
from dni_runtime.worker import checkpoint, resume
from dni_runtime.worker.ledger import Counts, Ledger, ModuleProgress
from dni_runtime.worker.resume import Start, begin, forget_later, progress_document
from dni_runtime.worker.stream import Position
from tests.specs import float32, int64, linear, specs_of

CHAIN = """\
name: x
restart: {policy: %s}
defaults: {schedule: {StepLR: {step_size: 1}}, schedule_every: batch}
""" + linear(4, 4, 3, 3)


def workers(policy: str = "on-failure") -> tuple[WorkerSpec, ...]:
    info = DataInfo(sample=float32(4), label=int64(), classes=3)
    return specs_of(CHAIN % policy, info)


def write(run: RunDir, spec: WorkerSpec, *, cut: int = 0, snapshot: int = 0, step: int = 0) -> None:
    """A checkpoint, or a snapshot; its first weight tells which."""
    made = ModuleStep(spec)
    with torch.no_grad():
        next(made.layers.parameters()).fill_(cut or snapshot)
    progress = ModuleProgress(Counts(id=cut or snapshot, step=step), epoch=2)
    position = Position(epoch=2, batch=step) if spec.head else None
    oldest = (cut or snapshot, Position(epoch=2, batch=step - 1)) if spec.head else None
    tensors, own = checkpoint.copy_state(made)
    own |= progress_document(progress, over=False, position=position, oldest=oldest)
    writer = checkpoint.CheckpointWriter(run, spec.module, ["a", "b", "c"], 2, pytest.fail)
    (writer.write if cut else writer.write_snapshot)(cut or snapshot, tensors, own)
    writer.close()


def start(
    run: RunDir, spec: WorkerSpec, wanted: str, *, attempt: int = 1, first: int | None = None
) -> tuple[Start, Counts, float]:
    step = ModuleStep(spec)
    chain = ["a", "b", "c"]
    found, ledger = begin(wanted, spec, run, step, chain, attempt=attempt, first=first)
    ledger.close()
    return (
        found,
        ledger.progress.counts,
        float(next(step.layers.parameters()).detach().flatten()[0]),
    )


def test_its_own_newest_state(run: RunDir) -> None:
    spec = workers()[1]
    write(run, spec, cut=10, step=8)
    write(run, spec, snapshot=17, step=15)
    found, counts, weight = start(run, spec, "own")
    assert (found.cut, found.restarted, weight, counts.step) == (17, True, 17.0, 15)
    write(run, spec, cut=20, step=18)
    assert start(run, spec, "own")[2] == 20.0
    assert run.checkpoint(10, "b").with_suffix(".json").exists()  # others may need their part


def test_one_that_is_restarted_goes_on_where_it_was_if_it_has_begun(run: RunDir) -> None:
    """It knows by itself: whoever starts it may not have heard of it."""
    spec = workers()[1]
    write(run, spec, cut=10, step=8)
    write(run, spec, cut=20, step=18)
    found, counts, weight = start(run, spec, "10", attempt=4, first=4)  # with the whole chain
    assert (found.restarted, weight, counts.attempt) == (False, 10.0, 4)
    assert not run.checkpoint(20, "b").with_suffix(".json").exists()
    write(run, spec, snapshot=17, step=15)
    found, counts, weight = start(run, spec, "10", attempt=5, first=4)
    assert (found.restarted, weight, counts.attempt) == (True, 17.0, 5)
    assert start(run, spec, "10", attempt=6, first=4)[0].restarted
    assert start(run, spec, "10", attempt=6, first=4)[0].restarted  # a supervisor has lost count
    found, counts, weight = start(run, spec, "10", attempt=7, first=7)  # again the whole chain
    assert (found.restarted, weight, counts.step) == (False, 10.0, 8)


def test_a_head_that_is_restarted_does_not_go_back_beyond_where_the_chain_has_begun(
    run: RunDir,
) -> None:
    """Before that ids had another meaning: an evaluation that was under way begins anew."""
    spec = workers()[0]
    write(run, spec, cut=10, step=8)
    start(run, spec, "10", attempt=4, first=4)
    found, *_ = start(run, spec, "10", attempt=5, first=4)
    assert (found.restarted, found.first_id, found.position.batch) == (True, 11, 8)
    found, *_ = start(run, spec, "own")
    assert (found.restarted, found.first_id, found.position.batch) == (True, 10, 7)


def test_one_that_died_before_it_had_begun_begins_with_the_others(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_LAG_S", 0.1)
    spec = workers()[1]
    write(run, spec, cut=10, step=8)
    write(run, spec, cut=20, step=18)
    Ledger(run.ledger("b"), ModuleProgress(Counts(id=25)), attempt=3).close()  # of the start before
    found, _, weight = start(run, spec, "10", attempt=5, first=4)
    assert (found.restarted, weight) == (False, 10.0)


@pytest.mark.parametrize("wanted", ["auto", "10"])
def test_all_modules_begin_at_a_complete_cut(run: RunDir, wanted: str) -> None:
    for spec in workers():
        write(run, spec, cut=10, step=8)
    write(run, workers()[1], cut=20, step=18)
    write(run, workers()[1], snapshot=25, step=22)
    found, counts, weight = start(run, workers()[1], wanted)
    assert (found.cut, found.restarted, weight, counts.step) == (10, False, 10.0, 8)
    if wanted == "auto":  # nothing goes before the neighbours have agreed
        assert run.snapshot("b").exists()
        assert run.checkpoint(20, "b").with_suffix(".json").exists()
        forget_later(run, workers()[1], found)
    # what an earlier attempt wrote later would mix with what comes now
    assert not run.snapshot("b").exists()
    assert not run.checkpoint(20, "b").with_suffix(".json").exists()


def test_damaged_states_are_passed_over(run: RunDir) -> None:
    spec = workers()[1]
    write(run, spec, cut=10, step=8)
    write(run, spec, cut=20, step=18)
    write(run, spec, snapshot=25, step=22)
    for path in (run.snapshot("b"), run.checkpoint(20, "b").with_suffix(".safetensors")):
        path.write_bytes(path.read_bytes()[:-20])
    assert start(run, spec, "own")[2] == 10.0
    run.snapshot("b").write_bytes(b"")
    assert start(run, spec, "own")[2] == 10.0


def test_a_flipped_bit_in_a_snapshot_is_found(run: RunDir) -> None:
    spec = workers()[1]
    write(run, spec, cut=10, step=8)
    write(run, spec, snapshot=25, step=22)
    data = bytearray(run.snapshot("b").read_bytes())
    data[-1] ^= 1
    run.snapshot("b").write_bytes(data)
    assert start(run, spec, "own")[2] == 10.0


def test_one_that_has_only_damaged_states_does_not_begin_anew(run: RunDir) -> None:
    spec = workers()[1]
    write(run, spec, snapshot=25, step=22)
    path = run.snapshot("b")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedError, match="snapshot of module 'b'"):
        start(run, spec, "own")


def test_the_head_goes_back_to_what_it_may_have_to_send_again(run: RunDir) -> None:
    spec = workers()[0]
    assert spec.retain == spec.links.window
    assert workers("never")[0].retain == 0
    write(run, spec, snapshot=17, step=15)
    run.marks("a").touch()
    found, _, _ = start(run, spec, "own")
    assert (found.cut, found.first_id, found.position.batch) == (17, 17, 14)
    assert run.marks("a").exists()
    found, _, _ = start(run, spec, "none")
    assert (found.first_id, found.position) == (1, Position())
    assert not run.marks("a").exists()


def test_a_schedule_of_batches_catches_up(run: RunDir) -> None:
    spec = workers()[1]
    write(run, spec, snapshot=17, step=15)
    Ledger(run.ledger("b"), ModuleProgress(Counts(id=21, step=18))).close()
    step = ModuleStep(spec)
    (schedule,) = step.optimization.schedules
    _, ledger = begin("own", spec, run, step, ["a", "b", "c"])
    ledger.close()
    assert schedule.last_epoch == 3
    assert ledger.progress.counts.step == 18
