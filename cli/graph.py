"""``dnictl graph``: the modules of a chain and their links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dnictl.options import chain_argument, data_option

if TYPE_CHECKING:
    from dni_runtime.spec import EdgeSpec, WorkerSpec


@click.command()
@chain_argument
@data_option
@click.option("--format", "-f", "kind", type=click.Choice(["text", "mermaid"]),
              default="text", show_default=True, help="What to print.")  # fmt: skip
def graph(chain: Path, data: Path | None, kind: str) -> None:
    """Draw a chain's modules and links.

    \b
    Example:
      dnictl graph chain.yaml -f mermaid
    """
    from dni_runtime.core.resolve import parameter_counts
    from dni_runtime.launch.prepare import prepare

    workers = prepare(chain, data=data, tries=False).workers
    draw = _mermaid if kind == "mermaid" else _text
    for line in draw(workers, parameter_counts(workers)):
        click.echo(line)


def _says(worker: WorkerSpec, counts: dict[str, int]) -> str:
    learns = worker.interface.name if worker.interface is not None else "loss"
    replicas = f", {worker.replicas} replicas" if worker.replicas > 1 else ""
    return f"{counts[worker.module]:,} parameters, {learns}{replicas}"


def _carries(edge: EdgeSpec) -> str:
    return " + ".join(map(str, edge.outputs or ((edge.tensor,) if edge.tensor else ()))) + (
        " + data" * bool(edge.data)
    )


def _text(workers: Sequence[WorkerSpec], counts: dict[str, int]) -> Iterator[str]:
    for worker in workers:
        yield f"{worker.module}  ({_says(worker, counts)})"
        for edge in worker.targets:
            mark = "└" if edge is worker.targets[-1] else "├"
            yield f"  {mark}─ {_carries(edge).removeprefix(' + ')} → {edge.target}"


def _mermaid(workers: Sequence[WorkerSpec], counts: dict[str, int]) -> Iterator[str]:
    yield "flowchart TD"
    for worker in workers:
        yield f'  {worker.module}["{worker.module}<br>{_says(worker, counts)}"]'
    for worker in workers:
        for edge in worker.targets:
            carried = _carries(edge).removeprefix(" + ")
            yield f'  {worker.module} -->|"{carried}"| {edge.target}'
