"""The connection of an output end, with the reasons why its handshakes fail.

libzmq retries or gives up silently. After a permanent failure (another mechanism, a wrong key) it
does not reconnect (session_base.cpp, ``engine_error``): the owner of the socket must.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

import zmq

from dni_runtime.errors import EncryptionError
from dni_runtime.link import sockets
from dni_runtime.link.address import encrypted
from dni_runtime.link.contract import LinkContract
from dni_runtime.run.keys import Keyring
from dni_runtime.spec import LinksSpec

_LOOK_S = 1.0
_REDIAL_S = 1.0

_FAILED_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_OTHER_MECHANISM = 0x11000002  # zmq.h: ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why the newest handshake failed."""

    reason: str  # a word for counters
    message: str  # what the other end does
    final: bool  # libzmq will not retry by itself


class Dialer:
    """The connection of an output end; used by the thread that uses the socket."""

    def __init__(
        self,
        context: sockets.Context,
        socket: sockets.Socket,  # not yet connected
        contract: LinkContract,
        links: LinksSpec,
        keys: Keyring | None,  # for addresses that require encryption
    ) -> None:
        self.address: str | None = None  # of the module downstream; None before dial()
        # since the last successful handshake; a final one is replaced only by another final one
        self.failure: Failure | None = None
        self._socket = socket
        self._contract = contract
        self._links = links
        self._keys = keys
        self._server_key: bytes | None = None
        self._encrypted = False
        self._redial_s: float | None = None
        self._look_s = 0.0
        self._monitor = sockets.monitor(
            socket, context, _FAILED_AUTH | _FAILED_PROTOCOL | _FAILED | _SUCCEEDED
        )

    def dial(self, address: str, server_key: bytes | None = None) -> bool:
        """Start to connect to an address; disconnect from a previous one.

        Without ``server_key`` the keyring's is used. Returns whether the address or the key differs
        from before.
        """
        if (address, server_key) == (self.address, self._server_key):
            return False
        if self.address is not None:
            sockets.disconnect(self._socket, self.address)
            self.address = self.failure = self._redial_s = None
        self._dial(address, server_key)
        self.address, self._server_key = address, server_key
        return True

    def look(self, *, connected: bool) -> Failure | None:
        """Process monitor events without waiting, and redial if libzmq has given up.

        Returns the newest failure among these events. If the link is ``connected``, it looks once a
        second.
        """
        now_s = time.monotonic()
        if self.address is None or (connected and now_s < self._look_s):
            return None
        self._look_s = now_s + _LOOK_S
        newest: Failure | None = None
        while (event := sockets.next_event(self._monitor)) is not None:
            kind, value = event
            if kind == _SUCCEEDED:
                self.failure = newest = None
                continue
            failure = _failure(kind, value, self._encrypted)
            if failure is None:
                continue
            newest = failure
            if newest.final or self.failure is None:
                self.failure = newest
            if newest.final and self._redial_s is None:
                self._redial_s = now_s + _REDIAL_S
        if self._redial_s is not None and now_s >= self._redial_s:
            self.dial_again()
        return newest

    def dial_again(self) -> None:
        """Disconnect, and start to connect to the same address."""
        if self.address is not None:
            self._redial_s = None
            sockets.disconnect(self._socket, self.address)
            self._dial(self.address, self._server_key)

    def error(self, failure: Failure) -> EncryptionError:
        """Return the error that a failure means for the module."""
        source, target = self._contract.source, self._contract.target
        return EncryptionError(
            f"modules {source!r} and {target!r} cannot agree on encryption at {self.address}: "
            f"{failure.message}",
            hint="both must read the same run directory, with the keys of this run, and have the "
            "same 'links.security'",
        )

    def close(self) -> None:
        """Stop, before the socket is closed."""
        if not self._monitor.closed:
            self._socket.disable_monitor()
            self._monitor.close()

    def _dial(self, address: str, server_key: bytes | None) -> None:
        self._encrypted = encrypted(self._links, address)
        if not self._encrypted:
            sockets.leave_plain(self._socket)
        elif not self._encrypt(server_key):
            self.failure = Failure("encryption", "its public key is missing", final=True)
            self._redial_s = time.monotonic() + _REDIAL_S  # it may appear late
            return
        sockets.connect(self._socket, address)

    def _encrypt(self, server_key: bytes | None) -> bool:
        """Use the neighbour's key from now on; return False if it is not known."""
        if self._keys is None:
            return False
        key = server_key or self._keys.public(self._contract.target)
        if key is None:
            return False
        sockets.encrypt_output(self._socket, self._keys.pair, key)
        return True


def _failure(kind: int, value: int, encrypted: bool) -> Failure | None:
    """Return the encryption failure behind an event; None if it tells of none."""
    if kind == _FAILED_AUTH:
        return Failure("unauthorised", "it refused our key", final=True)
    if kind == _FAILED_PROTOCOL and value == _OTHER_MECHANISM:
        what = "it does not use encryption" if encrypted else "it requires encryption"
        return Failure("encryption", what, final=True)
    if kind == _FAILED_PROTOCOL:
        return Failure("encryption", "its answer does not match its public key", final=True)
    if value == errno.EAGAIN:
        return Failure("silent", "it does not answer", final=False) if encrypted else None
    what = "its key does not match its public key here, or it does not use encryption"
    why = what if encrypted else "it probably requires encryption"  # and was the first to notice
    return Failure("connection", f"it ended the handshake: {why}", final=False)
