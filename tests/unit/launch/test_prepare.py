"""Checking a chain before anything is made of it."""

from __future__ import annotations

from pathlib import Path

from dni_runtime.launch.prepare import prepare

CHAIN = """\
name: small
data: {dataset: digits, flatten: true}
mounts: [{source: scratch}, {source: /data}]
image: {require_signed: key.asc}
modules:
  - name: whole
    layers: [{Linear: {in_features: 64, out_features: 10}}]
"""


def test_paths_count_from_the_folder_of_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN)
    chain = prepare(path).chain
    assert [mount.source for mount in chain.mounts] == [str(tmp_path / "scratch"), "/data"]
    assert chain.image.require_signed == str(tmp_path / "key.asc")
