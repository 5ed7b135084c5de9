"""Services as others see them: to start, find, and order about."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from dni_runtime.core.export import read_header
from dni_runtime.errors import UnavailableError, UsageError, WorkerError
from dni_runtime.files import create
from dni_runtime.run.lines import last_lines
from dni_runtime.run.record import Record
from dni_runtime.serving.documents import Order, ServiceState, Settings

_POLL_S = 0.1
_ANSWERS_S = 60.0  # that a service may take, beside what a new version and open requests may


def state_of(folder: Path) -> Path:
    """Return the file that says how a service is."""
    return folder / "service.json"


def order_of(folder: Path) -> Path:
    """Return the file that says what a service is to do."""
    return folder / "order.json"


def _is_callers(folder: Path) -> bool:
    """Whether a folder is the caller's own, and no link."""
    status = folder.lstat()
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)


def service_name(source: Path) -> str:
    """Return the default name of a service: that of the chain."""
    return read_header(source).chain if source.is_file() else Record.read(source).chain


def make_service(folder: Path, settings: Settings) -> None:
    """Make a service's folder; if it cannot be started with these settings, nothing is made."""
    check_folder(folder)
    from dni_runtime.api.answering import plan_deployment
    from dni_runtime.serving.server import check_server

    plan = plan_deployment("new", settings.source, settings.cut, folder, settings)
    if plan.run is not None:
        plan.run.check()
    check_server(settings.http)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.write(folder / "settings.json")


def check_folder(folder: Path) -> None:
    """Check that a service can have this folder, and that what it needs is installed."""
    for package in ("uvicorn", "httptools", "uvloop", "orjson"):
        if find_spec(package) is None:
            raise UnavailableError(
                f"{package} is not installed", hint="pip install 'dni-runtime[serve]'"
            )
    state = ServiceState.peek(state_of(folder))
    if state is not None and state.alive:
        raise UsageError(
            f"service {folder.name!r} runs at {state.url}",
            hint="change what it serves with --update, end it with --stop, or use another --name",
        )
    if folder.exists() and (state is None or not _is_callers(folder)):
        raise UsageError(f"{str(folder)!r} is no service of yours", hint="use another --name")


def start_service(folder: Path, settings: Settings) -> ServiceState:
    """Start a service in the background, and wait until it answers; return its state then."""
    make_service(folder, settings)
    log_file = folder / "service.log"
    with log_file.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dnictl", "service", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    while process.poll() is None:
        state = ServiceState.peek(state_of(folder))
        if state is not None and state.pid == process.pid and state.phase == "running":
            process.returncode = 0  # it is detached now: avoids a ResourceWarning
            return state
        time.sleep(_POLL_S)
    lines = last_lines(log_file)
    raise WorkerError("\n  | ".join([f"service {folder.name!r} did not start", *lines]))


def find_service(name: str | None, runs: Path) -> ServiceState:
    """Return the state of the service of this name, by default of the only one that runs."""
    if name is not None:
        state = ServiceState.peek(state_of(runs / name))
        if state is None:
            raise UsageError(f"there is no service {name!r} in {str(runs)!r}")
        return state
    paths = [path for path in sorted(runs.glob("*/service.json")) if _is_callers(path.parent)]
    states = [ServiceState.peek(path) for path in paths]
    active = [state for state in states if state is not None and state.alive]
    if len(active) != 1:
        names = ", ".join(state.name for state in active)
        raise UsageError(
            f"several services run in {str(runs)!r}"
            if active
            else f"no service runs in {str(runs)!r}",
            hint=f"name one: --name {names}" if active else "start one: dnictl serve RUN",
        )
    return active[0]


def give_order(folder: Path, order: Order) -> ServiceState:
    """Have a service do something, and wait until it has; return its state then."""
    state = ServiceState.peek(state_of(folder))
    if state is None or not state.alive:
        raise UsageError(f"service {folder.name!r} does not run", hint="dnictl serve RUN")
    settings = Settings.load(folder / "settings.json")
    if not create(order_of(folder), order.write):
        raise UsageError(
            f"service {folder.name!r} has not taken up the order before", hint="try again"
        )
    until_s = time.monotonic() + _ANSWERS_S
    until_s += 0.0 if settings is None else settings.ready_s + settings.drain_s
    while time.monotonic() < until_s:
        state = ServiceState.peek(state_of(folder)) or state
        if state.order == order.id and (order.what != "stop" or not state.alive):
            if state.error is not None:
                hint = None if order.what == "stop" else "what answered before still does"
                raise WorkerError(state.error, hint=hint)
            return state
        if not state.alive:
            how = state.error or ("it was stopped" if state.phase == "ended" else "killed")
            raise WorkerError(f"service {folder.name!r} has ended: {how}")
        time.sleep(_POLL_S)
    raise UsageError(f"service {folder.name!r}, process {state.pid}, does not answer")
