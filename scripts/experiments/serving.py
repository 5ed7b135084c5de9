#!/usr/bin/env python3
"""What a service does under load, beside a bare server, and while its modules are killed.

    scripts/experiments/serving.py load --peers litserve=/path/to/venv mlserver=/path/to/venv
    scripts/experiments/serving.py kills --seconds 120
    scripts/experiments/serving.py leave
    scripts/experiments/serving.py hostile --requests 10000
    scripts/experiments/serving.py poison
    scripts/experiments/serving.py health --peers litserve=/path/to/venv
    scripts/experiments/serving.py cut

``load`` asks servers of the same network in turns, by ``wrk`` (Debian's package) with 1, 8 and 64
clients: the chain by four processes, ``--in-process``, uvicorn with nothing but the network, and
peers in environments of their own. Two networks: one that takes microseconds, one of some 5 ms a
batch. ``kills``: 64 clients ask all the time; every 10 s a module is killed (SIGKILL); a new
version takes over, another one fails. ``leave``: four of five clients leave after 5 ms, beside as
many that ask as often, each by a connection of its own, and wait for their answer.
``hostile``: requests that are wrong in all ways (tensors, JSON, tokens, encodings, twenty at once,
bodies that come a byte at a time), beside 8 clients that are not. ``poison``: one request in a
hundred makes the first module fail; each of the others has to be answered. ``health``: what is said
of a service one of whose processes is stopped (SIGSTOP) and goes on. ``cut``: clients, front and
the first two modules are at one end of a line that holds packets for 20 ms, the others at the other
end (``peers/slow_link.py``); the line is down for 10 s.

It is one file because all of it is one service's, trained and asked in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import uvloop
from clients import BODY, NAME, Client, keep_asking, percentile, wrk
from peers.slow_link import INTERFACE, Line, Link, build_slow_link, open_link
from servers import serving_others

from dni_runtime.api.run import Run
from dni_runtime.run.documents.state import RunState

DNICTL = (sys.executable, "-m", "dnictl")
CHAIN = """\
name: digits
seed: 0
data: {dataset: digits, batch_size: 64, flatten: true}
epochs: 1
defaults: {interface: mixed, optimizer: {Adam: {lr: 0.001}}}
modules:
"""
BLOCK = "  - {{name: m{n}, layers: [{layers}]}}\n"
LAYER = "{{Linear: {{in_features: {a}, out_features: {b}}}}}, ReLU"


def dnictl(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run it."""
    done = subprocess.run([*DNICTL, *arguments], cwd=folder, capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"dnictl {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def train(folder: Path, width: int, depth: int, settings: str = "") -> None:
    """Train a chain of four modules, and export it."""
    text, features = settings + CHAIN, 64
    for number in range(4):
        layers = []
        for _ in range(depth):
            layers.append(LAYER.format(a=features, b=width))
            features = width
        if number == 3:
            layers.append(f"{{Linear: {{in_features: {features}, out_features: 10}}}}")
        text += BLOCK.format(n=number, layers=", ".join(layers))
    folder.mkdir(parents=True)
    (folder / "chain.yaml").write_text(text)
    dnictl(folder, "up", "--backend", "process", "--name", "trained")
    dnictl(folder, "export", "trained", "-o", "model.safetensors")
    script = (
        "import torch, dni_runtime; m = dni_runtime.load('model.safetensors');"
        "torch.jit.trace(m, torch.zeros(2, 64)).save('model.ts')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=folder, check=True)


@contextmanager
def served(folder: Path, *options: str, runs: str = "runs") -> Iterator[str]:
    """Serve the run, or the file, and give the address."""
    options = (*options, "-d", "--port", "0", "--runs", runs, "--json")
    document = json.loads(dnictl(folder, "serve", *options).stdout)
    try:
        yield document["url"]
    finally:
        dnictl(folder, "serve", "--stop", "--runs", runs, "--name", document["name"])


WRONG: list[tuple[str, Any]] = [
    *(("shape", value) for value in ([1, -64], [2**40, 64], "x", [], None)),
    *(("data", value) for value in (None, [[0.5] * 63], ["a"] * 64, [float("nan")] * 63, {})),
    *(("datatype", value) for value in ("FP1", 7)),
    *(("name", value) for value in ("x" * 9999, None)),
]
"""What is wrong with a tensor."""


def load(arguments: argparse.Namespace) -> None:
    """Ask the servers of two networks in turns."""
    script = arguments.folder / "post.lua"
    script.write_text(
        f'wrk.method = "POST"\nwrk.body = [=[{BODY.decode()}]=]\n'
        'wrk.headers["Content-Type"] = "application/json"\n'
    )
    peers = dict(peer.split("=", 1) for peer in arguments.peers)
    for network, (width, depth) in {"tiny": (64, 1), "5 ms": (2048, 1)}.items():
        folder = arguments.folder / network.replace(" ", "")
        train(folder, width, depth)
        with (
            served(folder, "trained", "--backend", "process") as by_processes,
            served(folder, "model.safetensors", runs="alone") as in_process,
            serving_others(folder, peers, BODY) as others,
        ):
            urls = {"four processes": by_processes, "in-process": in_process, **others}
            print(f"\n**{network}** ({os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f})\n")
            print("| server | clients | requests/s (range) | p50 ms | p99 ms | failed |")
            print("|---|---|---|---|---|---|")
            for clients in (1, 8, 64):
                found: dict[str, list[tuple[float, float, float, int]]] = {
                    name: [] for name in urls
                }
                for _ in range(arguments.rounds):
                    for name, url in urls.items():
                        found[name].append(wrk(url, clients, arguments.seconds, script))
                for name, rounds in found.items():
                    rates, p50, p99, failed = zip(*rounds, strict=True)
                    middle = (statistics.median(values) for values in (rates, p50, p99))
                    rate, half, most = middle
                    spread = f"{rate:.0f} ({min(rates):.0f} to {max(rates):.0f})"
                    figures = f"{spread} | {half:.2f} | {most:.1f} | {sum(failed)}"
                    print(f"| {name} | {clients} | {figures} |", flush=True)


def kills(arguments: argparse.Namespace) -> None:
    """Kill modules and change versions while clients ask."""
    folder = arguments.folder / "kills"
    train(folder, 64, 1)
    with served(folder, "trained", "--backend", "process", "--deadline", "30") as url:
        killed, failures, times = asyncio.run(_kills(folder, url, arguments))
    every = [took for _, took in times]
    near = [
        took for begin, took in times if any(begin - 1 < at < begin + took + 1 for at in killed)
    ]
    print(
        f"{len(times)} requests of {arguments.clients} clients in {arguments.seconds:g} s, "
        f"{len(killed)} kills, {len(failures)} failed {failures[:3]}\n"
        f"p50 {percentile(every, 0.5):.1f} ms, p99 {percentile(every, 0.99):.0f} ms; in the "
        f"seconds around a kill: p99 {percentile(near, 0.99):.0f} ms; "
        f"longest {percentile(every, 1):.0f} ms"
    )


async def _kills(
    folder: Path, url: str, arguments: argparse.Namespace
) -> tuple[list[float], list[str], list[tuple[float, float]]]:
    until = time.monotonic() + arguments.seconds
    times: list[tuple[float, float]] = []
    failed: list[str] = []
    killed: list[float] = []
    draw = random.Random(arguments.seed)
    (folder / "broken.safetensors").write_bytes(b"no network")

    async def disturb() -> None:
        version, number = "1", 0
        while time.monotonic() < until - 10:
            await asyncio.sleep(10)
            number += 1
            if number == 3:
                done = await asyncio.to_thread(
                    dnictl, folder, "serve", "--update", "trained", check=False
                )
                print(f"update: exit status {done.returncode}")
                version = "2"
            elif number == 6:
                done = await asyncio.to_thread(
                    dnictl, folder, "serve", "--update", "broken.safetensors", check=False
                )
                print(f"update that fails: exit status {done.returncode}")
            state: RunState = Run.open(folder / "runs" / NAME / version).state()
            name, module = draw.choice([*state.modules.items()])
            if module.pid:
                os.kill(module.pid, signal.SIGKILL)
                killed.append(time.monotonic())
                print(f"killed {name} of version {version}", flush=True)

    clients = [keep_asking(url, until, times, failed) for _ in range(arguments.clients)]
    await asyncio.gather(disturb(), *clients)
    return killed, failed, times


def leave(arguments: argparse.Namespace) -> None:
    """Have four of five clients leave after 5 ms, and look at the others."""
    folder = arguments.folder / "leave"
    train(folder, 64, 1)

    async def come_and_go(url: str, until: float, count: list[int], patience_s: float) -> None:
        while (begin := time.monotonic()) < until:
            client = await Client.open(url)
            task = asyncio.create_task(client.ask(BODY))
            await asyncio.wait([task], timeout=patience_s)
            count[0] += not task.done()
            client.leave()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(begin + 0.1 - time.monotonic())  # all ask as often

    async def phase(url: str, title: str, others: int, patience_s: float) -> None:
        times: list[tuple[float, float]] = []
        failed: list[str] = []
        count, until = [0], time.monotonic() + arguments.seconds
        stay = (keep_asking(url, until, times, failed, 0.01) for _ in range(8))
        come = (come_and_go(url, until, count, patience_s) for _ in range(others))
        await asyncio.gather(*stay, *come)
        took = [one for _, one in times]
        print(
            f"{title}: {len(took)} answers, {count[0]} have left, {len(failed)} failed, "
            f"p50 {percentile(took, 0.5):.1f} ms, p99 {percentile(took, 0.99):.1f} ms", flush=True,
        )  # fmt: skip

    with served(folder, "trained", "--backend", "process") as url:
        asyncio.run(phase(url, "before", 0, 0))
        for _ in range(arguments.rounds):
            asyncio.run(phase(url, "beside 32 that wait", 32, 30))
            asyncio.run(phase(url, "beside 32 that leave", 32, 0.005))
        asyncio.run(phase(url, "after", 0, 0))


def hostile(arguments: argparse.Namespace) -> None:
    """Send wrong requests, beside some that are right."""
    folder = arguments.folder / "hostile"
    train(folder, 64, 1)
    draw = random.Random(arguments.seed)

    token = folder / "token"
    token.write_text(draw.randbytes(16).hex())
    token.chmod(0o600)
    right = f"authorization: Bearer {token.read_text()}\r\n"
    encodings = ("content-encoding: gzip", "transfer-encoding: chunked", "expect: nothing")
    nobody = ("Bearer x", f"Basic {token.read_text()}", "Bearer", token.read_text()[:-1])

    def wrong() -> tuple[bytes, str, str]:
        tensor = {"name": "input", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}
        key, value = draw.choice(WRONG)
        body = json.dumps({"inputs": [{**tensor, key: value}]}).encode()
        choice = draw.random()
        if choice < 0.2:
            body = draw.randbytes(draw.randrange(2000))
        elif choice < 0.3:
            body = b"[" * draw.randrange(100_000)
        elif choice < 0.4:
            body = body[: draw.randrange(len(body))]
        head = right
        if 0.4 < choice < 0.5:
            head += f"inference-header-content-length: {draw.choice([-1, 0, 10**12, 5])}\r\n"
        elif choice < 0.55:
            head += f"{draw.choice(encodings)}\r\n"
        elif choice < 0.65:
            head = f"authorization: {draw.choice(nobody)}\r\n"
        return body, head, "/v2/models/other/infer" if choice > 0.95 else ""

    async def attack(url: str, counts: dict[int, int]) -> None:
        client, left = await Client.open(url), arguments.requests // 8
        while left > 0:
            many = draw.choice((1, 1, 1, 20))  # at once
            left -= many
            for _ in range(many):
                client.send(*wrong())
            try:
                for _ in range(many):
                    status, _ = await client.read()
                    counts[status] = counts.get(status, 0) + 1
            except (OSError, asyncio.IncompleteReadError):  # after some, the connection is closed
                counts[0] = counts.get(0, 0) + 1
                client = await Client.open(url)

    async def drip(url: str, until: float, counts: dict[int, int]) -> None:
        while time.monotonic() < until:
            client = await Client.open(url)
            client.send(b"[", right, length=1000)
            reading = asyncio.create_task(client.read())
            while not reading.done() and time.monotonic() < until:
                client.drip()
                await asyncio.sleep(0.1)
            if not reading.cancel():
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    counts[reading.result()[0]] = counts.get(reading.result()[0], 0) + 1
            client.leave()

    async def both(url: str, attacks: bool) -> tuple[list[float], dict[int, int]]:
        times: list[tuple[float, float]] = []
        failed: list[str] = []
        counts: dict[int, int] = {}
        until = time.monotonic() + arguments.seconds
        tasks = [keep_asking(url, until, times, failed, 0.01, head=right) for _ in range(8)]
        await asyncio.gather(
            *tasks,
            *(attack(url, counts) for _ in range(8 * attacks)),
            *(drip(url, until, counts) for _ in range(8 * attacks)),
        )
        print(f"{len(times)} answers beside them, {len(failed)} failed")
        return [took for _, took in times], counts

    options = ("--backend", "process", "--deadline", "5", "--token-file", str(token))
    with served(folder, "trained", *options) as url:
        pid = json.loads(dnictl(folder, "serve", "--status", "--json").stdout)["pid"]

        def memory_mib() -> int:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) // 256

        before, _ = asyncio.run(both(url, False))
        first = memory_mib()
        during, counts = asyncio.run(both(url, True))
        print(f"statuses {dict(sorted(counts.items()))}, memory {first} -> {memory_mib()} MiB")
        for title, took in (("before", before), ("during", during)):
            print(
                f"{title}: p50 {percentile(took, 0.5):.1f} ms, p99 {percentile(took, 0.99):.1f} ms"
            )
        with urlopen(f"{url}/v2/health/ready", timeout=10) as reply:
            print(f"ready: {reply.status}")


def poison(arguments: argparse.Namespace) -> None:
    """Have one request in a hundred fail in a module, beside 8 clients whose requests do not."""
    folder = arguments.folder / "poison"
    folder.mkdir()
    dnictl(folder, "init", "--template", "lm")
    options = ("--set", "epochs=1", "--set", "data.train_limit=64", "--set", "data.eval_limit=64")
    dnictl(folder, "up", "--backend", "process", "--name", "trained", *options)

    def tokens(last: int) -> bytes:
        tensor = {
            "name": "input",
            "datatype": "INT64",
            "shape": [1, 64],
            "data": [*range(63), last],
        }
        return json.dumps({"inputs": [tensor]}).encode()

    async def phase(url: str, title: str, poisoned: bool) -> None:
        times: list[tuple[float, float]] = []
        failed: list[str] = []
        statuses: list[int] = []
        until = time.monotonic() + arguments.seconds

        async def attack() -> None:
            client = await Client.open(url)
            while poisoned and time.monotonic() < until:
                if len(times) >= 100 * (len(statuses) + 1):
                    statuses.append((await client.ask(tokens(10**6)))[0])
                await asyncio.sleep(0.001)

        stay = (keep_asking(url, until, times, failed, 0.001, tokens(9)) for _ in range(8))
        await asyncio.gather(attack(), *stay)
        took = [one for _, one in times]
        print(
            f"{title}: {len(took)} answers, {len(failed)} failed {failed[:2]}, p50 "
            f"{percentile(took, 0.5):.1f} ms, p99 {percentile(took, 0.99):.1f} ms; poisoned: "
            f"{len(statuses)}, statuses {sorted(set(statuses))}", flush=True,
        )  # fmt: skip

    with served(folder, "trained", "--backend", "process", "--name", NAME) as url:
        for _ in range(arguments.rounds):
            asyncio.run(phase(url, "without", False))
            asyncio.run(phase(url, "with one in a hundred", True))


def health(arguments: argparse.Namespace) -> None:
    """Stop a process of a service for a while, and ask after its health."""
    folder = arguments.folder / "health"
    train(folder, 64, 1)

    def seconds_until(url: str, status: int) -> float:
        begin = time.monotonic()
        while time.monotonic() - begin < 30:
            try:
                with urlopen(url, timeout=1) as reply:
                    said = reply.status
            except HTTPError as error:
                said = error.code
            except OSError:
                said = 0
            if said == status:
                return time.monotonic() - begin
            time.sleep(0.05)
        return float("inf")

    def look(title: str, url: str, pid: int) -> None:
        before = seconds_until(url, 200)
        os.kill(pid, signal.SIGSTOP)
        stopped = seconds_until(url, 503)
        os.kill(pid, signal.SIGCONT)
        again = seconds_until(url, 200)
        print(
            f"{title}: ready after {before:.1f} s; stopped: 503 after {stopped:.1f} s; goes on: "
            f"200 after {again:.1f} s", flush=True,
        )  # fmt: skip

    with served(folder, "trained", "--backend", "process", "--probe", "3") as url:
        state = Run.open(folder / "runs" / NAME / "1").state()
        for name, module in state.modules.items():
            look(f"module {name}", f"{url}/v2/health/ready", int(module.pid or 0))
    peers = dict(peer.split("=", 1) for peer in arguments.peers)
    with serving_others(folder, peers, BODY) as others:
        if "LitServe" in others:
            look("LitServe's worker", f"{others['LitServe']}/health", spawned(folder))


SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
case $2 in near) exec {near} sh -c "$3";; far) exec {far} sh -c "$3";; esac
"""


def cut(arguments: argparse.Namespace) -> None:
    """Take the line between the first modules and the others down for a while."""
    folder = arguments.folder / "cut"
    if arguments.line is None:  # this program once more, at the near end
        folder.mkdir()
        with open_link(build_slow_link(folder), Line(delay_ms=20)) as link:
            line = ["--line", json.dumps(link.facts)]
            command = [*link.enter(0), sys.executable, *sys.argv, *line]
            subprocess.run(command, check=True)
        return
    link = Link(json.loads(arguments.line))
    train(folder, 64, 1, f"links: {{interface: {INTERFACE}}}\n")
    dnictl(folder, "exits", "trained")
    near, far = (shlex.join(link.enter(end)) for end in (0, 1))
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(near=near, far=far))
    program.chmod(0o755)
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    draw, begin = random.Random(arguments.seed), time.monotonic()
    answers: list[tuple[float, float, int, bool, bool]] = []  # when, after, status, exit, marked

    async def ask(url: str) -> None:
        client = await Client.open(url)
        while (at := time.monotonic() - begin) < 3 * arguments.seconds:
            scale = draw.choice((1, 8))  # exits are surer of some
            row = [draw.gauss(0, scale) for _ in range(64)]
            tensor = {"name": "input", "datatype": "FP32", "shape": [1, 64], "data": row}
            status, text = await client.ask(json.dumps({"inputs": [tensor]}).encode())
            said = json.loads(text).get("parameters", {})
            took = time.monotonic() - begin - at
            answers.append((at, took, status, "exit" in said, "degraded" in said))
            await asyncio.sleep(0.02)

    async def disturb() -> None:
        for moment, state in ((1, "down"), (2, "up")):
            await asyncio.sleep(moment * arguments.seconds - (time.monotonic() - begin))
            command = [*link.enter(1), "ip", "link", "set", INTERFACE, state]
            subprocess.run(command, check=True)

    async def all_of_it(url: str) -> None:
        await asyncio.gather(disturb(), *(ask(url) for _ in range(8)))

    options = ("--backend", "process", "--hosts", "near,far")
    with served(folder, "trained", *options, "--exit-confidence", "0.5", "--exit-wait", "1") as url:
        begin = time.monotonic()
        asyncio.run(all_of_it(url))
    for number, title in enumerate(("before", "while it is cut", "after")):
        some = [one for one in answers if int(one[0] / arguments.seconds) == number]
        failed, marked = sum(one[2] != 200 for one in some), sum(one[4] for one in some)
        text = f"{title}: {len(some)} answers, {failed} failed, {marked} marked"
        for early, which in ((True, "of exits"), (False, "of the whole")):
            took = [one[1] for one in some if one[3] is early]
            text += f"; {len(took)} {which}, p50 {percentile(took, 0.5):.0f} ms, "
            text += f"p99 {percentile(took, 0.99):.0f} ms"
        print(text, flush=True)
    last = max((at + took for at, took, *_, marked in answers if marked), default=0.0)
    print(f"the last marked answer: {last - 2 * arguments.seconds:.1f} s after the cut")


def spawned(folder: Path) -> int:
    """The largest process in a folder that Python's multiprocessing has started."""
    sizes = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").samefile(folder) and b"spawn" in (
                process / "cmdline"
            ).read_bytes():
                sizes[int(process.name)] = int((process / "statm").read_text().split()[1])
    return max(sizes, key=lambda pid: sizes[pid])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = ["load", "kills", "leave", "hostile", "poison", "health", "cut"]
    parser.add_argument("what", choices=what)
    parser.add_argument("--seconds", type=float, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=64, help="of kills")
    parser.add_argument("--requests", type=int, default=10_000, help="of hostile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", nargs="*", default=[], metavar="litserve|mlserver=VENV")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seconds = {"load": 4.0, "kills": 120.0, "cut": 10.0}
    arguments.seconds = arguments.seconds or seconds.get(arguments.what, 30.0)
    arguments.folder = Path(tempfile.mkdtemp(prefix="serving-"))
    uvloop.install()
    try:
        globals()[arguments.what](arguments)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
