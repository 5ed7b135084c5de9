"""A PyTorch network taken apart into the modules of a chain: ``split``, ``balance``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import SpecError, UsageError
from dnictl import options
from dnictl.show import Column, documents, megabytes, print_table, quantity
from dnictl.terminal import answered, tell

if TYPE_CHECKING:
    from dni_runtime.split.part import NetworkPart

balance_option = click.option(
    "--balance", type=click.Choice(["time", "memory", "both"]), default="time", show_default=True,
    help="What is equal among the modules.",
)  # fmt: skip
links_option = click.option(
    "--links", type=click.Choice(["fast", "slow"]), default="fast", show_default=True,
    help="Links between them: of 1 GB/s, or of 100 Mbit/s.",
)  # fmt: skip


def mapping(text: str, option: str) -> dict[str, Any]:
    """Return what an option says in YAML."""
    from dni_runtime.spec.load import parse_yaml

    try:
        value = parse_yaml(text, option)[0]
    except SpecError as error:
        raise UsageError(f"{option} {text!r}: {error.message}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} {text!r} is not a mapping", hint=f"{option} '{{key: value}}'")
    return value


@click.command()
@click.argument("target", metavar="PACKAGE.MODULE:NAME")
@click.option("--args", "args", metavar="YAML", help="Keyword arguments of NAME.")
@click.option("--data", metavar="YAML",
              help="The data set's name, or keys of the chain's 'data'.")  # fmt: skip
@click.option("--modules", "-n", type=click.IntRange(1, 1024), default=2, show_default=True,
              help="Number of modules.")  # fmt: skip
@click.option("--at", metavar="NAMES", help="Cut after these modules of the network instead.")
@balance_option
@links_option
@click.option("--takes", metavar="NAMES",
              help="Arguments of forward for the data's inputs, in their order.")  # fmt: skip
@click.option("--returns", metavar="PATH",
              help="What to take of forward's result: logits, 0, outputs.0.logits.")  # fmt: skip
@click.option("--weights", type=options.PATH, metavar="FILE",
              help="State dict to start from (.safetensors or torch.save).")  # fmt: skip
@click.option("--freeze", metavar="NAMES",
              help="Modules or parameters of the network that are not trained.")  # fmt: skip
@click.option("--interface", metavar="YAML", help="Gradient interface of all modules.")
@click.option("--settings", type=options.THERE, metavar="FILE",
              help="Chain file whose settings are taken where none are given here.")  # fmt: skip
@click.option("--output", "-o", type=options.OutputFile(), default=Path("chain.yaml"),
              show_default=True, metavar="PATH", help="The chain file.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace any chain file.")
@options.json
def split(target: str, output: Path, **values: Any) -> None:
    """Take a PyTorch network apart into the modules of a chain.

    NAME is a function or class that returns the network, in a file beside the chain file or in an
    installed package. It is traced by torch.export, measured here, and cut where its modules are
    balanced and little is sent. The chain file refers to your source; the weights lie beside it.

    \b
    Examples:
      dnictl split torchvision.models:resnet18 --args '{num_classes: 10}' --data cifar10 -n 4
      dnictl split nets:build --data cifar10 --at layer2,layer3
    """
    from dni_runtime.plan.splitting import settings_of, split_chain
    from dni_runtime.resolve.advice import RECIPE
    from dni_runtime.split.part import doubt

    file = values.pop("settings")
    settings = settings_of(file) if file is not None else {}
    data, configured = values.pop("data"), settings.get("data")
    if data is None and configured is None:
        raise UsageError("no data is named", hint="--data mnist, or a 'data' in --settings FILE")
    if data is not None:
        settings["data"] = {**(configured if isinstance(configured, dict) else {}), **_data(data)}
    args = values.pop("args")
    taken = split_chain(
        target,
        output,
        settings,
        args=mapping(args, "--args") if args else {},
        **values,
    )
    parts, warning = taken.parts, doubt(taken.parts)
    written = {"file": str(output), "weights": str(taken.weights)}
    if answered({**written, "modules": list(map(_document, parts)), "warning": warning}):
        return
    click.echo(str(parts))
    click.echo(f"wrote {output} and {taken.weights}")
    if warning is not None:
        click.secho(warning, err=True, fg="yellow")
    if any(part.because != "asked" for part in parts[:-1]):
        tell(
            "gradient interfaces as measured for such layers; your own check: "
            f"dnictl compare {output}"
        )
    if any(part.because == "attention" for part in parts) and "groups" not in settings.get(
        "defaults", {}
    ):
        tell(f"attention from random weights learns best with, in 'defaults': {RECIPE}")
    tell("in parts, the network computes what it computes as a whole: checked")
    tell(f"next: dnictl validate {output} && dnictl up {output}")


@click.command()
@click.argument(
    "target", required=False, metavar="[CHAIN|RUN]", shell_complete=options.complete_runs
)
@options.runs
@balance_option
@links_option
@click.option("--apply", "apply_it", is_flag=True, help="Write better cuts to the chain file.")
@click.option("--output", "-o", type=options.OutputFile(), metavar="PATH",
              help="Write them to this file beside it.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace any chain file.")
@options.trust
@options.json
def balance(
    target: str | None,
    runs: Path,
    balance: Any,
    links: str,
    apply_it: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Find better cuts for a network that has been taken apart.

    For a run (by default the latest), by the time of a batch that each module has measured where it
    runs: a module on a slow node gets less. For a chain file, by the times on this machine.

    \b
    Example:
      dnictl balance                       # how good the cuts of the latest run are
      dnictl stop && dnictl balance --apply && dnictl up --carry RUN
    """
    from dni_runtime.plan.balancing import balance_chain

    if apply_it and output is not None:
        raise UsageError("--apply and --output exclude each other", hint="give one of them")
    run = None
    if target is not None and Path(target).is_file():
        proposal = balance_chain(Path(target), balance, links)
    else:
        run = options.chosen_run(target, runs)
        proposal = run.balance(balance, links)
    writes = output is not None or (apply_it and proposal.worthwhile)
    written = proposal.write(output, force=force) if writes else None
    recut = proposal.recut
    parts, better, seconds = recut.parts, recut.better, recut.seconds
    columns: list[Column[int]] = [
        Column("module", lambda n: parts[n].name),
        Column("host", lambda n: proposal.hosts[n], lambda host: host or "?"),
        Column("until", lambda n: parts[n].until, _end),
        Column("better_until", lambda n: better[n].until, _end, title="better"),
        Column("seconds", lambda n: seconds[n], title=""),
        Column("measured", lambda n: proposal.measured[n], title=""),
        quantity(
            "ms a batch",
            lambda n: f"{1e3 * seconds[n]:.1f}{'' if proposal.measured[n] else ' (estimated)'}",
            in_json=False,
        ),
        quantity(
            "better_seconds",
            lambda n: recut.better_seconds[n],
            lambda each: f"{1e3 * each:.1f}",
            title="better ms",
        ),
        quantity("memory_bytes", lambda n: parts[n].memory, megabytes, title="memory"),
        quantity(
            "better_memory_bytes", lambda n: better[n].memory, megabytes, title="better memory"
        ),
        Column("parameters", lambda n: parts[n].numbers, title=""),
        Column("better_parameters", lambda n: better[n].numbers, title=""),
    ]
    rows = range(len(parts))
    if answered({
        "modules": documents(columns, rows), "faster": proposal.faster,
        "worthwhile": proposal.worthwhile, "file": None if written is None else str(written),
    }):  # fmt: skip
        return
    print_table(columns, rows)
    click.echo(
        f"the slowest module takes {1e3 * max(seconds):.1f} ms for a batch; with better cuts "
        f"{1e3 * max(recut.better_seconds):.1f} ms: {proposal.faster:.2f} times as many batches"
        if proposal.worthwhile
        else "the cuts are as good as they can be, within 5 %"
        + (": nothing is written" if apply_it else "")
    )
    if not any(proposal.measured):
        tell("times were measured on this machine, not in a run")
    if written is not None:
        click.echo(f"wrote {written}")
        carry = f" --carry {run.name}" if run is not None else ""
        tell(f"next: dnictl up {written}{carry} (in containers after 'dnictl build')")


def _end(name: str | None) -> str:
    return name or "the end"


def _document(part: NetworkPart) -> dict[str, Any]:
    return {
        "module": part.name, "after": part.after, "until": part.until,
        "inputs": list(part.inputs or ()), "output": " and ".join(map(str, part.outputs)),
        "parameters": part.numbers, "seconds": part.seconds, "interface_seconds": part.interface_s,
        "memory_bytes": part.memory, "sends_bytes": part.sends,
        "interface": part.interface and part.interface.name, "because": part.because,
    }  # fmt: skip


def _data(text: str) -> dict[str, Any]:
    return {"dataset": text} if "{" not in text and "\n" not in text else mapping(text, "--data")
