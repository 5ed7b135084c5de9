"""Replicas that share in one process: the reference of what workers do over links."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dni_runtime.core.replication import SharedWeights, Sync
from dni_runtime.core.step import ModuleStep
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import DataInfo, WorkerSpec, parse_chain
from dni_runtime.spec.replicas import workers_of
from tests.specs import float32, int64

INFO = DataInfo(sample=float32(8), label=int64(), classes=4)
CHAIN = """\
name: net
replication: {strategy: %s}
defaults: {interface: %s, %s}
modules:
- {name: a, layers: [{Linear: {in_features: 8, out_features: 8}}]}
- {name: b, replicas: %d, layers: [{Linear: {in_features: 8, out_features: 6}}%s]}
- {name: c, layers: [{Linear: {in_features: 6, out_features: 4}}]}
"""


def replicas(
    strategy: str,
    count: int = 2,
    *,
    interface: str = "delayed",
    training: str = "optimizer: {SGD: {lr: 0.1}}",
    more: str = "",
) -> list[WorkerSpec]:
    """Return the specs of a linear module's replicas, by default trained by true gradients."""
    chain = parse_chain(CHAIN % (strategy, interface, training, count, more))
    return [one for one in workers_of(worker_specs(chain, INFO)) if one.module[0] == "b"]


def learn(step: ModuleStep, id: int, x_BX: Tensor, target_BH: Tensor) -> None:
    """Train on a batch, with half the squared distance to the target as each sample's loss."""
    h_BH = step.forward(id, x_BX)
    step.update(torch.zeros(len(x_BX), dtype=torch.int64, device=step.device))
    step.late_gradient(id, h_BH - target_BH)


def shared(step: ModuleStep) -> SharedWeights:
    """Return what a replica shares."""
    assert step.shared is not None
    return step.shared


def share(steps: Sequence[ModuleStep], id: int = 1, *, full: bool = False) -> int:
    """Let replicas share, the first one first; return the number of bytes that they send."""
    sync, sent = Sync(id, full), 0
    first, others = steps[0], steps[1:]
    offers = {}
    for one in others:
        words = shared(one).offer(sync).words()
        offers[one] = shared(first).read(words)
        sent += words.nbytes
    for one, answer in shared(first).agree(sync, offers).items():
        words = answer.words()
        shared(one).take(shared(one).read(words))
        sent += words.nbytes
    return sent
