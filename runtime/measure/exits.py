"""Early exits of a checkpoint: how good each is, who leaves where, and what crosses the cuts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from dni_runtime.core.chain import activations
from dni_runtime.core.exits import (
    Answers,
    assess,
    choose,
    early_head,
    head_of,
    may_leave,
    share_right,
    top,
)
from dni_runtime.core.export import separate
from dni_runtime.core.forward import ModuleForward
from dni_runtime.core.interfaces import GradientInterface
from dni_runtime.core.losses import ChainLoss
from dni_runtime.data import DataSource
from dni_runtime.errors import UsageError
from dni_runtime.files import write_atomic
from dni_runtime.measure.curves import Panel, draw_curves
from dni_runtime.run.documents.exits import Exit, Exits
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import Choice, Dtype, TensorSpec
from dni_runtime.wire import ITEM_BYTES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMISES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Points of accuracy for which there is always a rule."""

_EPOCHS, _STEPS = 3, 1000  # at least, in which heads are fitted to finished modules
_FITTED = {"optimizer": {"Adam": {"lr": 0.001}}}


class Head(NamedTuple):
    choice: Choice  # how it is built
    built: GradientInterface


class ChainExits:
    """The early exits of a run's checkpoint, by the numbers of their modules."""

    def __init__(self, run: RunDir, cut: int, modules: Sequence[ModuleForward]) -> None:
        self._run, self._cut, self._modules = run, cut, modules
        self._workers = [module.spec for module in modules]
        tail = self._workers[-1]
        self._loss = ChainLoss(tail.loss, tail.prediction, tail.label)
        if self._loss.scores is None or len(tail.prediction.shape) != 1:
            raise UsageError(
                f"samples cannot leave early: the output, {tail.prediction}, is not one score for "
                "each class",
                hint="early exits are for classification, with one class for each sample",
            )
        self._trained = {  # how those were built where samples can leave
            index: head_of(worker.interface)
            for index, worker in enumerate(self._workers)
            if worker.interface is not None and may_leave(self._workers, index)
        }
        self.heads: dict[int, Head] = {}

    def load(self, states: Mapping[str, Path]) -> None:
        """Take the heads that the run has for this checkpoint, else those of the training."""
        known = Exits.load(self._run.exits)
        exits = known.exits if known is not None and known.checkpoint == self._cut else ()
        kept = {exit.module: exit.head for exit in exits}
        for index, (choice, prefix) in self._trained.items():
            module = self._workers[index].module
            own = kept.get(module)
            if own is None:
                self._add(index, choice, states[module], prefix)
            else:
                self._add(index, own, self._run.exit_head(module))

    def fit(self, source: DataSource) -> None:
        """Make new heads, and train them on the modules' activations."""
        for index, (choice, _) in self._trained.items():
            options = choice.args if choice.name == "local" else {}
            self._add(index, Choice(name="local", args=options | _FITTED))
        for epoch in range(1, 1 + max(_EPOCHS, -(-_STEPS // source.train_batch_count))):
            for x, y_B in source.train_batches(epoch):
                outputs = activations(self._modules, x)
                for index, head in self.heads.items():
                    head.built.signal(outputs[index], y_B)
            self._end_pass()

    def _add(self, index: int, choice: Choice, file: Path | None = None, prefix: str = "") -> None:
        if (head := early_head(self._workers[index], choice, file, prefix)) is not None:
            self.heads[index] = Head(choice, head)

    def measure(self, source: DataSource, points: float, confidence: float | None) -> Exits:
        """Return figures, and rules: first of a promise, or of the same confidence at all exits."""
        if not self.heads:
            raise UsageError(
                "no module has an early head at which samples can leave",
                hint="'dnictl exits --retrain' fits heads to the finished modules"
                if self._trained
                else "samples leave only where all later modules depend on one module alone",
            )
        confidence_EN, class_EN, y_N = self._answers(source)
        answers = Answers(confidence_EN, class_EN == y_N)
        choosing, checking = answers.halves()
        promises = dict.fromkeys((points, *PROMISES) if confidence is None else PROMISES)
        rules = [assess(checking, choose(choosing, promise), promise) for promise in promises]
        if confidence is not None:
            rules.insert(0, assess(checking, [confidence] * len(self.heads)))
        assert self._workers[0].head is not None
        return Exits(
            checkpoint=self._cut,
            held_out=source.holds_out,
            samples=len(y_N),
            input_bytes=_bytes(self._workers[0].head.samples),
            exits=tuple(
                self._exit(index, confidence_N, right_N, class_N == class_EN[-1])
                for index, confidence_N, right_N, class_N in zip(
                    (*self.heads, -1), *answers, class_EN, strict=True
                )
            ),
            rules=tuple(rules),
        )

    def write(self, exits: Exits) -> None:
        """Write the heads into the run, then the document that says how they are built."""
        self._run.exits.parent.mkdir(mode=0o700, exist_ok=True)
        self._run.exits.unlink(missing_ok=True)  # of other heads
        for index, head in self.heads.items():
            content = save(separate(head.built.state_dict()))
            write_atomic(self._run.exit_head(self._workers[index].module), content)
        exits.write(self._run.exits)

    def _exit(self, index: int, confidence_N: Tensor, right_N: Tensor, same_N: Tensor) -> Exit:
        worker = self._workers[index]
        bounds_W, right_W = share_right(confidence_N, right_N)
        return Exit(
            module=worker.module,
            head=None if index == -1 else self.heads[index].choice,
            accuracy=float(right_N.double().mean()),
            agreement=float(same_N.double().mean()),
            sends=_bytes(edge.tensor for edge in worker.targets if edge.tensor),
            confidence=tuple(bounds_W.tolist()),
            right=tuple(right_W.tolist()),
        )

    def _answers(self, source: DataSource) -> tuple[Tensor, Tensor, Tensor]:
        """Return confidences and classes ``[E, N]`` of all exits, and the labels."""
        confidences, classes, labels = [], [], []
        for x, y_B in source.eval_batches():
            outputs = activations(self._modules, x)
            scores = [head.built.predict(outputs[index]) for index, head in self.heads.items()]
            pairs = [top(p_BC) for p_BC in (*scores, outputs[-1]) if p_BC is not None]
            confidences.append(torch.stack([confidence_B for confidence_B, _ in pairs]))
            classes.append(torch.stack([class_B for _, class_B in pairs]))
            labels.append(y_B)
        self._end_pass()
        y_N = torch.cat(labels)
        valid_N = self._loss.valid(y_N)
        valid_N = torch.ones_like(y_N, dtype=torch.bool) if valid_N is None else valid_N
        return (
            torch.cat(confidences, 1)[:, valid_N],
            torch.cat(classes, 1)[:, valid_N],
            y_N[valid_N],
        )

    def _end_pass(self) -> None:
        for module in self._modules:
            module.end_evaluation()


def _bytes(tensors: Iterable[TensorSpec]) -> dict[str, int]:
    """Return the bytes of one sample of tensors, by type on the wire; scales are left out."""
    sizes = dict.fromkeys(get_args(Dtype), 0)
    for tensor in tensors:
        for dtype in sizes:  # integers are sent as they are
            sent = dtype.partition("-")[0] if "float" in tensor.dtype else tensor.dtype
            sizes[dtype] += math.prod(tensor.shape) * ITEM_BYTES[sent]
    return sizes


def draw_exits(title: str, exits: Exits) -> Figure:
    """Draw how often answers of like confidence are right, and what leaving costs."""
    tables = {
        exit.module: list(zip(exit.confidence, exit.right, strict=True))
        for exit in (exits.exits[-1], *exits.exits[:-1])
    }
    prices = sorted((1 - rule.leave[-1], rule.lost[1]) for rule in exits.rules)
    panels = [
        Panel("confidence", "share of right answers", tables),
        Panel("share that leaves early", "points of accuracy lost", {"": prices}),
    ]
    return draw_curves(title, panels)
