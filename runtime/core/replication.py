"""How the replicas of a module learn together: strategies, and what they share.

At each SYNC marker every replica gives its tensors, as one row, and gets the mean of all, weighted
by the batches that each one was trained on. A strategy says which tensors all of them go on with. A
new one is one class and one line here, or a user's import path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor, nn

from dni_runtime.core.choices import Location, find_class, parse_options
from dni_runtime.spec import Choice
from dni_runtime.spec.named import Frozen

if TYPE_CHECKING:
    from dni_runtime.core.step import ModuleStep


class Strategy(nn.Module):
    """From the mean of the replicas' trained parameters to those that all of them go on with.

    It must depend on its arguments and buffers alone, so that all replicas find the same. Buffers
    are part of a checkpoint.

    Args:
        options: Its options.
        start_P: The parameters, as one row, before the first batch.
    """

    class Options(Frozen):
        """The strategy's keywords in ``chain.yaml``."""

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__()

    def agree(self, mean_P: Tensor) -> Tensor:
        """Return the parameters that all replicas go on with.

        Args:
            mean_P: The mean of theirs.
        """
        raise NotImplementedError


class LocalSgd(Strategy):
    """All go on with the mean (Stich 2018, arXiv:1805.09767, algorithm 1).

    Its weights are those of federated averaging (McMahan et al. 2016, arXiv:1602.05629).
    """

    def agree(self, mean_P: Tensor) -> Tensor:
        return mean_P


class DiLoCo(Strategy):
    """The mean's distance is the gradient of an outer optimizer, SGD with Nesterov momentum.

    Douillard et al. 2023, arXiv:2311.08105, algorithm 1; the defaults are the paper's.
    """

    class Options(Frozen):
        """The outer optimizer's learning rate and momentum."""

        lr: float = Field(default=0.7, gt=0)
        momentum: float = Field(default=0.9, ge=0, lt=1)

    before_P: Tensor
    velocity_P: Tensor

    def __init__(self, options: Frozen, start_P: Tensor) -> None:
        super().__init__(options, start_P)
        assert isinstance(options, DiLoCo.Options)
        self._options = options
        self.register_buffer("before_P", start_P.clone())
        self.register_buffer("velocity_P", torch.zeros_like(start_P))

    def agree(self, mean_P: Tensor) -> Tensor:
        outer_P, momentum = self.before_P - mean_P, self._options.momentum
        self.velocity_P.mul_(momentum).add_(outer_P)
        self.before_P.sub_(outer_P + momentum * self.velocity_P, alpha=self._options.lr)
        return self.before_P


STRATEGIES: dict[str, type[Strategy]] = {"local-sgd": LocalSgd, "diloco": DiLoCo}


def check_strategy(choice: Choice, location: Location) -> None:
    """Check a strategy's name and options.

    Raises:
        SpecError: One is unknown, or a value is not allowed.
    """
    cls = find_class(choice.name, "strategy", STRATEGIES, Strategy, location)
    parse_options(cls.Options, choice, location)


def mean_of(rows: Sequence[Tensor]) -> Tensor:
    """Return the mean of replicas' rows, weighted by their last number, the batches of each."""
    weights = torch.stack([row[-1] for row in rows])
    weights = weights / weights.sum() if weights.any() else torch.full_like(weights, 1 / len(rows))
    return (torch.stack(tuple(rows)) * weights[:, None]).sum(0)


class Shared:
    """What the replicas of a module share: one row of numbers, trained parameters first.

    That is all floating-point state of the layers, the gradient interface and the weights' average;
    the state of the optimizers is each replica's own. The last number is that of the batches that
    the replica was trained on since all agreed.

    Args:
        step: The module.

    Attributes:
        size: Numbers in the row.
        agreed_at: Batches of the replica when all agreed last.
        strategy: The strategy of its parameters.
    """

    def __init__(self, step: ModuleStep) -> None:
        choice, self._step = step.spec.strategy, step
        assert choice is not None
        modules = [one for one in (step.layers, step.interface) if one is not None]
        learnt = [p for one in modules for p in one.parameters() if p.requires_grad]
        average = step.optimization.average
        rest = [*modules] if average is None else [*modules, average]
        known = {id(p) for p in learnt}
        kept = [p for p in _tensors(rest) if id(p) not in known and p.is_floating_point()]
        self._learnt, self._tensors = sum(p.numel() for p in learnt), [*learnt, *kept]
        self.size = sum(p.numel() for p in self._tensors) + 1
        self.agreed_at = 0
        self._choice = choice
        self.begin()

    def begin(self) -> None:
        """Begin with the module's weights as they are now."""
        at = ("replication", "strategy")
        cls = find_class(self._choice.name, "strategy", STRATEGIES, Strategy, at)
        options = parse_options(cls.Options, self._choice, at)
        self.strategy: Strategy = cls(options, self.row()[: self._learnt])

    def row(self) -> Tensor:
        """Return a copy of the tensors, float32 on the CPU, ``[size]``."""
        rows = [one.detach().to("cpu", torch.float32).flatten() for one in self._tensors]
        return torch.cat([*rows, torch.tensor([float(self._step.batches - self.agreed_at)])])

    @torch.no_grad()
    def agree(self, mean: Tensor) -> None:
        """Take what the strategy makes of the mean of all replicas' rows."""
        taken = torch.cat([self.strategy.agree(mean[: self._learnt]), mean[self._learnt : -1]])
        parts = torch.split(taken, [one.numel() for one in self._tensors])
        for one, part in zip(self._tensors, parts, strict=True):
            one.copy_(part.view_as(one))
        self.agreed_at = self._step.batches
        self._step.optimization.version += 1


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    every = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    return list({id(one): one for one in every}.values())
