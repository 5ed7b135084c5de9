"""Who owns a run: one at a time, whoever tries, and however late."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from dni_runtime.errors import DataError, UsageError
from dni_runtime.files import read_json
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.lease import SILENCE_S, TOKEN_VARIABLE, Lease, LeaseError, Owner
from dni_runtime.run.rundir import RunDir, socket_path
from dni_runtime.schedulers.runtime_files import remove_runtime_files
from dni_runtime.supervise.journal import Journal
from tests.lines import read_lines


class Clock:
    """Time that passes by sleeping; ``beats`` moves the counter of an owner meanwhile."""

    def __init__(self, owner: Lease | None = None) -> None:
        self.now_s = 0.0
        self._owner = owner

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self._owner is not None and self.now_s > 30:
            self._owner.beat()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_an_owner_shows_that_it_lives_on_a_full_disk_too(run: RunDir) -> None:
    """Its counter is written in place: else another host would take over from it."""
    lease = Lease.take(run)
    lease.beat()
    beats = run.beats(lease.owner.token)
    before = beats.stat()
    lease.beat()
    assert read_json(beats) == {"beats": 2}
    assert (beats.stat().st_ino, beats.stat().st_size) == (before.st_ino, before.st_size)


def elsewhere(run: RunDir, **fields: object) -> Lease:
    """A lease of a process on another host."""
    owner = Owner.me().model_copy(update={"host": "elsewhere", **fields})
    run.leases.mkdir(exist_ok=True)
    owner.write(run.owner)
    return Lease(run, owner)


def test_one_owner(run: RunDir) -> None:
    lease = Lease.take(run)
    files = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=f"belongs to process {os.getpid()} on "):
        Lease.take(run)
    assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == files
    lease.release()
    again = Lease.take(run)
    assert not again.lost
    again.check()


def test_an_owner_elsewhere_is_gone_when_it_stays_silent(run: RunDir) -> None:
    """Its clock is not looked at: it may be hours off."""
    old, clock, told = elsewhere(run), Clock(), list[str]()
    lease = Lease.take(run, told=told.append, clock=clock, sleep=clock.sleep)
    assert clock.now_s >= SILENCE_S
    assert "process" in told[0]
    assert "elsewhere" in told[0]
    assert old.lost
    assert not lease.lost
    with pytest.raises(LeaseError, match=f"taken over by process {os.getpid()}"):
        old.check()
    old.release()
    assert not lease.lost


def test_an_owner_elsewhere_that_lives(run: RunDir) -> None:
    clock = Clock(elsewhere(run))
    with pytest.raises(UsageError, match="on elsewhere"):
        Lease.take(run, clock=clock, sleep=clock.sleep)
    assert clock.now_s < SILENCE_S


@pytest.mark.parametrize("machine", ["another-boot 4026531836", "the same boot, 4026532999"])
def test_an_owner_whose_processes_cannot_be_seen_from_here(run: RunDir, machine: str) -> None:
    """A host of the same name, or a container on this one: it lives as long as it counts."""
    seen = {"host": Owner.me().host, "machine": machine, "born": 1}
    clock = Clock(elsewhere(run, **seen))
    with pytest.raises(UsageError, match="belongs to"):
        Lease.take(run, clock=clock, sleep=clock.sleep)
    clock = Clock()
    assert not Lease.take(run, clock=clock, sleep=clock.sleep).lost
    assert clock.now_s >= SILENCE_S


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_links(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    lease = Lease.take(run)
    with pytest.raises(UsageError, match="belongs to"):
        Lease.take(run)
    lease.release()
    assert not Lease.take(run).lost
    assert not [path for path in run.root.rglob(".*") if path.is_file()]


def test_a_file_that_another_one_is_about_to_write(run: RunDir) -> None:
    """Without links it is there before its content is."""
    run.leases.mkdir()
    run.owner.touch()
    writing = threading.Timer(0.2, Owner.me().write, [run.owner])
    writing.start()
    with pytest.raises(UsageError, match="belongs to"):
        Lease.take(run)
    writing.join()


def test_a_job_that_begins_again_need_not_wait(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(run, job="17")
    clock = Clock()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not Lease.take(run, "17", clock=clock, sleep=clock.sleep).lost
    assert clock.now_s == 0


def test_two_hosts_of_one_job(run: RunDir) -> None:
    clock = Clock(elsewhere(run, job="17"))
    with pytest.raises(UsageError, match="on elsewhere, job 17"):
        Lease.take(run, "17", clock=clock, sleep=clock.sleep)


def test_a_process_hands_over(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Lease.take(run)
    for name, value in first.hand_over().items():
        monkeypatch.setenv(name, value)
    second = Lease.take(run)
    assert first.lost
    assert not second.lost
    assert TOKEN_VARIABLE not in os.environ
    first.release()
    assert not second.lost


def test_a_damaged_file(run: RunDir) -> None:
    run.owner.write_text("{}")
    with pytest.raises(DataError, match="does not name the owner"):
        Lease.take(run)


def test_who_has_lost_the_run_writes_nothing(run: RunDir) -> None:
    old = elsewhere(run)
    journal = Journal(run, RunState.begin("process", 1, ["a"]), time.monotonic, old)
    journal.event("before")
    clock = Clock()
    Lease.take(run, clock=clock, sleep=clock.sleep)
    with pytest.raises(LeaseError):
        journal.event("after")
    journal.event("after")
    journal.write()
    assert [line["event"] for line in read_lines(run.events)] == ["before"]
    assert not run.state.exists()


def test_nothing_is_removed_through_a_link(run: RunDir, tmp_path: Path) -> None:
    """Others may write where the folder of sockets lies, and know its name."""
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "thesis").write_text("text")
    link = tmp_path / "sockets"
    link.symlink_to(mine)
    remove_runtime_files(run, link)
    assert (mine / "thesis").exists()
    remove_runtime_files(run, mine)
    assert (mine / "thesis").exists(), "no socket"


def test_sockets_outlive_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    assert socket_path(tmp_path).parent == Path("/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socket_path(tmp_path).parent == tmp_path
