"""Metrics of an evaluation: means over labels, functions of the loss, torchmetrics.

Shape suffixes: B samples, P one prediction, Y one label; N labels in a row (of all samples and
tokens), C classes.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.labels import alike, lined_up
from dni_runtime.core.losses import LOSSES, ChainLoss, SumOfLosses
from dni_runtime.core.training import torch_dtype
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.choices import Location, call, find_class
from dni_runtime.spec.load import suggestion

_TRIED = 8
"""Size of the batch that a metric is tried with."""


def _accuracy(p_NC: Tensor, y_N: Tensor) -> Tensor:
    return p_NC.argmax(1) == y_N


def _top5(p_NC: Tensor, y_N: Tensor) -> Tensor:
    top = p_NC.topk(min(5, p_NC.shape[1]), 1).indices
    return (top == y_N.unsqueeze(1)).any(1)


OF_CLASSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"accuracy": _accuracy, "top5": _top5}
"""Functions of scores ``[N, C]`` and class indices ``[N]``, with a value for each label."""

OF_NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mae": lambda p_BP, y_BY: (p_BP - y_BY).abs(),
    "mse": lambda p_BP, y_BY: (p_BP - y_BY).square(),
}
"""Functions of predictions and labels of one shape, with a value for each number."""

OF_LOSS: dict[str, Callable[[float], float]] = {
    "perplexity": lambda nats: math.exp(nats) if nats < 700 else math.inf,
    "bits_per_character": lambda nats: nats / math.log(2),
}
"""Functions of the mean cross-entropy in nats, without weights and smoothing."""

METRICS = (*OF_CLASSES, *OF_NUMBERS, *OF_LOSS)
"""Names of the metrics that need no torchmetrics."""


def mean_of(name: str, loss: ChainLoss, p_BP: Tensor, y_BY: Tensor) -> tuple[Tensor, Tensor]:
    """Return a metric's sum over valid labels, or over all numbers, and their count.

    It is one of ``OF_CLASSES`` or ``OF_NUMBERS``.
    """
    if name in OF_NUMBERS:
        values = OF_NUMBERS[name](p_BP, lined_up(p_BP, y_BY))
        return values.double().sum(), torch.tensor(float(values.numel()), device=values.device)
    p_NC, y_N = loss.rows(p_BP, y_BY)
    values_N, valid_N = OF_CLASSES[name](p_NC, y_N), loss.valid(y_N)
    if valid_N is None:
        return values_N.sum(), torch.tensor(float(len(y_N)), device=y_N.device)
    return (values_N & valid_N).sum(), valid_N.sum()


def accuracy(loss: ChainLoss, p_BP: Tensor, y_BY: Tensor) -> Tensor:
    """Return the share of valid labels that have the highest score; 0 if none is valid."""
    total, count = mean_of("accuracy", loss, p_BP, y_BY)
    return total / count.clamp_min(1)


def cross_entropy_of(loss: ChainLoss, p_BP: Tensor, y_BY: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of cross-entropies in nats, and the number of labels."""
    p_NC, y_N = loss.rows(p_BP, y_BY)
    ignored = -100 if loss.ignore_index is None else loss.ignore_index
    total = F.cross_entropy(p_NC, y_N, ignore_index=ignored, reduction="sum")
    return total, (y_N != ignored).sum()


def rises(metric: Choice) -> bool | None:
    """Whether a higher value is better; None if the metric does not say so."""
    if metric.name in METRICS:
        return metric.name in OF_CLASSES
    better = _build(metric, ()).higher_is_better
    if better is None and metric.name.endswith("CorrCoef"):  # torchmetrics leaves it open
        return True
    return better if better is None else bool(better)


class TorchMetric:
    """A metric of torchmetrics over one evaluation.

    It gets scores ``[N, C]`` and class indices ``[N]`` of the valid labels (as one text of N tokens
    if it is of ``torchmetrics.text``). If labels are not class indices, it gets predictions, and
    labels to compare with them one by one. Metrics of ``torchmetrics.classification`` get
    probabilities: they would compute them only for batches that have a number outside 0 to 1.
    """

    def __init__(
        self,
        choice: Choice,
        loss: ChainLoss,
        device: torch.device | str = "cpu",
        location: Location = (),
    ) -> None:
        self._metric = _build(choice, location).to(device)
        self._loss = loss
        terms = [loss.function]
        if isinstance(loss.function, SumOfLosses):
            terms = [term.function for term in cast("Iterable[ChainLoss]", loss.function.losses)]
        self._probabilities = next(filter(None, map(_probabilities_of, terms)), None)
        self._own = not all(isinstance(term, tuple(LOSSES.values())) for term in terms)
        modules = [cls.__module__ for cls in type(self._metric).__mro__]
        self._of_text, self._of_classes = (
            any(module.startswith(f"torchmetrics.{package}.") for module in modules)
            for package in ("text", "classification")
        )

    def add(self, p_BP: Tensor, y_BY: Tensor) -> None:
        if p_BP.dtype in (torch.bfloat16, torch.float16):
            p_BP = p_BP.float()
        if self._loss.class_axis is None:
            y_BY = lined_up(p_BP, y_BY)
            if self._of_classes:  # torchmetrics needs integers for the labels of BCELoss
                p_BP, y_BY = (self._probabilities or _same)(p_BP), y_BY.long()
            self._metric.update(p_BP, y_BY)
            return
        p_NC, y_N = self._loss.rows(p_BP, y_BY)
        valid_N = self._loss.valid(y_N)
        if valid_N is not None:
            p_NC, y_N = p_NC[valid_N], y_N[valid_N]
        if not len(y_N):
            return
        if self._of_classes:
            p_NC = (self._probabilities or _same)(p_NC)
        elif self._of_text:
            p_NC, y_N = p_NC.unsqueeze(0), y_N.unsqueeze(0)
        self._metric.update(p_NC, y_N)

    def result(self) -> float:
        """Return its value; NaN if nothing was counted."""
        return float(self._metric.compute()) if self._metric._update_count else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return its state as JSON; waits for the device."""
        states = {name: getattr(self._metric, name).tolist() for name in self._metric._defaults}
        return {"updates": self._metric._update_count, "states": states}

    def merge(self, document: dict[str, Any]) -> None:
        """Add a state that :meth:`to_dict` returned, of the same evaluation."""
        first = not self._metric._update_count
        for name, value in document["states"].items():
            now = getattr(self._metric, name)
            merged = torch.tensor(value, dtype=now.dtype, device=now.device)
            if not first and document["updates"]:
                merged = self._metric._reductions[name](torch.stack([now, merged]))
            if first or document["updates"]:
                setattr(self._metric, name, merged)
        self._metric._update_count += document["updates"]

    def check_merges(self, name: str, at: Location) -> None:
        """Refuse a metric whose parts over several batches cannot be put together."""
        from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

        merges = (dim_zero_sum, dim_zero_max, dim_zero_min)
        if any(reduction not in merges for reduction in self._metric._reductions.values()):
            raise SpecError(
                f"{name} cannot be put together from the parts of several replicas",
                location=at,
                hint="the last module needs one worker for it, or use another metric",
            )

    def try_out(self, name: str, prediction: TensorSpec, label: TensorSpec, at: Location) -> None:
        """Count and compute a made-up batch, so that errors come before anything starts."""
        if self._of_classes and self._own and self._probabilities is None:
            raise SpecError(
                f"{name} needs probabilities, and {self._loss.name} does not say how outputs "
                "become them",
                location=at,
                hint="give the loss's class a method 'probabilities(self, p)', which returns those "
                "of scores [N, C], or of single scores: 'return p.softmax(1)' or 'p.sigmoid()'",
            )
        lists = [key for key, value in self._metric._defaults.items() if isinstance(value, list)]
        if lists:
            raise SpecError(
                f"{name} keeps all predictions until the end of an evaluation",
                location=at,
                hint="'thresholds: 100' bounds what it keeps"
                if hasattr(self._metric, "thresholds")
                else "use a metric that only keeps sums",
            )
        p_BP = torch.rand((_TRIED, *prediction.shape)).to(torch_dtype(prediction.dtype))
        numbers = torch.arange(_TRIED * math.prod(label.shape)) % (self._loss.scores or 2)
        y_BY = numbers.view(_TRIED, *label.shape).to(torch_dtype(label.dtype))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of values that make no sense for made-up numbers
                self.add(p_BP, y_BY)
                value = self._metric.compute()
        except Exception as error:
            raise SpecError(
                f"{name} does not take the chain's output: {str(error) or type(error).__name__}",
                location=at,
                hint=f"the tail's output is {prediction}, labels are {label}",
            ) from None
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise SpecError(f"{name} returns {shape}, not one number", location=at,
                            hint="averaging may help, as in 'average: macro'")  # fmt: skip


def _probabilities_of(function: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return what makes probabilities of scores ``[N, C]``, or of single ones; None: unknown."""
    own = getattr(function, "probabilities", None)  # of a user's loss
    if callable(own):
        return cast("Callable[[Tensor], Tensor]", own)
    match function:
        case nn.CrossEntropyLoss():
            return functools.partial(torch.softmax, dim=1)
        case nn.NLLLoss():
            return torch.exp
        case nn.BCEWithLogitsLoss() | nn.MultiLabelSoftMarginLoss():
            return torch.sigmoid
        case nn.BCELoss():
            return _same
    return None


def _same(p: Tensor) -> Tensor:
    return p


def check_metrics(
    metrics: Sequence[Choice],
    loss: ChainLoss,
    prediction: TensorSpec,
    label: TensorSpec,
    *,
    merged: bool = False,  # whether replicas of the tail count parts of an evaluation
) -> None:
    """Check names, keywords, and that each metric takes the chain's predictions and labels."""
    for number, metric in enumerate(metrics):
        at: Location = ("metrics", number)
        name = metric.name
        if name in [other.name for other in metrics[:number]]:
            raise SpecError(f"duplicate metric {name!r}", location=at)
        if name not in METRICS:
            with torch.random.fork_rng(devices=[]):
                made = TorchMetric(metric, loss, location=at)
                made.try_out(name, prediction, label, at)
            if merged:
                made.check_merges(name, at)
            continue
        if metric.args:
            raise SpecError(f"{name} takes no keywords", location=(*at, name))
        if name in OF_CLASSES and loss.class_axis is None:
            raise SpecError(
                f"{name} needs class labels, and a score for each class",
                location=at,
                hint=f"the tail's output is {prediction}, labels are {label}; without class "
                f"labels: {', '.join(OF_NUMBERS)}",
            )
        if name in OF_NUMBERS and (
            loss.class_axis is not None or not alike(prediction.shape, label.shape)
        ):
            raise SpecError(
                f"{name} compares numbers, but the tail's output is {prediction}, and labels are "
                f"{label}",
                location=at,
                hint=f"for class labels: {', '.join(OF_CLASSES)}"
                if loss.class_axis is not None
                else "give labels and output one shape",
            )
        if name in OF_LOSS and not loss.is_cross_entropy:
            raise SpecError(
                f"{name} needs a cross-entropy",
                location=at,
                hint="use it with 'loss: CrossEntropyLoss' or NLLLoss, and class labels",
            )


def _build(choice: Choice, location: Location) -> Any:
    if choice.name == "loss":
        raise SpecError("the loss is always measured", location=location, hint="leave it out")
    known = _torchmetrics()
    if not known:
        raise SpecError(
            f"unknown metric {choice.name!r}",
            location=location,
            hint=f"{suggestion(choice.name, list(METRICS))}; others are classes of torchmetrics, "
            "which is not installed: pip install 'dni-runtime[metrics]'",
        )
    if choice.name not in known and ":" not in choice.name:
        raise SpecError(
            f"unknown metric {choice.name!r}",
            location=location,
            hint=suggestion(choice.name, [*METRICS, *known])
            or f"allowed: {', '.join(METRICS)}, and classes of torchmetrics",
        )
    base = importlib.import_module("torchmetrics").Metric
    cls = find_class(choice.name, "metric", known, base, location)
    return call(cls, choice.args, name=choice.name, location=(*location, choice.name))


@functools.cache
def _torchmetrics() -> dict[str, type[Any]]:
    """Return the classes of torchmetrics that may take predictions and labels, by name."""
    try:
        base = importlib.import_module("torchmetrics").Metric
    except ModuleNotFoundError:
        return {}
    packages = (
        importlib.import_module(f"torchmetrics.{name}")
        for name in ("classification", "regression", "text")
    )
    return {
        name: cls
        for package in packages
        for name, cls in vars(package).items()
        if isinstance(cls, type) and issubclass(cls, base)
    }
