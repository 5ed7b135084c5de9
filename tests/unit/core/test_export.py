"""Taking a chain home: the whole network from its modules' checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dni_runtime import load
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.export import export_model
from dni_runtime.core.resolve import worker_specs
from dni_runtime.spec import DataInfo, TensorSpec, parse_chain
from dni_runtime.worker.checkpoint import snapshot


class Tied(nn.Module):
    """A word's vector on the way in is its map on the way out; part of it is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("first", self.words.weight.detach()[:2])

    def forward(self, x: Tensor) -> Tensor:
        p: Tensor = self.out(self.words(x))
        return p


CHAIN = f"""\
name: tied
modules:
  - {{name: a, layers: [{{import: '{__name__}:Tied'}}], interface: exact}}
  - {{name: b, layers: [{{Linear: {{in_features: 5, out_features: 5}}}}]}}
"""
INFO = DataInfo(
    sample=TensorSpec(shape=(4,), dtype="int64"),
    label=TensorSpec(shape=(4,), dtype="int64"),
    classes=5,
)


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_tied_weights_come_back(tmp_path: Path, ending: str) -> None:
    workers = worker_specs(parse_chain(CHAIN), INFO)
    chain = LocalChain(workers)
    x, y = torch.randint(0, 5, (8, 4)), torch.randint(0, 5, (8, 4))
    chain.train_batch(x, y)
    states = {}
    for step in chain.steps:
        states[step.spec.module] = tmp_path / f"{step.spec.module}.safetensors"
        save_file(snapshot(step)[0], states[step.spec.module])
    output = tmp_path / f"net.{ending}"
    export_model(workers, states, output)
    model = load(output)
    assert torch.equal(model(x), chain.predict(x))
    if ending == "safetensors":
        tied = model.get_submodule("a.0")
        assert isinstance(tied, Tied)
        assert tied.out.weight is tied.words.weight
        expected = chain.steps[0].layers.state_dict()
        for key, value in model.get_submodule("a").state_dict().items():
            assert torch.equal(value, expected[key])
