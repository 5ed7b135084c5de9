#!/usr/bin/env python3
"""Measure one link between two processes: time per batch and MB/s, by size and transport.

Batches go down; what comes up is an acknowledgement for each, or a gradient as large as the batch
(``--gradients``). As many batches as the window and the kernel's buffers hold are discarded first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection

import torch
import zmq

from dni_runtime.link import InputLink, OutputLink
from dni_runtime.spec import Choice, LayerSpec, LinksSpec, TensorSpec, WorkerSpec
from dni_runtime.wire import Mode

RUN = "bench"
DEADLINE_S = 60.0


def make_spec(module: str, floats: int, window: int, gradients: bool) -> WorkerSpec:
    """One of two modules whose link carries so many floats per batch."""
    tensor = TensorSpec(shape=(floats,), dtype="float32")
    head = module == "source"
    return WorkerSpec(
        chain="bench",
        module=module,
        index=0 if head else 1,
        layers=(LayerSpec(type="Identity"),),
        interface=None,
        optimizer=Choice(name="SGD"),
        schedule=None,
        schedule_every="epoch",
        loss=Choice(name="MSELoss"),
        seed=0,
        device="cpu",
        precision="float32",
        cpus=1,
        input=tensor,
        output=tensor,
        label=TensorSpec(shape=(), dtype="int64"),
        prediction=tensor,
        classes=None,
        batch_limit=1,
        upstream=None if head else "source",
        downstream="sink" if head else None,
        gradients_in=int(gradients),
        gradients_out=int(gradients),
        links=LinksSpec(window=window),
        keep=1,
        stop_grace_s=5.0,
        head=None,
        tail=None,
    )


def sink(spec: WorkerSpec, address: str, count: int, pipe: Connection) -> None:
    """Receive and answer ``count`` batches; report the CPU seconds that it took."""
    torch.set_num_threads(1)
    with InputLink(spec, run=RUN) as link:
        pipe.send(link.bind(address))
        link.wait_for_peer(DEADLINE_S)
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        done = 0
        began_s = time.process_time()
        while done < count:
            item = link.receive()
            if item is None:
                poller.poll(1000)
                continue
            done += 1
            if spec.gradients_out:
                link.send_gradient(item.id, item.h, item.id)
            else:
                link.ack(item.id)
        pipe.send(time.process_time() - began_s)
        pipe.recv()  # the other end has everything


def measure(
    address: str, nbytes: int, *, window: int, gradients: bool, seconds: float
) -> dict[str, float]:
    """Send batches of one size for about so many seconds."""
    floats = nbytes // 4
    discard = window + 32
    guess_s = 60e-6 + nbytes / 1.5e9 * (2 if gradients else 1)
    count = discard + max(100, int(seconds / guess_s))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(
        target=sink, args=(make_spec("sink", floats, window, gradients), address, count, there)
    )
    child.start()
    h, y = torch.randn(1, floats), torch.zeros(1, dtype=torch.int64)
    with OutputLink(make_spec("source", floats, window, gradients), run=RUN) as link:
        link.connect(here.recv(), deadline_s=DEADLINE_S)
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        sent, began_s, cpu_s = 0, 0.0, 0.0
        while sent < count or link.in_flight:
            link.receive()
            if sent - link.in_flight >= discard and not began_s:
                began_s, cpu_s, first = time.perf_counter(), time.process_time(), sent
            if sent < count and link.room:
                sent += 1
                link.send_batch(sent, 0, Mode.TRAIN, h, y)
            else:
                poller.poll(1000)
        taken_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        sink_cpu_s = here.recv()
        here.send(None)
    child.join()
    batches = count - first
    return {
        "bytes": nbytes,
        "batches": batches,
        "us_per_batch": taken_s / batches * 1e6,
        "source_cpu_us": cpu_s / batches * 1e6,
        "sink_cpu_us": sink_cpu_s / count * 1e6,
        "mb_per_s": nbytes * batches / taken_s / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kb", type=int, nargs="+", default=[1, 16, 64, 1024, 4096, 16384])
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="about, for each size")
    parser.add_argument("--gradients", action="store_true", help="send as much up as down")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for transport in ("ipc", "tcp"):
            for kb in options.kb:
                address = f"ipc://{folder}/link" if transport == "ipc" else "tcp://127.0.0.1:*"
                result = measure(
                    address,
                    kb * 1024,
                    window=options.window,
                    gradients=options.gradients,
                    seconds=options.seconds,
                )
                if options.json:
                    print(json.dumps({"transport": transport, **result}))
                else:
                    print(
                        f"{transport} {kb:6d} KB  {result['us_per_batch']:9.1f} us/batch  "
                        f"{result['mb_per_s']:7.0f} MB/s  CPU {result['source_cpu_us']:7.1f} us "
                        f"(source) {result['sink_cpu_us']:7.1f} us (sink)",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
