"""The modules of a chain as one plain network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn


def connect(
    modules: Mapping[str, nn.Module],
    sources: Sequence[Sequence[int]],
    data: Sequence[Sequence[int]],
) -> nn.Module:
    """Connect modules to one network that needs nothing but torch.

    Args:
        modules: The modules' layers by name, head first, each a sequence.
        sources: For each module, the numbers of those whose output it takes.
        data: For each module, which inputs of the data it takes after those.

    Returns:
        A ``nn.Sequential`` if each module takes the output of the one before, else a
        ``torch.fx.GraphModule`` with one argument for each input of the data. Its children have the
        modules' names.
    """
    plain = [list(own) == ([index - 1] if index else []) for index, own in enumerate(sources)]
    if all(plain) and list(map(list, data)) == [[0], *[[]] * (len(data) - 1)]:
        return nn.Sequential(OrderedDict(modules))
    graph, root = fx.Graph(), nn.Module()
    given = [
        graph.placeholder(f"x{one}") for one in range(1 + max(max(own, default=0) for own in data))
    ]
    outputs: list[fx.Node] = []
    for (name, layers), own, taken in zip(modules.items(), sources, data, strict=True):
        root.add_module(name, layers)
        values: tuple[Any, ...] = (*(outputs[one] for one in own), *(given[one] for one in taken))
        for layer, _ in layers.named_children():  # only the first layer has several inputs
            values = (graph.call_module(f"{name}.{layer}", values),)
        outputs.append(values[0])
    graph.output(outputs[-1])
    return fx.GraphModule(root, graph, class_name="Network")
