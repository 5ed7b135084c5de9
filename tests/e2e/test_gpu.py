"""Modules on a real GPU: ``make gpu``, on a machine that has one."""

from __future__ import annotations

import pytest
import torch

from dni_runtime.image.apptainer import Apptainer
from dni_runtime.worker.device import Copies
from tests.e2e.conftest import CHAIN, Site

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: see 'make gpu'"),
]

ON_GPU = (CHAIN % 8).replace("\n    layers:", "\n    device: cuda\n    layers:")


def write(site: Site, interface: str) -> None:
    chain = ON_GPU.replace("defaults: {", f"defaults: {{interface: {interface}, ")
    (site.folder / "chain.yaml").write_text(chain)


@pytest.mark.parametrize("interface", ["exact", "delayed", "mixed"])
def test_a_chain_on_a_gpu(site: Site, interface: str) -> None:
    write(site, interface)
    figures = site.json("up", "--backend", "process")
    assert (figures["state"], figures["exit_code"]) == ("finished", 0)
    assert figures["accuracy"] > 0.9
    assert f"runs on {torch.device('cuda', 0)}" in site.latest.log("top", 1).read_text()


def test_replicas_in_a_process_group_on_a_gpu(site: Site) -> None:
    """Rows stay on it, of which gloo makes copies. NCCL needs a GPU for each replica."""
    write(site, "mixed")
    path = site.folder / "chain.yaml"
    text = path.read_text().replace("device: cuda\n", "device: cuda\n    replicas: 2\n")
    path.write_text(f"{text}\nreplication: {{strategy: all-reduce, backend: gloo}}\n")
    figures = site.json("up", "--backend", "process")
    assert (figures["state"], figures["accuracy"] > 0.9) == ("finished", True)


def test_a_chain_in_containers_on_a_gpu(site: Site, tool: Apptainer) -> None:
    write(site, "mixed")
    site.run("build")
    figures = site.json("up", "--backend", "apptainer")
    assert (figures["state"], figures["accuracy"] > 0.9) == ("finished", True)


def test_a_chain_beside_backprop_on_the_same_gpu(site: Site) -> None:
    write(site, "mixed")
    found = site.json("bench", "chain", "--seconds", "3", "--repetitions", "1")
    assert found["ratio"]["median"] > 0


def test_copies_bring_what_was_computed() -> None:
    """Blocks of memory are used again and again while copies and products overlap."""
    device = torch.device("cuda", 0)
    copies = Copies(device)
    ones = torch.ones(1024, 1024, device=device) / 1024
    under_way = []
    for number in range(200):
        x = copies.to_device(torch.full((1024, 1024), float(number)))
        for _ in range(4):
            x = x @ ones
        under_way.append((number, copies.to_host(x)))
        del x
        copies.pace()
        if len(under_way) > 3:
            expected, fetched = under_way.pop(0)
            assert fetched.wait().sub(expected).abs().max() < 0.01 * max(expected, 1)
            assert fetched.here
