"""A service's versions and orders, in this process: what is refused, and what is said of it."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import save_file
from torch import Tensor, nn

from dni_runtime.api.service import Service
from dni_runtime.api.services import give_order, make_service, state_of
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.export import export_model
from dni_runtime.errors import UsageError, WorkerError
from dni_runtime.serving.documents import Order, ServiceState, Settings, What
from dni_runtime.serving.settings import Settings as HttpSettings
from dni_runtime.spec import DataInfo
from dni_runtime.worker.checkpoint import copy_state
from tests.conftest import eventually
from tests.specs import float32, int64, specs_of


class Gated(nn.Linear):
    """Waits while its gate is closed."""

    made: ClassVar[list[Gated]] = []

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.gate = threading.Event()
        self.gate.set()
        self.made.append(self)

    def forward(self, x: Tensor) -> Tensor:
        self.gate.wait()
        return super().forward(x)


GATED = f"import: '{__name__}:Gated', args: {{in_features: 4, out_features: 4}}"
ALONE = "BatchNorm1d: {num_features: 4, track_running_stats: false}"


def exported(folder: Path, layer: str) -> Path:
    """Write a network of this layer and a linear one."""
    text = f"""\
name: net
modules:
  - {{name: a, layers: [{{{layer}}}], interface: exact}}
  - {{name: b, layers: [{{Linear: {{in_features: 4, out_features: 5}}}}]}}
"""
    workers = specs_of(text, DataInfo(sample=float32(4), label=int64(), classes=5))
    states = {}
    for step in LocalChain(workers).steps:
        states[step.spec.module] = folder / f"{step.spec.module}.safetensors"
        save_file(copy_state(step)[0], states[step.spec.module])
    export_model(workers, states, folder / "net.safetensors")
    return folder / "net.safetensors"


def service_of(folder: Path, source: Path, **fields: Any) -> Service:
    http = HttpSettings(name="net", port=0, probe_s=fields.pop("probe_s", 10.0))
    settings = Settings(source=source, trust=True, http=http, **fields)
    make_service(folder, settings)
    return Service(folder, settings, lambda text: None)


@contextmanager
def ordering(folder: Path, source: Path) -> Iterator[Any]:
    """Give what orders the service about, from another thread, once it runs; at last it stops."""
    with ThreadPoolExecutor(2) as pool:

        def order(what: What, **fields: Any) -> Future[ServiceState]:
            if what == "update":
                fields["source"] = source
            order = Order(id=secrets.token_hex(4), what=what, **fields)
            return pool.submit(give_order, folder, order)

        yield order


def state(folder: Path) -> ServiceState:
    found = ServiceState.peek(state_of(folder))
    assert found is not None
    return found


def run_beside(folder: Path, client: Any, **fields: Any) -> None:
    """Serve a gated network in this thread while ``client`` runs in another; then stop."""
    source = exported(folder.parent, GATED)
    service = service_of(folder, source, **fields)
    service._write()
    failures: list[BaseException] = []

    def ordered() -> None:
        try:
            with ordering(folder, source) as order:
                try:
                    eventually("it runs", lambda: state(folder).phase == "running", 30, 0.01)
                    client(order)
                finally:
                    for network in Gated.made:
                        network.gate.set()
                    with contextlib.suppress(UsageError):  # it has been stopped
                        order("stop").result()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=ordered)
    thread.start()
    service.serve()
    thread.join()
    if failures:
        raise failures[0]


def test_a_version_that_does_not_get_ready_says_why(tmp_path: Path) -> None:
    service = service_of(tmp_path / "net", exported(tmp_path, ALONE), ready_s=1.0)
    with pytest.raises(WorkerError, match=r"no answer in 1 s: .*the last probe failed: Expected"):
        service.serve()


def test_a_canary_that_is_not_ready_is_not_promoted(tmp_path: Path) -> None:
    """And is said not to be ready, until it is."""
    folder = tmp_path / "net"

    def client(order: Any) -> None:
        assert order("update", canary=50).result().error is None
        canary = Gated.made[-1]
        canary.gate.clear()
        eventually("it is noticed", lambda: state(folder).versions[1].error, 10, 0.01)
        assert "no batch has gone through" in str(state(folder).versions[1].error)
        with pytest.raises(WorkerError, match=r"(?s)version 2 is not ready: no batch.*--rollback"):
            order("promote").result()
        assert [one.share for one in state(folder).versions] == [50, 50]
        canary.gate.set()
        eventually("it is ready", lambda: state(folder).versions[1].error is None, 10, 0.01)
        order("promote").result()
        assert state(folder).versions[-1].share == 100

    run_beside(folder, client, probe_s=1.5, drain_s=1.0)


def test_an_order_during_which_the_service_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "net"

    def client(order: Any) -> None:
        hold = threading.Thread(target=close_next, args=(len(Gated.made),))
        hold.start()
        update = order("update")
        hold.join()
        eventually("it starts", lambda: len(state(folder).versions) == 2, 10, 0.01)
        order("stop").result()
        with pytest.raises(WorkerError, match="has ended: it was stopped"):
            update.result()

    run_beside(folder, client, drain_s=1.0)


def close_next(number: int) -> None:
    eventually("it is made", lambda: len(Gated.made) > number, 10, 0.001)
    Gated.made[-1].gate.clear()
