"""When a module's state is copied: at the cuts of its chain, and for its own restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dni_runtime.worker import saver
from dni_runtime.worker.ledger import ModuleProgress
from dni_runtime.worker.saver import SNAPSHOT_SHARE, StateSaver

EVERY_S = 10.0


@dataclass
class Writer:
    busy: bool = False
    cuts: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)

    def write(self, cut: int, tensors: object, own: dict[str, Any]) -> None:
        self.cuts.append((cut, own))

    def write_snapshot(self, id: int, tensors: object, own: dict[str, Any]) -> None:
        self.snapshots.append(id)


@dataclass
class World:
    """A module, its writer, and a clock that copying moves."""

    now_s: float = 100.0
    copy_s: float = 0.0
    writer: Writer = field(default_factory=Writer)
    progress: ModuleProgress = field(default_factory=lambda: ModuleProgress(id=5, epoch=2))
    step: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            finite=True, spec=SimpleNamespace(snapshot_s=EVERY_S)
        )
    )

    def copy(self, step: object) -> tuple[dict[str, Any], dict[str, Any]]:
        self.now_s += self.copy_s
        return {}, {"steps": 7}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(saver, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    monkeypatch.setattr(saver, "copy_state", made.copy)
    monkeypatch.setattr(saver, "progress_document", lambda progress, **more: {"over": more["over"]})
    return made


def make(world: World, cut: int = 0) -> StateSaver:
    return StateSaver(
        world.step,  # type: ignore[arg-type]
        world.writer,  # type: ignore[arg-type]
        cut=cut,
        progress=world.progress,
        head=None,
    )


def test_a_snapshot_when_it_is_due_and_something_is_new(world: World) -> None:
    made = make(world)
    made.snapshot()
    assert world.writer.snapshots == []
    world.now_s += EVERY_S
    made.snapshot()
    world.now_s += EVERY_S
    made.snapshot()  # nothing has happened since
    world.progress.id = 6
    world.writer.busy = True
    made.snapshot()
    world.writer.busy = False
    made.snapshot()
    assert world.writer.snapshots == [5, 6]


def test_copying_takes_a_small_share_of_the_time(world: World) -> None:
    world.copy_s = 1.0
    made = make(world)
    for _ in range(1000):
        world.now_s += 1.0
        world.progress.id += 1
        made.snapshot()
    assert len(world.writer.snapshots) * world.copy_s <= SNAPSHOT_SHARE * 1000 + 1


def test_without_an_interval_there_are_none(world: World) -> None:
    world.step.spec.snapshot_s = 0.0
    made = make(world)
    world.now_s += 1e6
    made.snapshot()
    assert world.writer.snapshots == []


def test_a_state_that_is_not_finite(world: World) -> None:
    """It makes no snapshot; a checkpoint is marked, so that no other one is removed for it."""
    world.step.finite = False
    made = make(world)
    world.now_s += EVERY_S
    made.snapshot()
    assert world.writer.snapshots == []
    made.checkpoint(8, over=False, finite=False)
    made.checkpoint(9, over=True, finite=True)
    assert world.writer.cuts == [
        (8, {"steps": 7, "over": False, "finite": False}),
        (9, {"steps": 7, "over": True}),
    ]
