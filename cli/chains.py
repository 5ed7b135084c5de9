"""Commands on chain files: ``init``, ``validate``, ``config``, ``schema``."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from dni_runtime.errors import UsageError
from dnictl.options import chain_argument, data_option, json_option, print_json


def _templates() -> list[str]:
    folder = files("dni_runtime.definitions") / "chains"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _files(template: str, path: Path) -> dict[Path, str]:
    """Return a template's files: the chain file, and programs beside it."""
    folder = files("dni_runtime.definitions") / "chains"
    found = {path: (folder / f"{template}.yaml").read_text("utf-8")}
    beside = folder / template
    if beside.is_dir():
        programs = sorted(entry.name for entry in beside.iterdir() if entry.name.endswith(".py"))
        found |= {path.parent / name: (beside / name).read_text("utf-8") for name in programs}
    return found


@click.command()
@click.option(
    "--template", "-t", type=click.Choice(_templates()), default="mlp", show_default=True,
    help="What to start from.",
)  # fmt: skip
@click.argument(
    "path", type=click.Path(path_type=Path), default=Path("chain.yaml"), metavar="[PATH]"
)
def init(template: str, path: Path) -> None:
    """Write a first chain file to PATH (chain.yaml).

    mlp and cnn are small networks on the digits in this package, fashion-mlp and fashion-cdni
    (synthetic gradients alone) larger ones on Fashion-MNIST. lm is a small language model, with
    its layers (lm.py) and a program that generates text (generate.py) beside PATH. resnet, vit, gpt
    and two-tower are networks in plain PyTorch, in a file beside PATH, taken apart.

    \b
    Example:
      dnictl init --template cnn
    """
    texts = _files(template, path)
    for target in texts:
        if target.exists():
            hint = "remove it, or name another file" if target == path else "name another folder"
            raise UsageError(f"{str(target)!r} already exists", hint=hint)
    for target, text in texts.items():
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UsageError(f"{str(target)!r} cannot be written: {error.strerror}") from None
        click.echo(f"wrote {target}")
    click.echo(f"next: dnictl validate {path} && dnictl up {path}", err=True)


@click.command()
@chain_argument
@data_option
@json_option
def validate(chain: Path, data: Path | None, as_json: bool) -> None:
    """Check a chain file: names, keywords, shapes, data; and try it on a few samples of the data.

    \b
    Example:
      dnictl validate chain.yaml
    """
    from dni_runtime.launch.prepare import prepare

    prepared, looked = (done := prepare(chain, data=data)), done.looked
    assert looked is not None
    from dni_runtime.core.advice import advice
    from dni_runtime.core.resolve import parameter_counts
    from dni_runtime.launch.host import exposure

    warnings = [*advice(prepared.workers), *filter(None, [exposure(prepared.chain)])]
    counts = parameter_counts(prepared.workers)
    given = prepared.chain.losses
    losses = " + ".join(one.loss.name for one in given) if given else prepared.chain.loss.name
    rows: list[dict[str, Any]] = [
        {
            "module": worker.module,
            "input": " and ".join(map(str, worker.arguments)),
            "inputs": list(module.inputs or [edge.source for edge in worker.sources]),
            "output": " and ".join(map(str, worker.outputs or (worker.output,))),
            "parameters": counts[worker.module],
            "replicas": worker.replicas,
            "interface": worker.interface.name if worker.interface else None,
            "device": worker.device,
            "hash": worker.hash,
        }
        for worker, module in zip(prepared.workers, prepared.chain.modules, strict=True)
    ]
    if as_json:
        print_json(
            {
                "chain": prepared.chain.name,
                "file": str(chain),
                "valid": True,
                "parameters": sum(counts.values()),
                "batches_per_epoch": prepared.batches_per_epoch,
                "total_steps": prepared.total_steps,
                "warnings": warnings,
                "checked": looked.checked,
                "unchecked": looked.unchecked,
                "modules": rows,
            }
        )
        return
    from dnictl.show import print_table

    plain = prepared.chain.graph.is_chain
    others = [] if plain else ["from"]
    replicated = any(row["replicas"] > 1 for row in rows)
    others += ["replicas"] if replicated else []
    print_table(
        ["module", *others, "input", "output", "parameters", "interface", "device"],
        [
            [
                row["module"], *([] if plain else [", ".join(row["inputs"])]),
                *([str(row["replicas"])] if replicated else []), row["input"],
                row["output"], f"{row['parameters']:,}",
                row["interface"] or f"loss: {losses}", row["device"],
            ]
            for row in rows
        ],
        right={"parameters", "replicas"},
    )  # fmt: skip
    click.echo(
        f"{chain}: chain {prepared.chain.name!r} is valid, {len(rows)} modules, "
        f"{sum(counts.values()):,} parameters"
    )
    click.echo(f"checked: {'; '.join(looked.checked)}")
    for clause in looked.unchecked:
        click.secho(f"not checked: {clause}", err=True, fg="yellow")
    for warning in warnings:
        click.secho(f"warning: {warning}", err=True, fg="yellow")


@click.command()
@chain_argument
@data_option
@json_option
def config(chain: Path, data: Path | None, as_json: bool) -> None:
    """Print a chain file with all defaults filled in.

    \b
    Example:
      dnictl config chain.yaml > resolved.yaml
    """
    from dni_runtime.launch.prepare import prepare

    document = prepare(chain, data=data, tries=False).chain.model_dump(mode="json")
    if as_json:
        print_json(document)
        return
    import yaml

    click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)


@click.command()
def schema() -> None:
    """Print the JSON Schema of chain files, for editors.

    \b
    Example:
      dnictl schema > chain.schema.json
      # first line of chain.yaml, for editors with the YAML language server:
      # yaml-language-server: $schema=chain.schema.json
    """
    from dni_runtime.core.schema import json_schema

    print_json(json_schema())
