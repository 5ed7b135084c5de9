"""Whether the parts of a network compute what it computes.

The network itself, in plain torch, and its parts, which hand values and gradients on as workers do,
take two training steps and run in eval mode. The parts run one after another from the network's
seeds, so that dropout draws the same numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dni_runtime.core.backward import changed_in_place
from dni_runtime.data.splits import sample_of
from dni_runtime.errors import SpecError
from dni_runtime.network.piece import Piece
from dni_runtime.network.source import (
    WRAPPED,
    NetworkSpec,
    NetworkWrapper,
    built_once,
    first_line,
    write_tensor,
)
from dni_runtime.network.tracing import trace
from dni_runtime.split.part import NetworkPart

_BATCHES = (*range(1, 65), 128, 256)
"""Sizes of a batch for which the conditions of a trace are tried."""
_LENGTHS = 512
"""The same of its length: all of few, some of many."""
_PASSES = 50
"""Forward passes of a network that draws random numbers of Python or NumPy."""
_STEP = 0.01
"""Length of a step, compared with the weights."""
_WITHIN = 1e-4
"""Differences that are rounding, compared with the largest number of a tensor."""
_NOISE = 1e-6
"""The same where a tensor is zero but for rounding: the mean of a norm, beside its variance."""

_HINT = (
    "only operations on tensors are traced: no hooks, no draws of Python or numpy, no numbers that "
    "change between calls; random numbers that the constructor draws belong in 'register_buffer'. "
    "If a view is changed in place after a cut: cut elsewhere with --at"
)


def check_parts(
    spec: NetworkSpec, network: nn.Module, batch: Sequence[Tensor], parts: Sequence[NetworkPart]
) -> None:
    """Train the network whole and in parts, and compare outputs, gradients, buffers and names.

    The network's tensors stay what they are.
    """
    torch.manual_seed(2)  # a worker builds the network by itself, and loads its tensors
    with built_once():
        pieces = {part.name: _piece(spec, network, part) for part in parts}
    expected = set(network.state_dict())
    names = set[str]().union(*(piece.state_dict() for piece in pieces.values()))
    names = {name.removeprefix(WRAPPED) for name in names}
    if expected != names:
        verb, some = (
            ("lack", expected - names)
            if expected - names
            else ("have, beside it,", names - expected)
        )
        text = ", ".join(map(repr, sorted(some)[:3])) + (" …" if len(some) > 3 else "")
        raise SpecError(f"the parts of {spec.target} {verb} {text} of its state dict")
    whole = NetworkWrapper(network, spec)
    _check_chance(spec, whole, batch)
    first = {what: tensor.clone() for what, [(_, tensor)] in _buffers({"": whole}).items()}
    varies = [bool(one.varying) for one in spec.example]
    half = max([one.shape[0] for one in spec.example if one.varying], default=0) // 2 | 1
    shorter = _as_long(batch, varies, half)
    # In the second training step, what the first one has changed is used.
    passes = [(True, batch), (True, shorter), (False, batch)]
    others = _doubtful(spec, batch, varies, max(part.rows for part in parts))
    with unchanged(network):
        for step, (training, xs) in enumerate([*passes, *others]):
            for module in (whole, *pieces.values()):
                module.train(training).zero_grad(set_to_none=True)
            with torch.set_grad_enabled(training):
                torch.manual_seed(step)
                try:
                    y = whole(*(x.clone() for x in xs))
                except Exception:
                    if step < len(passes):
                        raise
                    if training:  # statistics may have changed
                        break
                    continue  # it takes no such batch
                if y.requires_grad:
                    y.backward(_gradient(y))
                torch.manual_seed(step)
                when = f"in training step {step + 1}" if training else "in eval mode after training"
                if step >= len(passes):
                    sizes = " and ".join(write_tensor(sample_of(x)) for x in xs)
                    when += f", for {len(xs[0])} samples of {sizes}"
                try:
                    output = _run(parts, pieces, [x.clone() for x in xs])
                except (IndexError, RuntimeError, ValueError) as error:
                    raise SpecError(
                        f"the parts of {spec.target} do not compute what it computes: they fail "
                        f"{when}: {first_line(error)}",
                        hint=_HINT,
                    ) from error
            _compare(spec, when, _left({"": whole}, y.detach()), _left(pieces, output), first)
            learnt = [p for p in network.parameters() if p.grad is not None]
            rate = _STEP * _norm(learnt) / _norm([p.grad for p in learnt]) if learnt else 0.0
            for module in (whole, *pieces.values()):
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.data.add_(parameter.grad, alpha=-rate)


def _as_long(batch: Sequence[Tensor], varies: Sequence[bool], length: int) -> list[Tensor]:
    """Return a batch of another length; ``varies`` says which of its inputs have one."""
    pairs = zip(batch, varies, strict=True)
    return [x[:, torch.arange(length) % x.shape[1]] if own else x for x, own in pairs]


def _doubtful(
    spec: NetworkSpec, batch: Sequence[Tensor], varies: Sequence[bool], least: int
) -> Iterator[tuple[bool, list[Tensor]]]:
    """Yield passes with batches for which the trace may not hold, by whether they train.

    It has one path through ``forward``, and through operations that look at sizes. Those in eval
    mode first: others need ``least`` samples, and may fail.
    """
    program, rows = trace(spec), len(batch[0])
    sizes, lengths = {1}, {1} if any(varies) else set[int]()  # tracing takes no size for 1
    for one in program.traces:
        sizes |= one.doubts(one.batch, _BATCHES)
        if any(varies):
            longest = spec.example[varies.index(True)].shape[0]
            step = -(-longest // _LENGTHS)
            values = sorted({*range(1, min(_LENGTHS, longest)), *range(longest, 1, -step)})
            lengths |= one.doubts(one.lengths, values)
    orders = [torch.arange(size) % rows for size in sorted(sizes)]
    others = [[x[order] for x in batch] for order in orders]
    others += [_as_long(batch, varies, length) for length in sorted(lengths)]
    yield from ((False, xs) for xs in others)
    yield from ((True, xs) for xs in others if len(xs[0]) >= max(least, 2))


def _check_chance(spec: NetworkSpec, whole: NetworkWrapper, batch: Sequence[Tensor]) -> None:
    """Refuse a network whose path depends on random numbers of Python or NumPy.

    A trace has one path, which both training steps may happen to take, too.
    """
    first, before = None, _generators()
    for number in range(_PASSES):
        torch.manual_seed(0)
        with unchanged(whole.network), torch.no_grad():
            y = whole.train()(*(x.clone() for x in batch))
        first = y if first is None else first
        if number == 0 and _generators() == before:
            return
        if not torch.allclose(y, first, rtol=_WITHIN, equal_nan=True):
            raise SpecError(
                f"'forward' of {spec.target} depends on random numbers of Python or NumPy",
                hint="a traced program takes one path: draw numbers by torch, and multiply by them",
            )


def _generators() -> object:
    """Return the states of Python's and NumPy's generators of random numbers."""
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], bytes(state["key"])


@contextlib.contextmanager
def unchanged(network: nn.Module) -> Iterator[None]:
    """Give a network the tensors back, at the end of the context, that it has now."""
    kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (tensors, name, tensor, tensor.detach().clone())
        for module in network.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        network.train().zero_grad(set_to_none=True)
        for tensors, name, tensor, value in kept:
            tensor.data = value
            tensors[name] = tensor  # 'forward' may have put another one there


def _piece(spec: NetworkSpec, network: nn.Module, part: NetworkPart) -> Piece:
    """Build a part as its worker does, with the network's weights."""
    piece = Piece(spec.to_yaml(), part.after, part.until, part.lends, part.borrows, rows=part.rows)
    state, target = network.state_dict(), piece.state_dict()
    for name in target:
        target[name] = state.get(name.removeprefix(WRAPPED), target[name])
    piece.load_state_dict(target)
    for name, parameter in piece.named_parameters(remove_duplicate=False):
        if name.startswith(WRAPPED):
            parameter.requires_grad_(
                network.get_parameter(name.removeprefix(WRAPPED)).requires_grad
            )
    return piece


def _run(parts: Sequence[NetworkPart], pieces: Mapping[str, Piece], xs: list[Tensor]) -> Tensor:
    """Run the parts, forward and backward; gradients come to copies of their outputs."""
    before, copies = "data", {"data": xs}
    made: dict[str, list[Tensor]] = {}
    for part in parts:
        places = [source.partition(".") for source in part.inputs or ()]
        inputs = [copies[name][int(which or 0)] for name, _, which in places]
        outputs = pieces[part.name](*(inputs or copies[before]))
        before, made[part.name] = (
            part.name,
            list(outputs if isinstance(outputs, tuple) else [outputs]),
        )
        copies[before] = [
            output.detach().requires_grad_(output.requires_grad) for output in made[before]
        ]
    (y,) = copies[before]
    y.grad = _gradient(y)
    for name in reversed(made):
        pairs = [
            (output, copy.grad)
            for output, copy in zip(made[name], copies[name], strict=True)
            if output.requires_grad and copy.grad is not None
        ]
        if pairs:
            try:
                torch.autograd.backward([output for output, _ in pairs], [g for _, g in pairs])
            except RuntimeError as error:
                raise changed_in_place(f"module {name!r}", error) or error from None
    return y.detach()


def _gradient(y: Tensor) -> Tensor:
    """Return a gradient for an output, other than those that a normalisation takes out."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)


def _norm(tensors: Sequence[Tensor | None]) -> float:
    norms = [_real(tensor.detach()).norm() for tensor in tensors if tensor is not None]
    return float(torch.stack(norms).norm()) or 1.0


def _compare(
    spec: NetworkSpec,
    when: str,
    whole: Mapping[str, list[tuple[str, Tensor]]],
    parts: Mapping[str, list[tuple[str, Tensor]]],
    first: Mapping[str, Tensor],
) -> None:
    """Compare what a pass has left in the network and in its parts; ``first``: buffers before."""
    sizes: dict[str, float] = {}
    for what, [(_, tensor)] in whole.items():
        still = what in first and torch.equal(first[what], tensor)
        if not _counts(tensor) and not still:  # else it may be a mask, or a number of calls
            sizes[_kind(what)] = max(_largest(tensor), sizes.get(_kind(what), 0.0))
    for what in {**whole, **parts}:
        noise = _NOISE * sizes.get(_kind(what), 0.0)
        if (what in whole) != (what in parts):  # no gradient is not one of zeros: nothing decays
            where = "the network" if what in whole else "its parts"
            raise SpecError(
                f"the parts of {spec.target} do not compute what it computes: {what} is only in "
                f"{where} {when}",
                hint=_HINT,
            )
        ((_, a),) = whole[what]
        for name, b in parts[what]:
            if alike(b, a, (a.dtype,), noise):
                continue
            how = f"has shape {tuple(b.shape)} instead of {tuple(a.shape)}"
            if a.shape == b.shape:
                how = f"differs by {_largest(_real(b) - _real(a)):.1e} of {_largest(a):.1e}"
            where = f"of {name!r} " if name else ""
            raise SpecError(
                f"the parts of {spec.target} do not compute what it computes: {what} {where}{how} "
                f"{when}",
                hint=_HINT,
            )


def alike(a: Tensor, b: Tensor, types: Iterable[torch.dtype], noise: float = 0.0) -> bool:
    """Whether two tensors differ by rounding alone, of computations in numbers of these types."""
    eps = (torch.finfo(kind).eps for kind in types if kind.is_floating_point or kind.is_complex)
    within = max([_WITHIN, *(8 * one for one in eps)])
    return a.shape == b.shape and torch.allclose(
        _real(a), _real(b), rtol=0.0, atol=within * _largest(b) + noise, equal_nan=True
    )


def _kind(what: str) -> str:
    """Return what tensors are alike in size: all gradients; the statistics of one module."""
    return what.rpartition(".")[0] if what.startswith("the buffer") else what.partition("'")[0]


def _largest(tensor: Tensor) -> float:
    return float(_real(tensor).abs().nan_to_num(posinf=0.0).max()) if tensor.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    """Return numbers in double precision; a complex one is two."""
    both = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return both.double()


def _counts(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _left(modules: Mapping[str, nn.Module], y: Tensor) -> dict[str, list[tuple[str, Tensor]]]:
    """Return what a pass has left, each by what it is and with the part that has it."""
    tensors = {"the output": [("", y)]}
    for part, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                what = f"the gradient of {name.removeprefix(WRAPPED)!r}"
                tensors.setdefault(what, []).append((part, parameter.grad.to_dense()))
    return tensors | _buffers(modules)


def _buffers(modules: Mapping[str, nn.Module]) -> dict[str, list[tuple[str, Tensor]]]:
    tensors: dict[str, list[tuple[str, Tensor]]] = {}
    for part, module in modules.items():
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if name.startswith(WRAPPED):  # not a constant of 'forward'
                what = f"the buffer {name.removeprefix(WRAPPED)!r}"
                tensors.setdefault(what, []).append((part, buffer))
    return tensors
