"""Trainings whose results are kept in a file, so that what is there is not trained again."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def parser(description: str | None, results: Path) -> argparse.ArgumentParser:
    """What scripts that train the paper's network on MNIST have in common."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--layers", type=int, default=4, help="number of hidden layers")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, default=10)
    made.add_argument("--results", type=Path, default=results)
    made.add_argument("--mnist", help="folder of the four IDX files (default: fetched)")
    return made


def grid(arguments: argparse.Namespace, **values: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations of these values, for each seed."""
    same = {"layers": arguments.layers, "epochs": arguments.epochs}
    seeds = range(arguments.seeds)
    return [
        {**same, "seed": seed, **dict(zip(values, combination, strict=True))}
        for seed, *combination in itertools.product(seeds, *values.values())
    ]


def accuracies(
    path: Path, wanted: Iterable[dict[str, Any]], train: Callable[[dict[str, Any]], float]
) -> list[dict[str, Any]]:
    """The wanted trainings, each with its ``accuracy``: in per cent, given by ``train``."""
    return measured(path, wanted, lambda one: {"accuracy": train(one)})


def measured(
    path: Path,  # of JSON lines; made if it is missing
    wanted: Iterable[dict[str, Any]],  # what tells one training from another
    train: Callable[[dict[str, Any]], dict[str, Any]],  # results by name; in processes if jobs > 1
    jobs: int = 1,  # at a time
) -> list[dict[str, Any]]:
    """The wanted trainings, each with what was measured."""
    done = []
    if path.exists():
        done = [json.loads(line) for line in path.read_text().splitlines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = list(wanted)
    missing = [one for one in wanted if _known(one, done) is None]
    with _mapping(jobs) as map_:
        for one, found in zip(missing, map_(train, missing), strict=True):
            result = {**one, **found}
            done.append(result)
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), file=sys.stderr, flush=True)
    return [known for one in wanted if (known := _known(one, done)) is not None]


def _known(one: dict[str, Any], done: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((old for old in done if one.items() <= old.items()), None)


@contextmanager
def _mapping(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """``map``, or that of so many processes."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield pool.map


def cell(values: list[float]) -> str:
    """Mean and range of accuracies over the seeds, for a table."""
    if not values:
        return ""
    spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def table(
    corner: str, results: list[dict[str, Any]], row: str, column: str, value: str = "accuracy"
) -> str:
    """A value of results by two of their keys, over the seeds, as a Markdown table."""
    columns = list(dict.fromkeys(one[column] for one in results))
    lines = [
        f"| {corner} | {' | '.join(map(str, columns))} |",
        "|---|" + "---|" * len(columns),
    ]
    for name in dict.fromkeys(one[row] for one in results):
        cells = [
            cell([one[value] for one in results if (one[row], one[column]) == (name, other)])
            for other in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
