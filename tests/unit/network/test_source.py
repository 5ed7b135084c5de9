"""Networks that are built without memory for their numbers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from dni_runtime.errors import SpecError
from dni_runtime.network.source import without_memory


@pytest.mark.parametrize("more", [None, threading.Lock()], ids=["", "cannot be copied"])
def test_weights_stay_tied_if_a_constructor_needs_their_numbers(more: object) -> None:
    def build() -> nn.Sequential:
        if torch.empty(0).is_meta:
            raise SpecError("an orthogonal matrix is computed from numbers")
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight = tied[0].weight
        tied.more = more  # type: ignore[assignment]  # what a user may keep there
        return tied

    built = without_memory(build)
    assert all(p.is_meta for p in built.parameters())
    assert more or built[0].weight is built[1].weight
