"""What the command lines of the comparisons have in common."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from peers.contenders import CONTENDERS, Contender, Kind, kind_of, stages_per_process
from peers.networks import NETWORKS
from peers.slow_link import Line

_UNITS = {"gbit": 1000.0, "mbit": 1.0, "kbit": 0.001}


def parse_rate(text: str) -> float:
    """Megabits a second of ``1gbit``, ``100mbit``, ``64kbit`` or ``unlimited`` (0)."""
    if text == "unlimited":
        return 0.0
    for unit, factor in _UNITS.items():
        if text.endswith(unit) and float(text.removesuffix(unit)) > 0:
            return float(text.removesuffix(unit)) * factor
    raise ValueError(f"{text!r} is no rate: write unlimited, 1gbit or 100mbit")


def parse_delay(text: str) -> float:
    """Milliseconds, 0 to 10,000."""
    if not 0 <= float(text) <= 10_000:
        raise ValueError(f"{text!r} is no delay")
    return float(text)


def chosen(patterns: str) -> list[str]:
    """The contenders whose names match one of several patterns with commas between them.

    Raises ``ValueError`` if a pattern matches none.
    """
    names: dict[str, None] = {}
    for pattern in patterns.split(","):
        found = fnmatch.filter(CONTENDERS, pattern)
        if not found:
            kind_of(pattern)
            found = [pattern]
        names |= dict.fromkeys(found)
    kinds = get_args(Kind)

    def place(name: str) -> tuple[int, int]:
        kind, number = kind_of(name)
        return kinds.index(kind), 0 if kind == "pipeline" else number

    listed = [name for name in CONTENDERS if name in names]
    return sorted([*listed, *(name for name in names if name not in CONTENDERS)], key=place)


def contenders_of(
    names: Sequence[str],
    peer_cuts: Sequence[int | None],  # layers in the first of two processes that share the network
    chain_cuts: Sequence[int | None],  # the same for chains of two modules
    *,
    modules: int = 2,  # of the chains
    processes: Sequence[int] = (),  # of peers that may have any number; empty: as many as modules
) -> list[Contender]:
    """Each name with each cut, and each number of processes, that applies to it."""
    found: dict[Contender, None] = {}
    for name in names:
        kind, _ = kind_of(name)
        if kind == "chain":
            cuts = chain_cuts if modules == 2 else (None,)
            found |= dict.fromkeys(Contender(name, cut) for cut in cuts)
            continue
        free = kind in ("ddp", "pipeline", "2bw", "async-1f1b") and stages_per_process(name) == 1
        for count in (processes or (modules,)) if free else (None,):
            two = free and kind != "ddp" and count == 2
            for cut in peer_cuts if two else (None,):
                found[Contender(name, cut, None if count == modules else count)] = None
    return list(found)


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A reader of values with commas between them, for argparse."""

    def read(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _names(text: str) -> list[str]:
    try:
        return chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add who is compared, over which lines, and where things are written."""
    parser.add_argument("--network", choices=NETWORKS, default="mlp-1024")
    parser.add_argument(
        "--modules", type=int, choices=(2, 4), default=2, help="of chains (default: 2)"
    )
    parser.add_argument(
        "--processes", type=listed(int), default=[], metavar="N,…",
        help="of the peers that may have 2 or 4; several are compared (default: --modules)",
    )  # fmt: skip
    parser.add_argument(
        "--delay-ms", type=listed(parse_delay), default=[0.0], metavar="MS,…",
        help="one-way delays; 0 with an unlimited rate is loopback (default)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=listed(parse_rate), default=[0.0], metavar="RATE,…",
        help="unlimited (default), 1gbit, 100mbit, …; each with each delay",
    )  # fmt: skip
    parser.add_argument(
        "--contenders", type=_names, default=list(CONTENDERS), metavar="PATTERN,…",
        help=f"of: {', '.join(CONTENDERS)} (default: all); and with other numbers: local-sgd-H, "
        "diloco-H, 2bw-M, async-1f1b-K",
    )  # fmt: skip
    parser.add_argument("--window", type=int, help="of chains (default: chosen for each line)")
    parser.add_argument("--learn-every", type=int, default=4, help="see the synthetic interface")
    parser.add_argument(
        "--peer-split", type=listed(int), default=[None], metavar="LAYERS,…",
        help="layers in the first of two processes with a stage each; several are compared",
    )  # fmt: skip
    parser.add_argument(
        "--chain-split", type=listed(int), default=[None], metavar="LAYERS,…",
        help="the same for the first of a chain's two modules",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, help="keep the data and the chains' runs here (default: nowhere)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program if the options of :func:`add_options` do not fit together."""
    network = NETWORKS[arguments.network]
    for cut in (*arguments.peer_split, *arguments.chain_split):
        if cut is not None and not 0 < cut < len(network.layers):
            parser.error(f"{cut} is no place to cut {len(network.layers)} layers")
    if set(arguments.processes) - {2, 4}:
        parser.error("--processes: 2, 4 or both")
    for contender in contenders(arguments):
        kind, number = kind_of(contender.name)
        if kind == "2bw" and network.batch % number:
            parser.error(f"{contender}: a batch of {network.batch} has no {number} equal parts")


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Who is compared."""
    return contenders_of(
        arguments.contenders,
        arguments.peer_split,
        arguments.chain_split,
        modules=arguments.modules,
        processes=arguments.processes,
    )


def lines(arguments: argparse.Namespace) -> list[Line]:
    """Over which lines."""
    return [Line(delay, rate) for rate in arguments.rate for delay in arguments.delay_ms]
