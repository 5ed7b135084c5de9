"""Raw samples of requests become what the training's samples were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dni_runtime.data import open_data
from dni_runtime.serving.protocol import Signature, read_request
from dni_runtime.spec import DataSpec, Preprocessing, TensorSpec


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 5), (6,)])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_as_in_the_training(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], normalize: bool, flatten: bool
) -> None:
    rng = np.random.default_rng(3)
    x = (255 * rng.random((40, *shape))).astype(dtype)
    y = np.zeros(40, np.int64)
    np.savez(tmp_path / "some.npz", x_train=x[:30], y_train=y[:30], x_eval=x[30:], y_eval=y[30:])
    spec = DataSpec(
        dataset="npz", path="some.npz", batch_size=10, normalize=normalize, flatten=flatten
    )
    source = open_data(spec, tmp_path, seed=0)
    how = source.splits["train"].preprocessing()
    if dtype == "float32" and not normalize:
        assert how is None
        return
    assert how is not None
    how = Preprocessing.model_validate_json(how.model_dump_json())
    signature = Signature({"input": source.info.sample}, {"output": source.info.sample}, how)
    (described,) = signature.metadata()["inputs"]
    datatype = {"uint8": "UINT8", "float32": "FP32"}[dtype]
    assert described == {"name": "input", "datatype": datatype, "shape": [-1, *shape]}
    data = {"name": "input", "datatype": datatype, "shape": [10, *shape], "data": x[30:].tolist()}
    request = read_request(json.dumps({"inputs": [data]}).encode(), None, signature)
    ((wanted, _),) = source.eval_batches()
    torch.testing.assert_close(request.inputs, (wanted,), atol=0, rtol=0)
    assert [one.dtype for one in signature.zeros()] == [torch.float32], "the network's"


def test_tokens_have_none(tmp_path: Path) -> None:
    x, y = np.zeros((8, 3), np.int32), np.zeros(8, np.int64)
    np.savez(tmp_path / "some.npz", x_train=x, y_train=y, x_eval=x, y_eval=y)
    source = open_data(DataSpec(dataset="npz", path="some.npz", batch_size=4), tmp_path, seed=0)
    assert source.splits["train"].preprocessing() is None


def test_signatures_with_and_without_differ() -> None:
    spec = TensorSpec(shape=(2,), dtype="float32")
    raw = Preprocessing(raw=spec.model_copy(update={"dtype": "uint8"}), mean=(0.0,), std=(255.0,))
    plain = Signature({"input": spec}, {"output": spec})
    assert str(plain) != str(Signature({"input": spec}, {"output": spec}, raw))
