#!/usr/bin/env python3
"""Two hosts resume one run at the same moment, again and again: one of them must get it.

The hosts are those of a Slurm; a run that was stopped lies where both see it. In each round both
start ``dnictl resume`` and stop what they have got after some seconds. Counted is who got the run,
and what the other one was told.

    scripts/slurm-testbed run -- scripts/as-user -- build/venv/bin/python scripts/race_owners.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from dni_runtime.api.run import Run

CHAIN = """\
name: raced
data: {dataset: digits, batch_size: 64, flatten: true}
epochs: 1000000
modules:
  - {name: bottom, layers: [{Linear: {in_features: 64, out_features: 32}}, ReLU]}
  - {name: top, layers: [{Linear: {in_features: 32, out_features: 10}}]}
"""
STOPPED, REFUSED = 75, 64
DNICTL = (sys.executable, "-m", "dnictl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--seconds", type=int, default=6, help="of each round (%(default)s)")
    parser.add_argument("--folder", type=Path, help="one that both hosts see (default: a new one)")
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="dni-race-", dir=Path.home()))
    folder.mkdir(exist_ok=True)
    (folder / "chain.yaml").write_text(CHAIN)
    run = folder / "run"
    up = [*DNICTL, "up", "chain.yaml", "--backend", "process", "--run-dir", str(run)]
    subprocess.run(["timeout", "-s", "TERM", "8", *up], cwd=folder, stdout=subprocess.DEVNULL)
    outcomes, words, owners = Counter[str](), Counter[str](), Counter[str]()
    for number in range(options.rounds):
        # each host: wait for the other at the barrier, resume, say how that ended
        program = (
            f"touch {folder}/ready.{number}.$(hostname);"
            f" until [ $(ls {folder}/ready.{number}.* | wc -l) -eq 2 ]; do :; done;"
            f" timeout --preserve-status -s TERM {options.seconds}"
            f" {sys.executable} -m dnictl resume {run}"
            f" >/dev/null 2>{folder}/said.$(hostname); code=$?; echo $(hostname) $code"
        )
        srun = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--mem=1G", "--quiet"]
        done = subprocess.run(
            [*srun, "bash", "-c", program], stdout=subprocess.PIPE, text=True, check=True
        )
        ended = dict(line.split() for line in done.stdout.splitlines())
        codes = sorted(map(int, ended.values()))
        outcomes[str(codes)] += 1
        for host, code in ended.items():
            if int(code) == REFUSED:
                said = (folder / f"said.{host}").read_text().splitlines()[0]
                words[said.partition(" belongs to ")[0].replace(run.name, "RUN")] += 1
            else:
                owners[host] += 1
        print(f"{number + 1}: {ended}", file=sys.stderr)
    starts = [one for one in Run.open(run).events() if one.event == "run_started"]
    print(json.dumps({
        "rounds": options.rounds,
        "one_owner_each_time": set(outcomes) == {str(sorted([STOPPED, REFUSED]))},
        "exit_codes": outcomes,
        "owners": owners,
        "words": words,
        "starts": len(starts) - 1,
    }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
