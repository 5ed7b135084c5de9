"""Real Fashion-MNIST; a head with processes that augment its batches; the language model."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dni_runtime import Chain
from dni_runtime.data import open_data
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import DataSpec
from tests.e2e.conftest import PAIR, Site, eventually, figures_of, processes_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

AUGMENT = """\
import time

import torch


class Noise:
    def __call__(self, x):
        time.sleep(0.005)
        return x + 0.3 * torch.randn_like(x)
"""


def test_fashion_mnist(fashion_mnist: Path) -> None:
    spec = DataSpec(dataset="fashion-mnist", path=str(fashion_mnist), flatten=True)
    source = open_data(spec, Path(), seed=0)
    assert (source.info.train_samples, source.info.eval_samples) == (60_000, 10_000)
    x = torch.cat([x for x, _ in source.train_batches(0)])
    assert abs(x.mean().item()) < 1e-3
    assert abs(x.std().item() - 1) < 1e-3


def test_batches_made_by_processes_are_the_same(site: Site) -> None:
    """Plain backpropagation, so that figures agree to the last digit; also after a kill."""
    (site.folder / "augment.py").write_text(AUGMENT)
    text = site.write(7, chain=PAIR).read_text()
    text = text.replace("defaults: {", "defaults: {interface: exact, ")
    more = "batch_size: 64, validation: 0.2, augment: [{import: 'augment:Noise'}], workers: "

    def trained(workers: int, *, killed: bool = False) -> list[float]:
        chain = site.folder / f"chain{workers}.yaml"
        chain.write_text(text.replace("batch_size: 64", f"{more}{workers}"))
        folder = f"runs/{workers}"
        site.run("up", chain, "--backend", "process", "-d", "--run-dir", folder)
        if killed:
            root = site.folder / folder
            eventually("an epoch", lambda: (figures_of(root).epoch or 0) > 1)
            pid = RunState.read(RunDir(root)).modules["bottom"].pid
            assert pid is not None
            made: list[int] = []

            def seen() -> bool:
                made[:] = [one for one in processes_of(site.folder) if parent_of(one) == pid]
                return len(made) == workers

            eventually("processes of the head", seen)
            os.kill(pid, signal.SIGKILL)
            eventually("they are gone, too", lambda: not {*made} & {*processes_of(site.folder)})
        site.run("wait", folder, timeout_s=240)
        figures = site.json("status", folder)
        assert figures["modules"][0]["restarts"] == int(killed)
        losses = [one["loss"] for one in (*figures["evaluations"], figures["test"])]
        assert len(losses) == 8
        return losses

    assert trained(0) == trained(2, killed=True)


TAGS = """\
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Tags(Dataset):
    def __init__(self, train):
        draw = torch.Generator().manual_seed(int(train))
        lengths = torch.randint(2, 13, (200,), generator=draw).tolist()
        self.rows = [torch.randint(1, 9, (length,), generator=draw) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.rows[index].roll(1) % 3


def pad(rows):
    words, tags = zip(*rows)
    return pad_sequence(words, True), pad_sequence(tags, True, -100)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.gru(x)[0]
"""


@pytest.mark.parametrize("labels", ["head", "tail"])
def test_batches_as_long_as_their_longest_text(
    site: Site, monkeypatch: pytest.MonkeyPatch, labels: str
) -> None:
    """A tag for each word, and ``exact``: what a loop of plain torch trains, with the same pads."""
    (site.folder / "tags.py").write_text(TAGS)
    monkeypatch.chdir(site.folder)
    with monkeypatch.context() as patch:  # the fork server, which stays, would name the folder
        patch.syspath_prepend(str(site.folder))
        reads = importlib.import_module("tags").Reads
    torch.manual_seed(1)
    modules = {"words": nn.Embedding(9, 8), "reads": reads(), "tells": nn.Linear(16, 3)}
    plain = copy.deepcopy(nn.Sequential(*modules.values()))
    chain = Chain.from_modules(
        modules,
        data={
            "dataset": "tags:Tags",
            "collate": "tags:pad",
            "max_length": 14,
            "batch_size": 16,
            "eval_batch_size": 4,
            "labels": labels,
        },
        epochs=2,
        defaults={"interface": "exact", "optimizer": {"SGD": {"lr": 0.5}}},
    )
    run = chain.train(backend="process")
    assert run.wait(120).phase == "finished"
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    source = open_data(chain.prepared.chain.data, site.folder, seed=0)
    lengths = set[int]()
    for epoch in (1, 2):
        for x, y in source.train_batches(epoch):
            assert isinstance(x, torch.Tensor)
            lengths.add(x.shape[1])
            optimizer.zero_grad()
            cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
    assert len(lengths) > 1, "or it shows nothing"
    found, expected = run.model().state_dict(), plain.state_dict()
    for ours, theirs in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    right = [(plain(x).argmax(2) == y)[y >= 0] for x, y in source.eval_batches()]
    assert run.evaluate()["accuracy"] == pytest.approx(torch.cat(right).float().mean().item())
    predicted = run.predict()
    assert predicted.outputs.shape == (200, 12, 3)
    assert predicted.labels is not None
    filled = predicted.outputs.isnan().all(2)
    assert predicted.labels[filled].unique().tolist() == [-100]
    assert predicted.evaluate() == pytest.approx(run.evaluate())
    assert int(predicted.confusion().sum()) == len(torch.cat(right))
    if labels == "tail" or find_spec("uvicorn") is None:
        return
    url = site.json("serve", "--name", "tags", "--backend", "process", "-d", "--port", "0")["url"]

    def ask(length: int) -> None:
        x = torch.randint(1, 9, (3, length))
        tensor = {"name": "input", "datatype": "INT64", "shape": [3, length], "data": x.tolist()}
        body = json.dumps({"inputs": [tensor]}).encode()
        with urlopen(f"{url}/v2/models/tags/infer", body, timeout=60) as answer:
            (output,) = json.load(answer)["outputs"]
        y = torch.tensor(output["data"]).view(output["shape"])
        torch.testing.assert_close(y, plain(x), rtol=1e-4, atol=1e-5)

    try:
        with ThreadPoolExecutor(8) as clients:
            list(clients.map(ask, [2, 5, 14, 5, 1, 14, 2, 9] * 4))
        with urlopen(f"{url}/v2/models/tags", timeout=60) as answer:
            described = json.load(answer)
        shapes = [described[part][0]["shape"] for part in ("inputs", "outputs")]
        assert shapes == [[-1, -1], [-1, -1, 3]]
        with pytest.raises(HTTPError, match="400"):
            ask(15)
    finally:
        site.run("serve", "--stop")


def test_a_language_model_is_trained_and_writes(site: Site) -> None:
    """As the template's first lines say, on a little of the text."""
    site.run("init", "--template", "lm")
    chain = site.folder / "chain.yaml"
    some = "batch_size: 32\n  train_limit: 640\n  eval_limit: 64\n"
    chain.write_text(chain.read_text().replace("batch_size: 32\n", some))
    site.run("validate")
    figures = site.json("up", "--backend", "process")
    first, second = figures["evaluations"]
    assert second["bits_per_character"] < first["bits_per_character"] < 8
    site.run("export", "-o", "model.safetensors")
    command = [sys.executable, "generate.py", "--prompt", "def ", "--bytes", "20"]
    text = subprocess.run(command, cwd=site.folder, capture_output=True, check=True).stdout
    assert text.startswith(b"def ")
    assert len(text) == 25


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
