"""Tracing a user's network by ``torch.export``, in train and in eval mode."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from dni_runtime.core.choices import find_attribute
from dni_runtime.core.program import Program, Trace, symbol
from dni_runtime.core.source import (
    WRAPPED,
    NetworkSpec,
    Wrapped,
    build_network,
    first_line,
    guilty_line,
)
from dni_runtime.errors import SpecError

_BATCH = 5
"""Samples in the batch that is traced: no other size in a network is likely to be the same."""


def trace(spec: NetworkSpec) -> Program:
    """Trace a network, once in each mode.

    Args:
        spec: The network; the result is remembered for it.

    Raises:
        SpecError: It cannot be built or traced; names the line of the user's code.
    """
    build = find_attribute(spec.target, "network", ())
    return _traced(spec.model_dump_json(by_alias=True), build)


@lru_cache(maxsize=4)
def _traced(document: str, build: Callable[..., Any]) -> Program:
    from torch._subclasses import FakeTensorMode  # these take a while to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    del build  # a changed function is another key
    spec = NetworkSpec.model_validate(json.loads(document))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        mode: Any = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        try:
            with mode:  # neither time nor memory
                network = build_network(spec)
        except SpecError:
            mode, network = contextlib.nullcontext(), build_network(spec)
        with mode:
            example = tuple(
                torch.zeros(_BATCH, *one.shape, dtype=getattr(torch, one.dtype))
                for one in spec.example
            )
        return _program_of(spec, network, example)


def _program_of(spec: NetworkSpec, network: nn.Module, example: tuple[Tensor, ...]) -> Program:
    wrapped = Wrapped(network, spec)
    traces = {}
    for training in (True, False):
        wrapped.train(training)
        traces[training] = _export(spec, wrapped, example)
    named: list[tuple[str, Tensor]] = [*network.named_parameters(remove_duplicate=False)]
    named += network.named_buffers(remove_duplicate=False)
    same: dict[int, list[str]] = {}
    for name, tensor in named:
        same.setdefault(id(tensor), []).append(name)
    aliases = {
        name: tuple(other for other in names if other != name)
        for names in same.values()
        for name in names
    }
    used = {name for one in traces.values() for name in one.names.values()}
    unused = [
        name for name, _ in named if name not in used and not used.intersection(aliases[name])
    ]
    return Program(spec, traces[True], traces[False], aliases, tuple(unused))


def _export(spec: NetworkSpec, wrapped: nn.Module, example: tuple[Tensor, ...]) -> Trace:
    axis = {0: torch.export.Dim.AUTO}
    try:
        with _quiet():
            program = torch.export.export(
                wrapped, example, dynamic_shapes=((axis,) * len(example),), strict=False
            )
    except Exception as error:
        at, line = guilty_line(error)
        raise SpecError(
            f"{spec.target} cannot be traced{at}: {_reason(error)}",
            hint=(f"{line}\n  " if line else "")
            + "torch.export follows one path through 'forward': conditions may depend on shapes, "
            "not on the values of tensors. Or cut a sequence of modules by hand: 'layers' in "
            "chain.yaml takes each of them",
        ) from error
    graph = program.graph_module.graph
    kinds = torch.export.graph_signature.InputKind
    names, constants, data = {}, {}, []
    used = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for one in program.graph_signature.input_specs:
        name = one.arg.name
        if one.kind is kinds.USER_INPUT:
            data.append(name)
        elif not used[name].users:
            continue
        elif one.kind is kinds.CONSTANT_TENSOR:
            assert one.target is not None
            constants[name] = cast("Tensor", program.constants[one.target])
        else:
            assert one.target is not None
            names[name] = one.target.removeprefix(WRAPPED)
    for name in data:
        if symbol(used[name].meta["val"].shape[0]) is None:
            raise SpecError(
                f"{spec.target} works for batches of {_BATCH} samples only: its code takes the "
                "batch's size as a constant",
                hint="write x.shape[0] where forward has a number or len(x), or -1 in view",
            )
    return Trace(graph, names, constants, tuple(data))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from telling about its own work."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    text = first_line(error)
    if "data-dependent" in text:
        return f"it decides by the value of a tensor ({text})"
    return f"{type(error).__name__}: {text}"
