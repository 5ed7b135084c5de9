"""Batches that are made by processes beside the head's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.data import open_data
from dni_runtime.data.ahead import in_processes
from dni_runtime.errors import DataError, WorkerError
from dni_runtime.spec import DataSpec
from tests.conftest import eventually

# Python 3.12 and later warn of forks in processes with threads, torch of more workers than cores.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)

SOURCE = """
import os
import time

import torch


class Squares(torch.utils.data.Dataset):
    def __init__(self, train, fault=None):
        self.fault = fault if train else None

    def __len__(self):
        return 22

    def __getitem__(self, index):
        if index == 9 and self.fault == "error":
            raise ValueError("bad file")
        if index == 9 and self.fault == "death":
            os._exit(3)
        if index == 9 and str(self.fault).startswith("/"):
            open(self.fault, "x").close()
            time.sleep(600)
        if self.fault == "draw":
            return torch.rand(3), os.getpid()
        return torch.full((3,), float(index**2)), index


class Noise:
    def __call__(self, x):
        return x + torch.randn_like(x)
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads, handler = set(threading.enumerate()), signal.getsignal(signal.SIGCHLD)
    yield
    assert multiprocessing.active_children() == []
    eventually(  # those of queues end by themselves
        "threads end", lambda: set(threading.enumerate()) <= threads, every_s=0.02
    )
    assert signal.getsignal(signal.SIGCHLD) == handler


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DataSpec]]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "workersdata.py").write_text(SOURCE)

    def spec(fault: str | None = None, *, noise: bool = False, **more: Any) -> DataSpec:
        given = {"dataset": "workersdata:Squares", "batch_size": 4, "args": {"fault": fault}}
        given["augment"] = [{"import": "workersdata:Noise"}] if noise else []
        return DataSpec.model_validate(given | more)

    yield spec
    sys.modules.pop("workersdata", None)


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def read(spec: DataSpec, base: Path, epoch: int = 1, start: int = 0) -> Batches:
    return list(open_data(spec, base, seed=5).train_batches(epoch, start))


def same(ours: Batches, theirs: Batches) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 30])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"noise": True},
        {"noise": True, "streams": True},
        {"noise": True, "dataset": "digits", "args": {}, "batch_size": 200, "flatten": True},
    ],
)
def test_the_batches_are_the_same(make, tmp_path: Path, workers: int, keywords) -> None:
    alone = read(make(**keywords), tmp_path)
    spec = make(**keywords, workers=workers)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    assert same(read(spec, tmp_path), alone)
    assert torch.equal(torch.rand(2), expected)
    for start in (1, len(alone) - 1, len(alone)):
        assert same(read(spec, tmp_path, start=start), alone[start:])
    assert not same(read(spec, tmp_path, epoch=2), alone)


def test_evaluation_is_as_before(make, tmp_path: Path) -> None:
    alone, beside = (
        open_data(make(noise=True, workers=n, validation=5), tmp_path, seed=5) for n in (0, 2)
    )
    assert same(list(beside.eval_batches()), list(alone.eval_batches()))
    assert same(list(beside.test_batches()), list(alone.test_batches()))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_data_set_draws_is_the_same_after_a_restart(
    make, tmp_path: Path, workers: int
) -> None:
    spec = make("draw", workers=workers)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    whole = read(spec, tmp_path)
    assert torch.equal(torch.rand(2), expected)  # the model's numbers are its own
    again = read(spec, tmp_path, start=2)
    shared = open_data(spec, tmp_path, seed=5).some_batches("train", 1, 2, lambda: True)
    for (x, _), (x_again, _), batch in zip(whole[2:], again, shared, strict=True):
        assert torch.equal(x, x_again)
        assert batch is not None  # as a head with replicas reads it
        assert torch.equal(x, torch.as_tensor(batch[0]))
    drawn = [float(v) for x, _ in (*whole, *read(spec, tmp_path, epoch=2)) for v in x.flatten()]
    assert len(set(drawn)) == len(drawn)
    makers = {int(pid) for _, pids in whole for pid in pids}
    assert len(makers) == max(workers, 1)
    assert os.getpid() not in makers


def test_nothing_is_started_where_there_is_nothing_to_do(tmp_path: Path) -> None:
    spec = DataSpec(workers=2)
    batches = open_data(spec, tmp_path, seed=0).train_batches(1)
    next(batches)
    assert multiprocessing.active_children() == []


def test_an_error_comes_at_its_batch_as_without_them(make, tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        spec = make("error", workers=workers, shuffle=False)
        batches = open_data(spec, tmp_path, seed=0).train_batches(1)
        assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(DataError, match="samples 8, 9, 10, 11: ValueError: bad file") as caught:
            next(batches)
        found.append(str(caught.value))
    assert found[0] == found[1]


def test_a_process_that_dies_is_an_error(make, tmp_path: Path) -> None:
    spec = make("death", workers=1, shuffle=False)
    batches = open_data(spec, tmp_path, seed=0).train_batches(1)
    with pytest.raises(WorkerError, match=r"makes batches ahead has died(.|\n)*data\.workers"):
        list(batches)


def test_an_abandoned_epoch_ends_its_processes(make, tmp_path: Path) -> None:
    batches = open_data(make(workers=2), tmp_path, seed=0).train_batches(1)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []


def test_a_process_that_hangs_is_killed(make, tmp_path: Path) -> None:
    asleep = tmp_path / "asleep"
    spec = make(str(asleep), workers=1, shuffle=False)
    batches = open_data(spec, tmp_path, seed=0).train_batches(1)
    next(batches)
    eventually("it sleeps", asleep.exists, every_s=0.02)
    (process,) = multiprocessing.active_children()
    batches.close()
    assert process.exitcode == -signal.SIGKILL


def test_they_outlast_signals_to_all_processes() -> None:
    """As when Slurm ends a job: the head goes on until it has found a place to stop."""
    results = in_processes(torch.tensor, range(40), 1, seed=0)
    assert int(next(results)) == 0
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(process.pid, number)
    assert [int(number) for number in results] == list(range(1, 40))


HEAD = """
import multiprocessing, time, torch
from dni_runtime.data.ahead import in_processes

results = in_processes(torch.tensor, range(1000), 2, seed=0)
next(results)
print(*[process.pid for process in multiprocessing.active_children()], flush=True)
time.sleep(600)
"""


def test_they_do_not_outlive_a_head_that_is_killed() -> None:
    head = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HEAD)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert head.stdout is not None
        pids = [int(word) for word in head.stdout.readline().split()]
        assert len(pids) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        head.kill()
        head.communicate()
    eventually("they end", lambda: not any(_runs(pid) for pid in pids), every_s=0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
