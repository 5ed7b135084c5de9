"""Reading and finding run directories."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

from pydantic import PrivateAttr, ValidationError

from dni_runtime import __version__
from dni_runtime.errors import CheckpointError, DataError, UsageError
from dni_runtime.run.cuts import FORMAT as CHECKPOINT_FORMAT
from dni_runtime.run.documents.records import FORMAT, RunHeader, RunRecord
from dni_runtime.run.releases import parse_name, unpacked
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.model import ChainSpec
from dni_runtime.spec.replicas import modules_of
from dni_runtime.spec.worker import WorkerSpec


class Record(RunRecord):
    """A run, as it was started."""

    _run: RunDir = PrivateAttr()

    @property
    def run(self) -> RunDir:
        return self._run

    @classmethod
    def read(cls, root: Path) -> Record:
        """Read the record of the run at ``root``.

        Raises ``DataError`` if there is no run, or its record has another format or is malformed.
        """
        run = RunDir(root.absolute())
        made = RunHeader.load(run.record)
        if made is None:
            raise DataError(f"{str(root)!r} is not a run directory: it has no run.json")
        version = made.versions.dni_runtime
        if made.format != FORMAT:
            raise DataError(
                f"{str(root)!r} is a run of dni-runtime {version}, in format "
                f"{made.format!r}; this is {__version__}, which reads format {FORMAT}",
                hint=f"use dni-runtime {version} for it",
            )
        record = cls.load(run.record)
        assert record is not None
        record._run = run
        return record

    @property
    def owners(self) -> set[int]:
        """The users to whom its folder, a link to that, and its ``run.json`` belong."""
        root = self.run.root
        return {status.st_uid for status in (root.lstat(), root.stat(), self.run.record.lstat())}

    @property
    def is_callers(self) -> bool:
        """Whether it belongs to the caller, as far as it is there."""
        with contextlib.suppress(OSError):
            return self.owners == {os.geteuid()}
        return False

    def check_trusted(self, trust: bool = False) -> None:
        """Refuse to execute what somebody else has written, other than root, without ``trust``.

        A run names what is imported and what is started: its specs, its sources, its plan.
        """
        others = self.owners - {os.geteuid(), 0}
        if others and not trust:
            whose = " and ".join(map(user_name, others))
            raise UsageError(
                f"run {str(self.run.root)!r} belongs to {whose}: this would run their code as you",
                hint="it can be looked at ('dnictl status', 'logs', 'events'); if you trust them: "
                "--trust, in Python trust=True",
            )

    def check_no_release(self) -> None:
        """Refuse to change a release, or to go on from training that it does not have."""
        if self.release is not None:
            raise UsageError(
                f"{self.release} is a release: it does not change, and has no state of a training",
                hint=f"begin a new run with its weights, init: {{file: '{self.release}'}}, or "
                f"remove it: dnictl models --remove {self.release}",
            )

    def specs(self) -> tuple[ChainSpec, tuple[WorkerSpec, ...]]:
        """Return the chain and the modules' specs, as of the run's creation."""
        try:
            chain = ChainSpec.model_validate_json(self.run.chain.read_bytes())
            workers = [
                WorkerSpec.from_json(self.run.spec(name).read_bytes()) for name in self.modules
            ]
        except (OSError, ValidationError) as error:
            raise DataError(
                f"the specs in {str(self.run.root)!r}, a run of dni-runtime "
                f"{self.versions.dni_runtime}, cannot be read by {__version__}: {error}"
            ) from None
        return chain, modules_of(workers)

    def compare_versions(self) -> str | None:
        """Return a note for resuming a run of another version; None if it is of this one.

        Refuses a run with checkpoints that this version cannot read.
        """
        made, version = self.versions.checkpoint, self.versions.dni_runtime
        if made != CHECKPOINT_FORMAT:
            raise CheckpointError(
                f"run {self.name!r} was created by dni-runtime {version} with checkpoints of "
                f"format {made}; this is {__version__}, which reads format {CHECKPOINT_FORMAT}",
                hint=f"resume with dni-runtime {version}, or start a new run with 'dnictl up'",
            )
        if version == __version__:
            return None
        return f"created by dni-runtime {version}, resumed with {__version__}"


def list_runs(folder: Path) -> list[Record]:
    """Return the runs in a folder, oldest first; skip everything else."""
    records = []
    if folder.is_dir():
        for entry in folder.iterdir():
            with contextlib.suppress(DataError, OSError):  # OSError: those of others, mostly
                if (entry / "run.json").is_file():
                    records.append(Record.read(entry))
    return sorted(records, key=lambda record: (record.created, record.name))


def find_run(name: str | None, folder: Path) -> Record:
    """Find a run by path, name or beginning of its name, or a release, ``NAME:VERSION``.

    By default it is the caller's latest run.
    """
    if name == "":  # of a variable that is not set, say: all names begin with it
        raise UsageError("a run's name is empty", hint="see 'dnictl ps'")
    if name is not None:
        for path in (Path(name), folder / name):
            if (path / "run.json").is_file():
                return Record.read(path)
        if (released := parse_name(name)) is not None:
            if (unpacked(*released) / "run.json").is_file():
                return Record.read(unpacked(*released))
            raise UsageError(
                f"there is no release {name!r} here", hint="see 'dnictl models', 'dnictl pull'"
            )
        if os.sep in name:
            raise UsageError(f"{name!r} is not a run directory: it has no run.json")
    runs = list_runs(folder)
    if name is None:
        mine = [record for record in runs if record.is_callers]
        if not mine:
            raise UsageError(
                f"there are no runs{' of yours' if runs else ''} in {str(folder)!r}",
                hint=f"name one of others: {', '.join(record.name for record in runs)}"
                if runs
                else "start one with 'dnictl up', or name the folder with --runs or DNICTL_RUNS",
            )
        return mine[-1]
    matches = [record for record in runs if record.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(record.name for record in matches or runs)
    problem = f"{name!r} is the beginning of {len(matches)} runs" if matches else f"no run {name!r}"
    raise UsageError(
        f"{problem} in {str(folder)!r}", hint=f"runs: {names}" if names else "see 'dnictl ps'"
    )


def user_name(uid: int) -> str:
    """Return a user's name; in a container there may be none for the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
