"""``Piece``: the layer that is a part of a user's network, between two cuts.

It has the network's own parameters and buffers, under their own names, and runs the operations of
:mod:`~dni_runtime.network.program` that lie between the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from dni_runtime.errors import SpecError
from dni_runtime.network.program import Section
from dni_runtime.network.recording import under
from dni_runtime.network.source import NetworkSpec, network_for
from dni_runtime.network.trace import Trace, changed, symbol
from dni_runtime.network.tracing import trace
from dni_runtime.spec.choices import validated

BORROWED = "borrowed."
"""Before the name of a borrowed parameter in a state dict: none has it, a piece may be given it."""


class BorrowedParameter:
    """A tied parameter that another piece has; it comes with each batch, cut into rows.

    Each sample of a batch carries a piece of it, so that it travels, and its gradient comes back,
    as activations do; ``now`` is its value for this batch. A batch with fewer samples, as at the
    end of an evaluation, cannot carry it: the newest one is kept for that.
    """

    def __init__(self, value: Tensor) -> None:
        self.now = self._newest = value.detach()
        self._fixed: nn.Parameter | None = None

    def take(self, row_BN: Tensor) -> None:
        """Take the value that a batch carries."""
        newest = self._newest
        if self._fixed is not None:
            self.now = self._fixed
        elif row_BN.numel() < newest.numel():
            self.now = self._newest = newest.to(row_BN.device)
        else:
            self.now = row_BN.flatten()[: newest.numel()].view(newest.shape)
            self._newest = self.now.detach()

    def keep(self, value: Tensor) -> None:
        """Take a value as the newest one, before any batch has brought one."""
        self.now = self._newest = value.detach()

    def fix(self, parameter: nn.Parameter) -> None:
        """Use the parameter itself: both pieces are in one process."""
        self._fixed = parameter


def row_width(value: Tensor, rows: int) -> int:
    """Return how many numbers of a parameter each of ``rows`` samples carries."""
    return -(-value.numel() // rows)


def rows_of(value: Tensor, samples: int, rows: int) -> Tensor:
    """Spread a parameter over a batch's samples: ``[B, N]``; see :class:`BorrowedParameter`."""
    width = row_width(value, rows)
    flat = nn.functional.pad(value.flatten(), (0, max(samples * width - value.numel(), 0)))
    return flat[: samples * width].view(samples, width)


class Operations:
    """The operations of a section, with the tensors of a network."""

    def __init__(
        self,
        trace: Trace,
        section: Section,
        network: nn.Module,  # or what a piece has of it
        constants: nn.Module,  # where the tensors that ``forward`` makes are kept
        borrowed: Mapping[str, BorrowedParameter] = MappingProxyType({}),
    ) -> None:
        self._run = _program(trace, section)
        self._tensors: list[tuple[object, str]] = []
        for node in section.tensors:
            if node.name in trace.constants:
                value = trace.constants[node.name].to(torch.empty(0).device)  # "meta" within it
                constants.register_buffer(node.name, value, persistent=False)
                self._tensors.append((constants, node.name))
            elif trace.names[node.name] in borrowed:
                self._tensors.append((borrowed[trace.names[node.name]], "now"))
            else:
                path, _, leaf = trace.names[node.name].rpartition(".")
                self._tensors.append((network.get_submodule(path), leaf))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute what the section gives, from what it takes and then inputs of the data."""
        tensors = [getattr(module, name) for module, name in self._tensors]
        return cast("tuple[Tensor, ...]", self._run(inputs[0].device, *tensors, *inputs))


_COUNTER = ".num_batches_tracked"
"""A buffer that torch's norms in eval mode do not use, and make up where a state lacks it."""


class Piece(nn.Module):
    """Part of a network that a function or class of the user's returns."""

    def __init__(
        self,
        network: Mapping[str, Any],  # a :class:`~dni_runtime.network.source.NetworkSpec`
        after: str | None = None,  # the module that it begins after; None: the network's input
        until: str | None = None,  # the module that it ends after; None: the network's output
        lends: Sequence[str] = (),  # tied parameters that later pieces use: further outputs
        # Tied parameters that an earlier piece has, and which input brings each.
        borrows: Mapping[str, int] = MappingProxyType({}),
        rows: int = 1,  # samples that these are spread over: of the smallest training batch
    ) -> None:
        super().__init__()
        spec = validated(NetworkSpec, network, ("network",))
        program, where = trace(spec), "after"
        begin, end = -1, program.train.last
        try:
            begin = begin if after is None else program.cut(after).position
            where = "until"
            end = end if until is None else program.cut(until).position
        except SpecError as error:
            error.location = (where,)
            raise
        if begin >= end:
            raise SpecError(f"{until!r} does not end after {after!r}", location=("until",))
        self._cuts = after, until
        pair = Section.pair(program, after, until)
        sections = dict(zip(program.traces, pair, strict=True))
        names = {
            trace.names[node.name]
            for trace, section in sections.items()
            for node in section.tensors
            if node.name in trace.names
        }
        tied = {name: {name, *program.aliases.get(name, ())} for name in (*lends, *borrows)}
        for name in tied:
            if not tied[name] & names:
                raise SpecError(
                    f"this piece of {spec.target} does not use a parameter {name!r}",
                    location=("lends" if name in lends else "borrows",),
                )
        needed = names.union(*(program.aliases[name] for name in names))
        needed -= set().union(*(tied[name] for name in borrows))
        here = {name.rpartition(".")[0] + _COUNTER for name in names}
        needed.update(
            name for name, at in program.unused.items() if begin < at <= end or name in here
        )
        whole = network_for(spec, needed.union(*(tied[name] for name in borrows)))
        self.borrowed = {name: BorrowedParameter(_tensor(whole, name)) for name in borrows}
        self._places = sorted((place, name) for name, place in borrows.items())
        self.network = _pruned(whole, needed)  # without what other pieces have
        self._lends = {name: sorted(tied[name] & names)[0] for name in lends}
        learns, of_names = program.train.learns, program.train.of_names
        # What has no gradient gets none of zeros: weights would decay by it.
        self._still = {name for name in lends if not learns(of_names(tied[name]))}
        self._no_gradient = [not learns([node]) for node in pair[0].gives]
        self._rows = rows
        self.tied = False  # whether all pieces are in one process, and share their parameters
        self._constants = nn.Module()
        others = {other: tensor for name, tensor in self.borrowed.items() for other in tied[name]}
        self._train, self._eval = (
            Operations(trace, section, self.network, self._constants, others)
            for trace, section in sections.items()
        )

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the operations on values of earlier pieces, then inputs of the data."""
        values = [value.contiguous() for value in inputs]  # rows of several outputs are not
        for place, name in reversed(self._places):
            self.borrowed[name].take(values.pop(place))
        outputs = (self._train if self.training else self._eval)(*values)
        if self.training and any(self._no_gradient):
            pairs = zip(outputs, self._no_gradient, strict=True)
            outputs = tuple(output.detach() if still else output for output, still in pairs)
        if self._lends:
            for name in self._lends:
                lent, samples = self.lent(name), outputs[0].shape[0]  # len() is fixed in exports
                if self.tied:  # nobody reads it
                    none = outputs[0].new_zeros(1, 1)
                    outputs += (none.expand(samples, row_width(lent, self._rows)),)
                    continue
                value = lent.detach() if name in self._still else lent
                outputs += (rows_of(value, samples, self._rows),)
        return outputs[0] if len(outputs) == 1 else outputs

    def train(self, mode: bool = True) -> Piece:
        """Choose the operations; the network's own ``train`` may need what other pieces have."""
        self.training = mode
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name, parameter in self.borrowed.items():  # those that only predict get it, too
            if (value := state_dict.pop(f"{prefix}{BORROWED}{name}", None)) is not None:
                parameter.keep(value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def lent(self, name: str) -> nn.Parameter:
        """Return a parameter that it lends."""
        return cast("nn.Parameter", _tensor(self.network, self._lends[name]))

    @property
    def lends(self) -> tuple[str, ...]:
        """Names of the parameters that it lends."""
        return tuple(self._lends)

    def extra_repr(self) -> str:
        """Return the cuts."""
        return "after={!r}, until={!r}".format(*self._cuts)


def tie(pieces: Iterable[nn.Module]) -> None:
    """Let pieces in one process share their tied parameters, as the network itself does."""
    parts = [piece for piece in pieces if isinstance(piece, Piece)]
    lent = {name: piece.lent(name) for piece in parts for name in piece.lends}
    for piece in parts:
        piece.tied = True
        for name, parameter in piece.borrowed.items():
            if name in lent:
                parameter.fix(lent[name])


def _tensor(network: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    return cast("Tensor", getattr(network.get_submodule(path), leaf))


def _pruned(network: nn.Module, names: set[str]) -> nn.Module:
    """Take everything but some tensors out of a network; its modules stay what they are."""
    for path, module in network.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name in list(tensors):
                if tensors[name] is not None and (f"{path}.{name}" if path else name) not in names:
                    tensors[name] = None
    _drop_empty(network)
    return network


def _drop_empty(module: nn.Module) -> bool:
    for name, child in list(module._modules.items()):
        if child is not None and _drop_empty(child):
            del module._modules[name]
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return not module._modules and all(tensor is None for tensor in tensors)


def _program(trace: Trace, section: Section) -> fx.GraphModule:
    """Return a section as a program of its device, its tensors and its inputs."""
    graph = fx.Graph()
    device = graph.placeholder("device")
    new: dict[fx.Node, fx.Node] = {}
    for node in section.tensors:
        new[node] = graph.placeholder(node.name)
    by_name = {node.name: node for node in trace.graph.nodes if node.op == "placeholder"}
    inputs = [*section.takes, *(by_name[trace.data[number]] for number in section.data)]
    new |= {node: graph.placeholder(node.name) for node in inputs}
    batch = graph.call_function(torch.ops.aten.sym_size.int, (new[inputs[0]], 0))
    memories = {
        trace.memory(node) for operation in section.operations for node in changed(operation)
    }
    for node in inputs:
        if node in section.takes and (layout := trace.layout(node)) != (0, 1):
            new[node] = graph.call_function(_as_it_was, (new[node], *layout))
        if node in section.takes and (order := trace.order(node)) is not None:
            new[node] = graph.call_function(_in_order, (new[node], order))
        if trace.memory(node) in memories:
            new[node] = graph.call_function(torch.ops.aten.clone.default, (new[node],))

    lengths = (
        graph.call_function(torch.ops.aten.sym_size.int, (new[node], at))
        for node in inputs
        if (at := trace.length_at(node)) is not None
    )
    sizes = dict.fromkeys(trace.batch, batch)
    if trace.needs_length(section.operations):
        sizes |= dict.fromkeys(trace.lengths, next(lengths))

    def taken(node: fx.Node) -> fx.Node:
        if node not in new and trace.is_size(node):
            size = symbol(node.meta["val"])
            if size in sizes:
                new[node] = sizes[size]
            else:
                used = sorted(size.free_symbols, key=str)
                new[node] = graph.call_function(_sized(size, used), tuple(map(sizes.get, used)))
        return new[node]

    def on(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in section.operations:
        copy = new[node] = graph.node_copy(node, taken)
        if "modes" in node.meta:
            copy.target = under(cast("Callable[..., Any]", copy.target), node.meta["modes"])
        copy.args = fx.node.map_aggregate(copy.args, on)  # the inputs' device
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, on)
    outputs = [taken(node) for node in section.gives]
    for number, node in enumerate(section.gives):
        layout = trace.layout(node)
        if layout != (0, 1) and not any(user.op == "output" for user in node.users):
            outputs[number] = graph.call_function(_batch_first, (outputs[number], *layout))
    graph.output(tuple(outputs))
    graph.lint()
    return fx.GraphModule(nn.Module(), graph, class_name="Piece")


def _sized(size: Any, symbols: Sequence[Any]) -> Callable[..., int]:
    """Return what computes a size from those of these symbols."""

    def sized(*values: int) -> int:
        return int(size.xreplace(dict(zip(symbols, values, strict=True))))

    return sized


def _batch_first(value: Tensor, axis: int, times: int) -> Tensor:
    """Return a value as it passes a cut: all of a sample is in one row."""
    moved = value.movedim(axis, 0)
    return moved.reshape(-1, times, *moved.shape[1:]) if times > 1 else moved


def _in_order(value: Tensor, order: Sequence[int]) -> Tensor:
    """Return a value with its dimensions in this order in memory, as the network has it."""
    back = sorted(range(len(order)), key=lambda at: order[at])
    return value.permute(*order).contiguous().permute(*back)


def _as_it_was(value: Tensor, axis: int, times: int) -> Tensor:
    """Return a value that has passed a cut as the network has it."""
    moved = value.flatten(0, 1) if times > 1 else value
    return moved.movedim(0, axis).contiguous()
