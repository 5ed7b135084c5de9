"""The server's HTTP application (ASGI): paths of the Open Inference Protocol, version 2.

Every request is answered, or fails at its deadline. Nothing of a request is written to logs.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic
from typing import Any

import orjson

from dni_runtime import __version__
from dni_runtime.errors import RequestError
from dni_runtime.run.documents.figures import families, page
from dni_runtime.serving.figures import RequestFigures
from dni_runtime.serving.protocol import read_request, write_response
from dni_runtime.serving.queue import Rates
from dni_runtime.serving.settings import Settings
from dni_runtime.serving.versions import Version, Versions

_logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Response = tuple[int, bytes, list[tuple[bytes, bytes]]]
"""Status, body and headers."""

_JSON = (b"content-type", b"application/json")
_BYTES = (b"content-type", b"application/octet-stream")
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_HEADER_LENGTH = b"inference-header-content-length"
_VERSION = "dni_runtime.version"
"""Where a request's scope has the version that answers it."""
CLIENT = "dni_runtime.client"
"""Where a request's scope has its client."""
_BODIES = 8
"""So many of the largest bodies are held at once while they are received."""


class _GoneError(Exception):
    """The client has closed its connection."""


class Client:
    """The client of a connection: its requests are answered one after the other."""

    whole = False  # all of the last request that has begun is received
    waits: asyncio.Future[None] | None = None  # for an answer that is being computed

    def leave(self) -> None:
        """End what is computed for it."""
        if self.waits is not None and not self.waits.done():
            self.waits.set_exception(_GoneError())


class App:
    def __init__(
        self,
        versions: Versions,
        settings: Settings,
        token: bytes | None,  # that requests must bear
        # families of figures of the versions' modules; it may take a while
        modules: Callable[[], list[list[str]]],
    ) -> None:
        self._modules = modules
        self.cut = 0  # requests that were not answered because the server stopped
        self._versions = versions
        self._settings = settings
        self._token = token
        self._requests: dict[str, RequestFigures] = {}  # by version; "" if it had none
        self._rates = None if settings.rate is None else Rates(settings.rate)
        self._receiving_bytes = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            raise ValueError("only HTTP is served")
        begin, path = monotonic(), scope["path"].split("/")[1:]
        try:
            status, body, headers = await self._respond(path, scope, receive)
        except _GoneError:
            self._count(path, scope, "gone", monotonic() - begin)
            return
        except RequestError as error:
            status, body, headers = _error(error)
        except asyncio.CancelledError:
            self.cut += 1
            status, body, headers = _error(RequestError(503, "the server has stopped"))
        except Exception as error:
            _logger.error("a request failed: %s", type(error).__name__)
            _logger.debug("a request failed", exc_info=True)
            status, body, headers = _error(RequestError(500, "the server has failed"))
        if status == 408:
            headers.append((b"connection", b"close"))
        headers.append((b"content-length", b"%d" % len(body)))
        self._count(path, scope, str(status), monotonic() - begin)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _respond(self, path: list[str], scope: Message, receive: Receive) -> Response:
        headers = dict(scope["headers"])
        health = path[:2] == ["v2", "health"]
        if not health:
            self._authorize(headers)
        posted = _asks(path)
        if scope["method"] not in (("POST",) if posted else ("GET", "HEAD")):
            raise RequestError(405, f"the method here is {'POST' if posted else 'GET'}")
        match path:
            case ["v2", "health", "live"]:
                return _json({"live": True})
            case ["v2", "health", "ready"]:
                return self._ready(self._versions.default)
            case ["v2"]:
                extensions = ["binary_tensor_data"]
                return _json(
                    {"name": "dni-runtime", "version": __version__, "extensions": extensions}
                )
            case ["metrics"]:
                modules = await asyncio.to_thread(self._modules)
                return (200, self._page(modules).encode(), [_TEXT])
            case ["v2", "models", self._settings.name, *rest]:
                name = None
                if len(rest) > 1 and rest[0] == "versions":
                    name, rest = rest[1], rest[2:]
                if rest == ["infer"]:
                    return await self._infer(name, scope, headers, receive)
                version = self._versions.default if name is None else self._versions[name]
                if rest == ["ready"]:
                    return self._ready(version)
                if not rest:
                    names = [version.name for version in self._versions]
                    about = {"name": self._settings.name, "versions": names, "platform": "pytorch"}
                    return _json(about | version.engine.signature.metadata())
        model = f"/v2/models/{self._settings.name}[/versions/VERSION]"
        hint = (
            f"/v2/health/live, /v2/health/ready, /v2, {model}[/ready], POST {model}/infer, /metrics"
        )
        raise RequestError(404, "there is nothing at this path", hint=f"paths: {hint}")

    def _authorize(self, headers: dict[bytes, bytes]) -> None:
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        right = self._token is None or hmac.compare_digest(sent, self._token)
        if not right or (self._token is not None and scheme.lower() != b"bearer"):
            hint = "send the header 'Authorization: Bearer TOKEN'"
            raise RequestError(401, "the token is missing or wrong", hint=hint)

    def _ready(self, version: Version) -> Response:
        if not version.ready:
            raise RequestError(503, f"version {version.name!r} is not ready: {version.problem}")
        return _json({"ready": True, "version": version.name})

    def _page(self, modules: list[list[str]]) -> str:
        model = {"model": self._settings.name}
        requests = [({**model, "version": name}, of) for name, of in self._requests.items()]
        versions = [({**model, "version": of.name}, of.observe()) for of in self._versions]
        return page([*families(requests), *families(versions), *modules])

    async def _infer(
        self, name: str | None, scope: Message, headers: dict[bytes, bytes], receive: Receive
    ) -> Response:
        if self._rates is not None:
            self._rates.admit(scope["client"][0], monotonic())
        client: Client = scope[CLIENT]
        content = await self._body(headers, receive, client.whole)
        # From here to the queue nothing is awaited: the versions stay as they are.
        version = self._versions.default if name is None else self._versions[name]
        scope[_VERSION], signature = version.name, version.engine.signature
        request = read_request(content, headers.get(_HEADER_LENGTH), signature)
        if name is None:
            version = self._versions.choose(request.id)  # it has the same signature
            scope[_VERSION] = version.name
        client.waits = asyncio.get_running_loop().create_future()
        try:
            job = await version.answer(request, client.waits)
        finally:
            client.waits = None
        fields: dict[str, Any] = {"model_name": self._settings.name, "model_version": version.name}
        exits, parameters = set(job.exits), dict[str, Any]()
        if len(exits) > 1:
            parameters["exit"] = ",".join(exit or "" for exit in job.exits)  # of each row
        elif exits != {None}:
            parameters["exit"] = job.exits[0]
        if job.degraded:
            parameters["degraded"] = True
        if parameters:
            fields["parameters"] = parameters
        body, length = write_response(request, job.outputs, signature, fields)
        if length is None:
            return (200, body, [_JSON])
        return (200, body, [_BYTES, (_HEADER_LENGTH, b"%d" % length)])

    def _count(self, path: list[str], scope: Message, status: str, duration_s: float) -> None:
        """Count a request for outputs."""
        if _asks(path):
            name = scope.get(_VERSION, "")
            if name not in self._requests:
                self._requests[name] = RequestFigures()
            figures = self._requests[name]
            figures.requests[status] = figures.requests.get(status, 0) + 1
            figures.request_s.add(duration_s)

    async def _body(
        self, headers: dict[bytes, bytes], receive: Receive, whole: bool
    ) -> bytes | bytearray:
        """Return a request's body, of which no more than the limit is held."""
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestError(415, "compressed requests are not supported")
        length = headers.get(b"content-length", b"0")
        if len(length) > 18 or int(length) > self._settings.max_body_bytes:
            raise self._too_large
        if whole:  # as usual: there is nothing to wait for
            return await self._received(receive)
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await self._received(receive)
        except TimeoutError:
            text = f"the request has not come within {self._settings.deadline_s:g} s"
            raise RequestError(408, text) from None

    async def _received(self, receive: Receive) -> bytes | bytearray:
        body, limit = bytearray(), self._settings.max_body_bytes
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _GoneError
                piece: bytes = message.get("body", b"")
                more: bool = message.get("more_body", False)
                if len(body) + len(piece) > limit:
                    raise self._too_large
                if not more and not body:
                    return piece
                body += piece
                self._receiving_bytes += len(piece)
                if self._receiving_bytes > _BODIES * limit:
                    raise RequestError(503, "too many large requests", retry_after_s=1)
                if not more:
                    return body
        finally:
            self._receiving_bytes -= len(body)

    @property
    def _too_large(self) -> RequestError:
        text = f"the body has more than {self._settings.max_body_bytes} bytes"
        return RequestError(413, text, hint="send fewer rows in a request")


def _asks(path: list[str]) -> bool:
    """Whether a request is one for outputs; a model or a version may have the name ``infer``."""
    return len(path) in (4, 6) and path[-1] == "infer"


def _json(document: dict[str, Any]) -> Response:
    return (200, orjson.dumps(document), [_JSON])


def _error(error: RequestError) -> Response:
    headers = [_JSON]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return (error.status, orjson.dumps({"error": str(error)}), headers)
