"""Requests of the Open Inference Protocol: what is read, and what is refused, with a place."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dni_runtime.errors import RequestError, SpecError
from dni_runtime.serving.protocol import Request, Signature, read_request, write_response
from dni_runtime.spec import TensorSpec
from tests.specs import float32, varying

DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
TWO = Signature(
    {"x": float32(2), "n": TensorSpec(shape=(), dtype="int64")},
    {"y": float32(3), "z": TensorSpec(shape=(2, 2), dtype="int32")},
)
X: dict[str, Any] = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2]}
N: dict[str, Any] = {"name": "n", "shape": [1], "datatype": "INT64", "data": [7]}


def of(dtype: str, *shape: int) -> Signature:
    spec = TensorSpec(shape=shape, dtype=dtype)
    return Signature({"x": spec}, {"y": spec})


def read(document: Any, signature: Signature = TWO, tail: bytes = b"") -> Request:
    text = json.dumps(document).encode()
    return read_request(text + tail, b"%d" % len(text) if tail else None, signature)


def test_a_request_in_json() -> None:
    request = read({"id": "a", "inputs": [N, X], "unknown": 1})
    assert (request.id, request.rows) == ("a", 1)
    x, n = request.inputs
    assert torch.equal(x, torch.tensor([[1.5, 2.0]]))
    assert torch.equal(n, torch.tensor([7]))
    assert request.outputs == ((0, False), (1, False))


def test_a_length_of_its_own() -> None:
    texts = Signature({"x": varying(float32(3)), "m": varying(float32(3, 2))}, {"y": float32(3)})
    assert [one["shape"] for one in texts.metadata()["inputs"]] == [[-1, -1], [-1, -1, 2]]
    m = X | {"name": "m", "shape": [1, 2, 2], "data": [1, 2, 3, 4]}
    x, mask = read({"inputs": [X, m]}, texts).inputs
    assert (x.shape, mask.shape) == ((1, 2), (1, 2, 2))
    with pytest.raises(RequestError, match=r"they have different lengths: \[1, 2\]"):
        read({"inputs": [X, m | {"shape": [1, 1, 2], "data": [1, 2]}]}, texts)
    for wrong in ([1, 4], [1, 0], [1, 2, 1], [1]):
        with pytest.raises(RequestError, match=r"not a shape of this input\n.*\[rows, <=3\]"):
            read({"inputs": [X | {"shape": wrong}, m]}, texts)


def test_null_is_as_if_absent() -> None:
    """Clients of other languages write fields that they do not set."""
    null = {"parameters": None}
    flags = {"parameters": {"binary_data_output": None}}
    asked = {"name": "z", "parameters": {"binary_data": None}}
    for more in (null, flags, {"outputs": None}, {"id": None}, {"outputs": [{"name": "z", **null}]},
                 {"outputs": [asked]}):  # fmt: skip
        request = read({"inputs": [X | null, N], **more})
        assert not any(binary for _, binary in request.outputs)
    sized = {"data": None, "parameters": {"binary_data_size": 8}}
    assert read({"inputs": [X | sized, N]}, tail=b"\0" * 8).inputs[0].tolist() == [[0, 0]]


def test_requested_outputs_and_their_forms() -> None:
    binary = {"parameters": {"binary_data": True}}
    request = read({"inputs": [X, N], "outputs": [{"name": "z"}, {"name": "y", **binary}]})
    assert request.outputs == ((1, False), (0, True))
    all_binary = {"binary_data_output": True}
    assert read({"inputs": [X, N], "parameters": all_binary}).outputs == ((0, True), (1, True))
    assert read({"inputs": [X, N], "outputs": []}).outputs == ((0, False), (1, False))


@pytest.mark.parametrize("dtype", DATATYPES)
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_all_types_there_and_back(dtype: str, binary: bool, shape: tuple[int, ...]) -> None:
    signature = of(dtype, *shape)
    numbers = torch.arange(4 * math.prod(shape)).reshape(4, *shape) % 100
    tensor = numbers.to(getattr(torch, dtype))
    entry: dict[str, Any] = {
        "name": "x", "shape": [4, *shape], "datatype": DATATYPES[dtype],
    }  # fmt: skip
    tail = b""
    if binary:
        tail = bytes(tensor.view(torch.uint8).flatten().tolist())
        entry["parameters"] = {"binary_data_size": len(tail)}
    else:
        entry["data"] = tensor.tolist()
    document = {"inputs": [entry], "parameters": {"binary_data_output": binary}}
    request = read(document, signature, tail)
    assert request.inputs[0].dtype == tensor.dtype
    assert torch.equal(request.inputs[0], tensor)

    body, length = write_response(request, [tensor], signature, {"model_name": "m"})
    response = json.loads(body[:length])
    (output,) = response["outputs"]
    assert (output["datatype"], output["shape"]) == (DATATYPES[dtype], [4, *shape])
    if binary:
        assert body[length:] == tail
        assert output["parameters"] == {"binary_data_size": len(tail)}
    else:
        assert output["data"] == tensor.flatten().tolist()


def test_numbers_are_read_as_they_were_written() -> None:
    values = [0.1, -1e-30, 3.4028234663852886e38]
    x = read({"inputs": [{**X, "shape": [1, 3], "data": values}]}, of("float32", 3)).inputs[0]
    assert x.tolist() == [np.float32(values).tolist()]
    body, _ = write_response(Request("i", 1, (x,), ((0, False),)), [x], of("float32", 3), {})
    assert np.float32(json.loads(body)["outputs"][0]["data"]).tolist() == x[0].tolist()
    assert json.loads(body)["id"] == "i"


WRONG = [
    ({"inputs": [X]}, "inputs", "missing: 'n'"),
    ({}, "inputs", "None is not a list"),
    ([], "the request", "[] is not a JSON object"),
    ({"id": 5, "inputs": [X, N]}, "id", "5 is not a string"),
    ({"inputs": [X, N], "parameters": []}, "parameters", "not a JSON object"),
    ({"inputs": [X, N, X]}, "inputs[2].name", "'x' is there twice"),
    ({"inputs": [{**X, "name": "a" * 1000}]}, "inputs[0].name", "names: x, n"),
    ({"inputs": [{**X, "name": ["x"]}]}, "inputs[0].name", "the model has no ['x']"),
    ({"inputs": [{**X, "datatype": "FP64"}, N]}, "inputs[0].datatype", "'FP64' is not FP32"),
    ({"inputs": [{**X, "shape": [1, 3]}, N]}, "inputs[0].shape", "[rows, 2]"),
    ({"inputs": [{**X, "shape": [-1, 2]}, N]}, "inputs[0].shape", "at least one row"),
    ({"inputs": [{**X, "shape": [0, 2]}, N]}, "inputs[0].shape", "at least one row"),
    ({"inputs": [{**X, "shape": [True, 2]}, N]}, "inputs[0].shape", "[True, 2] is not"),
    ({"inputs": [{**X, "shape": [1.0, 2]}, N]}, "inputs[0].shape", "[1.0, 2] is not"),
    ({"inputs": [{**X, "shape": []}, N]}, "inputs[0].shape", "[] is not"),
    ({"inputs": [{**X, "shape": [2**60, 2]}, N]}, "inputs[0].data", "nor one flat list"),
    ({"inputs": [{**X, "data": [1]}, N]}, "inputs[0].data", "nor one flat list"),
    ({"inputs": [{**X, "shape": [2, 2], "data": [[1, 2], [3]]}, N]}, "inputs[0].data", "flat"),
    ({"inputs": [{**X, "shape": [2, 2], "data": [[1, 2], 3]}, N]}, "inputs[0].data", "flat"),
    ({"inputs": [{**X, "data": [[[1], [2]]]}, N]}, "inputs[0].data", "must be real number"),
    ({"inputs": [{**X, "data": {"a": 1}}, N]}, "inputs[0].data", "is not a list"),
    ({"inputs": [{**X, "data": [1, "2"]}, N]}, "inputs[0].data", "must be real number, not str"),
    ({"inputs": [{**X, "data": [1, None]}, N]}, "inputs[0].data", "must be real number"),
    ({"inputs": [{**X, "data": [1, True]}, N]}, "inputs[0].data", "true and false"),
    ({"inputs": [{**X, "data": [1, 1e39]}, N]}, "inputs[0].data", "too large for FP32"),
    ({"inputs": [X, {**N, "data": [1.0]}]}, "inputs[1].data", "float"),
    ({"inputs": [X, {**N, "data": [2**63]}]}, "inputs[1].data", "not all values are INT64"),
    ({"inputs": [X, {**N, "data": [2**70]}]}, "inputs[1].data", "not all values are INT64"),
    ({"inputs": [X, {**N, "shape": [2], "data": [1, 2]}]}, "inputs", "numbers of rows: [1, 2]"),
    ({"inputs": [{k: X[k] for k in X if k != "data"}, N]}, "inputs[0]", "'data' or as bytes"),
    ({"inputs": [X, N], "outputs": 1}, "outputs", "1 is not a list"),
    ({"inputs": [X, N], "outputs": [{"name": "x"}]}, "outputs[0].name", "names: y, z"),
    ({"inputs": [X, N], "outputs": [{"name": "y"}] * 2}, "outputs[1].name", "twice"),
    (
        {"inputs": [X, N], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
        "outputs[0].binary_data",
        "1 is not true or false",
    ),
    (
        {"inputs": [X, N], "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        "outputs[0].parameters",
        "not supported",
    ),
]


@pytest.mark.parametrize(("document", "place", "text"), WRONG)
def test_what_is_refused(document: Any, place: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(document)
    assert (caught.value.status, caught.value.place) == (400, place)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("size", "tail", "place"),
    [
        (8, b"1234567", "inputs[0].parameters.binary_data_size"),
        (9, b"123456789", "inputs[0].parameters.binary_data_size"),
        (-8, b"12345678", "inputs[0].parameters.binary_data_size"),
        (True, b"12345678", "inputs[0].parameters.binary_data_size"),
        (2**70, b"12345678", "inputs[0].parameters.binary_data_size"),
        (8, b"123456789", "the request"),
    ],
)
def test_wrong_sizes_of_bytes(size: int, tail: bytes, place: str) -> None:
    x = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    with pytest.raises(RequestError) as caught:
        read({"inputs": [x]}, of("float32", 2), tail)
    assert caught.value.place == place


@pytest.mark.parametrize("length", [b"-1", b"+2", b"2.0", b" 2", b"", b"x", b"9999", b"1" * 40])
def test_wrong_lengths_of_the_header(length: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_request(b"{}", length, TWO)
    assert caught.value.place == "Inference-Header-Content-Length"


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b"[" * 100_000, b'{"id": NaN}', b'{"id": 1e999}', b'{"id": "\\ud800"}',
        b"[" * 1000 + b"]" * 1000, b'{"inputs":' * 1000 + b"1" + b"}" * 1000,
    ],
)  # fmt: skip
def test_what_is_not_json(text: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_request(text, None, TWO)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 400


def test_values_that_json_cannot_write() -> None:
    y = torch.tensor([[math.nan]])
    request = Request(None, 1, (), ((0, False),))
    with pytest.raises(RequestError, match="binary_data") as caught:
        write_response(request, [y], of("float32", 1), {})
    assert caught.value.status == 500
    body, length = write_response(request._replace(outputs=((0, True),)), [y], of("float32", 1), {})
    assert math.isnan(np.frombuffer(body[length:], np.float32)[0])


def test_what_a_model_cannot_take() -> None:
    with pytest.raises(SpecError, match="complex64"):
        of("complex64", 1)
    with pytest.raises(SpecError, match="no dimension"):
        of("float32", 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from(["x", "n", "y", "FP32", "INT64", 2**63, 2**64, -1, 10**400]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            (
                *("id", "inputs", "outputs", "name", "shape", "datatype", "data", "parameters"),
                *("binary_data_size", "binary_data", "binary_data_output"),
            )
        ),
        inner,
        max_size=6,
    ),
    max_leaves=20,
)  # fmt: skip


def answered(body: bytes, length: bytes | None) -> Request | None:
    """Return what is read; None if it is refused. There is no third thing."""
    try:
        return read_request(body, length, TWO)
    except RequestError as refusal:
        error = refusal
    assert error.status == 400
    assert len(str(error)) < 600
    return None


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.none() | st.binary(max_size=5) | st.integers(0, 300))
def test_any_bytes(body: bytes, length: bytes | int | None) -> None:
    answered(body, b"%d" % length if isinstance(length, int) else length)


@settings(max_examples=200, deadline=None)
@given(JSON, JSON, JSON, st.binary(max_size=20))
def test_any_json(whole: Any, x: Any, n: Any, tail: bytes) -> None:
    def mixed(valid: dict[str, Any], other: Any) -> Any:
        return {**valid, **other} if isinstance(other, dict) else other

    for document in (whole, mixed({"inputs": [mixed(X, x), mixed(N, n)]}, whole)):
        text = json.dumps(document).encode()
        request = answered(text + tail, b"%d" % len(text))
        if request is not None:
            assert request.rows == len(request.inputs[0]) == len(request.inputs[1]) > 0


def test_time_and_memory_are_proportional_to_the_size() -> None:
    nested, strings = "[" * 500 + "]" * 500, '"' + "a" * 10 + '"'
    for kind in ("[]", "1", "1e300", "true", nested, strings, '{"a":{}}'):
        seconds = []
        for size in (50_000, 400_000):
            count = size // (len(kind) + 1)
            data = ",".join([kind] * count)
            form = '{"inputs":[{"name":"x","datatype":"FP32","shape":[%d,2],"data":[%s]}]}'
            body = (form % (count // 2, data)).encode()
            tracemalloc.start()
            begin = time.process_time()
            with pytest.raises(RequestError):
                read_request(body, None, TWO)
            seconds.append(time.process_time() - begin)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 60 * len(body), kind
        assert seconds[1] < 24 * seconds[0] + 0.2, kind  # 8 times the size; quadratic: 64
