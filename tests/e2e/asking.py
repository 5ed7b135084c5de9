"""What a service answers to the client that most people use, beside the exported network.

Also a program, on a node: ``python -m tests.e2e.asking SERVICE.json FILE``.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dni_runtime
from tests.e2e.conftest import missing

ROWS = 5


def drawn(datatype: str, shape: list[int]) -> Tensor:
    """Return random values of an input."""
    if datatype == "INT64":
        return torch.randint(0, 4, shape)
    assert datatype == "FP32"
    return torch.randn(shape)


def compare(url: str, name: str, file: Path, headers: dict[str, str] | None = None) -> None:
    """Ask as clients do, in both encodings; the answers are the network's."""
    if find_spec("tritonclient") is None:
        missing("the package tritonclient is not installed")
    import tritonclient.http as client

    network = dni_runtime.load(file, trust=True)
    server = client.InferenceServerClient(url.removeprefix("http://"), network_timeout=40)
    assert server.is_server_live(headers)
    assert server.is_model_ready(name, headers=headers)
    described = server.get_model_metadata(name, headers=headers)
    names = [tensor["name"] for tensor in described["inputs"]]
    kinds = [tensor["datatype"] for tensor in described["inputs"]]
    xs = [
        drawn(kind, [ROWS, *tensor["shape"][1:]])
        for kind, tensor in zip(kinds, described["inputs"], strict=True)
    ]
    with torch.no_grad():
        y = network(*xs)
    (output,) = described["outputs"]
    assert output["shape"] == [-1, *y.shape[1:]]
    for binary in (True, False):
        shapes = [[*x.shape] for x in xs]
        inputs = [client.InferInput(*about) for about in zip(names, shapes, kinds, strict=True)]
        for tensor, x in zip(inputs, xs, strict=True):
            tensor.set_data_from_numpy(x.numpy(), binary_data=binary)
        wanted = client.InferRequestedOutput(output["name"], binary_data=binary)
        sent = dict(headers or {})  # the client adds its own
        answered = server.infer(name, inputs, outputs=[wanted], headers=sent)
        answer = answered.as_numpy(output["name"])
        torch.testing.assert_close(torch.tensor(answer), y, atol=1e-5, rtol=1e-5)
    server.close()


def ask_one(url: str, name: str, x: np.ndarray) -> Any:
    """Return the only output for the only input, of the type that the server names."""
    if find_spec("tritonclient") is None:
        missing("the package tritonclient is not installed")
    import tritonclient.http as client

    server = client.InferenceServerClient(url.removeprefix("http://"), network_timeout=40)
    (about,), (output,) = (server.get_model_metadata(name)[key] for key in ("inputs", "outputs"))
    assert about["shape"] == [-1, *x.shape[1:]]
    tensor = client.InferInput(about["name"], [*x.shape], about["datatype"])
    tensor.set_data_from_numpy(x)
    answer = server.infer(name, [tensor]).as_numpy(output["name"])
    server.close()
    return answer


if __name__ == "__main__":
    service, file = map(Path, sys.argv[1:])
    state = json.loads(service.read_text())
    compare(state["url"], state["name"], file)
