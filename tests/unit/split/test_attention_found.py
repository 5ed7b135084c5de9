"""A split network gets the interface of attention where, and only where, 'validate' finds it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dni_runtime.plan.splitting import split_chain

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("words", "attending"):
        shutil.copy(DATA / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("words", "attending"):
        sys.modules.pop(name, None)


def found(target: str, at: Sequence[str]) -> list[bool]:
    """Where there is attention, but in the last part, as 'split' and as 'validate' find it."""
    data = {"dataset": "words:Words", "batch_size": 8}
    taken = split_chain(target, Path("chain.yaml"), {"data": data}, at=at)
    parts = [part.because == "attention" for part in taken.parts[:-1]]
    assert parts == [worker.attends for worker in taken.prepared.workers[:-1]]
    for part, attends in zip(taken.parts, parts, strict=False):
        assert part.interface is not None
        assert part.lends or part.interface.name == ("delayed" if attends else "mixed")
    return parts


def test_attention_is_found() -> None:
    at = ["begin", *(f"mix.{number}" for number in range(6))]
    assert found("attending:Net", at) == [False, False, *[True] * 5]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (["embed", "product"], [False, True]),
        (["embed", "shares", "product"], [False, False, False]),
    ],
)
def test_attention_in_several_modules_of_the_network(
    at: Sequence[str], expected: list[bool]
) -> None:
    assert found("attending:Spread", at) == expected
