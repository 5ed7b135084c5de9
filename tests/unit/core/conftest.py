"""Small chains for the numerics."""

from collections.abc import Callable

import pytest

from dni_runtime.spec import DataInfo, WorkerSpec
from tests.specs import float32, int64, specs_of

INFO = DataInfo(sample=float32(12), label=int64(), classes=3)
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
        return specs_of(CHAIN % (interface, optimizer), INFO)

    return make
