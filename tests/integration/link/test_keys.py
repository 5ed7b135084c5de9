"""Files of keys: who may read them, and what is refused."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from dni_runtime.errors import DataError
from dni_runtime.run import keys
from dni_runtime.run.keys import KeyPair, RunKeys
from dni_runtime.run.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_files_are_their_owners_alone(run: RunDir) -> None:
    before = os.umask(0)
    try:
        assert keys.make(run, "tail")
    finally:
        os.umask(before)
    assert mode(run.keys) == 0o700
    files = sorted(path.name for path in run.keys.iterdir())
    assert files == ["tail.key", "tail.pub"]
    assert {mode(path) for path in run.keys.iterdir()} == {0o600}
    pair = keys.load(run, "tail")
    assert zmq.curve_public(pair.secret) == pair.public == keys.public(run, "tail")
    assert pair.secret not in (run.keys / "tail.pub").read_bytes()


def test_who_starts_again_has_the_same_key(run: RunDir) -> None:
    assert keys.make(run, "tail")
    first = keys.load(run, "tail")
    assert not keys.make(run, "tail")
    assert RunKeys(run, "tail").pair == first


def test_every_module_has_its_own(run: RunDir) -> None:
    pairs = []
    for module in ("stem", "tail"):
        keys.make(run, module)
        pairs.append(keys.load(run, module))
    assert len({key for pair in pairs for key in (pair.public, pair.secret)}) == 4


def test_a_public_key_that_got_lost_comes_back(run: RunDir) -> None:
    keys.make(run, "tail")
    (run.keys / "tail.pub").unlink()
    assert keys.public(run, "tail") is None
    keys.make(run, "tail")
    assert keys.public(run, "tail") == keys.load(run, "tail").public


def test_a_secret_is_not_shown() -> None:
    pair = KeyPair.new()
    for shown in (repr(pair), str(pair), f"{pair}"):
        assert pair.secret.decode() not in shown
        assert pair.public.decode() in shown


def open_to_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o040)


def open_to_others(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o001)


def replaced_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def given_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("name", ["tail.key", "tail.pub"])
@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (open_to_group, "is open to others (mode 0640)"),
        (open_to_others, "is open to others (mode 0601)"),
        (replaced_by_link, "cannot be opened as a plain file"),
        (replaced_by_pipe, "is not a plain file"),
        (given_away, "belongs to user 12345"),
    ],
)
def test_a_file_that_others_can_touch(
    run: RunDir, name: str, break_it: Callable[[Path], None], expected: str
) -> None:
    keys.make(run, "tail")
    break_it(run.keys / name)
    read = keys.load if name == "tail.key" else keys.public
    with pytest.raises(DataError) as caught:
        read(run, "tail")
    assert expected in caught.value.message
    assert name in caught.value.message
    assert "remove its folder 'keys'" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (open_to_group, "is open to others (mode 0740)"),
        (given_away, "belongs to user 12345"),
        (replaced_by_link, "cannot be opened"),
    ],
)
def test_a_folder_that_others_can_enter(
    run: RunDir, break_it: Callable[[Path], None], expected: str
) -> None:
    keys.make(run, "tail")
    break_it(run.keys)
    for use in (keys.load, keys.public, keys.make):
        with pytest.raises(DataError) as caught:
            use(run, "tail")
        assert expected in caught.value.message


@pytest.mark.parametrize(
    "content",
    [b"", b"x\ny\n", bytes(40) + b"\n" + bytes(40) + b"\n", b"a" * 40 + b"\n" + b"b" * 41],
)
def test_a_damaged_file(run: RunDir, content: bytes) -> None:
    keys.make(run, "tail")
    (run.keys / "tail.key").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        keys.load(run, "tail")


@pytest.mark.parametrize("content", [b"", b"short", b"a" * 45, b"~" * 40, b"#" * 40])
def test_a_damaged_public_key(run: RunDir, content: bytes) -> None:
    """ZeroMQ's thread that asks who may connect must not meet one."""
    keys.make(run, "tail")
    (run.keys / "tail.pub").write_bytes(content + b"\n")
    with pytest.raises(DataError, match="damaged"):
        keys.public(run, "tail")


def test_a_pair_that_does_not_belong_together(run: RunDir) -> None:
    keys.make(run, "tail")
    first, second = KeyPair.new(), KeyPair.new()
    (run.keys / "tail.key").write_bytes(first.public + b"\n" + second.secret + b"\n")
    with pytest.raises(DataError, match="damaged") as caught:
        keys.load(run, "tail")
    assert second.secret.decode() not in str(caught.value)


def test_a_missing_file(run: RunDir) -> None:
    assert keys.public(run, "tail") is None
    with pytest.raises(DataError, match="missing"):
        keys.load(run, "tail")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_or_quota_is_said_as_that(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(keys, "write_atomic", full)
    with pytest.raises(OSError, match=os.strerror(code)):
        keys.make(run, "a")


def test_whoever_makes_keys_removes_them(run: RunDir) -> None:
    keys.make(run, "tail")  # by the launcher
    by_hand = RunKeys(run, "stem")
    assert not (run.keys / "stem.key").exists()  # nothing is made before it is needed
    assert by_hand.pair
    tail = RunKeys(run, "tail")
    assert tail.pair
    tail.leave()
    by_hand.leave()
    assert sorted(path.name for path in run.keys.iterdir()) == ["tail.key", "tail.pub"]
    keys.remove(run)
    assert not run.keys.exists()
    keys.remove(run)
