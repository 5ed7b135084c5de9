"""Evaluations of the chain at its tail, the best of them, and those of early heads elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import time

from torch import Tensor

from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.step import ModuleStep
from dni_runtime.link import Marker
from dni_runtime.run.cuts import written_cuts
from dni_runtime.run.documents.evaluations import Best, Share
from dni_runtime.run.lines import LineReader
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.worker import SelectionRole
from dni_runtime.worker.ledger import Ledger
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.resume import Start


class Selection:
    """The tail's record of evaluations, kept in ``checkpoints/best.json``.

    An evaluation is identified by the checkpoint before it: a repeated one is not counted again.
    Findings after ``cut``, where the tail starts, do not count.
    """

    def __init__(self, run: RunDir, role: SelectionRole, module: str, cut: int) -> None:
        self._run = run
        self._role = role
        # A module that is restarted alone may start at a snapshot, which is not a checkpoint.
        self._cut = max(
            (position for position in written_cuts(run, [module]) if position <= cut), default=cut
        )
        self._best = Best(metric=role.metric)
        stored = Best.load(run.best)
        if stored is not None and stored.metric == role.metric:
            best = self._best if stored.cut is None or stored.cut > cut else stored
            worse = tuple(position for position in stored.worse if position <= cut)
            self._best = best.model_copy(update={"worse": worse})

    def checkpoint(self, cut: int) -> None:
        """Note that a checkpoint is written: the next evaluation is of its weights."""
        self._cut = cut

    def evaluated(self, result: dict[str, float], epoch: int) -> bool:
        """Compare an evaluation with the best one.

        Returns whether training should end, because the best evaluation is too old.
        """
        metric, best = self._role.metric, self._best
        if self._better(result[metric]):
            self._best = Best(metric=metric, cut=self._cut, epoch=epoch, value=result[metric])
        elif self._cut not in (best.cut, *best.worse):
            self._best = best.model_copy(update={"worse": (*best.worse, self._cut)})
        try:
            self._best.write(self._run.best)
        except OSError as error:  # a full disk: no reason to stop training
            log.warning("the best checkpoint cannot be recorded: %s", error)
        patience = self._role.patience
        return patience is not None and len(self._best.worse) >= patience

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._best.cut is None:
            return True
        gain = value - self._best.value
        return (gain if self._role.rises else -gain) > self._role.min_delta


GATHER_MS = 50
"""Milliseconds between two looks at what the others have written, or attempts to write."""


class Shares:
    """Evaluations that several replicas of the tail count together, as one of them sees them.

    Batches of an evaluation go to the replicas by their ids, as all batches do. At the marker after
    them each replica but the first appends its sums to a file of its own in the run directory, and
    the first, which reports the whole, waits for those of all others. The lines stay, so that a
    replica that is restarted finds them, or writes the same ones again.

    ``begun`` is the start of the whole chain that this is: lines of others do not count.
    """

    def __init__(self, run: RunDir, spec: WorkerSpec, begun: int) -> None:
        self.reports = spec.replica == 1  # this is the replica that reports the whole
        self._run, self._name, self._begun = run, spec.module, begun
        readers = spec.siblings[1:] if self.reports else ()
        self._readers = {name: LineReader(run.shares(name), Share.parse) for name in readers}
        self._found: dict[int, dict[str, Share]] = {}
        self._look_s = 0.0

    def give(self, share: Share) -> bool:
        """Write this replica's part; return whether that has worked: if not, try again."""
        if not self._due():
            return False
        try:
            share.model_copy(update={"begun": self._begun}).append(self._run.shares(self._name))
        except OSError as error:
            log.warning("the part of an evaluation cannot be written: %s", error)
            return False
        return True

    def others(self, id: int) -> list[Share] | None:
        """Return the parts of the others at a marker; None before all are there."""
        if self._due():
            for name, reader in self._readers.items():
                with contextlib.suppress(OSError):
                    for share in reader.new():
                        if share.begun == self._begun and share.id >= id:
                            self._found.setdefault(share.id, {})[name] = share
        shares = self._found.get(id, {})
        if shares.keys() != self._readers.keys():
            return None
        self._found = {at: parts for at, parts in self._found.items() if at > id}
        return list(shares.values())

    def _due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return False
        self._look_s = now_s + GATHER_MS / 1000
        return True


log = logging.getLogger(__name__)


class Evaluations:
    """Adds up evaluations, also across restarts, and reports them.

    Of the tail's replicas the first one reports, with what the others have counted.
    """

    def __init__(
        self, step: ModuleStep, metrics: MetricsWriter, ledger: Ledger, start: Start
    ) -> None:
        self._step = step
        self._metrics = metrics
        self._ledger = ledger
        self._current: EvaluationSums | None = None
        if (sums := ledger.progress.counts.evaluation) is not None:
            self._current = EvaluationSums.of(step)
            self._current.merge(sums)
        spec = step.spec
        self._shares: Shares | None = None
        self._steps = 0
        if spec.tail is not None and spec.replicas > 1:
            self._shares = Shares(metrics.run, spec, start.begun)
        self._selection: Selection | None = None
        if spec.tail is not None and spec.tail.selection is not None and spec.replica == 1:
            self._selection = Selection(metrics.run, spec.tail.selection, spec.module, start.cut)

    def add(self, h_BH: Tensor, y_BY: Tensor) -> None:
        """Count a batch, if the module makes predictions; its activation is of eval mode."""
        p_BP = self._step.predict(h_BH)
        if p_BP is None:
            return
        if self._current is None:
            self._current = EvaluationSums.of(self._step)
        self._current.add(p_BP, y_BY)
        self._ledger.keep_evaluation(self._current.to_dict())

    def checkpoint(self, cut: int) -> None:
        """Note that a checkpoint is written: the next evaluation is of its weights."""
        if self._selection is not None:
            self._selection.checkpoint(cut)

    def complete(self, marker: Marker) -> bool:
        """Whether all parts of the evaluation before a marker are there; if not, call it again."""
        shares = self._shares
        if shares is None:
            return True
        if not shares.reports:
            sums = None if self._current is None else self._current.to_dict()
            step = self._ledger.progress.step
            return shares.give(Share(id=marker.id, step=step, sums=sums))
        others = shares.others(marker.id)
        if others is None:
            return False
        for sums in [share.sums for share in others if share.sums is not None]:
            self._current = self._current or EvaluationSums.of(self._step)
            self._current.merge(sums)
            self._ledger.keep_evaluation(self._current.to_dict())
        self._steps = sum(share.step for share in others)
        return True

    def end(self, epoch: int, *, test: bool) -> bool:
        """Report the completed evaluation, if the module has one, or a part of one.

        Returns whether training should end, because the best evaluation is too old.
        """
        current, self._current = self._current, None
        self._ledger.keep_evaluation(None)
        if current is None or (self._shares is not None and not self._shares.reports):
            return False
        result, step = current.result(), self._ledger.progress.step + self._steps
        self._metrics.evaluated(result, current.samples, step=step, test=test)
        log.info(
            "epoch %d%s%s: %s",
            epoch,
            ", test set" if test else "",
            ", early head" if self._step.spec.tail is None else "",
            ", ".join(f"{k} {v:.4f}" for k, v in result.items()),
        )
        return self._selection is not None and not test and self._selection.evaluated(result, epoch)
