"""A chain compared with plain backprop of the same network, measured in turns, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dni_runtime.bench.chain import WAITS, Bounds, ChainPace, measure_chain
from dni_runtime.bench.reference import ReferencePace, measure_reference
from dni_runtime.bench.spread import Spread, ratios
from dni_runtime.launch.host import Site
from dni_runtime.launch.prepare import Prepared
from dni_runtime.launch.records import Record, create_run
from dni_runtime.launch.reference import REFERENCE


@dataclass(frozen=True)
class ModuleRow:
    """One module over all repetitions; see :class:`~dni_runtime.bench.chain.ModulePace`.

    Attributes:
        module: Its name.
        batch_ms: Milliseconds from one batch to the next.
        cpu_ms: CPU milliseconds per batch.
        cores: Cores that it kept busy.
        computing: Share of the time that it did not wait (median).
        waiting: Shares of the time that it waited, by reason (medians).
        lag: Batches by which true gradients came late (median); None if none came.
    """

    module: str
    batch_ms: Spread
    cpu_ms: Spread
    cores: Spread
    computing: float
    waiting: dict[str, float]
    lag: float | None


@dataclass(frozen=True)
class Comparison:
    """A chain and plain backprop over all repetitions.

    Attributes:
        repetitions: Number of repetitions.
        samples_per_s: The chain's training samples per second.
        cores: Cores that its workers kept busy.
        cpu_us: CPU microseconds of its workers per sample.
        threads: Threads of plain backprop.
        reference_samples_per_s: Training samples per second of plain backprop.
        reference_cores: Cores that plain backprop kept busy.
        reference_cpu_us: CPU microseconds of plain backprop per sample.
        ratio: The chain's pace over plain backprop's, within a repetition.
        modules: The modules, head first.
    """

    repetitions: int
    samples_per_s: Spread
    cores: Spread
    cpu_us: Spread
    threads: int
    reference_samples_per_s: Spread
    reference_cores: Spread
    reference_cpu_us: Spread
    ratio: Spread
    modules: tuple[ModuleRow, ...]


def compare_paces(
    prepared: Prepared,
    site: Site,
    folder: Path,
    bounds: Bounds,
    *,
    threads: int,
    repetitions: int,
    observe: Callable[[str], None] | None = None,
) -> Comparison:
    """Measure a chain and plain backprop in turns.

    Args:
        prepared: The chain; see :func:`~dni_runtime.bench.chain.endless`.
        site: What this host offers.
        folder: Where the run directories are made.
        bounds: Duration of each measurement.
        threads: Threads of plain backprop.
        repetitions: Number of repetitions.
        observe: Called with a line after each measurement.

    Raises:
        WorkerError: A worker failed.
        StoppedError: The run was stopped.
    """
    chains: list[ChainPace] = []
    references: list[ReferencePace] = []
    for repetition in range(1, repetitions + 1):

        def chain(number: int = repetition) -> str:
            chains.append(measure_chain(folder / f"chain-{number}", prepared, site, bounds))
            return f"chain: {chains[-1].samples_per_s:,.0f} samples/s"

        def reference(number: int = repetition) -> str:
            root = folder / f"{REFERENCE}-{number}"
            create_run(root, prepared, backend=REFERENCE)
            references.append(measure_reference(Record.read(root), threads, bounds))
            return f"{REFERENCE}: {references[-1].samples_per_s:,.0f} samples/s"

        # Alternate which comes first, so that neither always follows the other.
        for measure in (chain, reference) if repetition % 2 else (reference, chain):
            text = measure()
            if observe is not None:
                observe(f"{repetition}/{repetitions} {text}")
    return summarize(chains, references, threads)


def summarize(
    chains: Sequence[ChainPace], references: Sequence[ReferencePace], threads: int
) -> Comparison:
    """Return medians and ranges over the repetitions.

    Args:
        chains: The chain's pace in each.
        references: Pace of plain backprop in each.
        threads: Threads of plain backprop.
    """
    rates = [one.samples_per_s for one in chains]
    reference_rates = [one.samples_per_s for one in references]
    return Comparison(
        repetitions=len(chains),
        samples_per_s=Spread.of(rates),
        cores=Spread.of([one.cores for one in chains]),
        cpu_us=Spread.of([1e6 * one.cpu_s for one in chains]),
        threads=threads,
        reference_samples_per_s=Spread.of(reference_rates),
        reference_cores=Spread.of([one.cores for one in references]),
        reference_cpu_us=Spread.of([1e6 * one.cpu_s for one in references]),
        ratio=Spread.of(ratios(rates, reference_rates)),
        modules=tuple(_row(index, chains) for index in range(len(chains[0].modules))),
    )


def _row(index: int, chains: Sequence[ChainPace]) -> ModuleRow:
    paces = [chain.modules[index] for chain in chains]
    lags = [pace.lag for pace in paces if pace.lag is not None]
    return ModuleRow(
        module=paces[0].module,
        batch_ms=Spread.of([1000 * pace.batch_s for pace in paces]),
        cpu_ms=Spread.of([1000 * pace.cpu_s for pace in paces]),
        cores=Spread.of([pace.cores for pace in paces]),
        computing=statistics.median(max(1 - sum(pace.waiting.values()), 0.0) for pace in paces),
        waiting={
            reason: statistics.median(pace.waiting[reason] for pace in paces) for reason in WAITS
        },
        lag=statistics.median(lags) if lags else None,
    )


def draw(found: Comparison, title: str, path: Path) -> None:
    """Plot both paces, and how each module spent its time.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = len(found.modules)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 1.6 + 0.4 * max(rows, 2)), layout="constrained"
    )
    paces = (found.reference_samples_per_s, found.samples_per_s)
    left.barh(
        [f"backprop,\n{found.threads} threads", "chain"],
        [pace.median for pace in paces],
        xerr=[[p.median - p.low for p in paces], [p.high - p.median for p in paces]],
        color=["gray", "tab:blue"],
        capsize=3,
    )
    left.set(xlabel="samples/s")
    names = [module.module for module in found.modules]
    shares: dict[str, list[float]] = {"computing": [module.computing for module in found.modules]}
    for reason in WAITS:
        shares[f"waiting: {reason}"] = [module.waiting[reason] for module in found.modules]
    start = [0.0] * rows
    for name, values in shares.items():
        style: dict[str, Any] = {"label": name, "left": list(start)}
        right.barh(names, values, **style)
        start = [a + b for a, b in zip(start, values, strict=True)]
    right.invert_yaxis()
    right.set(xlabel="share of the time", xlim=(0, 1))
    right.legend(fontsize="x-small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
