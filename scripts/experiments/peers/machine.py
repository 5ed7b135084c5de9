"""The machine on which everybody is measured, and what else keeps it busy."""

from __future__ import annotations

import gc
import os
import platform
import time
from pathlib import Path
from typing import Any


def wait_until_quiet(quiet: float) -> None:
    """Wait, two minutes at most, for a second in which others use no more than ``quiet`` cores."""
    deadline = time.monotonic() + 120
    while quiet < (os.cpu_count() or 1) and time.monotonic() < deadline:
        before = busy()
        time.sleep(1)
        if cores(before, busy()) <= quiet:
            return


def cores(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Cores that others kept busy between two answers of :func:`busy`."""
    return max(0.0, (after[1] - before[1]) / (after[0] - before[0]))


def busy() -> tuple[float, float]:
    """The clock, and the CPU seconds that programs other than ours have used so far (proc(5))."""
    gc.collect()  # what our workers have used counts once the server that forked them has ended
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft_interrupts, steal = fields
    ticks = user + nice + system + interrupts + soft_interrupts + steal
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def facts() -> dict[str, Any]:
    """The machine and the software, as far as they bear on the figures."""
    import torch

    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mkl": torch.backends.mkl.is_available(),
    }
