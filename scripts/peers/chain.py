"""The asynchronous contenders: chains of two modules, served by the runtime's own workers."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.networks import LEARNING_RATE, NETWORKS, Layer, Network, data_spec
from peers.slow_link import INTERFACE, Line, Link
from peers.synchronous import Measured, Timing

# name -> gradient interface, type on the wire
CHAINS: Mapping[str, tuple[str, str]] = {
    "chain": ("synthetic", "float32"),
    "chain-bf16": ("synthetic", "bfloat16"),
    "chain-int8": ("synthetic", "int8"),
    "mixed": ("mixed", "float32"),
    "delayed": ("delayed", "float32"),
    "delayed-bf16": ("delayed", "bfloat16"),
}
LEAST_WINDOW = 8
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


def window_for(network: Network, dtype: str, line: Line, step_s: float, learn_every: int) -> int:
    """Batches in flight with which neither module waits for the line.

    That is a round trip in steps, and two more; what a slow line sends meanwhile counts, too.

    Args:
        network: The network.
        dtype: Type of activations and gradients on the wire.
        line: The line.
        step_s: Seconds that the faster module takes for a batch.
        learn_every: Every so many batches a gradient comes back.
    """
    nbytes = network.batch * network.activation * _BYTES[dtype]
    down_s, up_s = line.seconds(nbytes), line.seconds(nbytes / learn_every)
    round_trip_s = 2 * line.delay_ms / 1000 + down_s + up_s
    return max(LEAST_WINDOW, math.ceil(round_trip_s / max(step_s, down_s, up_s)) + 2)


def chain_spec(
    name: str,
    network: Network,
    folder: Path,
    *,
    cut: int | None,
    window: int,
    learn_every: int,
    remote: bool,
) -> dict[str, Any]:
    """A chain file's content.

    Args:
        name: The contender.
        network: The network.
        folder: Where the data lies.
        cut: Layers in the first module.
        window: Batches in flight.
        learn_every: Of how many late gradients the synthesizer learns from one.
        remote: Whether the modules are on different hosts.
    """
    interface, dtype = CHAINS[name]
    synthetic = {
        "synthesizer": network.synthesizer,
        "conditioned": True,
        "learn_every": learn_every,
    }
    interfaces: dict[str, Any] = {
        "synthetic": {"synthetic": synthetic},
        "mixed": {"mixed": {"synthetic": synthetic}},
        "delayed": "delayed",
    }
    links: dict[str, Any] = {"window": window}
    if dtype != "float32":
        links["dtype"] = dtype
    if remote:
        links |= {"transport": "tcp", "interface": INTERFACE, "security": "none"}

    def layers(part: tuple[Layer, ...]) -> list[Any]:
        return [{name: arguments} if arguments else name for name, arguments in part]

    head, tail = network.parts(2, cut)
    return {
        "name": "bench",
        "data": {**data_spec(network, folder), "drop_last": True},
        "defaults": {
            "interface": interfaces[interface],
            "optimizer": {"Adam": {"lr": LEARNING_RATE, "fused": True}},
            "cpus": 1,
        },
        "modules": [
            {"name": "head", "layers": layers(head)},
            {"name": "tail", "layers": layers(tail)},
        ],
        "links": links,
    }


def measure_chain(
    name: str,
    network: str,
    folder: Path,
    timing: Timing,
    *,
    cut: int | None,
    window: int,
    learn_every: int,
    link: Link | None,
) -> Measured:
    """Run a chain's two workers, each at its end of the line.

    Args:
        name: The contender.
        network: Name of the network.
        folder: Where the data lies, and runs are made.
        timing: How long.
        cut: Layers in the first module.
        window: Batches in flight.
        learn_every: Of how many late gradients the synthesizer learns from one.
        link: The line; None for loopback.

    Raises:
        dni_runtime.errors.DniError: It failed.
    """
    from dni_runtime.bench import chain as pace
    from dni_runtime.launch.host import Site
    from dni_runtime.launch.prepare import prepare

    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
    spec = chain_spec(
        name,
        NETWORKS[network],
        folder,
        cut=cut,
        window=window,
        learn_every=learn_every,
        remote=link is not None,
    )
    path = scratch / "chain.yaml"
    path.write_text(json.dumps(spec, indent=1))  # JSON is YAML
    found = pace.measure_chain(
        scratch / "run",
        pace.endless(prepare(path)),
        Site("process"),
        pace.Bounds(timing.warmup_s, timing.seconds),
        prefixes={"head": link.enter(0), "tail": link.enter(1)} if link is not None else None,
    )
    return Measured(
        rate=found.samples_per_s,
        cpu_s=found.cpu_s,
        cores=tuple(module.cores for module in found.modules),
        details={"window": window, "modules": [asdict(module) for module in found.modules]},
    )
