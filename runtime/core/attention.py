"""Detection of attention by what layers compute: their names are not reliable.

Attention is a product of two activations, a softmax of it, and a product of that with an
activation: it mixes tokens by their content. The operations of torch's own layers and functions
come down to these, so watching them finds attention in any form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "dot", "mv", "_cdist_forward"}
)
_SHARES = frozenset({"_softmax", "_safe_softmax", "softmax", "exp", "sigmoid"})


class _Kind(Flag):
    """What a tensor was computed from."""

    CONSTANT = 0
    ACTIVATION = auto()
    SCORES = auto()
    SHARES = auto()


class AttentionWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Watches the operations inside the block for attention.

    ``activations`` are the layers' inputs.
    """

    def __init__(self, activations: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.attends = False
        self._kinds: Any = WeakTensorKeyDictionary()
        self.take(activations)

    def take(self, activations: Iterable[Tensor]) -> None:
        """Learn of further inputs of the layers; what they have computed stays what it is."""
        for activation in activations:
            self._kinds.setdefault(activation, _Kind.ACTIVATION)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", func)
        name = str(getattr(packet, "__name__", "")).removesuffix("_")
        kinds = [
            self._kind(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        together = _Kind.CONSTANT
        for kind in kinds:
            together |= kind
        if "attention" in name:  # a fused kernel
            self.attends = True
        elif name in _PRODUCTS and sum(_Kind.ACTIVATION in kind for kind in kinds) > 1:
            self.attends |= _Kind.SHARES in together
            together |= _Kind.SCORES
        elif name in _SHARES and _Kind.SCORES in together:
            together |= _Kind.SHARES
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._kinds[leaf] = together | self._kind(leaf)
        return output

    def _kind(self, tensor: Tensor) -> _Kind:
        kind: _Kind = self._kinds.get(tensor, _Kind.CONSTANT)
        return kind


def run_watched(
    run: Callable[..., Any],
    inputs: Sequence[Tensor],
    watch: AttentionWatch,
    modules: Iterable[nn.Module],
) -> Any:
    """Run layers, or operations of them, without gradients, and let a watch find attention in them.

    The watch knows which inputs are activations; ``modules`` are the layers with all that is in
    them.
    """
    # torch's attention layer is attention, too, if its queries are parameters.
    watch.attends |= any(isinstance(module, nn.MultiheadAttention) for module in modules)
    with torch.no_grad():
        try:
            with watch:
                return run(*inputs)
        except NotImplementedError:
            raise
        except Exception:  # of the layers, or of an operation that cannot be watched
            return run(*inputs)
