"""Early exits: whose answers at an early head are taken for the chain's.

A sample leaves at the first exit at which its top probability reaches the exit's threshold. Of
samples of like confidence it is known how often an answer is right there (PCEE, arXiv:2412.19325):
one level of that share sets the thresholds of all exits. The level falls only as long as the upper
bound of the loss, not its estimate, is within what was promised (tests in a fixed sequence: "Learn
then Test", arXiv:2110.01052).

Shape suffixes: B samples of a batch, N samples, E exits (the chain's output last), W windows of
like samples, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dni_runtime.core.export import read_tensors
from dni_runtime.core.interfaces import Boundary, GradientInterface, build_interface
from dni_runtime.core.training import empty_batch, module_seed, seeded
from dni_runtime.errors import DataError
from dni_runtime.run.documents.exits import Rule
from dni_runtime.spec import Choice, WorkerSpec

LIKE = 200
"""Samples of like confidence."""

_ONE_SIDED, _TWO_SIDED = 1.645, 1.96  # quantiles of the normal distribution, for 95 %
_NEVER = float("inf")

Thresholds = Sequence[float | None]
"""Of early heads; None: no sample leaves there."""


def top(p_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the top probability of each sample, and the class that has it."""
    confidence_B, class_B = p_BC.float().softmax(1).max(1)
    return confidence_B, class_B


def leaves(p_BC: Tensor, threshold: float | None) -> Tensor:
    """Return which samples of a batch leave at an exit, by its scores."""
    return top(p_BC)[0] >= (_NEVER if threshold is None else threshold)


def may_leave(workers: Sequence[WorkerSpec], index: int) -> bool:
    """Whether all that later modules take of a sample comes from this module."""
    later = [edge for worker in workers[index + 1 :] for edge in worker.sources]
    before = {worker.module for worker in workers[:index]}
    return not any(edge.data or edge.source in before for edge in later)


def head_of(interface: Choice) -> tuple[Choice, str]:
    """Return what of a gradient interface is its early head, and the prefix of its tensors.

    A module that only predicts has no synthesizer: it would need labels to be built as it was.
    """
    if interface.name in ("mixed", "corrected"):
        return Choice(name="local", args=interface.args["local"]), "interface.local."
    return interface, "interface."


def early_head(
    spec: WorkerSpec, choice: Choice, file: Path | None = None, prefix: str = ""
) -> GradientInterface | None:
    """Return a module's early head, whose ``predict`` answers; None if the interface has none.

    ``file`` has its weights.
    """
    with seeded(module_seed(spec.seed, spec.index)):
        head = build_interface(choice, Boundary.of(spec), ("interface",))
    if head.predict(empty_batch(spec.output, 2, "cpu")) is None:
        return None
    try:
        if file is not None:
            head.load_state_dict(read_tensors(file, prefix))
    except RuntimeError as error:
        what = f"the early head of module {spec.module!r}"
        raise DataError(f"{str(file)!r} does not fit {what}: {error}") from None
    return head


class Answers(NamedTuple):
    """What exits answer."""

    confidence_EN: Tensor
    right_EN: Tensor  # whether it is the label

    def halves(self) -> tuple[Answers, Answers]:
        """Return those that choose thresholds, and those that check them: drawn, always alike."""
        count = self.right_EN.shape[1]
        drawn_N = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        parts = drawn_N[: count // 2], drawn_N[count // 2 :]
        first, second = (Answers(*(each[:, part_N] for each in self)) for part_N in parts)
        return first, second

    def early(self, thresholds: Thresholds) -> tuple[Tensor, Tensor]:
        """Return at which exit each sample leaves, ``[N]``, and whether its answer is right."""
        bounds_E = torch.tensor([_NEVER if t is None else t for t in thresholds] + [-_NEVER])
        exit_N = (self.confidence_EN >= bounds_E.unsqueeze(1)).int().argmax(0)  # the first one
        return exit_N, self.right_EN.gather(0, exit_N.unsqueeze(0))[0]


def share_right(confidence_N: Tensor, right_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return rising confidences, each with the share of right answers right above it.

    Shares are of :data:`LIKE` samples, and rise as well: each is the least one from there on.
    """
    order_N = confidence_N.argsort()
    like = min(LIKE, len(order_N))
    stride = max(like // 8, len(order_N) // 100, 1)
    right_W = right_N[order_N].double().unfold(0, like, stride).mean(1)
    confidence_W = confidence_N[order_N][: len(order_N) - like + 1 : stride]
    right_W = right_W.flip(0).cummin(0).values.flip(0)
    new_W = confidence_W.diff(prepend=torch.tensor([-1.0])) > 0
    return confidence_W[new_W], right_W[new_W]


def points_lost(
    whole_N: Tensor, early_N: Tensor, quantile: float = _TWO_SIDED
) -> tuple[float, float, float]:
    """Return the points of accuracy that early answers lose, between the ends of its interval.

    The interval is that of paired proportions (Bonett and Price 2012, adjusted Wald): one sample
    is added to each kind on which the two differ, so that it has a width also if there is none.
    """
    worse, better = int((whole_N & ~early_N).sum()), int((early_N & ~whole_N).sum())
    count = len(whole_N) + 2
    middle, differ = (worse - better) / count, (worse + better + 2) / count
    spread = quantile * ((differ - middle**2) / count) ** 0.5
    lost = (worse - better) / len(whole_N)
    return 100 * (middle - spread), 100 * lost, 100 * (middle + spread)


def choose(answers: Answers, points: float) -> Thresholds:
    """Return the thresholds with which most samples leave, and at most so many points are lost."""
    pairs = zip(answers.confidence_EN[:-1], answers.right_EN, strict=False)
    tables = [share_right(confidence_N, right_N) for confidence_N, right_N in pairs]
    chosen: Thresholds = [None] * len(tables)
    worst = -_NEVER
    for level in sorted({share for _, right_W in tables for share in right_W.tolist()})[::-1]:
        lower = [
            float(confidence_W[right_W >= level][0]) if right_W[-1] >= level else None
            for confidence_W, right_W in tables
        ]
        low, _, high = points_lost(answers.right_EN[-1], answers.early(lower)[1], _ONE_SIDED)
        worst = max(worst, (low + high) / 2)  # that more leave and less is lost would be luck
        if worst + (high - low) / 2 > points:
            break
        chosen = lower
    return chosen


def assess(answers: Answers, thresholds: Thresholds, points: float | None = None) -> Rule:
    """Return what thresholds do to samples that had no part in their choice."""
    exit_N, early_N = answers.early(thresholds)
    low, lost, high = points_lost(answers.right_EN[-1], early_N)
    promised = _NEVER if points is None else points
    leave_E = torch.bincount(exit_N, minlength=len(answers.right_EN)).double() / len(exit_N)
    return Rule(
        points=points,
        thresholds=tuple(thresholds),
        leave=tuple(leave_E.tolist()),
        accuracy=float(early_N.double().mean()),
        lost=(low, lost, high),
        verdict="holds" if high <= promised else "broken" if low > promised else "not shown",
    )
