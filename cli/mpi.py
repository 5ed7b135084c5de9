"""The command ``mpi``: a run whose workers ``mpirun`` or ``srun`` starts."""

from __future__ import annotations

from pathlib import Path

import click

from dnictl.options import (
    Wanted,
    backend_option,
    chain_argument,
    chosen_chain,
    data_option,
    images_option,
    json_option,
    level_option,
    planned_run,
    print_json,
    run_dir_option,
    runs_option,
)


@click.command()
@chain_argument
@backend_option
@run_dir_option
@runs_option
@images_option
@data_option
@level_option
@json_option
def mpi(
    chain: Path,
    backend: Wanted,
    run_dir: Path | None,
    runs: Path,
    images: Path,
    data: Path | None,
    log_level: str,
    as_json: bool,
) -> None:
    """Make a run for mpirun or srun, and print its command.

    Each process that the command starts finds its module by its rank. The same command, called
    again, goes on from the newest checkpoint.

    \b
    Example:
      dnictl mpi chain.yaml > train.sh && sh train.sh
    """
    from dni_runtime.files import write_json
    from dni_runtime.launch.mpi import mpirun_argv, mpirun_command
    from dni_runtime.launch.records import run_root
    from dni_runtime.launch.settings import StartSettings

    prepared = chosen_chain(chain, data=data)
    root = run_root(prepared.chain.name, run_dir, runs)
    settings = StartSettings(root, backend, images, scheduler="mpi", log_level=log_level)
    planned = planned_run(prepared, settings)
    plan = planned.plan
    write_json(planned.create().plan, plan.to_json())
    argv, command = mpirun_argv(plan), mpirun_command(plan)
    if as_json:
        workers = [worker.module for worker in plan.workers]
        document = {"run": root.name, "path": str(root), "workers": workers}
        print_json({**document, "argv": argv, "command": command})
    else:
        click.echo(command)
