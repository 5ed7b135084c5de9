#!/usr/bin/env python3
"""What encryption costs on bare ZeroMQ, and what several connections or narrow types win back.

Two processes on this host, tcp over loopback. Each way of sending 16 MB of float32 (or what --size
says) is measured in turns: without encryption; with CURVE on one connection; with CURVE on several
connections with an I/O thread each; with CURVE and the activation as bfloat16, converted on both
sides. MB are millions of bytes of float32 that arrive, whatever travels.

Example:
  scripts/experiments/bench_curve.py --repetitions 9
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import zmq

WAYS: dict[str, tuple[bool, int, str]] = {
    "plain": (False, 1, "float32"),
    "curve": (True, 1, "float32"),
    "curve, 2 connections": (True, 2, "float32"),
    "curve, 4 connections": (True, 4, "float32"),
    "curve, bfloat16": (True, 1, "bfloat16"),
    "curve, bfloat16, 2 connections": (True, 2, "bfloat16"),
}
WINDOW = 8


def sink() -> None:
    """The receiving process: one job after the other, as JSON lines."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        way, messages = json.loads(line)
        encrypted, connections, dtype = WAYS[way]
        context = zmq.Context(io_threads=connections)
        public, secret = zmq.curve_keypair()
        pulls, addresses = [], []
        poller = zmq.Poller()
        for _ in range(connections):
            pull = context.socket(zmq.PULL)
            pull.set_hwm(WINDOW)
            if encrypted:
                pull.setsockopt(zmq.CURVE_SERVER, 1)
                pull.setsockopt(zmq.CURVE_SECRETKEY, secret)
            pull.bind("tcp://127.0.0.1:*")
            addresses.append(pull.getsockopt_string(zmq.LAST_ENDPOINT))
            poller.register(pull, zmq.POLLIN)
            pulls.append(pull)
        print(json.dumps([addresses, public.decode()]), flush=True)
        began_s, got = None, 0
        while got < messages:
            for pull, _ in poller.poll():
                frame = pull.recv(copy=False)
                tensor = torch.frombuffer(frame.buffer, dtype=getattr(torch, dtype))
                tensor.float()
                if began_s is None:
                    began_s = time.perf_counter()  # the first one is not timed
                got += 1
        assert began_s is not None
        print(json.dumps(time.perf_counter() - began_s), flush=True)
        for pull in pulls:
            pull.close()
        context.term()


def measure(receiver: subprocess.Popen[str], way: str, size: int, messages: int) -> float:
    """Megabytes of float32 a second."""
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    receiver.stdin.write(json.dumps([way, messages]) + "\n")
    receiver.stdin.flush()
    addresses, server = json.loads(receiver.stdout.readline())
    encrypted, connections, dtype = WAYS[way]
    context = zmq.Context(io_threads=connections)
    pushes = []
    for address in addresses:
        push = context.socket(zmq.PUSH)
        push.set_hwm(WINDOW)
        if encrypted:
            push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()
            push.curve_serverkey = server.encode()
        push.connect(address)
        pushes.append(push)
    h = torch.randn(size // 4)
    for number in range(messages):
        sent = h.to(getattr(torch, dtype))
        pushes[number % connections].send(sent.view(torch.uint8).numpy().data, copy=False)
    seconds = float(json.loads(receiver.stdout.readline()))
    for push in pushes:
        push.close(linger=0)
    context.term()
    return size * (messages - 1) / seconds / 1e6


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=16 << 20, help="bytes of a message")
    parser.add_argument("--messages", type=int, default=40, help="messages each time")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sink:
        sink()
        return
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with subprocess.Popen(
        [sys.executable, __file__, "--sink"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as receiver:
        for repetition in range(options.repetitions):
            order = list(WAYS) if repetition % 2 else list(reversed(WAYS))
            for way in order:
                found[way].append(measure(receiver, way, options.size, options.messages))
            print(f"{repetition + 1}/{options.repetitions}", file=sys.stderr)
        assert receiver.stdin is not None
        receiver.stdin.close()
    cores = len(os.sched_getaffinity(0))
    print(f"{options.size:,} bytes, {options.repetitions} repetitions, {cores} cores")
    print("| way | MB/s (range) | of plain | of curve |\n|---|---|---|---|")
    for way, rates in found.items():
        ratios = [
            f"{statistics.median(a / b for a, b in zip(rates, found[other], strict=True)):.2f}"
            for other in ("plain", "curve")
        ]
        print(
            f"| {way} | {statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) | "
            f"{ratios[0]} | {ratios[1]} |"
        )


if __name__ == "__main__":
    main()
