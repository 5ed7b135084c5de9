"""pydantic models of how a chain runs: checkpoints, selection, replicas, restarts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dni_runtime.spec.named import Choice, Frozen


class CheckpointSpec(Frozen):
    """When the chain writes consistent checkpoints.

    Attributes:
        every_epochs: Checkpoint after every n-th epoch; 0: only at the end or on request.
        every_steps: Checkpoint after every n-th training batch, too.
        keep: Number of complete checkpoints to keep.
    """

    every_epochs: Annotated[int, Field(ge=0)] = 1
    every_steps: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=1)] = 2


class SelectionSpec(Frozen):
    """Keeping the best checkpoint, and early stopping.

    Attributes:
        metric: Figure by which evaluations are compared: ``loss`` or one of the chain's metrics
            (default: the first of them, else the loss).
        patience: Evaluations in a row without improvement before the run ends; None: any number.
        min_delta: A difference up to this is no improvement.
    """

    metric: str | None = None
    patience: Annotated[int, Field(ge=1)] | None = None
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class ReplicationSpec(Frozen):
    """How the replicas of a module learn together.

    Attributes:
        strategy: What they do with their weights, such as ``local-sgd``, or a user's class.
        every: They do it after every n-th training batch of the chain, and before evaluations and
            checkpoints; by default every 32nd, with ``all-reduce`` as many as there are replicas.
        compression: How what they send each other is compressed, such as ``int8``, or a user's
            class; None: float32.
        scale_lr: How learning rates grow with the batches in a step, which are ``every``:
            ``linear`` (Goyal et al. 2017, arXiv:1706.02677, sec. 2.1), or ``sqrt``, their square
            root (Krizhevsky 2014, arXiv:1404.5997).
        backend: The backend of torch.distributed by which replicas exchange what they share; None:
            links of their own.
    """

    strategy: Choice = Choice(name="local-sgd")
    every: Annotated[int, Field(ge=1)] | None = None
    compression: Choice | None = None
    scale_lr: Literal["linear", "sqrt"] | None = None
    backend: Literal["gloo", "nccl", "mpi"] | None = None


class RestartSpec(Frozen):
    """Behaviour when a worker dies, or training stalls.

    Attributes:
        policy: ``on-failure``: restart its module; ``never``: end the run.
        limit: Consecutive restarts of one module before the run fails; ``healthy_s`` resets them.
        backoff_s: Seconds before the first restart; the wait doubles with each further one.
        backoff_max_s: Longest wait in seconds.
        healthy_s: Seconds of uptime after which a worker's restarts count from 0 again.
        snapshot_s: Minimum seconds between snapshots of a module's own state, from which a
            restarted module resumes; 0 for none (it resumes from its newest checkpoint).
        on_stall: Behaviour when training makes no progress and no known wait explains it: ``warn``
            in state and events, or also ``restart`` the module named there.
        stall_s: Seconds without progress that count as a stall; 20 times a module's longest batch
            if that is longer.
    """

    policy: Literal["on-failure", "never"] = "on-failure"
    limit: Annotated[int, Field(ge=0)] = 10
    backoff_s: Annotated[float, Field(ge=0)] = 0.5
    backoff_max_s: Annotated[float, Field(ge=0)] = 30.0
    healthy_s: Annotated[float, Field(gt=0)] = 60.0
    snapshot_s: Annotated[float, Field(ge=0)] = 10.0
    on_stall: Literal["warn", "restart"] = "warn"
    stall_s: Annotated[float, Field(gt=0)] = 120.0

    @model_validator(mode="after")
    def _restarts_at_all(self) -> Self:
        if self.on_stall == "restart" and self.policy == "never":
            raise ValueError("'on_stall: restart' excludes 'policy: never': choose one")
        return self
