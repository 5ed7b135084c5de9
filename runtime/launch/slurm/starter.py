"""Starting workers as steps of a job: each is an ``srun``, which is a process of this host."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import replace

from dni_runtime.errors import UnavailableError
from dni_runtime.launch.plan import WorkerPlan
from dni_runtime.launch.processes import LocalProcess, LocalStarter, Process
from dni_runtime.launch.slurm import commands
from dni_runtime.launch.slurm.script import step_environment

_log = logging.getLogger(__name__)


class StepProcess:
    """The ``srun`` of a worker that runs as a step; the step itself is its starter's to signal."""

    def __init__(self, srun: LocalProcess) -> None:
        self._srun = srun

    @property
    def pid(self) -> int:
        return self._srun.pid

    def poll(self) -> int | None:
        code = self._srun.poll()
        # srun reports a task's signal as a shell does
        return 128 - code if code is not None and 128 < code < 128 + signal.NSIG else code

    def send(self, number: signal.Signals) -> None:
        self._srun.send(signal.SIGTERM)  # srun passes the others on, to a step that is not there

    def kill(self) -> None:
        self._srun.kill()


class SlurmStarter:
    """Starts workers whose plans begin with ``srun``.

    Signals go to the steps and not to ``srun``, which kills its step at once when it gets a
    SIGTERM. Where Slurm does not answer, they are not sent: that is no reason to end the run.

    Args:
        job: The job's id.
        environ: The environment that a plan's own variables come on top of.
    """

    def __init__(self, job: str, environ: Mapping[str, str] | None = None) -> None:
        self._job = job
        self._local = LocalStarter(step_environment(os.environ if environ is None else environ))

    def start(self, worker: WorkerPlan) -> StepProcess:
        # The container is srun's child on another node: here there is none to be watched over.
        return StepProcess(self._local.start(replace(worker, image=None)))

    def send_all(self, workers: Mapping[str, Process], number: signal.Signals) -> bool:
        without_step = self._signal(workers, number.name.removeprefix("SIG"))
        for name in without_step or ():
            workers[name].send(number)
        return without_step is not None

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        self._signal(workers, "KILL")
        for process in workers.values():
            process.kill()

    def _signal(self, modules: Collection[str], name: str) -> list[str] | None:
        """Signal the steps of some modules at once; gives the modules that have none yet.

        Slurm's commands take a tenth of a second each, more where all cores are busy.

        Returns:
            None where Slurm does not answer.
        """
        try:
            steps = commands.step_ids(self._job)
            commands.signal_steps([steps[one] for one in modules if one in steps], name)
        except UnavailableError as error:
            _log.warning("SIG%s is not sent: %s", name, error)
            return None
        return [one for one in modules if one not in steps]
