"""Runs of one chain that differ in settings, and what came of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dni_runtime.errors import UsageError
from dni_runtime.measure.compare import ComparedMetric, metric_of
from dni_runtime.measure.figures import MetricsReader
from dni_runtime.plan.prepare import CheckedChain, prepare_with
from dni_runtime.run.documents.evaluations import Best
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.spec import ChainSpec
from dni_runtime.spec.settings import read_setting, words_of

_MOST = 1000
"""Runs of one sweep: more are a mistake."""


@dataclass(frozen=True)
class Variant:
    run: str  # its name
    settings: Mapping[str, Any]  # by their paths
    prepared: CheckedChain


@dataclass(frozen=True)
class Outcome:
    run: str
    path: str  # its directory
    state: str
    settings: Mapping[str, Any]
    epoch: int | None
    value: float | None  # of the compared metric: the last evaluation's, or the best checkpoint's
    test: float | None  # on the test set, if evaluations use a validation part


def read_variants(prepared: CheckedChain, texts: Sequence[str], name: str) -> list[Variant]:
    """Return the runs of a sweep, all checked: each combination of the settings' values."""
    choices: dict[str, Sequence[Any]] = {}
    for text in texts:
        path, values = read_setting(text, prepared.written)
        if path in choices:
            raise UsageError(
                f"the setting {path!r} is given twice", hint="list all its values once"
            )
        choices[path] = values
    count = math.prod(map(len, choices.values()))
    if count > _MOST:
        raise UsageError(f"these are {count} runs, and a sweep has at most {_MOST}")
    digits, variants = len(str(count)), []
    for number, values in enumerate(product(*choices.values()), 1):
        settings = dict(zip(choices, values, strict=True))
        changed = prepare_with(prepared, settings)
        tag = re.sub(r"[^A-Za-z0-9.-]+", "-", words_of(settings).replace("=", "")).strip("-")[:60]
        variants.append(Variant(f"{name}-{number:0{digits}}-{tag}", settings, changed))
    return variants


def compared_metric(chain: ChainSpec) -> ComparedMetric:
    """Return what a sweep is ordered by: the metric of ``selection``, else the chain's first."""
    wanted = chain.selection.metric if chain.selection is not None else None
    if wanted == "loss":
        return ComparedMetric("loss", False)
    metrics = tuple(metric for metric in chain.metrics if metric.name == wanted)
    return metric_of(chain.model_copy(update={"metrics": metrics}) if metrics else chain)


def read_outcome(
    variant: Variant, record: Record, state: RunState, metric: ComparedMetric
) -> Outcome:
    """Read what has come of a run until now."""
    figures = MetricsReader(record, evaluations=1).read(state)
    best = Best.load(record.run.best)
    value = None if not figures.evaluations else figures.evaluations[-1].figures.get(metric.name)
    if best is not None and best.cut is not None and best.metric == metric.name:
        value = best.value
    test = None if figures.test is None else figures.test.figures.get(metric.name)
    return Outcome(
        variant.run, figures.path, state.phase, variant.settings, figures.epoch, value, test
    )


def best_first(outcomes: Sequence[Outcome], metric: ComparedMetric) -> list[Outcome]:
    """Return the outcomes in order; those without a value come last."""
    sign = -1 if metric.rises else 1
    return sorted(
        outcomes,
        key=lambda one: (one.value is None, 0.0 if one.value is None else sign * one.value),
    )
