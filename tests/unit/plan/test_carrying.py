"""What a run is not carried over to, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import CheckpointError, DamagedError, UsageError
from dni_runtime.files import write_json
from dni_runtime.plan.carrying import carry_over, extend, going_on
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import CheckedChain, prepare, prepare_with
from dni_runtime.run.cuts import is_over, tensors_file, verify
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.worker.checkpoint import copy_state, read, write_part
from dni_runtime.worker.stream import Phase, Position

CHAIN = """\
name: x
data: {dataset: digits, flatten: true, batch_size: %d}
modules:
  - name: a
    layers: [{Linear: {in_features: 64, out_features: 8}}, ReLU%s]
  - name: b
    layers: [%s{Linear: {in_features: %d, out_features: 10}}]
"""
MIDDLE = "{Linear: {in_features: 8, out_features: 9}}"


def chain(
    folder: Path, size: int = 32, end: str = "", begin: str = "", width: int = 8
) -> CheckedChain:
    path = folder / "chain.yaml"
    path.write_text(CHAIN % (size, end, begin, width))
    return prepare(path)


@pytest.fixture
def stopped(tmp_path: Path) -> Record:
    """A run with a checkpoint of five batches."""
    prepared = chain(tmp_path, end=f", {MIDDLE}", width=9)
    run = create_run(tmp_path / "old", prepared, backend="process")
    write(run.root, prepared, over=False)
    return Record.read(run.root)


def carried(prepared: CheckedChain, record: Record) -> CheckedChain:
    return carry_over(prepared, record, RunState.read(record.run))


def write(root: Path, prepared: CheckedChain, *, over: bool, step: int = 5) -> None:
    for number, worker in enumerate(prepared.workers):
        tensors, document = copy_state(ModuleStep(worker))
        stream = {"cut": 5, "epoch": 1, "epochs_ended": 0, "step": 5, "samples": 160, "over": over}
        stream |= {"counted": {"epoch": 1, "batches": 5}}
        at = Position(epoch=1, batch=step, step=step, phase="end" if over else "train")
        position = {} if number else {"position": at.to_dict()}
        write_part(Record.read(root).run, worker.module, (tensors, document | stream | position))


def test_a_run_begins_with_the_checkpoint(stopped: Record, tmp_path: Path) -> None:
    prepared = carried(chain(tmp_path, begin=f"{MIDDLE}, ", width=9), stopped)
    run = create_run(tmp_path / "new", prepared, backend="process")
    tensors, document = read(run.checkpoint(5, "b"))
    theirs, _ = read(stopped.run.checkpoint(5, "a"))
    assert tensors["layers.0.weight"].equal(theirs["layers.2.weight"])
    assert document["cut"] == 5


def test_other_layers_are_refused(stopped: Record, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run 'old': '2.weight' has shape \[10, 8\] instead of"):
        carried(chain(tmp_path), stopped)
    longer = f"{MIDDLE}, {{Linear: {{in_features: 9, out_features: 9}}}}, "
    prepared = chain(tmp_path, begin=longer, width=9)
    with pytest.raises(UsageError, match=r"'3.weight' has shape \[9, 9\] instead of \[10, 9\]"):
        carried(prepared, stopped)


def test_other_batches_are_refused(stopped: Record, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"chain.yaml:2: data.batch_size is 64, and was 32"):
        carried(chain(tmp_path, size=64, end=f", {MIDDLE}", width=9), stopped)
    prepared = chain(tmp_path, end=f", {MIDDLE}", width=9)
    carried(prepared, stopped)
    for settings, message in (
        ({"seed": 1}, "seed is 1, and was 0 in run 'old'"),
        ({"data.drop_last": True}, "data.drop_last is True, and was False"),
    ):
        with pytest.raises(UsageError, match=message):
            carried(prepare_with(prepared, settings), stopped)


def test_a_run_that_has_finished_is_refused(stopped: Record, tmp_path: Path) -> None:
    prepared = chain(tmp_path, end=f", {MIDDLE}", width=9)
    assert prepared.total_steps is not None
    write(stopped.run.root, prepared, over=True, step=prepared.total_steps)
    with pytest.raises(UsageError, match="run 'old' has finished what the chain asks for"):
        carried(prepared, stopped)


@pytest.mark.parametrize(
    ("phase", "batch", "ended", "expected"),
    [
        ("end", 45, 2, Position(epoch=3, step=90, synced=90)),
        ("test", 7, 1, Position(epoch=2, batch=7, step=90, synced=90)),  # ended by its patience
        ("end", 7, 2, Position(epoch=2, batch=7, step=90, synced=90)),  # by its number of steps
        ("eval", 45, 2, Position(2, "eval", 45, 90, eval_batch=3, synced=90)),
    ],
)
def test_where_a_stream_goes_on(phase: Phase, batch: int, ended: int, expected: Position) -> None:
    at = Position(2, phase, batch, 90, eval_batch=3, synced=90)
    part = {"over": True, "epochs_ended": ended, "position": at.to_dict(), "again": {}}
    found = going_on(part, 45)
    assert Position(**found["position"]) == expected
    assert not found["over"]
    assert going_on({"over": True}, 45) == {"over": False}


def test_more_epochs(stopped: Record, tmp_path: Path) -> None:
    prepared = chain(tmp_path, end=f", {MIDDLE}", width=9)
    assert prepared.total_steps is not None
    write(stopped.run.root, prepared, over=True, step=prepared.total_steps)
    hashes = [worker.hash for worker in stopped.specs()[1]]
    longer = extend(stopped, 3)
    made, workers = longer.specs()
    assert (longer.epochs, made.epochs, longer.total_steps) == (3, 3, 3 * prepared.total_steps)
    assert workers[0].head is not None
    assert [workers[0].head.epochs, *(worker.length for worker in workers)] == [3, 3, 3]
    assert [worker.hash for worker in workers] == hashes, "images and checkpoints fit"
    assert not is_over(longer.run, longer.modules)
    verify(longer.run, 5, longer.modules)
    assert extend(longer, 3) == longer
    steps = made.model_copy(update={"steps": 9})
    write_json(longer.run.chain, steps.model_dump(mode="json"))
    with pytest.raises(UsageError, match="ends after 'steps: 9', not by its epochs"):
        extend(longer, 4)


@pytest.mark.parametrize("how", ["bit", "link"])
def test_a_damaged_part_is_not_sealed_again(stopped: Record, tmp_path: Path, how: str) -> None:
    """Its new checksum would fit; a link, which a container can make, leads to any file."""
    prepared = chain(tmp_path, end=f", {MIDDLE}", width=9)
    assert prepared.total_steps is not None
    write(stopped.run.root, prepared, over=True, step=prepared.total_steps)
    part = tensors_file(stopped.run.checkpoint(5, "b"))
    if how == "bit":
        *most, last = part.read_bytes()
        part.write_bytes(bytes([*most, last ^ 1]))
    else:
        part.rename(tmp_path / "elsewhere")
        part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="the part of module 'b' in checkpoint 5"):
        extend(stopped, 3)
    assert Record.read(stopped.run.root).epochs == stopped.epochs


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    prepared = chain(tmp_path)
    run = create_run(tmp_path / "old", prepared, backend="process")
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        carried(prepared, Record.read(run.root))
