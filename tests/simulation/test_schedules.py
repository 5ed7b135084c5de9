"""Schedules of disasters: what must hold, and what was found once, holds."""

from __future__ import annotations

import pytest

from tests.simulation.several import Found, Options, simulated

PINNED = {
    "chains": (10, ()),
    "graphs": (5, ("--graphs",)),
    "replicas": (5, ("--replicas",)),
    "graphs of replicas": (4, ("--graphs", "--replicas")),
}
"""Seeds from 0, and of what. Hundreds of others are drawn each night (tests/nightly)."""

REPLAYED = ("--first", "7", "--seeds", "1")

FOUND = {
    "a cut is not written again by who repeats batches": ("--first", "2041"),
    "a last cut that could not be written is written by who is restarted": ("--first", "6249"),
    "a worker's last report is waited for": ("--first", "2990"),
    "the last cut is complete without a lost replica": ("--replicas", "--first", "2209"),
    "a replica that still starts is answered at the end": ("--replicas", "--first", "21942"),
    "a replica that waits for downstream answers upstream": ("--replicas", "--first", "43145"),
    "what is missed goes the batch's way": ("--graphs", "--replicas", "--first", "42228"),
    "a new link says again what is drained": ("--replicas", "--first", "23214"),
    "who comes again passes over what it had, on one link, too": ("--replicas", "--first", "80053"),
    "who still saves is who is waited for": ("--graphs", "--replicas", "--first", "2000249"),
    "who waits for one that has just finished goes on": ("--graphs", "--first", "3100195"),
    "an attempt whose number was used before is no start of all": (
        "--replicas",
        "--first",
        "16510",
    ),
    "who waits for several goes on when the last one has finished": (
        "--replicas",
        "--first",
        "4359",
    ),
    "an address of before a change belongs to another link": ("--replicas", "--first", "125"),
    "what came before a WELCOME comes again": ("--replicas", "--first", "9700147"),
    "what was written just before is waited for": ("--replicas", "--first", "3100079"),
    "what a slow disk took is no waiting": ("--graphs", "--replicas", "--first", "9903013"),
    "who is known asks again while all wait": ("--graphs", "--first", "9961289"),
    "what a worker took to start on a slow disk is no waiting": ("--graphs", "--first", "9940256"),
    "an answer that comes twice is taken once": ("--graphs", "--replicas", "--first", "9742418"),
}
"""What other seeds have found, each with one of them."""


def pinned(kind: str) -> Options:
    seeds, options = PINNED[kind]
    return (*options, "--seeds", str(seeds))


@pytest.fixture(scope="module")
def found() -> dict[Options, list[Found]]:
    wanted = [*map(pinned, PINNED), REPLAYED, REPLAYED]
    return simulated([*wanted, *((*seed, "--seeds", "1") for seed in FOUND.values())], 1200)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", PINNED)
def test_what_must_hold_holds(found: dict[Options, list[Found]], kind: str) -> None:
    """Graphs have up to eight modules, with joins, skips and windows that just suffice.

    Each batch goes to one of a module's replicas; in the end they have the same weights.
    """
    ((code, figures),) = found[pinned(kind)]
    assert figures["failed"] == []
    assert (code, figures["schedules"]) == (0, PINNED[kind][0])


@pytest.mark.parametrize("mended", FOUND)
def test_what_was_found_is_mended(found: dict[Options, list[Found]], mended: str) -> None:
    ((code, figures),) = found[*FOUND[mended], "--seeds", "1"]
    assert (code, figures["failed"]) == (0, [])


def test_a_seed_replays(found: dict[Options, list[Found]]) -> None:
    """The same seed is the same schedule, to the last operation."""
    runs = [figures for _, figures in found[REPLAYED]]
    assert runs[0]["operations"] == runs[1]["operations"] > 0
