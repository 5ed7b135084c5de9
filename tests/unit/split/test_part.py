"""Whether a chain of some parts can be faster than one process."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dni_runtime.split.part import NetworkPart, Parts, doubt


def part(name: str, seconds: float, interface_s: float) -> NetworkPart:
    return NetworkPart(
        name=name, after=None, until=None, inputs=None, outputs=(), numbers=0, lends=(),
        borrows={}, seconds=seconds, interface_s=interface_s, memory=0.0, sends=0, interface=None,
        because="default", rows=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(0.05, 0.01), (0.05, 0.0)], None),
        ([(1.0, 0.0)], None),
        ([(0.08, 0.0), (0.92, 0.0)], "'part-2' takes 92% of the time"),
        ([(0.08, 0.0), (0.92, 0.0)], r"at most 1\.09 times as fast .*\n  → try 3 modules"),
        ([(0.5, 0.5), (0.5, 0.0)], r"at most 1\.00 times .*\n  → its gradient interface takes"),
    ],
)
def test_cuts_that_cannot_pay(times: list[tuple[float, float]], expected: str | None) -> None:
    found = doubt([part(f"part-{number}", *some) for number, some in enumerate(times, 1)])
    assert found is None if expected is None else re.search(expected, found or "")


def test_parts_print_as_a_table() -> None:
    found = Parts([part("part-1", 0.05, 0.01), replace(part("part-2", 0.04, 0.0), numbers=12_345)])
    assert str(found).splitlines() == [
        "module  until    parameters  ms a batch  share  memory   sends  interface",
        "part-1  the end           0     50 + 10    60%    0 MB  0.0 MB  loss",
        "part-2  the end      12,345      40 + 0    40%    0 MB  0.0 MB  loss",
    ]
    assert str(Parts()).startswith("module")
