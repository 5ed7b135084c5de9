"""A server on a socket: clients of others, clients that leave, failures, health, versions."""

from __future__ import annotations

import json
import random
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from torch import Tensor, nn

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.serving import server as server_module
from dni_runtime.serving.engine import Answer, InProcess
from dni_runtime.serving.protocol import Signature
from dni_runtime.serving.server import Server, serve
from dni_runtime.serving.settings import Settings
from dni_runtime.spec import TensorSpec
from tests.conftest import eventually
from tests.e2e.conftest import need
from tests.specs import float32

ONE = Signature({"x": float32(2)}, {"y": float32(2)})
INFER = "/v2/models/model/infer"
READY = "/v2/health/ready"
_TICKS_S = 0.2  # uvicorn looks every 0.1 s whether it shall stop
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # httpx makes one for each client, which takes long


class Network(nn.Module):
    """Adds a number to its input; waits while its gate is closed, fails for negative values."""

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.number = number
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.gate.wait()
        self.batches.append(len(x))
        if bool((x < 0).any()):
            raise ValueError("a negative value")
        return x + self.number


Start = Callable[..., Server]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers of networks, as versions 1, 2, …; at the end they are stopped."""
    with ExitStack() as stack:

        def make(*networks: nn.Module, signature: Signature = ONE, **fields: Any) -> Server:
            engines = {str(n): InProcess(net, signature) for n, net in enumerate(networks, 1)}
            settings = Settings(**{"port": 0, "deadline_s": 20, "probe_s": 60, **fields})
            server = serve(settings)
            stack.callback(server.stop, 0)
            for name, engine in engines.items():
                server.call(server.versions.add, name, engine)
            for network in networks:
                if isinstance(network, Network):
                    stack.callback(network.gate.set)
            return server

        yield make


@pytest.fixture
def network() -> Network:
    return Network()


def request_of(*rows: Sequence[float], **fields: Any) -> dict[str, Any]:
    shape = [len(rows), len(rows[0])]
    return {"inputs": [{"name": "x", "shape": shape, "datatype": "FP32", "data": rows}], **fields}


def ask(server: Server, *rows: Sequence[float], path: str = INFER, **fields: Any) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=30, verify=TLS) as client:
        return client.post(path, json=request_of(*(rows or [(0.0, 0.0)]), **fields))


def get(server: Server, path: str = READY) -> httpx.Response:
    return httpx.get(server.url + path, timeout=30, verify=TLS)


def wait_ready(server: Server, name: str, within_s: float) -> None:
    version = server.call(server.versions.__getitem__, name)
    eventually(f"version {name} is ready", lambda: version.ready, within_s, 0.01)


def raw(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    try:
        connection.sendall(data)
    except OSError:
        connection.close()
        raise
    return connection


def posted(document: dict[str, Any], *, length: int | None = None) -> bytes:
    body = json.dumps(document).encode()
    size = len(body) if length is None else length
    return f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode() + body


def figure(server: Server, line: str) -> float:
    (value,) = (
        row.rpartition(" ")[2]
        for row in get(server, "/metrics").text.splitlines()
        if row.rpartition(" ")[0] == line
    )
    return float(value)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(torch.cat([x, self.embedding(word)], dim=1))
        return y, y.argmax(dim=1)


@pytest.mark.parametrize("binary", [False, True])
def test_a_client_of_others_gets_what_the_network_computes(binary: bool, start: Start) -> None:
    word = TensorSpec(shape=(), dtype="int64")
    signature = Signature({"x": float32(3), "word": word}, {"y": float32(5), "best": word})
    network = TwoInputs().eval()
    server = start(network, signature=signature, name="two")
    wait_ready(server, "1", 10)
    client = triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=8)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("two")
    assert client.is_model_ready("two", "1")
    assert [tensor["name"] for tensor in client.get_model_metadata("two")["inputs"]] == [
        "x",
        "word",
    ]

    def asked(rows: int) -> float:
        x, word = torch.randn(rows, 3), torch.randint(10, (rows,))
        inputs = [
            triton.InferInput("x", [rows, 3], "FP32"),
            triton.InferInput("word", [rows], "INT64"),
        ]
        for tensor, values in zip(inputs, (x, word), strict=True):
            tensor.set_data_from_numpy(values.numpy(), binary_data=binary)
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("best", "y")]
        result = client.infer("two", inputs, request_id=str(rows), outputs=outputs)
        with torch.no_grad():
            y, best = network(x, word)
        assert result.get_response()["id"] == str(rows)
        assert np.array_equal(result.as_numpy("best"), best.numpy())
        return float(np.abs(result.as_numpy("y") - y.numpy()).max())

    assert max(map(asked, (1, 2, 63, 64, 65, 300))) < 1e-5
    with pytest.raises(triton.InferenceServerException, match="at least one row"):
        client.infer("two", [triton.InferInput("x", [0, 3], "FP32")])
    client.close()


def test_what_queues_while_a_batch_is_computed_is_the_next(network: Network, start: Start) -> None:
    server = start(network, max_batch=16)
    wait_ready(server, "1", 10)
    network.gate.clear()
    network.batches.clear()
    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(ask, server)
        version = server.call(server.versions.__getitem__, "1")
        eventually("the first is computed", lambda: not version.engine.room(), every_s=0.01)
        others = [pool.submit(ask, server, *[(n, 0)] * 4) for n in range(9)]
        eventually("36 rows wait", lambda: version.observe().waiting_rows == 36, every_s=0.01)
        network.gate.set()
        assert first.result().status_code == 200
        for n, other in enumerate(others):
            (output,) = other.result().json()["outputs"]
            assert output["data"] == [n + 1, 1] * 4
    assert network.batches == [1, 16, 16, 4]
    assert figure(server, 'dni_requests_total{model="model",version="1",status="200"}') == 10


def test_a_poisoned_request_fails_alone(network: Network, start: Start) -> None:
    server = start(network)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            values = [-1.0 if n == 3 else float(n) for n in range(8)]
            answers = list(pool.map(lambda value: ask(server, (value, 0)), values))
            assert [answer.status_code for answer in answers] == [200] * 3 + [500] + [200] * 4
            assert answers[3].json() == {"error": "the model failed: ValueError: a negative value"}


def test_clients_that_leave(network: Network, start: Start) -> None:
    server = start(network, max_batch=4)
    wait_ready(server, "1", 10)
    version = server.call(server.versions.__getitem__, "1")
    network.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        connections = [raw(server, posted(request_of((n, 0)))) for n in range(40)]
        eventually("they are there", lambda: version.observe().waiting_rows >= 36, every_s=0.01)
        stays = pool.submit(ask, server, (5.0, 0))
        eventually("it is there", lambda: version.observe().waiting_rows >= 37, every_s=0.01)
        for connection in connections:
            connection.close()
        eventually("they have left", lambda: version.observe().waiting_rows <= 1, every_s=0.01)
        network.batches.clear()
        network.gate.set()
        assert stays.result().json()["outputs"][0]["data"] == [6, 1]
    assert sum(network.batches) <= 1 + 4 + 1  # what was computed already, it, and a probe
    assert figure(server, 'dni_requests_total{model="model",version="1",status="gone"}') == 40


def test_a_client_that_leaves_is_noticed_at_once(network: Network, start: Start) -> None:
    """By the next rounds of the loop; nothing of a request waits for a timer."""
    server = start(network)
    wait_ready(server, "1", 10)
    version = server.call(server.versions.__getitem__, "1")
    network.gate.clear()
    with raw(server, posted(request_of((0, 0)))):
        eventually("it is there", lambda: not version.idle, every_s=0.001)
    rounds = [server.call(lambda: version.idle) for _ in range(20)]
    assert rounds[-1]


def test_a_client_that_leaves_after_a_large_body(network: Network, start: Start) -> None:
    """Its connection must not stay paused, as it is while a large body comes."""
    server = start(network)
    wait_ready(server, "1", 10)
    version = server.call(server.versions.__getitem__, "1")
    network.gate.clear()
    with raw(server, posted(request_of((0, 0), parameters={"note": "x" * 1_000_000}))):
        eventually("it is there", lambda: not version.idle, every_s=0.01)
    eventually("it has left", lambda: version.idle, every_s=0.01)


def test_clients_that_have_gone_before_they_are_read(network: Network, start: Start) -> None:
    server = start(network)
    wait_ready(server, "1", 10)
    network.batches.clear()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.call, hold)  # the loop is busy
        held.wait()
        for n in range(100):
            raw(server, posted(request_of((n, 0)))).close()
        release.set()
    line = 'dni_requests_total{model="model",version="",status="gone"} 100'
    eventually("they are dropped", lambda: line in get(server, "/metrics").text, 10)
    assert network.batches == []


def test_a_deadline(network: Network, start: Start) -> None:
    server = start(network, deadline_s=0.5)
    wait_ready(server, "1", 10)
    network.gate.clear()
    answer = ask(server)
    assert answer.status_code == 504
    assert "not answered within 0.5 s" in answer.json()["error"]
    network.gate.set()
    eventually("it answers again", lambda: ask(server).status_code == 200)


def test_too_much_waits(network: Network, start: Start) -> None:
    server = start(network, max_waiting=3)
    wait_ready(server, "1", 10)
    network.gate.clear()
    version = server.call(server.versions.__getitem__, "1")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server)
        eventually("the first is computed", lambda: not version.engine.room(), every_s=0.01)
        second = pool.submit(ask, server, *[(0, 0)] * 3)
        eventually("three rows wait", lambda: version.observe().waiting_rows == 3, every_s=0.01)
        refused = ask(server)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(server, *[(0, 0)] * 4).status_code == 413
        network.gate.set()
        assert (first.result().status_code, second.result().status_code) == (200, 200)


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_bodies(chunked: bool, network: Network, start: Start) -> None:
    server = start(network, max_body_bytes=1000)
    content = (b"a" * 600 for _ in range(5)) if chunked else b"a" * 3000
    answer = httpx.post(server.url + INFER, content=content)
    assert answer.status_code == 413
    assert "1000 bytes" in answer.json()["error"]
    assert ask(server).status_code == 200


def test_slow_clients(network: Network, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEADERS_S", 0.5)
    server = start(network, deadline_s=1)
    for head, said in ((b"", b""), (b"POST /v2 HTTP/1.1\r\nhost:", b"HTTP/1.1 408 ")):
        with raw(server, head) as connection:
            assert connection.recv(1000)[:13] == said
            assert connection.recv(1000) == b""
    with raw(server, posted(request_of((0, 0)), length=10_000)) as connection:
        answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
    assert ask(server).status_code == 200


def test_what_still_comes_of_an_answered_request_is_not_waited_for(
    network: Network, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HEADERS_S", 0.5)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    server = start(network, token_file=tmp_path / "token")
    for more in (b"x", b"\r\n"):
        with raw(server, posted(request_of((0, 0)), length=1000)) as connection:
            assert connection.recv(10_000).startswith(b"HTTP/1.1 401")
            connection.sendall(more)
            begin = time.monotonic()
            assert connection.recv(1) == b""
            assert time.monotonic() - begin < 5


def test_a_connection_stays_after_an_early_answer(
    network: Network, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body comes in a second and a third packet, and the next request only later."""
    monkeypatch.setattr(server_module, "_HEADERS_S", 0.5)
    monkeypatch.setattr(server_module, "_KEEP_ALIVE_S", 2)
    server = start(network, max_body_bytes=1000)
    wait_ready(server, "1", 10)
    large = posted(request_of((1, 2), parameters={"note": "x" * 1000}))
    with raw(server, large[:-500]) as connection:
        assert connection.recv(10_000).startswith(b"HTTP/1.1 413")
        for piece in (large[-500:-200], large[-200:]):
            connection.sendall(piece)
            time.sleep(0.1)
        time.sleep(1)
        connection.sendall(posted(request_of((1, 2))))
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
    with raw(server, large[:-500]) as connection:
        assert connection.recv(10_000).startswith(b"HTTP/1.1 413")
        connection.sendall(large[-500:])
        begin = time.monotonic()
        assert connection.recv(1) == b""
        assert 1 < time.monotonic() - begin < 10, "but not for ever"


OFFER = b"\r\nconnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAEA\r\nhost"


@pytest.mark.parametrize("size", [1, 70, 1_000_000])
def test_an_offer_of_another_protocol_is_ignored(size: int, network: Network, start: Start) -> None:
    """In packets of any size, with requests before and after it, also with such an offer."""
    server = start(network)
    wait_ready(server, "1", 10)
    plain = [posted(request_of((n, 0))) for n in range(4)]
    offers = [request.replace(b"\r\nhost", OFFER, 1) for request in plain]
    data = b"".join([plain[0], offers[1], offers[2], plain[3]])
    with raw(server, b"") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(data), size):
            connection.sendall(data[begin : begin + size])
        received = b""
        while received.count(b'"outputs"') < 4:
            piece = connection.recv(100_000)
            assert piece, received
            received += piece
    assert received.count(b"HTTP/1.1 200 OK") == 4
    assert [f'"data":[{n}.0,1.0]'.encode() in received for n in (1, 2, 3, 4)] == [True] * 4


def test_the_next_requests_headers_do_not_end_the_one_before(
    network: Network, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HEADERS_S", 0.2)
    server = start(network)
    wait_ready(server, "1", 10)
    network.gate.clear()
    large = posted(request_of((1, 2), parameters={"note": "x" * 70_000}))
    with raw(server, large + b"GET /v2 HTTP/1.1\r\nhost: ") as connection:
        time.sleep(1)
        network.gate.set()
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        assert connection.recv(10_000).startswith(b"HTTP/1.1 408 "), "then it is late"
        assert connection.recv(1) == b""


def test_endless_headers(network: Network, start: Start) -> None:
    server = start(network)
    endless = b"GET /v2 HTTP/1.1\r\nname: " + b"a" * 10_000_000
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        raw(server, endless)
    assert ask(server).status_code == 200


def test_large_headers(network: Network, start: Start) -> None:
    server = start(network)
    with raw(server, b"GET /v2 HTTP/1.1\r\nname: ") as connection:
        time.sleep(0.1)  # a read of its own
        connection.sendall(b"a" * (server_module._HEADERS_BYTES + 1))
        answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"more than 65536 bytes" in answer
        assert connection.recv(1000) == b""


def test_a_token(network: Network, start: Start, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o640)
    with pytest.raises(UsageError, match="mode 0640"):
        start(network, token_file=file)
    file.chmod(0o600)
    for content, words in (("\n", "is empty"), ("gr\u00fc\u00df", "other characters")):
        file.write_text(content)
        with pytest.raises(UsageError, match=words):
            start(network, token_file=file)
    file.write_text("secret\n")
    server = start(network, token_file=file, host="0.0.0.0")
    url = f"http://127.0.0.1:{server.port}"
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        for path in ("/v2", "/metrics", "/v2/models/model", "/nothing"):
            assert httpx.get(url + path, headers=headers).status_code == 401
        answer = httpx.post(url + INFER, json=request_of((0, 0)), headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    right = {"authorization": "Bearer secret"}
    assert httpx.post(url + INFER, json=request_of((0, 0)), headers=right).status_code == 200
    assert httpx.get(url + "/v2/health/live").status_code == 200


@pytest.mark.parametrize("ipv6", [True, False])
def test_all_addresses(
    ipv6: bool, network: Network, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of IPv4, and those of IPv6 if the host has them."""
    if not ipv6:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    elif not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    port = start(network, token_file=file, host="::").port
    for host in ("127.0.0.1", "[::1]") if ipv6 else ("127.0.0.1",):
        assert httpx.get(f"http://{host}:{port}/v2/health/live").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_no_token_no_other_hosts(host: str, network: Network, start: Start) -> None:
    with pytest.raises(UsageError, match="without a token"):
        start(network, host=host)


def test_a_port_in_use(network: Network, start: Start) -> None:
    port = start(network).port
    with pytest.raises(UnavailableError, match=f"cannot listen at 127.0.0.1:{port}"):
        start(Network(), port=port)


def test_tls(network: Network, start: Start, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    server = start(network, tls_cert=cert, tls_key=key)
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(cert))
    answer = httpx.post(server.url + INFER, json=request_of((1, 2)), verify=trusted)
    assert answer.json()["outputs"][0]["data"] == [2, 3]
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(server.url + "/v2/health/live", verify=ssl.create_default_context())


def test_tls_files_that_are_missing(network: Network, start: Start, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="TLS files"):
        start(network, tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")


def test_health_is_true(network: Network, start: Start) -> None:
    network.gate.clear()
    server = start(network, probe_s=0.6)
    assert get(server).status_code == 503
    network.gate.set()
    wait_ready(server, "1", 10)
    time.sleep(1)  # without requests, probes show it
    assert get(server).status_code == get(server, "/v2/models/model/ready").status_code == 200
    network.gate.clear()
    eventually("it is not ready", lambda: get(server).status_code == 503, 5)
    assert "no batch has gone through all modules in the last 0.6 s" in get(server).json()["error"]
    assert get(server, "/v2/health/live").status_code == 200
    network.gate.set()
    eventually("it is ready again", lambda: get(server).status_code == 200, 5)


def test_a_network_that_does_not_fit_is_never_ready(start: Start) -> None:
    server = start(nn.Linear(2, 3), probe_s=1)
    assert "instead of" in ask(server).json()["error"]
    text = r"last probe failed: the model's outputs are .*3"
    eventually("it says why", lambda: re.search(text, get(server).json()["error"]), 5)
    assert get(server).status_code == 503


def test_a_client_that_sends_too_much_is_refused(network: Network, start: Start) -> None:
    server = start(network, rate=0.01)
    codes = [ask(server).status_code for _ in range(3)]
    assert codes == [200, 429, 429]
    assert 60 < int(ask(server).headers["retry-after"]) <= 100
    assert get(server, "/v2").status_code == 200, "only requests for outputs count"


def test_a_drain_answers_all(network: Network, start: Start) -> None:
    server = start(network, max_batch=2)
    wait_ready(server, "1", 10)
    network.gate.clear()
    version = server.call(server.versions.__getitem__, "1")
    with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=server.url) as idle:
        assert idle.get("/v2").status_code == 200
        asked = [pool.submit(ask, server, (n, 0)) for n in range(10)]
        eventually("they wait", lambda: version.observe().waiting_rows >= 8, every_s=0.01)
        stopped = pool.submit(server.stop, 20)
        eventually("it takes no more", lambda: refuses(server), 5, 0.01)
        assert idle.get("/v2").headers["connection"] == "close"  # it was as good as on its way
        network.gate.set()
        answers = [future.result() for future in asked]
        assert [answer.json()["outputs"][0]["data"][0] for answer in answers] == [*range(1, 11)]
        assert stopped.result()


def refuses(server: Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=30).close()
    except ConnectionRefusedError:
        return True
    return False


def test_who_has_just_connected_is_answered_when_it_stops(start: Start) -> None:
    server = start(Network())
    wait_ready(server, "1", 10)
    held, free = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(server.call, lambda: (held.set(), free.wait(), time.sleep(_TICKS_S)))
        held.wait()
        clients = [raw(server, b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n") for _ in range(200)]
        stopped = pool.submit(server.stop, 20)
        eventually("it is told", lambda: server._uvicorn.should_exit, every_s=0.01)
        free.set()
        for client in clients:
            with client:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        holding.result()
        assert stopped.result()


def test_a_drain_that_takes_too_long(network: Network, start: Start) -> None:
    server = start(network)
    wait_ready(server, "1", 10)
    network.gate.clear()
    version = server.call(server.versions.__getitem__, "1")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server)
        eventually("it is computed", lambda: not version.engine.room(), every_s=0.01)
        assert not server.stop(1)
        assert asked.result().json() == {"error": "the server has stopped"}
        network.gate.set()


def test_versions_change_while_clients_ask(start: Start) -> None:
    server = start(Network(1))
    wait_ready(server, "1", 10)
    stop, codes, values = threading.Event(), [], set()

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=30, verify=TLS) as session:
            while not stop.is_set():
                answer = session.post(INFER, json=request_of((0, 0)))
                codes.append(answer.status_code)
                if answer.status_code == 200:
                    version, data = answer.json()["model_version"], answer.json()["outputs"][0]
                    values.add((version, data["data"][0]))

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        eventually("they ask", lambda: len(codes) > 50, every_s=0.01)
        slow = Network(3)
        slow.gate.clear()
        server.call(server.versions.add, "slow", InProcess(slow, ONE))
        with pytest.raises(UnavailableError, match="'slow' is not ready"):
            server.call(server.versions.switch, "slow")
        server.call(server.versions.add, "2", InProcess(Network(2), ONE))
        with pytest.raises(UsageError, match="there is a version '2'"):
            server.call(server.versions.add, "2", InProcess(Network(2), ONE))
        wait_ready(server, "2", 10)
        with pytest.raises(UsageError, match="answers requests"):
            server.remove("1", 10)
        server.call(server.versions.switch, "2")
        assert server.remove("1", 10)
        slow.gate.set()
        assert server.remove("slow", 10)
        asked = len(codes)
        eventually("they still ask", lambda: len(codes) > asked + 50, every_s=0.01)
        stop.set()
        for one in clients:
            one.result()
    assert set(codes) == {200}
    assert values == {("1", 1.0), ("2", 2.0)}
    missing = get(server, "/v2/models/model/versions/1/ready")
    assert (missing.status_code, "versions: 2" in missing.text) == (404, True)


def test_versions_that_hang(start: Start) -> None:
    networks = Network(1), Network(2)
    server = start(*networks, probe_s=0.5)
    for name in ("1", "2"):
        wait_ready(server, name, 10)
    server.call(server.versions.switch, "1", canary="2", share=0.5)
    for network in networks:
        network.gate.clear()
    first, canary = (server.versions[name] for name in ("1", "2"))
    eventually("both hang", lambda: not (first.ready or canary.ready), every_s=0.01)
    server.call(server.versions.switch, "1")  # it had requests before
    with pytest.raises(UnavailableError, match="'2' is not ready"):
        server.call(server.versions.switch, "2")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, path="/v2/models/model/versions/2/infer")
        eventually("it is asked", lambda: not canary.idle, every_s=0.01)
        assert not server.remove("2", 0.2)
        answer = asked.result()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert list(server.versions) == [first]


def test_a_canary_gets_a_share(start: Start) -> None:
    server = start(Network(1), Network(2))
    for name in ("1", "2"):
        wait_ready(server, name, 10)
    server.call(server.versions.switch, "1", canary="2", share=0.3)
    by_id = {str(n): ask(server, id=str(n)).json()["model_version"] for n in range(60)}
    assert 6 <= [*by_id.values()].count("2") <= 32
    assert all(ask(server, id=id).json()["model_version"] == by_id[id] for id in list(by_id)[:10])
    assert {ask(server).json()["model_version"] for _ in range(40)} == {"1", "2"}
    named = ask(server, path="/v2/models/model/versions/1/infer")
    assert named.json()["outputs"][0]["data"] == [1, 1]
    server.call(server.versions.switch, "1")
    assert {ask(server, id=id).json()["model_version"] for id in by_id} == {"1"}
    other = Signature({"x": float32(2)}, {"z": float32(2)})
    server.call(server.versions.add, "3", InProcess(Network(3), other))
    wait_ready(server, "3", 10)
    with pytest.raises(UsageError, match="different things"):
        server.call(server.versions.switch, "1", canary="3", share=0.5)


def test_a_canary_that_hangs_gets_nothing(start: Start) -> None:
    networks = Network(1), Network(2)
    server = start(*networks, probe_s=0.5)
    for name in ("1", "2"):
        wait_ready(server, name, 10)
    server.call(server.versions.switch, "1", canary="2", share=0.9)
    networks[1].gate.clear()
    eventually("it hangs", lambda: not server.versions["2"].ready, every_s=0.01)
    assert {ask(server).json()["model_version"] for _ in range(10)} == {"1"}


class Exits(InProcess):
    """Even rows leave at an exit, unless the batch is a whole one."""

    def __init__(self) -> None:
        super().__init__(Network(), ONE)
        self.wholes: set[int] = set()
        self.whole_only = threading.Event()

    def submit(self, id: int, inputs: tuple[Tensor, ...], *, whole: bool = False) -> None:
        (x,) = inputs
        if whole:
            self.wholes.add(id)
            super().submit(id, inputs)
            return
        even = torch.arange(0, len(x), 2)
        odd = torch.arange(1, len(x), 2)
        self.answered(Answer(id, even, (x[even],), exit="low"))
        if len(odd):
            need = bool(x[0, 0] == 7)
            exit = "low" if need else None
            self.answered(Answer(id, odd, (x[odd] + 1,), exit=exit, degraded=need))


def test_exits_are_named(start: Start) -> None:
    server = start(Network(), probe_s=1)
    engine = Exits()
    server.call(server.versions.add, "exits", engine)
    wait_ready(server, "exits", 10)
    path = "/v2/models/model/versions/exits/infer"
    assert ask(server, (5, 5), path=path).json()["parameters"] == {"exit": "low"}
    answer = ask(server, (1, 1), (2, 2), (3, 3), path=path).json()
    assert answer["parameters"] == {"exit": "low,,low"}
    assert answer["outputs"][0]["data"] == [1, 1, 3, 3, 3, 3]
    assert ask(server, (7, 7), (2, 2), path=path).json()["parameters"]["degraded"] is True
    labels = 'model="model",version="exits"'
    assert figure(server, f'dni_exits_total{{{labels},exit="low"}}') == 4
    assert figure(server, f"dni_degraded_total{{{labels}}}") == 1
    batches = 3 + figure(server, f'dni_probes_total{{{labels},result="answered"}}')
    for name in ("batch_rows", "batch_s"):
        counted = figure(server, f"dni_{name}_count{{{labels}}}")
        assert batches <= counted <= batches + 3, "beside them, probes may have come meanwhile"
    # Rows that leave early do not show that all modules respond: probes go on.
    probes = len(engine.wholes)
    until = time.monotonic() + 10
    while len(engine.wholes) < probes + 2:
        assert time.monotonic() < until
        assert ask(server, path=path).status_code == 200
    assert figure(server, 'dni_exits_total{model="model",version="exits",exit="low"}') > 4


def test_paths_and_methods(network: Network, start: Start) -> None:
    server = start(network)
    assert "dni_ready" in get(server, "/metrics").text
    assert get(server, "/v2").json()["extensions"] == ["binary_tensor_data"]
    assert get(server, "/v2/models/model").json()["versions"] == ["1"]
    for path in ("/", "/v2/", "/v2/models/other", "/v2/models/model/versions", "/v1"):
        assert get(server, path).status_code == 404
    assert get(server, INFER).status_code == 405
    assert httpx.post(server.url + "/v2").status_code == 405
    assert ask(server, path="/v2/models/model/versions/9/infer").status_code == 404
    zipped = httpx.post(server.url + INFER, content=b"x", headers={"content-encoding": "gzip"})
    assert zipped.status_code == 415
    plain = {"content-encoding": "identity"}
    answer = httpx.post(server.url + INFER, json=request_of((1, 2)), headers=plain)
    assert answer.status_code == 200


def test_a_model_may_have_the_name_of_a_request(network: Network, start: Start) -> None:
    server = start(network, name="infer")
    wait_ready(server, "1", 10)
    path = "/v2/models/infer"
    assert get(server, path).json()["name"] == "infer"
    assert ask(server, path=f"{path}/infer").status_code == 200
    assert ask(server, path=f"{path}/versions/1/infer").status_code == 200
    assert figure(server, 'dni_requests_total{model="infer",version="1",status="200"}') == 2


def test_requests_in_a_row_on_one_connection(network: Network, start: Start) -> None:
    server = start(network)
    with raw(server, posted(request_of((1, 2))) * 20) as connection:
        received = b""
        while received.count(b'"data":[2.0,3.0]') < 20:
            piece = connection.recv(100_000)
            assert piece
            received += piece
    assert received.count(b"HTTP/1.1 200 OK") == 20


def test_hostile_bytes(network: Network, start: Start) -> None:
    """Whatever is sent, the answer is one of HTTP's, and the next client is served."""
    server, drawn = start(network, deadline_s=5), random.Random(0)
    valid = posted(request_of((1, 2)))
    pieces = [b"\r\n", b"\0", b"[" * 50, b"-1", b"9" * 30, b'"', b"{}", b"content-length: 5\r\n"]
    statuses: set[bytes] = set()
    for _ in range(200):
        data = bytearray(valid)
        for _ in range(drawn.randint(1, 4)):
            at = drawn.randrange(len(data))
            data[at : at + drawn.randint(0, 9)] = drawn.choice([*pieces, drawn.randbytes(3)])
        with raw(server, bytes(data)) as connection:
            connection.settimeout(0.2)  # what is missing does not come
            try:
                answer = connection.recv(10_000)
            except (ConnectionResetError, TimeoutError):
                answer = b""
        statuses.add(answer[9:12])
    assert statuses <= {b"", b"200", b"400", b"404", b"405", b"413", b"415"}
    assert {b"400", b"404"} <= statuses
    assert ask(server).status_code == 200
