"""Images get the packages that a network's source imports, and no others."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from dni_runtime.split.chainfile import import_paths, requirements

FILES = {
    "nets/__init__.py": "",
    "nets/plain.py": "import os, torch\nfrom torch import nn\n",
    "nets/deep.py": "from nets import helper\nfrom .other import x\n",
    "nets/helper.py": "def f():\n    import click\n",
    "nets/other.py": "from . import last\n",
    "nets/last.py": "import zmq.green\n",
    "nets/unused.py": "import hypothesis\n",
}


@pytest.mark.parametrize(
    ("target", "packages"),
    [
        ("nets.plain:build", []),
        ("nets.deep:build", ["click", "pyzmq"]),
        ("nets.nothing:build", []),
        ("hypothesis.core:given", ["hypothesis"]),
    ],
)
def test_packages(tmp_path: Path, target: str, packages: list[str]) -> None:
    (tmp_path / "nets").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert requirements([target], tmp_path) == [f"{name}=={version(name)}" for name in packages]


def test_packages_of_the_data() -> None:
    data = {
        "dataset": "datasets:load_from_disk",
        "collate": {"import": "transformers:Padding.of", "args": {"pad": {"import": "mine:pad"}}},
        "augment": [{"import": "torchvision.transforms.v2:RandomCrop"}],
        "path": "c:/texts",
        "batch_size": 8,
    }
    assert list(import_paths(data)) == [
        "datasets:load_from_disk",
        "transformers:Padding.of",
        "mine:pad",
        "torchvision.transforms.v2:RandomCrop",
    ]
