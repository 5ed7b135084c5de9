"""The tasks that recurrent layers are compared on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import compare_recurrence
import pytest
import torch
from compare_recurrence import BLANK, IGNORED, MARK, STOP, TIMES, Episodes, WrittenLoss, pieces
from torch.nn.functional import cross_entropy


def episodes(x: list[int], y: list[int], repeats: bool) -> list[tuple[int, int]]:
    """(N, R) of each whole episode in a stream, every symbol of which is checked."""
    found = []
    while MARK in x:
        if x[0] == BLANK:  # it waits when the task has grown
            assert y[0] == IGNORED
            x, y = x[1:], y[1:]
            continue
        n = x.index(MARK)
        bits, at, times = x[:n], n + 1, 1
        if repeats:
            times, at = x[at] - TIMES if at < len(x) else 0, at + 1
        end = at + n * times + 1
        if end > len(x):
            break
        assert set(bits) <= {0, 1}
        assert y[:at] == [IGNORED] * at
        assert x[at:end] == [BLANK] * (n * times + 1)
        assert y[at:end] == [*bits * times, STOP]
        found.append((n, times))
        x, y = x[end:], y[end:]
    return found


@pytest.mark.parametrize("repeats", [False, True])
def test_streams_of_episodes(repeats: bool) -> None:
    made = Episodes(4, repeats, 0)
    parts = []
    for _ in range(5):
        parts += [made.read(steps) for steps in (3, 60, 8)]
        made.grow()
    x_BT, y_BT = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    starts = set()
    for x, y in zip(x_BT.tolist(), y_BT.tolist(), strict=True):
        first = y.index(STOP) + 1
        starts.add(first)
        seen = episodes(x[first:], y[first:], repeats)
        assert seen == sorted(seen)
        grown = (
            [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3)] if repeats else [(n, 1) for n in range(1, 6)]
        )
        assert set(seen) == set(grown)
    assert len(starts) > 1, "streams have phases of their own"


def test_not_all_streams_are_read_at_once() -> None:
    """At any time some symbol is written, however long the episodes have become."""
    made = Episodes(64, False, 0)
    for _ in range(20):
        assert all((made.read(2)[1] != IGNORED).any() for _ in range(60))
        made.grow()


def test_the_loss_counts_what_is_not_written_as_zero() -> None:
    p_BCT = torch.randn(4, 3, 6)
    y_BT = torch.randint(0, 3, (4, 6))
    y_BT[:3] = IGNORED
    loss = WrittenLoss()(p_BCT, y_BT)
    torch.testing.assert_close(loss, cross_entropy(p_BCT[3:], y_BT[3:]) / 4)
    y_BT[:] = IGNORED
    assert float(WrittenLoss()(p_BCT, y_BT)) == 0


def test_pieces_of_a_text_go_on_in_the_same_row() -> None:
    text = torch.arange(1000)
    parts = list(pieces(text, 4, 8))
    x_BN, y_BN = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    assert x_BN.shape == (4, 248)
    assert torch.equal(y_BN, x_BN + 1)
    assert torch.equal(x_BN[:, 1:], x_BN[:, :-1] + 1)
    assert torch.equal(x_BN[1:, 0], x_BN[:-1, -1] + 1)


@pytest.mark.parametrize("task", ["copy", "repeat", "text"])
def test_what_is_there_is_not_trained_again(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"abc" * 4000)
    results = tmp_path / "results.jsonl"
    arguments = f"x {task} --text {text} --steps 4 --seeds 0 --hidden 32 --batch 16 --lr 1e-2"
    arguments += f" --updates {500 if task == 'copy' else 50} --epochs 2 --results {results}"
    monkeypatch.setattr("sys.argv", arguments.split())
    threads = torch.get_num_threads()
    try:
        compare_recurrence.main()
        shown = capsys.readouterr().out
        written = results.read_text()
        compare_recurrence.main()
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out == shown
    assert results.read_text() == written
    ones = [json.loads(line) for line in written.splitlines()]
    assert [one["method"] for one in ones] == ["truncated", "DNI"]
    for one in ones:
        if task == "text":
            assert one["bits"] < 0.2 * math.log2(3)
        else:
            assert one["length"] == math.prod(one["solved"])
            assert bool(one["when"]) == (one["length"] > 0) == (task == "copy")
