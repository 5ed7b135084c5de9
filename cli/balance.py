"""``dnictl balance``: better cuts for a network that has been taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dni_runtime.errors import UsageError
from dnictl.options import (
    chosen_run,
    complete_runs,
    json_option,
    print_json,
    runs_option,
    trust_option,
)


@click.command()
@click.argument("target", required=False, metavar="[CHAIN|RUN]", shell_complete=complete_runs)
@runs_option
@click.option("--balance", type=click.Choice(["time", "memory", "both"]), default="time",
              show_default=True, help="What is equal among the modules.")  # fmt: skip
@click.option("--links", type=click.Choice(["fast", "slow"]), default="fast", show_default=True,
              help="Links between them: of 1 GB/s, or of 100 Mbit/s.")  # fmt: skip
@click.option("--apply", "apply_it", is_flag=True, help="Write better cuts to the chain file.")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="PATH",
              help="Write them to this file beside it.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace any chain file.")
@trust_option
@json_option
def balance(
    target: str | None,
    runs: Path,
    balance: Any,
    links: str,
    apply_it: bool,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Find better cuts for a network that has been taken apart.

    For a run (by default the latest), by the time of a batch that each module has measured where it
    runs: a module on a slow node gets less. For a chain file, by the times on this machine.

    \b
    Example:
      dnictl balance                       # how good the cuts of the latest run are
      dnictl stop && dnictl balance --apply && dnictl up --carry RUN
    """
    from dni_runtime.launch.balancing import balance_chain

    if apply_it and output is not None:
        raise UsageError("--apply and --output exclude each other", hint="give one of them")
    run = None
    if target is not None and Path(target).is_file():
        found = balance_chain(Path(target), balance, links)
    else:
        run = chosen_run(target, runs)
        found = run.balance(balance, links)
    wanted = output is not None or (apply_it and found.worthwhile)
    written = found.write(output, force=force) if wanted else None
    recut, parts = found.recut, zip(found.recut.parts, found.recut.better, strict=True)
    rows = [
        {
            "module": part.name,
            "host": found.hosts[number],
            "until": part.until,
            "better_until": better.until,
            "seconds": recut.seconds[number],
            "better_seconds": recut.better_seconds[number],
            "measured": found.measured[number],
            "memory_bytes": part.memory,
            "better_memory_bytes": better.memory,
            "parameters": part.numbers,
            "better_parameters": better.numbers,
        }
        for number, (part, better) in enumerate(parts)
    ]
    if as_json:
        print_json({
            "modules": rows, "faster": found.faster, "worthwhile": found.worthwhile,
            "file": None if written is None else str(written),
        })  # fmt: skip
        return
    _print(rows)
    click.echo(
        f"the slowest module takes {1e3 * max(recut.seconds):.1f} ms for a batch; with better cuts "
        f"{1e3 * max(recut.better_seconds):.1f} ms: {found.faster:.2f} times as many batches"
        if found.worthwhile
        else "the cuts are as good as they can be, within 5 %"
        + (": nothing is written" if apply_it else "")
    )
    if not any(found.measured):
        click.echo("times were measured on this machine, not in a run", err=True)
    if written is not None:
        click.echo(f"wrote {written}")
        carry = f" --carry {run.name}" if run is not None else ""
        click.echo(
            f"next: dnictl up {written}{carry} (in containers after 'dnictl build')", err=True
        )


def _print(rows: list[dict[str, Any]]) -> None:
    from dnictl.show import print_table

    print_table(
        ["module", "host", "until", "better", "ms a batch", "better ms", "memory", "better memory"],
        [
            [
                row["module"], row["host"] or "?", row["until"] or "the end",
                row["better_until"] or "the end",
                f"{1e3 * row['seconds']:.1f}{'' if row['measured'] else ' (estimated)'}",
                f"{1e3 * row['better_seconds']:.1f}",
                f"{row['memory_bytes'] / 1e6:.0f} MB", f"{row['better_memory_bytes'] / 1e6:.0f} MB",
            ]
            for row in rows
        ],
        right={"ms a batch", "better ms", "memory", "better memory"},
    )  # fmt: skip
