"""Shapes of modules' outputs, found by running their layers on a batch without memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dni_runtime.core.attention import AttentionWatch, has_attention_layer
from dni_runtime.core.choices import Location
from dni_runtime.core.layers import build_layer
from dni_runtime.core.recurrent import CELLS
from dni_runtime.core.training import empty_batch
from dni_runtime.errors import SpecError
from dni_runtime.spec import ChainSpec, DataInfo, LayerSpec, TensorSpec

BATCH = 2
"""Samples in the batch that shapes are inferred with: BatchNorm needs more than one."""


class Inferred(NamedTuple):
    """Result of running a module on the meta device.

    Attributes:
        output: One sample at its output.
        attends: Whether it has attention.
    """

    output: TensorSpec
    attends: bool


def infer_shapes(chain: ChainSpec, info: DataInfo) -> list[Inferred]:
    """Run every layer on the meta device, and describe each module.

    Raises:
        SpecError: A layer is unknown, or does not fit what it gets.
    """
    modules: list[Inferred] = []
    for index, (module, sources) in enumerate(zip(chain.modules, chain.graph.sources, strict=True)):
        given = [modules[source].output for source in sources]
        given += [info.samples[one] for one in data_of(chain, index, info)]
        attends = False
        for number, layer in enumerate(module.layers):
            at: Location = ("modules", index, "layers", number)
            output, found = _infer_layer(layer, given, at, first=number == 0 and index > 0)
            given, attends = [output], attends | found
        modules.append(Inferred(given[0], attends))
    return modules


def data_of(chain: ChainSpec, index: int, info: DataInfo) -> tuple[int, ...]:
    """Return which inputs of the data a module takes.

    Raises:
        SpecError: The data has no such input.
    """
    data, count = chain.graph.data[index], len(info.samples)
    wanted = tuple(range(count)) if data is None else data
    if any(one >= count for one in wanted):
        raise SpecError(
            f"module {chain.modules[index].name!r} takes 'data.{max(wanted)}', but the data has "
            + ("one input, 'data.0'" if count == 1 else f"{count}, up to 'data.{count - 1}'"),
            location=("modules", index, "inputs"),
        )
    return wanted


def _infer_layer(
    layer: LayerSpec, given: Sequence[TensorSpec], at: Location, *, first: bool
) -> Inferred:
    for key in ("layers", "shortcut"):  # a block's own layers first: their errors say more
        inner = given
        for number, one in enumerate(getattr(layer, key)):
            place = (key, number) if layer.type == "Residual" else (number,)
            found = _infer_layer(one, inner, (*at, layer.type, *place), first=first and not number)
            inner = [found.output]
    with torch.device("meta"):
        built = build_layer(layer, at)
    name = layer.type
    try:
        try:
            output, attends = _run(built, [empty_batch(one, BATCH, "meta") for one in given])
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if not isinstance(error, NotImplementedError) and not re.search(
                r"\bmeta\b", str(error)
            ):
                raise
            output, attends = _infer_on_cpu(layer, given, at)
    except SpecError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "the previous module sends" if first and len(given) == 1 else "it gets"
        raise SpecError(
            f"{name}{layer.args or ''} does not fit: {what} {' and '.join(map(str, given))}: "
            f"{reason}",
            location=(*at, "args" if ":" in name else name),
            hint="compare the layer's sizes with its input (B is the batch)"
            if len(given) == 1
            else "begin with 'Add', 'Concat' or a layer of your own that takes as many arguments",
        ) from None
    if not isinstance(output, Tensor):
        raise SpecError(
            f"{name} returns {type(output).__name__} instead of one tensor",
            location=at,
            hint="'Recurrent' has one output"
            if name in CELLS
            else "wrap it in a module of your own that returns one tensor",
        )
    if output.dim() < 1 or output.shape[0] != BATCH:
        raise SpecError(
            f"{name} does not keep the batch as first dimension: {BATCH} samples of "
            f"{' and '.join(map(str, given))} became a tensor of shape {tuple(output.shape)}",
            location=at,
        )
    sample = TensorSpec(shape=tuple(output.shape[1:]), dtype=str(output.dtype).split(".")[-1])
    return Inferred(sample, attends)


def _run(layer: nn.Module, inputs: Sequence[Tensor]) -> tuple[Any, bool]:
    """Return a layer's output, and whether it attends."""
    watch = AttentionWatch(inputs[0])
    with torch.no_grad():
        try:
            with watch:
                return layer(*inputs), watch.found or has_attention_layer(layer)
        except NotImplementedError:
            raise
        except Exception:  # of the layer, or of an operation that cannot be watched
            return layer(*inputs), watch.found or has_attention_layer(layer)


def _infer_on_cpu(layer: LayerSpec, given: Sequence[TensorSpec], at: Location) -> tuple[Any, bool]:
    """Run a layer on a tiny real batch, as the meta device cannot run it."""
    try:
        return _run(build_layer(layer, at), [empty_batch(one, BATCH, "cpu") for one in given])
    except Exception as error:
        raise SpecError(
            f"{layer.type} fails on {' and '.join(map(str, given))}: {type(error).__name__}: "
            f"{error}",
            location=at,
        ) from None
