"""Where services are made, and which one is meant."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.api.answering import plan_deployment
from dni_runtime.api.run import Run
from dni_runtime.api.services import check_folder, find_service, give_order, order_of
from dni_runtime.errors import UsageError
from dni_runtime.run.documents.state import process_birth
from dni_runtime.run.record import Record
from dni_runtime.serving.documents import Order, ServiceState, Settings
from dni_runtime.serving.settings import Settings as HttpSettings


def service(folder: Path, *, runs: bool) -> Path:
    folder.mkdir()
    state = ServiceState(
        name=folder.name,
        phase="running" if runs else "ended",
        pid=os.getpid(),
        born=process_birth(os.getpid()),
        host=socket.gethostname(),
    )
    state.write(folder / "service.json")
    return folder


def test_only_a_folder_of_an_own_service_that_has_ended_is_used(tmp_path: Path) -> None:
    check_folder(service(tmp_path / "ended", runs=False))
    check_folder(tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "ended")
    (tmp_path / "other").mkdir()
    for name in ("link", "other"):
        with pytest.raises(UsageError, match="is no service of yours"):
            check_folder(tmp_path / name)
    with pytest.raises(UsageError, match="runs at"):
        check_folder(service(tmp_path / "running", runs=True))


def test_the_only_one_that_runs_is_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no service runs"):
        find_service(None, tmp_path)
    service(tmp_path / "ended", runs=False)
    service(tmp_path / "running", runs=True)
    assert find_service(None, tmp_path).name == "running"
    assert find_service("ended", tmp_path).name == "ended"
    service(tmp_path / "another", runs=True)
    with pytest.raises(UsageError, match="several services run") as caught:
        find_service(None, tmp_path)
    assert "another, running" in str(caught.value)


def test_an_order_does_not_replace_another_one(tmp_path: Path) -> None:
    folder = service(tmp_path / "running", runs=True)
    first = Order(id="first", what="update")
    first.write(order_of(folder))
    with pytest.raises(UsageError, match="has not taken up the order before"):
        give_order(folder, Order(id="second", what="rollback"))
    assert Order.load(order_of(folder)) == first


@pytest.mark.parametrize(
    "settings",
    [{"replicas": {"a": 2}}, {"hosts": "one"}, {"exit_accuracy": 1.0}, {"exit_confidence": 0.0}],
)
@pytest.mark.parametrize("exported", [False, True])
def test_one_process_has_nothing_of_modules(
    record: Record, tmp_path: Path, settings: dict[str, Any], exported: bool
) -> None:
    source = record.run.root
    if exported:
        source = tmp_path / "net.safetensors"
        source.touch()
    http = HttpSettings(name="x")
    its = Settings(source=source, in_process=not exported, http=http, **settings)
    with pytest.raises(UsageError, match=f"'{next(iter(settings))}' is for modules"):
        plan_deployment("1", source, 1, tmp_path, its)


def test_exits_have_one_rule(record: Record, tmp_path: Path) -> None:
    http, source = HttpSettings(name="x"), record.run.root
    its = Settings(source=source, http=http, exit_accuracy=1.0, exit_confidence=0.9)
    with pytest.raises(UsageError, match="'exit_accuracy' and 'exit_confidence' exclude"):
        plan_deployment("1", source, 1, tmp_path, its)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("My_Service", {}, "name: 'My_Service' is not a name of"),
        ("a", {"port": -1}, "port: -1 is not at least 0"),
        ("a", {"deadline_s": math.inf}, "deadline_s: inf is not a number"),
        ("a", {"exit_wait_s": "long"}, "exit_wait_s: 'long' is not a number"),
    ],
)
def test_settings_are_checked(
    record: Record, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Run(record).serve(name, cut=1, **settings)
