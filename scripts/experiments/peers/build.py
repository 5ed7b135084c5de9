"""Networks, optimizer and loss as the peers' processes make them.

Each layer draws its initial weights from a seed of its own, so that every process has the same
ones however the network is cut.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers.networks import LEARNING_RATE, Layer, Network

ACTIVATIONS, GRADIENTS, EVALUATION = 1, 2, 3
"""Tags of messages between processes."""


class Trainer(Protocol):
    """One process's part in the training of a network."""

    reads: bool  # step() needs the batch
    period: int  # batches between the moments at which the network is whole

    def step(self, x_BX: Tensor | None, y_BY: Tensor | None) -> None:
        """Train on one batch, of which every reading process gets the whole."""
        ...

    def predict(self, x_BX: Tensor) -> Tensor | None:
        """The network's output in eval mode, from all processes; None where others have it."""
        ...


def build(layers: Sequence[Layer], *, first: int = 0, seed: int = 0) -> nn.Sequential:
    """Make layers, the first of which is the network's number ``first``."""
    modules = []
    for index, (name, arguments) in enumerate(layers, first):
        torch.manual_seed(1_000 * seed + index)
        file, _, attribute = name.rpartition(":")
        source = importlib.import_module(f"chains.{file}") if file else nn
        modules.append(getattr(source, attribute)(**arguments))
    return nn.Sequential(*modules)


def build_parts(
    network: Network, count: int, mine: Sequence[int], *, cut: int | None = None, seed: int = 0
) -> dict[int, nn.Sequential]:
    """Those of ``count`` parts of a network whose numbers are given."""
    cuts, parts = network.cuts(count, cut), network.parts(count, cut)
    return {i: build(parts[i], first=cuts[i], seed=seed) for i in mine}


def example(network: Network, size: int, device: str = "cpu") -> Tensor:
    """So many samples, as the network takes them."""
    shape = (math.prod(network.sample),) if network.flatten else network.sample
    dtype = torch.int64 if network.tokens else torch.float32
    return torch.zeros((size, *shape), dtype=dtype, device=device)


def output_shapes(network: Network, count: int, cut: int | None = None) -> list[tuple[int, ...]]:
    """The shape of one sample behind each of ``count`` parts."""
    h_BH = example(network, 2, "meta")
    shapes = []
    for part in network.parts(count, cut):
        with torch.device("meta"):
            h_BH = build(part)(h_BH)
        shapes.append(tuple(h_BH.shape[1:]))
    return shapes


def cross_entropy(p_BXC: Tensor, y_BX: Tensor) -> Tensor:
    """The mean over all labels, one for each sample or for each of its tokens."""
    return F.cross_entropy(p_BXC.flatten(0, -2), y_BX.flatten())


def adam(module: nn.Module) -> Any:
    """What everybody trains with."""
    return torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, fused=True)


def in_eval_mode(module: nn.Module, x_BX: Tensor) -> Tensor:
    """What a module in training gives in eval mode."""
    module.eval()
    try:
        with torch.no_grad():
            return module(x_BX)  # type: ignore[no-any-return]
    finally:
        module.train()
