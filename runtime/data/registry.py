"""The data sets by name: their options, description, location and batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from dni_runtime.data.augment import find_augmentation
from dni_runtime.data.cifar import find_cifar10
from dni_runtime.data.idx import find_idx
from dni_runtime.data.npz import find_digits, find_npz
from dni_runtime.data.paths import resolve
from dni_runtime.data.source import DataSource, Found, used
from dni_runtime.data.text import TextOptions, find_text
from dni_runtime.data.user import find_user
from dni_runtime.errors import SpecError
from dni_runtime.spec import DataInfo, DataSpec
from dni_runtime.spec.load import explain_details, suggestion
from dni_runtime.spec.named import Frozen


class DataSet(NamedTuple):
    """A data set that has a name.

    Attributes:
        find: Finds it, from the spec, the folder of ``chain.yaml`` and, if it has any, its options.
        options: Model of its ``args``; None if it takes none.
    """

    find: Callable[..., Found]
    options: type[Frozen] | None = None


DATASETS: dict[str, DataSet] = {
    "digits": DataSet(find_digits),
    "mnist": DataSet(find_idx),
    "fashion-mnist": DataSet(find_idx),
    "cifar10": DataSet(find_cifar10),
    "npz": DataSet(find_npz),
    "text": DataSet(find_text, TextOptions),
}


def with_defaults(spec: DataSpec) -> DataSpec:
    """Return the spec with all options of its data set; a user's class keeps its args.

    Raises:
        SpecError: There is no such data set or option, or an option's value is not allowed.
    """
    options = None if ":" in spec.dataset else _options(spec)
    if options is None:
        return spec
    return spec.model_copy(update={"args": options.model_dump(mode="json")})


def describe(spec: DataSpec, base: Path) -> DataInfo:
    """Describe the data without loading it.

    Args:
        spec: The data set.
        base: Folder of ``chain.yaml``, where relative paths and a user's imports start.

    Raises:
        SpecError: There is no such data set, class or augmentation, or they do not fit together.
        DataError: Its files are missing or not valid, or its samples do not fill one batch.
    """
    info = _find(spec, base).info
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
    """Return the folder or file that the head must be able to read; None if it needs none.

    Args:
        spec: The data set.
        base: Folder of ``chain.yaml``.

    Raises:
        SpecError: There is no such data set.
        DataError: The files are missing.
    """
    if ":" in spec.dataset:
        return None if spec.path is None else resolve(spec.path, base)
    return _find(spec, base).path


def open_data(spec: DataSpec, base: Path, *, seed: int) -> DataSource:
    """Load the data.

    Args:
        spec: The data set.
        base: Folder of ``chain.yaml``.
        seed: Seed of the order of the training samples and of their augmentation, at least 0.

    Raises:
        SpecError: There is no such data set, class or augmentation.
        DataError: Its files are missing or damaged, or its samples do not fill one batch.
    """
    found = _find(spec, base)
    augment = find_augmentation(spec.augment, base, seed)
    train, evaluation = found.load()
    return DataSource(found.info, train, evaluation, spec, seed=seed, augment=augment)


def _find(spec: DataSpec, base: Path) -> Found:
    if ":" in spec.dataset:
        return find_user(spec, base)
    options = _options(spec)
    given = (spec, base) if options is None else (spec, base, options)
    return DATASETS[spec.dataset].find(*given)


def _options(spec: DataSpec) -> Frozen | None:
    """Return the options of a data set that has a name; None if it has none."""
    if spec.dataset not in DATASETS:
        raise SpecError(
            f"unknown data set {spec.dataset!r}",
            location=("data", "dataset"),
            hint=f"{suggestion(spec.dataset, list(DATASETS))}, or 'package.module:Class' "
            "for a torch.utils.data.Dataset",
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
    try:
        return model.model_validate(spec.args)
    except ValidationError as error:
        inner, message, hint = explain_details(error, model)
        raise SpecError(
            f"data set {spec.dataset!r}: {message}", location=("data", "args", *inner), hint=hint
        ) from None
