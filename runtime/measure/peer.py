"""A measuring process at one end of a link, on this or another host, controlled by commands.

``Peer`` is the controlling side; this module as a program measures. They exchange JSON lines over
the program's stdin and stdout, which ``srun`` forwards to other hosts. So are public keys; secret
keys stay where they were made.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

import torch

from dni_runtime.errors import DniError, UnavailableError, WorkerError
from dni_runtime.measure.ends import Job, Sink, Source, receive, send
from dni_runtime.run.keys import KeyPair, KnownKeys
from dni_runtime.spec import LinksSpec
from dni_runtime.worker.memory import keep_freed_memory

PROGRAM = (sys.executable, "-P", "-m", "dni_runtime.measure.peer")

_START_S = 120.0
"""Time to read Python and torch from a shared file system, and for Slurm to start a step."""
_LIMIT_S = 600.0


class Peer:
    """A measuring process as a context manager; the first command waits for its start."""

    def __init__(
        self, argv: Sequence[str] = PROGRAM, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self._argv = argv
        self._environ = environ
        self._key: str | None = None

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environ,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._out.close()
        self._log.close()

    @property
    def key(self) -> bytes:
        if self._key is None:
            self._key = str(self.answer(_START_S)["public_key"])
        return self._key.encode()

    def listen(self, job: Job, source: bytes) -> str:
        """Let it receive batches only from the owner of the key ``source``; return its address."""
        self._tell(job, source)
        return str(self.answer()["address"])

    def send(self, job: Job, sink: bytes, address: str, seconds: float) -> None:
        """Let it send a job's batches to an address; its owner has the key ``sink``."""
        self._tell(job, sink, address=address, seconds=seconds)

    def answer(self, within_s: float = _LIMIT_S) -> dict[str, Any]:
        """Return its next answer; raises ``DniError`` if it fails, or none comes in time."""
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            self._process.kill()  # later answers could not be matched to commands
            raise UnavailableError(
                f"no answer from the measuring process within {within_s:g} s{self._said()}"
            ) from None
        if not line:
            self._lines.put("")
            self._process.wait()
            raise WorkerError(f"the measuring process failed{self._said()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UnavailableError(answer["error"])
        return answer

    def _tell(self, job: Job, key: bytes, **more: object) -> None:
        _ = self.key  # the first line is its own
        known = asdict(job) | {"links": job.links.model_dump(mode="json")}
        with contextlib.suppress(BrokenPipeError):  # the answer will not come either
            self._in.write(json.dumps({"job": known, "key": key.decode(), **more}) + "\n")
            self._in.flush()

    def _read(self) -> None:
        for line in self._out:
            with contextlib.suppress(ValueError):  # a greeting of the host's
                if isinstance(json.loads(line), dict):
                    self._lines.put(line)
        self._lines.put("")

    def _said(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f": {lines[-1]}" if lines else ""


def _serve() -> None:
    """Read jobs from stdin, and write measurements to stdout."""
    keep_freed_memory()  # as a worker does
    torch.set_num_threads(1)
    pair = KeyPair.new()
    _say({"public_key": pair.public.decode()})
    with tempfile.TemporaryDirectory(prefix="dni-") as folder:
        for line in sys.stdin:
            order = json.loads(line)
            job = Job(**order["job"] | {"links": LinksSpec(**order["job"]["links"])})
            try:
                if "address" in order:
                    _say(_send(job, pair, order))
                else:
                    _receive(job, KnownKeys(pair, {"source": order["key"].encode()}), Path(folder))
            except DniError as error:
                _say({"error": error.message})


def _send(job: Job, pair: KeyPair, order: dict[str, Any]) -> dict[str, float]:
    keys = KnownKeys(pair, {"sink": order["key"].encode()})
    with contextlib.closing(Source(job, order["address"], keys)) as source:
        return send(source, job, order["seconds"])


def _receive(job: Job, keys: KnownKeys, folder: Path) -> None:
    with contextlib.closing(Sink(job, folder, keys)) as sink:
        _say({"address": sink.address})
        _say({"mb_per_s": receive(sink, job)})


def _say(what: Mapping[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    _serve()
