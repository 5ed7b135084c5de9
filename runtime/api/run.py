"""A run as an object: what ``dnictl`` and Python do with a run that exists.

It is one file because it is one class: each operation is short, and half of it says what it raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dni_runtime.api.checkpointed import Checkpointed, Cut
from dni_runtime.errors import DataError, DniError, UsageError
from dni_runtime.files import need_room, write_json
from dni_runtime.measure.figures import MetricsReader, RunFigures
from dni_runtime.plan.pace import balance_of
from dni_runtime.run.cuts import check_cut, newest_cut, written_cuts
from dni_runtime.run.documents.events import Event
from dni_runtime.run.documents.records import JobRecord, PlanHeader
from dni_runtime.run.documents.requests import Stop
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.lease import newest_owner
from dni_runtime.run.lines import LineReader
from dni_runtime.run.record import Record, find_run, list_runs
from dni_runtime.schedulers.local import Scheduler
from dni_runtime.schedulers.schedulers import SCHEDULERS, read_state, read_states
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.supervise.journal import failure
from dni_runtime.supervise.scaling import ask_for, wanted_replicas

if TYPE_CHECKING:  # what starts and ends workers takes a while to import
    from matplotlib.figure import Figure

    from dni_runtime.plan.balancing import Proposal
    from dni_runtime.plan.plan import LaunchPlan
    from dni_runtime.serving.documents import ServiceState
    from dni_runtime.split.balance import Balance
    from dni_runtime.supervise.start import Launch

_log = logging.getLogger(__name__)

_POLL_S, _QUEUE_POLL_S, _STOP_POLL_S = 0.3, 5.0, 0.1
_REQUEST_TIMEOUT_S = 60.0  # the supervisor looks once a second, a shared file system shows it late
_STOP_TIMEOUT_S = 30.0  # beyond the workers' own time


class Run(Checkpointed):
    """A run, by its directory; any process that can read the directory may look at it.

    What imports, starts or ends something refuses a run of somebody else's with a ``UsageError``,
    unless ``trust`` is given.
    """

    def __repr__(self) -> str:
        return f"Run({str(self.directory.root)!r})"

    @classmethod
    def open(cls, path: Path | str, *, trust: bool = False) -> Run:
        """The run in a directory.

        Args:
            path: The directory.
            trust: Whether it may be executed if it belongs to somebody else.

        Raises:
            DataError: There is no run.
        """
        return cls(Record.read(Path(path)), trust=trust)

    @classmethod
    def find(
        cls, name: Path | str | None = None, runs: Path | str = "runs", *, trust: bool = False
    ) -> Run:
        """A run by path, by name or by the beginning of its name; your latest by default.

        Args:
            name: The path or name.
            runs: The folder of the runs.
            trust: Whether it may be executed if it belongs to somebody else.

        Raises:
            UsageError: There is none, or more than one.
        """
        return cls(find_run(None if name is None else str(name), Path(runs)), trust=trust)

    @property
    def job(self) -> JobRecord | None:
        """Its Slurm job, or None."""
        return JobRecord.load(self.directory.job)

    @property
    def scheduler(self) -> Scheduler:
        """What starts its workers."""
        name = self.record.scheduler
        if name not in SCHEDULERS:
            raise DataError(
                f"run {self.record.name!r} was started by {name!r}, which this version lacks",
                hint=f"it knows {', '.join(SCHEDULERS)}: use the version that started the run",
            )
        return SCHEDULERS[name]

    def state(self) -> RunState:
        """Its state now, as its supervisor, its workers and its scheduler report it."""
        return read_state(self.directory)

    def states(self, every_s: float = _POLL_S) -> Iterator[RunState]:
        """Its state, again and again until it has ended; the last one is its end.

        Args:
            every_s: Seconds between two. While its job is queued they are more, because each poll
                asks Slurm.
        """
        while True:
            state = self.state()
            yield state
            if not state.active:
                return
            time.sleep(max(every_s, _QUEUE_POLL_S) if state.phase == "queued" else every_s)

    def status(self, state: RunState | None = None) -> RunFigures:
        """Its state and the newest figures of each module.

        Args:
            state: Its state, if the caller has it.
        """
        return MetricsReader(self.record).read(state)

    def plot(self) -> Figure:
        """The learning curve: each metric of the evaluations by epoch, and the loss.

        A notebook shows it. The best checkpoint is marked if the chain selects one.

        Raises:
            UnavailableError: matplotlib is not installed.
        """
        from dni_runtime.measure.live import learning_curve

        return learning_curve(self.record, self.status())

    def watch(self) -> Run:
        """Wait until it has ended, and return it; a notebook shows the learning curve meanwhile.

        Raises:
            DniError: It failed; or matplotlib is not installed, or it has no supervisor.
        """
        from dni_runtime.measure.live import shown_live

        if (error := self.failure(self.wait(observe=shown_live(self.record)))) is not None:
            raise error
        return self

    def events(self) -> Iterator[Event]:
        """What has happened in it, oldest first."""
        return LineReader(self.directory.events, Event.parse).new()

    def wait(
        self, timeout_s: float | None = None, observe: Callable[[RunState], None] | None = None
    ) -> RunState:
        """Wait until it has ended.

        Args:
            timeout_s: Return after so many seconds, whatever its state is then.
            observe: Called with its state a few times a second.

        Raises:
            UsageError: It has no supervisor: its workers are started one by one.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for state in self.states():
            if state.phase == "new":
                raise UsageError(
                    f"run {self.name!r} has no supervisor: its workers are started by hand",
                    hint="'dnictl status' shows what they do",
                )
            if observe is not None:
                observe(state)
            if until is not None and time.monotonic() >= until:
                break
        return state

    def stop(self, timeout_s: float | None = None) -> RunState:
        """Stop it after a checkpoint, and wait for that; workers that take too long are killed.

        Args:
            timeout_s: How long they may take; by default the chain's ``stop_grace_s``.

        Raises:
            UsageError: It is active still: its supervisor does not answer.
        """
        self.check_trusted()
        from dni_runtime.supervise.start import end_leftovers

        job, state = self.job, self.state()
        grace_s = timeout_s
        if grace_s is None:
            grace_s = (PlanHeader.peek(self.directory.plan) or PlanHeader()).stop_grace_s
        if not state.active:
            return state
        Stop(time=time.time(), timeout_s=timeout_s).write(self.directory.stop_request)
        if state.phase == "queued":
            self.scheduler.cancel(self.directory)  # there is no supervisor to read the request
        # The supervisor looks a few times a second, and kills late workers itself: as long as it
        # lives, some still save something.
        until, updated = time.monotonic() + grace_s + _STOP_TIMEOUT_S, state.updated
        for state in self.states(_STOP_POLL_S if job is None else _POLL_S):
            if state.phase == "unsupervised" and job is None:  # or has just become so
                return end_leftovers(self.directory, state, grace_s + _STOP_TIMEOUT_S / 2)
            if state.phase == "stopping" and state.updated != updated:
                updated, until = state.updated, max(until, time.monotonic() + _STOP_TIMEOUT_S)
            if time.monotonic() >= until:
                break
        if state.active:
            still = f"run {self.name!r} is still {state.phase}"
            if state.pid:
                who = f"its supervisor, process {state.pid} on {state.host}"
                still += f"; {who}, does not answer"
            if job is not None:
                hint = f"end its job: scancel {job.job}"
            elif state.pid:
                hint = f"kill it there: kill -9 {state.pid}; then stop its workers with the same "
                hint += f"command: dnictl stop {self.name}"
            else:
                hint = "end the mpirun or srun of it"
            raise UsageError(still, hint=hint)
        return state

    def workers_of(self, name: str) -> list[str]:
        """Return the workers that a name stands for: one, or all replicas of a module."""
        found = [name] if name in self.modules else replicas_of(self.modules).get(name)
        if found is None:
            raise UsageError(
                f"run {self.name!r} has no module {name!r}",
                hint=f"its modules: {', '.join(self.modules)}",
            )
        return found

    def restart(self, module: str) -> None:
        """Have one module restart after a checkpoint, while the others go on.

        Args:
            module: Its name, or that of one of its replicas.

        Raises:
            UsageError: It has no such module, or no supervisor that answers.
        """
        self.check_trusted()
        for worker in self.workers_of(module):
            self._restart(worker)

    def _restart(self, module: str) -> None:
        state = self._supervised("no supervisor can restart a module")
        known = state.modules.get(module)
        if known is not None and known.state in ("finished", "inactive"):
            does = "has finished" if known.state == "finished" else "is inactive"
            raise UsageError(
                f"module {module!r} {does}: it cannot be restarted",
                hint=f"see 'dnictl status {self.name}'",
            )
        backend = self.record.specs()[0].replication.backend
        if backend is not None and module_of(module) != module:
            raise UsageError(
                f"{module!r} is in a process group ({backend}), which no replica can leave",
                hint=f"'dnictl stop {self.name}' and 'dnictl resume' restart all modules",
            )
        request = self.directory.restart_request(module)
        write_json(request, {"time": time.time()})
        try:
            self._answered(state, lambda: not request.exists())
        finally:
            request.unlink(missing_ok=True)

    def _supervised(self, problem: str) -> RunState:
        """Return the state of the run; refuse one without a supervisor."""
        state = self.state()
        if state.phase not in ("starting", "running", "stalled") or not state.pid:
            done = state.phase in ("queued", "stopping", "finished")
            raise UsageError(
                f"run {self.name!r} is {state.phase}: {problem}",
                hint=f"see 'dnictl status {self.name}'"
                if done
                else f"go on with the run by 'dnictl resume {self.name}'",
            )
        return state

    def _answered(self, state: RunState, done: Callable[[], bool]) -> None:
        """Wait until the supervisor has taken a request."""
        until = time.monotonic() + _REQUEST_TIMEOUT_S
        while not done():
            if time.monotonic() >= until:
                raise UsageError(
                    f"the supervisor of run {self.name!r}, process {state.pid} on {state.host}, "
                    "does not answer",
                    hint=f"see 'dnictl status {self.name}'",
                )
            time.sleep(_POLL_S)

    def scale(self, replicas: Mapping[str, int], *, balanced: bool = False) -> dict[str, int]:
        """Change how many replicas modules have.

        The supervisor stops all workers at a common cut and starts them there with the new numbers,
        which takes a while: :meth:`state` shows how far it is. The numbers hold for later starts of
        the run, too.

        Args:
            replicas: Number of replicas, by module.
            balanced: Whether they are what balances the chain: a module with ``replicas: auto``
                follows that from now on. Else it keeps its number.

        Returns:
            How many are wanted now, of each module whose number of replicas may change.

        Raises:
            UsageError: A number of replicas cannot change, or is too large or too small; or the run
                has no supervisor that answers.
        """
        self.check_trusted()
        workers, elastic = replicas_of(self.modules), self.record.specs()[1][0].elastic
        for module, count in replicas.items():
            self.workers_of(module)
            if module not in elastic:
                raise UsageError(
                    f"the number of replicas of module {module!r} is fixed",
                    hint="for the next run, write 'replicas: {start: .., most: ..}' in its chain",
                )
            if not 1 <= count <= (most := len(workers[module])):
                raise UsageError(f"module {module!r} can have 1 to {most} replicas, not {count}")
        state = self._supervised("no supervisor can change the number of replicas")
        wanted = wanted_replicas(self.directory, elastic) | dict(replicas)
        ask_for(self.directory, replicas, balanced=balanced)
        self._answered(state, lambda: RunState.read(self.directory).scale == wanted)
        return wanted

    def balancing_replicas(self) -> dict[str, int]:
        """Return how many replicas of each elastic module balance the chain, for :meth:`scale`.

        By how long a batch takes where the workers run: the fewest with which none of these modules
        slows the chain down.

        Raises:
            UsageError: A module has measured nothing yet, or no number of replicas can change.
        """
        return balance_of(self.directory, self.modules, self.record.specs()[1][0].elastic)

    def serve(
        self,
        name: str | None = None,
        *,
        cut: Cut = None,
        trust: bool = False,
        **settings: Any,
    ) -> ServiceState:
        """Serve its network over HTTP, in the background (docs/serving.md).

        Args:
            name: The service's name, and the model's in paths; by default the chain's.
            cut: As in :meth:`export`.
            trust: As in :meth:`open`.
            settings: The options of ``dnictl serve``: ``in_process``, ``backend``, ``replicas``,
                ``port``, ``max_batch``, ``token_file`` and the other fields of
                ``serving.documents.Settings`` and its ``http``.

        Returns:
            Its state: ``url``, ``versions``. ``dnictl serve --stop`` ends it.

        Raises:
            DniError: As :meth:`choose_cut`; a setting is unknown; or it cannot be started.
        """
        from dni_runtime.api.services import start_service
        from dni_runtime.serving.documents import Settings
        from dni_runtime.serving.settings import Settings as HttpSettings
        from dni_runtime.spec.choices import given
        from dni_runtime.spec.load import suggestion

        self.check_trusted()
        name = name or self.record.chain
        known = sorted({*Settings.model_fields, *HttpSettings.model_fields} - {"source", "http"})
        for key in settings.keys() - set(known):
            raise UsageError(f"serve() has no {key!r}", hint=suggestion(key, known))
        its = {key: settings.pop(key) for key in Settings.model_fields if key in settings}
        its |= {"source": self.directory.root, "trust": trust}
        its |= {"cut": self._position(cut)}
        its |= {"http": given(HttpSettings, {"name": name, **settings})}
        return start_service(self.directory.root.parent / name, given(Settings, its))

    def failure(self, state: RunState | None = None) -> DniError | None:
        """The error that it ended with; None if it did not fail.

        Args:
            state: Its state, where the caller has it.
        """
        return failure(self.directory, state or self.state())

    def balance(self, balance: Balance = "time", links: str = "fast") -> Proposal:
        """Better cuts for its network, by how long a batch takes where its modules run.

        ``proposal.write()`` writes them to the chain file; ``Chain(path).train(carry=run)`` goes on
        with them.

        Args:
            balance: What is to be equal among the modules: ``time``, ``memory`` or ``both``.
            links: ``fast`` (1 GB/s) or ``slow`` (100 Mbit/s).

        Raises:
            UsageError: It is not one network that has been taken apart.
            SpecError: The network cannot be cut so.
        """
        self.check_trusted()
        from dni_runtime.plan.balancing import balance_run

        return balance_run(self.record, balance, links)

    # Resuming.

    def resume(
        self, cut: int | str = "auto", *, epochs: int | None = None, log_level: str | None = None
    ) -> Run:
        """Resume it in the background, and return it: here, or as another job where it was one.

        Args:
            cut: Stream position of the checkpoint to resume from; by default the newest.
            epochs: Train until it has so many epochs in all; also a run that has finished.
            log_level: How much its workers log; for a job by default as before, else ``info``.

        Raises:
            UsageError: It is active, has finished (give ``epochs``), or has no such checkpoint.
        """
        cut = str(cut)
        self.check_resumable(cut, epochs)
        if self.job is not None:
            self.resubmit(log_level, epochs)
        elif (launch := self.relaunch(cut, epochs, log_level=log_level or "info")) is not None:
            launch.detach()
        return self

    def check_resumable(self, cut: str = "auto", epochs: int | None = None) -> None:
        """Refuse to resume what is active, has finished, or has no such checkpoint."""
        self.record.check_no_release()
        self.check_trusted()
        job, state = self.job, self.state()
        if state.active and (state.phase != "unsupervised" or job is not None):
            owner = None if job is not None else newest_owner(self.directory)
            raise UsageError(
                f"the run {self.name!r} belongs to {owner}, and is {state.phase}"
                if owner is not None
                else f"run {self.name!r} is {state.phase}",
                hint=f"stop it first: dnictl stop {self.name}",
            )
        there = written_cuts(self.directory, self.modules)
        if state.phase == "finished" and not (epochs and there):
            raise UsageError(
                f"run {self.name!r} has finished",
                hint=f"take its model home: dnictl export {self.name} -o model.safetensors; or "
                f"train it further: dnictl resume {self.name} --epochs {2 * self.record.epochs}"
                if there
                else "its checkpoints are gone: start a new run with 'dnictl up'",
            )
        if job is not None and not self.directory.script.exists():
            raise UsageError(
                f"run {self.name!r} was started by 'dnictl up' within job {job.job}: it has no "
                "batch script to submit again",
                hint=f"within an allocation: dnictl supervise {self.directory.root}",
            )
        if job is not None and cut != "auto":
            raise UsageError(
                "--from is for runs on one host: a job goes on from the newest checkpoint",
                hint=f"remove the newer ones from {str(self.directory.checkpoints)!r}",
            )
        check_cut(self.directory, self.modules, cut)

    def resubmit(self, log_level: str | None = None, epochs: int | None = None) -> str:
        """Submit its batch script once more; gives the new job's id."""
        self.check_trusted()
        from dni_runtime.schedulers.slurm.submit import submit_again
        from dni_runtime.supervise.start import take

        if epochs is not None:
            lease = take(self.directory)
            try:
                self._extend(epochs)
            finally:
                lease.release()
        assert self.job is not None
        return submit_again(self.directory, self.job, log_level)

    def plan(self, cut: str = "auto", *, log_level: str = "info") -> LaunchPlan:
        """The plan of its next start; writes nothing."""
        self.check_trusted()
        from dni_runtime.api.planning import plan_again

        attempt = self.state().last_attempt + 1
        return plan_again(self.record, attempt=attempt, resume=cut, log_level=log_level)

    def _extend(self, epochs: int) -> None:
        from dni_runtime.plan.carrying import extend  # imports torch
        from dni_runtime.resolve.advice import short_schedules

        self.record = extend(self.record, epochs)
        for notice in short_schedules(self.record.specs()[1]):
            _log.warning("%s", notice)

    def relaunch(
        self,
        cut: str = "auto",
        epochs: int | None = None,
        *,
        log_level: str = "info",
        tell: Callable[[str], None] = lambda line: None,
    ) -> Launch | None:
        """Become its owner, and plan its next start; ``tell`` gets what the user should know.

        Workers that a killed supervisor has left are stopped first. Returns what to start; None if
        those have finished it.
        """
        self.check_trusted()
        from dni_runtime.plan.create import WORKER_BYTES
        from dni_runtime.supervise.start import Launch, end_leftovers, take

        chain, _ = self.record.specs()
        lease = take(self.directory)
        try:
            state = self.state()  # as it was left
            if state.phase == "unsupervised":
                tell(f"{self.name}: stopping the workers that go on by themselves")
            state = end_leftovers(self.directory, state, chain.stop_grace_s)
            check_cut(self.directory, self.modules, cut)  # those workers may have removed it
            self.directory.stop_request.unlink(missing_ok=True)
            if epochs is not None:
                self._extend(epochs)
            elif state.phase == "finished":
                return None
            if cut == "auto" and not newest_cut(self.directory, self.modules)[0]:
                tell(f"{self.name}: no complete checkpoint, so it starts from scratch")
            plan = self.plan(cut, log_level=log_level)
            self.scheduler.check(plan)
            need_room(self.directory.root, WORKER_BYTES * len(plan.workers))
        except DniError:
            lease.release()  # this process may go on
            raise
        return Launch.of(self.directory, plan, lease)

    def take_over(self) -> Launch | None:
        """Become its supervisor: what a background process and a batch script do.

        Workers that a killed supervisor has left on this host go on and are adopted; else the plan
        in the directory is started, or one for the nodes of this job. None if it has finished.
        """
        self.check_trusted()
        from dni_runtime.api.planning import plan_again
        from dni_runtime.plan.plan import LaunchPlan
        from dni_runtime.supervise.start import Launch, take

        lease = take(self.directory)
        state = RunState.read(self.directory)
        adopt = state if state.phase == "unsupervised" and state.here else None
        if adopt is not None:
            return Launch(self.directory, LaunchPlan.read(self.directory), lease, adopt)
        if state.phase == "finished" and self.job is not None:  # the job was requeued
            return None
        if self.scheduler.take_over(self.record):
            plan = plan_again(self.record, attempt=state.last_attempt + 1)
        else:
            plan = LaunchPlan.read(self.directory)
        return Launch.of(self.directory, plan, lease)


def runs_in(folder: Path | str, chain: str | None = None) -> list[tuple[Run, RunState]]:
    """The runs in a folder, oldest first, with their states; a scheduler is asked once for all.

    Args:
        folder: The folder.
        chain: Only the runs of the chain of this name.
    """
    runs = [Run(record) for record in list_runs(Path(folder)) if chain in (None, record.chain)]
    try:
        return list(zip(runs, read_states([run.directory for run in runs]), strict=True))
    except (DataError, OSError):  # of one of them
        found = []
        for run in runs:
            try:
                found.append((run, run.state()))
            except (DataError, OSError) as error:
                _log.warning("run %s is passed over: %s", run.directory.root, error)
        return found


def active_runs(folder: Path | str, chain: str) -> list[str]:
    """What a user should know of the own runs of a chain that are active already."""
    try:
        runs = runs_in(folder, chain)
    except OSError:  # the folder itself
        return []
    return [
        f"another run of this chain is {state.phase}: dnictl stop {run.name}"
        for run, state in runs
        if state.active and run.record.is_callers
    ]
