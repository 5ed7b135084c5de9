"""What a module has processed, over all its attempts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dni_runtime.errors import WorkerError
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.ledger import RECORD_BYTES, Counts, Ledger, ModuleProgress


def test_a_killed_worker_s_counts_are_found_again(tmp_path: Path) -> None:
    """It has closed nothing."""
    path = tmp_path / "a.json"
    killed = Ledger(path, ModuleProgress())
    for id in range(1, 11):
        killed.trained(id, 1 + id // 8, 32)
    killed.processed(11)
    counts = Ledger.reopen(path, ModuleProgress(Counts(id=4, step=4))).progress.counts
    assert (counts.id, counts.step, counts.samples) == (11, 10, 320)
    assert (counts.epoch, counts.epoch_batches) == (2, 3)
    killed.close()


def test_each_batch_is_counted_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.json", ModuleProgress())
    for id in (1, 2, 3, 2, 3, 4):
        ledger.trained(id, 1, 8)
    assert (ledger.progress.counts.step, ledger.progress.counts.epoch_batches) == (4, 4)
    assert ledger.new(5)
    assert not ledger.new(4)
    ledger.close()


def test_a_restarted_module_is_behind_its_counts_for_a_while(tmp_path: Path) -> None:
    """Epochs end once each, even if an earlier attempt had the marker of one of them."""
    path = tmp_path / "a.json"
    Ledger(path, ModuleProgress(Counts(id=9, step=7, samples=56, epoch=3))).close()
    ledger = Ledger.reopen(
        path, ModuleProgress(Counts(id=4, step=4), id=4, epoch=2, epochs_ended=1)
    )
    progress = ledger.progress
    assert (progress.id, progress.epoch, progress.step, progress.samples) == (4, 2, 7, 56)
    ledger.at(5, 2)
    ledger.trained(5, 2, 8)
    assert (progress.id, progress.step) == (5, 7)
    assert [ledger.end_epochs(epoch) for epoch in (1, 2, 2, 4, 3)] == [0, 1, 0, 2, 0]
    ledger.at(10, 3)
    ledger.trained(10, 3, 8)
    ledger.at(11)
    assert (progress.id, progress.epoch, progress.step, progress.samples) == (11, 3, 8, 64)
    ledger.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": 3}'])
def test_without_a_newer_record_the_checkpoint_counts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    ledger = Ledger.reopen(path, ModuleProgress(Counts(id=7, step=5)))
    assert (ledger.progress.counts.id, ledger.progress.counts.step) == (7, 5)
    ledger.close()
    assert path.stat().st_size == RECORD_BYTES


def test_a_folder_that_is_gone_does_not_end_training(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    path = tmp_path / "ledger" / "a.json"
    ledger = Ledger(path, ModuleProgress())
    ledger._path = tmp_path / "none" / "a.json"
    ledger.close()
    ledger.trained(1, 1, 8)
    assert ledger.progress.counts.step == 1


def test_without_a_record_a_module_does_not_take_its_place(tmp_path: Path) -> None:
    """Whoever is started after it could not know that it had."""
    with pytest.raises(WorkerError, match="cannot be written"):
        Ledger(tmp_path / "none" / "a.json", ModuleProgress())


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\0" * 10])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    assert Counts.read(path) is None


def test_others_read_a_record_while_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    ledger = Ledger(path, ModuleProgress())
    ledger.trained(1, 1, 8)
    counted = Counts(id=1, step=1, samples=8, epoch=1, epoch_batches=1, attempt=1)
    assert Counts.read(path) == counted
    ledger.close()


@pytest.mark.parametrize("numbers", [3, 5000])
def test_an_evaluation_goes_on_where_it_was(tmp_path: Path, numbers: int) -> None:
    """Its sums are as many as a metric keeps; the record that tells of them stays one page."""
    path = tmp_path / "a.json"
    ledger = Ledger(path, ModuleProgress())
    for id in range(1, 4):
        ledger.keep_evaluation({"sums": [id] * numbers})
        ledger.processed(id)
    ledger.keep_evaluation({"sums": [4] * numbers})
    if numbers > 1000:  # killed between the two writes: the record before still has its own
        ledger.progress.counts.id, ledger.progress.counts.evaluation = 4, {"sums": [4] * numbers}
        ledger._without_evaluation()
        ledger.progress.counts.id = 3
    assert path.stat().st_size == RECORD_BYTES
    found = Ledger.reopen(path, ModuleProgress()).progress.counts
    assert (found.id, found.evaluation) == (3, {"sums": [3] * numbers})
    ledger.keep_evaluation(None)
    ledger.processed(4)
    assert Counts.read(path) == Counts(id=4, attempt=1)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_ledger_that_is_another_file(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """Code in a container can put a link there; those outside write to it, too."""
    run, mine = RunDir(tmp_path / "run"), tmp_path / "mine"
    run.create()
    mine.write_text(text := '{"id": 3}\n')
    link(mine, path := run.ledger("wide.3"))
    for begin in (Ledger, Ledger.reopen):
        with contextlib.suppress(WorkerError):
            begin(path, ModuleProgress(Counts(id=5))).close()
        assert mine.read_text() == text
