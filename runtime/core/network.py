"""The modules of a chain as one plain network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn


def connect(modules: Mapping[str, nn.Module], sources: Sequence[Sequence[int]]) -> nn.Module:
    """Connect modules to one network that needs nothing but torch.

    Args:
        modules: The modules' layers by name, head first, each a sequence.
        sources: For each module, the numbers of those that it takes its inputs from.

    Returns:
        A ``nn.Sequential`` if each module takes the output of the one before, else a
        ``torch.fx.GraphModule``. Its children have the modules' names.
    """
    if all(list(own) == [index - 1] for index, own in enumerate(sources) if index):
        return nn.Sequential(OrderedDict(modules))
    graph, root = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    outputs: list[fx.Node] = []
    for (name, layers), own in zip(modules.items(), sources, strict=True):
        root.add_module(name, layers)
        values: tuple[Any, ...] = tuple(outputs[one] for one in own) or (x,)
        for layer, _ in layers.named_children():  # only the first layer has several inputs
            values = (graph.call_module(f"{name}.{layer}", values),)
        outputs.append(values[0])
    graph.output(outputs[-1])
    return fx.GraphModule(root, graph, class_name="Network")
