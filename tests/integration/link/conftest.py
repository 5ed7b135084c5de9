"""Pairs of links over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from dni_runtime.link import Batch, InputLink, Marker, OutputLink
from dni_runtime.run.keys import KeyPair, KnownKeys
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Mode

MakeSpec = Callable[..., WorkerSpec]
DEADLINE_S = 10.0


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address to bind, of either transport."""
    return f"ipc://{tmp_path}/tail.sock" if request.param == "ipc" else "tcp://127.0.0.1:*"


def two_rings() -> tuple[KnownKeys, KnownKeys]:
    """Keys of the two modules, each with the other one's public key."""
    stem, tail = KeyPair.new(), KeyPair.new()
    return KnownKeys(stem, {"tail": tail.public}), KnownKeys(tail, {"stem": stem.public})


class Links:
    """Makes links, closes them all at the end, and helps to drive them."""

    DEADLINE_S = DEADLINE_S

    def __init__(self, make_spec: MakeSpec, stack: ExitStack) -> None:
        self._make_spec = make_spec
        self._stack = stack

    def output(
        self, *, run: str = "run", next_id: int = 1, keys: Any = None, **fields: Any
    ) -> OutputLink:
        spec = self._make_spec("stem", **fields)
        return self._stack.enter_context(
            closing(OutputLink(spec, run=run, next_id=next_id, keys=keys))
        )

    def input(
        self,
        *,
        run: str = "run",
        received: int = 0,
        restarted: bool = False,
        keys: Any = None,
        **fields: Any,
    ) -> InputLink:
        spec = self._make_spec("tail", **fields)
        return self._stack.enter_context(
            closing(InputLink(spec, run=run, received=received, restarted=restarted, keys=keys))
        )

    def pair(
        self, address: str, *, keys: tuple[Any, Any] = (None, None), **fields: Any
    ) -> tuple[OutputLink, InputLink, str]:
        """Two links that have shaken hands, and where."""
        input, output = self.input(keys=keys[1], **fields), self.output(keys=keys[0], **fields)
        actual = input.bind(address)
        self.shake(output, input, actual)
        return output, input, actual

    @staticmethod
    def shake(output: OutputLink, input: InputLink, address: str) -> None:
        """Shake hands; both ends wait, so one of them does it on a thread."""
        failures: list[Exception] = []

        def wait() -> None:
            try:
                input.wait_for_peer(DEADLINE_S)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            output.connect(address, deadline_s=DEADLINE_S)
        finally:
            thread.join()
        assert not failures, failures

    @staticmethod
    def until(condition: Callable[[], bool], what: str) -> None:
        """Call ``condition`` until it holds, or fail."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s, f"not in {DEADLINE_S:g} s: {what}"
            time.sleep(0.001)

    @staticmethod
    def collect(
        input: InputLink, count: int, *, output: OutputLink | None = None
    ) -> list[Batch | Marker]:
        """The next messages of the stream; an output end does meanwhile what it has to."""
        got: list[Batch | Marker] = []

        def done() -> bool:
            if output is not None:
                output.receive()
            item = input.receive()
            if item is not None:
                got.append(item)
            return len(got) == count

        Links.until(done, f"{count} messages")
        return got

    @staticmethod
    def tensors(id: int, samples: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch that tells its id."""
        return torch.full((samples, 4), float(id)), torch.full((samples,), id % 4)

    @staticmethod
    def batch(id: int) -> tuple[Batch, torch.Tensor]:
        """The same, as it is sent."""
        h, y = Links.tensors(id)
        return Batch(id, 0, Mode.TRAIN, (), y), h


class Stream:
    """Two links over which batches flow, whoever else connects."""

    def __init__(self, output: OutputLink, input: InputLink, address: str) -> None:
        self.output, self.input, self.address = output, input, address
        self._sent = self.got = 0

    def _send(self) -> None:
        self._sent += 1
        self.output.send_batch(*Links.batch(self._sent))

    def _take(self) -> None:
        self.output.receive()
        item = self.input.receive()
        if item is not None:
            assert isinstance(item, Batch)
            self.got += 1
            assert (item.id, item.xs[0][0, 0]) == (self.got, self.got)
            self.input.send_gradient(item.id, item.xs[0], item.id)

    def step(self) -> None:
        """Take what has come, and send a batch if there is room."""
        self._take()
        if self.output.room:
            self._send()

    def drive(self, count: int) -> None:
        """Let so many more batches through, with all gradients."""
        goal = self._sent + count

        def done() -> bool:
            self._take()
            while self.output.room and self._sent < goal:
                self._send()
            return self.got == goal and self.output.in_flight == 0

        Links.until(done, f"batch {goal}")

    def until_refused(self, count: int, *reasons: str) -> None:
        """Wait until so many are refused, by default for any reason; then let batches through.

        Nothing is sent meanwhile: the input end shall take what strangers send as fast as it can.
        """
        refused = self.input.counters.refused

        def done() -> bool:
            self._take()
            return sum(refused[one] for one in reasons or refused) >= count

        Links.until(done, f"{count} refused, only {refused}")
        self.drive(20)


@pytest.fixture
def links(make_spec: MakeSpec) -> Iterator[Links]:
    with ExitStack() as stack:
        yield Links(make_spec, stack)


@pytest.fixture
def raw() -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    """Make bare sockets, for peers that do not keep to the protocol."""
    context = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make(kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        made.append(socket)
        return socket

    yield make
    for socket in made:
        socket.close()
    context.term()
