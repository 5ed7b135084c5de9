"""What a run's callbacks are told, and what that costs the supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dni_runtime.plan.callbacks import Callback, StartedRun
from dni_runtime.run import cuts
from dni_runtime.run.cuts import document_file, sealed, tensors_file
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.supervise.callbacks import Callbacks


class Told(Callback):
    def __init__(self) -> None:
        self.cuts: list[int] = []

    def on_checkpoint(self, cut: int, folder: Path) -> None:
        self.cuts.append(cut)


def write_cut(record: Record, cut: int) -> None:
    for module in record.modules:
        part, data = record.run.checkpoint(cut, module), b"tensors"
        part.parent.mkdir(exist_ok=True)
        tensors_file(part).write_bytes(data)
        document_file(part).write_text(sealed(data, {"cut": cut, "bytes": len(data)}))


def test_each_checkpoint_is_told_once_and_not_read_again(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor looks each second, in its own loop; a chain may have a thousand modules."""
    read: list[int] = []
    real = cuts.read_document

    def read_document(part: Path) -> dict[str, Any]:
        read.append(int(part.parent.name))
        return real(part)

    monkeypatch.setattr(cuts, "read_document", read_document)
    told, over = Told(), RunState(phase="finished", modules={})
    started = StartedRun(record.name, record.run.root, {}, 1)
    callbacks = Callbacks(record.run, record, [told], started)
    for newest in (100, 200, 300):
        write_cut(record, newest)
        for _ in range(3):
            callbacks.look(over)
    callbacks.end(over)
    assert told.cuts == [100, 200, 300]
    assert read == [cut for cut in told.cuts for _ in record.modules]
    again = Told()
    Callbacks(record.run, record, [again], started).end(over)
    assert again.cuts == [], "they were told in the run's attempt before"
    assert len(read) == 3 * len(record.modules)
