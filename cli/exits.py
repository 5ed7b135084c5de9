"""``exits``: which samples an early head can answer, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.show import Column, percent, print_table, quantity, thousands
from dnictl.terminal import answered

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.run.documents.exits import Exit, Exits

_TYPES = ("float32", "bfloat16", "int8")  # on the wire; the others have the same sizes
_SUMMARY = {
    "holds": "the promise holds there",
    "broken": "the promise is broken there",
    "not shown": "too few samples to show that the promise holds",
}


@click.command()
@options.of_run
@click.option(
    "--exit-accuracy", "points", type=click.FloatRange(0, 100, min_open=True), default=0.5,
    show_default=True, metavar="POINTS", help="Points of accuracy that the whole may lose.",
)  # fmt: skip
@click.option("--exit-confidence", "confidence", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Instead of that: the top probability at which samples leave.")  # fmt: skip
@click.option("--retrain", is_flag=True, help="Fit new early heads to the finished modules.")
@click.option("--figure", type=options.OutputFile(), metavar="FILE.png",
              help="Draw how sure and how right the exits are.")  # fmt: skip
@options.cut
@options.trust
@options.json
def exits(
    run: Run,
    points: float,
    confidence: float | None,
    retrain: bool,
    figure: Path | None,
    cut: str | None,
) -> None:
    """Measure a trained chain's early exits, and choose who leaves.

    The early heads of a chain ('mixed', 'local' or 'corrected' gradients) predict its output. A
    sample leaves at the first head that is sure enough: half of the validation samples choose how
    sure, the others check it. The result is written into the run; 'dnictl export' puts it beside
    the model, too.

    \b
    Example:
      dnictl exits --exit-accuracy 0.5 --figure exits.png
    """
    if len(given := options.flags_given("points", "confidence")) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other")
    document = run.exits(run.choose_cut(cut), points=points, confidence=confidence, retrain=retrain)
    for problem in _warnings(document):
        click.secho(f"warning: {problem}", err=True, fg="yellow")
    if not answered({"run": run.name, **document.model_dump(mode="json")}):
        _print(document)
        click.echo(f"wrote {run.directory.exits}")
    if figure is not None:  # last: what has been computed is not lost for want of a picture
        from dni_runtime.measure.curves import save_figure
        from dni_runtime.measure.exits import draw_exits

        save_figure(draw_exits(run.name, document), figure)


def _warnings(document: Exits) -> Iterator[str]:
    if not document.held_out:
        yield (
            "the chain has no 'data.validation': its evaluation samples chose the thresholds, so "
            "they are no test of them"
        )
    for exit in document.exits[:-1]:
        if exit.sends["float32"] > document.input_bytes["float32"]:
            yield (
                f"what {exit.module!r} sends is larger than the input: samples that go on from "
                "there cost more bytes than the input itself"
            )


def _print(document: Exits) -> None:
    rule = document.rules[0]
    share = partial(percent, digits=1)
    columns: list[Column[tuple[Exit, float, float | None]]] = [
        Column("exit", lambda row: row[0].module),
        quantity("accuracy", lambda row: row[0].accuracy, share),
        quantity("agrees", lambda row: row[0].agreement, share),
        quantity("confidence", lambda row: row[2], lambda it: "-" if it is None else f"{it:.4f}"),
        quantity("leave", lambda row: row[1], share),
        quantity("sends", lambda row: row[0].sends, _sizes, title=f"sends {'/'.join(_TYPES)}"),
    ]
    print_table(columns, zip(document.exits, rule.leave, (*rule.thresholds, None), strict=True))
    click.echo(f"bytes of a sample; the input has {_sizes(document.input_bytes)}")
    low, lost, high = rule.lost
    if all(threshold is None for threshold in rule.thresholds):
        click.echo(
            f"no sample leaves: {document.samples // 2} samples cannot show that at most "
            f"{rule.points:g} points are lost; raise 'data.validation', or allow more"
        )
        return
    checked = document.samples - document.samples // 2
    click.echo(
        f"{share(1 - rule.leave[-1])} leave early; points of accuracy lost by that on {checked} "
        f"samples that had no part in the choice: {lost:.2f} (95 %: {low:.2f} to {high:.2f})"
        + ("" if rule.points is None else f" of {rule.points:g}: {_SUMMARY[rule.verdict]}")
    )


def _sizes(sizes: dict[str, int]) -> str:
    return "/".join(thousands(sizes[dtype]) for dtype in _TYPES) if sizes["int8"] else "-"
