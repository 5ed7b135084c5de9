#!/usr/bin/env python3
"""A link between two processes of this host beside bare ZeroMQ, in turns.

The link is the one that modules use, with its window, acknowledgements and checks. Bare ZeroMQ is a
pair of PAIR sockets with the same high-water mark that sends one frame without copying it. Both
give a tensor over the memory that has come. MB are 1e6 bytes; CPU is that of all threads of both
processes. ``--trees`` measures links of other checkouts, too, in turns with the rest.

Example:
  scripts/experiments/bench_link.py --repetitions 7
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

SIZES = {"4 KB": 1 << 12, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
BARE = "bare"
WINDOW = 8


def bare_sink(size: int, address: str) -> None:
    """Receive by bare ZeroMQ."""
    import torch
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(WINDOW)
    socket.bind(address)
    say(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    batches = -WINDOW - 16
    began = cpu = 0.0
    while len(frame := socket.recv(copy=False)):
        torch.frombuffer(frame.buffer, dtype=torch.float32)
        batches += 1
        if batches == 0:
            began, cpu = time.perf_counter(), time.process_time()
    say([batches / (time.perf_counter() - began), (time.process_time() - cpu) / batches])
    socket.send(b"")
    socket.close(linger=1000)
    context.term()


def bare_source(size: int, address: str, seconds: float) -> None:
    """Send by bare ZeroMQ."""
    import torch
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(WINDOW)
    socket.connect(address)
    h = torch.randn(size // 4)
    sent, until, cpu = 0, time.perf_counter() + seconds, time.process_time()
    while sent < WINDOW + 40 or time.perf_counter() < until:
        socket.send(h.numpy().data, copy=False)
        sent += 1
    socket.send(b"")
    socket.recv()
    say((time.process_time() - cpu) / sent)
    socket.close(linger=0)
    context.term()


def link_sink(size: int, address: str) -> None:
    """Receive by a link."""
    from dni_runtime.measure.ends import Sink

    job, keys = link_job(size, address)
    folder = Path(address.removeprefix("ipc://")).parent if address.startswith("ipc") else Path()
    with contextlib.closing(Sink(job, folder, keys)) as sink:
        say(sink.address)
        for _ in range(job.discard):
            sink.take()
        began, cpu, batches = time.perf_counter(), time.process_time(), 0
        while sink.take():
            batches += 1
        say([batches / (time.perf_counter() - began), (time.process_time() - cpu) / batches])


def link_source(size: int, address: str, seconds: float) -> None:
    """Send by a link."""
    from dni_runtime.measure.ends import Source

    job, keys = link_job(size, address)
    with contextlib.closing(Source(job, address, keys)) as source:
        sent, until, cpu = 0, time.perf_counter() + seconds, time.process_time()
        while sent < job.discard + 40 or time.perf_counter() < until:
            source.send()
            sent += 1
        source.send(last=True)
        source.settle()
        say((time.process_time() - cpu) / sent)


def link_job(size: int, address: str):
    """Return the job and the keys of a link's end."""
    from dni_runtime.measure.ends import Job
    from dni_runtime.run.keys import KeyPair, KnownKeys
    from dni_runtime.spec import LinksSpec

    links = LinksSpec(transport=address[:3], security="none", window=WINDOW)
    return Job(size, links, latency=False), KnownKeys(KeyPair.new(), {})


def say(what: object) -> None:
    """Answer the measuring process."""
    print(json.dumps(what), flush=True)


def serve() -> None:
    """Be one of the two ends: one job after the other, as JSON lines."""
    import torch

    from dni_runtime.worker.memory import keep_freed_memory

    keep_freed_memory()  # as a worker does
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        globals()[name](*arguments)


class End:
    """A process that has one end of what is measured."""

    def __init__(self, tree: Path | None) -> None:
        environ = dict(os.environ)
        if tree is not None:
            environ["PYTHONPATH"] = str(tree)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def tell(self, *order: object) -> None:
        """Give it a job."""
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self):
        """Return its next answer."""
        line = self._process.stdout.readline()
        return json.loads(line) if line else sys.exit("an end of the link has failed")

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait()


def measure(ends: tuple[End, End], way: str, size: int, address: str, seconds: float):
    """Return the batches a second, and the CPU microseconds of both ends for each."""
    kind = "bare" if way == BARE else "link"
    source, sink = ends
    sink.tell(f"{kind}_sink", size, address)
    actual = sink.answer()
    source.tell(f"{kind}_source", size, actual, seconds)
    rate, sink_s = sink.answer()
    return rate, 1e6 * (source.answer() + sink_s)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--transports", nargs="+", choices=("tcp", "ipc"), default=["tcp", "ipc"])
    parser.add_argument("--seconds", type=float, default=0.4, help="each time")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--trees", nargs="*", type=Path, default=[], help="folders that hold another dni_runtime"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dni-link-"))

        def end(tree: Path | None) -> End:
            return stack.enter_context(contextlib.closing(End(tree)))

        trees = {"link": None, **{f"link of {tree}": tree.resolve() for tree in options.trees}}
        ends = {way: (end(tree), end(tree)) for way, tree in trees.items()}
        ends[BARE] = ends["link"]
        print("| link | size | way | MB/s (range) | of bare | CPU us |\n|---|---|---|---|---|---|")
        for transport in options.transports:
            for size in options.sizes:
                found = defaultdict(list)
                for repetition in range(options.repetitions):
                    order = list(ends) if repetition % 2 else list(reversed(ends))
                    for way in order:
                        address = f"ipc://{folder}/sink.sock"
                        if transport == "tcp":
                            address = "tcp://127.0.0.1:*"
                        else:
                            Path(f"{folder}/sink.sock").unlink(missing_ok=True)
                        found[way].append(
                            measure(ends[way], way, SIZES[size], address, options.seconds)
                        )
                for way, values in found.items():
                    rates = [rate * SIZES[size] / 1e6 for rate, _ in values]
                    pairs = zip(values, found[BARE], strict=True)
                    ratio = statistics.median(mine[0] / bare[0] for mine, bare in pairs)
                    cpu = statistics.median(cpu for _, cpu in values)
                    print(
                        f"| {transport} | {size} | {way} | {statistics.median(rates):,.0f} "
                        f"({min(rates):,.0f}-{max(rates):,.0f}) | {ratio:.2f} | {cpu:,.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
