"""The networks that are trained, where they are cut, and the data; no torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-3
SAMPLES = 60_000

Layer = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Network:
    """A network and how it is trained.

    Attributes:
        layers: Names and keywords of torch.nn.
        batch: Samples in a batch.
        flatten: Whether it takes images as vectors.
        cut: Layers in the first of two parts.
        quarters: Layers before each of the cuts into four parts.
        activation: Floats of one sample at ``cut``.
        synthesizer: What predicts the chain's gradients.
    """

    layers: tuple[Layer, ...]
    batch: int
    flatten: bool
    cut: int
    quarters: tuple[int, int, int]
    activation: int
    synthesizer: dict[str, Any]

    def parts(self, count: int, cut: int | None = None) -> list[tuple[Layer, ...]]:
        """The layers in two or four parts; ``cut`` moves the cut of two."""
        middle = [self.cut if cut is None else cut] if count == 2 else list(self.quarters)
        cuts = [0, *middle, len(self.layers)]
        return [self.layers[cuts[i] : cuts[i + 1]] for i in range(count)]


def _mlp(width: int) -> Network:
    layers: list[Layer] = []
    for inputs in (784, width, width, width):
        layers.append(("Linear", {"in_features": inputs, "out_features": width}))
        layers.append(("BatchNorm1d", {"num_features": width}))
        layers.append(("ReLU", {}))
    layers.append(("Linear", {"in_features": width, "out_features": 10}))
    return Network(
        layers=tuple(layers),
        batch=256,
        flatten=True,
        cut=6,
        quarters=(3, 6, 9),
        activation=width,
        synthesizer={"mlp": {}},
    )


def _cnn() -> Network:
    """Four convolutions on 28x28; 32 maps of 14x14 at the cut."""

    def block(inputs: int, outputs: int) -> list[Layer]:
        convolution = {
            "in_channels": inputs, "out_channels": outputs, "kernel_size": 3, "padding": 1
        }  # fmt: skip
        return [
            ("Conv2d", convolution), ("BatchNorm2d", {"num_features": outputs}), ("ReLU", {})
        ]  # fmt: skip

    pool: Layer = ("MaxPool2d", {"kernel_size": 2})
    end: list[Layer] = [("Flatten", {}), ("Linear", {"in_features": 3136, "out_features": 10})]
    head, tail = [*block(1, 32), *block(32, 32), pool], [*block(32, 64), *block(64, 64), pool]
    return Network(
        layers=(*head, *tail, *end),
        batch=128,
        flatten=False,
        cut=7,
        quarters=(3, 7, 10),
        activation=32 * 14 * 14,
        synthesizer={"critic": {}},
    )


NETWORKS: Mapping[str, Network] = {"mlp-1024": _mlp(1024), "mlp-256": _mlp(256), "cnn": _cnn()}


def data_spec(network: Network, folder: Path) -> dict[str, Any]:
    """The data as a chain file has it."""
    return {
        "dataset": "npz",
        "path": str(folder / "data.npz"),
        "batch_size": network.batch,
        "flatten": network.flatten,
    }


def write_data(folder: Path, samples: int = SAMPLES) -> None:
    """Random images of Fashion-MNIST's shape, type and number."""
    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (samples + 256, 1, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, samples + 256, dtype=np.uint8)
    np.savez(
        folder / "data.npz",
        x_train=images[:samples],
        y_train=labels[:samples],
        x_eval=images[samples:],
        y_eval=labels[samples:],
    )
