from __future__ import annotations

import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dni_runtime.data import describe, locate, open_data, with_defaults
from dni_runtime.data.source import DataSource
from dni_runtime.data.splits import Batch
from dni_runtime.data.text import STDLIB_BYTES, TextSplit
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataInfo, DataSpec
from tests.specs import int64


def text(path: Path | str | None, *, args: dict[str, object] | None = None, **more) -> DataSpec:
    given = {"dataset": "text", "path": None if path is None else str(path), "args": args or {}}
    return DataSpec.model_validate({"batch_size": 4, **given, **more})


def numbered(size: int, context: int, seed: int = 0, **more) -> DataSource:
    """A text whose bytes count upwards, so that a window tells where it lies (size <= 256)."""
    train = TextSplit(torch.arange(size).to(torch.uint8), context, spare=context)
    tokens = int64(context)
    info = DataInfo(sample=tokens, label=tokens, classes=256)
    return DataSource(info, train, train, text(None, **more), seed=seed)


def windows(batches: list[Batch]) -> list[list[int]]:
    return [row for x, _ in batches for row in x.tolist()]


def test_python_has_a_text() -> None:
    spec = text(None)
    info = describe(spec, Path())
    assert info.sample == info.label == int64(64)
    assert info.classes == 256
    assert info.train_samples == (STDLIB_BYTES * 9 // 10 - 1 - 64) // 64
    assert info.eval_samples == (STDLIB_BYTES // 10 - 1) // 64
    assert locate(spec, Path()) is None
    source = open_data(spec, Path(), seed=0)
    assert source.info == info
    x, y = next(source.eval_batches())
    assert torch.equal(x[:, 1:], y[:, :-1])
    found = b"".join(
        file.read_bytes()
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        if not file.name.startswith("_sysconfigdata")
    )
    first = bytes(x[0].tolist()) + bytes(y[0, -1:].tolist())
    assert first == found[STDLIB_BYTES * 9 // 10 :][:65]


@settings(deadline=None)
@given(
    size=st.integers(10, 256),
    context=st.integers(1, 9),
    batch=st.integers(1, 5),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 99),
    data=st.data(),
)
def test_an_epoch_is_the_text_in_windows(size, context, batch, seed, epoch, data) -> None:
    samples = (size - 1 - context) // context
    assume(samples >= 2)
    source = numbered(size, context, seed, batch_size=batch, args={"context": context})
    batches = list(source.train_batches(epoch))
    starts = sorted(row[0] for row in windows(batches))
    left_out = int(batch > 1 and samples % batch == 1)
    assert len(starts) == samples - left_out
    assert len(set(starts)) == len(starts)
    assert {start % context for start in starts} == {starts[0] % context}
    if not left_out:
        assert starts[0] < context
        assert {b - a for a, b in pairwise(starts)} <= {context}
    for x, y in batches:
        assert (x.dtype, y.dtype, x.shape) == (torch.int64, torch.int64, y.shape)
        assert torch.equal(y, x + 1)
    start = data.draw(st.integers(0, len(batches)))
    again = list(numbered(size, context, seed, batch_size=batch).train_batches(epoch, start))
    assert windows(again) == windows(batches[start:])


def test_windows_differ_between_epochs() -> None:
    source = numbered(256, 8)
    offsets = {windows([next(source.train_batches(epoch))])[0][0] % 8 for epoch in range(40)}
    assert len(offsets) > 4


def test_without_shuffle_the_text_is_read_from_its_start() -> None:
    rows = windows(list(numbered(41, 8, shuffle=False, batch_size=2).train_batches(3)))
    assert [row[0] for row in rows] == [0, 8, 16, 24]


@given(
    size=st.integers(10, 256),
    context=st.integers(1, 9),
    held=st.integers(1, 20),
    epoch=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_no_training_window_reaches_into_the_validation_part(
    size, context, held, epoch, shuffle
) -> None:
    samples = (size - 1 - context) // context
    assume(samples > held)
    source = numbered(size, context, batch_size=1, shuffle=shuffle, validation=held)
    train = windows(list(source.train_batches(epoch)))
    evaluated = windows(list(source.eval_batches()))
    assert (len(train), len(evaluated)) == (samples - held, held)
    last = max(row[-1] for row in train) + 1  # its label is one further
    first = min(row[0] for row in evaluated)
    assert last < first <= last + 2 * context
    assert max(row[-1] for row in evaluated) + 1 < size


def test_a_stream_is_contiguous_text() -> None:
    source = numbered(200, 8, streams=True, batch_size=3, eval_batch_size=2)
    for batches, length in ((source.train_batches(5), 7), (source.eval_batches(), 11)):
        streams = torch.cat([x for x, _ in batches], dim=1)
        assert streams.shape[1] == 8 * length
        for row, stream in enumerate(streams.tolist()):
            first = 8 * length * row
            assert stream == list(range(first, first + 8 * length))


def test_evaluation_reads_the_last_part_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    spec = text("a.txt", args={"context": 7, "eval_share": 0.25}, eval_batch_size=3)
    source = open_data(spec, tmp_path, seed=0)
    rows = windows(list(source.eval_batches()))
    assert [row[0] for row in rows] == [150, 157, 164, 171, 178, 185, 192]
    assert max(max(row) for row in windows(list(source.train_batches(0)))) < 150
    assert source.info == describe(spec, tmp_path)


def test_a_folder_is_read_in_sorted_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for name, content in {
        "b.txt": b"b" * 20,
        "a/z.md": b"z" * 20,
        "a/B.PY": b"B" * 20,
        "picture.png": b"p" * 20,
        ".git/x.txt": b"x" * 20,
        "latin.txt": b"\xff" * 20,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    spec = text("texts", args={"context": 5, "eval_share": 0.3}, shuffle=False)
    assert locate(spec, tmp_path) == folder
    source = open_data(spec, tmp_path, seed=0)
    train = b"".join(bytes(row) for row in windows(list(source.train_batches(0))))
    assert (b"B" * 20 + b"z" * 20 + b"b" * 16).startswith(train)
    assert len(train) == 50
    (row, *_) = windows(list(source.eval_batches()))
    assert bytes(row) == b"bbbb\xff"


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_bytes(b"to be or not to be, that is the question " * 30)
    assert describe(text("corpus"), tmp_path).eval_samples == 1


def test_options_are_filled_in() -> None:
    assert with_defaults(text(None), Path()).args == {"context": 64, "eval_share": 0.1}


@pytest.mark.parametrize(
    "args", [{"context": 0}, {"eval_share": 1}, {"eval_share": 0}, {"contxt": 3}]
)
def test_wrong_options(args: dict[str, object]) -> None:
    with pytest.raises(SpecError) as caught:
        describe(text(None, args=args), Path())
    assert caught.value.path == f"data.args.{next(iter(args))}"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file or folder '.*gone'"):
        describe(text("gone"), tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"no texts in the folder '.*none'\n.*\.md"):
        describe(text("none"), tmp_path)
    (tmp_path / "short.txt").write_bytes(b"x" * 300)
    with pytest.raises(
        DataError, match=r"270 bytes for training and 30 for evaluation.*64\n.*cont"
    ):
        describe(text("short.txt"), tmp_path)


@pytest.mark.parametrize("sources", [{}, {"abc.py": 30}])
def test_a_python_without_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: dict[str, int]
) -> None:
    for name, size in sources.items():
        (tmp_path / name).write_bytes(b"#" * size)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"have \d+ bytes here, fewer than 2000000\n.*data\.path"):
        describe(text(None), Path())


@pytest.mark.parametrize("as_folder", [True, False])
def test_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_folder: bool
) -> None:
    file = tmp_path / "texts" / "a.txt"
    file.parent.mkdir()
    file.write_bytes(b"x" * 3000)
    spec = text("texts" if as_folder else "texts/a.txt")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied"):
        open_data(spec, tmp_path, seed=0)
