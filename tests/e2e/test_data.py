"""Real Fashion-MNIST; a head with processes that augment its batches; the language model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
