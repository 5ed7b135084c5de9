"""Where a worker starts: at the beginning, at a cut of the chain, or at its own newest state.

A number is for the start of all modules: each starts at the same cut, which the supervisor chooses.
``auto`` lets a module that is started manually find the newest cut itself. ``own`` restarts one
module while the others continue: it starts at its own newest state, takes from upstream all that
can still be sent, and sends on what downstream may not have received. The ledger also shows that a
module must start so: its supervisor may not know.

All replicas of a module have the same weights at a cut. So the number of replicas may be another
one when the whole chain starts there: a new replica takes the state of the first one, without what
is that one's own, and the first one takes over the counts of those that are left out.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import CheckpointError
from dni_runtime.run.cuts import best_cut, forget, newest_cut, parts_of
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import module_of, number_of
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker import checkpoint
from dni_runtime.worker.ledger import Counts, Ledger, ModuleProgress
from dni_runtime.worker.start import OWN
from dni_runtime.worker.stream import Position

log = logging.getLogger(__name__)

AUTO = "auto"

_LAG_S = 4.0
"""Time in which a new file is nearly always seen on another host; restarts may wait as long."""


@dataclass
class Start:
    cut: int = 0  # id up to which the module has been trained
    restarted: bool = False  # this module was restarted alone, the others continue
    first_id: int = 1  # that the module may send; for the head, also of its stream
    position: Position = field(default_factory=Position)  # the head's, before that id
    over: bool = False  # the stream ends at the cut
    begun: int = 0  # which start of the whole chain this is


def begin(
    choice: str,
    spec: WorkerSpec,
    run: RunDir,
    step: ModuleStep,
    chain: list[str],  # names of all workers
    *,
    attempt: int = 1,
    first: int | None = None,
) -> tuple[Start, Ledger]:
    """Put a module into the state that it starts with.

    ``choice`` is ``auto`` (the newest complete cut; see :func:`forget_later`), ``own``, ``none``,
    or a cut's number. ``first`` is the attempt that was to start there, with the whole chain; if
    that or a later one has started, this one resumes from its ``own`` state.
    """
    counted, since = Counts.read(run.ledger(spec.module)), choice
    until_s = time.monotonic() + _LAG_S
    while first is not None and first < attempt and (counted is None or counted.attempt < first):
        if time.monotonic() > until_s:  # the attempt before has not begun
            break
        time.sleep(0.25)
        counted = Counts.read(run.ledger(spec.module))
    # this attempt's number may have been used by a supervisor that could not record it
    if first is not None and counted is not None and first <= counted.attempt <= attempt > first:
        choice = OWN
    restarted, began = choice == OWN, int(since) if since.isdecimal() else 0
    state = checkpoint.read_newest(run, spec.module) if restarted else None
    if not restarted or (began and (state is None or state[1]["cut"] <= began)):
        state = _at_cut(since, run, spec, chain)
    start, progress = Start(restarted=restarted), ModuleProgress()
    if state is None and spec.initial:
        step.load_initial(run.initial(module_of(spec.module)))
    if state is not None:
        checkpoint.restore(step, *state)
        start, progress = _start(state[1], restarted=restarted, since=since)
        if state[1].get("taken") and step.shared is not None:
            step.shared.joined()
        log.info(
            "module %s resumes at %d of the stream, step %d", spec.module, start.cut, step.batches
        )
    start.begun = first or 0
    if restarted:
        at_cut = progress.step
        ledger = Ledger.reopen(run.ledger(spec.module), progress, attempt)
        step.optimization.count(progress.step - at_cut)
        return start, ledger
    if choice != AUTO:  # else the neighbours may have found another cut
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


def progress_document(
    progress: ModuleProgress,
    *,
    over: bool,
    position: Position | None = None,
    oldest: tuple[int, Position] | None = None,
) -> dict[str, Any]:
    """Return what :func:`begin` needs beside the module's own state.

    ``over``: the stream ends at this cut. For the head: ``position`` is its own, and ``oldest`` the
    first id that it may have to resend, with the position before it.
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
    if position is not None:
        made["position"] = position.to_dict()
    if oldest is not None:
        made["again"] = {"id": oldest[0], "position": oldest[1].to_dict()}
    return made


def _at_cut(
    choice: str, run: RunDir, spec: WorkerSpec, chain: list[str]
) -> checkpoint.State | None:
    """Return the state to start with at a cut of the whole chain; None: there is none."""
    if choice == "none":
        return None
    if choice != AUTO:
        cut = int(choice)
    else:
        cut, damaged = newest_cut(run, chain)
        for problem in damaged:
            log.warning("%s; an older checkpoint is used", problem)
    if not cut:
        return None
    workers = replicas_of(chain).get(module_of(spec.module), [spec.module])
    took_part = parts_of(run, cut, workers)
    source = spec.module if spec.module in took_part else took_part[0]
    tensors, document = checkpoint.read(run.checkpoint(cut, source))
    if source != spec.module:
        tensors, document = _as_own(spec, tensors, document)
    left_out = [name for name in took_part if number_of(name) > spec.replicas]
    for name in left_out if spec.replica == 1 else ():
        _take_over(tensors, document, *checkpoint.read(run.checkpoint(cut, name)))
    return tensors, document


def _take_over(
    tensors: dict[str, Tensor],
    document: dict[str, Any],
    others: dict[str, Tensor],
    other: dict[str, Any],
) -> None:
    """Add what a replica that is left out has counted, and gathered for its next update."""
    for name in [name for name in others if name.startswith("gradient.")]:
        tensors[name] = tensors[name] + others[name] if name in tensors else others[name]
    for key in ("step", "samples", "gathered"):
        document[key] += other[key]
    ours, its = document["counted"], other["counted"]
    if its["epoch"] == ours["epoch"]:
        ours["batches"] += its["batches"]
    elif its["epoch"] > ours["epoch"]:  # the first one has had no batch of it yet
        document["counted"] = its


def _as_own(
    spec: WorkerSpec, tensors: dict[str, Tensor], document: dict[str, Any]
) -> checkpoint.State:
    """Return another replica's state as one of a replica that has trained on nothing yet.

    Gradients that the other one has gathered for its next update stay with it, and so do the
    states of its random numbers.
    """
    its_own = ("gradient.", "random.")
    tensors = {name: it for name, it in tensors.items() if not name.startswith(its_own)}
    nothing = {"step": 0, "samples": 0, "gathered": 0, "taken": True}
    counted = document["counted"] | {"batches": 0}
    document = document | nothing | {"module": spec.module, "counted": counted}
    return tensors | {"random.cpu": torch.get_rng_state()}, document


def _start(state: dict[str, Any], *, restarted: bool, since: str) -> tuple[Start, ModuleProgress]:
    """Return where a module with this state's document starts, and its progress there.

    ``restarted``: only this module starts there. ``since`` is the cut that the whole chain started
    at: nothing before it is resent.
    """
    try:
        cut, counted = state["cut"], state["counted"]
        start = Start(cut=cut, restarted=restarted, first_id=cut + 1, over=state["over"])
        if "position" in state:
            start.position = Position(**state["position"])
            if not restarted or since == str(cut):
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
        )
        progress = ModuleProgress(counts, cut, state["epoch"], state["epochs_ended"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint is incomplete: {error!r}") from None
    return start, progress
