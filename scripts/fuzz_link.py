#!/usr/bin/env python3
"""Sends mutated messages to a link of a chain that trains, and tells what that did to it.

A chain of two modules trains over tcp without encryption (with it, no stranger's message gets as
far). Valid messages of its link (HELLO, BATCH, MARK, BYE and what travels the other way) are
mutated: bits, lengths, numbers, frames. What happens to be a valid HELLO is left out: without
encryption whoever says it has the link. Then each message must be refused and counted, memory must
not grow, and the chain must train on as before.

Example:
  scripts/fuzz_link.py --messages 10000000
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from dni_runtime.errors import WireError
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.handshake import Hello, compare
from dni_runtime.run.documents.metrics import TrainLine, read_metrics
from dni_runtime.run.documents.reports import Endpoint
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import ID_LIMIT, Kind, Mark, Message, TensorEntry, decode, encode

CHAIN = """\
name: fuzzed
data: {dataset: digits, batch_size: 32, flatten: true}
epochs: 1000000
checkpoint: {every_epochs: 0}
eval_every: 0
links: {transport: tcp, security: none}
modules:
  - {name: bottom, layers: [{Linear: {in_features: 64, out_features: 16}}, ReLU]}
  - {name: top, layers: [{Linear: {in_features: 16, out_features: 10}}]}
"""
POOL = 200_000
"""Different messages; each is sent several times, in another order."""

CONNECTIONS = 4
Frames = list[bytes]


def main() -> None:
    """Attack, and print a JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=1_000_000, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a quiet phase (%(default)s)")
    parser.add_argument("--phases", type=int, default=5, help="before and after (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dni-fuzz-") as folder:
        (Path(folder) / "chain.yaml").write_text(CHAIN)
        run = RunDir(Path(folder) / "run")
        dnictl = [sys.executable, "-m", "dnictl"]
        where = ["--backend", "process", "--run-dir", str(run.root), "-d"]
        subprocess.run([*dnictl, "up", "chain.yaml", *where], cwd=folder, check=True)
        try:
            report = attack(run, options)
        finally:
            subprocess.run([*dnictl, "stop", str(run.root)], cwd=folder, check=True)
    print(json.dumps(report, indent=2))


def attack(run: RunDir, options: argparse.Namespace) -> dict[str, Any]:
    """Send the messages, between quiet phases."""
    while not any(read_metrics(run.metrics("top"), TrainLine)):
        time.sleep(0.2)
    time.sleep(options.seconds)
    before, start = paces(run, options), newest(run)
    choice = random.Random(options.seed)
    pool = mutations(run, choice)
    address = str(Endpoint.read(run.endpoint("top")).address)
    began, context = time.monotonic(), zmq.Context()
    strangers = [context.socket(zmq.DEALER) for _ in range(CONNECTIONS)]
    for stranger in strangers:
        stranger.connect(address)
    for number in range(options.messages):
        strangers[number % CONNECTIONS].send_multipart(choice.choice(pool))
        if number % 1_000_000 == 999_999:
            print(f"{number + 1:,} sent, {mib(newest(run).memory_bytes)} MiB", file=sys.stderr)
    last = -1
    while refused(newest(run)) > last:  # what is still on its way
        last = refused(newest(run))
        time.sleep(3)
    took_s, during = time.monotonic() - began, newest(run)
    for stranger in strangers:
        stranger.close(linger=0)
    context.term()
    after, end = paces(run, options), newest(run)
    return {
        "sent": options.messages,
        "refused": refused(end) - refused(start),
        "reasons": end.refused,
        "messages_per_s": round(options.messages / took_s),
        "batches_during": during.step - start.step,
        "batches_per_s_before": before,
        "batches_per_s_after": after,
        "after_over_before": round(statistics.median(after) / statistics.median(before), 3),
        "memory_mib": {
            "before": mib(start.memory_bytes),
            "during": mib(during.memory_bytes),
            "after": mib(end.memory_bytes),
            "peak": mib(end.memory_peak_bytes),
        },
        "restarts": end.attempt - 1,
    }


def newest(run: RunDir) -> TrainLine:
    """The attacked module's newest figures."""
    *_, line = read_metrics(run.metrics("top"), TrainLine)
    return line


def refused(line: TrainLine) -> int:
    return sum(line.refused.values())


def mib(size_bytes: int | None) -> int:
    return (size_bytes or 0) >> 20


def paces(run: RunDir, options: argparse.Namespace) -> list[float]:
    """Batches a second in each of some phases."""
    found = []
    for _ in range(options.phases):
        first = newest(run)
        time.sleep(options.seconds)
        last = newest(run)
        found.append(round((last.step - first.step) / (last.time - first.time), 1))
    return found


def mutations(run: RunDir, choice: random.Random) -> list[Frames]:
    """Messages that the link must refuse."""
    spec = WorkerSpec.from_json(run.spec("top").read_bytes())
    name = Record.read(run.root).name
    contract = LinkContract.of(spec, spec.sources[0])
    bases = valid(contract, name)
    pool: list[Frames] = []
    while len(pool) < POOL:
        frames = mutated(choice.choice(bases), choice)
        if not is_accepted(frames, contract, name):
            pool.append(frames)
    return pool


def valid(contract: LinkContract, run: str) -> list[Message]:
    """One message of each kind, as the neighbour would send it."""
    hello = Hello("0123456789abcdef", 1, contract.agreement, 1, 0, 0)
    tensors = (TensorEntry("h", "float32", (2, 16)), TensorEntry("y", "int64", (2,)))
    gradient = (TensorEntry("g", "float32", (2, 16)),)
    source, data = contract.source, (bytes(128), bytes(16))
    return [
        Message(Kind.HELLO, run, source, body=hello.body()),
        Message(Kind.BATCH, run, source, id=7, epoch=1, tensors=tensors, buffers=data),
        Message(Kind.MARK, run, source, id=8, epoch=1, mark=Mark.EPOCH),
        Message(Kind.BYE, run, source),
        Message(Kind.GRADIENT, run, source, id=7, tensors=gradient, buffers=data[:1]),
        Message(Kind.ACK, run, source, ack=9),
        Message(Kind.WELCOME, run, source, ack=3, body={"number": 1, "received": 3}),
        Message(Kind.DRAINED, run, source, id=8),
        Message(Kind.REQUEST, run, source, body={"what": "checkpoint"}),
    ]


def is_accepted(frames: Frames, contract: LinkContract, run: str) -> bool:
    try:
        message = decode(frames, contract.down)
        if message.kind is not Kind.HELLO:
            return False
        return compare(run, contract.agreement, Hello.of(message), message.run) is None
    except WireError:
        return False


def mutated(message: Message, choice: random.Random) -> Frames:
    """The message with one to three mistakes."""
    if choice.random() < 0.3:
        field = choice.choice(["id", "ack", "epoch"])
        number = choice.choice([0, 1, -1, ID_LIMIT, ID_LIMIT + 1, 1 << 64, choice.getrandbits(62)])
        try:
            frames = [bytes(one) for one in encode(message._replace(**{field: number}))]
        except (WireError, OverflowError):
            frames = [bytes(one) for one in encode(message)]
    else:
        frames = [bytes(one) for one in encode(message)]
    for _ in range(choice.randint(1, 3)):
        choice.choice(MISTAKES)(frames, choice)
    return frames or [b"\0"]


def _flip(frames: Frames, choice: random.Random) -> None:
    at = _some(frames, choice)
    if frames and frames[at]:
        changed = bytearray(frames[at])
        changed[choice.randrange(len(changed))] ^= 1 << choice.randrange(8)
        frames[at] = bytes(changed)


def _cut_off(frames: Frames, choice: random.Random) -> None:
    at = _some(frames, choice)
    if frames:
        frames[at] = frames[at][: choice.randrange(len(frames[at]) + 1)]


def _lengthen(frames: Frames, choice: random.Random) -> None:
    at = _some(frames, choice)
    if frames:
        frames[at] += choice.randbytes(choice.choice([1, 8, 300, 5000]))


def _leave_out(frames: Frames, choice: random.Random) -> None:
    if frames:
        del frames[_some(frames, choice)]


def _repeat(frames: Frames, choice: random.Random) -> None:
    if frames:
        frames.insert(_some(frames, choice), frames[_some(frames, choice)])


def _noise(frames: Frames, choice: random.Random) -> None:
    if frames:
        frames[_some(frames, choice)] = choice.randbytes(choice.choice([0, 1, 20, 200]))


def _some(frames: Sequence[bytes], choice: random.Random) -> int:
    return choice.randrange(len(frames)) if frames else 0


MISTAKES: list[Callable[[Frames, random.Random], None]] = [
    _flip, _flip, _flip, _cut_off, _lengthen, _leave_out, _repeat, _noise,
]  # fmt: skip


if __name__ == "__main__":
    main()
