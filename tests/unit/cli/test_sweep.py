"""``sweep``: which runs of before it goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.api.run import Run
from dni_runtime.errors import UsageError
from dni_runtime.measure.sweep import Variant, read_variants
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dnictl.sweep import _go_on
from tests.unit.cli.conftest import WriteChain, ended


def started(variant: Variant) -> Run:
    raise AssertionError("it is there already")


def test_runs_of_other_code_are_not_taken_for_its_own(
    write_chain: WriteChain, folder: Path
) -> None:
    source = folder / "swept.py"
    source.write_text("from torch.nn import ReLU as Act\n")
    path = write_chain(("      - ReLU\n", '      - import: "swept:Act"\n'))

    def variant() -> Variant:
        (one,) = read_variants(prepare(path), ["seed=1"], "s")
        return one

    run = create_run(folder / "runs" / variant().run, variant().prepared, backend="process")
    ended(Run.open(run.root).record, "finished", 0)
    (run.sources / "__pycache__").mkdir()
    (run.sources / "__pycache__" / "swept.cpython-311.pyc").touch()  # by its workers
    assert _go_on(folder / "runs", started, variant()).directory == run
    source.write_text("from torch.nn import Tanh as Act\n")
    with pytest.raises(UsageError, match="another version of the chain, or of its files"):
        _go_on(folder / "runs", started, variant())
