#!/usr/bin/env python3
"""Split networks that people use, train the parts under ``exact``, and compare with plain PyTorch.

Each network of networks/zoo.py is split by ``dnictl split``'s own function, trained by real workers
over real links, exported under its own names, loaded strictly, and compared with the same network
trained by a plain loop from the same weights on the same batches: parameters, buffers, and outputs
in eval mode. It needs transformers, timm and torchvision; nothing is downloaded.

Usage: zoo.py [--steps 4] [--modules 3] [--lengths] [--backend process] [--json FILE] [NETWORK ...]
"""

from __future__ import annotations

import os

os.environ["MKL_CBWR"] = "AUTO"  # read by torch: see 'exact' in docs/architecture.md

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dni_runtime.api.chain import Chain
from dni_runtime.data import open_data
from dni_runtime.errors import DniError, SpecError
from dni_runtime.plan.prepare import importing_from
from dni_runtime.plan.splitting import split_chain
from dni_runtime.split.network import load_weights

SOURCES = Path(__file__).parent / "networks"
sys.path.insert(0, str(SOURCES.parent))

ALLOWED = 1e-5
LR = 0.01


def settings_of(
    name: str, *, batch_size: int = 8, **data: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a chain's settings for a network of the zoo, and what ``split`` is told of it."""
    from networks.zoo import NETWORKS

    _, inputs, label, options = NETWORKS[name]
    args = {"inputs": inputs, "label": label, **data}
    split = {key: value for key, value in options.items() if key != "loss"}
    return {
        "data": {
            "dataset": "networks.data:Drawn",
            "args": args,
            "batch_size": batch_size,
            "drop_last": True,
        },
        "loss": options.get("loss", "CrossEntropyLoss"),
        "metrics": [],
    }, {"args": {"name": name}, **split}


def compare(
    name: str, modules: int, steps: int, backend: Any, folder: Path, *, varying: bool = False
) -> dict[str, Any]:
    """Split, train, export and compare one network; say what came of it."""
    settings, given = settings_of(name)
    if varying:
        length = int(re.search(r"\d+(?=\])", settings["data"]["args"]["inputs"][0])[0])  # type: ignore[index]
        collate = {"import": "networks.data:shorter", "args": {"length": length}}
        settings["data"] |= {"collate": collate, "max_length": length}
    settings |= {
        "steps": steps,
        "epochs": 100,
        "eval_every": 0,
        "defaults": {"optimizer": {"SGD": {"lr": LR, "momentum": 0.9}}},
    }
    (folder / "networks").symlink_to(SOURCES.absolute())
    wanted, given["interface"] = modules, "exact"
    while True:
        try:
            path = folder / "chain.yaml"
            taken = split_chain("networks.zoo:build", path, settings, modules=wanted, **given)
            break
        except SpecError as error:
            if "so that it has at most" not in str(error) or wanted == 2:
                raise
            wanted -= 1
    if backend == "apptainer":
        build = [sys.executable, "-m", "dnictl", "build"]
        subprocess.run(build, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    run = Chain(path).train(backend=backend, runs=folder / "runs", images=folder / "images")
    state = run.wait()
    if state.phase != "finished":
        return {"result": "failed", "why": f"{state.phase}: {run.failure(state)}"}
    found = run.state_dict()
    plain, batch = _trained(taken, settings["loss"], steps, name)
    expected = {**plain.state_dict(), "(output)": _output(plain, batch, name)}
    exported, _ = _trained(taken, settings["loss"], 0, name)
    exported.load_state_dict(found, strict=True)
    found["(output)"] = _output(exported, batch, name)
    differences = {key: _difference(found[key], value) for key, value in expected.items()}
    worst = max(differences, key=lambda key: differences[key])
    return {
        "result": "equal" if differences[worst] <= ALLOWED else "DIFFERENT",
        "modules": wanted,
        "difference": differences[worst],
        "where": worst,
        "until": [part.until for part in taken.parts],
    }


def _difference(found: Tensor, wanted: Tensor) -> float:
    if not wanted.is_floating_point() or not wanted.isfinite().all():
        return float(not torch.equal(found, wanted))
    return float((found - wanted).abs().max()) if wanted.numel() else 0.0


def _trained(taken: Any, loss: str, steps: int, name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Train the network by a plain loop from the weights that were split, on the same batches."""
    from networks.zoo import build

    prepared = taken.prepared
    torch.set_num_threads(1)
    network = build(name).train()
    load_weights(network, taken.weights)
    with importing_from(prepared.base.absolute()):
        source = open_data(prepared.chain.data, prepared.base, seed=prepared.chain.seed)
    criterion = getattr(nn, loss)()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=0.9, fused=True)
    batches = ((x, y) for epoch in range(1, 101) for x, y in source.train_batches(epoch))
    for number, (x, y) in enumerate(batches):
        xs = x if isinstance(x, tuple) else (x,)
        if number == steps:
            return network, xs
        scores = _call(network, xs, name)
        if scores.dim() == 3 and not y.is_floating_point():
            scores = scores.transpose(1, 2)  # B x T x C, as torch's loss wants it
        optimizer.zero_grad()
        criterion(scores, y).backward()
        optimizer.step()
    raise AssertionError


def _call(network: nn.Module, xs: tuple[Tensor, ...], name: str) -> Tensor:
    from networks.zoo import NETWORKS

    options = NETWORKS[name][-1]
    y = (
        network(**dict(zip(options["takes"], xs, strict=True)))
        if "takes" in options
        else network(*xs)
    )
    if isinstance(y, Tensor):
        return y
    key = options["returns"]
    found: Tensor = (
        y[int(key)] if key.isdigit() else y[key] if isinstance(y, dict) else getattr(y, key)
    )
    return found


@torch.no_grad()
def _output(network: nn.Module, xs: tuple[Tensor, ...], name: str) -> Tensor:
    return _call(network.eval(), xs, name)


def _told(to: Any, name: str, *given: Any, varying: bool) -> None:
    try:
        # a supervisor releases its run shortly after it has reported the end
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = compare(name, *given, Path(folder), varying=varying)
    except DniError as error:
        found = {"result": "refused", "why": str(error)}
    except BaseException as error:  # what is no DniError is a fault of the product, or of the zoo
        found = {
            "result": "ERROR",
            "why": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }
    to.send(found)


def main() -> None:
    import networks.zoo as zoo
    import timm  # noqa: F401  children are forks: they need not import it
    import transformers  # noqa: F401

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--modules", type=int, default=3)
    parser.add_argument("--backend", default="process")
    parser.add_argument(
        "--lengths",
        action="store_true",
        help="networks of texts: a length of its own in each batch",
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    fork = multiprocessing.get_context("fork")
    of_texts = [name for name, (_, inputs, *_) in zoo.NETWORKS.items() if zoo.TEXT in inputs]
    for name in given.networks or (of_texts if given.lengths else zoo.NETWORKS):
        began = time.monotonic()
        here, there = fork.Pipe(duplex=False)
        child = fork.Process(
            target=_told,
            args=(there, name, given.modules, given.steps, given.backend),
            kwargs={"varying": given.lengths},
        )
        child.start()
        there.close()
        try:
            found = here.recv()
        except EOFError:
            found = {"result": "ERROR", "why": "its process died"}
        child.join()
        results[name] = found = {**found, "seconds": round(time.monotonic() - began, 1)}
        why = found.get("why", f"in {found.get('modules')}: {found.get('difference', 0):.1e}")
        print(f"| {name} | {found['result']} | {' '.join(why.split())} |", flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))
    counts = {
        kind: sum(one["result"] == kind for one in results.values())
        for kind in ("equal", "refused", "failed", "DIFFERENT", "ERROR")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
    sys.exit(bool(counts["failed"] + counts["DIFFERENT"] + counts["ERROR"]))


if __name__ == "__main__":
    main()
