"""Whether the parts of a network compute what it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dni_runtime.core.piece import Operations, Section
from dni_runtime.core.program import Program
from dni_runtime.core.source import Wrapped
from dni_runtime.errors import SpecError
from dni_runtime.split.part import Part


def check_parts(
    program: Program, network: nn.Module, batch: Sequence[Tensor], parts: Sequence[Part]
) -> None:
    """Run the network whole and in parts, from one seed, and compare.

    Raises:
        SpecError: The parts compute something else.
    """
    state = copy.deepcopy(network.state_dict())  # with its versions
    for one in program.traces:
        training = one is program.train
        network.train(training)
        whole = _result(network, Wrapped(network, program.spec), batch)
        network.load_state_dict(state)
        values: dict[Any, Tensor] = {}

        def in_parts(*xs: Tensor, one: Any = one, values: dict[Any, Tensor] = values) -> Tensor:
            outputs: tuple[Tensor, ...] = ()
            for part in parts:
                section = Section.of(one, part.after, part.until)
                run = Operations(one, section, network, nn.Module())
                given = [values[node] for node in section.takes]
                outputs = run(*given, *(xs[number] for number in section.data))
                values |= zip(section.gives, outputs, strict=True)
            return outputs[0]

        found = _result(network, in_parts, batch)
        network.load_state_dict(state)
        for name, value in whole.items():
            if not torch.allclose(found[name], value, rtol=1e-4, atol=1e-6, equal_nan=True):
                raise SpecError(
                    f"the parts of {program.spec.target} do not compute what it computes: {name} "
                    f"differs by {float((found[name] - value).abs().max()):.1e}",
                    hint="an operation that changes a tensor in place may be split from a reader "
                    "of that tensor: cut elsewhere with --at",
                )
    network.train()


def _result(
    network: nn.Module, run: Callable[..., Tensor], batch: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the output and all gradients of a batch."""
    torch.manual_seed(0)
    network.zero_grad(set_to_none=True)
    y = run(*batch)
    torch.autograd.backward(y.float().square().mean())
    found = {
        f"the gradient of {name!r}": one.grad
        for name, one in network.named_parameters()
        if one.grad is not None
    }
    network.zero_grad(set_to_none=True)
    return {"the output": y.detach(), **found}
