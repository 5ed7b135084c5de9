"""Releases in an OCI registry: what is missing is sent or fetched, and goes on after a failure.

Source: github.com/opencontainers/distribution-spec 1.1; distribution.github.io, "Token
authentication" and "OAuth2 token authentication".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

from dni_runtime.errors import ImageError, UnavailableError, UsageError
from dni_runtime.image.oci import INDEX, MANIFEST, MOST_DOCUMENT_BYTES, Descriptor, Layout
from dni_runtime.release.credentials import TOKEN, credentials
from dni_runtime.release.names import HUB, HUB_NAMES, Address
from dni_runtime.release.network import authorities, pip_settings

try:
    import requests
    from requests.utils import parse_dict_header, select_proxy, should_bypass_proxies
except ModuleNotFoundError:
    raise UnavailableError(
        "requests is not installed", hint="pip install 'dni-runtime[registry]'"
    ) from None

_CHUNK_BYTES = 16 << 20
"""Of an upload. One that is cut off goes on after the last whole part; a registry that has kept a
piece of the next one may want that blob anew (docker-registry does)."""

_NO_PARTS = (404, 405, 415)
"""Answers to the first part of an upload by a registry that takes blobs as a whole only."""

_TIMEOUT_S = (20.0, 120.0)  # to connect; for each answer
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")

Progress = Callable[[Descriptor, int], None]
"""Is told of each part of a blob that has been moved, by its bytes."""


def _silent(blob: Descriptor, count: int) -> None:
    pass


class _Session(requests.Session):
    def __init__(self) -> None:
        super().__init__()
        pip = pip_settings()
        self._proxy = os.environ.get("PIP_PROXY") or pip.get("proxy")
        self._authorities = authorities(pip.get("cert"))

    def rebuild_auth(
        self, prepared_request: requests.PreparedRequest, response: requests.Response
    ) -> None:
        """Another host, to which a registry sends us, gets no password, also none of ~/.netrc."""
        if self.should_strip_auth(str(response.request.url), str(prepared_request.url)):
            prepared_request.headers.pop("Authorization", None)

    def send(self, request: requests.PreparedRequest, **how: Any) -> requests.Response:
        """Ask this host itself, as Docker and Apptainer do: a proxy's "localhost" is another."""
        url = str(request.url)
        if _LOOPBACK.fullmatch(urlsplit(url).netloc):
            how["proxies"] = {}
        elif not (select_proxy(url, how.get("proxies")) or should_bypass_proxies(url, None)):
            how["proxies"] = {} if self._proxy is None else {"all": self._proxy}
        how["verify"] = self._authorities  # else variables of requests come before pip's
        return super().send(request, **how)


class Repository:
    def __init__(self, address: Address, *, plain_http: bool = False) -> None:
        self.address = address
        self._session = _Session()
        self._token: str | None = None
        local = _LOOPBACK.fullmatch(address.host) is not None
        self._schemes = ("http",) if plain_http else ("https", "http") if local else ("https",)
        self._host = HUB if address.host in HUB_NAMES else address.host.lower()
        self._origin = self._base = ""

    def fetch_document(self, layout: Layout, reference: str) -> Descriptor | None:
        """Fetch a manifest or an index by a tag or a digest; None if there is none."""
        headers = {"Accept": f"{INDEX}, {MANIFEST}"}
        answer = self._ask(
            "GET", f"manifests/{reference}", headers=headers, missing=(404,), stream=True
        )
        if answer is None:
            return None
        content = b""
        with answer, self._naming_failures():
            for chunk in answer.iter_content(1 << 16):
                content += chunk
                if len(content) > MOST_DOCUMENT_BYTES:
                    raise ImageError(
                        f"{self.address.host} sent a manifest of more than {MOST_DOCUMENT_BYTES} "
                        f"bytes as {reference}"
                    )
        media_type = answer.headers.get("Content-Type", "").split(";")[0]
        if not media_type.startswith("application/vnd."):
            raise _strange(answer, f"it sends {media_type or 'no type'!r}")
        blob = layout.add(content, media_type)
        if reference.startswith("sha256:") and blob.digest != reference:
            raise ImageError(f"{self.address.host} sent another manifest than {reference}")
        return blob

    def tags(self) -> list[str]:
        found: list[str] = []
        path: str | None = "tags/list?n=1000"
        while path is not None:
            answer = self._ask("GET", path, missing=(404,))
            if answer is None:
                break
            found += _object(answer).get("tags") or []
            following = answer.links.get("next")
            path = None if following is None else urljoin(answer.url, following["url"])
        return found

    def fetch(self, layout: Layout, blob: Descriptor, progress: Progress = _silent) -> None:
        """Fetch a blob, from where an earlier try was cut off; check its digest."""
        if layout.has(blob):
            return
        partial = layout.root / f"{blob.digest.removeprefix('sha256:')}.part"
        sha256, size = hashlib.sha256(), 0
        with partial.open("a+b") as file:
            file.seek(0)
            while chunk := file.read(1 << 20):
                sha256.update(chunk)
                size += len(chunk)
            headers = {"Range": f"bytes={size}-"} if size else {}
            if size < blob.size:
                answer = self._ask("GET", f"blobs/{blob.digest}", headers=headers, stream=True)
                assert answer is not None
                with answer, self._naming_failures():
                    if size and answer.status_code != 206:
                        file.truncate(0)
                        sha256, size = hashlib.sha256(), 0
                    for chunk in answer.iter_content(1 << 20):
                        size += len(chunk)
                        if size > blob.size:
                            break
                        sha256.update(chunk)
                        file.write(chunk)
                        progress(blob, len(chunk))
        if size != blob.size or f"sha256:{sha256.hexdigest()}" != blob.digest:
            if size >= blob.size:
                partial.unlink()
            raise ImageError(
                f"{self.address.host} sent {size} bytes that are not {blob.digest}",
                hint="try again; if it stays so, the registry's copy is damaged",
            )
        layout.take(partial, blob)

    def send(
        self,
        layout: Layout,
        blob: Descriptor,
        progress: Progress = _silent,
        *,
        file: Path | None = None,  # that has its content; by default the layout's
    ) -> None:
        """Send a blob, unless it is there, from where an earlier try was cut off."""
        if self._ask("HEAD", f"blobs/{blob.digest}", missing=(404,)) is not None:
            return
        key = f"{self.address.host}/{self.address.repository}/{blob.digest}"
        note = layout.root / f"{hashlib.sha256(key.encode()).hexdigest()}.upload"
        url, sent = self._begun(note)
        rest: BinaryIO | bytes = b""
        with (file or layout.path(blob.digest)).open("rb") as content:
            content.seek(sent)
            progress(blob, sent)
            while chunk := content.read(_CHUNK_BYTES):
                headers = {
                    "Content-Type": "application/octet-stream",
                    "Content-Range": f"{sent}-{sent + len(chunk) - 1}",
                }
                refused = () if sent else _NO_PARTS
                answer = self._ask("PATCH", url, data=chunk, headers=headers, missing=refused)
                if answer is None:
                    url, rest = self._new_upload(), content
                    break
                url, sent = _location(answer), sent + len(chunk)
                note.write_text(url)
                progress(blob, len(chunk))
            end = f"{url}{'&' if '?' in url else '?'}digest={blob.digest}"
            self._ask("PUT", end, data=rest, headers={"Content-Type": "application/octet-stream"})
            progress(blob, blob.size - sent)
        note.unlink(missing_ok=True)

    def send_document(self, layout: Layout, blob: Descriptor, reference: str) -> None:
        """Send a manifest or an index, and name it."""
        headers = {"Content-Type": blob.media_type}
        self._ask("PUT", f"manifests/{reference}", data=layout.read(blob), headers=headers)

    def _begun(self, note: Path) -> tuple[str, int]:
        """Return where an upload goes on, and after how many bytes."""
        if note.is_file():
            # A registry that does not know the upload any more says so in one way or another.
            answer = self._ask("GET", note.read_text(), missing=(400, 404, 405, 416))
            if answer is not None and answer.status_code == 204:
                last = answer.headers.get("Range", "0-0").rpartition("-")[2]
                url = urljoin(answer.url, answer.headers.get("Location", answer.url))
                if last.isdecimal():
                    return url, int(last) + 1 if int(last) else 0
        return self._new_upload(), 0

    def _new_upload(self) -> str:
        answer = self._ask("POST", "blobs/uploads/", data=b"")
        assert answer is not None
        return _location(answer)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        data: BinaryIO | bytes | None = None,
        headers: Mapping[str, str] = {},
        stream: bool = False,
        missing: Container[int] = (),  # None with these statuses
    ) -> requests.Response | None:
        with self._naming_failures():
            if not self._base:
                self._origin = self._root()
                self._base = f"{self._origin}v2/{self.address.repository}/"
            url = path if path.startswith("http") else f"{self._base}{path}"
            self._check_secure(url)
            for _ in range(2):
                if data is not None and not isinstance(data, bytes):
                    data.seek(0)
                answer = self._session.request(
                    method, url, data=data, headers=headers, stream=stream,
                    auth=self._authorize, timeout=_TIMEOUT_S,
                )  # fmt: skip
                self._check_secure(answer.url)
                if answer.status_code >= 400:
                    _ = answer.content  # which gives the connection back
                if answer.status_code != 401 or not self._log_in(answer):
                    break
        if answer.status_code in missing:
            return None
        if answer.status_code in (401, 403):
            verb = "read" if method in ("GET", "HEAD") else "write to"
            raise UsageError(
                f"{self.address.host} does not let you {verb} {self.address.repository} "
                f"({answer.status_code})",
                hint=f"apptainer registry login docker://{self.address.host}, or docker login "
                f"{self.address.host}",
            )
        if answer.status_code >= 400:
            raise UnavailableError(
                f"{self.address.host} answers {answer.status_code} to {method} {path}: "
                f"{_said(answer)}"
            )
        return answer

    def _root(self) -> str:
        """Return the registry's address, by the first scheme that is answered."""
        *others, last = self._schemes
        for scheme in others:
            try:
                self._session.get(f"{scheme}://{self._host}/v2/", timeout=_TIMEOUT_S)
                last = scheme
                break
            except requests.ConnectionError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise
        return f"{last}://{self._host}/"

    def _check_secure(self, url: str) -> None:
        """Refuse to leave HTTPS, to which a registry may send its clients."""
        if self._origin.startswith("https:") and not url.startswith("https:"):
            raise ImageError(f"{self.address.host} wants {url!r} to be used, without TLS")

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except requests.exceptions.SSLError as error:
            raise UnavailableError(
                f"the certificate of {self.address.host} is not trusted: {error}",
                hint="name your site's authority with SSL_CERT_FILE",
            ) from error
        except requests.RequestException as error:
            raise UnavailableError(
                f"{self.address.host} cannot be reached, or was cut off: {error}",
                hint="the same command goes on where it was",
            ) from error

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Add what was agreed with this registry; without it, requests would read ~/.netrc."""
        if self._token is not None and str(request.url).startswith(self._origin):
            request.headers["Authorization"] = self._token
        return request

    def _log_in(self, answer: requests.Response) -> bool:
        """Get what the registry asks for; return whether to try again.

        Another host, to which it has sent us, gets nothing.
        """
        if not answer.url.startswith(self._origin):
            return False
        scheme, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        address, before = self.address, self._token
        known = credentials(address.host, repository=address.repository) or ""
        if scheme.lower() == "basic" and known and not known.startswith(TOKEN):
            self._token = f"Basic {known}"
        elif scheme.lower() == "bearer":
            asked = parse_dict_header(rest)
            realm = asked.get("realm") or ""
            query = {key: asked[key] for key in ("service", "scope") if key in asked}
            if not (realm.startswith("https://") or self._origin.startswith("http://")):
                known = ""
            if known.startswith(TOKEN):
                form = query | {"grant_type": "refresh_token", "client_id": "dnictl"}
                form["refresh_token"] = known.removeprefix(TOKEN)
                how: dict[str, Any] = {"method": "POST", "data": form, "allow_redirects": False}
            else:
                headers = {"Authorization": f"Basic {known}"} if known else {}
                how = {"method": "GET", "params": query, "headers": headers}
            given = self._session.request(
                url=realm, auth=lambda same: same, timeout=_TIMEOUT_S, **how
            )
            if given.ok:
                document = _object(given)
                self._token = f"Bearer {document.get('token') or document.get('access_token')}"
        return self._token not in (None, before)


def _location(answer: requests.Response) -> str:
    if "Location" not in answer.headers:
        raise _strange(answer, "it does not say where an upload goes")
    return urljoin(answer.url, answer.headers["Location"])


def _object(answer: requests.Response) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(document := answer.json(), dict):
            return document
    raise _strange(answer, "it sends no JSON object")


def _strange(answer: requests.Response, why: str) -> UnavailableError:
    return UnavailableError(
        f"{answer.url.partition('?')[0]} does not answer as a registry: {why}",
        hint="is the address that of a registry, and not of its web pages?",
    )


def _said(answer: requests.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        return str(answer.json()["errors"][0]["message"])
    return answer.reason
