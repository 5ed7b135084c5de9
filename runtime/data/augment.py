"""Augmentation of training samples by a user's callables, and the seeds of a batch.

Shape suffix: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dni_runtime.data.imports import import_target
from dni_runtime.errors import DataError, DniError, SpecError
from dni_runtime.spec import Choice, TensorSpec

_LOCATION = ("data", "augment")


def derived_seed(*numbers: int) -> int:
    """Return a seed of 63 bits from numbers of at least 0."""
    (seed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(seed) >> 1


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the context, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(*numbers))
        yield


class Augmentation:
    """Callables that are applied to a batch, one after the other.

    They use torch's global generator, which is seeded for each batch, so that a restart yields the
    same batches, and restored afterwards.
    """

    def __init__(self, functions: Sequence[tuple[str, Callable[[Tensor], Any]]], seed: int) -> None:
        self._functions, self._seed = functions, seed

    def __call__(self, x_B: Tensor, epoch: int, number: int) -> Tensor:
        """Apply them to batch ``number`` of an epoch, (B, …), which may be changed."""
        with seeded(self._seed, epoch, number):
            for name, function in self._functions:
                x_B = _apply(name, function, x_B)
        return x_B

    def check(self, sample: TensorSpec) -> None:
        """Apply each to two samples of zeros; refuse samples that are not floats."""
        if sample.dtype != "float32":
            raise SpecError(
                f"samples are {sample}; only floats can be augmented", location=_LOCATION
            )
        x_B = torch.zeros((2, *sample.shape))
        with seeded(self._seed, 0, 0):
            for number, (name, function) in enumerate(self._functions):
                try:
                    _apply(name, function, x_B.clone())
                except DataError as error:
                    raise SpecError(
                        error.message, location=(*_LOCATION, number), hint=error.hint
                    ) from error.__cause__


def find_augmentation(choices: Sequence[Choice], base: Path, seed: int) -> Augmentation | None:
    """Import and make the callables of a spec; return None if there are none."""
    functions = []
    for number, choice in enumerate(choices):
        name, at = choice.name, (*_LOCATION, number)
        if ":" not in name:
            raise SpecError(
                f"unknown augmentation {name!r}",
                location=at,
                hint="write 'import: package.module:Class' with 'args: {…}', as in "
                "'import: torchvision.transforms.v2:RandomHorizontalFlip'",
            )
        cls = import_target(name, base, what="augmentation", location=at)
        shown = ", ".join(f"{key}={value!r}" for key, value in choice.args.items())
        target = name.partition(":")[2]
        try:
            function = cls(**choice.args)
        except DniError:
            raise
        except Exception as error:
            raise SpecError(
                f"augmentation {name!r} cannot be made: {target}({shown}) raises "
                f"{type(error).__name__}: {error}",
                location=at,
                hint="name a class, whose object is called with each batch",
            ) from error
        if not callable(function):
            raise SpecError(
                f"augmentation {name!r}: an object of {target} cannot be called",
                location=at,
                hint="give the class a method __call__(self, x) that takes a batch (B, …)",
            )
        functions.append((name, function))
    return Augmentation(functions, seed) if functions else None


def _apply(name: str, function: Callable[[Tensor], Any], x_B: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            result = function(x_B)
    except Exception as error:
        raise DataError(
            f"augmentation {name!r} fails on a batch of shape {tuple(x_B.shape)}: "
            f"{type(error).__name__}: {error}",
            hint="it is called with a batch of float32 samples, before 'flatten'",
        ) from error
    if isinstance(result, Tensor) and (result.shape, result.dtype) == (x_B.shape, x_B.dtype):
        return result
    what = (
        f"{str(result.dtype).removeprefix('torch.')} of shape {tuple(result.shape)}"
        if isinstance(result, Tensor)
        else f"a {type(result).__name__}"
    )
    raise DataError(
        f"augmentation {name!r} makes {what} of a batch of float32 of shape {tuple(x_B.shape)}",
        hint="an augmentation must keep shape and type",
    )
