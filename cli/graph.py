"""``dnictl graph``: the modules of a chain and their links, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import click

from dnictl.options import chain_argument, data_option

if TYPE_CHECKING:
    from dni_runtime.spec import EdgeSpec, WorkerSpec

_WIDTH, _HEIGHT, _GAP, _BEND = 240, 52, 44, 70
"""Size of a box, the space between two, and how far a skip bends, in pixels."""


@click.command()
@chain_argument
@data_option
@click.option("--format", "-f", "kind", type=click.Choice(["text", "mermaid", "svg"]),
              default="text", show_default=True, help="What to print.")  # fmt: skip
def graph(chain: Path, data: Path | None, kind: str) -> None:
    """Draw a chain's modules and links.

    \b
    Example:
      dnictl graph chain.yaml -f svg > chain.svg
    """
    from dni_runtime.core.resolve import parameter_counts
    from dni_runtime.launch.prepare import prepare

    workers = prepare(chain, data=data, tries=False).workers
    draw = {"text": _text, "mermaid": _mermaid, "svg": _svg}[kind]
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


def _svg(workers: Sequence[WorkerSpec], counts: dict[str, int]) -> Iterator[str]:
    """Yield boxes from top to bottom; links that skip some bend to the right."""
    places = {worker.module: number for number, worker in enumerate(workers)}
    step, longest = _HEIGHT + _GAP, max(
        (places[edge.target] - places[worker.module] for worker in workers
         for edge in worker.targets), default=1,
    )  # fmt: skip
    width, height = (
        _WIDTH + 20 + (_BEND * longest + 220 if longest > 1 else 200),
        step * len(places),
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>'
    )
    for worker in workers:
        top = 4 + step * places[worker.module]
        yield (
            f'<rect x="10" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#eef3fa" '
            'stroke="#4a6fa5"/>'
        )
        yield f'<text x="22" y="{top + 21}" font-weight="bold">{escape(worker.module)}</text>'
        yield f'<text x="22" y="{top + 39}">{escape(_says(worker, counts))}</text>'
        for edge in worker.targets:
            skipped = places[edge.target] - places[worker.module]
            low, carried = (
                4 + step * places[edge.target],
                escape(_carries(edge).removeprefix(" + ")),
            )
            if skipped == 1:
                line, x, y = f"M60 {top + _HEIGHT}V{low}", 70, low - _GAP // 2 + 4
            else:
                edge_x, out = 10 + _WIDTH, _BEND * (skipped - 1)
                line = (
                    f"M{edge_x} {top + 34}C{edge_x + out} {top + 34} {edge_x + out} {low + 18} "
                    f"{edge_x} {low + 18}"
                )
                x, y = edge_x + out * 3 // 4 + 8, (top + low) // 2 + 26
            yield f'<path d="{line}" fill="none" stroke="#333" marker-end="url(#end)"/>'
            yield f'<text x="{x}" y="{y}" fill="#555">{carried}</text>'
    yield "</svg>"
