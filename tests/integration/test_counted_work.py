"""What one training batch costs, counted: messages, bytes, socket calls, matrix products, copies.

Nothing here reads a clock, so noise cannot fail it, and no busy machine hides a change. Three
modules are served in this thread, each by its own server over real links, and take turns in a
fixed order. Whoever adds a message, a frame, a copy or a product to the path of a batch fails
these tests. If that was meant, the figures below are to be changed, and say what it costs.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import zmq
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.step import ModuleStep
from dni_runtime.link import InputLink, OutputLink
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import DataInfo, WorkerSpec
from dni_runtime.wire import Kind, nbytes
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join
from dni_runtime.worker.server import ModuleServer
from dni_runtime.worker.stream import Item, Position
from tests.integration.served import Listed, worker_of
from tests.specs import float32, int64, linear, specs_of

SAMPLES, FEATURES, CUTS = 64, 256, 2
CHAIN = """\
name: counted
data: {batch_size: %d}
defaults: {interface: %s, optimizer: {SGD: {lr: 0.01}}}
links: {dtype: %s}
""" + linear(16, FEATURES, FEATURES, 4, between="ReLU")
INFO = DataInfo(sample=float32(16), label=int64(), classes=4)
MODULES = "abc"
WARM, COUNTED = 3, 4
"""Batches before counting begins, and those whose cost must all be the same."""

LARGE_BYTES = SAMPLES * FEATURES
"""Tensors from this size on are counted: an activation as int8. (Whether libzmq aligns smaller
buffers, such as labels, so that they need no copy, is its own affair.)"""

DEADLINE_MS = 30_000

LABELS = 8 * SAMPLES
ELEMENTS = SAMPLES * FEATURES

MESSAGES = {
    "float32": [("BATCH", (43, 4 * ELEMENTS, LABELS)), ("GRADIENT", (32, 4 * ELEMENTS))],
    "bfloat16": [("BATCH", (44, 2 * ELEMENTS, LABELS)), ("GRADIENT", (33, 2 * ELEMENTS))],
    "int8": [("BATCH", (58, ELEMENTS, 4, LABELS)), ("GRADIENT", (47, ELEMENTS, 4))],
    "int8-channel": [
        ("BATCH", (61, ELEMENTS, 4 * FEATURES, LABELS)),
        ("GRADIENT", (50, ELEMENTS, 4 * FEATURES)),
    ],
}
"""What travels at a cut per batch, down and up: bytes of each frame, the header's first."""

QUANTIZING = {"mul": 1, "round_": 1, "_to_copy": 2, "mul_": 1}
WAY_ADDS = {
    "float32": {},
    "bfloat16": {"_to_copy": 2},
    "int8": QUANTIZING,
    "int8-channel": QUANTIZING,
}
"""Passes over an activation or gradient that the way through a cut adds to the computation."""

PRODUCTS = {
    "exact": {"a": 2, "b": 3, "c": 3},
    "delayed": {"a": 2, "b": 3, "c": 3},
    "synthetic": {"a": 9, "b": 10, "c": 3},
    "mixed": {"a": 12, "b": 13, "c": 3},
}
"""Matrix products of each module per batch: its own layers take one forward, one for the weights'
gradient and, but for the head, one for the input's; the rest is the gradient interface's."""


class Traffic:
    """Every frame that a socket sends or receives, as the socket itself is asked for it.

    ``sent`` has, per socket, the frames of each message; ``calls`` are the calls of ``send`` and
    ``recv`` that moved a frame, ``copies`` those that told ZeroMQ to copy it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clear()
        send, recv = zmq.Socket.send, zmq.Socket.recv

        def count_send(socket: Any, data: Any, flags: int = 0, copy: bool = True) -> Any:
            result = send(socket, data, flags, copy=copy)
            self._count("send", socket, copy)
            self._open.setdefault(id(socket), []).append(bytes(data))
            if not flags & zmq.SNDMORE:
                self.sent.setdefault(id(socket), []).append(self._open.pop(id(socket)))
            return result

        def count_recv(socket: Any, flags: int = 0, copy: bool = True, **more: Any) -> Any:
            result = recv(socket, flags, copy=copy, **more)
            self._count("recv", socket, copy)
            return result

        patch.setattr(zmq.Socket, "send", count_send)
        patch.setattr(zmq.Socket, "recv", count_recv)

    def _count(self, call: str, socket: Any, copy: bool) -> None:
        if socket.type in (zmq.DEALER, zmq.ROUTER):  # pyzmq has one of its own, to free memory
            self.calls[call] += 1
            self.copies += copy

    def clear(self) -> None:
        self.sent: dict[int, list[list[bytes]]] = {}
        self.calls: Counter[str] = Counter()
        self.copies = 0
        self._open: dict[int, list[bytes]] = {}

    def messages(self, socket: Any) -> list[tuple[str, tuple[int, ...]]]:
        """Kind and bytes of each frame of what a socket has sent."""
        routed = socket.type == zmq.ROUTER  # the first frame is the peer's identity
        found = []
        for frames in self.sent.get(id(socket), []):
            header, *rest = frames[1:] if routed else frames
            kind = Kind(msgpack.unpackb(header)[1]).name
            found.append((kind, (len(header), *map(nbytes, rest))))
        return found


class Work(TorchDispatchMode):
    """Operations on large tensors.

    ``passes`` are those that write one, new or in place, by name; ``new_bytes`` is the memory taken
    for new ones. ``products`` are matrix products of any size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.passes: Counter[str] = Counter()
        self.new_bytes = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.products += name in ("mm", "addmm", "bmm", "baddbmm")
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.nbytes < LARGE_BYTES:
                continue
            fresh = _memory(leaf) not in given
            if fresh:
                self.new_bytes += leaf.untyped_storage().nbytes()
            if fresh or name.endswith("_"):
                self.passes[name] += 1
        return result


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Served:
    """The three modules, each with its server and links, served in turns."""

    def __init__(
        self, stack: ExitStack, folder: Path, workers: tuple[WorkerSpec, ...], items: Iterator[Item]
    ) -> None:
        run = RunDir(folder)
        run.create()
        self.inputs: dict[str, InputLink] = {}
        self.outputs: dict[str, OutputLink] = {}
        self.servers: dict[str, ModuleServer] = {}
        self.steps: dict[str, ModuleStep] = {}
        for worker in reversed(workers):  # an input end listens before its neighbour connects
            for edge in worker.targets:
                below = self.inputs[edge.target]
                output = stack.enter_context(closing(OutputLink(worker, run="run")))
                self.outputs[worker.module] = output
                address = below.bind(f"ipc://{folder}/{edge.target}.sock")
                output.connect(address, deadline_s=30, stop=partial(greet, below))
            if worker.sources:
                self.inputs[worker.module] = stack.enter_context(
                    closing(InputLink(worker, run="run"))
                )
            made = stack.enter_context(worker_of(run, worker))
            self.steps[worker.module] = made.step
            made.step.measure_late = False
            server = made.server(
                stream=Listed(items) if worker.head else None,
                input=Join([[self.inputs[worker.module]]]) if worker.sources else None,
                output=Fanout([[self.outputs[worker.module]]]) if worker.targets else None,
            )
            self.servers = {worker.module: server, **self.servers}

    def batch(self, gradients_of: str = "ba", watch: Callable[[], Any] = Work) -> dict[str, Any]:
        """One batch down the chain and its gradients up; what each module has done for it."""
        works = {module: watch() for module in MODULES}
        for module, server in self.servers.items():
            with works[module]:
                while not server._take():
                    arrived(self.inputs[module].socket)
        for module in gradients_of:
            output = self.outputs[module]
            before = output.counters.gradients
            with works[module]:
                while output.counters.gradients == before:
                    arrived(output.socket)
                    self.servers[module]._collect()
        return works


Batches = list[tuple[Tensor, Tensor]]
Serve = Callable[[str, str], Served]


def arrived(socket: Any) -> None:
    """Wait until the message that is on its way is there."""
    assert socket.poll(DEADLINE_MS), "the neighbour has sent nothing"


def greet(input: InputLink) -> bool:
    """Shake hands while the other end waits; it need not stop."""
    input.greet()
    return False


def stream(batches: Batches) -> Iterator[Item]:
    for x_BX, y_BY in cycle(batches):
        yield Item(1, Position(), x=x_BX, y_BY=y_BY)


def specs(interface: str, dtype: str, samples: int = SAMPLES) -> tuple[WorkerSpec, ...]:
    return specs_of(CHAIN % (samples, interface, dtype), INFO)


@pytest.fixture(scope="module")
def batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(10, SAMPLES, 16, generator=generator)
    return [(x_BX.clone(), x_BX[:, :4].argmax(1)) for x_BX in inputs]


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(monkeypatch)


@pytest.fixture
def serve(tmp_path: Path, batches: Batches) -> Iterator[Serve]:
    """Serve a chain by interface and type on the wire, and warm it up."""
    with ExitStack() as stack:

        def start(interface: str, dtype: str) -> Served:
            served = Served(stack, tmp_path, specs(interface, dtype), stream(batches))
            for _ in range(WARM):
                served.batch()
            return served

        yield start


@pytest.mark.parametrize("interface", ["mixed", "synthetic"])
@pytest.mark.parametrize("dtype", MESSAGES)
def test_messages_and_bytes_of_a_batch(
    traffic: Traffic, serve: Serve, dtype: str, interface: str
) -> None:
    served = serve(interface, dtype)
    for _ in range(COUNTED):
        traffic.clear()
        served.batch()
        for module in "ab":
            down = traffic.messages(served.outputs[module].socket)
            up = traffic.messages(served.inputs["bc"["ab".index(module)]].socket)
            batch, gradient = MESSAGES[dtype]
            # True gradients of others than the tail come after their acknowledgement.
            late = interface == "synthetic" and module == "a"
            answers = [("ACK", (16,)), gradient] if late else [gradient]
            assert [*down, *up] == [batch, *answers], f"below module {module}"


@pytest.mark.parametrize("interface", ["local", "none"])
def test_without_gradients_an_acknowledgement_goes_up(
    traffic: Traffic, tmp_path: Path, batches: Batches, interface: str
) -> None:
    with ExitStack() as stack:
        served = Served(stack, tmp_path, specs(interface, "float32"), stream(batches))
        traffic.clear()
        served.batch(gradients_of="")
        for module in "bc":
            assert traffic.messages(served.inputs[module].socket) == [("ACK", (16,))]


@pytest.mark.parametrize(("interface", "acks"), [("mixed", 0), ("synthetic", CUTS - 1)])
@pytest.mark.parametrize("dtype", MESSAGES)
def test_socket_calls_of_a_batch(
    traffic: Traffic, serve: Serve, dtype: str, interface: str, acks: int
) -> None:
    """One call per frame on either side, and one for the identity that a ROUTER adds each way."""
    served = serve(interface, dtype)
    frames = sum(len(sizes) for _, sizes in MESSAGES[dtype])
    for _ in range(COUNTED):
        traffic.clear()
        served.batch()
        calls = CUTS * (frames + 1)
        assert traffic.calls == {"send": calls + 2 * acks, "recv": calls + acks}
        assert traffic.copies == 0


@pytest.mark.parametrize("interface", ["mixed", "delayed"])
@pytest.mark.parametrize("dtype", MESSAGES)
def test_tensor_work_that_the_way_adds(
    serve: Serve, batches: Batches, interface: str, dtype: str
) -> None:
    """Beside the same chain whose modules hand their tensors to each other directly."""
    local = LocalChain(specs(interface, "float32"))
    for step in local.steps:
        step.measure_late = False
    for x_BX, y_BY in batches[:WARM]:
        local.train_batch(x_BX, y_BY)
    with Work() as alone:
        local.train_batch(*batches[WARM])
    served = serve(interface, dtype)
    for _ in range(COUNTED):
        works = served.batch().values()
        passes = sum((work.passes for work in works), Counter[str]())
        assert not alone.passes - passes
        added = {name: 2 * CUTS * count for name, count in WAY_ADDS[dtype].items()}
        assert passes - alone.passes == added
        if dtype == "float32":
            assert sum(work.new_bytes for work in works) == alone.new_bytes


def test_python_itself_copies_no_tensor(tmp_path: Path) -> None:
    """Neither torch's memory nor libzmq's is Python's: that of ``bytes(buffer)`` would be."""
    samples = 16 * SAMPLES  # activations of 1 MiB: msgpack takes 256 KiB for each header
    batches = [(torch.zeros(samples, 16), torch.zeros(samples, dtype=torch.int64))]
    with ExitStack() as stack:
        served = Served(stack, tmp_path, specs("mixed", "float32", samples), stream(batches))
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for _ in range(WARM + COUNTED):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            served.batch(watch=nullcontext)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 1 << 19


@pytest.mark.parametrize("interface", PRODUCTS)
def test_matrix_products_of_a_batch(serve: Serve, interface: str) -> None:
    served = serve(interface, "float32")
    for _ in range(COUNTED):
        works = served.batch()
        assert {module: work.products for module, work in works.items()} == PRODUCTS[interface]


@pytest.mark.parametrize("interface", ["mixed", "delayed"])
def test_nothing_is_left_of_a_batch(serve: Serve, interface: str) -> None:
    """The objects that Python keeps do not become more."""
    served = serve(interface, "float32")

    def kept() -> Counter[str]:
        gc.collect()
        return Counter(type(each).__name__ for each in gc.get_objects())

    for count in (20, 40):
        before = kept()
        for _ in range(count):
            served.batch()
    end_s = time.monotonic() + DEADLINE_MS / 1000
    while (more := kept() - before - Counter({"Counter": 1})) and time.monotonic() < end_s:
        time.sleep(0.01)  # a thread of pyzmq's lets go of what has been sent
    assert not more
