"""Hundreds of schedules that nobody has seen, and what is missed if a mend is taken out."""

from __future__ import annotations

import time

import pytest

from tests.simulation.several import Found, Options, simulated

MISSED = [
    ("gradients-once", 167, "the watchdog has said module 'a' waits for gradients"),
    ("newest-read", 211, "the watchdog has said module 'a' waits for room"),
    ("narrow-gaps", 152, "the link is down"),
    ("own-cuts", 4138, "a.0.weight is not backpropagation's"),
    ("exit-code-0", 147, "at 5 of the stream, which has finished"),
    ("tail-decides", 19, "there is no complete checkpoint"),
    ("steps-unasked", 68, "the worker of module 'c' has not reported"),
    ("gaps-untold", 220, "at 5 of the stream, which waits for input at 3; the link is up"),
    ("links-in-turn", 6, "at 9 of the stream, which waits for input at 8; the link is up"),
    ("half-sums", 147, "the watchdog has said module 'a' waits for gradients"),
    ("means-awaited", 26593, "module 'b.1' waits for its other replicas"),
    ("ids-unagreed", 1469, "b.2: ValueError: id 4 after 4"),
    ("parts-unawaited", 35, "evaluations of [4] samples"),
    ("counts-left", 19, "a has counted 3 of 5 batches"),
    ("numbers-kept", 42, "are wanted, but there are"),
    ("left-out-judged", 3, "became {'a': 2, 'b': 2, 'c': 1}, but only [] are lost"),
    ("addresses-kept", 125, "became {'a': 2, 'b': 2, 'c': 2}, but only [] are lost"),
]
"""Mends, and a seed that finds what each was made for."""

OF_REPLICAS = (
    "means-awaited", "ids-unagreed", "parts-unawaited", "counts-left",
    "numbers-kept", "left-out-judged", "addresses-kept",
)  # fmt: skip
OF_GRAPHS = ("gaps-untold", "links-in-turn", "half-sums")


def without(mutation: str, seed: int) -> tuple[str, ...]:
    kind = ("--graphs",) if mutation in OF_GRAPHS else ()
    kind = ("--replicas",) if mutation in OF_REPLICAS else kind
    return (*kind, "--first", str(seed), "--seeds", "1", "--without", mutation)


FIRST = int(time.time() // 86400) * 1000
"""Tonight's seeds: the simulation says which of them failed, and ``--first`` repeats one."""

KINDS = {
    "chains": (400, ()),
    "graphs": (200, ("--graphs",)),
    "replicas": (200, ("--replicas",)),
    "graphs of replicas": (100, ("--graphs", "--replicas")),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_what_must_hold_holds_tonight(kind: str) -> None:
    seeds, options = KINDS[kind]
    wanted = (*options, "--first", str(FIRST), "--seeds", str(seeds))
    (((code, figures),),) = simulated([wanted], 3600).values()
    assert figures["failed"] == []
    assert (code, figures["schedules"]) == (0, seeds)


@pytest.fixture(scope="module")
def found() -> dict[Options, list[Found]]:
    return simulated([without(mutation, seed) for mutation, seed, _ in MISSED], 1200)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mutation", "seed", "violated"), MISSED)
def test_a_mend_that_is_taken_out_is_missed(
    found: dict[Options, list[Found]], mutation: str, seed: int, violated: str
) -> None:
    """The first three were runs that hung for ever; the product's own watchdog sees them, too."""
    ((code, figures),) = found[without(mutation, seed)]
    assert code == 1
    (failure,) = figures["failed"]
    assert violated in failure["violated"]
    assert "the watchdog has said nothing" not in failure["violated"]
