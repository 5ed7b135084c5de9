"""The chain's loss: which axis holds the classes, which labels count, and what the mean is over.

Shape suffixes: B samples, P one prediction, Y one label; N labels in a row (of all samples and
tokens), C classes.

It is one file because a sum of losses is a loss itself, and each of its terms is one, too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dni_runtime.core.labels import SIGNS, alike, class_axis, integer, lined_up, pairs
from dni_runtime.core.training import torch_dtype
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import Choice, LossSpec, TensorSpec
from dni_runtime.spec.choices import Location, call, find_class
from dni_runtime.spec.named import Frozen
from dni_runtime.wire import Part

LOSSES: dict[str, type[nn.Module]] = {
    name: cls
    for name, cls in vars(nn).items()
    if isinstance(cls, type)
    and issubclass(cls, nn.modules.loss._Loss)
    and "reduction" in inspect.signature(cls).parameters
}

_SUM = "SumOfLosses"

_SHARE = 1e-2
"""How far from 1 a sum of probabilities may be, in half precision, too."""

_TINY = 1e-30
"""Divisor if no label is valid, which makes the mean zero."""


class ChainLoss(nn.Module):
    """A chain's loss, for the tail and for gradient interfaces.

    Labels are *class indices* when they are integers and the prediction has one axis more, which
    holds a score for each class. For vectors (B x C, labels B) that is axis 1. For a label per
    token it is axis 1 (B x C x T, torch's layout) or the last one (B x T x C); if both fit,
    because T equals C, torch's layout is assumed.

    ``CrossEntropyLoss`` and ``NLLLoss`` take both layouts, and are the mean over the labels that
    are not ignored; 0, with gradient 0, when all of a batch are. ``KLDivLoss`` is divided by the
    number of samples, which is the divergence itself ('batchmean'); torch's ``mean`` divides by the
    number of elements. Losses that compare number by number (``MSELoss``, ``BCELoss`` …) get labels
    in the prediction's shape, if the two differ by axes of length 1 only: torch would broadcast
    them, and compare each prediction with each label of the batch. Other losses get both as they
    are.
    """

    def __init__(
        self, choice: Choice, prediction: TensorSpec, label: TensorSpec, location: Location = ()
    ) -> None:
        super().__init__()
        self.function = build_loss(choice, location)
        self.name, self._args = choice.name, choice.args
        # A list of numbers in the chain file has no type: it has the prediction's.
        self._lists = choice.name in LOSSES and any(
            isinstance(value, list) for value in choice.args.values()
        )
        limits = pairs(self.function)
        self._paired = limits is not None
        # Axis in a batch of predictions; None if labels are not class indices, or predictions are
        # several outputs in a row.
        apart = isinstance(self.function, SumOfLosses) and self.function.several
        self.class_axis = None if self._paired or apart else class_axis(prediction, label)
        # Size of that axis.
        self.scores = None if self.class_axis is None else prediction.shape[self.class_axis - 1]
        of_classes = isinstance(self.function, nn.CrossEntropyLoss | nn.NLLLoss)
        self.is_cross_entropy = of_classes and self.class_axis is not None
        ignore = getattr(self.function, "ignore_index", None)
        # The label that is left out; None if all count.
        self.ignore_index = ignore if isinstance(ignore, int) and integer(label) else None
        # A user's subclass computes in its own way.
        self._sums = self.is_cross_entropy and type(self.function) in (
            nn.CrossEntropyLoss,
            nn.NLLLoss,
        )
        if self._sums:
            cast("nn.CrossEntropyLoss", self.function).reduction = "sum"
        of_torch = type(self.function) in LOSSES.values()
        self._own = not (of_torch or isinstance(self.function, SumOfLosses))
        if self.scores is not None and (self.is_cross_entropy or of_torch):
            limits = (0, self.scores - 1)
        self.allowed = limits  # the lowest and the highest label; None: nothing is known of them
        shared = prediction.shape == label.shape and not integer(label)  # probabilities
        if self._paired and not alike(prediction.shape, label.shape):
            wrong = "compares each number of the output with one of the label"
            hint = "give labels and output one shape: torch would repeat the smaller one"
        elif of_torch and of_classes and not (self.is_cross_entropy or shared):
            wrong = "needs the number of a class for each sample, or for each position"
            hint = "labels are integers (int64) of the output's shape without its axis of classes"
        else:
            return
        raise SpecError(
            f"{choice.name} {wrong}, but the output is {prediction} and labels are {label}",
            location=location,
            hint=hint,
        )

    @property
    def weight(self) -> Tensor | None:
        """Weight of each class, if it is a cross-entropy with weights."""
        return cast("Tensor | None", self.function.weight) if self.is_cross_entropy else None

    @property
    def label_smoothing(self) -> float:
        """How much of the label is spread over all classes; 0 for other losses."""
        smoothing = getattr(self.function, "label_smoothing", 0.0) if self.is_cross_entropy else 0.0
        return float(smoothing)

    @property
    def is_plain(self) -> bool:
        """Whether it is a cross-entropy with neither weights nor smoothing."""
        return self._sums and self.weight is None and not self.label_smoothing

    def forward(self, p_BP: Tensor, y_BY: Tensor) -> Tensor:
        """Return the mean over valid labels."""
        if self._lists and not torch.is_autocast_enabled(p_BP.device.type):
            self.function.to(p_BP.dtype)
        if self._own:  # it may change in place what it gets
            p_BP, y_BY = p_BP.clone(), y_BY.clone()
        if not self.is_cross_entropy:
            y_BY = lined_up(p_BP, y_BY) if self._paired else y_BY
            return cast("Tensor", self.function(p_BP, y_BY))
        if not self._sums:
            return cast("Tensor", self.function(self._torch_layout(p_BP), y_BY))
        total: Tensor = self.function(*self.rows(p_BP, y_BY))
        return total / self.count(y_BY).clamp_min(_TINY)

    def parts(self, y_BY: Tensor) -> list[tuple[ChainLoss, Tensor]]:
        """Return the loss with its labels; of a sum each loss with those that are its own."""
        terms = self.function
        return terms.labels(y_BY) if isinstance(terms, SumOfLosses) else [(self, y_BY)]

    def check_labels(self, y_BY: Tensor, name: str, order_B: Tensor | None = None) -> None:
        """Refuse labels that the loss cannot take; torch does so on a CPU, and only some.

        They are in host memory. The error names the first one: ``name``, and its number in the data
        (``order_B``; by default in the batch).
        """
        for loss, y in self.parts(y_BY):
            if loss.allowed is None:
                continue
            low, high = loss.allowed
            signs = isinstance(loss.function, SIGNS)
            least, most = y.aminmax() if y.numel() else (low, low)
            inside = low <= least and most <= high and math.isfinite(most - least)
            if inside and not signs:  # nearly always
                continue
            valid = loss.valid(y)
            wrong = ~((y >= low) & (y <= high) & y.isfinite())
            wrong = wrong | (y.abs() != 1) if signs else wrong
            wrong = wrong if valid is None else wrong & valid
            if not wrong.any():
                continue
            first = tuple(wrong.nonzero()[0].tolist())
            value = y[first].item()
            least = (y if valid is None else y[valid]).min().item()
            index = [first[0] if order_B is None else int(order_B[first[0]]), *first[1:]]
            hint = "scale or correct the labels, or choose another loss"
            if loss.scores is not None and value == high + 1 and least == 1:
                hint = "labels start at 1, and class 0 has no sample: subtract 1 from all labels"
            elif loss.scores is not None:
                outputs = f"end with a layer of {value + 1} outputs, or " if value > high else ""
                hint = (
                    f"{outputs}correct the labels; if {value} marks samples without a label: "
                    f"'{loss.name}: {{ignore_index: {value}}}'"
                )
            takes = f"{low} to {high}" if math.isfinite(high) else "finite numbers"
            if signs:
                takes, hint = "-1 and 1", "of labels 0 and 1: 2 * y - 1"
            elif low == 0 and not math.isfinite(high):
                takes = "numbers from 0"
            raise DataError(f"{name}{index} is {value}, but {loss.name} takes {takes}", hint=hint)

    def doubts(self, p_BP: Tensor) -> list[str]:
        """Return what is likely to be wrong with a network's first predictions for this loss."""
        if isinstance(self.function, SumOfLosses):
            parts = self.function.predictions(p_BP)
            return [doubt for loss, p in parts for doubt in loss.doubts(p)]
        axis = self.class_axis or 1
        if p_BP.dim() <= axis or p_BP.shape[axis] < 2 or not p_BP.is_floating_point():
            return []
        logarithms = type(self.function) in (nn.NLLLoss, nn.KLDivLoss)
        sums = (p_BP.double().exp() if logarithms else p_BP.double()).sum(axis)
        shares = bool(((sums - 1).abs() < _SHARE).all())
        if logarithms and not shares:
            return [f"{self.name} takes logarithms of probabilities: end with 'LogSoftmax'"]
        if type(self.function) is nn.CrossEntropyLoss and shares and bool((p_BP >= 0).all()):
            return ["CrossEntropyLoss computes the softmax itself: leave out the last 'Softmax'"]
        return []

    def valid(self, y_BY: Tensor) -> Tensor | None:
        """Return which labels count, in the labels' shape; None if all do.

        On a GPU a mask is returned even if all labels count: to find out would be to wait.
        """
        if self.ignore_index is None:
            return None
        valid_BY = y_BY != self.ignore_index
        return None if valid_BY.device.type == "cpu" and bool(valid_BY.all()) else valid_BY

    def count(self, y_BY: Tensor) -> Tensor:
        """Return the mean's divisor: valid labels, or the sum of their weights; else samples."""
        valid_BY = None if self.ignore_index is None else y_BY != self.ignore_index
        if valid_BY is None:
            return torch.tensor(float(len(y_BY)), device=y_BY.device)
        if self.weight is None:
            return valid_BY.sum().float()
        return (self.weight[y_BY.masked_fill(~valid_BY, 0)] * valid_BY).sum()

    def means(self, p_BP: Tensor, y_BY: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the mean of each loss of a sum, or this one's, each with its divisor.

        Means of several batches are to be weighed by these: each loss counts labels of its own.
        """
        if isinstance(self.function, SumOfLosses):
            return self.function.means(p_BP, y_BY)
        return [(self(p_BP, y_BY), self.count(y_BY))]

    def shares(self, y_BY: Tensor, whole_BY: Tensor) -> tuple[float, ...]:
        """Return what share of a batch's mean each loss counts in a part of it.

        There is one for each loss of a sum; none if all are the part's share of the samples.
        """
        shares = tuple(
            min(float(loss.count(y)) / max(float(loss.count(whole)), _TINY), 1.0)
            for (loss, y), (_, whole) in zip(self.parts(y_BY), self.parts(whole_BY), strict=True)
        )
        return () if set(shares) == {len(y_BY) / len(whole_BY)} else shares

    def of_part(self, p_BP: Tensor, y_BY: Tensor, part: Part) -> Tensor:
        """Return what a part of a batch adds to the batch's loss."""
        if part.shares:
            means = zip(self.means(p_BP, y_BY), part.shares, strict=True)
            return torch.stack([mean * share for (mean, _), share in means]).sum()
        loss: Tensor = self(p_BP, y_BY)
        return loss if len(y_BY) == part.samples else loss * (len(y_BY) / part.samples)

    def rows(self, p_BP: Tensor, y_BY: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[N, C]`` and class indices ``[N]`` of all labels in a row."""
        if p_BP.dim() == 2:
            return p_BP, y_BY
        if self.class_axis == 1:
            p_BP = p_BP.movedim(1, -1)
        return p_BP.flatten(0, -2), y_BY.flatten()

    def on_scores(self, classes: int) -> ChainLoss:
        """Return a cross-entropy of ``[N, classes]`` scores, with this loss's ignored label.

        It is for parts that predict the label themselves, and has this loss's weights and
        smoothing if this is a cross-entropy.
        """
        args: dict[str, Any] = {}
        if self._sums:
            args = {k: v for k, v in self._args.items() if k in ("weight", "label_smoothing")}
            if args.get("weight") is not None:
                args["weight"] = args["weight"][:classes]
        if self.ignore_index is not None:
            args["ignore_index"] = self.ignore_index
        return cross_entropy(classes, args)

    def difference(self, scores_NC: Tensor, y_N: Tensor) -> Tensor:
        """Return the gradient of the mean at the scores, times N; for a cross-entropy of rows.

        That is softmax minus one-hot label, for each row; weights and smoothing change the label.
        The result can be differentiated.
        """
        valid_N = self.valid(y_N)
        known_N = y_N if valid_N is None else y_N.masked_fill(~valid_N, 0)
        classes, smoothing = scores_NC.shape[1], self.label_smoothing
        target_NC = F.one_hot(known_N, classes).to(scores_NC.dtype)
        softmax_NC = scores_NC.softmax(1)
        if smoothing:
            target_NC = target_NC * (1 - smoothing) + smoothing / classes
        if self.weight is not None:
            spread_C = smoothing / classes * self.weight
            target_NC = F.one_hot(known_N, classes) * ((1 - smoothing) * self.weight) + spread_C
            softmax_NC = softmax_NC * target_NC.sum(1, keepdim=True)
        difference_NC = softmax_NC - target_NC
        if valid_N is None and self.weight is None:
            return difference_NC
        share_N = len(y_N) / self.count(y_N).clamp_min(_TINY)
        share_N = share_N if valid_N is None else valid_N * share_N
        return difference_NC * share_N.unsqueeze(-1)

    def _torch_layout(self, p_BP: Tensor) -> Tensor:
        return p_BP if self.class_axis == 1 else p_BP.movedim(-1, 1)


class SumOfLosses(nn.Module):
    """The weighted sum of several losses, each of a part of the prediction and of the label.

    The terms say where their parts are in the rows: see :func:`sum_of`.
    """

    def __init__(self, terms: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._terms = [_Term.model_validate(term) for term in terms]
        self.losses = nn.ModuleList(
            ChainLoss(term.loss, term.prediction, term.label, ("losses", number, "loss"))
            for number, term in enumerate(self._terms)
        )

    def forward(self, p_BP: Tensor, y_BY: Tensor) -> Tensor:
        """Return the sum of the means; the outputs are all in a row, and so are the labels."""
        total = p_BP.new_zeros(())
        for weight, loss, p, y in self._parts(p_BP, y_BY):
            total = total + weight * loss(p, y)
        return total

    @property
    def several(self) -> bool:
        """Whether the prediction is a row of several outputs."""
        return any(term.prediction_at is not None for term in self._terms)

    @property
    def ignore_index(self) -> int | None:
        """The label that all of them leave out, if each is of the whole row of labels."""
        left_out = {loss.ignore_index for loss in cast("Iterable[ChainLoss]", self.losses)}
        whole = all(term.label_at is None for term in self._terms)
        return left_out.pop() if whole and len(left_out) == 1 else None

    def means(self, p_BP: Tensor, y_BY: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what is summed up; see :meth:`ChainLoss.means`."""
        parts = self._parts(p_BP, y_BY)
        return [(weight * loss(p, y), loss.count(y)) for weight, loss, p, y in parts]

    def predictions(self, p_BP: Tensor) -> list[tuple[ChainLoss, Tensor]]:
        """Return each loss with its part of the prediction."""
        losses = cast("Iterable[ChainLoss]", self.losses)
        return [
            (loss, _part(p_BP, term.prediction, term.prediction_at))
            for term, loss in zip(self._terms, losses, strict=True)
        ]

    def _parts(
        self, p_BP: Tensor, y_BY: Tensor
    ) -> Iterator[tuple[float, ChainLoss, Tensor, Tensor]]:
        for term, (loss, y) in zip(self._terms, self.labels(y_BY), strict=True):
            yield term.weight, loss, _part(p_BP, term.prediction, term.prediction_at), y

    def labels(self, y_BY: Tensor) -> list[tuple[ChainLoss, Tensor]]:
        """Return each loss with its labels."""
        return [
            (loss, _part(y_BY, term.label, term.label_at).to(torch_dtype(term.label.dtype)))
            for term, loss in zip(
                self._terms, cast("Iterable[ChainLoss]", self.losses), strict=True
            )
        ]


class _Term(Frozen):
    """A loss with its parts of the rows, and where they begin; None: the row is no row of parts."""

    loss: Choice
    weight: float
    prediction: TensorSpec
    label: TensorSpec
    prediction_at: int | None
    label_at: int | None


def _part(row: Tensor, part: TensorSpec, first: int | None) -> Tensor:
    if first is None:
        return row
    return row[:, first : first + math.prod(part.shape)].reshape(len(row), *part.shape)


def sum_of(
    losses: Sequence[LossSpec], outputs: Sequence[TensorSpec], labels: Sequence[TensorSpec]
) -> Choice:
    """Return several losses as one."""
    terms = []
    for number, entry in enumerate(losses):
        chosen = {}
        for field, parts in (("output", outputs), ("label", labels)):
            index = getattr(entry, field)
            if index >= len(parts):
                raise SpecError(
                    f"there is no {field} {index}: "
                    + ("the last module" if field == "output" else "the data")
                    + f" has {len(parts)}",
                    location=("losses", number, field),
                    hint=f"the first one is {field} 0",
                )
            first = sum(math.prod(part.shape) for part in parts[:index])
            chosen[field] = parts[index], first if len(parts) > 1 else None
        (prediction, prediction_at), (label, label_at) = chosen["output"], chosen["label"]
        build_loss(entry.loss, ("losses", number, "loss"))
        term = _Term(
            loss=entry.loss,
            weight=entry.weight,
            prediction=prediction,
            label=label,
            prediction_at=prediction_at,
            label_at=label_at,
        )
        terms.append(term.model_dump(mode="json"))
    lost = set(range(len(outputs))).difference(entry.output for entry in losses)
    if lost:
        raise SpecError(
            f"output {min(lost)} of the last module has no loss",
            location=("losses",),
            hint=f"add one with 'output: {min(lost)}', or do not return it",
        )
    return Choice(name=_SUM, args={"terms": terms})


def cross_entropy(classes: int, args: dict[str, Any] | None = None) -> ChainLoss:
    """Return ``CrossEntropyLoss`` of ``[N, classes]`` scores."""
    return ChainLoss(
        Choice(name="CrossEntropyLoss", args=args or {}),
        TensorSpec(shape=(classes,), dtype="float32"),
        TensorSpec(shape=(), dtype="int64"),
    )


def build_loss(choice: Choice, location: Location = ()) -> nn.Module:
    """Make a loss that is a mean over the batch (gradients then travel per sample)."""
    if choice.name == _SUM:
        return SumOfLosses(**choice.args)
    cls = find_class(choice.name, "loss", LOSSES, nn.Module, location)
    at = (*location, choice.name)
    try:
        args = _with_tensors(choice.args, own=cls.__module__.partition(".")[0] != "torch")
    except (TypeError, ValueError) as error:
        raise SpecError(f"{choice.name} refuses {choice.args}: {error}", location=at) from None
    divergence = cls is nn.KLDivLoss
    if args.get("reduction", "mean") not in (("mean", "batchmean") if divergence else ("mean",)):
        raise SpecError(
            f"{choice.name} cannot have reduction {choice.args['reduction']!r}",
            location=(*at, "reduction"),
            hint="allowed: 'mean'; gradients between modules are per sample",
        )
    if divergence:
        args["reduction"] = "batchmean"
    return cast("nn.Module", call(cls, args, name=choice.name, location=at))


def _with_tensors(args: dict[str, Any], *, own: bool) -> dict[str, Any]:
    """Turn lists of numbers into tensors, and one number as a weight of torch's losses."""
    weights = () if own else ("weight", "pos_weight")
    return {
        key: torch.tensor(value, dtype=torch.float32)
        if isinstance(value, list) or (key in weights and isinstance(value, int | float))
        else value
        for key, value in args.items()
    }
