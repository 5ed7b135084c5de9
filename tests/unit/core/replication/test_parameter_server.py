"""A parameter server, beside a plain loop with the same pushes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dni_runtime.core.replication import ReplicaMessage, Sync
from dni_runtime.core.replication.strategies import ParameterServer
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import SpecError
from dni_runtime.spec.replicas import with_replicas
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.replicas import learn, replicas, shared


def progress(step: ModuleStep, id: int) -> Tensor:
    """Train on a batch; return how far that has moved the weights."""
    before = shared(step).row()
    learn(step, id, torch.randn(4, 8), torch.randn(4, 6))
    return shared(step).row() - before


def push(step: ModuleStep, id: int, *, full: bool = False) -> ReplicaMessage:
    words = shared(step).offer(Sync(id, full)).words()
    return shared(step).read(words)


@pytest.mark.parametrize(
    ("strategy", "scale"),
    [
        ("parameter-server", 1 / 3),
        ("{parameter-server: {scale: 0.25}}", 0.25),
        ("{parameter-server: {scale: 1}}", 1.0),
    ],
)
def test_what_is_pushed_is_added_and_progress_since_is_kept(strategy: str, scale: float) -> None:
    server, one, other = (ModuleStep(spec) for spec in replicas(strategy, 3))
    wanted = shared(server).row()
    own = progress(server, 1)
    wanted += own
    first = progress(one, 1) + progress(one, 2)
    offer = push(one, 2)
    assert not offer.waits
    shared(server).apply(offer, 0, 2)
    wanted += scale * first
    assert torch.allclose(shared(server).row(), wanted, atol=1e-6)
    answer = ReplicaMessage(shared(server).row())
    since = progress(one, 3)  # while the answer is on its way
    more = progress(server, 3)
    wanted += more
    shared(one).take(answer)
    assert torch.allclose(shared(one).row(), answer.row + since, atol=1e-6)  # type: ignore[operator]
    late = progress(other, 4)
    shared(server).apply_own()
    wanted -= (1 - scale) * (own + more)
    assert torch.allclose(shared(server).row(), wanted, atol=1e-6), "as if it had pushed, too"
    shared(server).apply(push(other, 4), 1, 4)
    shared(server).apply(push(one, 4, full=True), 0, 4)
    shared(server).apply_own()
    wanted += scale * (late + since)
    assert torch.allclose(shared(server).row(), wanted, atol=1e-6)
    for step in (one, other):
        shared(step).take(ReplicaMessage(shared(server).row()))
    assert torch.equal(shared(other).row(), shared(server).row())
    assert torch.equal(shared(one).row(), shared(server).row()), "in every bit, at a full point"
    assert push(one, 5, full=True).waits


def test_a_push_that_comes_again_is_added_once() -> None:
    server, one = (ModuleStep(spec) for spec in replicas("parameter-server"))
    progress(one, 1)
    offer = push(one, 1)
    shared(server).apply(offer, 0, 1)
    row, state = shared(server).row(), copy_state(server)
    shared(server).apply(offer, 0, 1)
    assert torch.equal(shared(server).row(), row)
    again = ModuleStep(server.spec)
    restore(again, *state)  # the server's process is another one now
    shared(again).apply(offer, 0, 1)
    assert torch.equal(shared(again).row(), row)


def test_a_mask_of_infinities_stays() -> None:
    strategy = shared(ModuleStep(replicas("parameter-server")[0])).strategy
    assert isinstance(strategy, ParameterServer)
    learnt = len(strategy.pushed_P)
    row = torch.cat([torch.zeros(learnt), torch.tensor([0.0, -torch.inf, 2.0])])
    push = torch.cat([torch.ones(learnt), torch.tensor([0.0, -torch.inf, 4.0])])
    assert strategy.with_push(row, push, learnt, 2)[learnt:].tolist() == [0, -torch.inf, 3]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_server_goes_on_with_another_number_of_replicas(count: int) -> None:
    """What it has of those that stay is not added again; a new one's first push is."""
    counts = {"b": count}
    before = [ModuleStep(spec) for spec in replicas("parameter-server", 3)]
    server = before[0]
    for place, one in enumerate(before[1:]):
        progress(one, 5)
        shared(server).apply(push(one, 5 + place), place, 5 + place)
    state = copy_state(server)
    specs = replicas("parameter-server", 4)[:count]
    again, *others = (ModuleStep(with_replicas(spec, counts)) for spec in specs)
    restore(again, *state)
    row = shared(again).row()
    assert torch.equal(row, shared(server).row())
    strategy = shared(again).strategy
    assert isinstance(strategy, ParameterServer)
    assert strategy.applied_N.tolist() == [5, 6, 0][: count - 1]
    for place, one in enumerate(others):
        moved = progress(one, 5)
        offer = push(one, 5)
        shared(again).apply(offer, place, 5)
        if place == 2:
            row += moved / count
        assert torch.allclose(shared(again).row(), row, atol=1e-6)


def test_there_is_no_common_row_to_compress_by() -> None:
    with pytest.raises(SpecError, match="'compression' needs a row that all had last"):
        replicas("parameter-server, compression: int8")
