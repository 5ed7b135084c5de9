"""Where a worker starts: at the beginning, at a cut of the chain, or at its own newest state.

A number is for the start of all modules: each starts at the same cut, which the supervisor chooses.
``auto`` lets a module that is started manually find the newest cut itself. ``own`` restarts one
module while the others continue: it starts at its own newest state, takes from upstream all that
can still be sent, and sends on what downstream may not have received. The ledger also shows that a
module must start so: its supervisor may not know. ``join`` is for a replica that is to be added: it
waits for the marker from which on it takes batches, and takes the state of another one there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dni_runtime.core.step import ModuleStep
from dni_runtime.cuts import best_cut, forget, newest_cut, parts_of
from dni_runtime.errors import CheckpointError
from dni_runtime.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.members import Active, Members, first_replicas
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker import checkpoint
from dni_runtime.worker.joining import LATE_S, Others, as_own
from dni_runtime.worker.ledger import Counts, Ledger, Progress
from dni_runtime.worker.stream import Position

log = logging.getLogger(__name__)

AUTO = "auto"
OWN = "own"
JOIN = "join"

_LAG_S = 4.0
"""Time in which a new file is nearly always seen on another host; restarts may wait as long."""


@dataclass
class Start:
    """Where a worker starts."""

    cut: int = 0  # id up to which the module has been trained
    again: bool = False  # only this module has been restarted
    first_id: int = 1  # that the head sends
    position: Position = field(default_factory=Position)  # the head's, before that id
    over: bool = False  # the stream ends at the cut
    members: Members = field(default_factory=lambda: Members({}))
    waits: bool = False  # for the marker from which on it takes batches
    begun: int = 0  # which start of the whole chain this is


def begin(
    wanted: str,
    spec: WorkerSpec,
    run: RunDir,
    step: ModuleStep,
    chain: list[str],  # names of all modules
    *,
    attempt: int = 1,
    first: int | None = None,
    active: Active | None = None,  # which replicas take batches when the whole chain starts
) -> tuple[Start, Ledger]:
    """Put a module into the state that it starts with.

    ``wanted`` is ``auto`` (the newest complete cut; see :func:`forget_later`), ``own``, ``join``,
    ``none``, or a cut's number. ``first`` is the attempt that was to start there, with the whole
    chain; if that or a later one has started, this one resumes from its ``own`` state, or joins.
    """
    counted, since = Counts.read(run.ledger(spec.module)), wanted
    until_s = time.monotonic() + _LAG_S
    while first is not None and first < attempt and (counted is None or counted.attempt < first):
        if time.monotonic() > until_s:  # the attempt before has not begun
            break
        time.sleep(0.25)
        counted = Counts.read(run.ledger(spec.module))
    if first is not None and counted is not None and first <= counted.attempt < attempt:
        wanted = JOIN if counted.waits or counted.has_left else OWN
    begun = first_replicas(spec.elastic) if active is None else active
    members = Members(begun, late=wanted == JOIN)
    rested = Counts() if counted is None else counted.at_rest()
    if wanted == JOIN:
        rested.waits = True
        start = Start(again=True, waits=True, members=members, begun=first or 0)
        return start, Ledger(run.ledger(spec.module), Progress(rested), attempt)
    again = wanted == OWN
    state = checkpoint.read_newest(run, spec.module) if again else _at_cut(wanted, run, spec, chain)
    start, progress, joined = Start(again=again), Progress(), False
    if again and counted is not None and counted.members is not None:
        members = Members.of_json(counted.members)
    others = replicas_of(chain).get(module_of(spec.module), [])
    at = members.joined(spec.module) if again else _number(state, wanted)
    if at and (state is None or state[1]["cut"] < at):
        state, joined = _of_another(run, step, others, at), True
    if state is None and spec.initial:
        step.load_initial(run.initial(module_of(spec.module)))
    if state is not None:
        checkpoint.restore(step, *state)
        start, progress = _start(state[1], again=again, since=since)
        if joined and step.shared is not None:
            step.shared.joined()
        if joined:
            progress.counts = rested.begun(start.cut, progress.counts.epoch)
        log.info(
            "module %s resumes at %d of the stream, step %d", spec.module, start.cut, step.batches
        )
    if counted is not None:
        progress.counts.left = [one for one in counted.left if again or one[0] <= start.cut]
    start.members, start.begun = members, first or 0
    if again:
        if progress.counts.members is not None:
            members.merge(Members.of_json(progress.counts.members))
        at_cut = progress.step
        ledger = Ledger.reopen(run.ledger(spec.module), progress, attempt)
        step.optimization.count(progress.step - at_cut)
        return start, ledger
    progress.counts.members = None
    if wanted != AUTO:  # else the neighbours may have found another cut
        forget_later(run, spec, start)
    return start, Ledger(run.ledger(spec.module), progress, attempt)


def forget_later(run: RunDir, spec: WorkerSpec, start: Start) -> None:
    """Remove what an earlier attempt wrote after the cut that all modules start at.

    It would mix with what this attempt writes.
    """
    forget(run, [spec.module], lambda other: other > start.cut)
    run.snapshot(spec.module).unlink(missing_ok=True)
    if spec.head is not None:
        run.marks(spec.module).unlink(missing_ok=True)
    if spec.tail is not None:
        run.shares(spec.module).unlink(missing_ok=True)
        if spec.replica == 1 and (best_cut(run) or 0) > start.cut:
            run.best.unlink(missing_ok=True)


def document(
    progress: Progress,
    *,
    over: bool,
    position: Position | None = None,
    again: tuple[int, Position] | None = None,
) -> dict[str, Any]:
    """Return what :func:`begin` needs beside the module's own state.

    ``over``: the stream ends at this cut. For the head: ``position`` is its own, and ``again`` the
    oldest id that it may have to resend, with the position before it.
    """
    counts = progress.counts
    made: dict[str, Any] = {
        "epoch": progress.epoch,
        "epochs_ended": progress.epochs_ended,
        "step": counts.step,
        "samples": counts.samples,
        "counted": {"epoch": counts.epoch, "batches": counts.epoch_batches},
        "over": over,
    }
    if counts.members is not None:
        made["members"] = counts.members
    if position is not None:
        made["position"] = position.to_dict()
    if again is not None:
        made["again"] = {"id": again[0], "position": again[1].to_dict()}
    return made


def _at_cut(
    wanted: str, run: RunDir, spec: WorkerSpec, chain: list[str]
) -> checkpoint.State | None:
    if wanted == "none":
        return None
    if wanted != AUTO:
        cut = int(wanted)
    else:
        cut, damaged = newest_cut(run, chain)
        for problem in damaged:
            log.warning("%s; an older checkpoint is used", problem)
    part = run.checkpoint(cut, spec.module)
    return checkpoint.read(part) if cut and parts_of(run, cut, [spec.module]) else None


def _number(state: checkpoint.State | None, wanted: str) -> int:
    """Return the cut that the whole chain starts at; 0: none."""
    return int(wanted) if wanted.isdecimal() else 0 if state is None else int(state[1]["cut"])


def _of_another(
    run: RunDir, step: ModuleStep, replicas: Sequence[str], cut: int
) -> checkpoint.State:
    """Return the state of another replica, for one that has none of its own at a cut."""
    others = Others(run, [one for one in replicas if one != step.spec.module], cut)
    until_s = time.monotonic() + LATE_S
    while (found := others.state()) is None and time.monotonic() < until_s:
        time.sleep(0.5)
    if found is None:
        raise CheckpointError(
            f"replica {step.spec.module!r} has no part of checkpoint {cut}, nor has another one",
            hint="continue from the newest complete checkpoint with 'dnictl resume'",
        )
    return as_own(step, found)


def _start(state: dict[str, Any], *, again: bool, since: str) -> tuple[Start, Progress]:
    """Return where a module with this state's document starts, and its progress there.

    ``again``: only this module starts there. ``since`` is the cut that the whole chain started at:
    nothing before it is resent.
    """
    try:
        cut, counted = state["cut"], state["counted"]
        start = Start(cut=cut, again=again, first_id=cut + 1, over=state["over"])
        if "position" in state:
            start.position = Position(**state["position"])
            if not again or since == str(cut):
                # all modules restart an evaluation that the cut lies within
                start.position = replace(start.position, eval_batch=0)
            elif "again" in state:
                start.first_id = state["again"]["id"]
                start.position = Position(**state["again"]["position"])
        counts = Counts(
            id=cut,
            step=state["step"],
            samples=state["samples"],
            epoch=counted["epoch"],
            epoch_batches=counted["batches"],
            members=state.get("members"),
        )
        progress = Progress(counts, cut, state["epoch"], state["epochs_ended"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint is incomplete: {error!r}") from None
    return start, progress
