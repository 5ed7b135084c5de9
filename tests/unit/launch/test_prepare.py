"""Checking a chain before anything is made of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dni_runtime.errors import DataError
from dni_runtime.launch.prepare import prepare
from dni_runtime.launch.settings import LaunchSettings, make_plan

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


OWNERS = """\
name: owners
data: {dataset: npz, path: "own/{replica}.npz", batch_size: 4}
modules:
  - {name: a, replicas: 2, layers: [{Linear: {in_features: 3, out_features: 2}}]}
  - {name: b, layers: [{Linear: {in_features: 2, out_features: 2}}]}
"""


def test_each_replica_of_the_head_may_have_data_of_its_own(tmp_path: Path) -> None:
    path, own = tmp_path / "chain.yaml", tmp_path / "own"
    path.write_text(OWNERS)
    own.mkdir()

    def save(owner: int, samples: int) -> None:
        x, y = np.ones((samples, 3), np.float32), np.arange(samples) % 2
        np.savez(own / f"{owner}.npz", x_train=x, y_train=y, x_eval=x[:4], y_eval=y[:4])

    save(1, 8)
    with pytest.raises(DataError, match=r"chain.yaml:2.*own/2.npz"):
        prepare(path)
    save(2, 9)
    with pytest.raises(DataError, match=r"2.npz' has 9 training .*1.npz' has 8") as caught:
        prepare(path)
    assert "train_limit" in str(caught.value.hint)
    save(2, 8)
    prepared = prepare(path)
    assert prepared.total_steps == 2
    settings = LaunchSettings(
        run=tmp_path / "run", backend="process", sockets=tmp_path / "ipc", data=prepared.data
    )
    plan = make_plan(prepared.chain, prepared.replicas, settings)
    assert [one.data for one in plan.workers] == [str(own / "1.npz"), str(own / "2.npz"), None]
