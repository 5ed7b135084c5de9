"""Labels that stay with their owner: real workers, all frames between them, two data sets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from dni_runtime import Run
from dni_runtime.data import open_data
from dni_runtime.files import read_json
from dni_runtime.run.documents.state import RunState
from dni_runtime.spec import ChainSpec, DataSpec, parse_chain
from dni_runtime.wire import Kind, Limits, Message, decode
from tests.e2e.conftest import PAUSE, PAUSES, Site, eventually
from tests.e2e.workers import Chain, largest_difference
from tests.integration.link.relay import Relay

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAIN = """\
name: owners
seed: 3
data: {%(data)s, batch_size: 64, validation: 200}
epochs: %(epochs)d
links: {transport: %(transport)s}
restart: {backoff_s: 0.1, snapshot_s: 1}
defaults: {interface: %(interface)s, optimizer: {Adam: {lr: 0.002}}}
modules:
  - name: a
    layers: [{Linear: {in_features: 64, out_features: 48}}, {BatchNorm1d: {num_features: 48}}, ReLU%(pause)s]
  - name: b
    layers: [{Linear: {in_features: 48, out_features: 48}}, {BatchNorm1d: {num_features: 48}}, ReLU]
  - name: c
    layers: [{Linear: {in_features: 48, out_features: 10}}]
"""  # noqa: E501
DIGITS = "dataset: digits, flatten: true"


def text(
    data: str, *, interface: str = "exact", transport: str = "ipc", epochs: int = 2,
    pause: bool = False,
) -> str:  # fmt: skip
    given = {"data": data, "interface": interface, "transport": transport, "epochs": epochs}
    return CHAIN % {**given, "pause": f", {PAUSES}" if pause else ""}


def frames(stream: bytes) -> Iterator[list[bytes]]:
    """The messages of one direction of a connection without encryption (ZMTP 3.1, sec. 3.2)."""
    at, message = 64, list[bytes]()  # after the greeting
    while at < len(stream):
        flags = stream[at]
        size = int.from_bytes(stream[at + 1 : at + 9], "big") if flags & 2 else stream[at + 1]
        at += 9 if flags & 2 else 2
        if not flags & 4:  # else a command
            message.append(stream[at : at + size])
            if not flags & 1:
                yield message
                message = []
        at += size
    assert at == len(stream)


def sequence(seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples and labels of two epochs, with their evaluations, batch by batch."""
    source = open_data(DataSpec(batch_size=64, validation=200), Path(), seed=seed)
    splits = ("train", 1), ("eval", 1), ("train", 2), ("eval", 2), ("test", 2)
    read = (source.batches(split, epoch, 0) for split, epoch in splits)
    return [(torch.as_tensor(x), y) for batches in read for x, y in batches]


def test_no_frame_has_a_sample_or_a_label(make: Callable[[ChainSpec], Chain]) -> None:
    """All that two links carry, of the same training with and without labels on them."""
    sequences, types = sequence(), (torch.int64, torch.int32, torch.uint8, torch.float32)
    labels, samples = [y for _, y in sequences], [x[0].numpy().tobytes() for x, _ in sequences]
    assert {len(one) for one in samples} == {64 * 4}
    written = [y.to(one).numpy().tobytes() for y in labels for one in types]
    weights = {}
    for where in ("head", "tail"):
        chain = make(parse_chain(text(f"{DIGITS}, labels: {where}", transport="tcp")))
        relays, options = list[Relay](), list[str]()
        with ExitStack() as stack:
            for name in "cba":
                chain.start_one(name, *options)
                if name == "a":
                    break
                chain.wait_until(chain.run.endpoint(name).exists)
                address = (read_json(chain.run.endpoint(name)) or {})["address"]
                relays.append(stack.enter_context(Relay(address)))
                options = ["--connect", relays[-1].address]
            assert set(chain.wait().values()) == {0}, chain.logs()
        streams = [bytes(way) for relay in relays for way in (relay.down, relay.up)]
        found = [one for one in written if any(one in stream for stream in streams)]
        assert len(found) == (len(labels) if where == "head" else 0)  # as they are, int64
        assert not any(one in stream for one in samples for stream in streams)
        sent = [message for stream in streams for message in messages(stream)]
        batches = [one for one in sent if one.kind is Kind.BATCH]
        assert len(batches) == 2 * len(labels)
        assert {tuple(entry.name for entry in one.tensors) for one in batches} == {("h", "y")}
        assert {len(one.buffers[1]) > 0 for one in batches} == {where == "head"}
        others = {entry.name for one in sent if one not in batches for entry in one.tensors}
        assert others == {"g"}
        weights[where] = chain.weights()
    assert largest_difference(weights["head"], weights["tail"]) == 0.0


def messages(stream: bytes) -> Iterator[Message]:
    for header, *buffers in frames(stream):
        if header:  # else ZeroMQ's probe
            yield decode([header, *buffers], Limits(tensors=9, buffer_bytes=1 << 24))


def write_halves(folder: Path) -> None:
    """The digits, as two owners have them."""
    source = open_data(DataSpec(batch_size=2000, shuffle=False, flatten=True), Path(), seed=0)
    (train, y_train), (evaluation, y_eval) = (*source.train_batches(1), *source.eval_batches())
    for name in ("hospital", "insurer"):
        (folder / name).mkdir()
    x_train, x_eval = (one.numpy() for one in (train, evaluation))
    np.savez(folder / "hospital" / "scans.npz", x_train=x_train, x_eval=x_eval)
    y = {"y_train": y_train.numpy(), "y_eval": y_eval.numpy()}
    np.savez(folder / "insurer" / "outcomes.npz", **y)


OWN = (
    "dataset: npz, path: hospital/scans.npz, normalize: false, labels: {path: insurer/outcomes.npz}"
)


def kill(run: Run, module: str) -> None:
    """Kill a worker in the midst of training, and wait until it is back."""

    def step() -> int:
        return run.status().modules[-1].step or 0

    def restarts() -> int:
        return RunState.read(run.directory).modules[module].restarts

    first, before = step(), restarts()
    eventually("training", lambda: step() > first + 8)
    os.kill(int(RunState.read(run.directory).modules[module].pid or 0), signal.SIGKILL)
    eventually(f"{module} is back", lambda: restarts() > before)


def test_two_owners(site: Site) -> None:
    """Their workers are killed; the result is that of one data set, to the last bit."""
    write_halves(site.folder)
    (site.folder / "pause.py").write_text(PAUSE)
    path = site.folder / "chain.yaml"
    weights = []
    for name, data in (("one", DIGITS), ("two", OWN)):
        data += ", shuffle: false"  # who has no labels cannot hold out samples by their classes
        path.write_text(text(data, epochs=3, pause=True))
        folder = site.folder / "runs" / name
        site.run("up", path, "--backend", "process", "-d", "--run-dir", folder)
        opened = Run.open(folder)
        for module in ("c", "a") if name == "two" else ():
            kill(opened, module)
        site.run("wait", folder)
        weights.append(opened.model().state_dict())
        tested = opened.status().test
        assert tested is not None
        assert opened.evaluate()["accuracy"] == pytest.approx(tested.accuracy)
    assert largest_difference(*weights) == 0.0


def test_stop_and_resume_with_labels_at_the_tail(site: Site) -> None:
    (site.folder / "pause.py").write_text(PAUSE)
    path = site.folder / "chain.yaml"
    path.write_text(text(f"{DIGITS}, labels: tail", epochs=6, pause=True, interface="delayed"))
    site.run("up", path, "--backend", "process", "-d")
    site.wait_for_checkpoint(["a", "b", "c"])
    site.run("stop")
    site.run("resume")
    figures = site.json("status")
    assert (figures["state"], figures["epoch"]) == ("finished", 6)
    assert figures["modules"][2]["step"] == 6 * 20
    assert figures["evaluations"][-1]["accuracy"] > 0.8


def test_each_owner_names_its_own_file(make: Callable[[ChainSpec], Chain], tmp_path: Path) -> None:
    """Workers that are started by hand; labels of other samples are not trained on."""
    write_halves(tmp_path)
    whole = np.load(tmp_path / "insurer" / "outcomes.npz")
    fewer = tmp_path / "insurer" / "fewer.npz"
    np.savez(fewer, y_train=whole["y_train"][:1400], y_eval=whole["y_eval"])
    data = OWN.replace("insurer/", f"{tmp_path}/insurer/").replace(
        "hospital/", f"{tmp_path}/hospital/"
    )
    chain = make(parse_chain(text(data, epochs=1)))
    chain.start(c=("--data", str(fewer)))
    assert chain.processes["c"].wait(60) == 66
    said = chain.run.log("c", 1).read_text()
    assert "the head uses 1237 training samples, but there are labels of 1200" in said
    assert chain.step_of("c") == 0


def test_the_plan_and_another_number_of_labels(site: Site) -> None:
    write_halves(site.folder)
    path = site.folder / "chain.yaml"
    path.write_text(text(OWN))
    plan = site.json("up", path, "--backend", "process", "--dry-run")
    read = [worker["data"] for worker in plan["workers"]]
    owners = [site.folder / "hospital" / "scans.npz", None, site.folder / "insurer/outcomes.npz"]
    assert read == [None if one is None else str(one) for one in owners]
    whole = np.load(site.folder / "insurer" / "outcomes.npz")
    fewer = {"y_train": whole["y_train"][:1400], "y_eval": whole["y_eval"]}
    np.savez(site.folder / "insurer" / "outcomes.npz", **fewer)
    said = site.run("validate", path, expect=66).stderr
    assert "1437 training samples in 'npz', but 1400 labels in 'npz'" in said
