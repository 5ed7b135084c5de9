#!/usr/bin/env python3
"""Split networks that others wrote, train them as modules, and compare with plain PyTorch.

Each network is split into 2, 3 and 4 modules by ``dnictl split``'s own function, trained for some
steps under ``exact`` by real workers, exported under its own names, and compared with the same
network trained by a plain loop of PyTorch. It needs torchvision and transformers.

Usage: split_networks.py [--steps 20] [--modules 2 3 4] [--backend process] [NETWORK ...]
"""

from __future__ import annotations

import os

os.environ["MKL_CBWR"] = "AUTO"  # read by torch: see 'exact' in docs/architecture.md

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dni_runtime.core.source import Wrapped
from dni_runtime.data import open_data
from dni_runtime.launch.chain import Chain
from dni_runtime.launch.prepare import importing_from
from dni_runtime.launch.splitting import split_chain
from dni_runtime.split.network import network_of
from dni_runtime.split.weights import load_weights

SOURCES = Path(__file__).parent / "networks"

PICTURES = {"dataset": "networks.data:Pictures"}
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet18": {"data": PICTURES},
    "resnet50": {"data": PICTURES},
    "vit": {"data": PICTURES},
    "unet": {"data": {"dataset": "networks.data:Masks"}, "loss": "MSELoss"},
    "gpt2": {
        "data": {"dataset": "networks.data:Tokens"},
        "takes": ["input_ids"],
        "returns": "logits",
    },
    "bert": {
        "data": {"dataset": "networks.data:Sentences"},
        "takes": ["input_ids", "attention_mask"],
        "returns": "logits",
    },
}


def compare(name: str, modules: int, steps: int, backend: Any, folder: Path) -> float:
    """Return the largest difference of a parameter or buffer after training."""
    given = dict(NETWORKS[name])
    data = {**given.pop("data"), "batch_size": 32, "drop_last": True}
    loss = given.pop("loss", "CrossEntropyLoss")
    settings = {
        "data": data, "loss": loss, "steps": steps, "epochs": 100, "eval_every": 0,
        "defaults": {"optimizer": {"SGD": {"lr": 0.05, "momentum": 0.9}}},
        "metrics": [],
    }  # fmt: skip
    for imported in [one for one in sys.modules if one.partition(".")[0] == "networks"]:
        del sys.modules[imported]
    (folder / "networks").symlink_to(SOURCES.absolute())
    taken = split_chain(
        f"networks.{name}:build", folder / "chain.yaml", settings, modules=modules,
        interface="exact", **given,
    )  # fmt: skip
    for part in taken.parts:
        print(f"    {part.name}: until {part.until}, {part.seconds * 1e3:.0f} ms", flush=True)
    if backend == "apptainer":
        done = subprocess.run(
            [sys.executable, "-m", "dnictl", "build"], cwd=folder, stdout=subprocess.DEVNULL
        )
        done.check_returncode()
    run = Chain(folder / "chain.yaml").train(
        backend=backend, runs=folder / "runs", images=folder / "images"
    )
    state = run.wait()
    if state.phase != "finished":
        raise SystemExit(f"{name} in {modules}: {state.phase}: {run.failure(state)}")
    found = run.state_dict()
    plain = _plain(taken, loss, steps, **given)
    plain.load_state_dict(found, strict=True)  # takes them all
    expected = _plain(taken, loss, steps, **given).state_dict()
    differences = {
        key: float((found[key] - value).abs().max()) if value.is_floating_point() else
        float(not torch.equal(found[key], value))
        for key, value in expected.items()
    }  # fmt: skip
    worst = max(differences, key=lambda key: differences[key])
    print(f"    largest difference {differences[worst]:.1e} ({worst})", flush=True)
    return differences[worst]


def _plain(taken: Any, loss: str, steps: int, **given: Any) -> nn.Module:
    """Train the network by a plain loop of PyTorch, from the same weights, on the same batches."""
    prepared = taken.prepared
    torch.set_num_threads(1)
    with importing_from(prepared.base.absolute()):
        target = prepared.written.network["import"]
        spec, network = network_of(target, prepared.info, args={}, **given)
        load_weights(network, taken.weights)
        source = open_data(prepared.chain.data, prepared.base, seed=prepared.chain.seed)
    whole, criterion = Wrapped(network, spec).train(), getattr(nn, loss)()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, fused=True)
    step = 0
    for epoch in range(1, 101):
        for x, y in source.train_batches(epoch):
            scores = whole(*(x if isinstance(x, tuple) else (x,)))
            if y.dim() == 2 and not y.is_floating_point():
                scores = scores.transpose(1, 2)  # B x T x C, as torch's loss wants it
            optimizer.zero_grad()
            criterion(scores, y).backward()
            optimizer.step()
            step += 1
            if step == steps:
                return network
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modules", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--backend", default="process")
    given = parser.parse_args()
    worst = 0.0
    for name in given.networks or NETWORKS:
        for modules in given.modules:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{name} in {modules}:", flush=True)
                difference = compare(name, modules, given.steps, given.backend, Path(folder))
                worst = max(worst, difference)
    print(f"largest difference of all: {worst:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    main()
