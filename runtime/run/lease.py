"""The owner of a run: one supervisor at a time, on any host, also over NFS.

``owner.json`` names the owner. It is created by link(2), which is atomic on NFS as well (open(2),
O_EXCL). The owner shows that it lives by a counter in a separate file. To take over from an owner
that is gone, a process first creates the file ``leases/TOKEN.taken`` in the same way: of several
processes one succeeds, and an owner that was only slow finds the file. These files stay, so that
no process can take over from the same owner twice.

Hosts' clocks are never compared: an owner on another host counts as gone if its counter has not
changed during ``SILENCE_S`` of watching.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Self

from dni_runtime.errors import DataError, UsageError, WorkerError
from dni_runtime.files import create, overwrite_json, peek_json
from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.state import machine, process_birth
from dni_runtime.run.rundir import RunDir

SILENCE_S = 60.0
"""Longer than a living owner's counter stands still: its heartbeat plus file system caches."""

TOKEN_VARIABLE = "DNI_LEASE"
"""Environment variable that hands the lease to a supervisor in the background."""

_LOOK_S = 1.0
_WRITTEN_S = 1.0  # until a file has its content without hard links (``create``)


class LeaseError(WorkerError):
    """Another supervisor has taken over the run."""


class Owner(Document):
    """The content of ``owner.json``."""

    token: str  # random id of the lease
    host: str = ""
    machine: str = ""  # what numbers processes there: hosts may have one name
    pid: int = 0  # 0: the run has been released
    born: int | None = None  # start time of the process (proc(5), starttime)
    job: str | None = None  # of Slurm
    restarts: int = 0  # of that job

    @classmethod
    def me(cls, job: str | None = None) -> Self:
        """Return this process as an owner."""
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=machine(),
            pid=os.getpid(),
            born=process_birth(os.getpid()),
            job=job,
            restarts=0 if job is None else int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    def lives(self, me: Owner) -> bool | None:
        """Return whether the process exists; None if that cannot be seen from this host."""
        if not self.pid:  # released
            return False
        if (self.host, self.machine) == (me.host, me.machine):
            return self.born is not None and process_birth(self.pid) == self.born
        if self.job is not None and self.job == me.job and self.restarts != me.restarts:
            return False  # Slurm ends a job before it restarts it
        return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


class Lease:
    """The right to start workers of a run and to write its state."""

    def __init__(self, run: RunDir, owner: Owner) -> None:
        self.owner = owner
        self._run = run
        self._beats = 0

    @classmethod
    def take(
        cls,
        run: RunDir,
        job: str | None = None,  # of Slurm, that this process is in
        *,
        told: Callable[[str], None] = lambda line: None,  # gets a line of text if this takes long
        clock: Callable[[], float] = time.monotonic,  # monotonic, in seconds
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Become the owner of a run; take over from an owner that is gone.

        Raises ``UsageError`` if a living process owns the run, which has not been changed then.
        """
        me = Owner.me(job)
        handed = os.environ.pop(TOKEN_VARIABLE, None)
        run.leases.mkdir(mode=0o700, exist_ok=True)
        while not create(run.owner, me.write, in_steps=True):
            current = _current(run)
            if current.token != handed and cls._gone(run, current, me, told, clock, sleep) is False:
                raise UsageError(
                    f"the run {run.root.name!r} belongs to {current}",
                    hint=f"check it with 'dnictl status {run.root.name}', or stop it",
                )
            if create(run.taken(current.token), me.write, in_steps=True):
                me.write(run.owner)
                break
        return cls(run, me)

    @staticmethod
    def _gone(
        run: RunDir,
        owner: Owner,
        me: Owner,
        told: Callable[[str], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> bool:
        """Return whether an owner is gone; watch its counter if its process cannot be seen."""
        if (lives := owner.lives(me)) is not None:
            return not lives
        told(f"{run.root.name} belongs to {owner}; checking for {SILENCE_S:.0f} s if that is alive")
        began, first = clock(), peek_json(run.beats(owner.token))
        while clock() - began < SILENCE_S:
            sleep(_LOOK_S)
            if peek_json(run.beats(owner.token)) != first or run.taken(owner.token).exists():
                return False
        return True

    @property
    def lost(self) -> bool:
        """Whether another process has taken the run over."""
        try:
            return self._run.taken(self.owner.token).exists()
        except OSError:  # the file system is unavailable
            return False

    def check(self) -> None:
        """Check that this process still owns the run; raises ``LeaseError`` if not."""
        if self.lost:
            owner = _current(self._run)
            raise LeaseError(f"the run {self._run.root.name!r} has been taken over by {owner}")

    def beat(self) -> None:
        """Increase the owner's counter."""
        self._beats += 1
        overwrite_json(self._run.beats(self.owner.token), {"beats": self._beats})

    def hand_over(self) -> dict[str, str]:
        """Return environment variables for the process that takes over the lease."""
        return {TOKEN_VARIABLE: self.owner.token}

    def release(self) -> None:
        """Release the run, unless another process has taken it over."""
        nobody = Owner(token=secrets.token_hex(8))
        with contextlib.suppress(OSError):
            if create(self._run.taken(self.owner.token), nobody.write, in_steps=True):
                nobody.write(self._run.owner)
            self._run.beats(self.owner.token).unlink(missing_ok=True)


def newest_owner(run: RunDir) -> Owner | None:
    """Return the newest owner, as far as it can be read."""
    owner = Owner.peek(run.owner)
    while owner is not None and (later := Owner.peek(run.taken(owner.token))) is not None:
        owner = later
    return owner


def _current(run: RunDir) -> Owner:
    """Return the newest owner, when it can be read."""
    until = time.monotonic() + _WRITTEN_S
    while (owner := newest_owner(run)) is None:
        if time.monotonic() >= until:
            raise DataError(
                f"{str(run.owner)!r} does not name the owner of the run",
                hint="make sure that no process of the run is alive, then remove the file",
            )
        time.sleep(_WRITTEN_S / 20)
    return owner
