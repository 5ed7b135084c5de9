"""A user's own ``torch.utils.data.Dataset``.

The class is instantiated twice, with ``train=True`` and with ``train=False``. The runtime chooses
the order of samples, so that a restart yields the same batches.

Shape suffixes: N samples of a split, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from dni_runtime.data.imports import import_class
from dni_runtime.data.source import Batch, Found, Half, Split, resolve
from dni_runtime.errors import DataError, DniError
from dni_runtime.packing import no_labels, pack, row_of
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec
from dni_runtime.wire import INPUTS_LIMIT


def find_user(spec: DataSpec, base: Path, half: Half | None = None) -> Found:
    """Import a user's class, make its two data sets, and read one sample.

    Args:
        spec: The data set.
        base: Folder of ``chain.yaml``, where imports start.
        half: What each item is, if not a (sample, label) pair.

    Raises:
        SpecError: The import fails, or the class is not a data set.
        DataError: The class fails, or does not return (sample, label) pairs of numbers; a sample
            may be a tuple of several inputs, a label one of several labels.
    """
    name = spec.dataset
    cls = import_class(name, base, what="data set", location=("data", "dataset"))
    path = None if spec.path is None else resolve(spec.path, base)
    args = dict(spec.args) if path is None else {"path": str(path), **spec.args}
    train, evaluation = _make(name, cls, args, train=True), _make(name, cls, args, train=False)
    _, xs, ys = UserSplit(name, train, half=half).tensors(torch.tensor([0]))
    sample, *further = map(_sample, xs)
    labels = tuple(map(_sample, ys))
    info = DataInfo(
        sample=sample,
        further=tuple(further),
        label=row_of(labels),
        labels=labels if len(labels) > 1 else (),
        classes=_classes(train) if labels[0].dtype == "int64" and len(labels) == 1 else None,
        train_samples=_length(train),
        eval_samples=_length(evaluation),
    )
    return Found(
        info,
        path,
        lambda: (UserSplit(name, train, info, half), UserSplit(name, evaluation, info, half)),
    )


class UserSplit(Split):
    """Samples of a user's data set."""

    slow: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        dataset: Dataset[Any],
        info: DataInfo | None = None,
        half: Half | None = None,
    ) -> None:
        """Wrap a data set.

        Args:
            name: Its import path, for messages.
            dataset: A data set with ``__len__`` and ``__getitem__``.
            info: Shapes and types that each batch must have, or None for no check.
            half: What each item is, if not a (sample, label) pair.
        """
        self._name, self._dataset, self._info, self._half = name, dataset, info, half

    def __len__(self) -> int:
        return _length(self._dataset)

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples of these numbers.

        Raises:
            DataError: The data set fails, or returns other shapes or types than at first.
        """
        several, xs, ys = self.tensors(order_B)
        if self._info is not None:
            self._check(self._info, xs, ys)
        if len(ys) == 1:
            return xs if several else xs[0], ys[0]
        dtype = torch.float32 if any(y.is_floating_point() for y in ys) else torch.int64
        return xs if several else xs[0], pack([y.to(dtype) for y in ys])

    def tensors(self, order_B: Tensor) -> tuple[bool, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return inputs and labels of these samples, and whether inputs come as a tuple.

        Raises:
            DataError: The data set fails, or does not return pairs of numbers.
        """
        order = order_B.tolist()
        try:
            # As in torch.utils.data.DataLoader: several at once if the data set supports it.
            several = getattr(self._dataset, "__getitems__", None)
            samples = several(order) if several else [self._dataset[index] for index in order]
            batch = default_collate(samples)
        except Exception as error:
            shown = ", ".join(map(str, order[:4])) + (", …" if len(order) > 4 else "")
            raise DataError(
                f"data set {self._name!r} failed for samples {shown}: "
                f"{type(error).__name__}: {error}",
                hint="try it alone: build the class, index it with each of these numbers and "
                "collate them with torch.utils.data.default_collate",
            ) from error
        nothing = no_labels(len(order))
        if self._half is not None:
            batch = (batch, nothing) if self._half == "samples" else (nothing, batch)
        elif not isinstance(batch, list | tuple) or len(batch) != 2:
            raise DataError(
                f"data set {self._name!r} returns {_kind(batch)}, not (sample, label) pairs",
                hint="return a sample and a label from __getitem__",
            )
        given, label = batch
        several = isinstance(given, list | tuple)
        xs = tuple(_number(self._name, "sample", one) for one in (given if several else [given]))
        labels = label if isinstance(label, list | tuple) and label else [label]
        ys = tuple(_number(self._name, "label", one) for one in labels)
        if not xs or len(xs) > INPUTS_LIMIT:
            raise DataError(
                f"data set {self._name!r} returns samples of {len(xs)} inputs",
                hint=f"return from 1 to {INPUTS_LIMIT}",
            )
        return several, xs, ys

    def _check(self, info: DataInfo, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Compare a batch with the first sample.

        Raises:
            DataError: It has other shapes or types.
        """
        wanted = {"sample": info.samples, "label": info.labels or (info.label,)}
        for (what, expected), found in zip(wanted.items(), (xs, ys), strict=True):
            if len(found) != len(expected):
                parts = "inputs" if what == "sample" else "parts"
                raise DataError(
                    f"data set {self._name!r}: {what}s of {len(found)} {parts}, but the first had "
                    f"{len(expected)}",
                    hint=f"all {what}s need the same {parts}",
                )
            for one, first in zip(map(_sample, found), expected, strict=True):
                if one != first:
                    raise DataError(
                        f"data set {self._name!r}: {what}s of {one}, but the first was {first}",
                        hint="all samples need one shape and one type",
                    )


def _sample(batch: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(batch.shape[1:]), dtype=_dtype_name(batch))


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]  # _make() has seen its __len__


def _number(name: str, what: str, part: object) -> Tensor:
    """Convert to float32 or int64, without a copy if it has that type."""
    if not isinstance(part, Tensor) or part.is_complex():
        raise DataError(
            f"data set {name!r}: a {what} is {_kind(part)}, not numbers",
            hint="return tensors, NumPy arrays or numbers",
        )
    return part.to(torch.float32 if part.is_floating_point() else torch.int64)


def _kind(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"a tensor of {_dtype_name(value)}"
    return f"a {type(value).__name__}"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _classes(dataset: object) -> int | None:
    """Return the number of classes, if the data set declares it (torchvision: ``classes``)."""
    told = getattr(dataset, "num_classes", None) or getattr(dataset, "classes", None)
    if isinstance(told, int):
        return told
    return len(told) if isinstance(told, list | tuple) else None


def _make(name: str, cls: type[Any], args: dict[str, Any], *, train: bool) -> Dataset[Any]:
    shown = ", ".join(f"{key}={value!r}" for key, value in {"train": train, **args}.items())
    try:
        dataset = cls(train=train, **args)
    except DniError:
        raise
    except Exception as error:
        raise DataError(
            f"data set {name!r} cannot be made: {cls.__name__}({shown}) raises "
            f"{type(error).__name__}: {error}",
            hint="it is called with 'train', with 'path' if data.path is set, and with data.args",
        ) from error
    if isinstance(dataset, IterableDataset) or not all(
        hasattr(dataset, method) for method in ("__len__", "__getitem__")
    ):
        raise DataError(
            f"data set {name!r} has no __len__ and __getitem__",
            hint="only such data sets can be shuffled and resumed after a restart; "
            "derive it from torch.utils.data.Dataset",
        )
    try:
        count = len(dataset)
    except Exception as error:
        raise DataError(
            f"data set {name!r}: its __len__ fails: {type(error).__name__}: {error}"
        ) from error
    if count == 0 and train:
        raise DataError(f"data set {name!r}: {cls.__name__}({shown}) is empty")
    result: Dataset[Any] = dataset
    return result
