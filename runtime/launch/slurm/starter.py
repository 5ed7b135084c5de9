"""Starting workers as steps of a job: each is an ``srun``, which is a process of this host."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace

from dni_runtime.launch.plan import WorkerPlan
from dni_runtime.launch.processes import LocalProcess, LocalStarter, Process
from dni_runtime.launch.slurm import commands
from dni_runtime.launch.slurm.script import step_environment


class StepProcess:
    """A worker that runs as a step, seen through its ``srun``.

    Signals go to the step and not to ``srun``, which kills its step at once when it gets a SIGTERM.
    """

    def __init__(self, srun: LocalProcess, job: str, name: str) -> None:
        self._srun = srun
        self._job = job
        self._name = name

    @property
    def pid(self) -> int:
        return self._srun.pid

    def poll(self) -> int | None:
        code = self._srun.poll()
        # srun reports a task's signal as a shell does
        return 128 - code if code is not None and 128 < code < 128 + signal.NSIG else code

    def send(self, number: signal.Signals) -> None:
        step = commands.step_id(self._job, self._name)
        if step is not None:
            commands.signal_steps([step], number.name.removeprefix("SIG"))
        elif self._srun.poll() is None:
            self._srun.send(signal.SIGTERM)  # it still waits for its step

    def kill(self) -> None:
        step = commands.step_id(self._job, self._name) if self._srun.poll() is None else None
        if step is not None:
            commands.signal_steps([step], "KILL")
        self._srun.kill()


class SlurmStarter:
    """Starts workers whose plans begin with ``srun``.

    Args:
        job: The job's id.
        environ: The environment that a plan's own variables come on top of.
    """

    def __init__(self, job: str, environ: Mapping[str, str] | None = None) -> None:
        self._job = job
        self._local = LocalStarter(step_environment(os.environ if environ is None else environ))

    def start(self, worker: WorkerPlan) -> StepProcess:
        # The container is srun's child on another node: here there is none to be watched over.
        process = self._local.start(replace(worker, image=None))
        return StepProcess(process, self._job, worker.module)

    def send_all(self, workers: Mapping[str, Process], number: signal.Signals) -> None:
        # Slurm's commands take a tenth of a second each, more where all cores are busy.
        steps = commands.step_ids(self._job)
        known = [steps[name] for name in workers if name in steps]
        commands.signal_steps(known, number.name.removeprefix("SIG"))
        for name, process in workers.items():
            if name not in steps:
                process.send(number)
