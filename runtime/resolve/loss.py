"""The chain's loss, made and tried on predictions and labels before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.training import empty_batch
from dni_runtime.errors import SpecError
from dni_runtime.resolve.shapes import BATCH
from dni_runtime.spec import ChainSpec, Choice, DataInfo, TensorSpec, import_paths


def check_loss(
    chain: ChainSpec, choice: Choice, prediction: TensorSpec, info: DataInfo
) -> ChainLoss:
    """Make the loss, which may be a sum of several, and try it on predictions and labels."""
    at = ("loss",) if chain.losses is None else ("losses",)
    loss = ChainLoss(choice, prediction, info.label, at)
    before = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    y_BY = empty_batch(info.label, BATCH, "cpu")
    hint = f"the tail's output is {prediction}, labels are {info.label}"
    try:
        p_BP = empty_batch(prediction, BATCH, "cpu").requires_grad_()
        value: object = loss(p_BP, y_BY)
        if not isinstance(value, Tensor) or value.dim() != 0:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"it returns {what}, not a scalar tensor")
        if not value.requires_grad:
            raise TypeError("its value has no gradient, so nothing would be trained")
        value.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
        custom = any(True for _ in import_paths([chain.loss, chain.losses]))
        adds_up = custom and _adds_up(loss, p_BP, y_BY)
        broadcasts = (
            custom and prediction.shape != info.label.shape and _broadcasts(loss, p_BP, y_BY)
        )
        new = [ChainLoss(choice, prediction, info.label, at) for _ in range(2 * custom)]
        remembers = custom and _remembers(loss, new, p_BP, y_BY)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(
            f"{choice.name} does not fit the chain's output: {reason}",
            location=at,
            hint=hint,
        ) from None
    trained = [name for name, p in loss.named_parameters() if p.requires_grad]
    others = [str([*leaf.shape]) for leaf in _leaves(value) if leaf is not p_BP]  # in a list, say
    buffers = dict(loss.named_buffers())
    changed = [name for name, buffer in before.items() if not torch.equal(buffer, buffers[name])]
    for names, wrong in (
        (trained, "has a parameter {!r}, which would not be trained"),
        (others, "has a parameter of the sizes {}, which would not be trained"),
        (changed, "changes its buffer {!r}, which is in no checkpoint"),
    ):
        if names:
            raise SpecError(
                "the loss " + wrong.format(names[0].rpartition("function.")[2]),
                location=at,
                hint="move it into the last module, whose outputs may hold what the loss needs"
                + ("" if names is changed else "; or set requires_grad_(False), if it is to stay"),
            )
    if remembers:
        raise SpecError(
            f"{choice.name} keeps numbers from batch to batch, which are in no checkpoint",
            location=at,
            hint="move it into the last module, whose outputs may hold what the loss needs",
        )
    if adds_up:
        raise SpecError(
            f"{choice.name} is a sum over the batch: for twice the samples it is twice as high",
            location=at,
            hint="divide by the number of samples; gradients between modules are per sample",
        )
    if broadcasts:
        raise SpecError(
            f"{choice.name} compares each prediction with each label of the batch: which label "
            "belongs to which prediction makes no difference",
            location=at,
            hint=f"{hint}: in the loss, give both one shape",
        )
    if loss.is_cross_entropy and info.classes is not None and (loss.scores or 0) < info.classes:
        raise SpecError(
            f"the tail's output is {prediction}, but the data has {info.classes} classes",
            location=("modules", len(chain.modules) - 1, "layers"),
            hint=f"end with a layer of {info.classes} outputs",
        )
    return loss


def _leaves(value: Tensor) -> list[Tensor]:
    """Return the tensors at which the graph of a value begins."""
    nodes, seen = [value.grad_fn], set[object]()
    leaves = []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                leaves.append(node.variable)
    return leaves


def _adds_up(loss: ChainLoss, p_BP: Tensor, y_BY: Tensor) -> bool:
    """Whether a loss is a sum over the batch instead of a mean."""
    p_BP = torch.rand(p_BP.shape, generator=torch.Generator().manual_seed(0)).to(p_BP.dtype)
    once = float(loss(p_BP, y_BY).detach())
    twice = float(loss(torch.cat([p_BP, p_BP]), torch.cat([y_BY, y_BY])).detach())
    return math.isclose(twice, 2 * once, rel_tol=1e-4) and abs(once) > 1e-6


def _remembers(loss: ChainLoss, new: Sequence[ChainLoss], p_BP: Tensor, y_BY: Tensor) -> bool:
    """Whether a loss that has seen batches gives another value than new ones."""
    p_BP = torch.rand(p_BP.shape, generator=torch.Generator().manual_seed(1)).to(p_BP.dtype)
    values = []
    with torch.random.fork_rng(devices=[]):
        for one in (loss, *new):
            torch.manual_seed(0)
            values.append(one(p_BP, y_BY).detach())
    alike = [torch.equal(value.nan_to_num(), values[-1].nan_to_num()) for value in values]
    return alike[1] and not alike[0]


def _broadcasts(loss: ChainLoss, p_BP: Tensor, y_BY: Tensor) -> bool:
    """Whether a loss of numbers looks at labels, but not at the order that they come in."""
    if not y_BY.is_floating_point():
        return False
    p_BP, y_BY = (
        torch.rand(batch.shape, generator=torch.Generator().manual_seed(seed)).to(batch.dtype)
        for seed, batch in enumerate((p_BP, y_BY))
    )
    turned, moved = (float(loss(p_BP, y)) for y in (y_BY.flip(0), y_BY + 1))
    once = float(loss(p_BP, y_BY))
    return math.isclose(once, turned, rel_tol=1e-5) and not math.isclose(once, moved, rel_tol=1e-5)
