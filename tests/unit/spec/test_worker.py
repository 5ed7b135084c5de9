"""What a worker's spec holds, and what of it an image depends on."""

from __future__ import annotations

from typing import Any

import pytest

from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import DataInfo, LinksSpec, TensorSpec, WorkerSpec, parse_chain
from dni_runtime.spec.worker import ModuleContent

INFO = DataInfo(
    sample=TensorSpec(shape=(8,), dtype="float32"),
    label=TensorSpec(shape=(), dtype="int64"),
    classes=2,
    train_samples=64,
    eval_samples=32,
)
CHAIN = """
name: c
data: {path: /here}
modules:
  - {name: a, layers: [Linear: {in_features: 8, out_features: 4}], REPLICAS}
  - {name: b, layers: [Linear: {in_features: 4, out_features: 2}]}
"""


def workers(more: str = "", replicas: str = "replicas: 1") -> tuple[WorkerSpec, ...]:
    return worker_specs(parse_chain(CHAIN.replace("REPLICAS", replicas) + more), INFO)


def test_content_is_named_and_knows_no_host() -> None:
    head = workers()[0].content
    assert head.keys() == ModuleContent.model_fields.keys() - {"cpus"}
    assert head["links"] == {"dtype": None, "gradient_dtype": None}
    assert not {"path", "workers"} & head["head"]["data"].keys()
    assert "sync_steps" not in head["head"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keep", 9), ("cpus", 2),
        ("initial", True), ("late", 3), ("retain", 9), ("attends", True), ("snapshot_s", 9.0),
        ("on_nan", "skip"), ("stop_grace_s", 9.0), ("replicas", 2), ("replica", 2),
        ("elastic", {"a": 1}), ("strategy", {"diloco": {}}), ("compression", "int8"),
        ("backend", "gloo"), ("lr_scale", 2.0),
        ("links", LinksSpec(window=3, port=2000, transport="tcp")),
    ],
)  # fmt: skip
def test_how_a_run_goes_changes_no_image(field: str, value: Any) -> None:
    spec = workers()[0]
    changed = WorkerSpec.model_validate({**dict(spec), field: value})
    assert changed != spec
    assert changed.hash == spec.hash


@pytest.mark.parametrize("field", ["strategy", "compression"])
def test_an_image_has_the_class_by_which_replicas_share(field: str) -> None:
    """The class is a user's own, in the image's sources."""
    name = {"strategy": "strategies:LocalSgd", "compression": "compression:Int8"}[field]
    own = f"replication: {{{field}: {{import: dni_runtime.core.replication.{name}}}}}"
    plain, theirs = (workers(more, "replicas: 2")[0] for more in ("", own))
    assert plain.hash == workers()[0].hash
    assert theirs.hash != plain.hash


def test_what_is_stored_is_read_again() -> None:
    for spec in workers():
        assert WorkerSpec.from_json(spec.to_json()) == spec
