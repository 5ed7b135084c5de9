"""Small chains for the numerics."""

from collections.abc import Callable

import pytest

from dni_runtime.core.resolve import worker_specs
from dni_runtime.spec import DataInfo, TensorSpec, WorkerSpec, parse_chain

INFO = DataInfo(
    sample=TensorSpec(shape=(12,), dtype="float32"),
    label=TensorSpec(shape=(), dtype="int64"),
    classes=3,
)
CHAIN = """\
name: small
data: {batch_size: 16}
defaults: {interface: %s, optimizer: %s}
modules:
  - name: a
    layers: [{Linear: {in_features: 12, out_features: 8, bias: false}}, {BatchNorm1d: {num_features: 8}}, ReLU]
  - name: b
    layers: [{Linear: {in_features: 8, out_features: 8, bias: false}}, {BatchNorm1d: {num_features: 8}}, ReLU]
  - name: c
    layers: [{Linear: {in_features: 8, out_features: 3}}]
"""  # noqa: E501

Chain = Callable[..., tuple[WorkerSpec, ...]]


@pytest.fixture
def small() -> Chain:
    def make(
        interface: str = "exact", optimizer: str = "{Adam: {lr: 0.01}}"
    ) -> tuple[WorkerSpec, ...]:
        return worker_specs(parse_chain(CHAIN % (interface, optimizer)), INFO)

    return make
