"""What the measurements say: medians, ranges, ratios within a repetition; table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dni_runtime.measure.module import Spread
from peers.contenders import SCHEDULES, SINGLE, SYNCHRONOUS, Contender, computes, kind_of
from peers.processes import Measured
from peers.slow_link import Line

BASE = "single-2"


@dataclass
class Outcome:
    """What one contender reached over one line."""

    runs: list[Measured | None] = field(default_factory=list)  # per repetition; None: it failed
    foreign: list[float] = field(default_factory=list)  # cores that others kept busy meanwhile
    error: str | None = None  # why it failed

    @property
    def rates(self) -> list[float | None]:
        return [run.rate if run is not None else None for run in self.runs]

    @property
    def measured(self) -> list[Measured]:
        return [run for run in self.runs if run is not None]


Outcomes = Mapping[Contender, Outcome]


def ratios(rates: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Quotients within each repetition."""
    pairs = zip(rates, base, strict=True)
    return [a / b for a, b in pairs if a is not None and b is not None]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, lowest and highest."""
    return asdict(Spread.of(values)) if values else None


def best_peer(outcomes: Outcomes, *, synchronous: bool = True) -> Contender | None:
    """Of the peers on several processes, the one with the highest median.

    Those that are not ``synchronous`` update old weights, or average replicas now and then.
    """
    medians = {
        contender: statistics.median(run.rate for run in outcome.measured)
        for contender, outcome in outcomes.items()
        if outcome.measured
        and kind_of(contender.name)[0] not in ("single", "chain")
        and (contender.name in SYNCHRONOUS) == synchronous
    }
    return max(medians, key=lambda contender: medians[contender]) if medians else None


def summarize(line: Line, outcomes: Outcomes, probed: Mapping[str, float]) -> dict[str, Any]:
    """All contenders over one line, as a JSON document."""
    best, other = best_peer(outcomes), best_peer(outcomes, synchronous=False)
    single = outcomes.get(Contender(BASE)) or outcomes.get(Contender("single-1"))
    rows = []

    def over(base: Contender | None) -> dict[str, float] | None:
        return None if base is None else spread(ratios(outcome.rates, outcomes[base].rates))

    for contender, outcome in outcomes.items():
        runs = outcome.measured
        row: dict[str, Any] = {
            "name": contender.name,
            "cut": contender.cut,
            "processes": contender.processes,
            "computes": computes(contender.name),
            "error": outcome.error,
            "samples_per_s": spread([run.rate for run in runs]),
            "cpu_ms_per_sample": spread([1000 * run.cpu_s for run in runs]),
            "cores": [
                statistics.median(values)
                for values in zip(*(run.cores for run in runs), strict=True)
            ],
            "over_best_peer": over(best),
            "over_best_other": over(other),
            "over_single": spread(ratios(outcome.rates, single.rates)) if single else None,
            "foreign_cores": outcome.foreign,
            "runs": [asdict(run) if run is not None else None for run in outcome.runs],
        }
        rows.append(row)
    return {
        "delay_ms": line.delay_ms,
        "rate_mbit": line.rate_mbit or None,
        "measured": dict(probed),
        "best_peer": str(best) if best else None,
        "best_other": str(other) if other else None,
        "single": BASE if Contender(BASE) in outcomes else "single-1",
        "contenders": rows,
    }


def table(line: Line, found: Mapping[str, Any]) -> str:
    """What :func:`summarize` gave, as text."""
    rows = [
        (
            "contender", "computes", "samples/s", "range", f"/ {found['best_peer'] or 'best peer'}",
            f"/ {found['best_other'] or 'best other'}", f"/ {found['single']}", "CPU ms/sample",
            "cores busy", "window", "others",
        )
    ]  # fmt: skip
    for row in found["contenders"]:
        name = str(Contender(row["name"], row["cut"], row["processes"]))
        rates = row["samples_per_s"]
        if rates is None:
            rows.append((name, row["computes"], "failed", *[""] * 8))
            continue
        windows = {run["details"].get("window") for run in row["runs"] if run is not None}
        rows.append(
            (
                name,
                row["computes"],
                f"{rates['median']:.0f}",
                f"{rates['low']:.0f}-{rates['high']:.0f}",
                _paired(row["over_best_peer"]),
                _paired(row["over_best_other"]),
                _paired(row["over_single"]),
                f"{row['cpu_ms_per_sample']['median']:.3f}",
                " + ".join(f"{cores:.2f}" for cores in row["cores"]),
                "/".join(str(window) for window in windows if window) or "-",
                f"{statistics.median(row['foreign_cores']):.2f}",
            )
        )
    lines = [_heading(line, found["measured"]), *align(rows)]
    lines += [
        f"{Contender(row['name'], row['cut'], row['processes'])}: {row['error']}"
        for row in found["contenders"]
        if row["error"] is not None
    ]
    return "\n".join(lines)


def align(rows: Iterable[Sequence[str]], left: int = 2) -> list[str]:
    """Columns under each other, the first ones to the left."""
    kept = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in kept) for i in range(len(kept[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in kept
    ]


def _heading(line: Line, probed: Mapping[str, float]) -> str:
    if not probed:
        return f"{line}:"
    return (
        f"{line} (measured: round trip {probed['rtt_ms']:.1f} ms, "
        f"{probed['mbit_per_s']:.0f} Mbit/s):"
    )


def _paired(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "-"
    return f"{values['median']:.2f} ({values['low']:.2f}-{values['high']:.2f})"


def _label(name: str) -> str:
    """What a legend says of a contender."""
    if name in SINGLE:
        return f"one process, {SINGLE[name]} thread{'s' if SINGLE[name] > 1 else ''}"
    if name in SCHEDULES:
        _, _, count = SCHEDULES[name]
        return f"{name.rpartition('-')[0]}, {count} micro-batch{'es' if count > 1 else ''}"
    return {"chain": "chain, synthetic", "mixed": "chain, mixed", "delayed": "chain, delayed"}.get(
        name, name
    )


def draw(lines: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw throughput against latency, one line per contender, one picture per rate.

    Raises ``ImportError`` if matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rates = list(dict.fromkeys(line["rate_mbit"] for line in lines))
    figure, axes = plt.subplots(
        1, len(rates), figsize=(6 * len(rates), 4.2), squeeze=False, layout="constrained"
    )
    for at, rate in zip(axes[0], rates, strict=True):
        curves: dict[str, list[tuple[float, dict[str, float]]]] = {}
        for line in lines:
            # Without a delay there is loopback only, where no line has a rate.
            if line["rate_mbit"] != rate:
                continue
            for row in line["contenders"]:
                if row["samples_per_s"] is not None:
                    contender = Contender(row["name"], row["cut"], row["processes"])
                    curves.setdefault(str(contender), []).append(
                        (line["delay_ms"], row["samples_per_s"])
                    )
        for name, points in curves.items():
            points.sort(key=lambda point: point[0])
            medians = [value["median"] for _, value in points]
            errors = [
                [value["median"] - value["low"] for _, value in points],
                [value["high"] - value["median"] for _, value in points],
            ]
            label = _label(name)
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "capsize": 2, "label": label}
            if kind_of(name)[0] == "chain":
                style["linewidth"] = 2.5
            elif name in SINGLE:
                style |= {"color": "black", "linestyle": "--" if name == BASE else ":"}
            at.errorbar([delay for delay, _ in points], medians, errors, **style)
        at.set(
            xlabel="one-way delay [ms]",
            ylabel="samples/s",
            ylim=(0, None),
            title="" if rates == [None] else "any rate" if rate is None else f"{rate:g} Mbit/s",
        )
        at.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize="small", ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
