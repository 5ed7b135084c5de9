"""A user's own ``torch.utils.data.Dataset``.

The class is instantiated twice, with ``train=True`` and with ``train=False``. The runtime chooses
the order of samples, so that a restart yields the same batches.

Shape suffixes: N samples of a split, B samples of a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from dni_runtime.data.imports import import_class
from dni_runtime.data.paths import resolve
from dni_runtime.data.source import Batch, Found, Split
from dni_runtime.errors import DataError, DniError
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec
from dni_runtime.wire import INPUTS_LIMIT


def find_user(spec: DataSpec, base: Path) -> Found:
    """Import a user's class, make its two data sets, and read one sample.

    Raises:
        SpecError: The import fails, or the class is not a data set.
        DataError: The class fails, or does not return (sample, label) pairs of numbers; a sample
            may be a tuple of several inputs.
    """
    name = spec.dataset
    cls = import_class(name, base, what="data set", location=("data", "dataset"))
    path = None if spec.path is None else resolve(spec.path, base)
    args = dict(spec.args) if path is None else {"path": str(path), **spec.args}
    train, evaluation = _make(name, cls, args, train=True), _make(name, cls, args, train=False)
    x, y = UserSplit(name, train).batch(torch.tensor([0]))
    sample, *further = map(_sample, x if isinstance(x, tuple) else (x,))
    info = DataInfo(
        sample=sample,
        further=tuple(further),
        label=_sample(y),
        classes=_classes(train) if y.dtype == torch.int64 else None,
        train_samples=_length(train),
        eval_samples=_length(evaluation),
    )
    return Found(
        info,
        path,
        lambda: (UserSplit(name, train, info), UserSplit(name, evaluation, info)),
    )


class UserSplit(Split):
    """Samples of a user's data set."""

    slow: ClassVar[bool] = True

    def __init__(self, name: str, dataset: Dataset[Any], info: DataInfo | None = None) -> None:
        """Wrap a data set.

        Args:
            name: Its import path, for messages.
            dataset: A data set with ``__len__`` and ``__getitem__``.
            info: Shapes and types that each batch must have, or None for no check.
        """
        self._name, self._dataset, self._info = name, dataset, info

    def __len__(self) -> int:
        return _length(self._dataset)

    def batch(self, order_B: Tensor) -> Batch:
        """Return the samples of these numbers.

        Raises:
            DataError: The data set fails, or returns other shapes or types than at first.
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
        return self._checked(batch)

    def _checked(self, batch: object) -> Batch:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise DataError(
                f"data set {self._name!r} returns {_kind(batch)}, not (sample, label) pairs",
                hint="return a sample and a label from __getitem__",
            )
        given, label = batch
        several = isinstance(given, list | tuple)
        xs = tuple(_number(self._name, "sample", one) for one in (given if several else [given]))
        y = _number(self._name, "label", label)
        if not xs or len(xs) > INPUTS_LIMIT:
            raise DataError(
                f"data set {self._name!r} returns samples of {len(xs)} inputs",
                hint=f"return from 1 to {INPUTS_LIMIT}",
            )
        if self._info is not None:
            expected = [*self._info.samples, self._info.label]
            found = [_sample(one) for one in (*xs, y)]
            kinds = ["sample"] * len(xs) + ["label"]
            if len(found) != len(expected):
                raise DataError(
                    f"data set {self._name!r}: samples of {len(xs)} inputs, but the first had "
                    f"{len(self._info.samples)}",
                    hint="all samples need the same inputs",
                )
            for what, one, other in zip(kinds, found, expected, strict=True):
                if one != other:
                    raise DataError(
                        f"data set {self._name!r}: {what}s of {one}, but the first was {other}",
                        hint="all samples need one shape and one type",
                    )
            classes = self._info.classes
            if classes is not None and int(y.max()) >= classes:
                raise DataError(
                    f"data set {self._name!r}: label {int(y.max())}, but it declares {classes} "
                    "classes",
                    hint="labels are numbered from 0; see its 'classes' or 'num_classes'",
                )
        return xs if several else xs[0], y


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
