#!/usr/bin/env python3
"""How much a chain slows down while strangers attack its link: paired phases of one real run.

A chain of two modules trains over tcp with CURVE, started by 'dnictl up'. Quiet phases and attacks
take turns; the figure is the training batches a second during an attack over the mean of the two
quiet phases around it. The strangers run on this host, too, at the lowest priority: what they
compute themselves is part of the loss. The processor time for a batch, in the same way, tells what
the attack costs the attacked process itself.

Example:
  scripts/experiments/bench_strangers.py --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from dni_runtime.run.documents.metrics import TrainLine, read_metrics
from dni_runtime.run.documents.reports import Endpoint
from dni_runtime.run.rundir import RunDir

CHAIN = """\
name: attacked
data: {dataset: digits, batch_size: 128, flatten: true}
epochs: 1000000
checkpoint: {every_epochs: 0}
links: {transport: tcp, security: curve}
modules:
  - name: bottom
    layers:
      [{Linear: {in_features: 64, out_features: 256}}, {BatchNorm1d: {num_features: 256}}, ReLU]
  - name: top
    layers:
      - Linear: {in_features: 256, out_features: 256}
      - BatchNorm1d: {num_features: 256}
      - ReLU
      - Linear: {in_features: 256, out_features: 10}
"""
CONNECTIONS = 1000
EACH_S = 0.02
"""Strangers that are turned away come again this often."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def _clients(address: str, prepare: Callable[[Any], None]) -> Iterator[None]:
    """One ZeroMQ client after the other, each kept for a while."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    kept: list[Any] = []
    while True:
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        prepare(client)
        client.connect(address)
        kept.append(client)
        if len(kept) > 10:
            kept.pop(0).close()
        yield


def _null(address: str, server_key: bytes) -> Iterator[None]:
    return _clients(address, lambda client: None)


def _wrong_key(address: str, server_key: bytes) -> Iterator[None]:
    def prepare(client: Any) -> None:
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = zmq.curve_keypair()[0]

    return _clients(address, prepare)


def _stolen_key(address: str, server_key: bytes) -> Iterator[None]:
    def prepare(client: Any) -> None:
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = server_key

    return _clients(address, prepare)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _silent(address: str, server_key: bytes) -> Iterator[None]:
    """A thousand connections that never speak; those that are dropped come again."""
    kept = [socket.create_connection(_place(address)) for _ in range(CONNECTIONS)]
    while True:
        kept.pop(0).close()
        kept.append(socket.create_connection(_place(address)))
        yield


def _gigabyte(address: str, server_key: bytes) -> Iterator[None]:
    announced = GREETING + b"\x02" + struct.pack(">Q", 1 << 30) + bytes(1 << 16)
    while True:
        with socket.create_connection(_place(address)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(announced)
        yield


ATTACKS = {
    "client without encryption": _null,
    "wrong key": _wrong_key,
    "stolen server key": _stolen_key,
    f"{CONNECTIONS:,} silent connections": _silent,
    "1 GB announced": _gigabyte,
}


def attack(name: str, address: str, server_key: str) -> None:
    """What the attacking process does, until it is ended."""
    os.nice(19)
    names = list(ATTACKS) if name == "all at once" else [name]
    attacks = [ATTACKS[one](address, server_key.encode()) for one in names]
    while True:
        for one in attacks:
            next(one)
        time.sleep(EACH_S)


class Pace(NamedTuple):
    """How the tail trains."""

    batches_per_s: float  # slowed down by whatever else runs here
    cpu_s: float  # of its process for a batch


def pace(run: RunDir, began: float, ended: float) -> Pace:
    """How the tail has trained between two times."""
    lines = read_metrics(run.metrics("top"), TrainLine)
    first, *_, last = (one for one in lines if began <= one.time <= ended)
    batches = last.step - first.step
    return Pace(batches / (last.time - first.time), (last.cpu_s - first.cpu_s) / batches)


def newest(run: RunDir) -> TrainLine:
    """The tail's newest figures."""
    *_, line = read_metrics(run.metrics("top"), TrainLine)
    return line


def phase(run: RunDir, seconds: float) -> Pace:
    """Let the chain train for a while, and tell how it did."""
    time.sleep(0.5)  # what has just begun or ended settles
    began = time.time()
    time.sleep(seconds)
    return pace(run, began, time.time())


def measure(run: RunDir, name: str, seconds: float) -> tuple[Pace, int]:
    """The pace while strangers attack, and the most descriptors that the tail had open."""
    endpoint = Endpoint.read(run.endpoint("top"))
    where = [str(endpoint.address), str(endpoint.public_key)]
    stranger = subprocess.Popen([sys.executable, __file__, "--attack", name, *where])
    try:
        time.sleep(1.5)  # it has to import, and to open its connections
        found = phase(run, seconds)
        files = len(os.listdir(f"/proc/{endpoint.pid}/fd"))
        if stranger.poll() is not None:
            raise SystemExit(f"the attack {name!r} ended by itself")
    finally:
        stranger.kill()
        stranger.wait()
    return found, files


@contextlib.contextmanager
def training(folder: Path) -> Iterator[RunDir]:
    """The chain, training in the background."""
    (folder / "chain.yaml").write_text(CHAIN)
    run = RunDir(folder / "run")
    command = [sys.executable, "-m", "dnictl"]
    options = ["--backend", "process", "--run-dir", str(run.root), "-d"]
    subprocess.run([*command, "up", "chain.yaml", *options], cwd=folder, check=True)
    try:
        until = time.monotonic() + 120
        while not any(read_metrics(run.metrics("top"), TrainLine)):
            if time.monotonic() > until:
                raise SystemExit("the chain does not train")
            time.sleep(0.2)
        yield run
    finally:
        subprocess.run([*command, "stop", str(run.root)], cwd=folder, check=True)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each attack comes")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long a phase lasts")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attack(*options.attack)
        return
    names = [*ATTACKS, "all at once"]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    refused: dict[str, dict[str, int]] = {}
    memory: dict[str, float] = {}
    most: dict[str, int] = dict.fromkeys(names, 0)
    with (
        tempfile.TemporaryDirectory(prefix="dni-strangers-") as folder,
        training(Path(folder)) as run,
    ):
        time.sleep(2)
        start = newest(run).memory_bytes or 0
        quiet = phase(run, options.seconds)
        for number in range(options.rounds):
            for name in names:
                before = newest(run).refused
                during, files = measure(run, name, options.seconds)
                time.sleep(1)
                after = newest(run)
                then, quiet = quiet, phase(run, options.seconds)
                fast = statistics.mean((then.batches_per_s, quiet.batches_per_s))
                speeds[name].append(during.batches_per_s / fast)
                costs[name].append(during.cpu_s / statistics.mean((then.cpu_s, quiet.cpu_s)))
                most[name] = max(most[name], files)
                memory[name] = ((after.memory_bytes or 0) - start) / 1e6
                refused[name] = {
                    reason: count - before.get(reason, 0)
                    for reason, count in after.refused.items()
                    if count > before.get(reason, 0)
                }
                print(f"{number + 1}/{options.rounds} {name}: {speeds[name][-1]:.2f}",
                      file=sys.stderr)  # fmt: skip
    if options.json:
        figures = {"speed": speeds, "cpu": costs, "refused": refused, "memory_mb": memory}
        print(json.dumps({**figures, "files": most}))
        return
    print("| attack | batches/s of quiet | CPU/batch of quiet | refused, last round | MB | files |")
    print("|---|---|---|---|---|---|")
    for name in names:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in refused[name].items())
        shown = (
            f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"
            for found in (speeds[name], costs[name])
        )
        print(f"| {name} | {' | '.join(shown)} | {counts} | {memory[name]:+.0f} | {most[name]} |")


if __name__ == "__main__":
    main()
