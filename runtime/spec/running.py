"""pydantic models of how a chain runs: checkpoints, selection, replicas, restarts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dni_runtime.spec.named import Choice, Frozen


class CheckpointSpec(Frozen):
    """When the chain writes consistent checkpoints."""

    every_epochs: Annotated[int, Field(ge=0)] = 1  # 0: only at the end or on request
    every_steps: Annotated[int, Field(ge=1)] | None = None  # after every n-th training batch, too
    keep: Annotated[int, Field(ge=1)] = 2  # number of complete checkpoints to keep


class SelectionSpec(Frozen):
    """Keeping the best checkpoint, and early stopping."""

    # ``loss`` or one of the chain's metrics; None: the first of them, else the loss.
    metric: str | None = None
    # Evaluations in a row without improvement before the run ends; None: any.
    patience: Annotated[int, Field(ge=1)] | None = None
    min_delta: Annotated[float, Field(ge=0)] = 0.0  # a difference up to this is no improvement


class ReplicationSpec(Frozen):
    """How the replicas of a module learn together."""

    # What they do with their weights, or a user's class.
    strategy: Choice = Choice(name="local-sgd")
    # They do it after every n-th training batch of the chain, and before evaluations and
    # checkpoints. None: every 32nd, with ``all-reduce`` as many as there are replicas.
    every: Annotated[int, Field(ge=1)] | None = None
    # Of what they send each other: a name, or a user's class; None: float32.
    compression: Choice | None = None
    # How learning rates grow with the batches in a step, which are ``every``: ``linear`` (Goyal et
    # al. 2017, arXiv:1706.02677, sec. 2.1), or ``sqrt``, their square root (Krizhevsky 2014,
    # arXiv:1404.5997).
    scale_lr: Literal["linear", "sqrt"] | None = None
    # Of torch.distributed; None: links of their own.
    backend: Literal["gloo", "nccl"] | None = None


class RestartSpec(Frozen):
    """Behaviour when a worker dies, or training stalls."""

    policy: Literal["on-failure", "never"] = "on-failure"  # ``never``: end the run
    # Consecutive restarts of one module before the run fails.
    limit: Annotated[int, Field(ge=0)] = 10
    # Seconds before the first restart; the wait doubles with each further one.
    backoff_s: Annotated[float, Field(ge=0)] = 0.5
    backoff_max_s: Annotated[float, Field(ge=0)] = 30.0  # longest wait
    # Seconds of uptime after which a worker's restarts count from 0 again.
    healthy_s: Annotated[float, Field(gt=0)] = 60.0
    # Minimum seconds between snapshots of a module's own state, from which a restarted module
    # resumes; 0: none (it resumes from its newest checkpoint).
    snapshot_s: Annotated[float, Field(ge=0)] = 10.0
    # When training makes no progress and no known wait explains it: ``warn`` in state and events,
    # or also ``restart`` the module named there.
    on_stall: Literal["warn", "restart"] = "warn"
    # Seconds without progress that count as a stall; 20 times a module's longest batch if that is
    # longer.
    stall_s: Annotated[float, Field(gt=0)] = 120.0

    @model_validator(mode="after")
    def _restarts_at_all(self) -> Self:
        if self.on_stall == "restart" and self.policy == "never":
            raise ValueError("'on_stall: restart' excludes 'policy: never': choose one")
        return self
