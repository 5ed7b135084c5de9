"""Clients of a service: some that keep their connection, and ``wrk``."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path

NAME = "digits"
BODY = json.dumps(
    {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}]}
).encode()


class Client:
    """A connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> Client:
        """Connect."""
        port = int(url.rpartition(":")[2])
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, body: bytes, head: str = "", path: str = "") -> tuple[int, bytes]:
        """Return the status of the answer, and its body."""
        self.send(body, head, path)
        return await self.read()

    def send(self, body: bytes, head: str = "", path: str = "", length: int | None = None) -> None:
        """Send a request, or its beginning if its length is said to be another."""
        path = path or f"/v2/models/{NAME}/infer"
        lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        lines += f"content-length: {len(body) if length is None else length}\r\n{head}\r\n"
        self._writer.write(lines.encode("latin-1") + body)

    async def read(self) -> tuple[int, bytes]:
        """Return the status of the next answer, and its body."""
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer.lower())
        text = await self._reader.readexactly(int(length[1]) if length else 0)
        return int(answer.split()[1]), text

    def drip(self) -> None:
        """Send one more byte."""
        self._writer.write(b"[")

    def leave(self) -> None:
        """Cut the connection."""
        self._writer.transport.abort()


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return 1000 * sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


async def keep_asking(
    url: str,
    until: float,
    times: list[tuple[float, float]],
    failed: list[str],
    pause_s: float = 0,
    body: bytes = BODY,
    head: str = "",
) -> None:
    """Ask again and again, by one connection."""
    client = await Client.open(url)
    while time.monotonic() < until:
        begin = time.monotonic()
        try:
            status, text = await client.ask(body, head)
        except (OSError, asyncio.IncompleteReadError) as error:
            failed.append(type(error).__name__)
            client = await Client.open(url)
            continue
        times.append((begin, time.monotonic() - begin))
        if status != 200:
            failed.append(f"{status}: {text[:80]!r}")
        await asyncio.sleep(pause_s)
    client.leave()


def wrk(url: str, clients: int, seconds: float, script: Path) -> tuple[float, float, float, int]:
    """Return requests per second, p50 and p99 in milliseconds, and how many have failed."""
    path = f"{url}/v2/models/{NAME}/infer"
    options = f"-t1 -c{clients} -d{seconds:g}s --latency -s".split()
    command = ["wrk", *options, str(script), path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert rate is not None, text
    scale = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    found = [re.search(rf"{share}%\s+([\d.]+)(us|ms|s)", text) for share in (50, 99)]
    p50, p99 = (float(one[1]) * scale[one[2]] if one else 0.0 for one in found)
    failed = 0
    for pattern in (r"Non-2xx or 3xx responses: (\d+)", r"Socket errors: .*timeout (\d+)"):
        match = re.search(pattern, text)
        failed += int(match[1]) if match else 0
    return float(rate[1]), p50, p99, failed
