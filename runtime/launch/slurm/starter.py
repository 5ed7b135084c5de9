"""Starting workers as steps of a job: each is an ``srun``, which is a process of this host."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from dni_runtime.errors import UnavailableError
from dni_runtime.launch.plan import WorkerPlan
from dni_runtime.launch.processes import LocalStarter, Process
from dni_runtime.launch.slurm import commands
from dni_runtime.launch.slurm.script import step_environment
from dni_runtime.launch.state import ModuleState, lives

_END_S = 30.0

_log = logging.getLogger(__name__)


class StepProcess:
    """The ``srun`` of a worker that runs as a step; the step itself is its starter's to signal."""

    def __init__(self, srun: Process) -> None:
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
        environ = step_environment(os.environ if environ is None else environ)
        self._local = LocalStarter(environ, tied=False)  # a supervisor that follows adopts them

    def start(self, worker: WorkerPlan) -> StepProcess:
        # The container is srun's child on another node: here there is none to be watched over.
        return StepProcess(self._local.start(replace(worker, image=None)))

    def adopt(
        self, worker: WorkerPlan, module: ModuleState, ended: Callable[[], int]
    ) -> StepProcess:
        if not lives(module):  # a later one may have been started, and not written down
            end_steps([worker.module])
        return StepProcess(self._local.adopt(worker, module, ended))

    def send_all(self, workers: Mapping[str, Process], number: signal.Signals) -> bool:
        without_step = self._signal(workers, number.name.removeprefix("SIG"))
        for name in without_step or ():
            workers[name].send(number)
        return without_step is not None

    def kill_all(self, workers: Mapping[str, Process]) -> None:
        self._signal(workers, "KILL")
        for process in workers.values():
            process.kill()

    def gone(self, modules: Collection[str]) -> Collection[str]:
        """Modules without a step: an ``srun`` that was cut off may wait for its step for ever."""
        try:
            steps = commands.step_ids(self._job)
        except UnavailableError:
            return ()
        return [one for one in modules if one not in steps]

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


def end_steps(modules: Collection[str]) -> None:
    """Kill what still runs of some modules in this job: steps of a supervisor that was killed."""
    job = commands.component_jobs(os.environ)
    until = time.monotonic() + _END_S
    try:
        while job is not None and time.monotonic() < until:
            left = [step for name, step in commands.step_ids(job).items() if name in modules]
            if not left:
                return
            commands.signal_steps(left, "KILL")
            time.sleep(1)
    except UnavailableError as error:
        _log.warning("it is not known what runs in this job: %s", error)
