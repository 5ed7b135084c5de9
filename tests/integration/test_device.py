"""The server with a device whose copies take their time, as those of a GPU do."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dni_runtime.wire import Mark
from dni_runtime.worker import server
from dni_runtime.worker.device import Copies, Fetched
from dni_runtime.worker.stream import Item, Position
from tests.integration.test_counted_work import Served, specs, stream

BATCHES = 12
COPY_S = 0.004


class LateFetched(Fetched):
    """There only after a while."""

    def __init__(self, host: Tensor) -> None:
        super().__init__(host)
        self._at_s = time.monotonic() + COPY_S

    @property
    def here(self) -> bool:
        return time.monotonic() >= self._at_s

    def wait(self) -> Tensor:
        time.sleep(max(self._at_s - time.monotonic(), 0))
        return super().wait()


class LateCopies(Copies):
    def to_host(self, tensor: Tensor) -> Fetched:
        return LateFetched(tensor)


@pytest.mark.parametrize("interface", ["exact", "delayed"])
def test_no_gradient_is_lost_and_none_follows_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str
) -> None:
    monkeypatch.setattr(server, "Copies", LateCopies)
    samples = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    items = [
        *islice(stream([(samples, samples[:, :4].argmax(1))]), BATCHES),
        Item(1, Position(), mark=Mark.END),
    ]
    with ExitStack() as stack:
        served = Served(stack, tmp_path, specs(interface, "float32"), iter(items))
        threads = [
            threading.Thread(target=one.serve, daemon=True) for one in served.servers.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        for module, step in served.steps.items():
            assert step.batches == BATCHES, module
            if module in served.outputs:
                assert step.counters.gradients == BATCHES, module
                assert step.counters.unpaired == step.counters.given_up == 0, module
