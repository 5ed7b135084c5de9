"""The asynchronous contenders: chains of modules, served by the runtime's own workers."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dni_runtime.plan.prepare import CheckedChain, prepare
from dni_runtime.run.documents.metrics import (
    EpochLine,
    EvaluationLine,
    MetricsLine,
    StartLine,
    read_metrics,
)
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.named import module_of, number_of
from dni_runtime.spec.replicas import tails_of
from peers.contenders import WHOLE, Contender, chain_of, strategy_of
from peers.networks import LEARNING_RATE, NETWORKS, Layer, Network, data_spec
from peers.pace import ENDLESS, measure_pace, run_until
from peers.processes import Measured, Timing
from peers.slow_link import INTERFACE, Line, Link

LEAST_WINDOW = 8
LESSONS = ("synthetic", "mixed", "true-lessons")
"""Interfaces whose synthesizers take lessons."""

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


def window_for(name: str, network: Network, line: Line, step_s: float, learn_every: int) -> int:
    """Batches in flight with which neither end of the line waits for it.

    That is a round trip in steps, and two more; what a slow line sends meanwhile counts, too.
    ``step_s`` is how long the faster end takes for a batch; one gradient comes back for
    ``learn_every`` batches if the interface can choose.
    """
    if strategy_of(name) is not None:
        return LEAST_WINDOW  # its modules are within a host
    interface, dtype = chain_of(name)
    nbytes = network.batch * network.activation * _BYTES[dtype]
    every = learn_every if interface in LESSONS else 1
    down_s, up_s = line.seconds(nbytes), line.seconds(nbytes / every)
    round_trip_s = 2 * line.delay_ms / 1000 + down_s + up_s
    return max(LEAST_WINDOW, math.ceil(round_trip_s / max(step_s, down_s, up_s)) + 2)


def module_names(count: int) -> list[str]:
    """Names of the modules, head first."""
    return ["head", *(f"middle-{i}" for i in range(1, count - 1)), "tail"][-count:]


def chain_spec(
    name: str,
    network: Network,
    data: dict[str, Any],  # as a chain file has it
    *,
    modules: int = 2,
    cut: int | None,  # layers in the first of two modules
    window: int,  # batches in flight
    learn_every: int,  # the synthesizer learns from every n-th late gradient
    remote: bool,  # the modules are on different hosts
) -> dict[str, Any]:
    """A chain file's content."""
    interface, dtype = chain_of(name)
    modules = 1 if name.startswith(WHOLE) else modules
    replication = strategy_of(name)
    replicas = {} if replication is None else {"replicas": 2}
    synthetic = {
        "synthesizer": network.synthesizer,
        "conditioned": True,
        "learn_every": learn_every,
    }
    interfaces: dict[str, Any] = {
        "synthetic": {"synthetic": synthetic},
        "mixed": {"mixed": {"synthetic": synthetic}},
        "true-lessons": {"mixed": {"synthetic": {**synthetic, "bootstrapped": False}}},
        "local": "local",
        "delayed": "delayed",
        "late-1": {"delayed": {"max_late": 1, "predict": True}},
        "late-1-4": {"delayed": {"max_late": 1, "predict": True, "micro_batches": 4}},
        "late-6": {"delayed": {"max_late": 6, "predict": True}},
        "exact-4": {"exact": {"micro_batches": 4}},
        "exact-8": {"exact": {"micro_batches": 8}},
    }
    links: dict[str, Any] = {"window": window}
    if dtype != "float32":
        links["dtype"] = dtype
    if remote:
        links |= {"transport": "tcp", "interface": INTERFACE, "security": "none"}

    def written(layer: Layer) -> Any:
        name, arguments = layer
        if ":" in name:
            return {"import": name, "args": arguments}
        return {name: arguments} if arguments else name

    return {
        "name": "bench",
        "data": {**data, "drop_last": True},
        "metrics": [network.metric],
        "defaults": {
            "interface": interfaces[interface],
            "optimizer": {"Adam": {"lr": LEARNING_RATE, "fused": True}},
            "cpus": 1,
        },
        "modules": [
            {"name": module, "layers": [written(layer) for layer in part], **replicas}
            for module, part in zip(module_names(modules), network.parts(modules, cut), strict=True)
        ],
        "links": links,
        **({} if replication is None else {"replication": replication}),
    }


def measure_chain(
    contender: Contender,
    network: str,  # its name
    modules: int,
    folder: Path,  # of the data and the runs
    timing: Timing,
    *,
    window: int,  # batches in flight
    learn_every: int,  # the synthesizer learns from every n-th late gradient
    link: Link | None,  # None: loopback
) -> Measured:
    """Run a chain's workers, the first half at one end of the line, for a while."""
    spec = chain_spec(
        contender.name,
        NETWORKS[network],
        data_spec(NETWORKS[network], folder),
        modules=modules,
        cut=contender.cut,
        window=window,
        learn_every=learn_every,
        remote=link is not None,
    )
    root, prepared = _prepared(contender, spec | ENDLESS, folder)
    paces, rate = measure_pace(root, prepared, timing, prefixes_of(prepared.names, link))
    cores = tuple(pace.cores for pace in paces)
    return Measured(
        rate=rate,
        cpu_s=sum(cores) / rate,
        cores=cores,
        details={"window": window, "modules": [asdict(pace) for pace in paces]},
    )


def train_chain(
    contender: Contender,
    spec: dict[str, Any],  # its file's content
    folder: Path,  # of the runs
    link: Link | None,  # None: loopback
    enough: Callable[[list[dict[str, Any]]], bool],  # gets all evaluations so far, now and then
) -> None:
    """Train a chain with real workers, evaluated after each epoch, until enough is known."""
    root, prepared = _prepared(contender, spec, folder)
    (metric,) = spec["metrics"]

    def met(run: RunDir) -> bool:
        lines = read_metrics(run.metrics(tails_of(prepared.names)[0]), MetricsLine)
        return enough(evaluations(list(lines), metric))

    run_until(root, prepared, prefixes_of(prepared.names, link), met)


def evaluations(lines: Sequence[MetricsLine], metric: str) -> list[dict[str, Any]]:
    """A tail's evaluations, with the seconds that it had trained until then.

    Its clock runs from the end of one evaluation (at first: from its start) to the end of the
    epoch's last batch, when the next one begins.
    """
    found, train_s, since = [], 0.0, 0.0
    for line in lines:
        if isinstance(line, StartLine):
            since = line.time
        elif isinstance(line, EpochLine):
            train_s += line.time - since
        elif isinstance(line, EvaluationLine) and line.kind == "eval":
            since = line.time
            found.append({"batches": line.step, "train_s": train_s, metric: line.figures[metric]})
    return found


def _prepared(
    contender: Contender, spec: dict[str, Any], folder: Path
) -> tuple[Path, CheckedChain]:
    """A run directory to make, and the chain; user classes lie in ``folder``."""
    root = Path(tempfile.mkdtemp(prefix=f"{contender.name}-", dir=folder))
    path = folder / f"{root.name}.yaml"
    path.write_text(json.dumps(spec, indent=1))  # JSON is YAML
    return root / "run", prepare(path)


def prefixes_of(workers: Sequence[str], link: Link | None) -> dict[str, list[str]]:
    """What each worker's command is given to, to run at its end of the line; none at loopback.

    The first half of the modules is at one end, or, if they have replicas, the first ones.
    """
    if link is None:
        return {}
    count = len(workers)
    places = {name: 2 * i // count for i, name in enumerate(workers)}
    if any(module_of(name) != name for name in workers):
        places = {name: number_of(name) - 1 for name in workers}
    return {name: link.enter(place) for name, place in places.items()}
