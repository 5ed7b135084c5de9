#!/usr/bin/env python3
"""Train drawn networks as chains and by plain torch, one for each seed, and compare.

A seed draws a network of some of sixty blocks (``tests/generated/blocks.py``: what people write,
odd things included), data, and a chain: 2 to 5 modules, an interface that promises to be
backpropagation, micro-batches, replicas, a restart. The chain is made by ``Chain.split`` or
``Chain.from_modules`` and trained in this process by what workers run; the network by a loop of
plain torch. Weights, buffers, names, losses and evaluations must be equal; or the chain is refused,
for a known reason. If they differ they are trained in float64, too: what is equal there to 1e-9
was rounding. A seed that fails is made simpler, and its file is printed::

    scripts/generate.py --seeds 0-5000
    scripts/generate.py --seeds 4711 --show
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["MKL_CBWR"] = "AUTO"  # round alike, wherever a tensor begins
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CHUNK = 50
"""Cases of one process: what torch.export keeps of them goes with it."""


def seeds_of(text: str) -> range:
    """Read ``A-B`` (B is the first that is left out), or one seed."""
    first, _, end = text.partition("-")
    return range(int(first), int(end) if end else int(first) + 1)


def run_chunk(job: tuple[range, str, str | None, bool]) -> list[dict[str, Any]]:
    """Run some seeds; give what came of each."""
    import torch

    from tests.generated.cases import draw, source
    from tests.generated.compare import run_case, shrunk
    from tests.generated.mutations import MUTATIONS

    torch.set_num_threads(1)
    seeds, folder, without, simplify = job
    found = []
    with MUTATIONS[without]() if without else contextlib.nullcontext():
        for seed in seeds:
            case, began = draw(seed), time.process_time()
            with tempfile.TemporaryDirectory(dir=folder) as own:
                outcome = run_case(case, Path(own))
                if simplify and outcome.wrong:
                    outcome = shrunk(outcome, Path(own))
            found.append(
                {
                    "seed": seed,
                    "kind": outcome.kind,
                    "text": outcome.text,
                    "apart": outcome.apart,
                    "seconds": time.process_time() - began,
                    "elements": sorted(case.elements),
                    "reason": outcome.reason,
                    **(
                        {
                            "case": outcome.case.to_json(),
                            "file": source(outcome.case),
                            "trace": outcome.trace,
                        }
                        if outcome.wrong
                        else {}
                    ),
                }
            )
    return found


def show(seeds: range) -> None:
    """Print the files of some cases."""
    import torch

    from tests.generated.cases import draw, source
    from tests.generated.compare import run_case

    torch.set_num_threads(1)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_case(draw(seed), Path(folder))
        print(f"# seed {seed}: {outcome.kind} {outcome.text}\n{source(outcome.case)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds in some processes."""
    from tests.generated.mutations import MUTATIONS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=seeds_of, default=range(1000), help="as 0-1000, or one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument("--show", action="store_true", help="print the files of these seeds")
    parser.add_argument(
        "--without", choices=list(MUTATIONS), help="leave a mend out: the seeds should find it"
    )
    parser.add_argument("--stop", type=int, default=10, help="end after so many (%(default)s)")
    parser.add_argument("--no-shrink", action="store_true", help="print cases as they are drawn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    if arguments.show:
        show(arguments.seeds)
        return 0
    began, every, simplify = time.perf_counter(), list[dict[str, Any]](), not arguments.no_shrink
    with tempfile.TemporaryDirectory(prefix="dni-generated-") as folder:
        starts = range(arguments.seeds.start, arguments.seeds.stop, CHUNK)
        jobs = [
            (
                range(start, min(start + CHUNK, arguments.seeds.stop)),
                *(folder, arguments.without, simplify),
            )
            for start in starts
        ]
        context = multiprocessing.get_context("fork")
        with context.Pool(arguments.jobs, maxtasksperchild=1) as pool:
            for found in pool.imap_unordered(run_chunk, jobs):
                every += found
                for one in found if not arguments.json else ():
                    if "case" in one:
                        print(f"seed {one['seed']} {one['kind']}: {one['text']}", flush=True)
                        print(f"  {one['case']}\n{one['file']}\n{one['trace']}", flush=True)
                if sum("case" in one for one in every) >= arguments.stop:
                    break
    wrong = [one for one in every if "case" in one]
    kinds = Counter(one["kind"] for one in every)
    reasons = Counter(one["reason"] for one in every if one["reason"])
    drawn = Counter(name for one in every for name in one["elements"])
    equal = Counter(name for one in every if one["kind"] == "equal" for name in one["elements"])
    seconds = time.perf_counter() - began
    bits = sum(one["kind"] == "equal" and one["apart"] == 0 for one in every)
    if arguments.json:
        figures = {"seconds": seconds, "kinds": kinds, "equal_in_every_bit": bits, "wrong": wrong}
        print(json.dumps(figures | {"reasons": reasons, "drawn": drawn, "equal": equal}))
    else:
        print("drawn (and equal): " + ", ".join(f"{k} {n} ({equal[k]})" for k, n in drawn.items()))
        for reason, count in reasons.most_common():
            print(f"refused {count}: {reason}")
        print(
            f"{len(every)} networks in {seconds:.0f} s: {kinds['equal']} equal ({bits} in every "
            f"bit), {kinds['rounded']} only in float64, {kinds['refused']} refused, "
            f"{kinds['unstable']} where rounding decides, {len(wrong)} wrong"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
