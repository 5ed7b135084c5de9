"""Commands that start workers: ``up``, ``run``, ``resume``; ``mpi`` leaves that to mpirun."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.runs import conclude, go
from dnictl.terminal import answer, answered, tell

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.plan.plan import LaunchPlan
    from dni_runtime.plan.prepare import CheckedChain
    from dni_runtime.plan.settings import BackendChoice


@click.command()
@options.of_new_run
@options.hosts
@options.detach
@options.carry
@options.changes
@options.trust
@options.dry_run
@options.json
def up(chain: Path, hosts: str | None, detach: bool, dry_run: bool, **values: Any) -> None:
    """Train a chain here.

    Starts one worker per module, and supervises them to the end.
    Ctrl-C stops the run after a checkpoint (exit code 75; 'dnictl resume' continues it), a second
    one kills it. Inside a Slurm allocation the workers are steps on its nodes, unless --backend
    is process or apptainer.

    \b
    Example:
      dnictl up chain.yaml
      dnictl up chain.yaml -d && dnictl logs -f
      dnictl up chain.yaml --hosts a,b
    """
    prepared, settings = options.new_run(chain, **values)
    from dni_runtime.api.planning import scheduled

    planned = options.planned_run(prepared, scheduled(settings, prepared, hosts))
    if dry_run:
        _print_plan(planned.plan)
    else:
        go(planned.launch(), detached=detach)


@click.command()
@options.of_run
@options.detach
@click.option(
    "--from", "cut", default="auto", metavar="CUT",
    help="Stream position of the checkpoint to resume from (default: the newest).",
)  # fmt: skip
@click.option(
    "--epochs", type=click.IntRange(1), metavar="N",
    help="Train until it has N epochs in all; also a run that has finished.",
)  # fmt: skip
@options.trust
@options.log_level
@options.dry_run
@options.json
def resume(
    run: Run, detach: bool, cut: str, epochs: int | None, log_level: str, dry_run: bool
) -> None:
    """Resume a run that was stopped or failed, or train it further.

    It starts from the newest complete checkpoint. A Slurm job's script is submitted again. With
    --epochs it is trained further, also if it has finished.

    \b
    Examples:
      dnictl resume
      dnictl resume --epochs 20
    """
    run.check_resumable(cut, epochs)
    if notice := run.record.compare_versions():
        tell(f"{run.name}: {notice}")
    if dry_run and epochs is not None:
        from dni_runtime.plan.carrying import longer

        longer(run.record, epochs)  # refused here, too
        tell(f"{run.name}: trains until it has {epochs} epochs, not {run.record.epochs}")
    document = {"run": run.name, "path": str(run.directory.root)}
    if run.job is not None and dry_run:
        script = run.directory.script.read_text()
        answer(document | {"script": script}, script.removesuffix("\n"))
    elif run.job is not None:  # its script is submitted as another job
        job = run.resubmit(log_level if options.flags_given("log_level") else None, epochs)
        answer(document | {"job": job}, f"{run.name}: job {job}")
    elif dry_run:
        _print_plan(run.plan(cut, log_level=log_level))
    elif (launch := run.relaunch(cut, epochs, log_level=log_level, tell=tell)) is not None:
        go(launch, detached=detach)
    else:
        conclude(run, run.state())


@click.command("run")
@click.argument("module")
@click.option(
    "-f", "--file", "chain", type=options.PATH, default=Path("chain.yaml"),
    show_default=True, help="The chain file.",
)  # fmt: skip
@click.option(
    "--run-dir", type=options.FOLDER, required=True,
    help="The run's directory, the same for all modules; created if missing.",
)  # fmt: skip
@options.backend
@options.images
@options.data
@click.option(
    "--resume", "cut", default="auto", show_default=True, metavar="auto|own|none|CUT",
    help="What to start from: the newest complete checkpoint, the module's own newest state, "
    "nothing, or the checkpoint at this position of the stream.",
)  # fmt: skip
@options.log_level
@options.dry_run
def run(
    module: str,
    chain: Path,
    run_dir: Path,
    backend: BackendChoice,
    images: Path,
    data: Path | None,
    cut: str,
    log_level: str,
    dry_run: bool,
) -> None:
    """Run one module in the foreground.

    Its neighbours are started the same way.

    \b
    Example, in two terminals:
      dnictl run bottom --run-dir runs/by-hand
      dnictl run top --run-dir runs/by-hand
    """
    from dni_runtime.files import locked
    from dni_runtime.image.apptainer import host_environment
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.plan.settings import StartSettings
    from dni_runtime.run.rundir import RunDir, socket_folder
    from dni_runtime.schedulers.runtimes import worker_argv

    prepared = prepare(chain, data=data)
    workers = [worker.module for worker in prepared.replicas]
    if module not in workers:
        raise UsageError(
            f"chain {prepared.chain.name!r} has no module {module!r}",
            hint=f"its modules: {', '.join(workers)}",
        )
    if cut not in ("auto", "own", "none") and not cut.isdecimal():
        raise UsageError(
            f"--resume {cut!r} is not a checkpoint",
            hint="allowed: auto, own, none, or the number of one in 'checkpoints/' of the run",
        )
    root = run_dir.absolute()
    settings = StartSettings(root, backend, images, by_hand=True, resume=cut, log_level=log_level)
    planned = options.planned_run(prepared, settings)
    (worker,) = (worker for worker in planned.plan.workers if worker.module == module)
    argv = worker_argv(worker)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    with ExitStack() as stack:
        with suppress(OSError):  # that is said below; or the file system has no locks
            root.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(root.parent, lambda: None))  # of neighbours that start, too
        if RunDir(root).record.exists():
            _same_spec(prepared, run_dir, module)
        else:
            planned.create()
    socket_folder(root)
    environ = dict(os.environ)
    if planned.plan.backend == "apptainer":
        environ = host_environment(os.environ)
    sys.stdout.flush()
    os.execvpe(argv[0], argv, {**environ, **worker.environment})


@click.command()
@options.of_new_run
@options.json
def mpi(chain: Path, **values: Any) -> None:
    """Make a run for mpirun or srun, and print its command.

    Each process that the command starts finds its module by its rank. The same command, called
    again, goes on from the newest checkpoint.

    \b
    Example:
      dnictl mpi chain.yaml > train.sh && sh train.sh
    """
    from dni_runtime.files import write_json
    from dni_runtime.schedulers.mpi import mpirun_argv, mpirun_command

    prepared, settings = options.new_run(chain, **values)
    planned, root = options.planned_run(prepared, replace(settings, scheduler="mpi")), settings.run
    plan = planned.plan
    write_json(planned.create().plan, plan.to_json())
    argv, command = mpirun_argv(plan), mpirun_command(plan)
    workers = [worker.module for worker in plan.workers]
    document = {"run": root.name, "path": str(root), "workers": workers}
    answer(document | {"argv": argv, "command": command}, command)


def _same_spec(prepared: CheckedChain, run_dir: Path, module: str) -> None:
    from dni_runtime.run.record import Record

    record = Record.read(run_dir)
    record.check_trusted()
    hashes = {worker.module: worker.hash for worker in prepared.workers}
    if {worker.module: worker.hash for worker in record.specs()[1]} != hashes:
        raise UsageError(
            f"{str(run_dir)!r} is a run of another version of chain {record.chain!r}",
            hint="name another --run-dir",
        )


def _print_plan(plan: LaunchPlan) -> None:
    from dni_runtime.schedulers.schedulers import SCHEDULERS

    commands = [SCHEDULERS[plan.scheduler].command(worker) for worker in plan.workers]
    document = plan.to_json()
    for worker, argv in zip(document["workers"], commands, strict=True):
        worker["argv"] = argv
    if answered(document):
        return
    click.echo(f"# run {plan.run}, backend {plan.backend}")
    for node, names in plan.nodes.items():
        click.echo(f"# {node}: {', '.join(names)}")
    for planned, argv in zip(plan.workers, commands, strict=True):
        click.echo(f"\n# {planned.module}: log {planned.log}")
        # with ssh it is part of the command
        for name, value in planned.environment.items() if plan.scheduler != "ssh" else ():
            click.echo(f"{name}={shlex.quote(value)} \\")
        click.echo(shlex.join(argv))
