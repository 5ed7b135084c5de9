"""Measurements: ``bench`` of modules; ``compare`` trains one network in several ways."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UnavailableError, UsageError
from dnictl import options
from dnictl.show import Column, decimals, percent, print_table, quantity, thousands
from dnictl.terminal import answered, finite, json_wanted, tell

if TYPE_CHECKING:
    from dni_runtime.measure.compare import ComparedMetric, Row, Trial
    from dni_runtime.measure.module import ModuleCost, Spread
    from dni_runtime.plan.prepare import CheckedChain


@click.group()
def bench() -> None:
    """Measure modules on this machine.

    \b
    Example:
      dnictl bench module chain.yaml   which module is the slowest, and why
    """


@bench.command()
@options.chain
@click.option("--module", "-m", "modules", multiple=True, metavar="NAME",
              help="Only this module (may be given more than once).")  # fmt: skip
@click.option("--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Number of measurements, in turns; figures are medians.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=0.5, show_default=True,
              help="Shortest time of one measurement.")  # fmt: skip
@options.data
@options.json
def module(
    chain: Path,
    modules: tuple[str, ...],
    repetitions: int,
    seconds: float,
    data: Path | None,
) -> None:
    """Measure the parts of each module's step, in one process without transport.

    Forward pass; backward pass with the optimizer's step; the gradient interface's signal; and what
    learning from true gradients costs per batch. A chain trains as fast as its slowest module:
    move layers from that module to a faster one.

    \b
    Example:
      dnictl bench module chain.yaml --module bottom
    """
    from dni_runtime.measure.module import measure_modules
    from dni_runtime.plan.prepare import prepare

    prepared = prepare(chain, data=data)
    costs = measure_modules(
        prepared, modules, repetitions=repetitions, seconds=seconds,
        observe=None if json_wanted() else tell,
    )  # fmt: skip
    measured = [asdict(cost) for cost in costs]
    document = {"chain": prepared.chain.name, "repetitions": repetitions, "modules": measured}
    if not answered(document):
        _print_modules(costs)


@click.command()
@options.chain
@click.option(
    "--interfaces", metavar="NAME,…",
    help="Gradient interfaces (default: exact, synthetic, local, mixed and delayed, as far as the "
    "data allow); 'none' is the control whose modules are not trained.",
)  # fmt: skip
@click.option(
    "--interface", "-i", "labelled", multiple=True, metavar="LABEL=INTERFACE",
    help="Another one with options, as in a chain file: 'mlp={synthetic: {synthesizer: mlp}}'.",
)  # fmt: skip
@click.option("--strategies", metavar="NAME,…",
              help="Instead of interfaces: strategies of replicas, and no replicas.")  # fmt: skip
@click.option(
    "--strategy", "-s", "labelled_strategies", multiple=True, metavar="LABEL=STRATEGY",
    help="Another one with options, as in a chain file: 'slow={diloco: {lr: 0.5}}', and more keys "
    "of 'replication': 'int8=local-sgd, every: 16, compression: int8'.",
)  # fmt: skip
@click.option("--replicas", type=click.IntRange(2, 64), default=2, show_default=True,
              help="Workers of each module that has replicas; if none has, of all between head and "
              "tail.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True,
              help="Runs of each method, with seeds counted from the chain's.")  # fmt: skip
@click.option(
    "--target", type=float,
    help="Measure the time to this value of the metric (default: 0.01 below backprop's).",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1),
    help="Threads of plain backpropagation (default: as many as the chain's modules have).",
)  # fmt: skip
@click.option("--out", type=options.FOLDER,
              help="Folder for runs, result.json and curves.png (default: a new one).")  # fmt: skip
@options.data
@options.json
def compare(
    chain: Path,
    interfaces: str | None,
    labelled: tuple[str, ...],
    strategies: str | None,
    labelled_strategies: tuple[str, ...],
    replicas: int,
    seeds: int,
    target: float | None,
    threads: int | None,
    out: Path | None,
    data: Path | None,
) -> None:
    """Compare interfaces or strategies with plain backpropagation.

    Trains a chain under each interface or strategy, and by backpropagation in one process, with the
    same network, data, optimizer and epochs. The modules run as processes on this host, over their
    real links. Times begin with the first batch and include evaluations.

    \b
    Example:
      dnictl compare chain.yaml --interfaces synthetic,mixed,none --seeds 3
      dnictl compare chain.yaml --strategies local-sgd,diloco --replicas 4
    """
    from dni_runtime.files import write_json
    from dni_runtime.measure import compare as ways
    from dni_runtime.measure.curves import draw_curves
    from dni_runtime.measure.reference import REFERENCE, default_threads
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.plan.splitting import names_of

    if strategies is not None or labelled_strategies:
        if interfaces is not None or labelled:
            raise UsageError(
                "interfaces and strategies are not compared at once",
                hint="the chain file says which interface the modules have beside replicas",
            )
        methods = ways.read_strategies(names_of(strategies), labelled_strategies, replicas)
    else:
        methods = ways.read_interfaces(names_of(interfaces), labelled)
    prepared = prepare(chain, data=data)
    if interfaces is None and strategies is None and not labelled_strategies:
        varies = prepared.chain.data.max_length is not None  # some have parts of one length
        every = "exact,delayed" if varies else "exact,synthetic,local,mixed,delayed"
        methods = ways.read_interfaces(names_of(every), labelled)
    if prepared.chain.data.per_replica:
        tell("warning: what trains without replicas, as backpropagation, has the first one's data")
    if prepared.chain.eval_every == 0:
        raise UsageError(
            f"{prepared.locate('eval_every')}: 0, so there are no evaluations to compare",
            hint="remove it, or set it to 1",
        )
    metric = ways.metric_of(prepared.chain)
    numbers = range(prepared.chain.seed, prepared.chain.seed + seeds)
    # All variants are checked before the first one starts.
    variants = [
        (label, seed, ways.variant(prepared, method, seed))
        for seed in numbers
        for label, method in methods.items()
    ]
    plain = ways.Method(interface="exact", replicas=1)
    references = [(REFERENCE, seed, ways.variant(prepared, plain, seed)) for seed in numbers]
    threads = threads or default_threads(prepared)
    folder = out or Path(f"compare-{prepared.chain.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    trials: list[Trial] = []
    for method, seed, changed in (*references, *variants):
        trials.append(_train(changed, method, seed, metric, folder, threads, quiet=json_wanted()))
        level = ways.default_target(trials, metric) if target is None else target
        rows = ways.summarize(trials, metric, level)
        document = {
            "chain": prepared.chain.name, "metric": metric.name, "target": level,
            "epochs": prepared.chain.epochs, "threads": threads,
            "rows": [asdict(row) for row in rows], "trials": [asdict(trial) for trial in trials],
        }  # fmt: skip
        write_json(folder / "result.json", finite(document))
        if not json_wanted():
            last = trials[-1]
            tested = "" if last.test is None else f", test {metric.name} {last.test:.4f}"
            tell(
                f"{len(trials)}/{len(references) + len(variants)} {method}, seed {seed}: "
                f"{metric.name} {last.points[-1].value:.4f}{tested}, "
                f"{last.samples_per_s:,.0f} samples/s"
            )
    picture = folder / "curves.png"
    try:
        curves = draw_curves(prepared.chain.name, ways.panels(trials, metric.name))
    except UnavailableError as error:
        tell(f"no picture: {error}")
    else:
        curves.savefig(picture, dpi=120)
        tell(str(picture))
    if not answered(document):
        _print(rows, metric.name, level)
        tell(str(folder / "result.json"))


@click.command(hidden=True)
@click.argument("run", type=options.PATH)
@click.option("--threads", type=click.IntRange(1), required=True)
def reference(run: Path, threads: int) -> None:
    """Train the network of a run directory by plain backpropagation."""
    from dni_runtime.measure.reference import train_reference
    from dni_runtime.run.record import Record

    record = Record.read(run)
    record.check_trusted()
    train_reference(record, threads)


def _train(
    prepared: CheckedChain, method: str, seed: int, metric: ComparedMetric, folder: Path,
    threads: int, *, quiet: bool,
) -> Trial:  # fmt: skip
    from dni_runtime.api.run import Run
    from dni_runtime.measure.compare import folder_of, read_trial
    from dni_runtime.measure.reference import REFERENCE, run_reference
    from dni_runtime.plan.create import create_run
    from dni_runtime.plan.settings import StartSettings
    from dnictl.progress import progress

    root = (folder / f"{folder_of(method)}-{seed}").absolute()
    if method == REFERENCE:
        create_run(root, prepared, backend=REFERENCE)
        run = Run.open(root)
        run_reference(run.record, threads)
        return read_trial(run.record, method, seed, metric)
    launch = options.planned_run(prepared, StartSettings(root, "process")).launch()
    run = Run.open(root)
    with progress(run, quiet=quiet or not sys.stderr.isatty()) as show:
        state = launch.supervise(show)
    if (error := run.failure(state)) is not None:
        raise error
    if state.phase != "finished":
        tell(f"stopped; the finished runs are in {folder / 'result.json'}")
        sys.exit(state.exit_code or 75)
    return read_trial(run.record, method, seed, metric)


def _print(rows: list[Row], metric: str, target: float | None) -> None:
    exact = partial(decimals, 4)
    aim = "" if target is None else f"time to {metric} {target:.4f}"
    tested = any(row.test is not None for row in rows)
    shares = any(row.shared_bytes is not None for row in rows)
    columns: list[Column[Row]] = [
        Column("method"),
        quantity("mean", text=exact, title=metric),
        quantity("test", text=exact, title=f"test {metric}" if tested else ""),
        quantity("low", text=exact, title="lowest"),
        quantity("high", text=exact, title="highest"),
        quantity("samples_per_s", text=thousands, title="samples/s"),
        quantity("shared_bytes", text=_mebibytes, title="MiB shared" if shares else ""),
        quantity("target_s", _reached, title=aim),
    ]
    print_table(columns, rows)


def _mebibytes(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / 2**20:,.1f}"


def _reached(row: Row) -> str:
    if row.target_s is None:
        return f"reached by {row.reached} of {row.trials}"
    return f"{row.target_s:.1f} s"


def _print_modules(costs: list[ModuleCost]) -> None:
    columns: list[Column[ModuleCost]] = [
        Column("module"),
        quantity("forward_us", text=_median, title="forward"),
        quantity("backward_us", text=_median, title="backward"),
        quantity("signal_us", text=lambda it: thousands(it.median or None), title="signal"),
        quantity("learn_us", _learn, title="learn"),
        quantity("step_us", text=_median, title="step, µs"),
        quantity("range", lambda it: f"{it.step_us.low:,.0f}-{it.step_us.high:,.0f}"),
        quantity("interface_share", text=partial(percent, digits=0), title="interface"),
        quantity("parameters", text=thousands),
        quantity("interface_parameters", text=thousands, title="+ interface"),
        quantity("down_bytes", text=_size, title="sends"),
        quantity("up_bytes", text=_size, title="returns"),
    ]
    print_table(columns, costs)
    if len(costs) > 1:
        slowest = max(costs, key=lambda cost: cost.step_us.median)
        mean = sum(cost.step_us.median for cost in costs) / len(costs)
        click.echo(
            f"slowest: {slowest.module}, {slowest.step_us.median / mean:.2f} times the mean; "
            f"at most {slowest.samples_per_s:,.0f} samples/s if each module has its own cores"
        )


def _median(spread: Spread) -> str:
    return thousands(spread.median)


def _learn(cost: ModuleCost) -> str:
    if not cost.learn_every:
        return "-"
    every = f", 1 in {cost.learn_every}" if cost.learn_every > 1 else ""
    return f"{cost.learn_us.median:,.0f}{every}"


def _size(nbytes: float) -> str:
    if not nbytes:
        return "-"
    for unit, size in (("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
