"""States that are seen late, and those of a worker that is killed while it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from dni_runtime.run.cuts import remove_temporaries
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker import checkpoint
from tests.conftest import eventually
from tests.unit.worker.test_resume import start, workers, write


def test_what_it_has_written_on_another_host_may_be_seen_late(run: RunDir) -> None:
    spec = workers()[1]
    write(run, spec, cut=10, step=8)
    start(run, spec, "10", attempt=4, first=4)
    ledger, hidden = run.ledger("b"), run.root / "not seen yet"
    ledger.rename(hidden)
    later = threading.Timer(0.5, hidden.rename, [ledger])
    later.start()
    assert start(run, spec, "10", attempt=5, first=4)[0].restarted
    later.join()


WRITES = """\
import os, sys, torch
from pathlib import Path
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.checkpoint import CheckpointWriter
for _ in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    writer = CheckpointWriter(RunDir(Path(sys.argv[1])), "b", ["b"], 1000, print)
    tensors = {"x": torch.zeros(4_000_000)}
    for cut in range(1, 10_000):
        writer.write_snapshot(cut, tensors, {}) if cut % 2 else writer.write(cut, tensors, {})
        print(os.getpid(), flush=True)
"""
"""For each line a process that writes until it is killed."""


def test_killed_while_it_writes(run: RunDir) -> None:
    """Whatever is found then, is whole; what was half-written is removed."""

    def half_written() -> list[Path]:
        return list(run.root.rglob(".b.*"))

    left = 0
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(run.root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(5):
            process.stdin.write("\n")
            child = [int(process.stdout.readline()) for _ in range(3)][-1]
            try:
                eventually("it writes", half_written, every_s=0.001)
            finally:
                os.kill(child, signal.SIGKILL)
            while process.stdout.readline() != "ended\n":
                pass
            left += bool(half_written())
            remove_temporaries(run, ["b"])
            state = checkpoint.read_newest(run, "b")
            assert state is not None
            assert state[0]["x"].shape == (4_000_000,)
            assert not half_written()
    assert left, "no kill came while it wrote"
