"""What a module trains on while nothing comes from upstream, and when it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dni_runtime.core.step import ModuleStep
from dni_runtime.spec import DataInfo, WorkerSpec
from dni_runtime.worker import idle
from dni_runtime.worker.idle import LABELS_KEPT, SILENT_S, Idle, ReplayBuffer, SyntheticInputs
from tests.specs import float32, int64, linear, specs_of

CHAIN = """\
name: small
data: {batch_size: 4}
links: {%s}
defaults: {interface: {%s: {}}}
""" + linear(6, 5, 3, between="ReLU")
INFO = DataInfo(sample=float32(6), label=int64(), classes=3)
Y = torch.tensor([0, 1, 2, 0])


def workers(links: str = "", interface: str = "mixed") -> tuple[WorkerSpec, ...]:
    return specs_of(CHAIN % (links, interface), INFO)


def batch(number: int, features: int = 5) -> tuple[tuple[Tensor, ...], Tensor]:
    """A batch that tells its number."""
    return (torch.full((4, features), float(number)),), Y


def numbers(buffer: ReplayBuffer, draws: int) -> list[int]:
    chosen = [buffer.choose() for _ in range(draws)]
    return [int(one[0][0][0, 0]) for one in chosen if one is not None]


def test_an_empty_buffer_has_nothing() -> None:
    buffer = ReplayBuffer(2, seed=0)
    assert buffer.choose() is None
    assert buffer.replayed == 0


def test_the_newest_batches_are_kept_and_all_of_them_drawn() -> None:
    buffer = ReplayBuffer(3, seed=0)
    for number in range(10):
        buffer.keep(*batch(number))
    assert set(numbers(buffer, 100)) == {7, 8, 9}
    assert buffer.replayed == 100


def test_the_choice_depends_on_the_seed_alone() -> None:
    """Torch's random numbers, which layers use, are left as they are."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    drawn = []
    for seed in (0, 0, 1):
        buffer = ReplayBuffer(8, seed)
        for number in range(8):
            buffer.keep(*batch(number))
        drawn.append(numbers(buffer, 20))
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_synthetic_inputs_are_like_the_true_ones_of_their_label() -> None:
    source = SyntheticInputs(ModuleStep(workers()[1]))
    assert source.choose() is None
    x = torch.stack([torch.full((5,), 10.0 * label) for label in Y.tolist()])
    for _ in range(3):
        source.keep((x,), Y)
    before = torch.get_rng_state()
    chosen = source.choose()
    assert chosen is not None
    assert torch.equal(torch.get_rng_state(), before)
    (drawn,), labels = chosen
    assert torch.equal(labels, Y)
    torch.testing.assert_close(drawn, x)  # a label's inputs have no variance here
    assert source.replayed == 1


def test_labels_are_of_recent_batches() -> None:
    source = SyntheticInputs(ModuleStep(workers()[1]))
    for label in [0] * 10 + [1] * LABELS_KEPT:
        source.keep(batch(label)[0], torch.full((4,), label))
    for _ in range(50):
        chosen = source.choose()
        assert chosen is not None
        assert set(chosen[1].tolist()) == {1}


class Input:
    """The links from upstream."""

    def __init__(self) -> None:
        self.alive = False
        self.asked = 0

    def reaches_peers(self) -> bool:
        self.asked += 1
        return self.alive


class Step:
    """A module that notes what it is trained on."""

    def __init__(self) -> None:
        self.trained: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def replay(self, xs: tuple[Tensor, ...], y_BY: Tensor) -> None:
        self.trained.append((xs, y_BY))


class World:
    """A module, its link, and a clock that the test moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        patch.setattr(idle.time, "monotonic", lambda: self.now_s)
        self.input, self.step = Input(), Step()

    def idle(self, *, late: bool = False) -> Idle:
        step: Any = self.step
        input: Any = self.input
        return Idle(step, input, ReplayBuffer(4, seed=0), late=late)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_it_trains_when_upstream_is_silent_and_gone(world: World) -> None:
    made = world.idle()
    x, y = batch(1)
    made.source.keep(x, y)
    world.now_s += SILENT_S - 0.01
    assert not made.train()
    assert world.input.asked == 0
    world.now_s += 0.01
    assert made.train()
    ((trained_x, trained_y),) = world.step.trained
    assert trained_x is x
    assert trained_y is y
    assert made.source.replayed == 1
    made.heard()
    assert not made.train()


def test_a_module_upstream_that_lives_is_only_slow(world: World) -> None:
    """It is asked once in a while, not all the time."""
    made = world.idle()
    made.source.keep(*batch(1))
    world.input.alive = True
    for _ in range(100):
        assert not made.train()
        world.now_s += 0.1
    assert world.input.asked <= 100 * 0.1 / SILENT_S
    world.input.alive = False
    world.now_s += SILENT_S
    assert made.train()


def test_late_trains_whenever_nothing_has_come_yet(world: World) -> None:
    made = world.idle(late=True)
    assert not made.train()
    assert made.source.replayed == 0
    made.source.keep(*batch(1))
    made.heard()
    assert made.train()
    assert world.input.asked == 0


def test_without_a_batch_there_is_nothing_to_train_on(world: World) -> None:
    made = world.idle()
    world.now_s += 10
    assert not made.train()
    assert (made.source.replayed, world.step.trained) == (0, [])


@pytest.mark.parametrize(
    ("links", "interface", "source"),
    [
        ("", "mixed", None),
        ("replay: 3", "mixed", ReplayBuffer),
        ("synthetic_inputs: gone", "mixed", SyntheticInputs),
        ("synthetic_inputs: late", "mixed", SyntheticInputs),
    ],
)
def test_the_source_is_what_the_spec_names(
    links: str, interface: str, source: Callable[..., object] | None
) -> None:
    step = ModuleStep(workers(links, interface)[1])
    input: Any = Input()
    made = Idle.of(step, input)
    if source is None:
        assert made is None
    else:
        assert made is not None
        assert type(made.source) is source
        assert made._late == ("late" in links)
    assert Idle.of(step, None) is None  # the head


@pytest.mark.parametrize("interface", ["exact", "delayed"])
def test_who_waits_for_gradients_cannot_train_again(interface: str) -> None:
    input: Any = Input()
    step = ModuleStep(workers("replay: 3", interface)[0])
    assert not step.replays
    assert Idle.of(step, input) is None


@pytest.mark.parametrize("index", [0, 1])
def test_a_batch_is_trained_on_again(index: int) -> None:
    """The weights move; nothing waits for a true gradient that will not come."""
    step = ModuleStep(workers()[index])
    before = [p.detach().clone() for p in step.layers.parameters()]
    assert step.replays
    step.replay(*batch(1, features=step.spec.inputs[0].shape[0]))
    assert any(not torch.equal(a, b) for a, b in zip(before, step.layers.parameters(), strict=True))
    assert (step.waiting, step.batches) == (0, 0)
