"""Short ways to say what most tests need: tensors' specs, and those of a chain's workers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import DataInfo, TensorSpec, WorkerSpec, parse_chain


def float32(*shape: int) -> TensorSpec:
    """Return the spec of floats; without sizes, of one for each sample."""
    return TensorSpec(shape=shape, dtype="float32")


def int64(*shape: int) -> TensorSpec:
    """Return the spec of integers; without sizes, of one for each sample."""
    return TensorSpec(shape=shape, dtype="int64")


def varying(sample: TensorSpec, *dimensions: int) -> TensorSpec:
    """Return a spec of samples with a length of their own; its first dimension by default."""
    return sample.model_copy(update={"varying": dimensions or (0,)})


def linear(*sizes: int, between: str = "") -> str:
    """Return the text of a chain's modules: a, b, … of a linear layer each, and what is between."""
    text = "modules:\n"
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        layer = f"{{Linear: {{in_features: {inputs}, out_features: {outputs}}}}}"
        more = f", {between}" if between and number < len(sizes) - 2 else ""
        text += f"- {{name: {'abcdefgh'[number]}, layers: [{layer}{more}]}}\n"
    return text


def specs_of(text: str, info: DataInfo) -> tuple[WorkerSpec, ...]:
    """Return the specs of the modules of a chain file's text."""
    return worker_specs(parse_chain(text), info)


def refused(
    text: str, info: DataInfo, message: str, at: str | tuple[str | int, ...] | None = None
) -> SpecError:
    """Check that a chain is refused by these words (a pattern), and where; return the error."""
    with pytest.raises(SpecError, match=message) as caught:
        specs_of(text, info)
    assert at in (None, caught.value.path, caught.value.location)
    return caught.value
