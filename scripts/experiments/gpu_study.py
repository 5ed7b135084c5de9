#!/usr/bin/env python3
"""What one GPU says in ten minutes of chains of four modules beside backpropagation.

Usage: gpu_study.py --cifar10 cifar10.npz --text FILE [--minutes 9] [--tiny] [--out FILE]

*Learning*: a ResNet-18 (64 to 512 channels; CIFAR-10, random crops and flips) and a causal
transformer of 20 million parameters (12 blocks of 384 features, 256 bytes of context), in bfloat16,
each in one process: the same batches and steps for every method, curves, and a figure on held-out
samples. *Speed*: the same chains by four real workers that share the card, over one process. Rows
are printed as JSON lines as they are measured, the most telling first; what has no time left is
named. ``--tiny`` shrinks everything, to try the script on a CPU. Beside each row: GPU memory, and
how busy nvidia-smi saw the card.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_learning import HEADS, BackpropWithHeads
from peers.pace import ENDLESS, measure_pace
from peers.processes import Timing
from torch import Tensor

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.data import describe
from dni_runtime.plan.prepare import prepare
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import parse_chain

HERE = Path(__file__).resolve().parent
BACKPROP, COMPILED = "backprop", "backprop, compiled"
LATE = {"delayed": {"max_late": 1, "predict": True}}
MUON = {"groups": [{"parameters": "matrices", "optimizer": {"Muon": {"lr": 5e-3}}}]}
"""Muon for the matrices of blocks (docs/chain.md, "Training"); AdamW for the rest."""

Batches = Callable[[int], tuple[Tensor, Tensor]]
"""Gives the training batch of a step; the same for every method."""


@dataclass(frozen=True)
class Study:
    """A network, its data and how long it is trained."""

    name: str
    document: dict[str, Any]  # as a chain file has it
    methods: dict[str, dict[str, Any]]  # settings of modules by label
    batches: Batches
    held_out: list[tuple[Tensor, Tensor]]
    steps: int
    figure: Callable[[Tensor, Tensor], Tensor]  # of outputs and labels: a mean


def resnet(width: int) -> list[dict[str, Any]]:
    """Four modules of two residual blocks each (He et al. 2016, arXiv:1512.03385, for CIFAR)."""

    def convolution(a: int, b: int, side: int = 3, stride: int = 1) -> list[Any]:
        padding = side // 2
        args = {"in_channels": a, "out_channels": b, "kernel_size": side, "stride": stride}
        return [
            {"Conv2d": {**args, "padding": padding, "bias": False}},
            {"BatchNorm2d": {"num_features": b}},
        ]

    def block(a: int, b: int, stride: int) -> list[Any]:
        inner = [*convolution(a, b, 3, stride), "ReLU", *convolution(b, b)]
        if a == b:
            return [{"Residual": inner}, "ReLU"]
        shortcut = convolution(a, b, 1, stride)
        return [{"Residual": {"layers": inner, "shortcut": shortcut}}, "ReLU"]

    modules, before = [], width
    for number in range(4):
        after = width << number
        layers = [*block(before, after, 1 if number == 0 else 2), *block(after, after, 1)]
        if number == 0:
            layers = [*convolution(3, width), "ReLU", *layers]
        modules.append({"name": f"stage-{number + 1}", "layers": layers})
        before = after
    linear = {"Linear": {"in_features": before, "out_features": 10}}
    modules[-1]["layers"] += [{"AdaptiveAvgPool2d": {"output_size": 1}}, "Flatten", linear]
    return modules


def transformer(dim: int, blocks: int, heads: int, context: int) -> list[dict[str, Any]]:
    """Four modules of as many blocks each (scripts/experiments/chains/lm.py)."""
    block = {"import": "lm:Block", "args": {"dim": dim, "heads": heads}}
    modules = [{"name": f"part-{n + 1}", "layers": [block] * (blocks // 4)} for n in range(4)]
    embed = {"import": "lm:Embed", "args": {"vocabulary": 256, "dim": dim, "context": context}}
    head = {"import": "lm:Head", "args": {"dim": dim, "vocabulary": 256}}
    modules[0]["layers"] = [embed, *modules[0]["layers"]]  # type: ignore[misc]
    modules[-1]["layers"] = [*modules[-1]["layers"], head]
    return modules


def images(path: Path, batch: int, device: torch.device) -> tuple[Batches, list[Any], int]:
    """CIFAR-10 with crops and flips made on the device, held-out batches, batches an epoch."""
    data = np.load(path)

    def placed(part: str) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(data[f"x_{part}"]).to(device)
        return x.float().div_(127.5).sub_(1), torch.from_numpy(data[f"y_{part}"]).to(device)

    x_N, y_N = placed("train")
    padded = torch.nn.functional.pad(x_N, (4, 4, 4, 4))

    def batches(step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(y_N), (batch,), generator=draw).to(device)
        at = torch.randint(9, (2, batch), generator=draw).to(device)
        flip = torch.rand(batch, generator=draw).to(device) < 0.5
        rows, columns = (at[axis, :, None] + torch.arange(32, device=device) for axis in (0, 1))
        columns = torch.where(flip[:, None], columns.flip(1), columns)
        cut = padded[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return cut.permute(0, 3, 1, 2).contiguous(), y_N[chosen]

    held_out = list(zip(*(part.split(batch) for part in placed("eval")), strict=True))
    return batches, held_out, len(y_N) // batch


def tokens(path: Path, batch: int, context: int, device: torch.device) -> tuple[Batches, list[Any]]:
    """Windows of a text as bytes; its last tenth is held out."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long().to(device)
    end = len(text) * 9 // 10
    places = torch.arange(context + 1, device=device)

    def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
        found = text[starts[:, None] + places]
        return found[:, :-1], found[:, 1:]

    def batches(step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(step)
        return windows(torch.randint(end - context - 1, (batch,), generator=draw).to(device))

    starts = torch.arange(end, len(text) - context - 1, context, device=device)
    return batches, [windows(some) for some in starts.split(batch)][:40]


def studies(given: argparse.Namespace, folder: Path, device: torch.device) -> list[Study]:
    """Both networks, full or tiny."""
    tiny = given.tiny
    width, batch = (8, 32) if tiny else (64, 512)
    dim, blocks, heads, context = (32, 4, 2, 32) if tiny else (384, 12, 6, 256)
    precision = "float32" if tiny else "bfloat16"
    picture, shown, epoch = images(given.cifar10, batch, device)
    window, unread = tokens(given.text, 8 if tiny else 64, context, device)
    steps = {"images": 6 if tiny else 20 * epoch, "text": 6 if tiny else 1500}

    def warm(count: int) -> dict[str, Any]:
        first = max(count // 10, 1)
        parts = [
            {"LinearLR": {"start_factor": 0.01, "total_iters": first}},
            {"CosineAnnealingLR": {"T_max": count - first}},
        ]
        schedule = {"SequentialLR": {"milestones": [first], "schedules": parts}}
        return {"schedule": schedule, "schedule_every": "batch", "precision": precision}

    def document(name: str, data: dict[str, Any], modules: Any, **defaults: Any) -> dict[str, Any]:
        return {"name": name, "data": data, "modules": modules, "defaults": defaults}

    sgd = {"SGD": {"lr": 0.2, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}}
    adamw = {"AdamW": {"lr": 1e-3 if not tiny else 5e-3}}
    npz = {"dataset": "npz", "path": str(given.cifar10.resolve()), "batch_size": batch}
    text = {
        "dataset": "text",
        "path": str(given.text.resolve()),
        "args": {"context": context},
        "batch_size": 8 if tiny else 64,
    }
    shutil.copy(HERE / "chains" / "lm.py", folder)
    return [
        Study(
            "transformer",
            document(
                "gpt", text, transformer(dim, blocks, heads, context),
                optimizer=adamw, **warm(steps["text"]),
            ),
            {
                BACKPROP: {}, "late-1": {"interface": LATE},
                "backprop, Muon": MUON, "late-1, Muon": {"interface": LATE, **MUON},
                "local": {"interface": "local"},
                "exact": {"interface": {"exact": {"micro_batches": 4}}}, COMPILED: {},
            },
            window, unread, steps["text"],
            lambda p, y: torch.nn.functional.cross_entropy(
                p.float().flatten(0, 1), y.flatten()
            ) / math.log(2),
        ),
        Study(
            "resnet-18",
            document("resnet", npz, resnet(width), optimizer=sgd, **warm(steps["images"])),
            {
                BACKPROP: {}, HEADS: {}, "mixed": {"interface": "mixed"},
                "local": {"interface": "local"}, "late-1": {"interface": LATE}, COMPILED: {},
            },
            picture, shown, steps["images"],
            lambda p, y: 100 * (p.argmax(1) == y).float().mean(),
        ),
    ]  # fmt: skip


def with_settings(study: Study, settings: dict[str, Any], folder: Path) -> Path:
    """Write a study's chain with a method's settings."""
    defaults = {**study.document["defaults"], **settings}
    path = folder / "chain.yaml"
    path.write_text(json.dumps({**study.document, "defaults": defaults}))  # JSON is YAML
    return path


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, float]]:
    """Note what the GPU had to do meanwhile: how busy (per cent of the time), and memory."""
    seen: dict[str, float] = {}
    if device.type != "cuda":
        yield seen
        return
    torch.cuda.reset_peak_memory_stats()
    query = "--query-gpu=utilization.gpu,memory.used"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as smi:
        yield seen
        smi.terminate()
        assert smi.stdout is not None
        lines = [line.split(",") for line in smi.stdout.read().splitlines() if "," in line]
    if lines:
        seen["busy_percent"] = sum(float(line[0]) for line in lines) / len(lines)
        seen["card_MiB"] = max(float(line[1]) for line in lines)
    seen["allocated_MiB"] = torch.cuda.max_memory_allocated() / 2**20


def learn(study: Study, method: str, folder: Path, device: torch.device) -> dict[str, Any]:
    """Train by a method; gives its curve and rate."""
    path = with_settings(study, study.methods[method], folder)
    chain = parse_chain(path.read_text(), file=str(path))
    workers = worker_specs(chain, describe(chain.data, folder))
    trainer: Backprop | LocalChain
    if method == HEADS:
        trainer = BackpropWithHeads(workers, device)
    elif method.startswith(BACKPROP):
        trainer = Backprop(workers, device)
    else:
        trainer = LocalChain(workers, delay=1, device=device)
    if method == COMPILED:
        for step in trainer.steps:
            step.layers.compile()

    def finished() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    curve, timed, since, total = [], 0.0, time.perf_counter(), torch.zeros((), device=device)
    quarter, warmup, samples = study.steps // 4, max(study.steps // 20, 1), 0
    for number in range(1, study.steps + 1):
        x, y = study.batches(number)
        total += trainer.train_batch(x, y).detach()
        if number == warmup:
            finished()
            since, samples = time.perf_counter(), 0
        samples += len(y)
        if number % max(quarter, 1) == 0:
            finished()
            curve.append([number, float(total) / quarter])
            total.zero_()
    finished()
    timed = time.perf_counter() - since
    found = [(study.figure(trainer.predict(x), y), len(y)) for x, y in study.held_out]
    figure = sum(float(value) * count for value, count in found) / sum(n for _, n in found)
    return {"held_out": round(figure, 4), "loss": curve, "samples_per_s": round(samples / timed, 1)}


def share(study: Study, method: str, folder: Path, device: torch.device) -> dict[str, Any]:
    """Four workers of the runtime on the one card: samples/s, and what each waits for."""
    settings = {**study.methods[method], "device": device.type, "cpus": 1}
    path = with_settings(study, settings, folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | ENDLESS))
    root = Path(tempfile.mkdtemp(dir=folder)) / "run"
    paces, rate = measure_pace(root, prepare(path), Timing(warmup_s=3, seconds=8), {})
    waiting = {pace.module: {k: round(v, 3) for k, v in pace.waiting.items()} for pace in paces}
    return {"samples_per_s": round(rate, 1), "waiting": waiting}


def main() -> None:
    """Measure until the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar10", type=Path, required=True, help="as cifar-small.yaml reads it")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="to try the script on a CPU")
    parser.add_argument("--out", type=Path, help="a file for the lines, too")
    given = parser.parse_args()
    device, end_s = torch.device(given.device), time.monotonic() + 60 * given.minutes
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory(prefix="dni-gpu-") as name:
        folder = Path(name)
        sys.path.insert(0, name)
        text, pictures = studies(given, folder, device)
        rows: list[tuple[Callable[..., dict[str, Any]], Study, str]] = [
            *((learn, text, method) for method in [*text.methods][:4]),
            *((learn, pictures, method) for method in [*pictures.methods][:5]),
            (share, text, "late-1"), (share, pictures, "mixed"), (share, pictures, "local"),
            *((learn, text, method) for method in [*text.methods][4:]),
            (share, text, "exact"), (learn, pictures, COMPILED),
        ]  # fmt: skip
        longest = dict.fromkeys((learn, share), 0.0)
        for run, study, method in rows:
            row = {"what": run.__name__, "network": study.name, "method": method}
            began = time.monotonic()
            if began + longest[run] > end_s:
                row["left_out"] = "no time"
            else:
                with watched(device) as seen:
                    row |= run(study, method, folder, device)
                row |= {key: round(value, 1) for key, value in seen.items()}
                longest[run] = max(longest[run], time.monotonic() - began)
                row["seconds"] = round(time.monotonic() - began, 1)
            line = json.dumps(row)
            print(line, flush=True)
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
