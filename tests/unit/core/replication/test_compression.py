"""Compression: its words, its error, and what makes up for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dni_runtime.core.replication import Sync, build_compression
from dni_runtime.core.replication.compression import Differences, words_of
from dni_runtime.core.replication.shared import ReplicaMessage
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import SpecError, WireError
from dni_runtime.spec import Choice
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.replicas import learn, replicas, share, shared

SHAPES = [(40, 30), (7,), (3, 4, 5), ()]
SIZE = 1200 + 7 + 60 + 1
CHOICES: list[tuple[str, dict[str, Any], int]] = [
    ("bfloat16", {}, 600 + 4 + 30 + 1),
    ("int8", {}, 301 + 3 + 16 + 2),
    ("top-k", {"share": 0.1}, 2 * (120 + 1 + 6 + 1)),
    ("powersgd", {"rank": 2}, 2 * 70 + 7 + 2 * 23 + 1),
]


def row(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "options", "words"), CHOICES)
def test_what_is_sent_sums_up_to_all(name: str, options: dict[str, Any], words: int) -> None:
    """Error feedback: after any number of rows only the newest error is missing."""
    compression = build_compression(Choice(name=name, args=options), SHAPES)
    differences, wanted, got = Differences(compression, torch.zeros(SIZE)), 0, 0
    for seed in range(5):
        packed, sent = differences.pack(row(seed), torch.zeros(SIZE), feedback=True)
        assert len(packed) == words
        assert packed.dtype == torch.int32
        assert torch.equal(compression.unpack(packed), sent)
        wanted, got = wanted + row(seed), got + sent
    assert torch.allclose(wanted - got, differences.error, atol=1e-4)
    assert differences.error.norm() > 0
    whole = differences.whole(row())
    assert torch.allclose(whole, row() + wanted - got, atol=1e-4)
    assert not differences.error.any()


def test_the_error_of_each() -> None:
    x = row()

    def left(name: str, **options: Any) -> torch.Tensor:
        compression = build_compression(Choice(name=name, args=options), SHAPES)
        return compression.unpack(compression.pack(x))

    assert torch.allclose(left("bfloat16"), x, rtol=2**-8)
    assert (left("int8")[:1200] - x[:1200]).abs().max() <= x[:1200].abs().max() / 254 + 1e-6
    top = left("top-k", share=0.1)[:1200]
    assert int((top != 0).sum()) == 120
    assert top[top != 0].abs().min() >= x[:1200][top == 0].abs().max()
    assert torch.equal(top[top != 0], x[:1200][top != 0])


def test_powersgd_finds_a_matrix_of_its_rank() -> None:
    compression = build_compression(Choice(name="powersgd", args={"rank": 2}), [(40, 30)])
    low = (torch.randn(40, 2) @ torch.randn(2, 30)).flatten()
    assert torch.allclose(compression.unpack(compression.pack(low)), low, atol=1e-4)
    zeros = torch.zeros(1200)
    assert torch.equal(compression.unpack(compression.pack(zeros)), zeros)
    assert torch.allclose(compression.unpack(compression.pack(low)), low, atol=1e-4)


def test_int8_says_that_a_number_is_not_finite() -> None:
    compression = build_compression(Choice(name="int8"), [(4,), (2,)])
    x = torch.tensor([1.0, torch.inf, 0, 0, 1, 2])
    left = compression.unpack(compression.pack(x))
    assert left[:4].isnan().all()
    assert left[4:].isfinite().all()


@pytest.mark.parametrize("name", ["bfloat16", "int8", "top-k", "powersgd"])
def test_wrong_words_are_refused(name: str) -> None:
    compression = build_compression(Choice(name=name), SHAPES)
    packed = compression.pack(row())
    for wrong in (packed[:-1], torch.cat([packed, packed[:1]]), packed[:0]):
        with pytest.raises(ValueError, match="words instead of"):
            compression.unpack(wrong)


@pytest.mark.parametrize("place", [-1, 1200, 2**31 - 1])
def test_a_place_beyond_the_row_is_refused(place: int) -> None:
    compression = build_compression(Choice(name="top-k"), SHAPES)
    packed = compression.pack(row())
    packed[3] = place
    with pytest.raises(ValueError, match="not within 1200"):
        compression.unpack(packed)


def message(flags: int, payload: int = 0, weight: float = 1.0) -> torch.Tensor:
    header = torch.cat(
        [
            torch.tensor([flags, 7], dtype=torch.int32),
            torch.tensor([weight], dtype=torch.float64).view(torch.int32),
        ]
    )
    return torch.cat([header, torch.zeros(payload, dtype=torch.int32)])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (message(1, 10)[:3], "a message of 3 words"),
        (message(1, 9), "9 words in a row of 10"),
        (message(1, 11), "11 words in a row of 10"),
        (message(0, 1), "1 words in a row of 10"),
        (message(16), "the flags 16"),
        (message(2, 10), "the flags 2"),
        (message(3, 4), "4 words instead of 5"),
        (message(1, 10, -1.0), "the weight -1"),
        (message(1, 10, float("nan")), "the weight nan"),
    ],
)
def test_a_message_is_checked(words: torch.Tensor, reason: str) -> None:
    compression = build_compression(Choice(name="bfloat16"), [(10,)])
    with pytest.raises(WireError, match=reason) as found:
        ReplicaMessage.read(words, 10, compression)
    assert found.value.reason == "body"
    with pytest.raises(WireError, match="not compressed here"):
        ReplicaMessage.read(message(3, 5), 10, None)


def test_a_message_is_read_again() -> None:
    compression = build_compression(Choice(name="bfloat16"), [(10,)])
    x = torch.randn(10)
    for one in (
        ReplicaMessage(x, 3.0, tag=5),
        ReplicaMessage(asks=True),
        ReplicaMessage(x, 1.0, compression.pack(x)),
    ):
        again = ReplicaMessage.read(one.words(), 10, compression)
        assert (again.weight, again.tag, again.asks) == (one.weight, one.tag, one.asks)
        assert (again.row is None) == (one.row is None)
    assert torch.equal(ReplicaMessage.read(ReplicaMessage(x).words(), 10, None).row, x)  # type: ignore[arg-type]
    assert len(words_of(torch.zeros(5, dtype=torch.uint8))) == 2


@pytest.mark.parametrize("compression", ["bfloat16", "int8", "{top-k: {share: 0.25}}", "powersgd"])
@pytest.mark.parametrize("strategy", ["local-sgd", "all-reduce", "diloco", "admm", "federated"])
def test_replicas_learn_by_compressed_rows(strategy: str, compression: str) -> None:
    """All have the same weights in every bit after each point, and come near to the solution."""
    given = f"{strategy}, compression: {compression}, every: 4"
    steps = [ModuleStep(spec) for spec in replicas(given, 3)]
    plain = [ModuleStep(spec) for spec in replicas(f"{strategy}, every: 4", 3)]
    for id in (1, 2, 3):
        learn(plain[id % 3], id, torch.ones(8, 8), torch.ones(8, 6))
    uncompressed = share(plain, 4)
    draw = torch.Generator().manual_seed(1)
    truth = torch.randn(8, 6, generator=draw)
    for id in range(1, 321 if compression == "powersgd" else 161):
        x = torch.randn(8, 8, generator=draw)
        learn(steps[id % 3], id, x, x @ truth)
        if id % 4 == 0:
            assert share(steps, id) < 0.95 * uncompressed
            for step in steps[1:]:
                assert torch.equal(shared(step).row(), shared(steps[0]).row())
    weight = steps[0].layers.state_dict()["0.weight"]
    assert (weight - truth.T).norm() / truth.norm() < 0.2


def test_a_replica_with_another_base_says_so() -> None:
    """Its next row is whole, or left out; the answer is whole, and all have the same again."""
    given = "local-sgd, compression: int8"
    for whole in (True, False):
        one, other = (ModuleStep(spec) for spec in replicas(given))
        for id in range(1, 5):
            for step in (one, other):
                learn(step, id, torch.randn(4, 8), torch.randn(4, 6))
            if id == 2:
                share([one])  # the other one's answer is lost
            elif id == 3 and whole:
                offer = shared(other).offer(Sync(id, full=False), whole=True)
                assert offer.packed is None
                mean = (shared(one).row() * 4 + shared(other).row() * 8) / 12
                (answer,) = shared(one).agree(Sync(id, full=False), {other: offer}).values()
                assert answer.packed is None
                shared(other).take(answer)
                assert torch.allclose(shared(one).row(), mean, atol=0.01)
            else:
                share([one, other], id)
            if id != 2:
                assert torch.equal(shared(one).row(), shared(other).row())


def test_unknown_compressions_and_options() -> None:
    with pytest.raises(SpecError, match="unknown compression 'zip'"):
        replicas("local-sgd, compression: zip")
    with pytest.raises(SpecError, match=r"0\.5"):
        replicas("local-sgd, compression: {top-k: {share: 0.6}}")


def offered(others: Sequence[ModuleStep], sync: Sync, whole: bool) -> dict[Any, ReplicaMessage]:
    return {one: shared(one).offer(sync, whole=whole) for one in others}


@pytest.mark.parametrize(
    "strategy", ["local-sgd", "diloco", "admm", "federated", "dynamic", "all-reduce"]
)
@pytest.mark.parametrize("full", [False, True])
def test_what_all_have_learnt_outlives_a_restart_of_the_first(strategy: str, full: bool) -> None:
    """It is back at a base that the others have left: their differences tell it nothing."""
    draw = torch.Generator().manual_seed(1)
    truth = torch.randn(8, 6, generator=draw)

    def train(who: Sequence[ModuleStep], id: int) -> None:
        for step in who:
            for n in range(10):
                x = torch.randn(16, 8, generator=draw)
                learn(step, 100 * id + n, x, x @ truth)

    steps = [ModuleStep(spec) for spec in replicas(f"{strategy}, every: 4, compression: int8", 3)]
    first, *others = steps
    for id in range(1, 4):
        train(steps, id)
        share(steps, id, full=True)
    kept = copy_state(first)
    for id in range(4, 7):
        train(steps, id)
        share(steps, id, full=True)
    restore(first, *kept)
    train(others, 7)
    had = [shared(one).row() for one in others]
    sync, whole = Sync(7, full), False
    if not full:
        shared(others[0]).strategy.asked = True  # else one that is 'dynamic' offers nothing yet
        answers = shared(first).agree(sync, offered(others, sync, False))
        assert all(answer.row is None for answer in answers.values())
        readable = [shared(one).take(answer) for one, answer in answers.items()]
        assert readable == [False, False]
        for one, row in zip(others, had, strict=True):
            assert torch.equal(shared(one).row(), row)
        train(steps, 8)
        sync, whole = Sync(8, True), True
    offers = offered(others, sync, whole)
    assert all(offer.packed is None for offer in offers.values())
    answers = shared(first).agree(sync, offers)
    assert all(shared(one).take(answer) for one, answer in answers.items())
    for one in others:
        assert torch.equal(shared(one).row(), shared(first).row())
    stale = kept[0]["layers.0.weight"]
    weight = first.layers.state_dict()["0.weight"]
    if strategy != "all-reduce":  # its gradients are for the weights of the first one
        assert (weight - truth.T).norm() < (stale - truth.T).norm() / 2
