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


ALONE = """\
import os
from torch import nn

class Alone(nn.ReLU):
    def __init__(self):
        super().__init__()
        os.environ["NCCL_HOSTID"] = str(os.getpid())
"""
"""A layer for replicas that share one GPU: NCCL allows that if they seem to be on several hosts."""


def write(site: Site, defaults: str, *more: str) -> None:
    chain = ON_GPU.replace("defaults: {", f"defaults: {{interface: {defaults}, ")
    (site.folder / "chain.yaml").write_text("\n".join([chain, *more, ""]))


@pytest.mark.parametrize(
    "defaults",
    [
        "exact",
        "delayed",
        "mixed",
        "{mixed: {local: {optimizer: {SGD: {lr: 0.1, momentum: 0.9}}}}}",
        *(f"{one}, precision: float16" for one in ("exact", "mixed")),
    ],
)
def test_a_chain_on_a_gpu(site: Site, defaults: str) -> None:
    write(site, defaults, "on_nan: skip")
    figures = site.json("up", "--backend", "process")
    assert (figures["state"], figures["exit_code"]) == ("finished", 0)
    assert figures["accuracy"] > 0.9
    assert f"runs on {torch.device('cuda', 0)}" in site.latest.log("top", 1).read_text()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_replicas_in_a_process_group_on_a_gpu(site: Site, backend: str) -> None:
    """Rows stay on it; gloo makes copies of them."""
    write(site, "mixed", f"replication: {{strategy: all-reduce, backend: {backend}}}")
    (site.folder / "alone.py").write_text(ALONE)
    path = site.folder / "chain.yaml"
    text = path.read_text().replace("ReLU]", "{import: 'alone:Alone'}]")
    path.write_text(text.replace("- name: middle", "- name: middle\n    replicas: 2"))
    figures = site.json("up", "--backend", "process")
    assert (figures["state"], figures["accuracy"] > 0.9) == ("finished", True)


def test_a_chain_in_containers_on_a_gpu(site: Site, tool: Apptainer) -> None:
    write(site, "mixed")
    site.run("build")
    figures = site.json("up", "--backend", "apptainer")
    assert (figures["state"], figures["accuracy"] > 0.9) == ("finished", True)


def test_a_chain_beside_backprop_on_the_same_gpu(site: Site) -> None:
    write(site, "mixed")
    found = site.json("compare", "--interfaces", "mixed", "--out", "c")
    assert [row["method"] for row in found["rows"]] == ["backprop", "mixed"]
    assert min(row["mean"] for row in found["rows"]) > 0.9


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
