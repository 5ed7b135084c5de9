"""Real worker processes without a launcher: numerics, stopping, resuming, and hostile messages."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path

import msgpack
import pytest
import torch
import zmq
from torch import nn
from torch.nn.functional import cross_entropy

from dni_runtime.core.chain import LocalChain
from dni_runtime.data import open_data
from dni_runtime.files import read_json, write_atomic
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.evaluations import Best
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, parse_chain
from dni_runtime.spec.model import SelectionSpec
from dni_runtime.worker.signals import REPEAT_S
from tests.conftest import eventually
from tests.e2e.workers import Chain, largest_difference, reference_weights, workers_of
from tests.integration.link.relay import Relay
from tests.lines import read_lines

pytestmark = pytest.mark.e2e

CHAIN = """\
name: digits
seed: 3
data: {dataset: digits, batch_size: 64, flatten: true}
epochs: %(epochs)d
steps: %(steps)s
checkpoint: {every_epochs: %(save_every)d}
links: {transport: %(transport)s}
defaults: {interface: %(interface)s, optimizer: {Adam: {lr: 0.002}}}
modules:
  - name: a
    layers: [{Linear: {in_features: 64, out_features: 48}}, {BatchNorm1d: {num_features: 48}}, ReLU]
  - name: b
    layers: [{Linear: {in_features: 48, out_features: 48}}, {BatchNorm1d: {num_features: 48}}, ReLU]
  - name: c
    layers: [{Dropout: {p: 0.1}}, {Linear: {in_features: 48, out_features: 10}}]
"""

CARRIED = 150_000
"""Bytes of several batches, with their gradients."""


def chain_spec(
    interface: str = "mixed",
    epochs: int = 3,
    steps: str = "null",
    transport: str = "ipc",
    save_every: int = 1,
) -> ChainSpec:
    return parse_chain(
        CHAIN
        % {
            "interface": interface,
            "epochs": epochs,
            "steps": steps,
            "transport": transport,
            "save_every": save_every,
        }
    )


@pytest.mark.parametrize(
    ("interface", "transport"),
    [("exact", "tcp"), ("{exact: {micro_batches: 4}}", "ipc")],
)
def test_exact_equals_the_single_process_reference(
    make: Callable[..., Chain], interface: str, transport: str
) -> None:
    spec = chain_spec(interface, epochs=9, steps="50", transport=transport)
    chain = make(spec)
    chain.start()
    assert set(chain.wait().values()) == {0}, chain.logs()
    assert largest_difference(chain.weights(), reference_weights(spec, 50)) < 1e-5


def test_parts_of_a_batch_count_by_their_labels(make: Callable[..., Chain]) -> None:
    """The head divides batches, and knows which labels the loss leaves out."""
    interface, optimizer = "{exact: {micro_batches: 4}}", "{SGD: {lr: 0.1, momentum: 0.9}}"
    written = {"epochs": 9, "steps": 50, "transport": "ipc", "save_every": 1}
    text = CHAIN.replace("{Adam: {lr: 0.002}}", optimizer) % {"interface": interface, **written}
    for layer in ("{BatchNorm1d: {num_features: 48}}, ", "{Dropout: {p: 0.1}}, "):
        text = text.replace(layer, "")  # they see a part, and plain torch the whole batch
    spec = parse_chain(f"{text}loss: {{CrossEntropyLoss: {{ignore_index: 3}}}}\n")
    chain = make(spec)
    chain.start()
    assert set(chain.wait().values()) == {0}, chain.logs()
    local = LocalChain(workers_of(spec))
    network = nn.Sequential(*(step.layers for step in local.steps))
    update = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    source = open_data(spec.data, Path(), seed=spec.seed)
    batches = (batch for epoch in count(1) for batch in source.train_batches(epoch))
    for x, y in islice(batches, 50):
        update.zero_grad()
        cross_entropy(network(x), y, ignore_index=3).backward()
        update.step()
    expected = {
        f"{step.spec.module}.{key}": it
        for step in local.steps
        for key, it in step.layers.state_dict().items()
    }
    assert largest_difference(chain.weights(), expected) < 1e-5


def test_exact_is_backprop_however_often_a_connection_is_lost(
    make: Callable[..., Chain],
) -> None:
    """A gradient that somebody waits for is delivered: nothing else would ever come."""
    spec = chain_spec("exact", epochs=40, steps="600", transport="tcp")
    chain = make(spec)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with Relay(address) as relay:
        chain.start(b=("--connect", relay.address), c=("--listen", address))
        for cuts in range(8):
            chain.wait_until(
                lambda cuts=cuts: relay.connections > cuts and relay.carried > CARRIED  # type: ignore[misc]
            )
            relay.cut()
        assert set(chain.wait().values()) == {0}, chain.logs()
    assert relay.connections > 8
    assert largest_difference(chain.weights(), reference_weights(spec, 600)) < 1e-4


BOUNDED = "{delayed: {max_late: 1, predict: true, micro_batches: 4}}"


@pytest.mark.parametrize(
    ("interface", "links"),
    [("mixed", "ipc"), (BOUNDED, "tcp")],
)
def test_chain_learns_and_reports(make: Callable[..., Chain], interface: str, links: str) -> None:
    chain = make(chain_spec(interface, epochs=12, transport=links))
    chain.start()
    assert set(chain.wait().values()) == {0}, chain.logs()
    lines = list(read_lines(chain.run.metrics("c")))
    evals = [line for line in lines if line["kind"] == "eval"]
    assert [line["epoch"] for line in evals] == list(range(1, 13))
    assert evals[-1]["accuracy"] > 0.9
    assert evals[-1]["samples"] == 360
    head = [line for line in read_lines(chain.run.metrics("a")) if line["kind"] == "train"][-1]
    assert (head["samples"], head["step"]) == (12 * 1437, 12 * 23)
    assert head["gradients"] > 0
    assert all((read_json(chain.run.worker(n)) or {})["state"] == "finished" for n in chain.names)
    assert len(complete_cuts(chain.run, chain.names)) == 2
    assert not list((chain.run.root / "endpoints").iterdir())


def test_training_ends_when_it_gets_no_better(make: Callable[..., Chain]) -> None:
    """A selection keeps the best checkpoint beside the newest ones, and ends the run early."""
    spec = chain_spec("mixed", epochs=200).model_copy(
        update={"selection": SelectionSpec(patience=2, min_delta=0.003)}
    )
    chain = make(spec)
    chain.start()
    assert set(chain.wait().values()) == {0}, chain.logs()
    evals = [line for line in read_lines(chain.run.metrics("c")) if line["kind"] == "eval"]
    best = Best.load(chain.run.best)
    assert best is not None
    assert 3 < evals[-1]["epoch"] < 100
    assert best.epoch == evals[-3]["epoch"]
    assert best.value == pytest.approx(evals[-3]["accuracy"], abs=1e-6)
    cuts = complete_cuts(chain.run, chain.names)
    assert best.cut in cuts
    assert len(cuts) <= 3
    tail = json.loads((chain.run.checkpoints / f"{cuts[-1]:012d}" / "c.json").read_text())
    assert tail["over"]


def test_stopped_and_resumed_run_equals_an_undisturbed_one(make: Callable[..., Chain]) -> None:
    """SIGTERM makes one consistent cut; dropout, BatchNorm, Adam and data go on from it exactly."""
    spec = chain_spec("{exact: {micro_batches: 3}}, accumulate: 3", epochs=10)
    whole, broken = make(spec), make(spec)
    broken.start()
    broken.wait_until(lambda: broken.step_of("b") > 40)
    for process in broken.processes.values():
        process.send_signal(signal.SIGTERM)
    assert set(broken.wait().values()) == {75}, broken.logs()
    cut = complete_cuts(broken.run, broken.names)[-1]
    steps = {
        json.loads(f.read_text())["step"]
        for f in (broken.run.checkpoints / f"{cut:012d}").glob("*.json")
    }
    assert len(steps) == 1
    assert 40 < steps.pop() < 10 * 23
    broken.start(attempt=2)
    whole.start()
    assert set(broken.wait().values()) == {0}, broken.logs()
    assert set(whole.wait().values()) == {0}, whole.logs()
    assert largest_difference(whole.weights(), broken.weights()) == 0


def test_one_module_told_to_stop_gets_a_checkpoint_first(make: Callable[..., Chain]) -> None:
    chain = make(chain_spec(epochs=2000))
    chain.start()
    chain.wait_until(lambda: chain.step_of("b") > 30)
    before = complete_cuts(chain.run, chain.names)
    chain.processes["b"].send_signal(signal.SIGTERM)
    assert chain.processes["b"].wait(30) == 75
    eventually("a newer cut", lambda: complete_cuts(chain.run, chain.names)[-1:] > before[-1:], 20)
    assert chain.processes["a"].poll() is None


def test_second_signal_ends_at_once(make: Callable[..., Chain]) -> None:
    chain = make(chain_spec(epochs=2000, save_every=0))  # no checkpoint marker is under way
    chain.start()
    chain.wait_until(lambda: chain.step_of("b") > 5)
    chain.processes["a"].send_signal(signal.SIGSTOP)  # and none will come
    process = chain.processes["b"]
    process.send_signal(signal.SIGTERM)
    chain.wait_until(lambda: (read_json(chain.run.worker("b")) or {})["state"] == "stopping")
    time.sleep(REPEAT_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143


def test_signals_on_the_way_out_change_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dni_runtime.worker", "--run", str(tmp_path), "--module", "b"],
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert b"there is no spec" in process.stderr.readline()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    process.stderr.close()
    assert process.wait(10) == 64


def test_hostile_messages_are_refused_and_training_goes_on(make: Callable[..., Chain]) -> None:
    chain = make(chain_spec(epochs=400, transport="tcp"))
    chain.start()
    chain.wait_until(lambda: chain.step_of("c") > 10)
    address = (read_json(chain.run.endpoint("c")) or {})["address"]
    noise = random.Random(0)
    context = zmq.Context()
    attacker = context.socket(zmq.DEALER)
    attacker.setsockopt(zmq.LINGER, 5000)
    attacker.connect(address)
    header = {"v": 1, "k": 4, "run": "test", "src": "b", "id": 5}
    try:
        attacker.send_multipart([msgpack.packb(header)[:-3]])  # truncated
        attacker.send_multipart([msgpack.packb(header | {"v": 99})])  # wrong version
        attacker.send_multipart([msgpack.packb(header), b"\0" * 7, b""])  # wrong shape and count
        attacker.send_multipart([msgpack.packb(header), b"\0" * (64 << 20)])  # oversized
        for _ in range(10_000):
            frames = [noise.randbytes(noise.randrange(200)) for _ in range(noise.randrange(1, 4))]
            attacker.send_multipart(frames)

        def refused() -> int:
            lines = [x for x in read_lines(chain.run.metrics("c")) if x["kind"] == "train"]
            return sum(lines[-1]["refused"].values()) if lines else 0

        before = chain.step_of("c")
        chain.wait_until(lambda: refused() > 9_000 and chain.step_of("c") > before + 20)
    finally:
        attacker.close()
        context.term()
    for process in chain.processes.values():
        process.send_signal(signal.SIGTERM)
    assert set(chain.wait().values()) == {75}, chain.logs()


def test_image_of_another_spec_is_refused(tmp_path: Path) -> None:
    from dni_runtime.errors import ImageError
    from dni_runtime.worker.options import load_spec
    from dni_runtime.worker.start import WorkerStart

    ours, theirs = workers_of(chain_spec()), workers_of(chain_spec("local"))
    run = RunDir(tmp_path)
    run.create()
    write_atomic(run.spec("a"), ours[0].to_json())
    image = tmp_path / "module.json"
    image.write_text(ours[0].to_json())
    assert load_spec(WorkerStart(str(tmp_path)), image) == ours[0]
    image.write_text(theirs[0].to_json())
    with pytest.raises(ImageError, match="dnictl build"):
        load_spec(WorkerStart(str(tmp_path)), image)
