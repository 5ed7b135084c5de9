"""What a release says of itself: what it was made from, and how good it is."""

from __future__ import annotations

import hashlib
import json

from pydantic import Field

from dni_runtime.image.lock import ImageLock
from dni_runtime.image.wheels import host_machine
from dni_runtime.measure.figures import MetricsReader
from dni_runtime.run.cuts import read_document
from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.exits import Exits
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.releases import parse_name
from dni_runtime.spec.replicas import tails_of


class Report(Document):
    """The report of a release (``report.json``)."""

    name: str
    version: str
    chain: str
    run: str
    checkpoint: int  # its position in the stream
    batches: int  # that were trained on
    epoch: int | None = None
    figures: dict[str, float | None] = Field(
        default_factory=dict
    )  # of the evaluation at this checkpoint
    exits: dict[str, float] = Field(default_factory=dict)  # accuracy of the early exits, by module
    modules: tuple[str, ...]
    chain_hash: str  # of the resolved chain
    data_hash: str  # of the settings of its data
    base: str  # hash of the inputs of the base image
    torch: str  # in the base image
    machine: str  # that the images are for, as uname(1) names it
    dni_runtime: str  # that trained
    python: str
    parent: str | None = None  # the release whose weights it began with
    licence: str | None = None

    def encode(self) -> bytes:
        """Return it as JSON, in one form."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1).encode() + b"\n"


def report_of(
    record: Record, cut: int, lock: ImageLock, *, name: str, version: str, licence: str | None
) -> Report:
    """Make the report of a checkpoint of a run."""
    chain, workers = record.specs()
    parts = [read_document(record.run.checkpoint(cut, one)) for one in tails_of(record.modules)]
    batches = sum(part.get("step", 0) for part in parts)
    evaluations = MetricsReader(record).read(RunState.read(record.run)).evaluations
    exits = Exits.load(record.run.exits)
    early = exits.exits[:-1] if exits is not None and exits.checkpoint == cut else ()
    data = chain.data.model_dump(mode="json", exclude={"path"})
    return Report(
        name=name,
        version=version,
        chain=record.chain,
        run=record.name,
        checkpoint=cut,
        batches=batches,
        epoch=parts[0].get("epoch"),
        figures=next((dict(line.figures) for line in evaluations if line.step == batches), {}),
        exits={one.module: one.accuracy for one in early},
        modules=tuple(worker.module for worker in workers),
        chain_hash=_hash(chain.model_dump(mode="json")),
        data_hash=_hash(data),
        base=lock.base.content,
        torch=lock.base.torch,
        machine=host_machine(),
        dni_runtime=record.versions.dni_runtime,
        python=record.versions.python,
        parent=_parent(record),
        licence=licence,
    )


def _hash(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _parent(record: Record) -> str | None:
    """Return the release that the run's weights are from, if they are from one."""
    chain, workers = record.specs()
    inits = (chain.setting(worker.index, "init") for worker in workers)
    files = [init.file for init in inits if init is not None]
    return next((file for file in files if parse_name(file) is not None), None)
