"""The server: the application on a socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from math import ceil
from typing import Any, ParamSpec, TypeVar, cast

import httptools
import orjson
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.serving.app import CLIENT, App, Client
from dni_runtime.serving.settings import Settings
from dni_runtime.serving.versions import Versions

T = TypeVar("T")
P = ParamSpec("P")

_KEEP_ALIVE_S = 75
"""A connection without requests is closed then: later than load balancers close theirs (60 s)."""
_LAST_S = 1.0
"""So long a connection without a request stays when the server stops: one may be on its way."""
_HEADERS_S = 10.0
_HEADERS_BYTES = 64 << 10
_ESTABLISHED = b"\1"
"""A connection that neither end has closed: its state, the first byte of TCP_INFO (tcp(7))."""


def serve(settings: Settings, modules: Callable[[], list[list[str]]] = list) -> Server:
    """Return a server that accepts requests; it has no versions yet.

    ``modules`` returns the families of figures of their modules, for ``/metrics``. Raises
    ``UsageError`` if the settings cannot be carried out, ``UnavailableError`` if the port is used.
    """
    server = _made(settings, modules)
    try:
        server.start()
    except BaseException:
        server.discard()
        raise
    return server


def check_server(settings: Settings) -> None:
    """Raise what :func:`serve` would raise; nothing listens afterwards."""
    _made(settings, list).discard()


def _made(settings: Settings, modules: Callable[[], list[list[str]]]) -> Server:
    token, host = settings.token(), settings.host
    both = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not both:  # a host without IPv6
        host = "0.0.0.0"
    try:
        listener = socket.create_server(
            (host, settings.port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=2048,
            dualstack_ipv6=both,
        )
    except OSError as error:
        where = f"{host}:{settings.port}"
        text = f"cannot listen at {where}: {error.strerror or error}"
        raise UnavailableError(text, hint="choose another port, or 0 for any") from None
    try:
        return Server(settings, listener, token, modules)
    except BaseException:
        listener.close()
        raise


class Server:
    """A server that runs."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        token: bytes | None,
        modules: Callable[[], list[list[str]]],
    ) -> None:
        self.versions = Versions(settings)  # to be used in :meth:`call`
        host, self.port = listener.getsockname()[:2]
        scheme = "http" if settings.tls_cert is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._listener = listener
        self._app = App(self.versions, settings, token, modules)
        config = uvicorn.Config(
            self._app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # else it writes a line for each request that is not HTTP
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            files = f"{str(settings.tls_cert)!r} and {str(settings.tls_key)!r}"
            raise UsageError(f"the TLS files {files} cannot be used: {error}") from None
        self._uvicorn = _Uvicorn(config)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._loop = uvloop.new_event_loop()

    def start(self) -> None:
        """Accept requests."""
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise UnavailableError(f"the server at {self.url} has not started")
            time.sleep(0.01)

    def discard(self) -> None:
        """Close what a server has that does not run."""
        self._listener.close()
        self._loop.close()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, such as a method of ``versions``, in the server's thread."""

        async def called() -> T:
            return function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    def remove(self, name: str, timeout_s: float) -> bool:
        """Stop a version when it has answered what it has; what takes longer fails (503).

        Returns whether all was answered. It must get no requests that name no version
        (``UsageError``).
        """
        removal = self.versions.remove(name, timeout_s)
        return asyncio.run_coroutine_threadsafe(removal, self._loop).result()

    def stop(self, drain_s: float) -> bool:
        """Answer what has come, and stop; what takes longer than ``drain_s`` fails (503).

        Returns whether all was answered.
        """
        self._uvicorn.config.timeout_graceful_shutdown = ceil(drain_s)
        self._uvicorn.should_exit = True
        self._thread.join()
        return not self._app.cut

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                # libuv takes one connection of each listener in a round of the loop: with one,
                # those of clients that have gone would be a queue of seconds.
                listeners = [self._listener, *(self._listener.dup() for _ in range(7))]
                runner.run(self._uvicorn.serve(sockets=listeners))
            finally:
                self.versions.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn's, which by itself resets, when it stops, clients that have just connected."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        accepting = select.poll()
        for listener in sockets or []:
            accepting.register(listener, select.POLLIN)
        end = time.monotonic() + _LAST_S
        while accepting.poll(0) and time.monotonic() < end:
            await asyncio.sleep(0.001)
        await super().shutdown(sockets)


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which by itself waits for headers without end, and takes any number of them.

    It waits without end, too, for what still comes of a request that was answered, and takes the
    body of a request that offers another protocol (``Upgrade``) for that protocol's.

    When the server stops, it closes connections whose next request may be on its way; here such
    a request is still answered, as the connection's last.
    """

    _last = False
    _deadline: asyncio.TimerHandle | None = None  # of what is being received beside bodies
    _received_bytes: int | None = None  # of headers, after the read that they began in
    _read, _again = 0, b""  # bytes up to an offer of another protocol; the request without it
    _first = True  # no request has come yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._client = Client()
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)
        self._client.leave()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CLIENT] = self._client
        self._client.whole = False
        self._received_bytes = 0

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()
        if self._last and not self._offers:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        self._last = True
        self.loop.call_later(_LAST_S if self._answered else 0, super().shutdown)

    @property
    def _offers(self) -> bool:
        """Whether the request offers another protocol, which is nothing that this server speaks."""
        return self.parser.should_upgrade() and self._should_upgrade()

    def _should_upgrade(self) -> bool:
        return b"upgrade" in dict(self.headers)

    def handle_websocket_upgrade(self) -> None:
        # This parser reads no body any more: another one reads the request, without the offer.
        (self._read,) = cast(httptools.HttpParserUpgrade, sys.exception()).args
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._again = b"\r\n".join([*lines, b"", b""])
        self.parser = httptools.HttpRequestParser(self)

    def on_message_complete(self) -> None:
        if self._offers:
            return
        self._client.whole = True
        # The loop has not yet been told if the client has gone since it connected; while the
        # server is overloaded that is so for many, whose requests need not be read.
        if self._first:
            self._first = False
            client = self.transport.get_extra_info("socket")
            if client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != _ESTABLISHED:
                self.cycle.disconnected = True
        super().on_message_complete()
        if not self.pipeline:  # it may be paused, but shall notice that the client goes
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        begun, rest = self._received_bytes is not None, data
        while rest:
            self._read, self._again = len(rest), b""
            super().data_received(rest)
            rest = self._again + rest[self._read :]
        if begun and self._received_bytes is not None:
            self._received_bytes += len(data)
            if self._received_bytes > _HEADERS_BYTES:
                self._refuse(431, f"the headers have more than {_HEADERS_BYTES} bytes")
        if not self._client.whole and (self._answered or self._received_bytes is not None):
            self._begin()
        elif self._answered:
            self._end()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _answered(self) -> bool:
        """Whether all that has begun is answered."""
        return self.cycle is None or self.cycle.response_complete

    def _begin(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(_HEADERS_S, self._late)

    def _late(self) -> None:
        self._deadline = None
        if not self._answered:  # headers of the next request, beside one that is being computed
            self._begin()
        elif self._received_bytes is not None:
            self._refuse(408, f"the headers have not come within {_HEADERS_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str) -> None:
        """End the connection; say why, unless another request's answer has to come first."""
        if self._answered:
            body = orjson.dumps({"error": text})
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            last = b"connection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head + last + body)
        self.transport.close()

    def _end(self) -> None:
        self._received_bytes = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
