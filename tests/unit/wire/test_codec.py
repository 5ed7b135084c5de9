"""The codec, against docs/wire.md."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dni_runtime.errors import WireError
from dni_runtime.wire import (
    HEADER_BYTES,
    ITEM_BYTES,
    Kind,
    Limits,
    Mark,
    Message,
    Mode,
    TensorEntry,
    decode,
    encode,
)

Y = ["y", "int64", [2]]
LIMITS = Limits(tensors=3, buffer_bytes=1 << 12)

BATCH = Message(
    Kind.BATCH,
    "run-1",
    "stem",
    id=7,
    epoch=2,
    mode=Mode.EVAL,
    tensors=(TensorEntry("h", "float32", (2, 3)), TensorEntry("y", "int64", (2,))),
    buffers=(bytes(24), bytes(16)),
)

EXAMPLES = [
    Message(Kind.HELLO, "r", "a", body={"session": "s", "first": 1, "link": {"chain": "c"}}),
    Message(Kind.WELCOME, "r", "b", ack=3, body={"received": 5}),
    Message(Kind.REFUSE, "r", "b", body={"field": "run", "mine": "r", "yours": "q"}),
    BATCH,
    Message(Kind.MARK, "r", "a", id=8, epoch=2, mark=Mark.EPOCH | Mark.END),
    Message(
        Kind.GRADIENT,
        "r",
        "b",
        id=7,
        ack=7,
        tensors=(TensorEntry("g", "bfloat16", (2, 3)),),
        buffers=(bytes(12),),
    ),
    Message(Kind.ACK, "r", "b", ack=9),
    Message(Kind.DRAINED, "r", "b", id=8),
    Message(Kind.REQUEST, "r", "b", body={"what": "checkpoint"}),
    Message(Kind.BYE, "r", "a"),
    Message(
        Kind.BATCH,
        "r",
        "a",
        id=7,
        tensors=(
            TensorEntry("h", "int8", (2, 3)),
            TensorEntry("h_scale", "float32", (3,)),
            TensorEntry("y", "int64", (2,)),
        ),
        buffers=(bytes(6), bytes(12), bytes(16)),
    ),
    Message(
        Kind.GRADIENT,
        "r",
        "b",
        id=7,
        ack=7,
        tensors=(TensorEntry("g", "int8", (2, 3)), TensorEntry("g_scale", "float32", ())),
        buffers=(bytes(6), bytes(4)),
    ),
]


def fields(message: Message) -> list[Any]:
    return list(msgpack.unpackb(encode(message)[0]))


def with_field(message: Message, index: int, value: Any) -> list[bytes | memoryview]:
    _, *buffers = encode(message)
    changed = fields(message)
    changed[index] = value
    return [msgpack.packb(changed), *buffers]


def with_rows(h: list[Any], y: list[Any]) -> list[bytes | memoryview]:
    """A batch whose tensors are described so."""
    return with_field(BATCH, 9, [h, y])


def reason(frames: list[Any], limits: Limits = LIMITS) -> str:
    with pytest.raises(WireError) as caught:
        decode(frames, limits)
    return caught.value.reason


def test_golden_batch_header() -> None:
    """The bytes of version 3 never change; if this fails, raise PROTOCOL_VERSION."""
    assert encode(BATCH)[0].hex() == (
        "9b"  # array of eleven
        "03" "04"  # version 3, BATCH
        "a572756e2d31" "a47374656d"  # run, source
        "07" "02" "01" "00" "00"  # id, epoch, mode, mark, ack
        "92"  # two tensors
        "93a168a7666c6f61743332920203"  # h float32 [2, 3]
        "93a179a5696e7436349102"  # y int64 [2]
        "80"  # empty body
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (EXAMPLES[4], "9b0305a172a16108020011009080"),
        (EXAMPLES[6], "9b0307a172a16200000000099080"),
        (EXAMPLES[8], "9b0309a172a16200000000009081a477686174aa636865636b706f696e74"),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Message) else "",
)
def test_golden_headers(message: Message, golden: str) -> None:
    assert encode(message)[0].hex() == golden


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind.name)
def test_every_kind_comes_back(message: Message) -> None:
    assert decode(encode(message), LIMITS) == message


def test_buffers_are_not_copied() -> None:
    buffer = memoryview(bytearray(24))
    frames = encode(BATCH._replace(buffers=(buffer, bytes(16))))
    assert frames[1] is buffer
    assert decode(frames, LIMITS).buffers[0] is buffer


def test_memoryviews_of_any_item_size_are_measured_in_bytes() -> None:
    buffer = memoryview(bytearray(24)).cast("f")
    assert decode(encode(BATCH._replace(buffers=(buffer, bytes(16)))), LIMITS).id == 7


natural = st.integers(0, (1 << 63) - 1)
name = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
bodies = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)


@given(
    run=name,
    source=name,
    id=st.integers(1, (1 << 63) - 1),
    epoch=st.integers(0, (1 << 31) - 1),
    mark=st.integers(1, sum(Mark)),
)
def test_markers_round_trip(run: str, source: str, id: int, epoch: int, mark: int) -> None:
    message = Message(Kind.MARK, run, source, id=id, epoch=epoch, mark=Mark(mark))
    frames = encode(message)
    assert decode(frames, LIMITS) == message


@given(run=name, source=name, body=bodies)
def test_bodies_round_trip(run: str, source: str, body: dict[str, Any]) -> None:
    message = Message(Kind.REQUEST, run, source, body=body)
    assert decode(encode(message), LIMITS) == message


@st.composite
def tensors(draw: st.DrawFn, title: str) -> tuple[TensorEntry, bytes]:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    return TensorEntry(title, dtype, shape), bytes(math.prod(shape) * ITEM_BYTES[dtype])


@given(tensors("h"), tensors("y"), natural.filter(bool), st.sampled_from(Mode))
def test_batches_round_trip(
    h: tuple[TensorEntry, bytes], y: tuple[TensorEntry, bytes], id: int, mode: Mode
) -> None:
    message = Message(
        Kind.BATCH, "r", "a", id=id, mode=mode, tensors=(h[0], y[0]), buffers=(h[1], y[1])
    )
    assert decode(encode(message), LIMITS) == message


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames, LIMITS)


scalars = st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | st.text(max_size=5)
junk = st.recursive(
    scalars | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(scalars | st.binary(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.integers(0, 10), junk)
def test_a_header_with_one_wrong_field_is_refused_or_valid(
    message: Message, index: int, value: object
) -> None:
    """Whatever stands in a field, either a whole valid message comes out or a WireError."""
    try:
        decoded = decode(with_field(message, index, value), LIMITS)
    except WireError:
        return
    assert decode(encode(decoded), LIMITS).kind is decoded.kind


@given(st.sampled_from(EXAMPLES), st.data())
def test_flipped_bytes_never_do_anything_else(message: Message, data: st.DataObject) -> None:
    header = bytearray(encode(message)[0])
    position = data.draw(st.integers(0, len(header) - 1))
    header[position] = data.draw(st.integers(0, 255))
    try:
        decoded = decode([bytes(header), *message.buffers], LIMITS)
    except WireError:
        return
    assert len(decoded.tensors) == len(decoded.buffers)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind.name)
def test_every_truncation_is_refused(message: Message) -> None:
    frames = encode(message)
    header = bytes(frames[0])
    for length in range(len(header)):
        assert reason([header[:length], *frames[1:]]) in ("truncated", "header")
    assert reason([header[:-1], *frames[1:]]) == "truncated"
    for kept in range(len(frames)):
        assert reason(frames[:kept]) == "truncated"


BIG = bytes((1 << 12) + 1)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        pytest.param([], "truncated", id="nothing"),
        pytest.param([b""], "truncated", id="empty header"),
        pytest.param([encode(BATCH)[0], bytes(20), bytes(16)], "truncated", id="short buffer"),
        pytest.param([encode(BATCH)[0], bytes(28), bytes(16)], "oversized", id="long buffer"),
        pytest.param([encode(BATCH)[0], BIG, bytes(16)], "oversized", id="huge buffer"),
        pytest.param([bytes(HEADER_BYTES + 1)], "oversized", id="huge header"),
        pytest.param([*encode(BATCH), b""], "count", id="one more buffer"),
        pytest.param([*encode(EXAMPLES[6]), b""], "count", id="buffer without tensor"),
        pytest.param([encode(BATCH)[0] + b"\x00"], "header", id="bytes after the header"),
        pytest.param([msgpack.packb({})], "header", id="map"),
        pytest.param([msgpack.packb([])], "header", id="empty array"),
        pytest.param([msgpack.packb([3])], "header", id="short array"),
        pytest.param([msgpack.packb(["1"])], "header", id="text version"),
        pytest.param([msgpack.packb([True])], "header", id="bool version"),
        pytest.param([msgpack.packb([4])], "version", id="next version"),
        pytest.param([msgpack.packb([0, *range(10)])], "version", id="version 0"),
        pytest.param([msgpack.packb(msgpack.ExtType(5, b""))], "header", id="extension"),
        pytest.param([msgpack.packb(msgpack.Timestamp(1))], "header", id="timestamp"),
        pytest.param([b"\x91" * 60_000 + b"\xc0"], "header", id="too deep"),
        pytest.param([b"\xdd\xff\xff\xff\xff"], "header", id="huge array"),
        pytest.param([b"\xc1"], "header", id="never used in msgpack"),
        pytest.param([b"\xa2\xff\xfe"], "header", id="not utf-8"),
        pytest.param(with_field(BATCH, 1, 99), "kind", id="unknown kind"),
        pytest.param(with_field(BATCH, 1, True), "kind", id="bool kind"),
        pytest.param(with_field(BATCH, 1, "BATCH"), "kind", id="text kind"),
        pytest.param(with_field(BATCH, 2, ""), "header", id="empty run"),
        pytest.param(with_field(BATCH, 2, "x" * 256), "header", id="long run"),
        pytest.param(with_field(BATCH, 2, 5), "header", id="number as run"),
        pytest.param(with_field(BATCH, 3, None), "header", id="no source"),
        pytest.param(with_field(BATCH, 4, -1), "header", id="negative id"),
        pytest.param(with_field(BATCH, 4, True), "header", id="bool id"),
        pytest.param(with_field(BATCH, 4, 7.0), "header", id="float id"),
        pytest.param(with_field(BATCH, 4, 1 << 63), "header", id="huge id"),
        pytest.param(with_field(BATCH, 4, 0), "kind", id="batch without id"),
        pytest.param(with_field(BATCH, 5, -1), "header", id="negative epoch"),
        pytest.param(with_field(BATCH, 6, 3), "header", id="unknown mode"),
        pytest.param(with_field(BATCH, 7, 1), "kind", id="batch with mark"),
        pytest.param(with_field(BATCH, 7, 512), "header", id="unknown mark"),
        pytest.param(with_field(BATCH, 8, 1), "kind", id="batch with ack"),
        pytest.param(with_field(EXAMPLES[6], 10, {"a": 1}), "kind", id="acknowledgement with body"),
        pytest.param(with_field(BATCH, 10, []), "header", id="array as body"),
        pytest.param(with_field(EXAMPLES[4], 7, 0), "kind", id="marker without mark"),
        pytest.param(with_field(EXAMPLES[4], 10, {"lr": 0.5}), "kind", id="marker with body"),
        pytest.param(with_field(EXAMPLES[8], 10, {"a": b"x"}), "header", id="bytes in body"),
        pytest.param(with_field(EXAMPLES[8], 10, {1: 2}), "header", id="number as key"),
        pytest.param(with_field(EXAMPLES[8], 10, {b"": 2}), "header", id="bytes as key"),
        pytest.param(
            with_field(EXAMPLES[8], 10, {"a": [[[[[[[[1]]]]]]]]}), "header", id="deep body"
        ),
        pytest.param(with_field(EXAMPLES[6], 4, 1), "kind", id="ack with id"),
        pytest.param(with_field(EXAMPLES[6], 5, 1), "kind", id="ack with epoch"),
        pytest.param(with_field(EXAMPLES[6], 6, 1), "kind", id="ack with mode"),
        pytest.param(with_field(BATCH, 9, {}), "header", id="map as table"),
        pytest.param(with_field(BATCH, 9, [1, 2]), "header", id="numbers as rows"),
        pytest.param(with_rows(["h", "float32"], ["y", "int64"]), "header", id="short rows"),
        pytest.param(with_rows(["h", "complex64", [3]], Y), "dtype", id="unknown dtype"),
        pytest.param(with_rows(["h", ["float32"], [6]], Y), "dtype", id="array as dtype"),
        pytest.param(with_rows(["h", "float32", [-2, -3]], Y), "shape", id="negative sizes"),
        pytest.param(with_rows(["h", "float32", [2, 3.0]], Y), "shape", id="float size"),
        pytest.param(with_rows(["h", "float32", [6, True]], Y), "shape", id="bool size"),
        pytest.param(with_rows(["h", "float32", [1] * 9], Y), "shape", id="nine sizes"),
        pytest.param(with_rows(["h", "float32", [1 << 30] * 2], Y), "truncated", id="vast sizes"),
        pytest.param(
            with_rows(["y", "float32", [6]], ["h", "int64", [2]]), "count", id="swapped tensors"
        ),
        pytest.param(
            with_field(EXAMPLES[10], 9, [["h", "int8", [2, 3]], ["g_scale", "float32", [3]], Y]),
            "count",
            id="scales of another tensor",
        ),
        pytest.param(
            with_field(
                EXAMPLES[10],
                9,
                [["h", "int8", [2, 3]], ["y", "float32", [3]], ["h_scale", "int64", [2]]],
            ),
            "count",
            id="scales at the end",
        ),
        pytest.param(
            with_field(BATCH, 9, [["h", "float32", [2, 3]]]), "count", id="table too short"
        ),
        pytest.param(
            with_field(BATCH, 9, [["h", "float32", [2, 3]]] * 4), "count", id="table too long"
        ),
    ],
)
def test_what_is_refused(frames: list[bytes], expected: str) -> None:
    assert reason(frames) == expected


def test_a_refusal_quotes_only_a_little_of_what_came() -> None:
    with pytest.raises(WireError) as caught:
        decode(with_field(BATCH, 2, "x" * 60_000), LIMITS)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (BATCH._replace(buffers=(bytes(24),)), "count"),
        (Message(Kind.REQUEST, "r", "a", body={"a": "x" * 70_000}), "oversized"),
        (Message(Kind.REQUEST, "r", "a", body={"a": object()}), "header"),  # type: ignore[dict-item]
        (Message(Kind.ACK, "r", "a", ack=1 << 64), "header"),
    ],
)
def test_what_cannot_be_encoded(message: Message, expected: str) -> None:
    with pytest.raises(WireError) as caught:
        encode(message)
    assert caught.value.reason == expected


def test_another_version_is_named() -> None:
    with pytest.raises(WireError) as caught:
        decode([msgpack.packb([4, "other", {}])], LIMITS)
    assert (caught.value.reason, caught.value.version) == ("version", 4)
    for header in (msgpack.packb([True]), msgpack.packb([]), b"\xc1", bytes(HEADER_BYTES + 1)):
        with pytest.raises(WireError) as caught:
            decode([header], LIMITS)
        assert caught.value.version is None
