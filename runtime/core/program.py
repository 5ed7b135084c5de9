"""A user's network as one program of ``torch.export``, which can be cut after any of its modules.

Tracing turns the network's ``forward`` into a list of operations, once in train mode and once in
eval mode. A *cut* lies after the last operation of one of the network's own modules, and is named
like it: ``layer2.0``. What lies between two cuts is a *piece*. Values that pass a cut become inputs
and outputs of pieces. What follows from the data alone, such as masks and position ids, does not
pass: each piece that needs it computes it again.

Shapes: B batch; all values that pass a cut have it as first dimension.
"""

from __future__ import annotations

import contextlib
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, fx, nn

from dni_runtime.core.choices import find_attribute
from dni_runtime.errors import SpecError
from dni_runtime.spec import TensorSpec

_BATCH = 5
"""Samples in the batch that is traced: no other size in a network is likely to be the same."""

_WRAPPED = "network."
"""Where the traced module has the network."""


class NetworkSpec(BaseModel):
    """A network that a user's function or class returns.

    Attributes:
        target: Import path of the function or class, ``package.module:name``.
        args: Its keyword arguments.
        example: One sample of each input of the data, as ``float32[3, 32, 32]``.
        takes: Names of the arguments of ``forward`` that get them; by default its first ones.
        returns: Key or attribute of what ``forward`` returns, if that is no tensor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(alias="import", pattern=r"^[\w.]+:[\w.]+$")
    args: dict[str, Any] = Field(default_factory=dict)
    example: tuple[TensorSpec, ...] = Field(min_length=1)
    takes: tuple[str, ...] = ()
    returns: str | None = None

    @field_validator("example", mode="before")
    @classmethod
    def _written(cls, value: Any) -> Any:
        return [read_tensor(one) if isinstance(one, str) else one for one in value]

    def to_yaml(self) -> dict[str, Any]:
        """Return it as a chain file has it."""
        written = self.model_dump(by_alias=True, exclude_defaults=True)
        return {**written, "example": [write_tensor(one) for one in self.example]}


def read_tensor(text: str) -> TensorSpec:
    """Read one sample as ``float32[3, 32, 32]``.

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,x]*)\]\s*", text)
    if match is None or not isinstance(getattr(torch, match[1], None), torch.dtype):
        raise ValueError(f"{text!r} is not a type and a shape, as in 'float32[3, 32, 32]'")
    return TensorSpec(shape=tuple(map(int, re.findall(r"\d+", match[2]))), dtype=match[1])


def write_tensor(tensor: TensorSpec) -> str:
    """Write one sample as :func:`read_tensor` reads it."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


class Wrapped(nn.Module):
    """A network that takes the data's inputs in their order, and returns one tensor."""

    def __init__(self, network: nn.Module, spec: NetworkSpec) -> None:
        super().__init__()
        self.network = network
        self._takes, self._returns = spec.takes, spec.returns

    def forward(self, *xs: Tensor) -> Tensor:
        if self._takes:
            y = self.network(**dict(zip(self._takes, xs, strict=True)))
        else:
            y = self.network(*xs)
        if self._returns is not None:
            y = y[self._returns] if isinstance(y, Mapping) else getattr(y, self._returns)
        if not isinstance(y, Tensor):
            raise TypeError(f"forward returns {type(y).__name__}: name a tensor by 'returns'")
        return y


def build_network(spec: NetworkSpec) -> nn.Module:
    """Call the user's function; the network has the weights that it gives.

    Raises:
        SpecError: It cannot be imported, fails, or returns no module.
    """
    build = find_attribute(spec.target, "network", ())
    try:
        network = build(**spec.args)
    except Exception as error:
        raise SpecError(
            f"{spec.target}({_written(spec.args)}) failed{_place_of(error)}: "
            f"{type(error).__name__}: {_first_line(error)}",
            location=("args",),
        ) from error
    if not isinstance(network, nn.Module):
        raise SpecError(f"{spec.target} returns {type(network).__name__}, not a torch.nn.Module")
    return network


@dataclass(frozen=True)
class Cut:
    """A place between two operations.

    Attributes:
        name: The module that it comes after; the shortest name if several end here.
        position: Number of the last operation before it.
        values: One sample of each value that passes.
        made: Numbers of the operations that compute these.
        reason: Why the network cannot be cut here; None if it can.
    """

    name: str
    position: int
    values: tuple[TensorSpec, ...] = ()
    made: tuple[int, ...] = ()
    reason: str | None = None


@dataclass(eq=False)
class Trace:
    """The operations of a network in one mode.

    Attributes:
        graph: The operations, as ``torch.export`` has found them.
        names: Where a placeholder's tensor is: the name of a parameter or buffer.
        constants: Tensors that ``forward`` itself makes, by placeholder.
        data: Placeholders of the data's inputs, in their order.
    """

    graph: fx.Graph
    names: dict[str, str]
    constants: dict[str, Tensor]
    data: tuple[str, ...]
    _order: dict[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        for node in list(self.graph.nodes):  # checks of devices, which may differ later
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                self.graph.erase_node(node)
        self.graph.eliminate_dead_code(is_impure_node=_changes_something)
        self._order = {
            node: number
            for number, node in enumerate(
                node for node in self.graph.nodes if node.op == "call_function"
            )
        }

    @cached_property
    def free(self) -> frozenset[fx.Node]:
        """Nodes that follow from the data and from constants, without parameters and chance."""
        changed = {node.args[0] for node in self._order if in_place(node)}
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                name = self.names.get(node.name)
                if name is None or (node.name.startswith("b_") and node not in changed):
                    found.add(node)
            elif (
                node.op == "call_function"
                and not in_place(node)
                and not _draws(node)
                and not _counts(node)
                and all(one in found for one in node.all_input_nodes)
            ):
                found.add(node)
        return frozenset(found)

    @cached_property
    def batch(self) -> frozenset[Any]:
        """Symbols of the batch's size."""
        placeholders = [node for node in self.graph.nodes if node.name in self.data]
        return frozenset(_symbol(node.meta["val"].shape[0]) for node in placeholders)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """For each module that is called once, the numbers of its first and last operation."""
        calls: dict[str, set[str]] = {}
        found: dict[str, tuple[int, int]] = {}
        for node, number in self._order.items():
            for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
                path = f"{path}.".removeprefix(_WRAPPED).removesuffix(".")
                if path and node not in self.free:
                    calls.setdefault(path, set()).add(key)
                    found[path] = found.get(path, (number, number))[0], number
        return {path: span for path, span in found.items() if len(calls[path]) == 1}

    def number(self, node: fx.Node) -> int:
        """Return the number of an operation."""
        return self._order[node]

    def is_batch(self, node: fx.Node) -> bool:
        """Whether a node is the size of the batch."""
        return _symbol(node.meta.get("val")) in self.batch

    def passing(self, position: int) -> list[fx.Node]:
        """Return the values that operations after a position take from those before it."""
        return [
            node
            for node, number in self._order.items()
            if number <= position
            and node not in self.free
            and not self.is_batch(node)
            and any(
                user.op == "output" or (user not in self.free and self._order[user] > position)
                for user in node.users
            )
        ]

    def sample(self, node: fx.Node) -> TensorSpec | str:
        """Return one sample of a node's value, or why it is none."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"{node.name} is no tensor"
        first, *others = value.shape or (0,)
        if _symbol(first) not in self.batch:
            return f"{node.name} {tuple(value.shape)} does not have the batch as first dimension"
        if any(isinstance(one, torch.SymInt) for one in others):
            return f"{node.name} {tuple(value.shape)} has a shape that depends on the batch"
        return TensorSpec(shape=tuple(map(int, others)), dtype=str(value.dtype).split(".")[-1])

    def operations(self, after: int, until: int) -> list[fx.Node]:
        """Return the operations between two positions, without those that follow from the data."""
        return [
            node
            for node, number in self._order.items()
            if after < number <= until and node not in self.free and not self.is_batch(node)
        ]

    @property
    def last(self) -> int:
        """Number of the last operation."""
        return len(self._order) - 1


@dataclass(frozen=True)
class Program:
    """A network's operations.

    Attributes:
        spec: The network.
        train: The operations in train mode.
        eval: The operations in eval mode.
        aliases: Further names of tied parameters and buffers, by the one that a trace uses.
        unused: Parameters and buffers that no operation uses.
    """

    spec: NetworkSpec
    train: Trace
    eval: Trace
    aliases: dict[str, tuple[str, ...]]
    unused: tuple[str, ...]

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """All cuts by name, from the first to the last; several names may mean one."""
        found: dict[str, Cut] = {}
        shortest: dict[int, str] = {}
        for name, (_, end) in self.train.spans.items():
            if name in self.eval.spans and end < self.train.last:
                shortest[end] = min(shortest.get(end, name), name, key=len)
        for name, (_, end) in sorted(self.train.spans.items(), key=lambda one: one[1][1]):
            if end in shortest and name in self.eval.spans:
                found[name] = self._cut(shortest[end], end)
        return found

    def _cut(self, name: str, end: int) -> Cut:
        passing = self.train.passing(end)
        samples = [self.train.sample(node) for node in passing]
        also = [self.eval.sample(node) for node in self.eval.passing(self.eval.spans[name][1])]
        values = [one for one in samples if isinstance(one, TensorSpec)]
        types = {one.dtype for one in values}
        if wrong := [one for one in samples if isinstance(one, str)]:
            reason = wrong[0]
        elif also != samples:
            reason = "other values pass in eval mode than in train mode"
        elif len(types) > 1 or not all("float" in one for one in types):
            reason = f"values of types {', '.join(sorted(types))} pass"
        else:
            made = tuple(self.train.number(node) for node in passing)
            return Cut(name, end, tuple(values), made)
        return Cut(name, end, reason=reason)

    def cut(self, name: str) -> Cut:
        """Return the cut of a name.

        Raises:
            SpecError: There is none, or the network cannot be cut there.
        """
        if name not in self.cuts:
            raise SpecError(
                f"{self.spec.target} cannot be cut after {name!r}", hint=self._near(name)
            )
        cut = self.cuts[name]
        if cut.reason is not None:
            raise SpecError(f"{self.spec.target} cannot be cut after {name!r}: {cut.reason}")
        return cut

    def _near(self, name: str) -> str:
        from dni_runtime.spec.load import suggestion

        possible = [one for one, cut in self.cuts.items() if cut.reason is None]
        top = [one for one in possible if "." not in one]
        return suggestion(name, possible) or f"it can be after {', '.join(top or possible[:9])} …"

    @property
    def traces(self) -> tuple[Trace, Trace]:
        """The operations in train mode, and in eval mode."""
        return self.train, self.eval


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


def without_memory(spec: NetworkSpec) -> nn.Module:
    """Return the network on torch's meta device."""
    try:
        with torch.device("meta"):
            return build_network(spec)
    except SpecError:
        with torch.device("cpu"):
            return build_network(spec).to("meta")


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
        at, line = _guilty(error)
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
            names[name] = one.target.removeprefix(_WRAPPED)
    for name in data:
        if _symbol(used[name].meta["val"].shape[0]) is None:
            raise SpecError(
                f"{spec.target} works for batches of {_BATCH} samples only: its code takes the "
                "batch's size as a constant",
                hint="write x.shape[0] where forward has a number, or -1 in view and reshape",
            )
    return Trace(graph, names, constants, tuple(data))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from telling about its own work."""
    import logging
    import warnings

    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _guilty(error: BaseException) -> tuple[str, str]:
    """Return where in the user's code an error comes from, and that line of code."""
    torchs = str(Path(torch.__file__).parent)
    own = str(Path(__file__).parent)
    named = re.search(r'File "([^"]+)", line (\d+), in \w+\n\s*(.*)', str(error))
    if named is not None:
        return f" ({named[1]}:{named[2]})", named[3].strip()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((torchs, own, "<")):
            return f" ({frame.filename}:{frame.lineno})", (frame.line or "").strip()
    return "", ""


def _place_of(error: BaseException) -> str:
    return _guilty(error)[0]


def _reason(error: BaseException) -> str:
    text = _first_line(error)
    if "data-dependent" in text:
        return f"it decides by the value of a tensor ({text})"
    return f"{type(error).__name__}: {text}"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


def _written(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in args.items())


def _symbol(size: Any) -> Any:
    """Return the symbol of a size that is known only at run time; None for other sizes."""
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    return None if expression is None or expression.is_number else expression


def in_place(node: fx.Node) -> bool:
    """Whether an operation changes its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def alias_of(node: fx.Node) -> bool:
    """Whether an operation returns a view of its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments:
        return False
    return schema.arguments[0].alias_info is not None


def _changes_something(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or in_place(node)


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _counts(node: fx.Node) -> bool:
    """Whether an operation keeps statistics of what it gets, as BatchNorm does."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(one.name == "running_mean" for one in schema.arguments)
