"""Commands on chain files: ``init``, ``validate``, ``graph``, ``config``, ``schema``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.show import Column, documents, print_table, quantity, thousands
from dnictl.terminal import answered, print_json, tell

if TYPE_CHECKING:
    from dni_runtime.spec import EdgeSpec, WorkerSpec


def _templates() -> list[str]:
    names = (entry.name for entry in (files("dni_runtime.definitions") / "chains").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _files(template: str, path: Path) -> dict[Path, str]:
    """Return a template's files: the chain file, and programs beside it."""
    folder = files("dni_runtime.definitions") / "chains"
    texts = {path: (folder / f"{template}.yaml").read_text("utf-8")}
    beside = folder / template
    if beside.is_dir():
        programs = sorted(entry.name for entry in beside.iterdir() if entry.name.endswith(".py"))
        texts |= {path.parent / name: (beside / name).read_text("utf-8") for name in programs}
    return texts


@click.command()
@click.option(
    "--template", "-t", type=click.Choice(_templates()), default="mlp", show_default=True,
    help="What to start from.",
)  # fmt: skip
@click.argument("path", type=options.PATH, default=Path("chain.yaml"), metavar="[PATH]")
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
    tell(f"next: dnictl validate {path} && dnictl up {path}")


@click.command()
@options.chain
@options.data
@options.json
def validate(chain: Path, data: Path | None) -> None:
    """Check a chain file, and try it on a few samples of its data.

    Names, keywords, shapes and data are checked, as 'up' does.

    Shapes follow from the data: without them the exit code is 66, and only the file's keys and
    values have been checked.

    \b
    Example:
      dnictl validate chain.yaml
    """
    from dni_runtime.plan.prepare import prepare

    prepared = prepare(chain, data=data)
    looked = prepared.looked
    assert looked is not None
    from dni_runtime.plan.host import exposure, slow_bfloat16
    from dni_runtime.resolve.advice import advice
    from dni_runtime.resolve.resolve import parameter_counts

    workers = prepared.workers
    of_host = filter(None, [exposure(prepared.chain), slow_bfloat16(workers)])
    warnings = [*looked.warnings, *advice(workers), *of_host]
    counts = parameter_counts(workers)
    losses = [item.loss.name for item in prepared.chain.losses or ()]
    loss = " + ".join(losses) or prepared.chain.loss.name
    named = {module.name: module.inputs for module in prepared.chain.modules}
    columns: list[Column[WorkerSpec]] = [
        Column("module"),
        Column(
            "inputs",
            lambda w: list(named[w.module] or [edge.source for edge in w.sources]),
            ", ".join,
            title="" if prepared.chain.graph.is_chain else "from",
        ),
        quantity("replicas", title=None if any(w.replicas > 1 for w in workers) else ""),
        Column("input", lambda w: " and ".join(map(str, w.arguments)), _few),
        Column("output", lambda w: " and ".join(map(str, w.outputs or (w.output,))), _few),
        quantity("parameters", lambda w: counts[w.module], thousands),
        Column(
            "interface",
            lambda w: w.interface.name if w.interface else None,
            lambda name: name or f"loss: {loss}",
        ),
        Column("device"),
        Column("hash", title=""),
    ]
    if answered({
        "chain": prepared.chain.name, "file": str(chain), "valid": True,
        "parameters": sum(counts.values()), "batches_per_epoch": prepared.batches_per_epoch,
        "total_steps": prepared.total_steps, "warnings": warnings, "checked": looked.checked,
        "unchecked": looked.unchecked, "modules": documents(columns, workers),
    }):  # fmt: skip
        return
    print_table(columns, workers)
    click.echo(
        f"{chain}: chain {prepared.chain.name!r} is valid, {len(workers)} modules, "
        f"{sum(counts.values()):,} parameters"
    )
    click.echo(f"checked: {'; '.join(looked.checked)}")
    for clause in looked.unchecked:
        click.secho(f"not checked: {clause}", err=True, fg="yellow")
    for warning in warnings:
        click.secho(f"warning: {warning}", err=True, fg="yellow")


def _few(tensors: str) -> str:
    """Shorten a list of tensors: layers that are used twice lend dozens."""
    first, *more = tensors.split(" and ")
    return f"{first} and {len(more)} more" if len(more) > 2 else tensors


@click.command()
@options.chain
@options.data
@click.option("--format", "-f", "kind", type=click.Choice(["text", "mermaid"]),
              default="text", show_default=True, help="What to print.")  # fmt: skip
def graph(chain: Path, data: Path | None, kind: str) -> None:
    """Draw a chain's modules and links.

    \b
    Example:
      dnictl graph chain.yaml -f mermaid
    """
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.resolve.resolve import parameter_counts

    workers = prepare(chain, data=data, tries=False).workers
    for line in (_mermaid if kind == "mermaid" else _text)(workers, parameter_counts(workers)):
        click.echo(line)


def _says(worker: WorkerSpec, counts: dict[str, int]) -> str:
    learns = worker.interface.name if worker.interface is not None else "loss"
    replicas = f", {worker.replicas} replicas" if worker.replicas > 1 else ""
    return f"{counts[worker.module]:,} parameters, {learns}{replicas}"


def _carries(edge: EdgeSpec) -> str:
    tensors = edge.outputs or ((edge.tensor,) if edge.tensor else ())
    return " + ".join([*map(str, tensors), *(["data"] if edge.data else [])])


def _text(workers: Sequence[WorkerSpec], counts: dict[str, int]) -> Iterator[str]:
    for worker in workers:
        yield f"{worker.module}  ({_says(worker, counts)})"
        for edge in worker.targets:
            mark = "└" if edge is worker.targets[-1] else "├"
            yield f"  {mark}─ {_carries(edge)} → {edge.target}"


def _mermaid(workers: Sequence[WorkerSpec], counts: dict[str, int]) -> Iterator[str]:
    ids = {worker.module: f"m{number}" for number, worker in enumerate(workers, 1)}
    yield "flowchart TD"
    for worker in workers:  # by numbers: 'end' is a word of its own there
        yield f'  {ids[worker.module]}["{worker.module}<br>{_says(worker, counts)}"]'
    for worker in workers:
        for edge in worker.targets:
            yield f'  {ids[worker.module]} -->|"{_carries(edge)}"| {ids[edge.target]}'


@click.command()
@options.chain
@options.data
@options.json
def config(chain: Path, data: Path | None) -> None:
    """Print a chain file with all defaults filled in.

    \b
    Example:
      dnictl config chain.yaml > resolved.yaml
    """
    from dni_runtime.plan.prepare import prepare

    document = prepare(chain, data=data, tries=False).chain.model_dump(mode="json")
    if answered(document):
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
    from dni_runtime.resolve.schema import json_schema

    print_json(json_schema())
