"""``predict``: a trained network's outputs, and how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.show import number
from dnictl.terminal import answered, noted, tell

if TYPE_CHECKING:
    from dni_runtime.measure.predictions import Predictions

_MOST_CLASSES = 1000  # of a confusion matrix in JSON


@click.command()
@click.argument(
    "target", required=False, metavar="[MODEL|RUN]", shell_complete=options.complete_runs
)
@options.runs
@click.option(
    "--data", metavar="YAML",
    help="Other data: a data set's name, a path, or keys of the chain's 'data' (labels: none: "
    "it has none). Its evaluation samples are taken.",
)  # fmt: skip
@click.option("-o", "--output", type=options.OutputFile(ending=".npz"), metavar="FILE.npz",
              help="Write arrays 'outputs' and 'labels' to this file.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--metrics", metavar="NAMES", help="Instead of the chain's, as in the chain file.")
@click.option("--confusion", type=options.OutputFile(), metavar="FILE.png",
              help="Draw the confusion matrix.")  # fmt: skip
@options.cut
@options.trust
@options.json
def predict(
    target: str | None,
    runs: Path,
    data: str | None,
    output: Path | None,
    force: bool,
    metrics: str | None,
    confusion: Path | None,
    cut: str | None,
) -> None:
    """Apply a trained network to data, in this process.

    MODEL is a file that 'dnictl export' wrote, RUN a run (by default the latest), whose own test
    or evaluation samples are the data unless --data names others. With labels, loss and metrics are
    printed; --json also has the confusion matrix, a row for each label.

    \b
    Examples:
      dnictl predict -o predictions.npz --confusion confusion.png
      dnictl predict model.safetensors --data '{dataset: npz, path: new.npz}' --metrics accuracy
    """
    from dni_runtime.api.checkpointed import predict_model
    from dnictl.split import mapping

    if output is not None:
        options.check_new(output, force)
    others = mapping(data, "--data") if data is not None and "{" in data else data
    document: dict[str, Any] = {}
    if target is not None and Path(target).is_file():
        if cut is not None:
            raise UsageError("--from is for runs", hint=f"{target!r} is a file")
        document["model"] = target
        found = predict_model(Path(target), others, trust=bool(noted("trust")))
    else:
        its = options.chosen_run(target, runs)
        document["run"], document["checkpoint"] = its.name, its.choose_cut(cut)
        found = its.predict(others, document["checkpoint"])
    document |= {"samples": len(found.outputs), "shape": list(found.outputs.shape[1:])}
    if output is not None:  # whatever is wrong with the labels
        found.save(output)
    known = found.labels is not None and found.loss is not None
    result = found.evaluate(_names(metrics)) if known else None
    document |= {"file": str(output) if output else None, "evaluation": result}
    if not answered(document | {"confusion": _confusion(found)}):
        click.echo(f"{len(found.outputs)} samples" + (f", wrote {output}" if output else ""))
        if result is not None:
            click.echo(", ".join(f"{name} {number(value)}" for name, value in result.items()))
    if confusion is not None:  # last: what has been computed is not lost for want of a picture
        from dni_runtime.measure.curves import save_figure

        save_figure(found.plot(), confusion)
        tell(f"wrote {confusion}")


def _names(text: str | None) -> list[Any] | None:
    from dni_runtime.spec.load import parse_yaml

    return None if text is None else list(parse_yaml(f"[{text}]", "--metrics")[0])


def _confusion(found: Predictions) -> list[list[int]] | None:
    """Return the confusion matrix, if there are classes, and not as many as words of a language."""
    if found.classes is None or found.classes > _MOST_CLASSES:
        return None
    matrix: list[list[int]] = found.confusion().tolist()
    return matrix
