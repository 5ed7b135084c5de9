"""The Open Inference Protocol, version 2, over HTTP: from bytes to tensors, and back.

Pure: no socket, no clock. Whatever the bytes are, :func:`read_request` returns a request or raises
``RequestError``, in time and memory proportional to their number. Sources: "Open Inference
Protocol" and its "Binary tensor data extension" (kserve.github.io).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from reprlib import Repr
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
import torch
from torch import Tensor

from dni_runtime.errors import RequestError, SpecError
from dni_runtime.spec.edge import Preprocessing, TensorSpec
from dni_runtime.wire import holds


class _Datatype(NamedTuple):
    """A type of numbers."""

    name: str  # in the protocol
    dtype: torch.dtype
    code: str  # of ``array``, by which JSON's numbers are converted and checked


_DATATYPES = {
    "bool": _Datatype("BOOL", torch.bool, "B"),
    "uint8": _Datatype("UINT8", torch.uint8, "B"),
    "int8": _Datatype("INT8", torch.int8, "b"),
    "int16": _Datatype("INT16", torch.int16, "h"),
    "int32": _Datatype("INT32", torch.int32, "i"),
    "int64": _Datatype("INT64", torch.int64, "q"),
    "float16": _Datatype("FP16", torch.float16, "f"),
    "bfloat16": _Datatype("BF16", torch.bfloat16, "f"),
    "float32": _Datatype("FP32", torch.float32, "f"),
    "float64": _Datatype("FP64", torch.float64, "d"),
}
"""By torch's names."""

_CODES = {"b": torch.int8, "h": torch.int16, "i": torch.int32, "q": torch.int64}
_CODES |= {"B": torch.uint8, "f": torch.float32, "d": torch.float64}

_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxlist, _REPR.maxdict = 2, 60, 6, 3


@dataclass(frozen=True)
class Signature:
    """Names, shapes and types of a model's inputs and outputs: one sample of each.

    A tensor of a request or an answer has any number of samples (rows) as its first dimension.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    preprocessing: Preprocessing | None = None  # of the only input, if requests have raw samples

    def __post_init__(self) -> None:
        for name, spec in (*self.asked.items(), *self.inputs.items(), *self.outputs.items()):
            if spec.dtype not in _DATATYPES or 0 in spec.shape:
                raise SpecError(
                    f"requests over HTTP cannot carry {name!r}, which is {spec}",
                    hint=f"types: {', '.join(_DATATYPES)}; no dimension may be 0",
                )

    @classmethod
    def of(
        cls,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        names: Sequence[str] = (),  # of the inputs, if they have any
    ) -> Self:
        """Return a network's signature."""
        given = dict(zip(names, inputs, strict=True)) if names else _named("input", inputs)
        return cls(given, _named("output", outputs))

    @property
    def asked(self) -> Mapping[str, TensorSpec]:
        """What requests send as inputs."""
        if self.preprocessing is None:
            return self.inputs
        return dict.fromkeys(self.inputs, self.preprocessing.raw)

    def prepared(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the network's inputs for those of a request."""
        how = self.preprocessing
        if how is None:
            return inputs
        (x,), (spec,) = inputs, self.inputs.values()
        mean, std = (torch.tensor(values).reshape(how.places) for values in (how.mean, how.std))
        return (x.to(torch.float32).sub_(mean).div_(std).reshape(-1, *spec.shape),)

    def zeros(self) -> tuple[Tensor, ...]:
        """Return inputs of one row, of zeros."""
        return tuple(tensor.zero_() for tensor in empty(self.inputs, 1))

    def metadata(self) -> dict[str, Any]:
        """Return the inputs and outputs as the protocol describes them."""
        return {
            group: [
                {
                    "name": name,
                    "datatype": _DATATYPES[spec.dtype].name,
                    "shape": [
                        -1,
                        *(-1 if at in spec.varying else n for at, n in enumerate(spec.shape)),
                    ],
                }
                for name, spec in specs.items()
            ]
            for group, specs in (("inputs", self.asked), ("outputs", self.outputs))
        }


def _named(name: str, tensors: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    if len(tensors) == 1:
        return {name: tensors[0]}
    return {f"{name}_{number}": tensor for number, tensor in enumerate(tensors)}


class Request(NamedTuple):
    """A request to compute outputs."""

    id: str | None
    rows: int
    inputs: tuple[Tensor, ...]  # in the signature's order
    # Which outputs are requested, as positions in the signature, and whether as bytes.
    outputs: tuple[tuple[int, bool], ...]


def empty(specs: Mapping[str, TensorSpec], rows: int) -> tuple[Tensor, ...]:
    """Return a tensor of so many rows for each spec, to be filled."""
    return tuple(
        torch.empty((rows, *spec.shape), dtype=_DATATYPES[spec.dtype].dtype)
        for spec in specs.values()
    )


def read_request(
    body: bytes | bytearray, header_length: bytes | None, signature: Signature
) -> Request:
    """Return the request in a body; raises ``RequestError`` with status 400.

    The body is JSON, and after it the tensors that the request sends as bytes; ``header_length`` is
    the header ``Inference-Header-Content-Length``: bytes of the JSON.
    """
    end = len(body)
    if header_length is not None:
        if not (header_length.isdigit() and len(header_length) < 20 and int(header_length) <= end):
            raise _wrong(
                "Inference-Header-Content-Length",
                f"{_short(header_length.decode('latin-1'))} is not a length within the body, "
                f"which has {end} bytes",
            )
        end = int(header_length)
    data = memoryview(body)
    try:
        document = _object(orjson.loads(data[:end]), "the request")
    except orjson.JSONDecodeError as error:
        hint = "bytes of tensors after the JSON need the header Inference-Header-Content-Length"
        raise _wrong("the request", f"not valid JSON: {error}", hint) from None
    id, parameters = document.get("id"), _object(document.get("parameters", {}), "parameters")
    if id is not None and not isinstance(id, str):
        raise _wrong("id", f"{_short(id)} is not a string")

    tensors: dict[str, Tensor] = {}
    asked = signature.asked
    for number, item in enumerate(_list(document.get("inputs"), "inputs")):
        place = f"inputs[{number}]"
        entry = _object(item, place)
        name = _name(entry, asked, tensors, place)
        tensors[name], used = _tensor(entry, asked[name], data[end:], place)
        end += used
    if len(tensors) < len(signature.inputs):
        missing = ", ".join(repr(name) for name in signature.inputs if name not in tensors)
        raise _wrong("inputs", f"missing: {missing}")
    if end != len(body):
        raise _wrong(
            "the request",
            f"{len(body) - end} bytes follow that belong to no input",
            "an input sent as bytes has its size as parameters.binary_data_size",
        )
    inputs = tuple(tensors[name] for name in signature.inputs)
    rows = {len(tensor) for tensor in inputs}
    if len(rows) != 1:
        raise _wrong("inputs", f"they have different numbers of rows: {sorted(rows)}")
    pairs = zip(inputs, signature.inputs.values(), strict=True)
    lengths = {tensor.shape[at + 1] for tensor, spec in pairs for at in spec.varying}
    if len(lengths) > 1:
        raise _wrong("inputs", f"they have different lengths: {sorted(lengths)}")
    requested = _requested(document, parameters, signature)
    return Request(id, rows.pop(), signature.prepared(inputs), requested)


def write_response(
    request: Request,
    outputs: Sequence[Tensor],
    signature: Signature,
    fields: dict[str, Any],  # further ones of the response
) -> tuple[bytes, int | None]:
    """Return a response's body; and the length of its JSON if tensors follow that as bytes."""
    if request.id is not None:
        fields["id"] = request.id
    names, entries, tail = list(signature.outputs), [], []
    for position, binary in request.outputs:
        name, tensor = names[position], outputs[position]
        datatype = _DATATYPES[signature.outputs[name].dtype]
        entry: dict[str, Any] = {"name": name, "datatype": datatype.name}
        entry["shape"] = list(tensor.shape)
        if binary:
            tail.append(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            entry["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            values = _array(tensor)
            if tensor.is_floating_point() and not _finite(values):
                raise RequestError(
                    500,
                    "values are infinite or not a number, which JSON has no way to write",
                    place=f"output {name!r}",
                    hint='ask for its bytes: "parameters": {"binary_data": true}',
                )
            entry["data"] = values.ravel()
        entries.append(entry)
    fields["outputs"] = entries
    text = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([text, *tail]), len(text)) if tail else (text, None)


def _tensor(
    entry: dict[str, Any], spec: TensorSpec, data: memoryview, place: str
) -> tuple[Tensor, int]:
    """Return an input, and how many of the bytes after the JSON are its own."""
    datatype = _DATATYPES[spec.dtype]
    if entry.get("datatype") != datatype.name:
        text = f"{_short(entry.get('datatype'))} is not {datatype.name}"
        raise _wrong(f"{place}.datatype", text)
    shape = _list(entry.get("shape"), f"{place}.shape")
    whole = set(map(type, shape)) == {int}
    if not whole or not holds(spec.shape, spec.varying, shape[1:]) or shape[0] < 1:
        form = ", ".join(["rows", *spec.sizes])
        raise _wrong(
            f"{place}.shape",
            f"{_short(shape)} is not a shape of this input",
            f"it is [{form}], with at least one row",
        )
    count, parameters = prod(shape), _object(entry.get("parameters", {}), f"{place}.parameters")
    size = parameters.get("binary_data_size")
    if (size is None) == ("data" not in entry):
        raise _wrong(
            place,
            "its values are expected either as 'data' or as bytes after the JSON",
            "bytes have their size as parameters.binary_data_size",
        )
    if size is None:
        values = _from_numbers(entry["data"], shape, count, datatype, f"{place}.data")
        return values.view(shape), 0
    expected = count * datatype.dtype.itemsize
    if type(size) is not int or size != expected or not 0 < size <= len(data):
        raise _wrong(
            f"{place}.parameters.binary_data_size",
            f"{_short(size)}, but its values have {expected} bytes, and {len(data)} follow",
        )
    # A copy: a part of the body need not begin where numbers of this type may.
    values = torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8)
    if datatype.dtype == torch.bool:
        return values.ne(0).view(shape), size
    return values.view(datatype.dtype).view(shape), size


def _from_numbers(
    values: Any, shape: list[int], count: int, datatype: _Datatype, place: str
) -> Tensor:
    """Return JSON's numbers, which are in one list or in lists nested by the shape, in one row."""
    values = _list(values, place)
    if len(values) == shape[0] and type(values[0]) is list:
        for size in shape[1:]:
            if set(map(type, values)) != {list} or set(map(len, values)) != {size}:
                break
            values = list(chain.from_iterable(values))
    if len(values) != count:
        raise _wrong(place, f"its lists are not of the shape {_short(shape)}, nor one flat list")
    try:
        # Python's booleans are integers, which ``array`` takes for any type.
        types = set(map(type, values))
        if types != {bool} if datatype.dtype == torch.bool else bool in types:
            raise TypeError("true and false are booleans, numbers are not")
        tensor = torch.frombuffer(array(datatype.code, values), dtype=_CODES[datatype.code])
    except (TypeError, OverflowError) as error:
        raise _wrong(place, f"not all values are {datatype.name}: {error}") from None
    tensor = tensor.to(datatype.dtype)
    if datatype.code == "f" and not _finite(_array(tensor)):
        raise _wrong(place, f"a value is too large for {datatype.name}")
    return tensor


def _array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array; NumPy has no bfloat16."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all())  # torch's takes ten times as long


def _requested(
    document: dict[str, Any], parameters: dict[str, Any], signature: Signature
) -> tuple[tuple[int, bool], ...]:
    """Return which outputs are requested, and whether as bytes."""
    binary = _flag(parameters, "binary_data_output", False, "parameters")
    if not document.get("outputs"):
        return tuple((position, binary) for position in range(len(signature.outputs)))
    names = list(signature.outputs)
    positions: dict[str, tuple[int, bool]] = {}
    for number, item in enumerate(_list(document["outputs"], "outputs")):
        place = f"outputs[{number}]"
        entry = _object(item, place)
        name = _name(entry, signature.outputs, positions, place)
        own = _object(entry.get("parameters", {}), f"{place}.parameters")
        if own.get("classification"):
            raise _wrong(f"{place}.parameters", "'classification' is not supported")
        positions[name] = (names.index(name), _flag(own, "binary_data", binary, place))
    return tuple(positions.values())


def _name(
    entry: dict[str, Any], specs: Mapping[str, TensorSpec], before: Mapping[str, Any], place: str
) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or name not in specs:
        hint = f"names: {', '.join(specs)}"
        raise _wrong(f"{place}.name", f"the model has no {_short(name)}", hint)
    if name in before:
        raise _wrong(f"{place}.name", f"{name!r} is there twice")
    return name


def _flag(parameters: dict[str, Any], name: str, default: bool, place: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise _wrong(f"{place}.{name}", f"{_short(value)} is not true or false")
    return value


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(place, f"{_short(value)} is not a JSON object")
    return {key: item for key, item in value.items() if item is not None}  # as if absent


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(place, f"{_short(value)} is not a list")
    return value


def _wrong(place: str, message: str, hint: str | None = None) -> RequestError:
    return RequestError(400, message, place=place, hint=hint)


def _short(value: object) -> str:
    """Return a value as text for an error, cut off: it may be of any size and depth."""
    return _REPR.repr(value)
