"""Classes of a script or a notebook, written to files that workers import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import beside
from dni_runtime.errors import SpecError
from dni_runtime.resolve.describe import describe_modules, describe_settings, import_path

WIDTH, NAMES = 6, ("even", "odd")
DEVICE, KIND = torch.device("cpu"), torch.float32
x = torch.ones(3)  # the name of a local variable below

@dataclass
class Config:
    size: int = WIDTH
    names: tuple = NAMES

config = Config(size=9)

def scaled(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x.to(DEVICE, KIND)) / math.sqrt(config.size)

def traced(function):
    return function

class Block(nn.Module):
    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        self.size = size
        self.linear = nn.Linear(size, size)

    @traced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(self.linear(x)) + beside.ONE

class Inner(Block):
    pass

class Net(Block):
    def __init__(self, size: int = WIDTH, depth: int = 1) -> None:
        super(Net, self).__init__(size)
        self.depth = depth
        self.blocks = nn.Sequential(*(Inner(size) for _ in range(depth)))

    def forward(self, x: Any) -> Any:
        return self.blocks(super().forward(x))

class Points(Dataset):
    classes = NAMES
    def __init__(self, train):
        self.train = train
    def __len__(self):
        return 8
    def __getitem__(self, index):
        x = torch.full((WIDTH,), float(index))
        return x, index % 2

class Uses(nn.Module):
    def forward(self, y):
        return y + x

class Missing(nn.Module):
    def forward(self, y):
        return y + nowhere

def collate(rows):
    return torch.utils.data.default_collate(rows)

def refused(make):
    try:
        make()
    except SpecError as error:
        print("refused:", str(error).replace("\\n", " "))

def main(folder):
    net = Net(depth=2)
    described = describe_modules({"net": net}, folder)["net"]
    print(described.layers[0]["import"], described.layers[0]["args"])
    args = {"a": {"import": Block, "args": {"size": 3}}, "b": scaled}
    data = {"dataset": Points, "collate": collate, "path": folder, "args": args}
    print(describe_settings(data, folder))
    refused(lambda: import_path(Uses, folder))
    refused(lambda: import_path(Missing, folder))
    refused(lambda: describe_settings({"args": {"net": net}}, folder))
    refused(lambda: import_path(type("Cell", (nn.Module,), {"__module__": "__main__"}), folder))
    torch.save((net.state_dict(), net(torch.ones(2, WIDTH))), folder / "net.pt")
"""

USE = """
import importlib, sys, torch
net, points = sys.argv[1].split(":"), sys.argv[2].split(":")
state, y = torch.load("net.pt")
made = getattr(importlib.import_module(net[0]), net[1])(depth=2)
made.load_state_dict(state)
assert torch.equal(made(torch.ones(2, 6)), y)
data = getattr(importlib.import_module(points[0]), points[1])(train=True)
assert data.classes == ("even", "odd") and data[3][1] == 1 and data[3][0].tolist() == [3.0] * 6
"""

NOTEBOOK = """
import linecache, sys
this = sys.modules["__main__"]
del this.__file__
for number, cell in enumerate(open("cells.txt").read().split("# ---")):
    name = f"/tmp/ipykernel_7/{number}.py"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"), vars(this))
this.main(this.Path.cwd())
"""


@pytest.mark.parametrize("kind", ["script", "notebook"])
def test_what_main_defines(tmp_path: Path, kind: str) -> None:
    (tmp_path / "beside.py").write_text("ONE = 1\n")
    (tmp_path / "use.py").write_text(USE)
    if kind == "script":
        (tmp_path / "run.py").write_text(SCRIPT + "\nmain(Path.cwd())\n")
    else:  # as IPython runs cells; the class is made anew in a later one
        later = SCRIPT[SCRIPT.index("class Net") : SCRIPT.index("class Points")]
        first = SCRIPT.replace("self.blocks(super().forward(x))", "x")
        (tmp_path / "cells.txt").write_text(f"{first}# ---{later}")
        (tmp_path / "run.py").write_text(NOTEBOOK)

    def python(*arguments: str) -> list[str]:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    network, data, uses, missing, holds, unknown = python("run.py")
    target, _, args = network.partition(" ")
    assert args == "{'depth': 2}"
    written = eval(data)  # what this test's own script printed
    module, _, name = written["dataset"].partition(":")
    assert name == "Points"
    assert "import math" not in (tmp_path / f"{module}.py").read_text()  # nothing of the others
    assert written["collate"]["import"].endswith(":collate")
    assert written["path"] == str(tmp_path)
    assert written["args"]["a"]["import"].endswith(":Block")
    assert written["args"]["a"]["args"] == {"size": 3}
    python("use.py", target, written["dataset"])
    assert "'Uses': it uses 'x', a Tensor that is defined there" in uses
    assert f"move it to a file in '{tmp_path}'" in uses
    assert "'Missing': it uses 'nowhere', which is not defined" in missing
    assert "'net' is a Net: a chain file holds numbers" in holds
    assert "'Cell': it needs 'Cell', whose source is not known" in unknown
