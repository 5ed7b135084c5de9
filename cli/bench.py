"""``bench module``: what the parts of each module's step cost on this machine."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dnictl.options import chain_argument, data_option, json_option, print_json

if TYPE_CHECKING:
    from dni_runtime.bench.module import ModuleCost


@click.group()
def bench() -> None:
    """Measure modules on this machine.

    \b
    Example:
      dnictl bench module chain.yaml   which module is the slowest, and why
    """


@bench.command()
@chain_argument
@click.option("--module", "-m", "modules", multiple=True, metavar="NAME",
              help="Only this module (may be given more than once).")  # fmt: skip
@click.option("--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Number of measurements, in turns; figures are medians.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=0.5, show_default=True,
              help="Shortest time of one measurement.")  # fmt: skip
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
    from dni_runtime.bench.module import measure_modules
    from dni_runtime.launch.prepare import prepare

    prepared = prepare(chain, data=data)
    costs = measure_modules(
        prepared, modules, repetitions=repetitions, seconds=seconds,
        observe=None if as_json else partial(click.echo, err=True),
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


def _print_modules(costs: list[ModuleCost]) -> None:
    from dnictl.show import print_table

    columns = [
        "module", "forward", "backward", "signal", "learn", "step, µs", "range", "interface",
        "parameters", "+ interface", "sends", "returns",
    ]  # fmt: skip
    print_table(
        columns,
        [
            [
                cost.module,
                *(f"{one.median:,.0f}" for one in (cost.forward_us, cost.backward_us)),
                f"{cost.signal_us.median:,.0f}" if cost.signal_us.median else "-",
                _learn(cost),
                f"{cost.step_us.median:,.0f}",
                f"{cost.step_us.low:,.0f}-{cost.step_us.high:,.0f}",
                f"{100 * cost.interface_share:.0f} %",
                f"{cost.parameters:,}",
                f"{cost.interface_parameters:,}",
                _size(cost.down_bytes),
                _size(cost.up_bytes),
            ]
            for cost in costs
        ],
        right=set(columns[1:]),
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


def _size(nbytes: float) -> str:
    if not nbytes:
        return "-"
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
