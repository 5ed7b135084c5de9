"""Comparison of gradient interfaces, or of replicas' strategies, beside plain backpropagation."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from dni_runtime.core.interfaces import INTERFACES
from dni_runtime.core.metrics import rises
from dni_runtime.core.replication import STRATEGIES
from dni_runtime.errors import DataError, SpecError, UsageError
from dni_runtime.measure.curves import Panel
from dni_runtime.measure.reference import REFERENCE
from dni_runtime.plan.prepare import CheckedChain, prepare_again
from dni_runtime.run.documents.metrics import EvaluationLine, StartLine, TrainLine, read_metrics
from dni_runtime.run.record import Record
from dni_runtime.spec import ChainSpec, Choice
from dni_runtime.spec.load import parse_choice, parse_replication, suggestion
from dni_runtime.spec.replicas import tails_of

TARGET_BELOW = 0.01
"""Distance of the default target below the reference: one point."""


Parsed = TypeVar("Parsed")


class Point(NamedTuple):
    """One evaluation: epoch, seconds since the first batch, and the metric."""

    epoch: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Trial:
    method: str  # its label, or ``backprop``
    seed: int  # the chain's
    points: tuple[Point, ...]
    samples_per_s: float  # over the whole training, evaluations included
    path: str  # the run directory
    test: float | None = None  # the metric on the test set, if evaluations use a validation part
    shared_bytes: int | None = None  # all that replicas have sent each other; None: no replicas


@dataclass(frozen=True)
class Row:
    """One method over all seeds."""

    method: str  # its label, or ``backprop``
    mean: float  # of the last evaluations' metric
    low: float  # the smallest of them
    high: float  # the largest of them
    samples_per_s: float  # median
    reached: int  # number of trainings that reached the target
    trials: int  # number of trainings
    target_s: float | None  # median of the seconds to the target; None unless all reached it
    test: float | None = None  # mean of the metric on the test set
    # median of what replicas have sent each other; None: no replicas
    shared_bytes: int | None = None


ALONE = "no-replicas"
"""Label of the chain without replicas, beside which strategies are compared."""


@dataclass(frozen=True)
class Method:
    """What a training differs in from the chain as written."""

    interface: str | Choice | None = None  # at every cut; None: as written
    # how replicas learn together, if not as written
    replication: Mapping[str, Any] = field(default_factory=dict)
    # Workers of each module that has replicas; if none has, of all between head and tail, or of
    # both if there are no others; None: as written.
    replicas: int | None = None


def read_interfaces(names: Sequence[str], labelled: Sequence[str]) -> dict[str, Method]:
    """Return the gradient interfaces to compare, by label.

    ``names`` are used as labels; ``labelled`` are ``LABEL=INTERFACE``, with the interface as in a
    chain file.
    """
    texts, taken = (*names, *labelled), (REFERENCE,)
    choices = _read("gradient interface", INTERFACES, texts, parse_choice, lambda it: it, taken)
    return {
        label: Method(interface=choice if written else label)
        for label, (choice, written) in choices.items()
    }


def read_strategies(
    names: Sequence[str], labelled: Sequence[str], replicas: int
) -> dict[str, Method]:
    """Return the strategies to compare, by label, and first the chain without replicas.

    ``names`` are used as labels; ``labelled`` are ``LABEL=STRATEGY``, with the strategy as in a
    chain file; more keys of ``replication`` may follow: ``int8=diloco, compression: int8``.
    ``replicas`` are the workers of each module that has some.
    """
    texts, taken = (*names, *labelled), (REFERENCE, ALONE)
    choices = _read("strategy", STRATEGIES, texts, parse_replication, lambda it: it.strategy, taken)
    some = {
        label: Method(
            replication={key: getattr(options, key) for key in options.model_fields_set},
            replicas=replicas,
        )
        for label, (options, _) in choices.items()
    }
    return {ALONE: Method(replicas=1), **some}


def _read(
    kind: str,
    known: Collection[str],
    texts: Sequence[str],
    parse: Callable[[str], Parsed],
    choice_of: Callable[[Parsed], Choice],
    taken: Collection[str],
) -> dict[str, tuple[Parsed, bool]]:
    """Return what is written by label, and whether each one is written out."""
    choices: dict[str, tuple[Parsed, bool]] = {}
    for text in texts:
        label, _, value = text.partition("=")
        try:
            parsed = parse(value or label)
        except SpecError:
            raise UsageError(
                f"{value!r} is not a valid {kind}",
                hint=f"write it as in a chain file: '{label}={{{next(iter(known))}: {{…: …}}}}'",
            ) from None
        choice = choice_of(parsed)
        if choice.name not in known and ":" not in choice.name:
            raise UsageError(
                f"unknown {kind} {choice.name!r}", hint=suggestion(choice.name, list(known))
            )
        if folder_of(label) in map(folder_of, (*choices, *taken)):
            raise UsageError(f"duplicate method {label!r}", hint="choose another label")
        choices[label] = parsed, bool(value)
    return choices


def folder_of(label: str) -> str:
    """Return what the folders of a method's runs begin with."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", label)


def variant(prepared: CheckedChain, method: Method, seed: int) -> CheckedChain:
    """Return the chain as a method trains it, with a seed.

    If only an interface's name is given, a module whose own interface has that name keeps its
    options; ``mixed`` and its parts, ``synthetic`` and ``local``, pass their options to each other.
    """
    chain, interface = prepared.written, method.interface
    modules = list(chain.modules)
    if interface is not None:
        for index, module in enumerate(modules[:-1]):
            choice = (
                _choice(chain.setting(index, "interface"), interface)
                if isinstance(interface, str)
                else interface
            )
            modules[index] = module.model_copy(update={"interface": choice})
    if method.replicas is not None:
        replicated = [index for index, module in enumerate(modules) if module.most > 1]
        for index in replicated or range(1, len(modules) - 1) or range(len(modules)):
            modules[index] = modules[index].model_copy(update={"replicas": method.replicas})
    replication = chain.replication.model_copy(update=dict(method.replication))
    changed = {"modules": tuple(modules), "seed": seed, "replication": replication}
    return prepare_again(prepared, chain.model_copy(update=changed))


def _choice(choice: Choice | None, name: str) -> Choice:
    if choice is None:
        return Choice(name=name)
    if choice.name == name:
        return choice
    if choice.name == "mixed" and name in ("synthetic", "local"):
        return Choice(name=name, args=choice.args.get(name, {}))
    if name == "mixed" and choice.name in ("synthetic", "local"):
        return Choice(name=name, args={choice.name: choice.args})
    return Choice(name=name)


class ComparedMetric(NamedTuple):
    name: str  # of the metric, or ``loss``
    rises: bool  # larger is better


def metric_of(chain: ChainSpec) -> ComparedMetric:
    """Return the chain's first metric that says which value is better, else its loss."""
    for metric in chain.metrics:
        if (up := rises(metric)) is not None:
            return ComparedMetric(metric.name, up)
    return ComparedMetric("loss", False)


def read_trial(record: Record, method: str, seed: int, metric: ComparedMetric) -> Trial:
    """Read the measurements of a finished run."""
    workers = [REFERENCE] if method == REFERENCE else record.modules
    head, tails = workers[0], tails_of(workers)
    first = next(read_metrics(record.run.metrics(head), StartLine), None)
    written = list(read_metrics(record.run.metrics(tails[0]), EvaluationLine))
    lines = [line for line in written if line.kind == "eval"]
    tests = [_number(line, metric) for line in written if line.kind == "test"]
    if first is None or not lines:
        raise DataError(f"run {str(record.run.root)!r} has not been evaluated")
    points = tuple(
        Point(line.epoch, line.time - first.time, _number(line, metric)) for line in lines
    )
    newest = {
        name: line for name in workers for line in read_metrics(record.run.metrics(name), TrainLine)
    }
    samples = lines[-1].trained or sum(newest[name].samples for name in tails if name in newest)
    shared = [line.shared_bytes for line in newest.values() if line.shared_bytes is not None]
    return Trial(
        method,
        seed,
        points,
        samples / points[-1].seconds,
        str(record.run.root),
        tests[-1] if tests else None,
        sum(shared) if shared else None,
    )


def _number(line: EvaluationLine, metric: ComparedMetric) -> float:
    value = line.figures.get(metric.name)
    return math.nan if value is None else value


def default_target(trials: Sequence[Trial], metric: ComparedMetric) -> float | None:
    """Return one point below the reference's mean; None for metrics that fall, or are unknown."""
    last = [trial.points[-1].value for trial in trials if trial.method == REFERENCE]
    known = bool(last) and all(map(math.isfinite, last))
    return statistics.mean(last) - TARGET_BELOW if known and metric.rises else None


def seconds_to(trial: Trial, metric: ComparedMetric, target: float) -> float | None:
    """Return the seconds of training until an evaluation reached the target, or None."""
    for point in trial.points:
        if point.value >= target if metric.rises else point.value <= target:
            return point.seconds
    return None


def summarize(trials: Sequence[Trial], metric: ComparedMetric, target: float | None) -> list[Row]:
    """Return one row per method, in the order of the trials."""
    rows = []
    for method in dict.fromkeys(trial.method for trial in trials):
        mine = [trial for trial in trials if trial.method == method]
        last = [trial.points[-1].value for trial in mine]
        ends = sorted(last) if all(value == value for value in last) else [math.nan]
        times = [] if target is None else [seconds_to(trial, metric, target) for trial in mine]
        reached = [time for time in times if time is not None]
        tests = [trial.test for trial in mine if trial.test is not None]
        shared = [trial.shared_bytes for trial in mine if trial.shared_bytes is not None]
        rows.append(
            Row(
                method=method,
                mean=statistics.mean(last),
                low=ends[0],
                high=ends[-1],
                samples_per_s=statistics.median(trial.samples_per_s for trial in mine),
                reached=len(reached),
                trials=len(mine),
                target_s=statistics.median(reached) if len(reached) == len(mine) else None,
                test=statistics.mean(tests) if tests else None,
                shared_bytes=statistics.median_low(shared) if shared else None,
            )
        )
    return rows


def panels(trials: Sequence[Trial], metric: str) -> list[Panel]:
    """Return each method's curve (mean over seeds), against epochs and against seconds."""
    epochs: dict[str, list[tuple[float, float]]] = {}
    seconds: dict[str, list[tuple[float, float]]] = {}
    for method in dict.fromkeys(trial.method for trial in trials):
        curves = [trial.points for trial in trials if trial.method == method]
        means = [
            [statistics.mean(values) for values in zip(*points, strict=True)]
            for points in zip(*curves, strict=False)
        ]
        epochs[method] = [(epoch, value) for epoch, _, value in means]
        seconds[method] = [(second, value) for _, second, value in means]
    return [Panel("epoch", metric, epochs), Panel("seconds of training", metric, seconds)]
