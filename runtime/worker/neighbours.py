"""Connecting to the neighbours: at the start, and when one of them has been restarted."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dni_runtime.errors import EncryptionError, UnansweredError, UnavailableError
from dni_runtime.link import InputLink, OutputLink, encrypted
from dni_runtime.link.address import is_loopback
from dni_runtime.run.documents.reports import ENDED, Endpoint, Report
from dni_runtime.run.documents.state import COMING, RunState
from dni_runtime.run.keys import Keyring
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.worker.exchange import Exchange
from dni_runtime.worker.join import Join


def fresh_endpoint(path: Path) -> Endpoint:
    """Read a record as it is now; return an empty one if there is none that can be read.

    A shared file system may cache for seconds that a file is missing (nfs(5), "lookupcache"):
    opening the folder makes it revalidate that, opening the file makes it revalidate the content
    ("close-to-open"). The folder is not read: with a thousand modules it is long.
    """
    try:
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return Endpoint()
    return Endpoint.read(path)


def check_reachable(address: str, record: Endpoint) -> None:
    """Refuse an address that only another host can reach: loopback, or a socket in its files."""
    here = socket.gethostname()
    if record.host not in (None, here) and _stays_on_its_host(address):
        raise UnavailableError(
            f"module {record.module!r} is on {record.host} and listens on {address}, which other "
            f"hosts cannot reach; this is {here}",
            hint="set 'links.interface' to a network interface that all hosts have "
            "(and 'transport: tcp')",
        )


def _stays_on_its_host(address: str) -> bool:
    return address.startswith(("ipc://", "tcp://localhost:")) or is_loopback(address)


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
    """The neighbours of a module, as the run directory shows them."""

    def __init__(
        self,
        spec: WorkerSpec,
        run: RunDir,
        *,
        address: str | None,  # of the module downstream, if not from its endpoint record
        restarted: bool,  # only this module has been restarted: a neighbour may have finished
        stop: Callable[[], bool],
        sockets: str = "",  # folder of the run's ipc sockets, as this process sees it
        since: int = 0,  # first attempt of this start: endpoints of earlier ones may lack links
        keys: Keyring | None = None,
    ) -> None:
        self._keys, self._mistrusted = keys, dict[str, bytes]()
        self._since, self._sockets = since, sockets
        self._spec = spec
        self._run = run
        self._address = address
        self._restarted = restarted
        self._stop = stop
        self._attempts: dict[int, int] = {}  # by the link's number
        self._look_at_s: dict[int, float] = {}
        self._updated: float | None = None
        self._updated_s = -math.inf
        self.callers: list[Join | Exchange] = []  # links that others open, answered during waits

    def connect(self, output: OutputLink) -> None:
        """Connect to a module downstream, which may start later, or on another host.

        Callers are answered meanwhile, those that are restarted, too: errors only name a missing
        module.
        """
        spec, target = self._spec, output.target

        def interrupted() -> bool:
            for caller in self.callers:
                caller.listen()
            return self._stop()

        began_s = time.monotonic()
        until_s = began_s + spec.links.connect_timeout_s
        mistrust: EncryptionError | None = None
        while not interrupted():
            left_s = until_s - time.monotonic()
            address, key = self._find(output)
            if self.gone_for_good(target):
                output.dismiss()
                return
            if left_s <= 0:
                if self.expected(target):
                    until_s = time.monotonic() + _GOING_S
                    continue
                if mistrust is not None:
                    raise mistrust
                record = str(self._run.endpoint(target))
                where = f"at {address}" if address else f"(no endpoint in {record!r})"
                raise UnansweredError(
                    f"module {target!r}, downstream of {spec.module!r}, did not answer "
                    f"{where} within {spec.links.connect_timeout_s:.0f} s",
                    hint=f"see its log with 'dnictl logs {target}'",
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

    def wait_for_upstream(self, input: Join) -> bool:
        """Wait until all modules upstream have sent HELLO.

        Returns False if one has finished and will not connect.
        """

        return all([self._wait_for(link) for link in input.links])

    def _interrupted(self) -> bool:
        for caller in self.callers:
            # Who is known already may ask again, as its answer was lost. A module that is restarted
            # takes nothing before it knows where it goes on.
            (caller.greet if self._restarted else caller.listen)()
        return self._stop()

    def _wait_for(self, input: InputLink) -> bool:
        left_s = self._spec.links.connect_timeout_s
        while True:
            slice_s = min(_GOING_S, left_s)
            left_s -= slice_s
            try:
                input.wait_for_peer(slice_s, self._interrupted)
            except UnavailableError:
                if self.gone_for_good(input.source):
                    return False
                if left_s <= 0:
                    if not self.expected(input.source):
                        raise
                    left_s = _GOING_S
                continue
            return True

    def look(self, output: OutputLink) -> None:
        """Reconnect to a module downstream that has been restarted.

        Its record is read at most twice a second, and only while it is silent.
        """
        now_s, target = time.monotonic(), output.target
        if now_s < self._look_at_s.get(output.number, 0.0):
            return
        self._look_at_s[output.number] = now_s + LOOK_S
        if not output.lost and (not output.in_flight or now_s - output.heard_s < QUIET_S):
            return
        if self.gone_for_good(target):
            output.dismiss()
            return
        attempt = self._attempts.get(output.number)
        address, key = self._find(output)
        if address is None:
            return
        moved = address != output.address
        if moved or (not output.connected and self._attempts.get(output.number) != attempt):
            log.info("connecting to module %s at %s", target, address)
            output.move(address, key)

    def gone_for_good(self, neighbour: str) -> bool:
        """Whether this module was restarted, and a neighbour has finished."""
        return self._restarted and Report.read(self._run.worker(neighbour)).state == "finished"

    def remains(self, neighbour: str) -> bool:
        """Whether a neighbour that is out of reach still runs, by its report, or is restarted."""
        report = Report.read(self._run.worker(neighbour))
        return bool(report and report.state not in ENDED) or self.expected(neighbour)

    def expected(self, neighbour: str) -> bool:
        """Whether a supervisor is restarting the neighbour, or one that it may wait for itself."""
        state, now_s = RunState.peek(self._run.state) or RunState(modules={}), time.monotonic()
        if state.updated != self._updated:  # its clock may differ from this host's
            self._updated, self._updated_s = state.updated, now_s
        if now_s - self._updated_s > _SUPERVISED_S:
            return False
        coming = {name for name, module in state.modules.items() if module.state in COMING}
        return neighbour in coming and any(state.modules[name].restarts for name in coming)

    def _find(self, output: OutputLink) -> tuple[str | None, bytes | None]:
        """Return where a link leads, and the key of the module there, as far as they are known."""
        if self._address is not None:
            return self._address, None
        record = fresh_endpoint(self._run.endpoint(output.target))
        address = record.further.get(str(output.number), record.address)
        if address is None or record.attempt < self._since:
            return None, None
        key = None if record.public_key is None else record.public_key.encode()
        if key is not None and not self._trusts(output.target, key):
            return None, None
        address = self._as_seen_here(address)
        check_reachable(address, record)
        self._attempts[output.number] = record.attempt
        return address, key

    def _trusts(self, target: str, key: bytes) -> bool:
        """Whether a record's key is the one in the keyring, if that has one.

        Other modules can write records; a shared file system may show one of both late.
        """
        known = None if self._keys is None else self._keys.public(target)
        if known in (None, key):
            return True
        if self._mistrusted.get(target) != key:
            self._mistrusted[target] = key
            log.warning(
                "the endpoint record of %s is not used: its key is not the module's", target
            )
        return False

    def _as_seen_here(self, address: str) -> str:
        """Return the address of a socket whose folder has another path in a container, or here."""
        here = Path(self._sockets) / address.rpartition("/")[2]
        ours = address.startswith("ipc:") and self._sockets and here.is_socket()
        return f"ipc://{here}" if ours else address


def publish(
    run: RunDir, spec: WorkerSpec, attempt: int, addresses: Mapping[str, str], keys: Keyring
) -> None:
    """Write the endpoint record, by which the modules upstream find this one.

    ``addresses``: where it listens for what comes on each link, by its number; the first one first.
    """
    address, *_ = addresses.values()
    Endpoint(
        module=spec.module,
        address=address,
        further=dict(list(addresses.items())[1:]),
        public_key=keys.pair.public.decode() if encrypted(spec.links, address) else None,
        attempt=attempt,
        pid=os.getpid(),
        host=socket.gethostname(),
        time=time.time(),
    ).write(run.endpoint(spec.module))


def withdraw(run: RunDir, spec: WorkerSpec, attempt: int) -> None:
    """Remove the record, unless a later attempt has published its own."""
    path = run.endpoint(spec.module)
    with contextlib.suppress(OSError):  # the file system is unavailable
        if fresh_endpoint(path).attempt == attempt:
            path.unlink(missing_ok=True)
