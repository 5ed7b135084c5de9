"""What a worker frees is there for its next batch: counted in page faults, not in seconds."""

from __future__ import annotations

import os
import subprocess
import sys

ROUNDS = """\
import resource, sys
from dni_runtime.worker.memory import keep_freed_memory
keep_freed_memory()
for number in range(12):
    if number == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batch = [b"1" * (12 << 20) for _ in range(4)]
    del batch
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_A_ROUND = 4 * (12 << 20) // os.sysconf("SC_PAGE_SIZE")


def page_faults(**environ: str) -> int:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS],
        env=own | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_freed_memory_is_used_again() -> None:
    assert page_faults() < PAGES_OF_A_ROUND / 4


def test_who_tunes_malloc_is_left_alone() -> None:
    assert page_faults(MALLOC_TRIM_THRESHOLD_="65536") > 5 * PAGES_OF_A_ROUND
