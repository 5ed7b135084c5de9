"""A service: real processes, a real client, and what goes wrong while requests come."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import as_file, files
from importlib.util import find_spec
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

import dni_runtime
from dni_runtime import Run
from dni_runtime.api.services import order_of, start_service
from dni_runtime.data import open_data
from dni_runtime.errors import UsageError
from dni_runtime.run.documents.state import process_birth
from dni_runtime.serving.documents import BEAT_S, Order, Settings
from dni_runtime.serving.settings import Settings as HttpSettings
from dni_runtime.spec import DataSpec
from tests.conftest import eventually
from tests.e2e.asking import ask_one, compare
from tests.e2e.conftest import CHAIN, Site, missing
from tests.e2e.pages import DOCS, python, shell, write_files

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAME = "digits"


@pytest.fixture(autouse=True)
def _installed() -> None:
    for package in ("uvicorn", "orjson"):
        if find_spec(package) is None:
            missing(f"the package {package} is not installed")


class Served(Site):
    """A trained run, and a service of it."""

    def train(self) -> None:
        self.run("up", self.write(1), "--backend", "process", "--name", "trained")
        self.run("export", "trained", "-o", "model.safetensors")
        self.network = dni_runtime.load(self.folder / "model.safetensors")

    def serve(self, *options: str) -> None:
        """Serve until the test ends; it answers."""
        document = self.json("serve", *options, "-d", "--port", "0")
        assert document["phase"] == "running"
        self.url = document["url"]

    def get(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and document."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data), timeout=90) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)

    def ask(self, x: torch.Tensor, path: str = "", **more: Any) -> torch.Tensor:
        """Return the outputs for some rows; those of the network must be the same."""
        tensor = {"name": "input", "datatype": "FP32", "shape": [*x.shape]}
        body = {"inputs": [{**tensor, "data": x.flatten().tolist()}], **more}
        status, answer = self.get(f"/v2/models/{NAME}{path}/infer", body)
        assert status == 200, answer
        (output,) = answer["outputs"]
        self.version = answer["model_version"]
        y = torch.tensor(output["data"]).reshape(output["shape"])
        with torch.no_grad():
            torch.testing.assert_close(y, self.network(x), atol=1e-5, rtol=1e-5)
        return y

    def leave(self, x: torch.Tensor) -> tuple[dict[int, str], torch.Tensor]:
        """Return the rows that have left early, each with its exit, and all answers."""
        tensor = {"name": "input", "datatype": "FP32", "shape": [*x.shape]}
        body = {"inputs": [{**tensor, "data": x.flatten().tolist()}]}
        status, answer = self.get(f"/v2/models/{NAME}/infer", body)
        assert status == 200, answer
        parameters = answer.get("parameters", {})
        self.degraded = parameters.get("degraded", False)
        exits = parameters.get("exit", "").split(",")
        exits = exits * len(x) if len(exits) == 1 else exits
        (output,) = answer["outputs"]
        y = torch.tensor(output["data"]).reshape(output["shape"])
        return {row: exit for row, exit in enumerate(exits) if exit}, y

    @property
    def ready(self) -> bool:
        return self.get("/v2/health/ready")[0] == 200

    def figures(self, name: str, **labels: str) -> list[float]:
        """The values of a figure at ``/metrics`` with these labels."""
        with urlopen(self.url + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        assert len(types) == len(set(types)), "each family once, or Prometheus reads none"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if line.startswith(f"dni_{name}{{")]
        return [float(line.split()[-1]) for line in found if all(one in line for one in wanted)]

    def pids(self, version: str) -> dict[str, int]:
        """The processes of a version's workers."""
        state = Run.open(self.folder / "runs" / NAME / version).state()
        return {name: int(module.pid or 0) for name, module in state.modules.items()}


@pytest.fixture
def served(site: Site) -> Iterator[Served]:
    made = Served(site.folder)
    made.train()
    try:
        yield made
    finally:
        if (site.folder / "runs" / NAME).exists():
            made.run("serve", "--stop", "--name", NAME)


def test_a_client_gets_what_the_exported_network_says(served: Served) -> None:
    model = served.folder / "model.safetensors"
    served.serve("trained", "--backend", "process")
    compare(served.url, NAME, model)
    served.run("serve", "--stop")
    shown = served.json("serve", "--status", "--name", NAME)
    assert shown["phase"] == "ended"
    assert not shown["alive"]
    with pytest.raises(OSError, match="refused"):
        urlopen(served.url + "/v2/health/live", timeout=5)

    served.serve("model.safetensors")  # in one process
    compare(served.url, NAME, model)
    assert served.json("serve", "--status")["versions"][0]["run"] is None


def test_raw_images_are_normalised_as_in_the_training(served: Served) -> None:
    """By modules, and by an exported file: 8-bit images of the data set's shape."""
    served.serve("trained", "--backend", "process", "--preprocess")
    with as_file(files("dni_runtime.data") / "digits.npz") as path, np.load(path) as archive:
        raw = archive["x_eval"][:50].reshape(-1, 1, 8, 8)
    spec = DataSpec(dataset="digits", batch_size=50, eval_batch_size=50, flatten=True)
    x, _ = next(open_data(spec, served.folder, seed=0).eval_batches())
    assert isinstance(x, torch.Tensor)
    with torch.no_grad():
        y = served.network(x)
    for version in ("1", "2"):
        answer = ask_one(served.url, NAME, raw)
        torch.testing.assert_close(torch.tensor(answer), y, atol=1e-5, rtol=1e-5)
        if version == "1":
            served.run("serve", "--update", "model.safetensors")
    status, answer = served.get(
        f"/v2/models/{NAME}/infer",
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}]},
    )
    assert (status, "UINT8" in answer["error"]) == (400, True)


def test_a_graph_with_two_inputs_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_template(site, monkeypatch, "two-tower")


def serve_template(site: Site, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """Compare a network's modules, and one process, with the exported network."""
    site.run("init", "--template", template)
    monkeypatch.syspath_prepend(str(site.folder))
    site = Site(site.folder, {"PYTHONPATH": str(site.folder)})
    chain = site.folder / "chain.yaml"
    chain.write_text(chain.read_text() + "steps: 5\n")
    site.run("up", "--backend", "process", "--name", "trained")
    site.run("export", "trained", "-o", "model.safetensors")
    served = ["serve", "--name", "answers", "--trust"]
    answers = site.json(*served, "trained", "--backend", "process", "-d", "--port", "0")
    try:
        compare(answers["url"], "answers", site.folder / "model.safetensors")
        site.run(*served, "--update", "model.safetensors")
        compare(answers["url"], "answers", site.folder / "model.safetensors")
    finally:
        site.run(*served, "--stop")


def test_modules_are_killed_and_hang_while_clients_ask(served: Served) -> None:
    served.serve(
        "trained", "--backend", "process", "--probe", "2", "--max-batch", "256",
        "--replicas", "middle=2",
    )  # fmt: skip
    served.ask(torch.randn(300, 64))  # more rows than a batch of the training, or of the service
    failures: list[BaseException] = []
    answered = [0]
    over = threading.Event()

    def keep_asking(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not over.is_set():
            try:
                served.ask(torch.randn(1 + answered[0] % 9, 64, generator=generator))
                answered[0] += 1
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=keep_asking, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        for module in ("bottom", "middle.1", "top"):
            before = answered[0]
            os.kill(served.pids("1")[module], signal.SIGKILL)
            eventually("answers go on", lambda before=before: answered[0] > before + 50 or failures)
        hangs, before = served.pids("1")["middle.2"], answered[0]
        os.kill(hangs, signal.SIGSTOP)
        # One thread waits for each batch that it had.
        eventually("the other answers", lambda: answered[0] > before + 50 or failures)
        assert served.ready
        os.kill(hangs, signal.SIGCONT)
        assert not failures
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures
    eventually("it is ready", lambda: served.ready)
    (restarts,) = served.figures("restarts_total", module="bottom")
    assert restarts == 1
    assert all(0 < seconds < 1 for seconds in served.figures("compute_s", version="1"))
    shown = served.run("serve", "--status").stdout
    assert re.search(r"middle.1 +running", shown)
    assert "s/batch" in shown

    top = served.pids("1")["top"]
    os.kill(top, signal.SIGSTOP)
    eventually("it is not ready", lambda: not served.ready, 10)
    assert served.get("/v2/health/live")[0] == 200
    os.kill(top, signal.SIGCONT)
    eventually("it is ready again", lambda: served.ready, 10)
    served.ask(torch.randn(3, 64))


def test_what_cannot_be_served_is_refused_before_anything_is_made(site: Site) -> None:
    site.run("up", site.write(1), "--backend", "process", "--name", "trained")
    for options, text in [
        (["--replicas", "no=2"], "there is no module 'no'"),
        (["--exit-accuracy", "0.5"], "have not been measured"),
        (["--tls", "chain.yaml", "chain.yaml"], "cannot be used"),
        (["--in-process", "--hosts", "localhost"], "--hosts is for modules"),
    ]:
        refused = site.run(
            "serve", "trained", "-d", "--backend", "process", "--port", "0", *options, expect=64
        )
        assert text in refused.stderr
        assert [path.name for path in (site.folder / "runs").iterdir()] == ["trained"]


DEADLY = """\
import os, signal
from torch import nn

class Deadly(nn.ReLU):
    def forward(self, x):
        if (x > 1e6).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)
"""


def test_a_batch_that_kills_workers_fails_alone(site: Site) -> None:
    served = Served(site.folder)
    (site.folder / "deadly.py").write_text(DEADLY)
    chain = CHAIN.replace("ReLU]", "{import: 'deadly:Deadly'}]")
    served.run("up", served.write(1, chain=chain), "--backend", "process", "--name", "trained")
    served.serve("trained", "--backend", "process", "--deadline", "60")
    try:
        tensor = {"name": "input", "datatype": "FP32", "shape": [1, 64], "data": [1e9] * 64}
        path = f"/v2/models/{NAME}/infer"
        status, document = served.get(path, {"inputs": [tensor]})
        assert status == 500, document
        assert "could not compute" in document["error"]
        tensor["data"] = [0.5] * 64
        assert served.get(path, {"inputs": [tensor]})[0] == 200
    finally:
        served.run("serve", "--stop")


WAITING = """\
import time
from pathlib import Path
from torch import nn

class Waiting(nn.ReLU):
    def forward(self, x):
        here = Path(__file__)
        if (x > 1e6).any():
            here.with_name("begun").touch()
            while not here.with_name("go").exists():
                time.sleep(0.01)
        return super().forward(x)
"""


def test_a_batch_that_is_lost_by_several_deaths_is_sent_again(site: Site) -> None:
    """A replica has it, another has had later ones, and both die with the module before them."""
    served = Served(site.folder)
    (site.folder / "waiting.py").write_text(WAITING)
    first, middle, last = CHAIN.split("ReLU]")
    chain = f"{first}ReLU]{middle}{{import: 'waiting:Waiting'}}]{last}"
    served.run("up", served.write(1, chain=chain), "--backend", "process", "--name", "trained")
    served.serve(
        "trained", "--backend", "process", "--trust", "--replicas", "middle=2", "--probe", "2",
        "--deadline", "80", "--max-batch", "1",
    )  # fmt: skip
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 64]}
    service, there = site.folder / "runs" / NAME, site.folder / "runs" / NAME / "1" / "src"

    def ask(value: float) -> int:
        body = {"inputs": [{**tensor, "data": [value] * 64}]}
        return served.get(f"/v2/models/{NAME}/infer", body)[0]

    def again() -> bool:
        return "is sent again" in (service / "service.log").read_text()

    try:
        for _ in range(6):  # which replica gets it, before and after, is not known
            with ThreadPoolExecutor(4) as pool:
                asked = [pool.submit(ask, 1e9)]
                eventually("it is computed", (there / "begun").exists)
                asked += [pool.submit(ask, 0.5) for _ in range(3)]
                eventually("the other has answered", lambda a=asked: any(one.done() for one in a))
                for module, pid in served.pids("1").items():
                    if module != "top":
                        os.kill(pid, signal.SIGKILL)
                (there / "go").touch()
                assert [one.result() for one in asked] == [200] * 4
            if again():
                break
            for name in ("go", "begun"):
                (there / name).unlink()
        assert again()
    finally:
        served.run("serve", "--stop")


def test_versions_change_without_a_lost_request(served: Served) -> None:
    served.serve("trained", "--backend", "process")
    assert "runs at" in served.run("serve", "trained", expect=64).stderr

    served.run("serve", "--update", "trained", "--canary", "50")
    versions = set()
    for number in range(20):
        served.ask(torch.randn(1, 64), id=str(number))
        versions.add(served.version)
    assert versions == {"1", "2"}
    served.ask(torch.randn(1, 64), "/versions/1", id="0")
    assert served.version == "1"
    served.run("serve", "--promote")
    served.ask(torch.randn(1, 64))
    assert served.version == "2"
    eventually("the first one has ended", lambda: state_of(served, 0) == "stopped", 40)

    (served.folder / "broken.safetensors").write_bytes(b"no network")
    failed = served.run("serve", "--update", "broken.safetensors", expect=70)
    assert "has no network that 'dnictl export' wrote" in failed.stderr
    assert "still does" in failed.stderr
    served.ask(torch.randn(1, 64))
    assert served.version == "2"
    served.run("serve", "--update", "model.safetensors")
    served.ask(torch.randn(1, 64))
    assert served.version == "4"
    served.run("serve", "--update", "model.safetensors", "--canary", "10")
    refused = served.run("serve", "--update", "trained", expect=70)
    assert "version 5 is a canary" in refused.stderr
    served.run("serve", "--rollback")  # drops it: it never was the one before
    served.run("serve", "--rollback")
    served.ask(torch.randn(1, 64))
    assert served.json("serve", "--status")["versions"][-1]["source"].endswith("/trained")
    (served.folder / "model.safetensors").touch()
    refused = served.run("serve", "--rollback", expect=70)
    assert "model.safetensors', which has been written anew" in refused.stderr
    refused = served.run("serve", "--update", "trained", "--max-batch", "5", expect=64)
    assert "--update changes no settings: --max-batch" in refused.stderr


def test_neither_another_network_nor_a_folder_that_cannot_be_written_ends_a_service(
    served: Served,
) -> None:
    served.serve("model.safetensors")
    other = served.write(1, chain=CHAIN.replace("out_features: 10}", "out_features: 12}"))
    served.run("up", other, "--backend", "process", "--name", "other")
    refused = served.run("serve", "--update", "other", "--canary", "10", expect=70)
    assert "take or return different things" in refused.stderr
    served.ask(torch.randn(1, 64))
    folder, state = served.folder / "runs" / NAME, served.json("serve", "--status")
    folder.chmod(0o500)
    try:
        time.sleep(BEAT_S + 2)
        served.ask(torch.randn(1, 64))
    finally:
        folder.chmod(0o700)
    eventually(
        "it is written", lambda: served.json("serve", "--status")["updated"] > state["updated"]
    )


def state_of(served: Served, number: int) -> str:
    return str(served.json("serve", "--status")["versions"][number]["state"])


def test_modules_end_with_the_service(served: Served) -> None:
    served.serve("trained", "--backend", "process")
    pids = served.pids("1")
    os.kill(served.json("serve", "--status")["pid"], signal.SIGKILL)
    eventually("no worker is left", lambda: not any(map(process_birth, pids.values())), 40)
    assert "killed" in served.run("serve", "--status", "--name", NAME).stdout
    Order(id="late", what="stop").write(order_of(served.folder / "runs" / NAME))
    run = Run.open(served.folder / "runs" / "trained")
    with pytest.raises(UsageError, match=r"serve\(\) has no 'max_batches'") as caught:
        run.serve(max_batches=4)
    assert "'max_batch'" in str(caught.value.hint)
    state = run.serve(port=0, replicas={"middle": 2})  # its folder is free again
    assert state.alive
    served.url = state.url or ""
    served.ask(torch.randn(2, 64))


def test_a_service_whose_first_version_does_not_answer_ends(site: Site) -> None:
    served = Served(site.folder)
    served.train()
    source = str(site.folder / "runs" / "trained")
    settings = {"source": source, "ready_s": 0.1, "http": {"name": NAME, "port": 0}}
    folder = site.folder / "runs" / NAME
    folder.mkdir(mode=0o700)
    (folder / "settings.json").write_text(json.dumps(settings))
    ended = served.run("service", str(folder), expect=70, timeout_s=60)
    assert "version 1 of 'digits' failed: no answer in 0.1 s" in ended.stderr
    assert served.json("serve", "--status", "--name", NAME)["phase"] == "failed"


SLOW = """\
import time
from pathlib import Path
from torch import nn

class Slow(nn.ReLU):
    def forward(self, x):
        if (x > 1e6).any():
            Path(__file__).with_name("begun").touch()
            time.sleep(20)
        return super().forward(x)
"""


def test_requests_that_outlast_the_drain_are_cut_off(site: Site) -> None:
    (site.folder / "slow.py").write_text(SLOW)
    site.run("up", site.write(1, chain=CHAIN.replace("ReLU]", "{import: 'slow:Slow'}]")),
             "--backend", "process", "--name", "trained")  # fmt: skip
    served, folder = Served(site.folder), site.folder / "runs" / NAME
    http = HttpSettings(name=NAME, port=0)
    source = site.folder / "runs" / "trained"
    state = start_service(
        folder, Settings(source=source, in_process=True, trust=True, drain_s=1, http=http)
    )
    served.url = state.url or ""
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 64], "data": [1e9] * 64}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.get, f"/v2/models/{NAME}/infer", {"inputs": [tensor]})
        eventually("it is computed", (source / "src" / "begun").exists)
        failed = served.run("serve", "--stop", expect=70)
        assert "cut off that had no answer after 1 s" in failed.stderr
        assert asked.result() == (503, {"error": "the server has stopped"})


def test_the_page(site: Site) -> None:
    """Its commands and its client, as printed; on a port that is free."""
    text = (DOCS / "serving.md").read_text()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    write_files(text.replace("8123", port), site.folder)
    (request,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (site.folder / "request.json").write_text(request)
    site.write(1)
    commands = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0].replace("8123", port)
    train, serve, ask, update, stop = commands.splitlines()
    shell(f"{train.replace('up ', 'up --backend process ')}\n{serve}", site.folder)
    try:
        (output,) = json.loads(shell(ask, site.folder))["outputs"]
        assert output["shape"] == [1, 10]
        assert max(range(10), key=output["data"].__getitem__) == 0, "the digit that it draws"
        shell(update, site.folder)
        assert re.fullmatch(r"\[\d \d\]\n", python("ask.py", site.folder))
    finally:
        shell(stop, site.folder)


def test_sure_samples_leave_early(served: Served) -> None:
    """Also all others, marked, when a module behind the exit does not answer."""
    served.run("exits", "trained")
    served.serve("trained", "--backend", "process", "--exit-confidence", "0.5", "--exit-wait", "1",
                 "--replicas", "bottom=2")  # fmt: skip
    x = torch.randn(64, 64) * torch.linspace(0.2, 4, 64)[:, None]
    left, answer = served.leave(x)
    assert not served.degraded
    assert 0 < len(left) < 64
    assert {exit for exit in left.values()} <= {"bottom", "middle"}
    with torch.no_grad():
        y = served.network(x)
    stay = [row for row in range(64) if row not in left]
    torch.testing.assert_close(answer[stay], y[stay], atol=1e-5, rtol=1e-5)

    top = served.pids("1")["top"]
    os.kill(top, signal.SIGSTOP)
    again, marked = served.leave(x)
    assert served.degraded
    assert len(again) == 64
    rows = sorted(left)
    torch.testing.assert_close(marked[rows], answer[rows])
    os.kill(top, signal.SIGCONT)
    eventually(
        "all modules answer again", lambda: served.leave(x)[0] == left and not served.degraded
    )
