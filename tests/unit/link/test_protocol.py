"""Both ends' state machines, joined by lists instead of sockets (docs/wire.md, "Handshake")."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from dni_runtime.errors import HandshakeError, WireError
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.counters import LinkCounters
from dni_runtime.link.handshake import Hello
from dni_runtime.link.receiver import JUMP_LIMIT, Receiver
from dni_runtime.link.sender import SIZES_KEPT, Sender, State
from dni_runtime.spec import LinksSpec, TensorSpec, WorkerSpec
from dni_runtime.wire import (
    ID_LIMIT,
    Body,
    Buffer,
    Kind,
    Mark,
    Message,
    Mode,
    Part,
    Rows,
    TensorEntry,
    encode,
    samples_of,
)
from tests.specs import float32, int64

MakeSpec = Callable[..., WorkerSpec]
PEER = b"\x00peer"
H = TensorEntry("h", "float32", (2, 4))
Y = TensorEntry("y", "int64", (2,))
G = TensorEntry("g", "float32", (2, 4))


def batch(id: int, **fields: Any) -> Message:
    message = Message(
        Kind.BATCH, "run", "stem", id=id, tensors=(H, Y), buffers=(bytes(32), bytes(16))
    )
    return message._replace(**fields)


def gradient(id: int, **fields: Any) -> Message:
    message = Message(
        Kind.GRADIENT, "run", "tail", id=id, ack=id, tensors=(G,), buffers=(bytes(32),)
    )
    return message._replace(**fields)


@dataclass
class Pair:
    """A sender, a receiver, and the connection between them."""

    sender: Sender
    receiver: Receiver
    identity: bytes = PEER
    got: list[int] = field(default_factory=list)

    def probe(self) -> None:
        """A connection comes up."""
        self.receiver.handle(self.identity, [b""])
        self.settle()

    def settle(self) -> None:
        """Carry messages until nothing moves."""
        while True:
            if self.sender.state is State.INVITED:
                hello = self.sender.hello()
                self.sender.greeted()
                self.down(hello)
            elif (frames := self.sender.pending()) is not None:
                self.sender.transmitted()
                self.down(frames)
            elif self.receiver.replies:
                identity, reply = self.receiver.replies.popleft()
                if identity == self.identity:
                    self.sender.handle(reply)
            else:
                return

    def down(self, frames: Sequence[Buffer]) -> None:
        message = self.receiver.handle(self.identity, frames)
        if message is not None:
            self.got.append(message.id)

    def up(self, message: Message) -> Message | None:
        return self.sender.handle(encode(message))

    def send(self, *ids: int) -> None:
        for id in ids:
            self.sender.add(batch(id), 2)
        self.settle()


def make_sender(
    spec: WorkerSpec, run: str = "run", next_id: int = 1, cut: int | None = None, attempt: int = 1
) -> Sender:
    return Sender(
        LinkContract.of(spec, spec.targets[0]),
        run=run,
        window=spec.links.window,
        next_id=next_id,
        counters=LinkCounters(),
        retain=spec.retain,
        cut=cut,
        attempt=attempt,
    )


def make_receiver(
    spec: WorkerSpec, run: str = "run", received: int = 0, restarted: bool = False
) -> Receiver:
    contract = LinkContract.of(spec, spec.sources[0])
    return Receiver(
        contract, run=run, received=received, counters=LinkCounters(), restarted=restarted
    )


@pytest.fixture
def pair(make_spec: MakeSpec) -> Pair:
    """Two ends that have shaken hands."""
    pair = Pair(make_sender(make_spec("stem")), make_receiver(make_spec("tail")))
    pair.probe()
    assert pair.sender.state is State.OPEN
    return pair


def test_an_answer_of_messages_has_a_length_of_its_own(make_spec: MakeSpec) -> None:
    """Up to the link's limit; elsewhere a gradient has as many samples as its batch."""
    given = make_spec("stem")
    assert given.batch_limit > 3
    edge = given.targets[0].model_copy(update={"messages": True})
    for spec, lengths in ((given, {2}), (given.model_copy(update={"targets": (edge,)}), {1, 2, 3})):
        pair = Pair(make_sender(spec), make_receiver(make_spec("tail")))
        pair.probe()
        pair.sender.add(batch(1), 2)
        for samples in (1, 2, 3, spec.batch_limit + 1):
            entry = TensorEntry("g", "float32", (samples, 4))
            answer = gradient(1, tensors=(entry,), buffers=(bytes(16 * samples),))
            if samples in lengths:
                assert pair.sender.handle(encode(answer)) is not None
            else:
                with pytest.raises(WireError):
                    pair.sender.handle(encode(answer))


def refused(pair: Pair, frames: Sequence[Buffer], identity: bytes | None = None) -> str:
    with pytest.raises(WireError) as caught:
        pair.receiver.handle(identity or pair.identity, frames)
    return caught.value.reason


def refused_up(pair: Pair, message: Message) -> str:
    with pytest.raises(WireError) as caught:
        pair.up(message)
    return caught.value.reason


@pytest.mark.parametrize(
    ("field", "stem", "tail"),
    [
        ("run", {}, {}),
        ("chain", {"chain": "pear"}, {}),
        ("source", {}, {"upstream": "root"}),
        ("target", {"downstream": "tip"}, {}),
        ("activation", {"output": float32(5)}, {}),
        ("activation", {}, {"input": TensorSpec(shape=(4,), dtype="bfloat16")}),
        ("label", {"label": int64(2)}, {}),
        ("activations on the wire", {"links": LinksSpec(dtype="bfloat16")}, {}),
        ("activations on the wire", {"links": LinksSpec(dtype="int8")}, {}),
        (
            "activations on the wire",
            {"links": LinksSpec(dtype="int8")},
            {"links": LinksSpec(dtype="int8-channel")},
        ),
        ("gradients on the wire", {"links": LinksSpec(gradient_dtype="float16")}, {}),
        ("gradients on the wire", {"links": LinksSpec(gradient_dtype="int8")}, {}),
        ("gradients on the wire", {"gradients_in": 0}, {}),
        ("batch limit", {"batch_limit": 16}, {}),
    ],
)
def test_handshake_names_what_differs(
    make_spec: MakeSpec, field: str, stem: dict[str, Any], tail: dict[str, Any]
) -> None:
    sender = make_sender(make_spec("stem", **stem), run="other" if field == "run" else "run")
    receiver = make_receiver(make_spec("tail", **tail))
    mine = {"run": sender.run, **sender.contract.agreement}[field]
    yours = {"run": receiver.run, **receiver.contract.agreement}[field]
    with pytest.raises(WireError) as caught:
        receiver.handle(PEER, sender.hello())
    assert caught.value.reason == "handshake"
    assert receiver.peer is None
    (_, reply) = receiver.replies.popleft()
    with pytest.raises(HandshakeError) as error:
        sender.handle(reply)
    assert (
        f"{field} is {mine!r} for 'stem' but {yours!r} for {sender.contract.target!r}"
        in error.value.message
    )
    assert error.value.hint


def test_a_hash_that_differs_is_named(pair: Pair) -> None:
    agreement = {**pair.sender.contract.agreement, "hash": "00"}
    hello = Message(Kind.HELLO, "run", "stem", body=Hello("s", 1, agreement).body())
    assert refused(pair, encode(hello), b"other") == "handshake"


def test_a_field_that_is_missing_differs(pair: Pair) -> None:
    hello = Message(Kind.HELLO, "run", "stem", body=Hello("s", 1, {"chain": "pair"}).body())
    assert refused(pair, encode(hello), b"other") == "handshake"
    assert b"nothing" in bytes(pair.receiver.replies[0][1][0])


def test_another_protocol_version_is_named(make_spec: MakeSpec) -> None:
    receiver = make_receiver(make_spec("tail"))
    with pytest.raises(WireError) as caught:
        receiver.handle(PEER, [msgpack.packb([1, "whatever it was"])])
    assert caught.value.reason == "version"
    (_, reply) = receiver.replies.popleft()
    with pytest.raises(HandshakeError, match="protocol version is '1' for 'stem' but '3' for"):
        make_sender(make_spec("stem")).handle(reply)


def test_a_neighbour_of_another_version_is_named(make_spec: MakeSpec) -> None:
    sender = make_sender(make_spec("stem"))
    with pytest.raises(HandshakeError, match="protocol version is '3' for 'stem' but '4' for"):
        sender.handle([msgpack.packb([4])])


def test_junk_of_another_version_does_not_end_an_open_link(pair: Pair) -> None:
    with pytest.raises(WireError) as caught:
        pair.sender.handle([msgpack.packb([4])])
    assert caught.value.reason == "version"


def test_a_reconnection_resends_what_is_missing(pair: Pair) -> None:
    pair.send(1, 2)
    for id in (3, 4):
        pair.sender.add(batch(id), 2)
        assert pair.sender.pending() is not None
        pair.sender.transmitted()  # lost with the connection
    pair.identity = b"\x00again"
    pair.probe()
    assert pair.got == [1, 2, 3, 4]
    assert pair.sender.counters.resent == 2
    assert pair.receiver.counters.duplicates == 0


def test_the_old_connection_is_not_accepted_any_more(pair: Pair) -> None:
    pair.identity = b"\x00again"
    pair.probe()
    assert refused(pair, encode(batch(1)), PEER) == "stranger"


def test_a_restarted_receiver_gets_what_is_unacknowledged(pair: Pair, make_spec: MakeSpec) -> None:
    pair.send(1, 2, 3)
    pair.up(Message(Kind.ACK, "run", "tail", ack=1))
    pair.receiver = make_receiver(make_spec("tail"), received=1)
    pair.got.clear()
    pair.probe()
    assert pair.got == [2, 3]
    assert pair.receiver.counters.gaps == 0


def test_a_receiver_restarted_from_an_older_cut_goes_on_after_a_gap(
    pair: Pair, make_spec: MakeSpec
) -> None:
    pair.send(1, 2, 3)
    pair.up(Message(Kind.ACK, "run", "tail", ack=2))
    pair.receiver = make_receiver(make_spec("tail"))
    pair.got.clear()
    pair.probe()
    assert pair.got == [3]
    assert pair.receiver.counters.gaps == 2


def test_a_hello_that_is_read_late_does_not_take_the_link_back(pair: Pair) -> None:
    """Two connections were lost while the input end did not read."""
    stale = pair.sender.hello()
    pair.identity = b"\x00newer"
    pair.probe()
    assert refused(pair, stale, b"\x00dead") == "handshake"
    pair.send(1, 2)
    assert pair.got == [1, 2]
    assert pair.receiver.peer == b"\x00newer"


@pytest.mark.parametrize(
    "message", [batch(1), Message(Kind.MARK, "run", "stem", id=1, mark=Mark.EPOCH)]
)
def test_a_peer_that_is_forgotten_is_invited_again(pair: Pair, message: Message) -> None:
    """Once: a stranger's flood is not answered."""
    for _ in range(3):
        refused(pair, encode(message), b"\x00other")
    (invitation,) = pair.receiver.replies
    pair.sender.handle(invitation[1])
    assert pair.sender.state is State.INVITED


def test_a_silent_neighbour_is_asked_what_it_has_got(pair: Pair) -> None:
    """Whatever was lost on an open link is sent again, and nothing else."""
    pair.send(1)
    pair.sender.add(batch(2), 2)
    pair.sender.transmitted()  # and nobody got it
    asked = pair.sender.ask()
    pair.sender.add(batch(3), 2)
    assert pair.sender.pending() is None
    pair.down(asked)
    pair.settle()
    assert pair.got == [1, 2, 3]
    assert pair.sender.counters.handshakes == pair.receiver.counters.handshakes == 1
    assert pair.sender.counters.resent == 1
    assert pair.receiver.counters.duplicates == 0


@pytest.mark.parametrize(
    ("stem", "tail", "restarted"), [(200, 300, False), (300, 200, False), (200, 300, True)]
)
def test_neighbours_begin_at_one_cut(
    make_spec: MakeSpec, stem: int, tail: int, restarted: bool
) -> None:
    """Unless one of them was restarted while the other went on."""
    sender = make_sender(make_spec("stem"), next_id=stem + 1, cut=stem)
    pair = Pair(sender, make_receiver(make_spec("tail"), received=tail, restarted=restarted))
    if restarted:
        pair.probe()
        assert sender.state is State.OPEN
        return
    assert refused(pair, sender.hello()) == "handshake"
    with pytest.raises(HandshakeError, match=f"cut is '{stem}' for 'stem' but '{tail}'"):
        sender.handle(pair.receiver.replies.popleft()[1])


@pytest.mark.parametrize(("cut", "attempt"), [(49, 1), (0, 2)])
def test_a_process_from_before_the_chain_began_again_is_left_alone(
    make_spec: MakeSpec, cut: int, attempt: int
) -> None:
    """It may live on after its neighbours: without an answer these find its successor."""
    pair = Pair(make_sender(make_spec("stem"), cut=0), make_receiver(make_spec("tail")))
    pair.probe()
    pair.send(1)
    later = make_sender(make_spec("stem"), next_id=cut + 1, cut=cut, attempt=attempt)
    pair.identity = b"\x00new"
    pair.receiver.replies.clear()
    assert refused(pair, later.hello()) == "handshake"
    assert not pair.receiver.replies


def test_a_long_outage_leaves_a_gap_of_any_length(pair: Pair) -> None:
    pair.send(1, 2)
    pair.sender.lose()
    newest = 2 * JUMP_LIMIT
    missed = Message(Kind.MARK, "run", "stem", id=newest, mark=Mark.MISSED)
    pair.sender.add(missed, force=True)
    pair.identity = b"\x00again"
    pair.probe()
    pair.send(newest + 1)
    assert pair.got == [1, 2, newest, newest + 1]
    assert pair.receiver.counters.gaps == newest - 2


def test_a_restarted_sender_repeats_without_effect(pair: Pair, make_spec: MakeSpec) -> None:
    pair.send(1, 2, 3)
    pair.receiver.order.acknowledge(2)
    pair.sender, pair.identity = make_sender(make_spec("stem"), next_id=2), b"\x00new"
    pair.probe()
    pair.send(2, 3, 4)
    assert pair.got == [1, 2, 3, 4]
    assert len(pair.sender.window) == 2


def test_a_replaced_sender_is_told_and_cannot_come_back(pair: Pair, make_spec: MakeSpec) -> None:
    old = pair.sender
    pair.receiver.handle(b"\x00new", make_sender(make_spec("stem")).hello())
    (identity, told) = pair.receiver.replies.popleft()
    assert identity == PEER
    with pytest.raises(HandshakeError, match="has accepted another process as module 'stem'"):
        old.handle(told)
    assert refused(pair, old.hello(), PEER) == "handshake"
    assert pair.receiver.peer == b"\x00new"


def test_a_former_process_that_is_read_late_does_not_take_the_link(
    pair: Pair, make_spec: MakeSpec
) -> None:
    """It was killed while this end could not read; its successor has been read first."""
    old, new = (make_sender(make_spec("stem"), attempt=attempt) for attempt in (2, 3))
    late = old.hello()
    pair.receiver.handle(b"\x00new", new.hello())
    assert refused(pair, late, b"\x00old") == "handshake"
    assert (pair.receiver.peer, pair.receiver.session) == (b"\x00new", new._session)
    assert refused(pair, late, PEER) == "handshake"
    again = make_sender(make_spec("stem"), attempt=3)  # by hand they may have the same number
    pair.receiver.handle(b"\x00again", again.hello())
    assert pair.receiver.peer == b"\x00again"


def test_hello_may_come_without_invitation_and_twice(pair: Pair) -> None:
    pair.down(pair.sender.hello())
    pair.settle()
    assert pair.sender.counters.handshakes == pair.receiver.counters.handshakes == 1


def test_duplicates_and_gaps_are_counted(pair: Pair) -> None:
    pair.send(1)
    for id in (1, 4):
        pair.down(encode(batch(id)))
    assert pair.got == [1, 4]
    assert (pair.receiver.counters.duplicates, pair.receiver.counters.gaps) == (1, 2)


@pytest.mark.parametrize("part", [[0, 2], [1, 3], [4, 9], [0, 2, 0.0], [1, 3, 0.5, 1.0]])
def test_parts_of_a_batch(pair: Pair, part: list[Body]) -> None:
    pair.down(encode(batch(1, body={"part": part})))
    assert pair.got == [1]


@pytest.mark.parametrize(
    "body",
    [
        {"part": [2, 3]},  # two samples from the third one on
        {"part": [3, 3]},
        {"part": [-1, 3]},
        {"part": [0]},
        {"part": [0, 2.0]},
        {"part": [0, 2, 1]},
        {"part": [0, 2, 1.5]},
        {"part": [0, 2, 0.5, None]},
        {"part": [False, 2]},
        {"part": [0, 1 << 31]},
        {"part": None},
        {"part": [0, 2], "more": 1},
        {"other": [0, 2]},
    ],
)
def test_parts_that_cannot_be(pair: Pair, body: dict[str, Body]) -> None:
    assert refused(pair, encode(batch(1, body=body))) == "body"


def test_an_evaluation_has_no_parts(pair: Pair) -> None:
    message = batch(1, mode=Mode.EVAL, body={"part": [0, 2]})
    assert refused(pair, encode(message)) == "body"


ROWS: list[Body] = ["train", 3, 12345, 1437, 360, 0]


def without_labels(make_spec: MakeSpec, *, predicts: bool = False) -> Receiver:
    spec = make_spec("tail")
    (edge,) = spec.sources
    edge = edge.model_copy(update={"labelled": False, "predicts": predicts})
    contract = LinkContract.of(spec, edge)
    return Receiver(contract, run="run", received=0, counters=LinkCounters())


def unlabelled(id: int, body: dict[str, Body]) -> Message:
    tensors = (H, TensorEntry("y", "float32", (2, 0)))
    return batch(id, tensors=tensors, buffers=(bytes(32), b""), body=body)


def test_a_link_without_labels_carries_none(make_spec: MakeSpec) -> None:
    receiver = without_labels(make_spec)
    assert receiver.contract.agreement["label"] == "stays at the tail"
    receiver.peer = PEER
    whole, part = unlabelled(1, {"rows": ROWS}), unlabelled(2, {"rows": ROWS, "part": [0, 3]})
    for message in (whole, part):
        assert receiver.handle(PEER, encode(message)) is not None
    rows = Rows("train", 3, 12345, 1437, 360, 0)
    assert [samples_of(one) for one in (whole, part)] == [(None, rows), (Part(0, 3), rows)]
    with pytest.raises(WireError) as caught:
        receiver.handle(PEER, encode(batch(3, body={"rows": ROWS})))
    assert caught.value.reason == "dtype"


@pytest.mark.parametrize(
    "rows",
    [
        ["train", 3, 12345, 1437, 360],
        ["train", 3, 12345, 1437, 360, -1],
        ["train", 3, 12345, 1437, 360, True],
        ["validation", 3, 12345, 1437, 360, 0],
        [3, 3, 12345, 1437, 360, 0],
        "train",
        None,
    ],
    ids=str,
)
def test_rows_that_cannot_be(make_spec: MakeSpec, rows: Body) -> None:
    receiver = without_labels(make_spec)
    receiver.peer = PEER
    for body in ({"rows": rows}, {}):
        with pytest.raises(WireError) as caught:
            receiver.handle(PEER, encode(unlabelled(1, body)))
        assert caught.value.reason == "body"


def test_batches_to_predict_have_links_of_their_own(pair: Pair, make_spec: MakeSpec) -> None:
    assert refused(pair, encode(batch(1, mode=Mode.PREDICT))) == "mode"
    receiver = without_labels(make_spec, predicts=True)
    assert receiver.contract.agreement["label"] == "none: it predicts"
    receiver.peer = PEER
    asked = unlabelled(1, {})._replace(mode=Mode.PREDICT)
    assert receiver.handle(PEER, encode(asked)) is not None
    for message, reason in (
        (unlabelled(2, {}), "mode"),
        (asked._replace(id=2, body={"rows": ROWS}), "body"),
    ):
        with pytest.raises(WireError) as caught:
            receiver.handle(PEER, encode(message))
        assert caught.value.reason == reason


def test_rows_are_for_links_without_labels(pair: Pair) -> None:
    assert refused(pair, encode(batch(1, body={"rows": ROWS}))) == "body"


def test_gradients_reach_the_module_and_acknowledge(pair: Pair) -> None:
    pair.send(1, 2)
    message = pair.up(gradient(1))
    assert message is not None
    assert message.id == 1
    assert len(pair.sender.window) == 1
    assert pair.sender.counters.gradients == 1


def test_late_gradients_of_acknowledged_batches_are_welcome(pair: Pair) -> None:
    pair.send(1, 2)
    pair.up(Message(Kind.ACK, "run", "tail", ack=2))
    assert pair.up(gradient(1, ack=2)) is not None


def test_drained_is_given_out_once(pair: Pair) -> None:
    drained = Message(Kind.DRAINED, "run", "tail", id=3)
    assert pair.up(drained) == drained
    assert pair.up(drained) is None
    assert pair.up(drained._replace(id=4)) is not None


def test_what_is_drained_stays_drained(make_spec: MakeSpec) -> None:
    """Both ends were restarted: this one will send again what the other has been trained on."""
    pair = Pair(
        make_sender(make_spec("stem"), next_id=85),
        make_receiver(make_spec("tail"), received=100, restarted=True),
    )
    pair.probe()
    assert pair.sender.drained == 84
    assert pair.up(Message(Kind.DRAINED, "run", "tail", id=100)) is not None
    assert pair.sender.drained == 100


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (batch(1, run="other"), "run"),
        (batch(1, source="root"), "source"),
        (batch(JUMP_LIMIT + 1), "id"),
        (gradient(1), "kind"),
        (Message(Kind.ACK, "run", "stem", ack=1), "kind"),
        (Message(Kind.WELCOME, "run", "stem", body={"received": 1}), "kind"),
        (batch(1, tensors=(TensorEntry("h", "float32", (8,)), Y)), "shape"),
        (batch(1, tensors=(TensorEntry("h", "int32", (2, 4)), Y)), "dtype"),
        (
            batch(1, tensors=(H, TensorEntry("y", "int64", (1,))), buffers=(bytes(32), bytes(8))),
            "shape",
        ),
        (
            batch(
                1,
                tensors=(TensorEntry("h", "float32", (9, 4)), TensorEntry("y", "int64", (9,))),
                buffers=(bytes(144), bytes(72)),
            ),
            "oversized",
        ),
        (Message(Kind.HELLO, "run", "stem"), "body"),
        (Message(Kind.HELLO, "run", "stem", body={"link": {"a": 1}}), "body"),
        (Message(Kind.HELLO, "run", "stem", body=Hello("s", 0, {}).body()), "body"),
    ],
)
def test_what_an_accepted_peer_may_not_send(pair: Pair, message: Message, reason: str) -> None:
    assert refused(pair, encode(message)) == reason
    pair.send(1)
    assert pair.got == [1]


@pytest.mark.parametrize(
    "frames",
    [
        encode(batch(1, run="other")),
        encode(Message(Kind.MARK, "other", "stem", id=1, mark=Mark.END)),
        encode(Message(Kind.ACK, "run", "tail", ack=1)),
    ],
)
def test_strangers_are_refused_whatever_they_send(pair: Pair, frames: list[Buffer]) -> None:
    assert refused(pair, frames, b"stranger") == "stranger"
    assert not pair.receiver.replies
    pair.send(1)
    assert pair.got == [1]


def test_strangers_headers_are_not_read_beyond_a_hello(pair: Pair) -> None:
    hello = Message(Kind.HELLO, "run", "stem", body={"junk": "x" * 9000})
    assert refused(pair, encode(hello), b"stranger") == "oversized"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (gradient(2), "id"),
        (gradient(1, run="other"), "run"),
        (gradient(1, source="tip"), "source"),
        (gradient(1, ack=9), "id"),
        (Message(Kind.ACK, "run", "tail", ack=2), "id"),
        (gradient(1, tensors=(TensorEntry("g", "float32", (4, 2)),)), "shape"),
        (
            gradient(1, tensors=(TensorEntry("g", "float32", (3, 4)),), buffers=(bytes(48),)),
            "shape",
        ),
        (Message(Kind.REQUEST, "run", "tail", body={"what": 1}), "body"),
        (Message(Kind.DRAINED, "run", "tail", id=JUMP_LIMIT + 2), "id"),
        (Message(Kind.MARK, "run", "tail", id=1, mark=Mark.END), "kind"),
        (Message(Kind.HELLO, "run", "tail", body={}), "kind"),
    ],
)
def test_what_downstream_may_not_send(pair: Pair, message: Message, reason: str) -> None:
    pair.send(1)
    assert refused_up(pair, message) == reason
    assert len(pair.sender.window) == 1


def test_broken_scales_are_refused_and_change_nothing(make_spec: MakeSpec) -> None:
    links = LinksSpec(dtype="int8")
    pair = Pair(
        make_sender(make_spec("stem", links=links)), make_receiver(make_spec("tail", links=links))
    )
    pair.probe()
    h, scale = TensorEntry("h", "int8", (2, 4)), TensorEntry("h_scale", "float32", ())
    g, g_scale = h._replace(name="g"), scale._replace(name="g_scale")
    good, bad = bytes(4), struct.pack("<f", -1.0)

    def down(data: bytes) -> Message:
        return batch(1, tensors=(h, scale, Y), buffers=(bytes(8), data, bytes(16)))

    def up(data: bytes) -> Message:
        return gradient(1, tensors=(g, g_scale), buffers=(bytes(8), data))

    assert refused(pair, encode(down(bad))) == "scale"
    assert refused(pair, encode(batch(1))) == "count"
    assert pair.receiver.order.received == 0
    pair.sender.add(down(good), 2)
    pair.settle()
    assert pair.got == [1]
    assert refused_up(pair, up(bad)) == "scale"
    assert refused_up(pair, gradient(1)) == "count"
    assert len(pair.sender.window) == 1
    assert pair.up(up(good)) is not None
    assert len(pair.sender.window) == 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"number": 1, "received": -1},
        {"number": 1, "received": True},
        {"number": 1, "received": "1"},
        {"number": 1, "received": ID_LIMIT + 1},
        {"number": 0, "received": 1},
        {"received": 1},
    ],
)
def test_a_welcome_that_says_nothing(make_spec: MakeSpec, body: dict[str, Any]) -> None:
    sender = make_sender(make_spec("stem"))
    sender.hello()
    with pytest.raises(WireError) as caught:
        sender.handle(encode(Message(Kind.WELCOME, "run", "tail", body=body)))
    assert caught.value.reason == "body"
    assert sender.state is State.SILENT


def test_a_handshake_may_name_any_id(make_spec: MakeSpec) -> None:
    hello = Hello("word", ID_LIMIT, {})
    message = Message(Kind.HELLO, "run", "stem", body=hello.body())
    assert Hello.of(message) == hello
    sender = make_sender(make_spec("stem"))
    sender.hello()
    body: dict[str, Body] = {"number": 1, "received": ID_LIMIT}
    sender.handle(encode(Message(Kind.WELCOME, "run", "tail", body=body)))
    assert sender.window.received == ID_LIMIT


def test_a_refusal_that_says_nothing(pair: Pair) -> None:
    assert refused_up(pair, Message(Kind.REFUSE, "run", "tail", body={"field": 1})) == "body"


def test_gradients_that_nobody_wants_are_refused(make_spec: MakeSpec) -> None:
    pair = Pair(
        make_sender(make_spec("stem", gradients_in=0)),
        make_receiver(make_spec("tail", gradients_out=0)),
    )
    pair.probe()
    pair.send(1)
    assert refused_up(pair, gradient(1)) == "count"


def test_memory_of_batch_sizes_is_bounded(pair: Pair) -> None:
    for id in range(1, SIZES_KEPT + 3):
        pair.send(id)
        pair.up(Message(Kind.ACK, "run", "tail", ack=id))
    assert refused_up(pair, gradient(2)) == "id"
    assert pair.up(gradient(3)) is not None


def test_a_restarted_module_gets_again_what_it_may_not_have_sent_on(make_spec: MakeSpec) -> None:
    pair = Pair(make_sender(make_spec("stem", retain=3)), make_receiver(make_spec("tail")))
    pair.probe()
    for id in range(1, 7):
        pair.send(id)
        pair.up(Message(Kind.ACK, "run", "tail", ack=id))
    pair.send(7)
    # Its snapshot is of 5; what it had acknowledged since is lost, but for what upstream retains.
    pair.receiver = make_receiver(make_spec("tail"), received=5, restarted=True)
    pair.identity, pair.got = b"\x00next", []
    pair.probe()
    assert pair.got == [4, 5, 6, 7]
    assert (pair.receiver.order.gaps, pair.receiver.counters.gaps) == (0, 0)
    assert pair.sender.counters.resent == 4
    # Only the first HELLO goes back: a reconnection does not.
    pair.identity, pair.got = b"\x00later", []
    pair.probe()
    assert pair.got == []


def test_a_restarted_module_counts_what_is_lost_to_it(make_spec: MakeSpec) -> None:
    pair = Pair(make_sender(make_spec("stem", retain=1)), make_receiver(make_spec("tail")))
    pair.probe()
    for id in range(1, 9):
        pair.send(id)
        pair.up(Message(Kind.ACK, "run", "tail", ack=id))
    pair.receiver = make_receiver(make_spec("tail"), received=3, restarted=True)
    pair.identity, pair.got = b"\x00next", []
    pair.probe()
    assert (pair.got, pair.receiver.counters.gaps) == ([8], 4)


def test_a_restarted_head_sends_again_what_downstream_has(make_spec: MakeSpec) -> None:
    """Ids are positions in the stream: those that downstream has had do not even travel."""
    pair = Pair(make_sender(make_spec("stem")), make_receiver(make_spec("tail")))
    pair.probe()
    pair.send(1, 2, 3)
    pair.receiver.order.acknowledge(2)
    pair.up(Message(Kind.ACK, "run", "tail", ack=2))
    pair.sender, pair.identity, pair.got = make_sender(make_spec("stem")), b"\x00next", []
    pair.probe()
    pair.send(1, 2)
    assert len(pair.sender.window) == 0  # acknowledged to the process before
    pair.send(3, 4)
    assert pair.got == [4]
    assert pair.receiver.counters.duplicates == 0
