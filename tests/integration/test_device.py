"""The server with a device whose copies take their time, as those of a GPU do.

What is read from a tensor that no copy has brought stands for a wait: a GPU would have to finish
its work first.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dni_runtime.run.rundir import RunDir
from dni_runtime.wire import Mark
from dni_runtime.worker import metrics, server
from dni_runtime.worker.device import Copies, HostCopy
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.stream import Item, Position
from tests.integration.test_counted_work import Served, specs, stream
from tests.lines import read_lines

BATCHES = 12
COPY_S = 0.004


class LateFetched(HostCopy):
    """There only after a while."""

    def __init__(self, host: Tensor) -> None:
        super().__init__(host)
        self._at_s = time.monotonic() + COPY_S

    @property
    def here(self) -> bool:
        return time.monotonic() >= self._at_s

    def wait(self) -> Tensor:
        if not self.here and Reading.now():
            raise AssertionError("it waits for a copy")
        time.sleep(max(self._at_s - time.monotonic(), 0))
        return super().wait()


class Reading(TorchDispatchMode):
    """Code that must not wait for the device: it reads no number of a tensor."""

    _threads: ClassVar[set[int]] = set()

    @classmethod
    def now(cls) -> bool:
        return threading.get_ident() in cls._threads

    def __enter__(self) -> Reading:
        self._threads.add(threading.get_ident())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._threads.discard(threading.get_ident())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal"), f"{name} waits"
        return func(*args, **(kwargs or {}))


class LateCopies(Copies):
    def to_host(self, tensor: Tensor) -> HostCopy:
        return LateFetched(tensor)


@pytest.mark.parametrize("interface", ["exact", "delayed"])
def test_no_gradient_is_lost_and_none_follows_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str
) -> None:
    monkeypatch.setattr(server, "Copies", LateCopies)
    served = serve(tmp_path, interface)
    for module, step in served.steps.items():
        assert step.batches == BATCHES, module
        if module in served.outputs:
            assert step.counters.gradients == BATCHES, module
            assert step.counters.unpaired == step.counters.given_up == 0, module


def test_writing_metrics_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line appears once its means have come: each has those of its own batches."""
    monkeypatch.setattr(server, "Copies", LateCopies)
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.0)  # a line for each turn in which it has trained
    losses: list[float] = []
    late = 0
    write, count = MetricsWriter.write, MetricsWriter.count_loss

    def watched(meter: MetricsWriter, *given: Any) -> None:
        nonlocal late
        with Reading():
            write(meter, *given)
        late += bool(meter._lines)

    def counted(meter: MetricsWriter, loss: Tensor | None) -> None:
        if meter.spec.tail is not None and loss is not None:
            losses.append(float(loss))
        count(meter, loss)

    monkeypatch.setattr(MetricsWriter, "write", watched)
    monkeypatch.setattr(MetricsWriter, "count_loss", counted)
    serve(tmp_path, "mixed")
    lines = [one for one in read_lines(RunDir(tmp_path).metrics("c")) if one["kind"] == "train"]
    assert late > 0, "the lines were there before their copies"
    steps = [0, *(line["step"] for line in lines)]
    assert steps[-1] == BATCHES == len(losses)
    for line, first, last in zip(lines, steps, steps[1:], strict=False):
        mean = sum(losses[first:last]) / (last - first)
        assert line["loss"] == pytest.approx(mean, abs=1e-6)
    for module in "ab":
        found = list(read_lines(RunDir(tmp_path).metrics(module)))
        assert any(line.get("synthesizer_error") is not None for line in found), module


def serve(folder: Path, interface: str) -> Served:
    """Serve a chain of three modules until it ends."""
    samples = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    items = [
        *islice(stream([(samples, samples[:, :4].argmax(1))]), BATCHES),
        Item(1, Position(), mark=Mark.END),
    ]
    with ExitStack() as stack:
        served = Served(stack, folder, specs(interface, "float32"), iter(items))
        for step in served.steps.values():
            step.measure_late = True
        threads = [
            threading.Thread(target=one.serve, daemon=True) for one in served.servers.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return served
