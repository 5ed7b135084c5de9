"""Plain backpropagation beside a chain, on the digits of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.measure.reference import REFERENCE, train_reference
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.record import Record
from tests.lines import read_lines
from tests.specs import linear

CHAIN = """\
name: small
data: {dataset: digits, batch_size: 64, flatten: true, train_limit: 256, validation: 200}
epochs: 9
selection: {patience: %d, min_delta: 1}
""" + linear(64, 10, 10)


@pytest.mark.parametrize(("patience", "epochs"), [(2, 3), (9, 9)])
def test_the_reference_stops_early_as_the_chain_does(
    tmp_path: Path, patience: int, epochs: int
) -> None:
    file = tmp_path / "chain.yaml"
    file.write_text(CHAIN % patience)
    create_run(tmp_path / "run", prepare(file), backend="process")
    record = Record.read(tmp_path / "run")
    train_reference(record, threads=1)
    lines = read_lines(record.run.metrics(REFERENCE))
    found = [(line["kind"], line.get("epoch")) for line in lines]
    evaluations = [("eval", epoch) for epoch in range(1, epochs + 1)]
    assert found == [("start", None), *evaluations, ("test", epochs)]
