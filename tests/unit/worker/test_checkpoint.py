"""Checkpoints: whole or absent, exact, and kept in order."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from dni_runtime import __version__, files
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import CheckpointError, DamagedError
from dni_runtime.run.cuts import complete_cuts, forget, tensors_file
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import Choice, DataInfo, WorkerSpec
from dni_runtime.worker.checkpoint import CheckpointWriter, State, copy_state, read, restore
from tests.specs import float32, int64, specs_of

CHAIN = """\
name: x
defaults:
  optimizer: {SGD: {lr: 0.1, momentum: 0.9}}
  schedule: {StepLR: {step_size: 1}}
modules:
  - name: a
    layers: [{Linear: {in_features: 4, out_features: 4}}, {BatchNorm1d: {num_features: 4}}]
    interface: mixed
  - name: b
    layers: [{Linear: {in_features: 4, out_features: 3}}]
"""


@pytest.fixture
def worker() -> WorkerSpec:
    info = DataInfo(sample=float32(4), label=int64(), classes=3)
    return specs_of(CHAIN, info)[0]


def train(step: ModuleStep, count: int) -> None:
    """Each gradient comes after the next forward pass, the last one after its own."""
    late: list[tuple[int, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(step.batches)
    for id in range(step.batches + 1, step.batches + count + 1):
        x = torch.randn(8, 4, generator=generator)
        h = step.forward(id, x)
        step.update(x[:, :3].argmax(1))
        late.append((id, torch.tanh(h)))
        if len(late) > 1:
            step.late_gradient(*late.pop(0))
    step.late_gradient(*late.pop())
    step.optimization.end_epoch()


@contextmanager
def writing(
    run: RunDir,
    module: str = "a",
    chain: str = "a",
    *,
    keep: int = 2,
    on_error: Any = pytest.fail,
    on_written: Any = lambda: None,
) -> Iterator[CheckpointWriter]:
    """Write a module's checkpoints; all are on the disk at the end."""
    with closing(CheckpointWriter(run, module, [*chain], keep, on_error, on_written)) as writer:
        yield writer


@pytest.fixture
def state(worker: WorkerSpec) -> State:
    """A module's state before it is trained."""
    return copy_state(ModuleStep(worker))


LATE = Choice(name="delayed", args={"max_late": 1, "predict": True})


@pytest.mark.parametrize("interface", [Choice(name="mixed"), LATE], ids=lambda one: one.name)
def test_training_goes_on_exactly(worker: WorkerSpec, run: RunDir, interface: Choice) -> None:
    worker = worker.model_copy(update={"interface": interface})
    first, second = ModuleStep(worker), ModuleStep(worker)
    train(first, 5)
    with writing(run) as writer:
        writer.write(7, *copy_state(first))
    tensors, document = read(run.checkpoint(7, "a"))
    restore(second, tensors, document)
    assert document["cut"] == 7
    for step in (first, second):
        train(step, 5)
    ours, theirs = copy_state(first), copy_state(second)
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][key], theirs[0][key]) for key in ours[0])
    assert json.loads(json.dumps(ours[1])) == json.loads(json.dumps(theirs[1]))
    assert ours[1]["optimizers"]["module"]["groups"][0]["lr"] == pytest.approx(0.001)


def test_a_recurrent_layer_goes_on_exactly() -> None:
    """Its state, its synthesizer and optimizer, and a lesson that has come but is not learned."""
    text = (
        "name: x\ndefaults: {interface: synthetic}\nmodules:\n"
        "  - name: a\n    layers: "
        "[{Recurrent: {cell: LSTM, input_size: 4, hidden_size: 3, synthetic: true}}]\n"
        "  - name: b\n    layers: [Flatten, {Linear: {in_features: 15, out_features: 3}}]\n"
    )
    spec = specs_of(text, DataInfo(sample=float32(5, 4), label=int64(), classes=3))[0]
    data = list(torch.randn(10, 8, 5, 4, generator=torch.Generator().manual_seed(2)))

    def train_on(step: ModuleStep, batches: list[torch.Tensor]) -> None:
        for x in batches:
            h = step.forward(step.batches + 1, x)
            step.update(x[:, 0, :3].argmax(1))
            step.late_gradient(step.batches, torch.tanh(h))

    first, second, unbroken = (ModuleStep(spec) for _ in range(3))
    train_on(first, data[:5])
    tensors, document = copy_state(first)
    assert tensors["layers.0.state"].shape == (8, 6)
    assert tensors["layers.0.state"].any()
    assert "layers.0.synthesizer" in document["optimizers"]
    train_on(second, [x[:2] for x in data[7:9]])
    restore(second, tensors, json.loads(json.dumps(document)))
    train_on(unbroken, data[:5])
    for step in (first, second, unbroken):
        train_on(step, data[5:])
    states = [copy_state(step)[0] for step in (first, second, unbroken)]
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(states[0][key], other[key]) for key in other)


def test_a_schedule_of_milestones_goes_on(worker: WorkerSpec, run: RunDir) -> None:
    schedule = Choice(name="MultiStepLR", args={"milestones": [2, 3], "gamma": 0.1})
    worker = worker.model_copy(update={"schedule": schedule})
    first, second = ModuleStep(worker), ModuleStep(worker)
    train(first, 2)
    with writing(run) as writer:
        writer.write(7, *copy_state(first))
    restore(second, *read(run.checkpoint(7, "a")))
    rates = []
    for _ in range(2):
        train(second, 2)
        rates.append(second.optimization.optimizers["module"].param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.001])


def test_snapshot_does_not_change_with_the_module(worker: WorkerSpec) -> None:
    step = ModuleStep(worker)
    tensors, _ = copy_state(step)
    before = {key: value.clone() for key, value in tensors.items()}
    train(step, 3)
    assert all(torch.equal(before[key], tensors[key]) for key in tensors)


def test_old_cuts_go_when_newer_ones_are_complete(state: State, run: RunDir) -> None:
    with writing(run, "a", "ab") as writer:
        for cut in (1, 2, 3):
            writer.write(cut, *state)
    assert complete_cuts(run, ["a", "b"]) == []
    assert complete_cuts(run, ["a"]) == [1, 2, 3]  # nothing goes before the chain is safe
    with writing(run, "b", "ab") as writer:
        for cut in (1, 2, 3):
            writer.write(cut, *state)
    assert complete_cuts(run, ["a", "b"])[-2:] == [2, 3]


def test_a_module_forgets_only_its_own_part(state: State, run: RunDir) -> None:
    """The head may write its first cut while others still start, and look for old ones."""
    about_to_be_written = run.checkpoint(2, "a").parent
    about_to_be_written.mkdir()
    with writing(run, "b", "ab") as writer:
        writer.write(1, *state)
    forget(run, ["b"], lambda cut: cut > 0)
    assert list(run.checkpoints.iterdir()) == [about_to_be_written]


def test_a_failed_write_is_reported_and_leaves_the_last(
    state: State, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[CheckpointError] = []
    with writing(run, on_error=errors.append) as writer:
        writer.write(1, *state)
        (run.checkpoints / f"{2:012d}").write_text("in the way")
        writer.write(2, *state)
        writer.flush()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("dni_runtime.worker.checkpoint.write_part", full)
        writer.write(3, *state)
    assert ["at 2" in str(errors[0]), "at 3" in str(errors[1])] == [True, True]
    kept = "the checkpoint at 1 is kept"
    assert [error.hint for error in errors] == [kept, f"{kept}; make room on the disk"]
    assert complete_cuts(run, ["a"]) == [1]


def test_what_is_on_disk_of_a_part_is_counted(
    state: State, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece, so that one that is written slowly shows progress."""
    monkeypatch.setattr(files, "_PIECE_BYTES", 100)
    seen: list[tuple[bool, int]] = []
    fsync = os.fsync

    def sync(file: int) -> None:
        seen.append((writer.busy, writer.saved_bytes))
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    with writing(run) as writer:
        assert not writer.busy
        writer.write(1, *state)
        writer.flush()
        size = tensors_file(run.checkpoint(1, "a")).stat().st_size
        pieces = -(-size // 100)
        assert seen[:pieces] == [(True, 100 * number) for number in range(pieces)]
        assert (writer.busy, writer.saved_bytes) == (False, size)
        writer.write_snapshot(2, *state)
    assert (writer.busy, writer.saved_bytes) == (False, size + run.snapshot("a").stat().st_size)
    assert complete_cuts(run, ["a"]) == [1]


def test_what_cannot_be_written_does_not_end_the_writing(state: State, run: RunDir) -> None:
    """A snapshot that is written makes up for no checkpoint that was not."""
    tensors, document = state
    errors: list[CheckpointError] = []
    written: list[int] = []
    with writing(
        run, on_error=errors.append, on_written=lambda: written.append(len(errors))
    ) as writer:
        for cut in (1, 2):
            writer.write(cut, tensors, document | {"user's": object()})
        writer.write_snapshot(3, tensors, document)
        writer.write_snapshot(4, tensors, document | {"user's": object()})
        writer.write(5, tensors, document)
        writer.write_snapshot(6, tensors, document)
    assert [str(error).split(" could")[0] for error in errors] == [
        "the checkpoint at 1",
        "the checkpoint at 2",
        "the snapshot at 4",
    ]
    assert [str(error).split("→ ")[1] for error in errors] == [
        "there is no earlier one",
        "there is no earlier one",
        "the last snapshot is kept",
    ]
    assert written == [3, 3]
    assert complete_cuts(run, ["a"]) == [5]


def test_what_cannot_be_removed_does_not_fail_a_checkpoint(state: State, run: RunDir) -> None:
    tensors, document = state
    news: list[str] = []
    shutil.copytree(run.checkpoints, run.checkpoints / "000000000001.bak")
    with writing(run, keep=1, on_written=lambda: news.append("written")) as writer:
        writer.write(1, tensors, document)
        writer.flush()
        path = run.checkpoint(1, "a").with_suffix(".safetensors")
        path.unlink()
        path.mkdir()  # which no unlink removes
        document["bytes"] = path.stat().st_size
        writer.write(2, tensors, document)
        writer.write(3, tensors, document)
    assert (news, writer.failure) == (["written"] * 3, None)
    assert complete_cuts(run, ["a"])[-1] == 3


@pytest.mark.parametrize("damage", ["cut off", "missing", "flipped", "other module"])
def test_damaged_checkpoints_are_refused(
    worker: WorkerSpec, state: State, run: RunDir, damage: str
) -> None:
    tensors, document = state
    with writing(run) as writer:
        writer.write(1, tensors, document | ({"module": "z"} if damage == "other module" else {}))
    path = run.checkpoint(1, "a")
    data = path.with_suffix(".safetensors").read_bytes()
    if damage == "cut off":
        path.with_suffix(".safetensors").write_bytes(data[:-10])
    elif damage == "missing":
        path.with_suffix(".json").unlink()
    elif damage == "flipped":
        path.with_suffix(".safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    kind = CheckpointError if damage == "other module" else DamagedError
    with pytest.raises(kind) as caught:
        restore(ModuleStep(worker), *read(path))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": 9, "version": "7.1.0"},
            f"by dni-runtime 7.1.0 in format 9; this is {__version__}, which reads format 3",
        ),
        ({"format": 2, "version": "0.0.9"}, "by dni-runtime 0.0.9 in format 2"),
        ({"hash": "0123456789abcdef"}, "another spec of module 'a' (checkpoint 0123456789ab"),
    ],
)
def test_what_another_version_or_spec_has_written(
    worker: WorkerSpec, changes: dict[str, Any], message: str
) -> None:
    step = ModuleStep(worker)
    tensors, document = copy_state(step)
    assert document["version"] == __version__
    with pytest.raises(CheckpointError) as caught:
        restore(step, tensors, document | changes)
    assert message in str(caught.value)
    assert "dnictl up" in str(caught.value)


def test_another_version_may_have_another_way_to_hash(worker: WorkerSpec) -> None:
    step = ModuleStep(worker)
    tensors, document = copy_state(step)
    restore(step, tensors, document | {"hash": "0", "version": "0.0.9"})
