#!/usr/bin/env python3
"""Fine-tune a network as modules, the first half frozen, beside the same in one process.

The ResNet of the template (definitions/chains/resnet) is trained on MNIST's images, made 3 x 32 x
32, in one process. Its weights are taken apart into four modules, of which the first two are
frozen, and trained on CIFAR-10 by ``dnictl compare``: under gradient interfaces, and by
backpropagation.

Usage: finetune.py --mnist build/mnist --cifar10 cifar10.npz [--interfaces exact,mixed] [--epochs 4]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from dni_runtime import Chain
from dni_runtime.data import open_data
from dni_runtime.plan.prepare import importing_from
from dni_runtime.spec import DataSpec

RESNET = Path(__file__).parents[2] / "definitions" / "chains" / "resnet" / "resnet.py"


def pretrained(folder: Path, mnist: Path, samples: int) -> float:
    """Train the network on MNIST, write ``mnist.safetensors``, and return its accuracy."""
    with importing_from(folder):
        import resnet  # type: ignore[import-not-found]
    torch.manual_seed(0)
    model: nn.Module = resnet.ResNet(channels=3, classes=10)
    data = DataSpec(
        dataset="mnist", path=str(mnist.absolute()), train_limit=samples, eval_limit=2000
    )
    source = open_data(data, folder, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for epoch in range(1, 5):
        for x, y in source.train_batches(epoch):
            optimizer.zero_grad()
            cross_entropy(model(as_cifar(x)), y).backward()
            optimizer.step()
        schedule.step()
    save_file(model.state_dict(), folder / "mnist.safetensors")
    model.eval()
    with torch.no_grad():
        right = [model(as_cifar(x)).argmax(1) == y for x, y in source.eval_batches()]
    return float(torch.cat(right).float().mean())


def as_cifar(x: Tensor) -> Tensor:
    """Return 28 x 28 images in grey as 32 x 32 in three colours."""
    return pad(x, (2, 2, 2, 2), value=float(x.min())).expand(-1, 3, -1, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnist", type=Path, required=True, help="folder of the four IDX files")
    parser.add_argument("--cifar10", type=Path, required=True, help="npz of CIFAR-10")
    parser.add_argument("--interfaces", default="exact,mixed")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(RESNET, folder)
        accuracy = pretrained(folder, given.mnist, given.samples)
        print(f"on MNIST, in one process: accuracy {accuracy:.2%}", flush=True)
        path = folder / "chain.yaml"
        Chain.split(
            "resnet:ResNet",
            args={"channels": 3, "classes": 10},
            data={
                "dataset": "npz",
                "path": str(given.cifar10.absolute()),
                "batch_size": 64,
                "train_limit": given.samples,
                "eval_limit": 2000,
            },
            modules=4,
            weights=folder / "mnist.safetensors",
            path=path,
            epochs=given.epochs,
            defaults={"optimizer": {"Adam": {"lr": 0.001}}},
        )
        document = yaml.safe_load(path.read_text())
        for module in document["modules"][:2]:
            module["freeze"] = True
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        argv = [sys.executable, "-m", "dnictl", "compare", path, "--interfaces", given.interfaces]
        done = subprocess.run([*argv, "--seeds", str(given.seeds), "--out", folder / "compared"])
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
