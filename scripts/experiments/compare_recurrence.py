#!/usr/bin/env python3
"""Jaderberg et al. (2016), sec. 3.1: recurrent networks that predict the gradient of the future.

A chain of one module with a ``Recurrent`` layer, trained on streams in pieces of so many steps:
backpropagation that ends at each piece ("truncated"), and with a synthesizer that predicts what
later pieces would send back ("DNI"). Both have the same optimizer and learning rates.

copy: read N random bits and a mark, then write the N bits and a stop sign; N grows by one when the
  error is below 0.15 bits for each symbol that is written. The result is the longest N when it has
  not grown for --patience updates.
repeat: the same, to be written R times; R and N grow by turns. The result is the longest N x R.
text: the next character of a text, in bits per character on its last tenth.

What is in the results file already is not trained again.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from remember import measured, table
from torch import Tensor, nn

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.evaluation import evaluate
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import ChainSpec, DataInfo, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
SOLVED_BITS = 0.15
WINDOW = 100
"""Updates that an error is averaged over before a task may grow."""

IGNORED = -100
STOP = 2
"""What is written: the two bits and the stop sign."""

BLANK, MARK, TIMES = 2, 3, 4
"""What is read beside bits: nothing, the end of the bits, and from here on the number of times."""


class ClassesFirst(nn.Module):
    """(B, T, classes) as (B, classes, T), which is how torch's CrossEntropyLoss wants it."""

    def forward(self, p_BTC: Tensor) -> Tensor:
        return p_BTC.transpose(1, 2)


class WrittenLoss(nn.Module):
    """Cross-entropy as a mean over all places; those without a written symbol count 0.

    torch's mean over the others alone weighs them by what the rest of the batch does.
    """

    def forward(self, p_BCT: Tensor, y_BT: Tensor) -> Tensor:
        total = F.cross_entropy(p_BCT, y_BT, ignore_index=IGNORED, reduction="sum")
        return total / y_BT.numel()


def build(one: dict[str, Any], read: int, written: int) -> LocalChain:
    """The chain of a training, for so many different symbols to read and to write.

    ``one["synthetic"]`` is the layer's option, or None.
    """
    recurrent = {
        "cell": "LSTM",
        "input_size": one["embedding"],
        "hidden_size": one["hidden"],
        "synthetic": one["synthetic"] or False,
    }
    layers: list[Any] = [
        {"Embedding": {"num_embeddings": read, "embedding_dim": one["embedding"]}},
        {"Recurrent": recurrent},
        {"Linear": {"in_features": one["hidden"], "out_features": written}},
        {"import": "compare_recurrence:ClassesFirst"},
    ]
    chain = ChainSpec.model_validate(
        {
            "name": "recurrent",
            "seed": one["seed"],
            "metrics": [],
            "loss": "CrossEntropyLoss"
            if one["task"] == "text"
            else {"import": "compare_recurrence:WrittenLoss"},
            "data": {"batch_size": one["batch"]},
            "modules": [
                {"name": "net", "layers": layers, "optimizer": {"Adam": {"lr": one["lr"]}}}
            ],
        }
    )
    tokens = TensorSpec(shape=(one["steps"],), dtype="int64")
    return LocalChain(worker_specs(chain, DataInfo(sample=tokens, label=tokens, classes=written)))


class Episodes:
    """Endless episodes of the copy task in each of B streams, each at a phase of its own.

    When the task grows, each stream waits for up to an episode before its next one, so that they do
    not come to be read and written all at the same time. With ``repeats`` the number of times is
    told, and grows. ``bits`` is N, ``times`` R.
    """

    def __init__(self, batch: int, repeats: bool, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._repeats = repeats
        self.bits = self.times = 1
        self._n_B = np.ones(batch, dtype=np.int64)
        self._r_B = np.ones(batch, dtype=np.int64)
        self._bits_BN = self._random.integers(0, 2, (batch, 1))
        # The place in the episode; negative while a stream waits for it.
        self._at_B = self._random.integers(0, self._length(), batch)

    def grow(self) -> None:
        """The next episodes are longer."""
        if self._repeats and self.bits > self.times:
            self.times += 1
        else:
            self.bits += 1
            self._bits_BN = np.pad(self._bits_BN, ((0, 0), (0, 1)))

    def read(self, steps: int) -> tuple[Tensor, Tensor]:
        """The next symbols to read and to write, (B, T) each."""
        columns = [self._step() for _ in range(steps)]
        x, y = (np.stack(part, 1) for part in zip(*columns, strict=True))
        return torch.from_numpy(x), torch.from_numpy(y)

    def _length(self) -> Any:
        return self._n_B + 1 + self._repeats + self._n_B * self._r_B + 1

    def _begin(self, which: np.ndarray) -> None:
        grown = (self._n_B[which] != self.bits) | (self._r_B[which] != self.times)
        self._n_B[which], self._r_B[which] = self.bits, self.times
        self._bits_BN[which] = self._random.integers(0, 2, (len(which), self.bits))
        wait = self._random.integers(0, self._length()[which])
        self._at_B[which] = np.where(grown, -wait, 0)

    def _step(self) -> tuple[np.ndarray, np.ndarray]:
        n, at, rows = self._n_B, self._at_B, np.arange(len(self._n_B))
        written = at - n - 1 - self._repeats
        bit = self._bits_BN[rows, np.where(written < 0, at, written) % n]
        x = np.where((at >= 0) & (at < n), bit, np.where(at == n, MARK, BLANK))
        if self._repeats:
            x = np.where(at == n + 1, TIMES + self._r_B, x)
        y = np.where(written < n * self._r_B, bit, STOP)
        y = np.where(written < 0, IGNORED, y)
        self._at_B = at + 1
        ended = np.flatnonzero(self._at_B == self._length())
        if len(ended):
            self._begin(ended)
        return x, y


def train_episodes(one: dict[str, Any]) -> dict[str, Any]:
    """The longest episodes that are solved within the updates, and when each was."""
    repeats = one["task"] == "repeat"
    chain = build(one, TIMES + (64 if repeats else 0), STOP + 1)
    episodes = Episodes(one["batch"], repeats, one["seed"])
    solved, when = (0, 0), []
    recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
    for update in range(1, one["updates"] + 1):
        x_BT, y_BT = episodes.read(one["steps"])
        loss = chain.train_batch(x_BT, y_BT)
        recent.append((loss * y_BT.numel(), int((y_BT != IGNORED).sum())))
        nats, written = map(sum, zip(*recent, strict=True))
        if len(recent) == WINDOW and nats / math.log(2) < SOLVED_BITS * written:
            solved = (episodes.bits, episodes.times)
            when.append(update)
            recent.clear()
            episodes.grow()
        if update - (when[-1] if when else 0) >= one["patience"]:
            break
    return {"length": solved[0] * solved[1], "solved": solved, "when": when}


def characters(path: str | None) -> bytes:
    """A text; by default sources of Python's standard library, in an order drawn once."""
    if path is not None:
        return Path(path).read_bytes()
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    random.Random(0).shuffle(files)
    return b"\n".join(file.read_bytes() for file in files)[: 1 << 21]


def pieces(ids_N: Tensor, batch: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of B streams that run through the text side by side, and the characters after."""
    length = (len(ids_N) - 1) // batch // steps * steps
    x_BN = ids_N[: batch * length].view(batch, length)
    y_BN = ids_N[1 : batch * length + 1].view(batch, length)
    return zip(x_BN.split(steps, 1), y_BN.split(steps, 1), strict=True)


def train_text(one: dict[str, Any], text: bytes) -> dict[str, Any]:
    """Bits per character on the text's last tenth after each epoch; the best is the result."""
    symbols, ids = np.unique(np.frombuffer(text, dtype=np.uint8), return_inverse=True)
    ids_N = torch.from_numpy(ids.astype(np.int64))
    last = len(ids_N) // 10
    if last <= 64 * one["batch"]:
        sys.exit(f"a text of {len(text)} characters is too short; needed: {640 * one['batch']}")
    chain = build(one, len(symbols), len(symbols))
    bits = []
    for _ in range(one["epochs"]):
        for x_BT, y_BT in pieces(ids_N[:-last], one["batch"], one["steps"]):
            chain.train_batch(x_BT, y_BT)
        chain.end_epoch()
        test = pieces(ids_N[-last:], one["batch"], 64)
        loss = evaluate(chain.predict, test, chain.steps[-1].spec)["loss"]
        bits.append(loss / math.log(2))
    return {"bits": bits[-1], "epochs_bits": bits}


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("copy", "repeat", "text"))
    parser.add_argument("--text", help="a file (default: sources of Python's standard library)")
    parser.add_argument("--steps", help="of a piece (default: 2,3,4,5,8; text: 8)")
    parser.add_argument("--methods", default="truncated,DNI", help="of: %(default)s")
    parser.add_argument("--lr", default="1e-3", help="of the network, one or several")
    parser.add_argument("--synthesizer", default="linear", help="linear, or hidden units")
    parser.add_argument("--synthesizer-lr", default="1e-3", help="one or several")
    parser.add_argument("--scale", default="0.3", help="of predicted gradients, one or several")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--updates", type=int, default=20_000, help="copy and repeat: at most")
    parser.add_argument("--patience", type=int, default=5_000, help="updates without growth")
    parser.add_argument("--epochs", type=int, default=4, help="text")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "recurrence.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = b""
    same: dict[str, Any] = {"task": arguments.task, "batch": arguments.batch}
    same |= {"hidden": arguments.hidden, "embedding": 16}
    if arguments.task == "text":
        text = characters(arguments.text)
        same |= {"text": Path(arguments.text or "python").name, "epochs": arguments.epochs}
    else:
        same |= {"updates": arguments.updates, "patience": arguments.patience}
    wanted = []
    for seed in map(int, arguments.seeds.split(",")):
        for steps in map(int, (arguments.steps or ("8" if text else "2,3,4,5,8")).split(",")):
            for method in arguments.methods.split(","):
                for lr in map(float, arguments.lr.split(",")):
                    one = {**same, "seed": seed, "steps": steps, "method": method, "lr": lr}
                    wanted += [one | extra for extra in variants(method, arguments)]
    if text:
        results = measured(arguments.results, wanted, lambda one: train_text(one, text))
        print(table("steps", results, "method", "steps", "bits"))
    else:
        results = measured(arguments.results, wanted, train_episodes)
        print(table("steps", results, "method", "steps", "length"))


def variants(method: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The synthesizers that a method is tried with; None for none."""
    if method == "truncated":
        return [{"synthetic": None}]
    if method != "DNI":
        sys.exit(f"there is no method {method!r}; allowed: truncated, DNI")
    found = []
    for hidden in arguments.synthesizer.split(","):
        name = "linear" if hidden == "linear" else {"mlp": {"hidden": int(hidden)}}
        for lr in map(float, arguments.synthesizer_lr.split(",")):
            for scale in map(float, arguments.scale.split(",")):
                options = {"synthesizer": name, "optimizer": {"Adam": {"lr": lr}}, "scale": scale}
                found.append({"synthetic": options})
    return found


if __name__ == "__main__":
    main()
