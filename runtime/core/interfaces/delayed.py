"""Interfaces without an error signal of their own: ``exact``, ``delayed`` and ``none``."""

from __future__ import annotations

from pydantic import Field

from dni_runtime.core.interfaces.base import Boundary, GradientInterface, Keep, Needs, Timing
from dni_runtime.spec.named import Frozen

MICRO_BATCHES = Field(default=1, ge=1, le=4096)


class PartsOptions(Frozen):
    """Options of the exact interface, and of none: how batches are cut, for the whole chain."""

    # Parts of each training batch, in different modules at the same time; one update for all.
    micro_batches: int = MICRO_BATCHES


class Exact(GradientInterface):
    """Plain backpropagation through the chain: the next batch waits for this one's true gradient.

    With micro-batches this is a synchronous pipeline (GPipe, Huang et al. 2019, arXiv:1811.06965);
    gradients are taken before new parts, as in the schedule "1F1B" (PipeDream, Narayanan et al.
    2019, sec. 3.2).
    """

    Options = PartsOptions

    timing = Timing.DEFERRED

    @classmethod
    def needs(cls, options: PartsOptions) -> Needs:
        return Needs(1, micro_batches=options.micro_batches, max_late=0, labels=False)


class DelayedOptions(Frozen):
    """Options of the delayed interface."""

    # Updates that may be missing from the weights of a forward pass; the module waits before it
    # exceeds that. None: as many as the window allows.
    max_late: int | None = Field(default=None, ge=1, le=4096)
    # Use the weights expected when the gradient comes: the newest update is repeated for each
    # update that is still to come.
    predict: bool = False
    micro_batches: int = MICRO_BATCHES  # parts of each training batch, for one update
    # What is kept of a forward pass until its gradient comes: its ``graph`` (old activations,
    # current weights), its ``input`` (the pass is recomputed with the current weights), or the
    # graph and the old ``weights``.
    keep: Keep = "weights"
    # Batches kept for their true gradient; when it is full the oldest is given up. None: as many as
    # it may be late, and a margin.
    store: int | None = Field(default=None, ge=1, le=1 << 16)


class Delayed(GradientInterface):
    """The true gradient, applied when it arrives to the forward pass that was kept for it.

    An asynchronous pipeline. With ``keep: weights``, the default, it is PipeDream's (Narayanan et
    al. 2019, sec. 3.3), with ``keep: input`` that of features replay (Huo et al. 2018,
    arXiv:1807.04511). With ``max_late: 1`` and micro-batches no forward pass misses more than one
    update, as in PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503). Prediction of weights:
    SpecTrain (Chen et al. 2018, arXiv:1809.02839), whose distance is fixed; here it is the number
    of updates that are still to come. With one update late it is an error feedback, too: weights of
    passes move by the update that has come, and by its difference from the one that was assumed.
    (Zmushko et al. 2026, arXiv:2606.30634, correct late updates in that spirit; this is derived
    here, not their formula.)
    """

    Options = DelayedOptions

    timing = Timing.DEFERRED

    def __init__(self, boundary: Boundary, options: DelayedOptions) -> None:
        super().__init__(boundary, options)
        self.predicts = options.predict
        self.keep = options.keep
        self.store = options.store

    @classmethod
    def needs(cls, options: DelayedOptions) -> Needs:
        return Needs(
            1, micro_batches=options.micro_batches, max_late=options.max_late, labels=False
        )


class Untrained(GradientInterface):
    """No signal and no gradient, so that the module keeps its initial weights.

    The control that shows how much the others learn: the modules below the tail are random features
    ("no backprop" in Jaderberg et al. 2016, sec. 3.1). Only BatchNorm's running statistics follow
    the data. True gradients for a module upstream pass through it.
    """

    Options = PartsOptions

    timing = Timing.NEVER

    @classmethod
    def needs(cls, options: PartsOptions) -> Needs:
        return Needs(0, micro_batches=options.micro_batches, labels=False)
