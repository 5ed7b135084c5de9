"""The modules of a chain as one plain network."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

from torch import fx, nn

from dni_runtime.core.piece import tie


def connect(
    modules: Mapping[str, nn.Module],  # head first, each a sequence
    # For each module, the numbers of those that it takes, each with which output, if of several.
    sources: Sequence[Sequence[tuple[int, int | None]]],
    data: Sequence[Sequence[int]],  # for each module, which inputs of the data it takes after those
) -> nn.Module:
    """Connect modules to one network that needs nothing but torch.

    It is a ``nn.Sequential`` if each module takes the output of the one before, else a
    ``torch.fx.GraphModule`` with one argument for each input of the data. Its children have the
    modules' names. Tied parameters of :class:`~dni_runtime.core.piece.Piece` are one again.
    """
    tie(one for module in modules.values() for one in module.modules())
    plain = [
        list(own) == ([(index - 1, None)] if index else []) for index, own in enumerate(sources)
    ]
    if all(plain) and list(map(list, data)) == [[0], *[[]] * (len(data) - 1)]:
        return nn.Sequential(OrderedDict(modules))
    graph, root = fx.Graph(), nn.Module()
    given = [
        graph.placeholder(f"x{one}") for one in range(1 + max(max(own, default=0) for own in data))
    ]
    outputs: list[fx.Node] = []
    readers = Counter(one for own in sources for one, _ in own)
    for (name, layers), own, taken in zip(modules.items(), sources, data, strict=True):
        root.add_module(name, layers)
        values: tuple[Any, ...] = tuple(
            outputs[one] if which is None else graph.call_function(getitem, (outputs[one], which))
            for one, which in own
        )
        values = tuple(  # a layer may change its input in place
            graph.call_method("clone", (value,)) if readers[one] > 1 else value
            for value, (one, _) in zip(values, own, strict=True)
        )
        values += tuple(given[one] for one in taken)
        for layer, _ in layers.named_children():  # only the first layer has several inputs
            values = (graph.call_module(f"{name}.{layer}", values),)
        outputs.append(values[0])
    graph.output(outputs[-1])
    return fx.GraphModule(root, graph, class_name="Network")
