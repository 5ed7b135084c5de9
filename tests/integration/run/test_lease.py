"""Of several processes that want one run, one gets it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from dni_runtime.run.lease import Owner
from dni_runtime.run.rundir import RunDir

TAKER = """\
import sys, time
from dni_runtime.errors import UsageError
from dni_runtime.run.lease import Lease
from dni_runtime.run.rundir import RunDir
from pathlib import Path
run, rounds = Path(sys.argv[1]), int(sys.argv[2])
for number in range(rounds):
    one = RunDir(run / str(number))
    while time.time() < float(sys.argv[3]) + 0.02 * number:
        pass
    try:
        Lease.take(one)
        print(number, "took", flush=True)
    except UsageError as error:
        print(number, "refused", error.message, flush=True)
time.sleep(60)
"""


def test_of_many_that_try_one_takes_over(tmp_path: Path) -> None:
    """Half of the runs have an owner that is dead, the others none."""
    rounds, takers = 40, 6
    for number in range(rounds):
        one = RunDir(tmp_path / str(number))
        one.create()
        if number % 2:
            one.leases.mkdir()
            Owner.me().model_copy(update={"born": 1}).write(one.owner)
    begins = str(time.time() + 1.5)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TAKER, str(tmp_path), str(rounds), begins],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(takers)
    ]
    try:
        lines = []
        for process in processes:
            assert process.stdout is not None
            lines += [process.stdout.readline().split(maxsplit=2) for _ in range(rounds)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for number in range(rounds):
        said = [line[1] for line in lines if line[0] == str(number)]
        assert sorted(said) == ["refused"] * (takers - 1) + ["took"], number
