"""``dnictl split``: a PyTorch network taken apart into the modules of a chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dni_runtime.errors import SpecError, UsageError
from dnictl.options import json_option, print_json


def _mapping(text: str, option: str) -> dict[str, Any]:
    from dni_runtime.spec.load import parse_yaml

    try:
        found = parse_yaml(text, option)[0]
    except SpecError as error:
        raise UsageError(f"{option} {text!r}: {error.message}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{option} {text!r} is not a mapping", hint=f"{option} '{{key: value}}'")
    return found


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip()) if text else ()


@click.command()
@click.argument("target", metavar="PACKAGE.MODULE:NAME")
@click.option("--args", "args", metavar="YAML", help="Keyword arguments of NAME.")
@click.option("--data", metavar="YAML",
              help="The data set's name, or keys of the chain's 'data'.")  # fmt: skip
@click.option("--modules", "-n", type=click.IntRange(1, 1024), default=2, show_default=True,
              help="Number of modules.")  # fmt: skip
@click.option("--at", metavar="NAMES", help="Cut after these modules of the network instead.")
@click.option("--balance", type=click.Choice(["time", "memory", "both"]), default="time",
              show_default=True, help="What is equal among the modules.")  # fmt: skip
@click.option("--links", type=click.Choice(["fast", "slow"]), default="fast", show_default=True,
              help="Links between them: of 1 GB/s, or of 100 Mbit/s.")  # fmt: skip
@click.option("--takes", metavar="NAMES",
              help="Arguments of forward for the data's inputs, in their order.")  # fmt: skip
@click.option("--returns", metavar="PATH",
              help="What to take of forward's result: logits, 0, outputs.0.logits.")  # fmt: skip
@click.option("--weights", type=click.Path(path_type=Path), metavar="FILE",
              help="State dict to start from (.safetensors or torch.save).")  # fmt: skip
@click.option("--interface", metavar="YAML", help="Gradient interface of all modules.")
@click.option("--settings", type=click.Path(path_type=Path, exists=True), metavar="FILE",
              help="Chain file whose settings are taken where none are given here.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path), default=Path("chain.yaml"),
              show_default=True, metavar="PATH", help="The chain file.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace any chain file.")
@json_option
def split(target: str, output: Path, as_json: bool, **options: Any) -> None:
    """Take a PyTorch network apart into the modules of a chain.

    NAME is a function or class that returns the network, in a file beside the chain file or in an
    installed package. It is traced by torch.export, measured here, and cut where its modules are
    balanced and little is sent. The chain file refers to your source; the weights lie beside it.

    \b
    Examples:
      dnictl split torchvision.models:resnet18 --args '{num_classes: 10}' --data cifar10 -n 4
      dnictl split nets:build --data cifar10 --at layer2,layer3
    """
    from dni_runtime.launch.splitting import settings_of, split_chain
    from dni_runtime.split.part import doubt

    given = options.pop("settings")
    settings = settings_of(given) if given is not None else {}
    data, own = options.pop("data"), settings.get("data")
    if data is None and own is None:
        raise UsageError("no data is named", hint="--data mnist, or a 'data' in --settings FILE")
    if data is not None:
        settings["data"] = {**(own if isinstance(own, dict) else {}), **_data(data)}
    args = options.pop("args")
    taken = split_chain(
        target,
        output,
        settings,
        args=_mapping(args, "--args") if args else {},
        at=_names(options.pop("at")),
        takes=_names(options.pop("takes")),
        **options,
    )
    rows: list[dict[str, Any]] = [
        {
            "module": part.name,
            "after": part.after,
            "until": part.until,
            "inputs": list(part.inputs or ()),
            "output": " and ".join(map(str, part.outputs)),
            "parameters": part.numbers,
            "seconds": part.seconds,
            "interface_seconds": part.interface_s,
            "memory_bytes": part.memory,
            "sends_bytes": part.sends,
            "interface": part.interface.name if part.interface is not None else None,
            "because": part.because,
        }
        for part in taken.parts
    ]
    warning = doubt(taken.parts)
    if as_json:
        found = {"file": str(output), "weights": str(taken.weights), "modules": rows}
        print_json({**found, "warning": warning})
        return
    from dnictl.show import print_table

    total = sum(part.busy_s for part in taken.parts)
    print_table(
        ["module", "until", "parameters", "ms a batch", "share", "memory", "sends", "interface"],
        [
            [
                row["module"], row["until"] or "the end", f"{row['parameters']:,}",
                f"{1e3 * part.seconds:.0f} + {1e3 * part.interface_s:.0f}",
                f"{part.busy_s / total:.0%}",
                f"{part.memory / 1e6:.0f} MB", f"{part.sends / 1e6:.1f} MB",
                _interface(row),
            ]
            for row, part in zip(rows, taken.parts, strict=True)
        ],
        right={"parameters", "ms a batch", "share", "memory", "sends"},
    )  # fmt: skip
    click.echo(f"wrote {output} and {taken.weights}")
    if warning is not None:
        click.secho(warning, err=True, fg="yellow")
    if any(part.because != "asked" for part in taken.parts[:-1]):
        click.echo(
            "interfaces as measured for such layers (docs/results.md); your own check: "
            f"dnictl compare {output}",
            err=True,
        )
    click.echo("in parts, the network computes what it computes as a whole: checked", err=True)
    click.echo(f"next: dnictl validate {output} && dnictl up {output}", err=True)


def _interface(row: dict[str, Any]) -> str:
    if row["interface"] is None:
        return "loss"
    known = row["because"] in ("asked", "default")
    return str(row["interface"]) if known else f"{row['interface']}: {row['because']}"


def _data(text: str) -> dict[str, Any]:
    return {"dataset": text} if "{" not in text and "\n" not in text else _mapping(text, "--data")
