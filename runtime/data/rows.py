"""The samples of a user's data set: what it returns for some numbers, as inputs and labels.

Shape suffixes: N samples of a split, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from dni_runtime.data.splits import Batch, Half, Split, dtype_name, sample_of
from dni_runtime.errors import DataError
from dni_runtime.packing import no_labels, pack
from dni_runtime.spec import DataInfo, DataSpec
from dni_runtime.spec.load import suggestion
from dni_runtime.wire import INPUTS_LIMIT, holds

LABELS = ("label", "labels")
"""Usual keys of the label in rows that are dicts."""

_ONE_SHAPE = (
    "all samples need one shape and one type: pad to one length in the data set or in "
    "'data.collate' (as transformers' collators do with 'padding: max_length'); or pad each batch "
    "to its own longest sample, and set 'data.max_length' to the longest of all"
)


class Read(NamedTuple):
    """Some samples, as a user's data set returns them."""

    xs: tuple[Tensor, ...]  # each of the inputs, (B, …)
    ys: tuple[Tensor, ...]  # each of the labels
    names: tuple[str, ...]  # the inputs' keys, if rows are dicts


class UserSplit(Split):
    """Samples of a user's data set."""

    slow: ClassVar[bool] = True

    def __init__(
        self,
        spec: DataSpec,
        dataset: Dataset[Any],  # with ``__len__`` and ``__getitem__``
        collate: Callable[[list[Any]], Any] | None = None,  # None: torch's own
        half: Half | None = None,  # what each item is, if not a sample with its label
        info: DataInfo | None = None,  # what each batch must have; None: no check
        draws: bool = False,
        drawn: bool = False,
    ) -> None:
        self._name, self._spec, self._dataset, self._info = spec.dataset, spec, dataset, info
        self._collate, self._half, self.draws, self.drawn = collate, half, draws, drawn

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # find_user() has seen its __len__

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples of these numbers; refuse other shapes or types than at first."""
        xs, ys, _ = self.tensors(order_B)
        if self._info is not None:
            self._check(self._info, xs, ys)
        if self._collate is not None:  # it may fill one memory again and again
            xs, ys = (tuple(tensor.clone() for tensor in tensors) for tensors in (xs, ys))
        if len(ys) == 1:
            return xs if len(xs) > 1 else xs[0], ys[0]
        dtype = torch.float32 if any(y.is_floating_point() for y in ys) else torch.int64
        return xs if len(xs) > 1 else xs[0], pack([y.to(dtype) for y in ys])

    def reads_randomly(self, number: int) -> bool:
        """Whether reading a sample draws from torch's global generator."""
        with torch.random.fork_rng(devices=[]):
            before = torch.random.get_rng_state()
            self.tensors(torch.tensor([number]))
            return not torch.equal(before, torch.random.get_rng_state())

    def classes(self) -> Tensor | None:
        """Return each sample's class, if the data set tells without reading the samples."""
        labels = getattr(self._dataset, "targets", None)  # of torchvision's
        for key in self._spec.label or LABELS:
            if labels is None and key in (getattr(self._dataset, "column_names", None) or ()):
                plain = getattr(self._dataset, "with_format", lambda _: self._dataset)
                with suppress(Exception):  # of Hugging Face's, without the user's transforms
                    labels = plain(None)[key][:]
        try:
            classes_N = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError):
            return None
        whole = not classes_N.is_floating_point() and classes_N.shape == (len(self),)
        return classes_N.to(torch.int64) if whole else None

    def tensors(self, order_B: Tensor) -> Read:
        """Return inputs and labels of these samples."""
        order, samples = order_B.tolist(), list[Any]()
        try:
            # As in torch.utils.data.DataLoader: several at once if the data set supports it.
            several = getattr(self._dataset, "__getitems__", None)
            samples = several(order) if several else [self._dataset[index] for index in order]
            if self._collate is None:
                batch = default_collate([_numbers_in(row) for row in samples])
            else:
                batch = self._collate(samples)
        except Exception as error:
            shown = ", ".join(map(str, order[:4])) + (", …" if len(order) > 4 else "")
            raise DataError(
                f"data set {self._name!r} failed for samples {shown}: "
                f"{type(error).__name__}: {error}",
                hint=self._advice(str(error), samples),
            ) from error
        inputs, label = self._parts(batch, len(order))
        names: tuple[str, ...] = ()
        if isinstance(inputs, Mapping):
            names = self._inputs(inputs)
            inputs = tuple(inputs[name] for name in names)
        xs = _numbers(self._name, "sample", inputs)
        ys = _numbers(self._name, "label", label)
        if len(xs) > INPUTS_LIMIT:
            raise DataError(
                f"data set {self._name!r} returns samples of {len(xs)} inputs",
                hint=f"return from 1 to {INPUTS_LIMIT}; a list or tuple is several inputs, and one "
                "sample is a tensor or an array",
            )
        return Read(xs, ys, names)

    def _advice(self, error: str, rows: list[Any]) -> str:
        """Return what to do about an error in reading samples, and making a batch of these rows."""
        if "equal size" in error:
            return _ONE_SHAPE
        if "PIL." in error:
            return "give it a 'transform' that makes a tensor of an image, in 'data.args'"
        collate = self._spec.collate
        name = "torch.utils.data.default_collate" if collate is None else collate.name
        first = rows[0] if rows and isinstance(rows[0], Mapping) else {}
        texts = [key for key, value in first.items() if isinstance(value, str)]
        if texts and collate is not None:
            return (
                f"rows have texts, {', '.join(map(repr, texts))}: if {name} does not take them, "
                "save the data set without (Hugging Face: remove_columns)"
            )
        return (
            "try it alone: build the class, index it with each of these numbers and collate them "
            f"with {name}"
        )

    def _parts(self, batch: Any, count: int) -> tuple[Any, Any]:
        """Divide a batch into samples and labels; of one half of it the other one is empty."""
        nothing = no_labels(count)
        if self._half == "samples":
            return batch, nothing
        if isinstance(batch, Mapping):
            keys = self._labels(batch)
            rest = {key: value for key, value in batch.items() if key not in keys}
            return (nothing if self._half else rest), tuple(batch[key] for key in keys)
        if self._half == "labels":
            return nothing, batch
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise DataError(
                f"data set {self._name!r} returns {_kind(batch)}, not (sample, label) pairs",
                hint="return a sample and a label from __getitem__, or a dict with both",
            )
        *inputs, label = batch
        if self._spec.label and isinstance(inputs[0], Mapping):  # else all keys are refused later
            raise DataError(
                f"data set {self._name!r} returns tuples, whose last part is the label: "
                "'data.label' names a key of rows that are dicts",
                hint="leave it out ('label: []'), or return a dict with the label in it",
            )
        return (tuple(inputs) if len(inputs) > 1 else inputs[0]), label

    def _labels(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of the labels."""
        keys = self._spec.label or tuple(key for key in LABELS if key in batch)
        missing = [key for key in keys if key not in batch]
        if missing or (not self._spec.label and len(keys) != 1):
            what = f"no label {missing[0]!r}" if missing else "no label known"
            hint = f"{suggestion(missing[0], list(batch))}; " if missing else ""
            raise DataError(
                f"data set {self._name!r} returns dicts: there is {what} among their keys with "
                f"numbers: {', '.join(map(repr, batch))}",
                hint=f"{hint}name the label's key in 'data.label'",
            )
        return keys

    def _inputs(self, samples: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of the inputs: those named, else all that hold numbers."""
        named = self._spec.inputs if self._info is None else self._info.names
        names = named or tuple(key for key, x in samples.items() if isinstance(x, Tensor))
        missing = [name for name in names if name not in samples]
        if missing or not names:
            what = f"no input {missing[0]!r}" if missing else "no input"
            hint = suggestion(missing[0], list(samples)) if missing else None
            raise DataError(
                f"data set {self._name!r} returns dicts: there is {what} among their keys with "
                f"numbers: {', '.join(map(repr, samples))}",
                hint=f"{hint or 'return tensors, NumPy arrays or numbers'}; 'data.inputs' names "
                "the inputs",
            )
        return names

    def _check(self, info: DataInfo, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Compare a batch with the first sample; refuse other shapes or types."""
        contract = {"sample": info.samples, "label": info.labels or (info.label,)}
        lengths = set[int]()
        for (what, expected), tensors in zip(contract.items(), (xs, ys), strict=True):
            if len(tensors) != len(expected):
                parts = "inputs" if what == "sample" else "parts"
                raise DataError(
                    f"data set {self._name!r}: {what}s of {len(tensors)} {parts}, but the first "
                    f"had {len(expected)}",
                    hint=f"all {what}s need the same {parts}",
                )
            keys = [f" {name!r}" for name in info.names if what == "sample"] or [""] * len(tensors)
            for key, sample, first in zip(keys, map(sample_of, tensors), expected, strict=True):
                if sample.dtype != first.dtype or not holds(
                    first.shape, first.varying, sample.shape
                ):
                    wanted = "'data.max_length' expects" if first.varying else "the first was"
                    raise DataError(
                        f"data set {self._name!r}: {what}s{key} of {sample}, but {wanted} {first}",
                        hint="a larger 'data.max_length', or shorter samples"
                        if first.varying
                        else _ONE_SHAPE,
                    )
                lengths |= {sample.shape[at] for at in first.varying}
        if len(lengths) > 1:
            shown = " and ".join(map(str, sorted(lengths)))
            raise DataError(
                f"data set {self._name!r}: tensors of one batch have lengths {shown}",
                hint="pad all of a batch to one length",
            )


def _numbers_in(row: Any) -> Any:
    """Return a row in which dicts have their numbers alone, each value as one tensor.

    ``default_collate`` would make a list of tensors of the lists of numbers in them.
    """
    if isinstance(row, tuple) and any(isinstance(part, Mapping) for part in row):
        return tuple(map(_numbers_in, row))
    if not isinstance(row, Mapping):
        return row
    numbers = {}
    for key, value in row.items():
        with suppress(TypeError, ValueError, RuntimeError):  # texts, images, nothing
            numbers[key] = torch.as_tensor(value)
    return numbers


def _numbers(name: str, what: str, parts: Any) -> tuple[Tensor, ...]:
    """Convert to float32 or int64, without a copy of what has that type."""
    tensors = []
    for part in parts if isinstance(parts, list | tuple) and parts else (parts,):
        if not isinstance(part, Tensor) or part.is_complex():
            raise DataError(
                f"data set {name!r}: a {what} is {_kind(part)}, not numbers",
                hint="return tensors, NumPy arrays or numbers"
                + (", of a class its number: names.index(label)" if what == "label" else ""),
            )
        tensors.append(part.to(torch.float32 if part.is_floating_point() else torch.int64))
    return tuple(tensors)


def _kind(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"a tensor of {dtype_name(value)}"
    return f"a {type(value).__name__}"
