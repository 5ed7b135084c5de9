"""A user's own ``torch.utils.data.Dataset``, or a function that returns one.

It is called twice, with ``train=True`` and with ``train=False``, or with the keywords of
``data.train`` and of ``data.evaluation``. The runtime chooses the order of samples, so that a
restart yields the same batches.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from dni_runtime.data.augment import seeded
from dni_runtime.data.imports import import_target, make
from dni_runtime.data.rows import UserSplit
from dni_runtime.data.source import Found, resolve
from dni_runtime.data.splits import Half, Split, sample_of
from dni_runtime.errors import DataError, DniError, SpecError
from dni_runtime.files import expanded
from dni_runtime.packing import row_of
from dni_runtime.spec import DataInfo, DataSpec, TensorSpec
from dni_runtime.spec.data import PATH, LabelsSpec

Tensors = tuple[TensorSpec, ...]
_PATHS = re.compile(r"(^|_)(root|path|folder|directory|dir|file)$")
"""Names of arguments that are paths: ``root``, ``img_dir``, ``annotations_file``."""


def with_path(spec: DataSpec, base: Path) -> DataSpec:
    """Return the spec with the paths in its keywords relative to ``data.path``.

    Without a ``data.path`` they start at ``base``, the folder of ``chain.yaml``, and the folder
    that they have in common becomes the ``data.path``. A class that has no keywords of its own for
    training and evaluation would get it as an argument: there they become absolute.
    """
    if spec.train is None:
        return absolute(spec, base)

    root = base if spec.path is None else _below(base, spec.path)
    places = {
        (part, key): place
        for part in ("args", "train", "evaluation")
        for key, place in paths_in(getattr(spec, part) or {}, root).items()
    }
    if not places:
        return spec
    if spec.path is None:
        root = Path(os.path.commonpath(places.values()))
        if root.parent == root:
            shown = " and ".join(map(str, places.values()))
            raise SpecError(
                f"{shown} have no folder in common",
                location=("data",),
                hint="bring them into one folder, which containers get, and set 'data.path' to it",
            )
    update: dict[str, Any] = {"path": spec.path or str(root)}
    for (part, key), place in places.items():
        value = str(place)
        if place.is_relative_to(root):
            inner = place.relative_to(root).as_posix()
            value = PATH if inner == "." else f"{PATH}/{inner}"
        update[part] = {**update.get(part, getattr(spec, part)), key: value}
    return spec.model_copy(update=update)


S = TypeVar("S", DataSpec, LabelsSpec)


def absolute(spec: S, base: Path) -> S:
    """Return the spec with absolute paths in ``args``, unless its class gets a ``path``."""
    found = {} if spec.path is not None else paths_in(spec.args, base)
    return spec.model_copy(update={"args": spec.args | {key: str(at) for key, at in found.items()}})


def paths_in(arguments: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Return those of a data set's keywords that are paths, which start in a folder."""
    return {
        key: _below(folder, value)
        for key, value in arguments.items()
        if _PATHS.search(key) and isinstance(value, str) and not re.search("://|{path}", value)
    }


def _below(root: Path, path: str) -> Path:  # links are not followed: containers get the folder
    return Path(os.path.normpath(root / expanded(path)))


def find_user(spec: DataSpec, base: Path, half: Half | None = None) -> Found:
    """Import a user's class or function, make its two data sets, and read one sample.

    ``half`` is what each item is, if not a sample with its label.
    """
    path = None if spec.path is None else resolve(spec.path, base)
    target = import_target(spec.dataset, base, what="data set", location=("data", "dataset"))
    collate = _find_collate(spec, base)
    with _same_draws():
        start = _states()
        made = [
            _make(spec, target, arguments, needed=number == 0)
            for number, arguments in enumerate(_arguments(spec, base, path))
        ]
        train, evaluation = made if len(made) > 1 else (made[0], Subset(made[0], []))
        drawn = _states() != start
    if drawn:
        _check_apart(spec, train, evaluation)
    splits = [UserSplit(spec, dataset, collate, half) for dataset in (train, evaluation)]
    with torch.random.fork_rng(devices=[]):
        xs, ys, names = splits[0].tensors(torch.tensor([0]))
    draws = [map(split.reads_randomly, _spread(len(split))) for split in splits]
    _check_classes(spec, train, evaluation)
    samples, labels = tuple(map(sample_of, xs)), tuple(map(sample_of, ys))
    if spec.max_length is not None:
        samples, labels = _with_lengths(spec, splits[0], samples, labels)
    sample, *further = samples
    info = DataInfo(
        sample=sample,
        further=tuple(further),
        names=names,
        label=row_of(labels),
        labels=labels if len(labels) > 1 else (),
        classes=_classes(train) if labels[0].dtype == "int64" and len(labels) == 1 else None,
        train_samples=len(splits[0]),
        eval_samples=len(splits[1]),
    )

    def load() -> tuple[Split, Split]:
        return (
            UserSplit(spec, train, collate, half, info, any(draws[0]), drawn),
            UserSplit(spec, evaluation, collate, half, info, any(draws[1]), drawn),
        )

    return Found(info, path, load)


_LOOKED_AT = 64
"""Samples that are read to find one of another length than the first."""


def _with_lengths(
    spec: DataSpec, split: UserSplit, samples: Tensors, labels: Tensors
) -> tuple[Tensors, Tensors]:
    """Return which dimensions have a length of their own in each batch, with the largest size.

    They are first dimensions that are as long as the first input's, also in a sample of another
    length if there is one among the first.
    """
    assert spec.max_length is not None
    if not samples[0].shape:
        raise DataError(
            f"data set {spec.dataset!r}: samples of {samples[0]} have no length",
            hint="leave out 'data.max_length'",
        )
    first = lengths = _first_sizes(samples, labels)
    for number in range(1, min(len(split), _LOOKED_AT)):
        with torch.random.fork_rng(devices=[]):
            xs, ys, _ = split.tensors(torch.tensor([number]))
        found = _first_sizes(map(sample_of, xs), map(sample_of, ys))
        if len(found) == len(first) and found[0] != first[0]:
            lengths = found
            break
    if (longest := max(first[0], lengths[0])) > spec.max_length:
        raise DataError(
            f"data set {spec.dataset!r} has samples of length {longest}, 'data.max_length' is "
            f"{spec.max_length}",
            hint="a larger 'data.max_length', or shorter samples",
        )
    described = [
        one.model_copy(update={"shape": (spec.max_length, *one.shape[1:]), "varying": (0,)})
        if sizes == [first[0], lengths[0]]
        else one
        for one, *sizes in zip((*samples, *labels), first, lengths, strict=True)
    ]
    return tuple(described[: len(samples)]), tuple(described[len(samples) :])


def _first_sizes(samples: Iterable[TensorSpec], labels: Iterable[TensorSpec]) -> list[int]:
    return [one.shape[0] if one.shape else 0 for one in (*samples, *labels)]


def _spread(count: int) -> set[int]:
    """Numbers of a few samples: a data set may draw random numbers for some only."""
    return {count * n // 4 for n in range(4)} if count else set()


def _check_classes(spec: DataSpec, train: Dataset[Any], evaluation: Dataset[Any]) -> None:
    """Refuse data sets that number their classes each in its own way, as ImageFolder does."""
    ours, theirs = (getattr(one, "classes", None) for one in (train, evaluation))
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return
    for number, (name, other) in enumerate(zip_longest(ours, theirs)):
        if other is None:  # the last ones are missing
            return
        if name != other:
            raise DataError(
                f"data set {spec.dataset!r}: class {number} is {name!r} in the training, and "
                f"{other!r} in the evaluation",
                hint="both need the same classes in the same order: for a data set that finds "
                "them as folders, make an empty folder for each that is missing",
            )


def _states() -> tuple[object, ...]:
    theirs = numpy.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), random.getstate(), theirs["pos"], theirs["key"].tobytes()


@contextmanager
def _same_draws() -> Iterator[None]:
    """Let the global generators draw the same numbers in every process, and after a restart."""
    before = random.getstate(), numpy.random.get_state()
    with seeded(0):
        random.seed(0)
        numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])


def _check_apart(spec: DataSpec, train: Dataset[Any], evaluation: Dataset[Any]) -> None:
    """Refuse samples for evaluation that are drawn from those for training."""
    if not (isinstance(train, Subset) and isinstance(evaluation, Subset)):
        return
    both = set(train.indices) & set(evaluation.indices)
    if both and len(train.dataset) == len(evaluation.dataset):  # type: ignore[arg-type]
        raise DataError(
            f"data set {spec.dataset!r} is split at random: {len(both)} of "
            f"{len(evaluation.indices)} samples for evaluation are also for training",
            hint="each call draws another split: give it a generator of its own, as "
            "'random_split(…, generator=torch.Generator().manual_seed(0))'",
        )


def _classes(dataset: object) -> int | None:
    """Return the number of classes, if the data set declares it (torchvision: ``classes``)."""
    told = getattr(dataset, "num_classes", None) or getattr(dataset, "classes", None)
    if isinstance(told, int):
        return told
    return len(told) if isinstance(told, list | tuple) else None


def _find_collate(spec: DataSpec, base: Path) -> Callable[[list[Any]], Any] | None:
    if spec.collate is None:
        return None
    value = {"import": spec.collate.name, **({"args": args} if (args := spec.collate.args) else {})}
    collate: Callable[[list[Any]], Any] = make(value, base, ("data", "collate"))
    if not callable(collate):
        raise SpecError(
            f"{spec.collate.name!r} cannot be called",
            location=("data", "collate"),
            hint="name a function of a list of rows, as 'package.module:function'",
        )
    return collate


def _arguments(spec: DataSpec, base: Path, path: Path | None) -> Iterable[dict[str, Any]]:
    """Yield the keywords of a user's class for training and, if there are any, for evaluation."""
    for part, keywords in (("train", spec.train), ("evaluation", spec.evaluation)):
        if keywords is None and spec.train is not None:
            return  # what is held out is all
        arguments: dict[str, Any] = {}
        if keywords is None:
            arguments = {"train": part == "train"} | ({} if path is None else {"path": str(path)})
        for place, values in (("args", spec.args), (part, keywords or {})):
            for key, value in values.items():
                if keywords is not None and isinstance(value, str) and path is not None:
                    value = value.replace(PATH, str(path))
                argument = make(value, base, ("data", place, key))
                arguments[key] = _in_order(argument) if key.endswith("transform") else argument
        yield arguments


def _in_order(transforms: Any) -> Any:
    """Return what applies a list of transforms, each to the result of the one before."""
    if not isinstance(transforms, list):
        return transforms

    def apply(x: Any) -> Any:
        for transform in transforms:
            x = transform(x)
        return x

    return apply


def _make(
    spec: DataSpec, target: Callable[..., Any], arguments: dict[str, Any], *, needed: bool
) -> Dataset[Any]:
    """Call a user's class or function; see that it gives a data set, not empty if ``needed``."""
    name = spec.dataset
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    call = f"{name.partition(':')[2]}({shown})"
    try:
        dataset = target(**arguments)
    except DniError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data set {name!r} cannot be made: {call} raises {type(error).__name__}: {error}",
            hint="it is called with 'train', with 'path' if data.path is set, and with data.args; "
            "for other keywords set 'data.train' and 'data.evaluation'"
            if spec.train is None
            else "it is called with data.args, and with data.train or data.evaluation",
        ) from error
    if isinstance(dataset, Mapping):
        raise DataError(
            f"data set {name!r}: {call} returns data sets by name: {', '.join(map(str, dataset))}",
            hint="name one by the arguments in 'data.train' and in 'data.evaluation'",
        )
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
    if count == 0 and needed:
        raise DataError(f"data set {name!r}: {call} is empty")
    result: Dataset[Any] = dataset
    return result
