"""Data for the head, or its labels for the tail: data sets by name, as batches in a fixed order.

:func:`describe` returns a data set's shapes and sizes, :func:`locate` the folder that the worker
must see, :func:`open_data` the batches; :func:`with_defaults` fills in a data set's own options.
``docs/data.md`` is the documentation for users.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dni_runtime.data.augment import find_augmentation
from dni_runtime.data.images import PUBLISHED, find_digits, find_published
from dni_runtime.data.npz import find_npz
from dni_runtime.data.source import DataSource, Found, resolve, used
from dni_runtime.data.splits import Batch, Half, Halves, Split
from dni_runtime.data.text import TextOptions, find_text
from dni_runtime.data.user import absolute, find_user, with_path
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import NO_LABEL, DataInfo, DataSpec, Preprocessing
from dni_runtime.spec.choices import validated
from dni_runtime.spec.load import suggestion
from dni_runtime.spec.named import Frozen

__all__ = [
    "DATASETS",
    "Batch",
    "DataSet",
    "DataSource",
    "Half",
    "describe",
    "locate",
    "open_data",
    "with_defaults",
]


class DataSet(NamedTuple):
    # From the spec, the folder of ``chain.yaml`` and, if it has any, its options.
    find: Callable[..., Found]
    options: type[Frozen] | None = None  # of its ``args``; None: it takes none
    halves: bool = False  # a file may hold samples or labels alone


DATASETS: dict[str, DataSet] = {
    "digits": DataSet(find_digits),
    **dict.fromkeys(PUBLISHED, DataSet(find_published)),
    "npz": DataSet(find_npz, halves=True),
    "text": DataSet(find_text, TextOptions),
}


def with_defaults(spec: DataSpec, base: Path) -> DataSpec:
    """Return the spec with all options of its data set; of a user's class with its ``path``."""
    if spec.labels is not None and ":" in (spec.labels.dataset or ""):
        spec = spec.model_copy(update={"labels": absolute(spec.labels, base)})
    if ":" in spec.dataset:
        return with_path(spec, base)
    options = _options(spec)
    if options is None:
        return spec
    return spec.model_copy(update={"args": options.model_dump(mode="json")})


def describe(spec: DataSpec, base: Path) -> DataInfo:
    """Describe the data without loading it; relative paths and a user's imports start at ``base``.

    Raises ``SpecError`` if there are no such data, and ``DataError`` if they cannot be used.
    """
    info = _found(spec, base).info
    augment = find_augmentation(spec.augment, base, seed=0)
    for field in ("flatten", "augment"):
        if info.further and getattr(spec, field):
            raise SpecError(
                f"'{field}' is for data with one input, and these have {len(info.samples)}",
                location=("data", field),
                hint="do it in the data set's own __getitem__",
            )
    if augment is not None:
        augment.check(info.sample)
    return used(info, spec)


def locate(spec: DataSpec, base: Path) -> Path | None:
    """Return the folder or file that the head must be able to read; None if it needs none."""
    if ":" in spec.dataset:
        return None if spec.path is None else resolve(spec.path, base)
    return _find(spec, base, "samples").path


def open_data(
    spec: DataSpec,
    base: Path,
    *,
    seed: int,
    half: Half | None = None,
    trained: Preprocessing | None = None,
    predicts: bool = False,
) -> DataSource:
    """Load the data, or one ``half`` of them: samples, or labels (of ``spec.of_labels``).

    ``seed``, at least 0, is of the order of the training samples and of their augmentation. With
    ``trained``, of a training on other data, evaluation samples are normalised as those were. What
    only ``predicts`` needs no training samples: without any, they are those for evaluation.
    """
    found = _found(spec, base, half)
    augment = find_augmentation(spec.augment, base, seed)
    train, evaluation = found.load()
    if trained is not None and spec.normalize:
        evaluation = evaluation.normalized(trained)
    train = evaluation if predicts and not len(train) else train
    return DataSource(found.info, train, evaluation, spec, seed=seed, augment=augment)


def _found(spec: DataSpec, base: Path, half: Half | None = None) -> Found:
    """Find the data, with its labels where those are; of one half of it the other one is empty."""
    if half is not None:
        found = _find(spec, base, half)

        def load() -> tuple[Split, Split]:
            train, evaluation = found.load()
            return one(train), one(evaluation)

        def one(split: Split) -> Split:
            return Halves(split, None) if half == "samples" else Halves(None, split)

        info = found.info
        if half == "labels":
            info = info.model_copy(update={"sample": NO_LABEL, "further": ()})
        return Found(info, found.path, load)
    if not spec.splits:
        return _find(spec, base)
    samples, labels = _find(spec, base, "samples"), _find(spec.of_labels, base, "labels")
    for what in ("train_samples", "eval_samples"):
        counts = getattr(samples.info, what), getattr(labels.info, what)
        if None not in counts and counts[0] != counts[1]:
            part = "training" if what == "train_samples" else "evaluation"
            raise DataError(
                f"{counts[0]} {part} samples in {spec.dataset!r}, but {counts[1]} labels in "
                f"{spec.of_labels.dataset!r}",
                hint="both need the same samples in the same order",
            )
    own = {name: getattr(labels.info, name) for name in ("label", "labels", "classes")}

    def both() -> tuple[Split, Split]:
        pairs = zip(samples.load(), labels.load(), strict=True)
        train, evaluation = (Halves(*pair) for pair in pairs)
        return train, evaluation

    return Found(samples.info.model_copy(update=own), samples.path, both)


def _find(spec: DataSpec, base: Path, half: Half | None = None) -> Found:
    """Find one data set; of ``half`` if samples and labels are data sets of their own."""
    alone = {"half": half} if spec.splits else {}
    if ":" in spec.dataset:
        return find_user(spec, base, **alone)
    options = _options(spec)
    given = (spec, base) if options is None else (spec, base, options)
    return DATASETS[spec.dataset].find(*given, **(alone if DATASETS[spec.dataset].halves else {}))


def _options(spec: DataSpec) -> Frozen | None:
    """Return the options of a data set that has a name; None if it has none."""
    if spec.dataset not in DATASETS:
        raise SpecError(
            f"unknown data set {spec.dataset!r}",
            location=("data", "dataset"),
            hint=f"{suggestion(spec.dataset, list(DATASETS))}, or 'package.module:Class' "
            "for a torch.utils.data.Dataset, or a function that returns one",
        )
    model = DATASETS[spec.dataset].options
    if model is None:
        if spec.args:
            raise SpecError(
                f"data set {spec.dataset!r} takes no arguments, but got {', '.join(spec.args)}",
                location=("data", "args"),
                hint="leave out 'args'",
            )
        return None
    return validated(model, spec.args, ("data", "args"), f"data set {spec.dataset!r}: ")
