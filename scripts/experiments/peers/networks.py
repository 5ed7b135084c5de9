"""The networks that are trained, where they are cut, and random data; no torch is imported here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-3
SAMPLES = 60_000
VOCABULARY = 256
CONTEXT = 64

Layer = tuple[str, dict[str, Any]]
"""Name and keywords; the name of a class of torch.nn, or an import path (``lm:Block``)."""


@dataclass(frozen=True)
class Network:
    """A network and how it is trained."""

    layers: tuple[Layer, ...]
    batch: int  # samples
    cut: int  # layers in the first of two parts
    quarters: tuple[int, int, int]  # layers before each of the cuts into four parts
    activation: int  # floats of one sample at the cut
    synthesizer: str | dict[str, Any]  # of the chain's gradients
    sample: tuple[int, ...] = (1, 28, 28)  # as the data set has it: pixels, or (tokens) indices
    tokens: bool = False  # samples are tokens, and each of them has a label
    flatten: bool = False  # it takes images as vectors

    @property
    def metric(self) -> str:
        """What evaluation reports beside the loss."""
        return "bits_per_character" if self.tokens else "accuracy"

    def cuts(self, count: int, cut: int | None = None) -> list[int]:
        """Where one, two or four parts begin, and the end; ``cut`` moves the cut of two."""
        middle = {1: [], 2: [self.cut if cut is None else cut], 4: list(self.quarters)}
        if count not in middle:
            raise ValueError(f"networks are cut into 1, 2 or 4 parts, not {count}")
        return [0, *middle[count], len(self.layers)]

    def parts(self, count: int, cut: int | None = None) -> list[tuple[Layer, ...]]:
        """The layers in so many parts; see :meth:`cuts`."""
        cuts = self.cuts(count, cut)
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
        cut=6,
        quarters=(3, 6, 9),
        activation=width,
        synthesizer={"mlp": {}},
        flatten=True,
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
        cut=7,
        quarters=(3, 7, 10),
        activation=32 * 14 * 14,
        synthesizer={"critic": {}},
    )


def _lm(width: int = 96, heads: int = 4, blocks: int = 4) -> Network:
    """A causal transformer over characters; both ends of the line get half of its blocks."""
    embed: Layer = ("lm:Embed", {"vocabulary": VOCABULARY, "dim": width, "context": CONTEXT})
    block: Layer = ("lm:Block", {"dim": width, "heads": heads})
    end: list[Layer] = [
        ("LayerNorm", {"normalized_shape": width}),
        ("Linear", {"in_features": width, "out_features": VOCABULARY}),
    ]
    return Network(
        layers=(embed, *[block] * blocks, *end),
        batch=32,
        cut=3,
        quarters=(2, 3, 4),
        activation=CONTEXT * width,
        synthesizer="auto",
        sample=(CONTEXT,),
        tokens=True,
    )


def _devices(width: int = 64, row_us: float = 300.0) -> Network:
    """Four layers, each as on a device of its own: 77 ms for a batch, three times in a step."""
    layers: list[Layer] = [
        ("device:Block", {"inputs": inputs, "outputs": width, "row_us": row_us})
        for inputs in (784, width, width, width)
    ]
    layers.append(("Linear", {"in_features": width, "out_features": 10}))
    return Network(
        layers=tuple(layers),
        batch=256,
        cut=2,
        quarters=(1, 2, 3),
        activation=width,
        synthesizer={"mlp": {}},
        flatten=True,
    )


NETWORKS: Mapping[str, Network] = {
    "mlp-1024": _mlp(1024), "mlp-256": _mlp(256), "cnn": _cnn(), "lm": _lm(), "devices": _devices()
}  # fmt: skip


def data_spec(network: Network, folder: Path) -> dict[str, Any]:
    """The random data as a chain file has it."""
    return {
        "dataset": "npz",
        "path": str(folder / "data.npz"),
        "batch_size": network.batch,
        "flatten": network.flatten,
    }


def write_sources(folder: Path) -> None:
    """The files that chains name by import path, beside their chain files."""
    here = Path(__file__).resolve().parents[1]
    for path in (
        *(here / "chains" / name for name in ("lm.py", "device.py")),
        here / "peers" / "streams.py",
    ):
        shutil.copy(path, folder / path.name)


def write_data(network: Network, folder: Path, samples: int | None = None) -> None:
    """Random images of Fashion-MNIST's shape, type and number, or windows of random characters."""
    import numpy as np

    rng = np.random.default_rng(0)
    samples = samples or (SAMPLES // 4 if network.tokens else SAMPLES)
    if network.tokens:
        text = rng.integers(0, VOCABULARY, (samples + 256, *network.sample), dtype=np.int64)
        x, y = text, np.roll(text, -1, axis=1)
    else:
        x = rng.integers(0, 256, (samples + 256, *network.sample), dtype=np.uint8)
        y = rng.integers(0, 10, samples + 256, dtype=np.uint8)
    np.savez(
        folder / "data.npz",
        x_train=x[:samples],
        y_train=y[:samples],
        x_eval=x[samples:],
        y_eval=y[samples:],
    )
