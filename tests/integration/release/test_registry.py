"""Registries: passwords, tokens, and what they say when they refuse.

A stand-in for a registry whose tokens come from another server, as those of Docker Hub and GitHub;
tests/e2e/test_release.py talks to a real one.
"""

from __future__ import annotations

import io
import json
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from dni_runtime.errors import ImageError, UnavailableError, UsageError
from dni_runtime.image.oci import MANIFEST, Descriptor, Layout
from dni_runtime.release.credentials import credentials
from dni_runtime.release.names import Address
from dni_runtime.release.registry import Repository
from dni_runtime.release.store import Store, _extract
from dnictl.main import main
from tests.conftest import eventually


def write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def test_docker_apptainer_and_podman_keep_them(tmp_path: Path) -> None:
    home, runtime = tmp_path / "home", tmp_path / "runtime"
    environ = {"HOME": str(home), "XDG_RUNTIME_DIR": str(runtime)}
    assert credentials("host", environ) is None
    write(runtime / "containers/auth.json", {"auths": {"host": {"auth": "podman"}}})
    assert credentials("host", environ) == "podman"
    write(home / ".apptainer/docker-config.json", {"auths": {"host": {"auth": "apptainer"}}})
    assert credentials("host", environ) == "apptainer"
    write(home / ".docker/config.json", {"auths": {"host": {"auth": "docker"}, "b": {}}})
    assert credentials("host", environ) == "docker"
    assert credentials("b", environ) is None
    assert credentials("host", {**environ, "DOCKER_CONFIG": str(tmp_path)}) == "apptainer"
    hub = {"auths": {"https://index.docker.io/v1/": {"auth": "hub"}}}
    write(home / ".docker/config.json", hub)
    assert credentials("docker.io", environ) == "hub"


def test_the_nearest_one_of_a_repository_counts(tmp_path: Path) -> None:
    """As ``podman login HOST/NAME`` keeps them; REGISTRY_AUTH_FILE comes before all."""
    auths = {"quay.io/team": "team", "quay.io/team/a": "nearest", "docker.io/me": "hub"}
    document = {"auths": {name: {"auth": auth} for name, auth in auths.items()}}
    write(tmp_path / "containers/auth.json", document)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/nowhere"}
    assert credentials("quay.io", environ, repository="team/a/b") == "nearest"
    assert credentials("quay.io", environ, repository="team/other") == "team"
    assert credentials("quay.io", environ, repository="teammate") is None
    assert credentials("index.docker.io", environ, repository="me/a") == "hub"
    write(tmp_path / "chosen.json", {"auths": {"quay.io": {"auth": "chosen"}}})
    environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "chosen.json")
    assert credentials("quay.io", environ, repository="team/a") == "chosen"


def test_podman_names_docker_hub_otherwise(tmp_path: Path) -> None:
    write(tmp_path / "containers/auth.json", {"auths": {"docker.io": {"auth": "podman"}}})
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/nowhere"}
    assert credentials("docker.io", environ, repository="me/a") == "podman"


def test_a_helper_is_asked(tmp_path: Path) -> None:
    helper = tmp_path / "docker-credential-vault"
    said = '{"Username": "me", "Secret": "%s"}'
    helper.write_text(f"#!/bin/sh\n[ $1 = get ] && printf '{said}' $(cat)\n")
    helper.chmod(0o755)
    write(tmp_path / "config.json", {"auths": None, "credHelpers": {"host": "vault"}})
    environ = {
        "DOCKER_CONFIG": str(tmp_path),
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    assert credentials("host", environ) == "bWU6aG9zdA=="  # me:host
    assert credentials("other", environ) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        credentials("host", {"DOCKER_CONFIG": str(tmp_path)})


class Registry(BaseHTTPRequestHandler):
    """Gives tokens to those who know the password, and names of releases to those with a token."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    elsewhere = ""

    def do_GET(self) -> None:
        url, given = urlsplit(self.path), self.headers.get("Authorization")
        self.asked.append((url.path, given))
        host = self.headers["Host"]
        if url.path == "/token":
            scope = parse_qs(url.query)["scope"]
            assert scope == ["repository:digits:pull"]
            self.answer(200, {"token": "t"} if given == "Basic bWU6c2VjcmV0" else {"token": "none"})
        elif url.path == "/v2/":
            self.answer(401, {})
        elif given != "Bearer t":
            said = f'Bearer realm="http://{host}/token",service="s",scope="repository:digits:pull"'
            self.answer(401, {}, {"WWW-Authenticate": said})
        elif url.path == "/v2/digits/tags/list" and "last" not in url.query:
            more = {"Link": '</v2/digits/tags/list?last=1&n=1>; rel="next"'}
            self.answer(200, {"tags": ["1"]}, more)
        elif url.path == "/v2/digits/tags/list":
            self.answer(200, {"tags": ["2"]})
        elif url.path.startswith("/v2/digits/blobs/"):
            self.answer(307, {}, {"Location": f"{self.elsewhere}/blob"})
        elif url.path == "/v2/digits/manifests/endless":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 20))
        else:
            self.answer(500, {"errors": [{"message": "the disk is full"}]})

    do_HEAD = do_GET

    def answer(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Refreshing(Registry):
    """Gives tokens to those who know the one of ``az acr login``, by OAuth2."""

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        known = {"grant_type": ["refresh_token"], "refresh_token": ["secret"], "service": ["s"]}
        asked = {"scope": ["repository:digits:pull"], "client_id": ["dnictl"]}
        right = self.path == "/token" and form == known | asked
        given = self.headers.get("Authorization")
        self.answer(200 if right and given is None else 401, {"access_token": "t"})


class Elsewhere(Registry):
    """Where a registry has its blobs; it would like to know the registry's password."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        realm = f'Bearer realm="http://{self.headers["Host"]}/token"'
        self.answer(401, {}, {"WWW-Authenticate": realm})


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    for name in ("DOCKER_CONFIG", "APPTAINER_CONFIGDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    # A registry's passwords are its own: nobody else's are sent there.
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login other password other")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    Registry.asked.clear()
    with serving(Registry) as host:
        yield Address(host, "digits")


@contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], tls: tuple[Path, Path] | None = None
) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_token_is_got_with_the_password_and_used_again(address: Address, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"auths": {address.host: {"auth": "bWU6c2VjcmV0"}}})
    repository = Repository(address)
    assert repository.tags() == ["1", "2"]
    used = [given for path, given in Registry.asked if path.startswith("/v2/digits")]
    assert used == [None, "Bearer t", "Bearer t"]
    assert [given for path, given in Registry.asked if path == "/token"] == ["Basic bWU6c2VjcmV0"]


@pytest.mark.parametrize("helper", [False, True])
def test_a_token_is_got_with_another_one(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: bool
) -> None:
    with serving(Refreshing) as host:
        entry = {"auth": "MDAwMDo=", "identitytoken": "secret"}
        write(tmp_path / "config.json", {"auths": {host: entry}})
        if helper:
            program = tmp_path / "docker-credential-vault"
            said = '{"Username": "<token>", "Secret": "secret"}'
            program.write_text(f"#!/bin/sh\necho '{said}'\n")
            program.chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
            write(tmp_path / "config.json", {"credsStore": "vault"})
        assert Repository(Address(host, "digits")).tags() == ["1", "2"]


class Proxy(Registry):
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        self.answer(200, {"tags": ["proxied"]})


def test_a_proxy_is_not_told_what_this_host_is_asked(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "config.json", {"auths": {address.host: {"auth": "bWU6c2VjcmV0"}}})
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(Proxy) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://{proxy}")
        assert Repository(address).tags() == ["1", "2"]
        assert Proxy.asked == []
        # Others are asked through it.
        there = Repository(Address("registry.example", "digits"), plain_http=True)
        assert there.tags() == ["proxied"]


class Hostile(Registry):
    def do_GET(self) -> None:
        self.answer(200, {"tags": ["1\x1b[2J"]})


class Page(Registry):
    """A web page, at all addresses."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(b"<html>Welcome")


def test_a_web_page_is_no_registry(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "oci").create()
    with serving(Page) as host:
        repository = Repository(Address(host, "digits"))
        with pytest.raises(UnavailableError, match="tags/list does not answer as a registry"):
            repository.tags()
        with pytest.raises(UnavailableError, match="as a registry: it sends 'text/html'"):
            repository.fetch_document(layout, "1")


class Whole(Registry):
    """Takes blobs by one request each, as registries may."""

    taken: ClassVar[dict[str, bytes]] = {}
    place: ClassVar[dict[str, str]] = {"Location": "/v2/digits/upload?a=b"}

    def do_HEAD(self) -> None:
        self.answer(404, {})

    def do_POST(self) -> None:
        self.answer(202, {}, self.place)

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(405, {})

    def do_PUT(self) -> None:
        digest = parse_qs(urlsplit(self.path).query)["digest"][0]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") is None:
            said = 'Basic realm="x"'
            return self.answer(401, {}, {"WWW-Authenticate": said})
        self.taken[digest] = content
        return self.answer(201, {})


def test_a_registry_that_takes_no_parts(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, moved = Layout(tmp_path / "oci").create(), list[int]()
    blob = layout.add(b"content", "text/plain")
    with serving(Whole) as host:
        write(tmp_path / "config.json", {"auths": {host: {"auth": "bWU6c2VjcmV0"}}})
        repository = Repository(Address(host, "digits"))
        repository.send(layout, blob, lambda blob, count: moved.append(count))
        assert Whole.taken == {blob.digest: b"content"}
        assert sum(moved) == blob.size
        monkeypatch.setattr(Whole, "place", {})
        with pytest.raises(UnavailableError, match="does not say where an upload goes"):
            repository.send(layout, blob)


def test_names_of_versions_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Hostile) as host, pytest.raises(SystemExit):
        main(["models", f"oci://{host}/digits"])
    assert capsys.readouterr().out == f"oci://{host}/digits:1\\u001b[2J\n"


def test_another_host_gets_no_password(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "config.json", {"auths": {address.host: {"auth": "bWU6c2VjcmV0"}}})
    layout = Layout(tmp_path / "oci").create()
    blob = Descriptor(media_type=MANIFEST, digest=f"sha256:{'0' * 64}", size=9)
    repository = Repository(address)
    with serving(Elsewhere) as host:
        monkeypatch.setattr(Registry, "elsewhere", f"http://{host}")
        with pytest.raises(UsageError, match="does not let you read"):
            repository.fetch(layout, blob)
    assert Elsewhere.asked == [("/blob", None)]
    repository._origin = "https://127.0.0.1/"
    with pytest.raises(ImageError, match="without TLS"):
        repository.fetch(layout, blob)


VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture
def unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says which proxies and certificates to use."""
    for name in (*VARIABLES, "PIP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text("[global]\ncert =\nproxy =\n")  # over those in /etc


@pytest.mark.usefixtures("unset")
def test_pips_proxy_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tags() -> list[str]:
        return Repository(Address("registry.example", "digits"), plain_http=True).tags()

    with serving(Proxy) as proxy, serving(Registry) as other:
        (tmp_path / "pip.conf").write_text(f"[global]\nproxy = http://{proxy}\n")
        assert tags() == ["proxied"]
        monkeypatch.setenv("no_proxy", "registry.example")
        with pytest.raises(UnavailableError, match="cannot be reached"):
            tags()
        monkeypatch.setenv("no_proxy", "elsewhere.example")
        assert tags() == ["proxied"]
        monkeypatch.setenv("PIP_PROXY", "http://127.0.0.1:1")
        with pytest.raises(UnavailableError, match="cannot be reached"):
            tags()
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        assert tags() == ["proxied"]
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("http_proxy", f"http://{other}")
        with pytest.raises(UsageError, match="does not let you read"):
            tags()


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("where", [*VARIABLES, "pip.conf"])
def test_a_private_authority_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tmp_path / "certificates"
    folder.mkdir()
    certificate, key = folder / "cert.pem", tmp_path / "key.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    argv += ["-nodes", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*argv, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    subprocess.run(["openssl", "rehash", folder], check=True)
    with serving(Proxy, (certificate, key)) as host:
        address = Address(host, "digits")
        with pytest.raises(UnavailableError, match=r"certificate .* is not trusted"):
            Repository(address).tags()
        if where == "pip.conf":
            (tmp_path / "pip.conf").write_text(f"[global]\ncert = {certificate}\n")
        else:
            monkeypatch.setenv(where, str(folder if where == "SSL_CERT_DIR" else certificate))
        if where == "PIP_CERT":
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(key))  # pip does not ask that one then
        assert Repository(address).tags() == ["proxied"]


def test_an_authority_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/nowhere")
    with pytest.raises(UsageError, match="PIP_CERT='/nowhere' is not there"):
        Repository(Address("host", "digits"))


@pytest.mark.parametrize("name", ["../run.json", "src/../../a", "/etc/a", "other", "src/sparse"])
def test_what_a_release_may_not_have(tmp_path: Path, name: str) -> None:
    entry, archive = tarfile.TarInfo(name), io.BytesIO()
    if name == "src/sparse":
        entry.type = tarfile.GNUTYPE_SPARSE
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as file:
        file.addfile(entry)
    with pytest.raises(ImageError, match="may not have"):
        _extract(archive.getvalue(), tmp_path / "run")
    assert not [*tmp_path.iterdir()]


def test_without_a_password_the_hint_says_how_to_give_one(address: Address) -> None:
    with pytest.raises(UsageError, match=r"does not let you read digits \(401\)") as caught:
        Repository(address).tags()
    assert f"docker login {address.host}" in str(caught.value.hint)
    assert {given for path, given in Registry.asked if path == "/token"} == {None}


def test_what_a_registry_says_is_passed_on(address: Address, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"auths": {address.host: {"auth": "bWU6c2VjcmV0"}}})
    with pytest.raises(UnavailableError, match=r"answers 500 to GET .*: the disk is full"):
        Repository(address).fetch_document(Layout(tmp_path / "oci").create(), "1")


def test_a_manifest_without_end_is_not_read_whole(address: Address, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"auths": {address.host: {"auth": "bWU6c2VjcmV0"}}})
    layout = Layout(tmp_path / "oci").create()
    with pytest.raises(ImageError, match="sent a manifest of more than"):
        Repository(address).fetch_document(layout, "endless")


def test_two_commands_do_not_change_the_store_at_once(tmp_path: Path) -> None:
    """Each reads the names, adds its own, and writes all: one of two would be lost."""
    store, told, order = Store(tmp_path), list[str](), list[str]()
    blob = store.layout.add(b"{}", MANIFEST)

    def name(text: str) -> None:
        with Store(tmp_path).changing(told.append):
            order.append(text)
            store.layout.name({text: blob})

    with store.changing(told.append):
        other = threading.Thread(target=name, args=["a:2"])
        other.start()
        eventually("it waits", lambda: told)
        order.append("a:1")
        store.layout.name({"a:1": blob})
    other.join()
    assert order == ["a:1", "a:2"]
    assert told == [f"waiting for another command that changes '{tmp_path}'"]
    assert set(store.releases()) == {"a:1", "a:2"}


def test_a_registry_that_is_not_there_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 cannot be reached"):
        Repository(Address("127.0.0.1:1", "digits")).tags()
