"""Connecting to the neighbours: at the start, and when one of them has been restarted."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from dni_runtime.errors import EncryptionError, UnavailableError
from dni_runtime.keys import RunKeys
from dni_runtime.link import InputLink, OutputLink, encrypted
from dni_runtime.rundir import COMING, RunDir, peek_json, write_json
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.rendezvous import check_reachable, fresh_record

log = logging.getLogger(__name__)

CONNECT_SLICE_S = 3.0
"""Seconds between reads of the endpoint of a neighbour that does not answer."""

LOOK_S = 0.5
"""The same during training, while the neighbour is silent; a live link costs nothing."""

FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""Bounds of the pause between looks for a missing record: a tenth of the time so far."""

QUIET_S = 2.0
"""Silence after which a neighbour that should send something may have moved."""

_SUPERVISED_S = 60.0
"""A supervisor counts as alive if it wrote the run's state within this time."""

_GOING_S = 5.0


class Neighbours:
    """The two neighbours of a module, as the run directory shows them.

    Args:
        spec: The module.
        run: The run directory.
        address: Address of the module downstream, if not from its endpoint record.
        again: Whether only this module has been restarted, so that a neighbour may have finished.
        stop: Returns whether the worker should stop.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        run: RunDir,
        *,
        address: str | None,
        again: bool,
        stop: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._run = run
        self._address = address
        self._again = again
        self._stop = stop
        self._attempt: int | None = None
        self._look_at_s = 0.0
        self._updated: float | None = None
        self._updated_s = -math.inf

    def connect(self, output: OutputLink, input: InputLink | None) -> None:
        """Connect to the module downstream, which may start later, or on another host.

        The module upstream is answered meanwhile, so that errors only name a missing module.

        Raises:
            UnavailableError: It has not answered in time, and is not being restarted.
            EncryptionError: It has answered, but keys or encryption do not match.
            DataError: Its address or its key is not valid.
        """
        spec = self._spec
        assert spec.downstream is not None

        def interrupted() -> bool:
            if input is not None:
                input.greet()
            return self._stop()

        began_s = time.monotonic()
        until_s = began_s + spec.links.connect_timeout_s
        mistrust: EncryptionError | None = None
        while not interrupted():
            left_s = until_s - time.monotonic()
            address, key = self._find()
            if self.gone_for_good(spec.downstream):
                output.dismiss()
                return
            if left_s <= 0:
                if self.expected(spec.downstream):
                    until_s = time.monotonic() + _GOING_S
                    continue
                if mistrust is not None:
                    raise mistrust
                where = f"at {address}" if address else f"(no endpoint in {self._record()!r})"
                raise UnavailableError(
                    f"module {spec.downstream!r}, downstream of {spec.module!r}, did not answer "
                    f"{where} within {spec.links.connect_timeout_s:.0f} s",
                    hint=f"see its log with 'dnictl logs {spec.downstream}'",
                )
            if address is None:
                now_s = time.monotonic()
                pause_s = min(max((now_s - began_s) / 10, FIRST_LOOK_S), LAST_LOOK_S, left_s)
                while time.monotonic() < now_s + pause_s and not interrupted():
                    time.sleep(FIRST_LOOK_S)
                continue
            try:
                slice_s = min(CONNECT_SLICE_S, left_s)
                output.connect(address, deadline_s=slice_s, server_key=key, stop=interrupted)
            except EncryptionError as error:
                mistrust = error
                continue
            except UnavailableError:
                mistrust = None
                continue
            return

    def wait_for_upstream(self, input: InputLink) -> bool:
        """Wait until the module upstream has sent HELLO.

        Returns:
            False if it has finished and will not connect.

        Raises:
            UnavailableError: It has not connected in time, and is not being restarted.
            StoppedError: The worker was told to stop.
        """
        assert self._spec.upstream is not None
        left_s = self._spec.links.connect_timeout_s
        while True:
            slice_s = min(_GOING_S, left_s)
            left_s -= slice_s
            try:
                input.wait_for_peer(slice_s, self._stop)
            except UnavailableError:
                if self.gone_for_good(self._spec.upstream):
                    return False
                if left_s <= 0:
                    if not self.expected(self._spec.upstream):
                        raise
                    left_s = _GOING_S
                continue
            return True

    def look(self, output: OutputLink) -> None:
        """Reconnect to the module downstream where it has been restarted.

        Its record is read at most twice a second, and only while it is silent.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        if not output.lost and (not output.in_flight or now_s - output.heard_s < QUIET_S):
            return
        assert self._spec.downstream is not None
        if self.gone_for_good(self._spec.downstream):
            output.dismiss()
            return
        attempt = self._attempt
        address, key = self._find()
        if address is None:
            return
        moved = address != output.address
        if moved or (not output.connected and self._attempt != attempt):
            log.info("connecting to module %s at %s", self._spec.downstream, address)
            output.move(address, key)

    def gone_for_good(self, neighbour: str) -> bool:
        """Whether a neighbour of a restarted module has finished, and needs nothing more."""
        return self._again and peek_json(self._run.worker(neighbour)).get("state") == "finished"

    def remains(self, neighbour: str) -> bool:
        """Whether a neighbour that is out of reach still runs, by its report, or is restarted."""
        state = peek_json(self._run.worker(neighbour)).get("state", "failed")
        return state not in ("finished", "stopped", "failed") or self.expected(neighbour)

    def expected(self, neighbour: str) -> bool:
        """Whether a supervisor is restarting the neighbour."""
        state, now_s = peek_json(self._run.state), time.monotonic()
        if state.get("updated") != self._updated:  # its clock may differ from this host's
            self._updated, self._updated_s = state.get("updated"), now_s
        if now_s - self._updated_s > _SUPERVISED_S:
            return False
        module = (state.get("modules") or {}).get(neighbour) or {}
        return bool(module.get("restarts")) and module.get("state") in COMING

    def _record(self) -> str:
        return str(self._run.endpoint(str(self._spec.downstream)))

    def _find(self) -> tuple[str | None, bytes | None]:
        """Return the address and the key of the module downstream, as far as they are known."""
        if self._address is not None:
            return self._address, None
        record = fresh_record(Path(self._record()))
        if "address" not in record:
            return None, None
        check_reachable(str(self._spec.downstream), record)
        self._attempt = record.get("attempt")
        key = record.get("public_key")
        return str(record["address"]), None if key is None else str(key).encode()


def publish(run: RunDir, spec: WorkerSpec, attempt: int, address: str, keys: RunKeys) -> None:
    """Write the endpoint record, by which the module upstream finds this one."""
    public_key = keys.own.public.decode() if encrypted(spec.links, address) else None
    write_json(
        run.endpoint(spec.module),
        {
            "module": spec.module,
            "address": address,
            "public_key": public_key,
            "attempt": attempt,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
        },
    )


def withdraw(run: RunDir, spec: WorkerSpec, attempt: int) -> None:
    """Remove the record, unless a later attempt has published its own."""
    path = run.endpoint(spec.module)
    with contextlib.suppress(OSError):  # the file system is unavailable
        if fresh_record(path).get("attempt") == attempt:
            path.unlink(missing_ok=True)
