"""The strategies that a chain may name, by which the replicas of a module learn together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dni_runtime.core.optimization import Optimization
from dni_runtime.core.replication.base import Strategy, Sync
from dni_runtime.core.training import real, split_like
from dni_runtime.spec import Choice, WorkerSpec
from dni_runtime.spec.choices import Location, find_class, parse_options
from dni_runtime.spec.named import Frozen


class LocalSgd(Strategy):
    """All go on with the mean, weighted by samples (Stich 2018, arXiv:1805.09767, algorithm 1)."""


class AllReduce(Strategy):
    """One step with the mean of all gradients: that of one process with a large batch.

    Synchronous data parallelism, as in Goyal et al. 2017, arXiv:1706.02677, sec. 2. Each batch
    since the last point counts once, as with ``accumulate``. The first replica's optimizer makes
    the step, and all take its weights: one that has missed some is right again. The gradient
    interface, which learns from each batch by itself, and statistics are averaged.
    """

    per_step = True
    dense = True

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        self._optimization = optimization
        self.gradients = sum(real(p.detach()).numel() for p in optimization.parameters)
        self._batches, self._without = 0, [True] * len(optimization.parameters)
        self._decides = spec.backend is None  # in a process group each makes the step
        optimization.holds = True

    def weight(self, samples: int) -> float:
        return float(self._optimization.gathered)

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor | None:
        batches = self._optimization.gathered
        if not batches:
            return None
        self._batches = batches
        self._without = [p.grad is None for p in self._optimization.parameters]
        gradients = [
            real(torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(own_P)
            for p in self._optimization.parameters
        ]
        self._optimization.clear()
        return torch.cat([*(gradient / batches for gradient in gradients), own_P[self.gradients :]])

    def agree(self, mean_P: Tensor) -> Tensor:
        parameters = self._optimization.parameters
        gradients = split_like(mean_P, parameters)
        for p, g, without in zip(parameters, gradients, self._without, strict=True):
            untouched = without and self._decides and not g.any()
            p.grad = None if untouched else g.clone()  # as in one process
        self._optimization.step()
        weights = [real(p.detach()).flatten().to(mean_P) for p in parameters]
        return torch.cat([*weights, mean_P[self.gradients :]])

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self._optimization.count(self._batches)
        self._batches = 0
        return agreed_P

    def base(self, agreed_P: Tensor) -> Tensor:
        return torch.cat([agreed_P.new_zeros(self.gradients), agreed_P[self.gradients :]])


class DiLoCo(Strategy):
    """The mean's distance is the gradient of an outer optimizer, SGD with Nesterov momentum.

    Douillard et al. 2023, arXiv:2311.08105, algorithm 1; the defaults are the paper's. The first
    replica has the outer optimizer.
    """

    class Options(Frozen):
        """The outer optimizer's learning rate and momentum."""

        lr: float = Field(default=0.7, gt=0)
        momentum: float = Field(default=0.9, ge=0, lt=1)

    before_P: Tensor
    velocity_P: Tensor

    def __init__(self, options: Any, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        self.register_buffer("before_P", start_P.clone())
        self.register_buffer("velocity_P", torch.zeros_like(start_P))

    def agree(self, mean_P: Tensor) -> Tensor:
        outer_P, momentum = self.before_P - mean_P, self.options.momentum
        self.velocity_P.mul_(momentum).add_(outer_P)
        self.before_P.sub_(outer_P + momentum * self.velocity_P, alpha=self.options.lr)
        return self.before_P.clone()


class Federated(Strategy):
    """All go on with the mean of those that are drawn for the round, weighted by samples.

    FedAvg (McMahan et al. 2016, arXiv:1602.05629, algorithm 1). What the others have learnt in the
    round is dropped; here they pass on their batches meanwhile, so they train, too.
    """

    class Options(Frozen):
        """The share of the replicas that take part in a round: the paper's C."""

        share: float = Field(default=0.5, gt=0, le=1)

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        self._spec = spec

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor | None:
        spec = self._spec
        count = max(round(self.options.share * spec.replicas), 1)
        draw = random.Random(f"{spec.seed} {spec.index} {sync.id}")
        drawn = draw.sample(range(1, spec.replicas + 1), count)
        return own_P if spec.replica in drawn else None


class Dynamic(Strategy):
    """All go on with the mean after one has drifted from their last common weights.

    Kamp et al. 2018, arXiv:1807.03210, algorithm 1, where the local condition is that the squared
    distance of the replica's parameters to the reference exceeds a threshold. Here the whole set is
    averaged, at the next point: until then only a few bytes are sent. Balancing within a part of
    the replicas, which takes more messages at each point, is left out.
    """

    class Options(Frozen):
        """The squared distance from the last common weights that asks for a mean."""

        threshold: float = Field(default=1.0, gt=0)

    reference_P: Tensor

    def __init__(self, options: Any, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        self.register_buffer("reference_P", start_P.clone())

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor | None:
        if self.asked or sync.full:
            return own_P
        self.asks = float((own_P - self.reference_P).square().sum()) > self.options.threshold
        return None

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self.reference_P.copy_(agreed_P)
        self.asks = False
        return agreed_P


class Admm(Strategy):
    """Consensus by the alternating direction method of multipliers.

    Boyd et al. 2011, doi:10.1561/2200000016, sec. 7.1, in the scaled form of sec. 3.1.1::

        x_i = argmin f_i(x) + rho/2 |x - z + u_i|^2,   z = mean(x_i + u_i),   u_i = u_i + x_i - z

    The minimization is inexact: the steps of the module's optimizer between two points, with the
    gradient of the second term added, begin at z. The gradient interface's parameters are averaged
    in the same way, without that term. Every replica counts the same.
    """

    dense = True
    feedback = False  # the dual variables add up what is missing in z

    class Options(Frozen):
        """The penalty parameter."""

        rho: float = Field(default=0.01, gt=0)

    consensus_P: Tensor
    dual_P: Tensor

    def __init__(self, options: Any, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        self.register_buffer("consensus_P", start_P.clone())
        self.register_buffer("dual_P", torch.zeros_like(start_P))

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        self._own = sum(real(p.detach()).numel() for p in optimization.parameters)
        optimization.before_step = self._pull

    def weight(self, samples: int) -> float:
        return 1.0

    def _pull(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of the second term, rho (x - z + u)."""
        toward_P = self.consensus_P - self.dual_P
        for p, toward in zip(parameters, split_like(toward_P, parameters), strict=True):
            pull = (p.detach() - toward).mul_(self.options.rho)
            p.grad = pull if p.grad is None else p.grad + pull

    def joined(self, own_P: Tensor) -> None:
        self.dual_P.zero_()

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor:
        return own_P + self.dual_P

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self.consensus_P.copy_(agreed_P)
        self.dual_P[: self._own] += (own_P - agreed_P)[: self._own]
        return agreed_P


class Codistillation(Strategy):
    """Replicas keep their own weights, and each a stale copy of another one's.

    Anil et al. 2018, arXiv:1804.03235, algorithm 1. A module predicts its activation h, so the term
    that is added to its loss for a sample is::

        weight mean((h - h')^2)

    where h' is the other one's activation for the same input, by its weights at the last point. The
    paper's term has the mean of all others; here it is one of them, another one after each point,
    so that a batch costs one more forward pass whatever their number. Statistics are each replica's
    own, too.
    """

    common: ClassVar[bool] = False

    class Options(Frozen):
        """The weight of the term, and the points before it is added."""

        weight: float = Field(default=1.0, gt=0)
        burn_in: int = Field(default=1, ge=1)

    other_P: Tensor
    points: Tensor

    def __init__(self, options: Any, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        self.register_buffer("other_P", start_P.clone())
        self.register_buffer("points", torch.zeros((), dtype=torch.int64))

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        for p in optimization.parameters[:1]:
            self.other_P = self.other_P.to(p.device)

    def weight(self, samples: int) -> float:
        return 1.0

    def pull(self, h_BH: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor | None:
        if self.points < self.options.burn_in:
            return None
        factor: float = 2 * self.options.weight / h_BH[0].numel()
        return (h_BH - activation(self.other_P)) * factor

    def other(self, replicas: int) -> int:
        return 1 + int(self.points) % (replicas - 1)

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        self.other_P.copy_(agreed_P)
        self.points += 1
        return own_P


class ParameterServer(Strategy):
    """Each pushes how far it has come, the first one adds that to its weights and sends them back.

    Downpour SGD (Dean et al. 2012, NIPS 25, sec. 4.1). What is pushed is the sum of a replica's own
    steps, instead of gradients for an optimizer of the server; the server is a replica, too, and
    counts as the others do. A replica that has gone on meanwhile keeps what it has learnt since its
    push. Statistics move towards the pushed ones, by one part in N. Only at a full point all wait.

    With a ``scale`` of 1/N, the default, the server moves by the mean of what all have learnt, as
    in asynchronous local SGD (Liu et al. 2024, arXiv:2401.09135, sec. 3). With 1 it moves by their
    sum, as Downpour does: that goes too far unless learning rates are lower.
    """

    class Options(Frozen):
        """What a replica's progress is multiplied by; by default one divided by their number."""

        scale: float | None = Field(default=None, gt=0, le=1)

    waits: ClassVar[bool] = False

    pushed_P: Tensor
    applied_N: Tensor

    def __init__(self, options: Any, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        self.register_buffer("pushed_P", start_P.clone())

    def attach(self, spec: WorkerSpec, optimization: Optimization) -> None:
        """Make room for the other replicas.

        ``applied_N`` has the point of the newest push of each that is in the weights: a restarted
        server may get one twice.
        """
        self.register_buffer("applied_N", torch.zeros(spec.replicas - 1, dtype=torch.int64))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of as many replicas as there are now: the number may have changed."""
        applied_N = torch.zeros_like(self.applied_N)
        kept = state_dict["applied_N"][: len(applied_N)]
        applied_N[: len(kept)] = kept
        return super().load_state_dict({**state_dict, "applied_N": applied_N}, strict, assign)

    def joined(self, own_P: Tensor) -> None:
        self.pushed_P = own_P.clone()

    def offer(self, own_P: Tensor, sync: Sync) -> Tensor:
        """Hand over the progress since the last push."""
        progress_P = own_P - self.pushed_P
        self.pushed_P = own_P.clone()
        return progress_P

    def with_own(self, row: Tensor, learnt: int, replicas: int) -> Tensor:
        """Return the server's row with its own progress counted as that of the others.

        The row begins with ``learnt`` trained parameters; the module has ``replicas``.
        """
        self.pushed_P = torch.lerp(self.pushed_P, row[:learnt], self._factor(replicas))
        return torch.cat([self.pushed_P, row[learnt:]])

    def with_push(self, row: Tensor, push: Tensor, learnt: int, replicas: int) -> Tensor:
        """Return the server's row after a push; both begin with ``learnt`` trained parameters."""
        moved_P, kept = push[:learnt] * self._factor(replicas), row[learnt:]
        self.pushed_P = self.pushed_P + moved_P
        near = kept + (push[learnt:] - kept) / replicas
        near = torch.where(push[learnt:] == kept, kept, near)  # infinities, as masks have
        return torch.cat([row[:learnt] + moved_P, near])

    def _factor(self, replicas: int) -> float:
        return float(self.options.scale or 1 / replicas)

    def take(self, own_P: Tensor, agreed_P: Tensor) -> Tensor:
        """Return the server's parameters with the progress since the push."""
        since_P = own_P - self.pushed_P
        self.pushed_P = agreed_P.clone()
        return agreed_P + since_P


STRATEGIES: dict[str, type[Strategy]] = {
    "local-sgd": LocalSgd,
    "all-reduce": AllReduce,
    "diloco": DiLoCo,
    "federated": Federated,
    "dynamic": Dynamic,
    "admm": Admm,
    "codistillation": Codistillation,
    "parameter-server": ParameterServer,
}

_LOCATION: Location = ("replication", "strategy")


def find_strategy(choice: Choice) -> type[Strategy]:
    return find_class(choice.name, "strategy", STRATEGIES, Strategy, _LOCATION)


def build_strategy(choice: Choice, start_P: Tensor) -> Strategy:
    cls = find_strategy(choice)
    return cls(parse_options(cls.Options, choice, _LOCATION), start_P)
