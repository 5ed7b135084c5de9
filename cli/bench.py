"""``bench``: how fast links, modules and whole chains are on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UsageError
from dnictl.options import chain_argument, data_option, json_option, print_json, site_for

if TYPE_CHECKING:
    from dni_runtime.bench.comparison import Comparison
    from dni_runtime.bench.link import Latency, Throughput
    from dni_runtime.bench.module import ModuleCost
    from dni_runtime.bench.spread import Spread

_TRANSPORTS = ("ipc", "tcp")
_SECURITIES = ("none", "curve")


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _repetitions(count: int) -> _Decorator:
    return click.option(
        "--repetitions", type=click.IntRange(1, 1000), default=count, show_default=True,
        help="Number of measurements, in turns; figures are medians.",
    )  # fmt: skip


def _seconds(default: float, what: str) -> _Decorator:
    return click.option(
        "--seconds", type=click.FloatRange(0, min_open=True), default=default, show_default=True,
        help=what,
    )  # fmt: skip


@click.group()
def bench() -> None:
    """Measure links, modules and whole chains on this machine.

    \b
    Example:
      dnictl bench module chain.yaml   which module is the slowest, and why
      dnictl bench chain chain.yaml    real workers beside plain backpropagation
      dnictl bench link                throughput and latency of the transport
    """


@bench.command()
@click.option("--size", "sizes", default="64KB,1MB,16MB", show_default=True, metavar="SIZE,…",
              help="Sizes of a batch.")  # fmt: skip
@click.option("--transport", default="ipc,tcp", show_default=True, metavar="NAME,…",
              help="ipc, or tcp over loopback.")  # fmt: skip
@click.option("--security", default="none,curve", show_default=True, metavar="NAME,…",
              help="none, or curve: tcp, encrypted as between hosts.")  # fmt: skip
@click.option("--window", type=click.IntRange(1, 4096), default=8, show_default=True,
              help="Unacknowledged batches.")  # fmt: skip
@_repetitions(5)
@_seconds(0.5, "Shortest time of one measurement.")
@json_option
def link(
    sizes: str,
    transport: str,
    security: str,
    window: int,
    repetitions: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure a link between two processes, beside bare ZeroMQ with the same messages.

    MB are millions of bytes, one way; the link checks and acknowledges every batch. Both are
    measured in turns, and a ratio is the median of those within a repetition. 'of plain' is the
    ratio of the encrypted link to the unencrypted one.

    \b
    Example:
      dnictl bench link --size 1MB,4MB --transport tcp
    """
    from dni_runtime.bench.link import measure_links, parse_size

    names = _names(transport, _TRANSPORTS, "transport")
    throughputs, latencies = measure_links(
        [parse_size(text) for text in sizes.split(",")],
        names,
        securities=_names(security, _SECURITIES, "security"),
        repetitions=repetitions,
        seconds=seconds,
        window=window,
        observe=None if as_json else _say,
    )
    if as_json:
        print_json(
            {
                "cores": len(os.sched_getaffinity(0)),
                "window": window,
                "repetitions": repetitions,
                "throughput": [asdict(one) for one in throughputs],
                "latency": [asdict(one) for one in latencies],
            }
        )
        return
    _print_links(throughputs, latencies)


@bench.command()
@chain_argument
@click.option("--module", "-m", "modules", multiple=True, metavar="NAME",
              help="Only this module (may be given more than once).")  # fmt: skip
@_repetitions(5)
@_seconds(0.5, "Shortest time of one measurement.")
@data_option
@json_option
def module(
    chain: Path,
    modules: tuple[str, ...],
    repetitions: int,
    seconds: float,
    data: Path | None,
    as_json: bool,
) -> None:
    """Measure the parts of each module's step, in one process without transport.

    Forward pass; backward pass with the optimizer's step; the gradient interface's signal; and what
    learning from true gradients costs per batch. A chain trains as fast as its slowest module:
    move layers from that module to a faster one.

    \b
    Example:
      dnictl bench module chain.yaml --module bottom
    """
    from dni_runtime.bench.chain import endless
    from dni_runtime.bench.module import measure_modules
    from dni_runtime.launch.prepare import prepare

    prepared = endless(prepare(chain, data=data))
    costs = measure_modules(
        prepared, modules, repetitions=repetitions, seconds=seconds,
        observe=None if as_json else _say,
    )  # fmt: skip
    if as_json:
        print_json(
            {
                "chain": prepared.chain.name,
                "repetitions": repetitions,
                "modules": [asdict(cost) for cost in costs],
            }
        )
        return
    _print_modules(costs)


@bench.command()
@chain_argument
@_seconds(8.0, "Time of one measurement.")
@click.option("--batches", type=click.IntRange(1),
              help="End after this number of batches, if that is earlier.")  # fmt: skip
@click.option("--warmup", type=click.FloatRange(0), default=3.0, show_default=True,
              help="Seconds of unmeasured training before it.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1),
              help="Threads of plain backpropagation (default: as many as the chain's modules "
              "have).")  # fmt: skip
@_repetitions(3)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Keep the run directories here (default: delete them).")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="PNG",
              help="Draw the result (needs matplotlib).")  # fmt: skip
@data_option
@json_option
def chain(
    chain: Path,
    seconds: float,
    batches: int | None,
    warmup: float,
    threads: int | None,
    repetitions: int,
    out: Path | None,
    plot: Path | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Run a chain with real workers for a while, beside plain backpropagation in one process.

    The modules run as processes on this host, over their real links. Start, warm-up, evaluations
    and checkpoints are not counted. 'waits' are the shares of a module's time in which it waits for
    input, for room in its window (the next module is slower), or for true gradients.

    \b
    Example:
      dnictl bench chain chain.yaml --seconds 20 --threads 2
    """
    from dni_runtime.bench.chain import Bounds, endless
    from dni_runtime.bench.comparison import compare_paces, draw
    from dni_runtime.launch.prepare import prepare
    from dni_runtime.launch.reference import default_threads
    from dnictl.show import picture

    prepared = endless(prepare(chain, data=data))
    site = site_for(prepared, "process", Path("images"))
    if out is not None and out.exists() and any(out.iterdir()):
        raise UsageError(f"{str(out)!r} is not empty", hint="name another --out")
    with contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dni-bench-")))
        found = compare_paces(
            prepared, site, folder.absolute(), Bounds(warmup, seconds, batches),
            threads=threads or default_threads(prepared), repetitions=repetitions,
            observe=None if as_json else _say,
        )  # fmt: skip
    if plot is not None:
        picture(plot, lambda: draw(found, prepared.chain.name, plot))
    if as_json:
        print_json({"chain": prepared.chain.name, **asdict(found)})
        return
    _print_chain(found)


def _names(text: str, allowed: tuple[str, ...], what: str) -> list[Any]:
    from dni_runtime.spec.load import suggestion

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in allowed:
            raise UsageError(f"unknown {what} {name!r}", hint=suggestion(name, list(allowed)))
    return list(dict.fromkeys(names))


def _say(text: str) -> None:
    click.echo(text, err=True)


def _print_links(throughputs: list[Throughput], latencies: list[Latency]) -> None:
    from dnictl.show import print_table

    columns = [
        "link", "batch", "MB/s", "range", "bare ZeroMQ", "range", "ratio", "of plain",
        "CPU µs/batch",
    ]  # fmt: skip
    _table(
        columns,
        [
            [
                _way(one), _size(one.bytes), *_both(one.link, 0), *_both(one.raw, 0),
                f"{one.ratio.median:.2f}", _of_plain(one),
                f"{one.source_cpu_us.median:,.0f} + {one.sink_cpu_us.median:,.0f}",
            ]
            for one in throughputs
        ],
    )  # fmt: skip
    click.echo()
    print_table(
        ["link", "batch", "one way, µs", "range ", "bare ZeroMQ", "range", "ratio", "of plain"],
        [
            [
                _way(one), _size(one.bytes), *_both(one.link, 0), *_both(one.raw, 0),
                f"{one.ratio.median:.2f}", _of_plain(one),
            ]
            for one in latencies
        ],
        right={"batch", "one way, µs", "range ", "bare ZeroMQ", "range", "ratio", "of plain"},
    )  # fmt: skip


def _way(one: Throughput | Latency) -> str:
    return one.transport if one.security == "none" else f"{one.transport}, {one.security}"


def _of_plain(one: Throughput | Latency) -> str:
    return "" if one.of_plain is None else f"{one.of_plain.median:.2f}"


def _print_modules(costs: list[ModuleCost]) -> None:
    columns = [
        "module", "forward", "backward", "signal", "learn", "step, µs", "range", "interface",
        "parameters", "+ interface", "sends", "returns",
    ]  # fmt: skip
    _table(
        columns,
        [
            [
                cost.module,
                *(f"{one.median:,.0f}" for one in (cost.forward_us, cost.backward_us)),
                f"{cost.signal_us.median:,.0f}" if cost.signal_us.median else "-",
                _learn(cost),
                *_both(cost.step_us, 0),
                f"{100 * cost.interface_share:.0f} %",
                f"{cost.parameters:,}",
                f"{cost.interface_parameters:,}",
                _size(cost.down_bytes),
                _size(cost.up_bytes),
            ]
            for cost in costs
        ],
    )
    if len(costs) > 1:
        slowest = max(costs, key=lambda cost: cost.step_us.median)
        mean = sum(cost.step_us.median for cost in costs) / len(costs)
        click.echo(
            f"slowest: {slowest.module}, {slowest.step_us.median / mean:.2f} times the mean; "
            f"at most {slowest.samples_per_s:,.0f} samples/s if each module has its own cores"
        )


def _learn(cost: ModuleCost) -> str:
    if not cost.learn_every:
        return "-"
    every = f", 1 in {cost.learn_every}" if cost.learn_every > 1 else ""
    return f"{cost.learn_us.median:,.0f}{every}"


def _print_chain(found: Comparison) -> None:
    _table(
        [
            "module", "ms/batch", "CPU ms/batch", "cores", "computes", "waits: input", "window",
            "gradient", "lag",
        ],
        [
            [
                row.module,
                f"{row.batch_ms.median:.3g}",
                f"{row.cpu_ms.median:.3g}",
                f"{row.cores.median:.2f}",
                f"{100 * row.computing:.0f} %",
                *(f"{100 * row.waiting[reason]:.0f} %" for reason in row.waiting),
                "-" if row.lag is None else f"{row.lag:.1f}",
            ]
            for row in found.modules
        ],
    )  # fmt: skip
    click.echo()
    _table(
        ["", "samples/s", "range", "cores", "CPU µs/sample"],
        [
            [
                name, *_both(rate, 0), f"{cores.median:.2f}", f"{cpu.median:,.1f}",
            ]
            for name, rate, cores, cpu in (
                ("chain", found.samples_per_s, found.cores, found.cpu_us),
                (
                    f"backprop, {found.threads} thread{'s' if found.threads > 1 else ''}",
                    found.reference_samples_per_s,
                    found.reference_cores,
                    found.reference_cpu_us,
                ),
            )
        ],
    )  # fmt: skip
    ratio = found.ratio
    click.echo(f"chain / backprop: {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})")


def _table(columns: list[str], rows: list[list[Any]]) -> None:
    from dnictl.show import print_table

    print_table(columns, rows, right=set(columns[1:]))


def _both(spread: Spread, digits: int) -> tuple[str, str]:
    """Return a median and its range."""
    return (
        f"{spread.median:,.{digits}f}",
        f"{spread.low:,.{digits}f}-{spread.high:,.{digits}f}",
    )


def _size(nbytes: float) -> str:
    if not nbytes:
        return "-"
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
