"""Options of a data set, in ``data.args``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import Field

from dni_runtime.data import DATASETS, DataSet, describe, open_data, with_defaults
from dni_runtime.data.source import Found, resolve
from dni_runtime.data.splits import MemorySplit
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataInfo, DataSpec
from dni_runtime.spec.named import Frozen
from tests.specs import float32, int64


class Options(Frozen):
    count: Annotated[int, Field(ge=1)] = 8
    step: float = 1.0


def find_numbers(spec: DataSpec, base: Path, options: Options) -> Found:
    x_N1 = torch.arange(options.count, dtype=torch.float32).unsqueeze(1) * options.step
    split = MemorySplit(x_N1, torch.zeros(options.count, dtype=torch.int64))
    info = DataInfo(sample=float32(1), label=int64(), train_samples=options.count)
    return Found(info, None, lambda: (split, split))


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "numbers", DataSet(find_numbers, Options))


def numbers_with(**args: object) -> DataSpec:
    return DataSpec(dataset="numbers", batch_size=2, args=args)


def test_a_user_who_is_unknown_is_no_error_of_ours(tmp_path: Path) -> None:
    assert resolve("~no-such-user/x", tmp_path) == tmp_path / "~no-such-user" / "x"
    with pytest.raises(DataError, match=r"no data file .*/~no-such-user/x"):
        describe(DataSpec(dataset="npz", path="~no-such-user/x.npz"), tmp_path)


def test_a_data_set_gets_its_options() -> None:
    spec = numbers_with(count=4, step=0.5)
    assert describe(spec, Path()).train_samples == 4
    x = torch.cat([x for x, _ in open_data(spec, Path(), seed=0).train_batches(1)])
    assert sorted(x.flatten().tolist()) == [0.0, 0.5, 1.0, 1.5]


def test_defaults_are_filled_in() -> None:
    assert with_defaults(numbers_with(count=4), Path()).args == {"count": 4, "step": 1.0}
    for unchanged in (DataSpec(), DataSpec(dataset="mine:Data", args={"size": 3})):
        assert with_defaults(unchanged, Path()) == unchanged


@pytest.mark.parametrize(
    ("args", "path", "message"),
    [
        ({"cuont": 4}, "data.args.cuont", r"'numbers': unknown key 'cuont'\n.*mean 'count'"),
        ({"count": 0}, "data.args.count", "'numbers': 0 is not at least 1"),
        ({"count": "four"}, "data.args.count", "'four'"),
    ],
)
def test_wrong_options_are_refused(args: dict[str, object], path: str, message: str) -> None:
    for ask in (with_defaults, describe):
        with pytest.raises(SpecError, match=message) as caught:
            ask(numbers_with(**args), Path())
        assert caught.value.path == path
