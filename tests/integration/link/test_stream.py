"""Two links over real sockets: what travels, what is lost, and what comes again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from dni_runtime.errors import HandshakeError, StoppedError, UnavailableError, WorkerError
from dni_runtime.link import Batch, Drain, Gradient, Marker, StreamRequest, sockets
from dni_runtime.link.sender import Sender
from dni_runtime.link.tensors import dequantize, quantize
from dni_runtime.spec import LinksSpec
from dni_runtime.wire import Mark, Mode
from tests.integration.link.relay import Relay
from tests.specs import float32, int64


def events(links: Any, output: Any, count: int) -> list[Any]:
    """So many events from downstream."""
    got: list[Any] = []
    links.until(lambda: bool(got.extend(output.receive()) or len(got) >= count), "events")
    assert len(got) == count
    return got


def send(links: Any, output: Any, *ids: int) -> None:
    for id in ids:
        output.send_batch(*links.batch(id))


def test_the_stream_comes_as_it_was_sent(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)
    h, y = torch.randn(8, 4), torch.arange(8)
    output.send_batch(Batch(1, 3, Mode.TRAIN, (), y), h)
    output.send_batch(Batch(2, 3, Mode.EVAL, (), y[:5]), h[:5])
    output.send_mark(3, 3, Mark.EPOCH | Mark.CHECKPOINT)
    first, second, third = links.collect(input, 3)
    assert isinstance(first, Batch)
    assert (first.id, first.epoch, first.mode) == (1, 3, Mode.TRAIN)
    assert torch.equal(first.xs[0], h)
    assert torch.equal(first.y, y)
    assert (second.id, second.mode, len(second.xs[0])) == (2, Mode.EVAL, 5)
    assert third == Marker(3, 3, Mark.EPOCH | Mark.CHECKPOINT)
    assert input.receive() is None


def test_what_goes_up(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)
    send(links, output, 1, 2)
    links.collect(input, 2)
    g = torch.randn(2, 4)
    input.send_gradient(1, g, 1)
    input.send_drained(3)
    input.request("checkpoint")
    gradient, drained, request = events(links, output, 3)
    assert isinstance(gradient, Gradient)
    assert gradient.id == 1
    assert torch.equal(gradient.g, g)
    assert drained == Drain(3)
    assert request == StreamRequest("checkpoint")
    assert output.in_flight == 1
    input.ack(2)
    assert output.flush(links.DEADLINE_S)
    assert output.in_flight == 0


def test_large_tensors_of_narrow_type(links: Any, address: str) -> None:
    output, input, _ = links.pair(
        address,
        links=LinksSpec(dtype="bfloat16", gradient_dtype="float16"),
        input=float32(512, 64),
        output=float32(512, 64),
    )
    h = torch.randn(8, 512, 64)
    output.send_batch(Batch(1, 0, Mode.TRAIN, (), torch.arange(8)), h)
    (batch,) = links.collect(input, 1)
    assert batch.xs[0].dtype is torch.float32
    assert torch.equal(batch.xs[0], h.to(torch.bfloat16).float())
    input.send_gradient(1, h, 1)
    (gradient,) = events(links, output, 1)
    assert torch.equal(gradient.g, h.to(torch.float16).float())


@pytest.mark.parametrize(
    ("down", "up"), [("int8", "int8"), ("int8-channel", "float32"), ("float32", "int8-channel")]
)
def test_quantized_tensors(links: Any, address: str, down: Any, up: Any) -> None:
    tensor = float32(8, 16, 16)
    spec = LinksSpec(dtype=down, gradient_dtype=up)
    output, input, _ = links.pair(address, links=spec, input=tensor, output=tensor)
    h = torch.randn(8, 8, 16, 16)
    given = h.clone()
    for id, mode in ((1, Mode.TRAIN), (2, Mode.EVAL)):
        output.send_batch(Batch(id, 0, mode, (), torch.arange(8)), h)
        (batch,) = links.collect(input, 1)
        assert torch.equal(batch.xs[0], rounded(h, down))
        assert torch.equal(batch.y, torch.arange(8))
    input.send_gradient(1, h, 1)
    (gradient,) = events(links, output, 1)
    assert torch.equal(gradient.g, rounded(h, up))
    assert torch.equal(h, given)
    assert not output.counters.refused
    assert not input.counters.refused


def rounded(x_BCHW: torch.Tensor, dtype: str) -> torch.Tensor:
    """What arrives of a tensor that travels as ``dtype``."""
    if dtype == "float32":
        return x_BCHW
    return dequantize(*quantize(x_BCHW, () if dtype == "int8" else (8, 1, 1)))


def test_the_window_bounds_what_is_in_flight(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)  # window 4
    send(links, output, 1, 2, 3)
    output.send_mark(4, 0, Mark.EPOCH)
    assert not output.room
    assert output.in_flight == 4
    with pytest.raises(ValueError, match="id 5 does not fit"):
        send(links, output, 5)
    links.collect(input, 3)
    output.receive()
    assert not output.room  # received is not processed
    input.ack(2)
    links.until(lambda: not output.receive() and output.room, "room")
    assert output.in_flight == 2


def test_without_wanted_gradients_only_acknowledgements_travel(links: Any, address: str) -> None:
    output, input = links.output(gradients_in=0), links.input(gradients_out=0)
    links.shake(output, input, input.bind(address))
    send(links, output, 1)
    links.collect(input, 1)
    input.send_gradient(1, torch.zeros(2, 4), 1)
    assert output.flush(links.DEADLINE_S)
    assert output.receive() == []


def test_the_poller_wakes_both_ends(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)
    poller = zmq.Poller()
    poller.register(input.socket, zmq.POLLIN)
    assert not poller.poll(10)
    send(links, output, 1)
    assert poller.poll(links.DEADLINE_S * 1000)
    links.collect(input, 1)
    poller = zmq.Poller()
    poller.register(output.socket, zmq.POLLIN)
    output.receive()
    input.ack(1)
    assert poller.poll(links.DEADLINE_S * 1000)


@pytest.mark.parametrize(("field", "stem"), [("label", {"label": int64(3)}), ("run", {"run": "x"})])
def test_ends_that_do_not_fit_are_told_why(
    links: Any, tmp_path: Path, field: str, stem: dict[str, Any]
) -> None:
    """All that they have to agree on: tests/unit/link/test_protocol.py."""
    input, output = links.input(), links.output(**stem)
    actual = input.bind(f"ipc://{tmp_path}/tail.sock")
    done = threading.Event()
    thread = threading.Thread(target=refuse, args=(input, done))
    thread.start()
    try:
        with pytest.raises(HandshakeError, match=f"do not fit together: {field} is "):
            output.connect(actual, deadline_s=links.DEADLINE_S)
    finally:
        done.set()
        thread.join()
    assert input.counters.refused == {"handshake": 1}
    assert not input.connected


def refuse(input: Any, done: threading.Event) -> None:
    with pytest.raises(StoppedError):
        input.wait_for_peer(60, stop=done.is_set)


def test_nobody_listens(links: Any, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"'tail' did not answer at ipc:.*no connection"):
        links.output().connect(f"ipc://{tmp_path}/nobody.sock", deadline_s=0.3)


def test_somebody_listens_but_does_not_answer(links: Any, address: str, raw: Any) -> None:
    listener = raw(zmq.ROUTER)
    listener.bind(address)
    output = links.output()
    actual = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(UnavailableError, match=r"within 0\.3 s"):
        output.connect(actual, deadline_s=0.3)


def test_nobody_connects(links: Any, address: str) -> None:
    input = links.input()
    input.bind(address)
    with pytest.raises(UnavailableError, match=r"'stem' did not connect within 0\.3 s") as caught:
        input.wait_for_peer(0.3)
    assert "refused" not in caught.value.message


def test_waiting_can_be_interrupted(links: Any, address: str, tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(StoppedError, match="waiting for module 'tail'"):
        links.output().connect(f"ipc://{tmp_path}/nobody.sock", deadline_s=60, stop=lambda: True)
    input = links.input()
    input.bind(address)
    with pytest.raises(StoppedError, match="waiting for module 'stem'"):
        input.wait_for_peer(60, stop=lambda: True)
    assert time.monotonic() - began_s < 5


def test_flush_has_a_deadline_and_keeps_events(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)
    send(links, output, 1, 2)
    links.collect(input, 1)
    input.send_gradient(1, torch.ones(2, 4), 1)
    assert not output.flush(0.3)
    (gradient,) = output.receive()
    assert gradient.id == 1


def test_a_restarted_receiver_gets_what_is_not_acknowledged(links: Any, address: str) -> None:
    output, input, actual = links.pair(address)
    send(links, output, 1, 2, 3)
    assert [item.id for item in links.collect(input, 3)] == [1, 2, 3]
    input.ack(1)
    links.until(lambda: not output.receive() and output.in_flight == 2, "the acknowledgement")
    input.close()
    send(links, output, 4)  # into the void
    again = links.input(received=1)
    links.until(lambda: bool(again.bind(actual)), "the address")
    got = links.collect(again, 3, output=output)
    assert [(item.id, item.xs[0][0, 0]) for item in got] == [(2, 2), (3, 3), (4, 4)]
    again.ack(4)
    assert output.flush(links.DEADLINE_S)
    assert output.counters.resent >= 2
    assert again.counters.duplicates == again.counters.gaps == 0


def test_a_receiver_that_restarts_elsewhere(links: Any) -> None:
    output, input, _ = links.pair("tcp://127.0.0.1:*")
    send(links, output, 1)
    input.close()
    again = links.input()
    links.shake(output, again, again.bind("tcp://127.0.0.1:*"))
    assert links.collect(again, 1)[0].id == 1


def test_the_last_acknowledgement_outlives_the_connection(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)
    output.send_mark(1, 0, Mark.END)
    links.collect(input, 1)
    input.send_drained(1)
    input.ack(1)

    def leave() -> None:
        assert input.finish(links.DEADLINE_S)
        input.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    links.until(lambda: bool(output.socket.poll(0)), "what was sent has arrived, and is not read")
    assert output.finish(links.DEADLINE_S)
    leaving.join()
    assert output.receive() == [Drain(1)]


def test_nobody_waits_for_a_neighbour_that_is_gone(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)
    output.close()
    assert not input.finish(0.3)


def test_gradients_for_nobody_are_dropped_and_counted(links: Any, address: str) -> None:
    output, input, _ = links.pair(address)
    send(links, output, 1)
    links.collect(input, 1)
    output.close()

    def dropped() -> bool:
        input.send_gradient(1, torch.zeros(2, 4), 1)
        return bool(input.counters.gradients_dropped)

    links.until(dropped, "a dropped gradient")


def test_gradients_for_a_slow_peer_are_dropped_and_counted(links: Any, address: str) -> None:
    big = float32(1 << 16)
    output, input, _ = links.pair(address, input=big, output=big)
    output.send_batch(
        Batch(1, 0, Mode.TRAIN, (), torch.zeros(8, dtype=torch.int64)), torch.zeros(8, 1 << 16)
    )
    links.collect(input, 1)
    g = torch.zeros(8, 1 << 16)
    began_s = time.monotonic()
    for _ in range(100):  # 200 MB that nobody reads
        input.send_gradient(1, g, 1)
    assert input.counters.gradients_dropped > 0
    assert time.monotonic() - began_s < 5
    links.until(lambda: bool(output.receive()), "a gradient")
    input.receive()
    links.until(lambda: not output.receive() and output.in_flight == 0, "the acknowledgement")


@pytest.mark.parametrize("use", [lambda s: sockets.receive(s, 1), lambda s: sockets.wait(s, 0.1)])
def test_a_closed_socket_is_an_error_of_ours(use: Any) -> None:
    context = sockets.open_context()
    socket = sockets.output_socket(context, window=1, frame_limit=1)
    sockets.close(socket, context)
    with pytest.raises(WorkerError, match="failed: "):
        use(socket)


def test_connections_that_break_again_and_again_lose_nothing(links: Any) -> None:
    input, output = links.input(), links.output()
    with Relay(input.bind("tcp://127.0.0.1:*")) as relay:
        links.shake(output, input, relay.address)
        got: list[int] = []
        sent = 0

        def drive() -> bool:
            nonlocal sent
            output.receive()
            while output.room and sent < 300:
                sent += 1
                send(links, output, sent)
            item = input.receive()
            if item is not None:
                assert item.xs[0][0, 0] == item.id
                got.append(item.id)
                input.send_gradient(item.id, item.xs[0], item.id)
                if len(got) == 60 * (input.counters.handshakes) and len(got) < 300:
                    relay.cut()
            return sent == 300 and output.in_flight == 0

        links.until(drive, "the whole stream")
        assert got == list(range(1, 301))
        assert output.counters.handshakes == input.counters.handshakes == 5
        assert input.counters.gaps == 0


def test_a_waiting_sender_is_woken_by_a_reconnection(links: Any) -> None:
    """A full window sends nothing: the new connection itself has to wake both ends up."""
    input, output = links.input(), links.output()
    with Relay(input.bind("tcp://127.0.0.1:*")) as relay:
        links.shake(output, input, relay.address)
        send(links, output, 1, 2, 3, 4)
        links.collect(input, 4)
        output.receive()
        poller = zmq.Poller()
        poller.register(output.socket, zmq.POLLIN)
        poller.register(input.socket, zmq.POLLIN)
        assert not poller.poll(50)
        relay.cut()
        while output.counters.handshakes < 2:
            assert poller.poll(links.DEADLINE_S * 1000), "nothing woke the ends up"
            output.receive()
            assert input.receive() is None
        input.ack(4)
        assert output.flush(links.DEADLINE_S)


CHILD = """
import sys
from dni_runtime.link import InputLink
from dni_runtime.spec import WorkerSpec
link = InputLink(WorkerSpec.from_json(sys.argv[1]), run="run")
link.bind(sys.argv[2])
print("ready", flush=True)
link.wait_for_peer(30)
while True:
    item = link.receive()
    if item is not None and item.id <= 2:
        link.ack(item.id)
"""


def test_a_killed_receiver_leaves_an_address_that_can_be_used_again(
    links: Any, make_spec: Any, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/tail.sock"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, make_spec("tail").to_json(), address], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        output = links.output()
        output.connect(address, deadline_s=links.DEADLINE_S)
        send(links, output, 1, 2, 3, 4)
        links.until(lambda: not output.receive() and output.in_flight == 2, "two acks")
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert os.path.exists(f"{tmp_path}/tail.sock")
    input = links.input(received=2)
    input.bind(address)
    assert [item.id for item in links.collect(input, 2, output=output)] == [3, 4]


def test_a_stall_over_two_lost_connections(links: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input end reads what both have brought: the older one, which is dead, brought more."""
    monkeypatch.setattr("dni_runtime.link.output._GREET_S", 0.1)
    greeted, real = [], Sender.greeted

    def note(sender: Sender) -> None:
        greeted.append(sender)
        real(sender)

    monkeypatch.setattr(Sender, "greeted", note)
    input, output = links.input(), links.output()
    with Relay(input.bind("tcp://127.0.0.1:*")) as relay:
        links.shake(output, input, relay.address)
        seen = 0

        def greets(connection: int, hellos: int) -> bool:  # only the output end works
            nonlocal seen
            if relay.connections < connection:
                greeted.clear()
            output.receive()
            seen += output.lost
            return len(greeted) >= hellos

        for connection, hellos in ((2, 3), (3, 2)):
            relay.cut()
            links.until(partial(greets, connection, hellos), f"{hellos} HELLOs")
        send(links, output, 1, 2)
        items = links.collect(input, 2, output=output)
        assert [item.id for item in items] == [1, 2]
        assert seen
        assert input.counters.refused["handshake"] > 0


def test_nothing_ends_a_connection_while_a_large_frame_is_under_way() -> None:
    """A frame may take longer than any heartbeat's timeout (zeromq/libzmq#2709)."""
    context = sockets.open_context()
    for make in (sockets.input_socket, sockets.output_socket):
        socket = make(context, window=4, frame_limit=1 << 20)
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        socket.close()
    context.term()
