"""Forward passes, and what is kept of them until their true gradient comes.

Weights change between a forward pass and its late gradient. There are three ways to go back through
such a pass (the same in float32 and under autocast, whose copies of weights count as weights):

* ``graph``: old activations, current weights; costs the memory of the activations;
* ``weights``: old activations and weights (weight stashing, PipeDream, Narayanan et al. 2019,
  sec. 3.3); costs one more copy of the weights for each missing update;
* ``input``: the pass is recomputed with the current weights (features replay, Huo et al. 2018,
  arXiv:1807.04511); costs the memory of the input, and one more forward pass.

Shapes: B batch, X one sample's input, H its activation, Y its label.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dni_runtime.core.backward import IN_PLACE
from dni_runtime.core.forward import ModuleForward
from dni_runtime.core.interfaces.base import Keep
from dni_runtime.core.training import random_state, set_random_state
from dni_runtime.wire import Part


@dataclass
class ForwardPass:
    """A forward pass in train mode."""

    xs: tuple[Tensor, ...]  # leaves, which require a gradient if one is wanted for them
    h_BH: Tensor  # with its graph; detached if only the input is kept
    # Of torch's generators before the pass, if it may be recomputed.
    random_state: tuple[Tensor, Tensor | None] | None = None


class ForwardPasses:
    """Computes a module's forward passes, so that gradients may go back through them later.

    ``keep`` is what is kept of a pass that outlives an update. ``version`` returns a number that
    changes whenever the weights change. (Tensors count their changes, too, but not those by torch's
    fused optimizers.)
    """

    def __init__(self, module: ModuleForward, keep: Keep, version: Callable[[], int]) -> None:
        self._module = module
        self._keep = keep
        self._version = version
        self._weights = {_memory(weight) for weight in module.layers.parameters()}
        self._saved: list[ref[_SavedTensor]] = []  # of the newest pass
        self._stash: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()

    def compute(
        self, xs: tuple[Tensor, ...], *, grads: Sequence[bool] = (), outlives: bool = False
    ) -> ForwardPass:
        """Compute one forward pass.

        ``grads`` says for which of the first inputs a gradient is wanted, ``outlives`` whether
        gradients go back through the pass after an update of the weights.
        """
        if any(grads):
            inputs = zip(xs, [*grads, *[False] * len(xs)], strict=False)
            xs = tuple(x.detach().requires_grad_() if grad else x for x, grad in inputs)
        if outlives and self._keep == "input":
            state = random_state(self._module.device)
            with torch.no_grad():
                return ForwardPass(xs, self._module.activation(xs), state)
        with self._hooks() if outlives else contextlib.nullcontext():
            return ForwardPass(xs, self._module.activation(xs))

    def output(self, kept: ForwardPass) -> Tensor:
        """Return a pass's activation with its graph, recomputed if only the input is kept."""
        if kept.random_state is None:
            return kept.h_BH
        module = self._module
        with module.without_trace(), self._hooks():  # BatchNorm saves its buffers, which change
            set_random_state(module.device, kept.random_state)
            return module.activation(kept.xs)

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Keep the tensors that autograd saves.

        With hooks, autograd does not check whether a saved tensor has changed since; layers may
        change one that they still need. Weights, and buffers that layers change in place, change
        after the pass, too.
        """
        pack = self._pack_then if self._keep == "weights" else self._pack_now
        self._saved.clear()
        with saved_tensors_hooks(pack, lambda packed: packed.tensor()):
            yield
        buffers: set[int] = set()
        for saved in filter(None, [reference() for reference in self._saved]):
            saved.changed = saved.watched._version != saved.version
            if saved.version and not saved.changed:
                buffers = buffers or {_memory(buffer) for buffer in self._module.layers.buffers()}
                if _memory(saved.value) in buffers:
                    saved.value = saved.value.clone()

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        saved = _SavedTensor(value := tensor.detach(), value)
        self._saved.append(ref(saved))
        return saved

    def _pack_now(self, tensor: Tensor) -> _SavedTensor:
        """Refer to weights, so that their newest values are used."""
        weight = self._weight_cast_to(tensor)
        return self._pack(tensor) if weight is None else _Cast(weight, tensor)

    def _pack_then(self, tensor: Tensor) -> _SavedTensor:
        """Copy weights, once for each of their versions."""
        cast_from = self._weight_cast_to(tensor)
        weight = tensor if cast_from is None else cast_from
        memory = _memory(weight)
        if memory not in self._weights:
            return self._pack(tensor)
        key = memory, tensor.dtype, self._version(), weight._version
        copy = self._stash.get(key)
        if copy is None:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy = self._stash[key] = whole.set_(tensor.detach().untyped_storage()).clone()
        if cast_from is not None:  # nobody changes what autocast has converted
            return _View(copy, tensor, copy)
        saved = _View(copy, tensor, tensor.detach())
        self._saved.append(ref(saved))
        return saved

    def _weight_cast_to(self, tensor: Tensor) -> Tensor | None:
        """Return the weight that autocast has converted into this tensor, if it did."""
        base = cast("Tensor", tensor._base) if tensor._is_view() else tensor
        if type(base.grad_fn).__name__ != "ToCopyBackward0":
            return None
        assert base.grad_fn is not None
        weight = getattr(base.grad_fn.next_functions[0][0], "variable", None)
        known = weight is not None and _memory(weight) in self._weights
        return cast("Tensor", weight) if known else None


class _SavedTensor:
    """A tensor that autograd saved, and whether the same pass has changed it in place since."""

    __slots__ = ("__weakref__", "changed", "value", "version", "watched")

    def __init__(self, value: Tensor, watched: Tensor) -> None:
        self.value, self.watched = value, watched
        self.version, self.changed = watched._version, False

    def tensor(self) -> Tensor:
        if self.changed:
            raise RuntimeError(f"{IN_PLACE}: one of the sizes {[*self.value.shape]}")
        return self.value


class _View(_SavedTensor):
    """A tensor that autograd saved of a weight, as a view of that weight's copy."""

    def __init__(self, copy: Tensor, saved: Tensor, watched: Tensor) -> None:
        super().__init__(copy, watched)
        self._as = saved.size(), saved.stride(), saved.storage_offset()

    def tensor(self) -> Tensor:
        return super().tensor().as_strided(*self._as)


class _Cast(_View):
    """A tensor that autograd saved of a converted weight, which is converted again."""

    def __init__(self, weight: Tensor, saved: Tensor) -> None:
        super().__init__(value := weight.detach(), saved, value)
        self._dtype = saved.dtype

    def tensor(self) -> Tensor:
        return self.value.to(self._dtype).as_strided(*self._as)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class KeptBatch:
    """A batch, or a part of one, whose gradient is still to come."""

    h_BH: Tensor  # detached
    y_BY: Tensor
    part: Part
    number: int  # of the batch, among those of this module
    forward: ForwardPass | None = None  # if the gradient goes back through it
    g_BH: Tensor | None = None  # the signal that was used at once and is to be corrected


class KeptBatches:
    """Batches, or parts of them, by their ids in the stream.

    Beyond ``size``, older ones are dropped; None keeps all, because waiting bounds them.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._kept: OrderedDict[int, KeptBatch] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def numbers(self) -> set[int]:
        return {kept.number for kept in self._kept.values()}

    @property
    def passes(self) -> int:
        """Number of forward passes that gradients are still to go back through."""
        return sum(kept.forward is not None for kept in self._kept.values())

    def add(self, id: int, kept: KeptBatch) -> int:
        """Keep a batch; return how many are dropped for it."""
        self._kept[id] = kept
        dropped = 0 if self.size is None else max(len(self._kept) - self.size, 0)
        for _ in range(dropped):
            self._kept.popitem(last=False)
        return dropped

    def take(self, id: int) -> KeptBatch | None:
        """Return a batch, which is not kept any longer; None if it was not."""
        return self._kept.pop(id, None)

    def drop(self, until: int | None) -> int:
        """Drop all batches, or those until an id; return how many."""
        lost = [id for id in self._kept if until is None or id <= until]
        for id in lost:
            del self._kept[id]
        return len(lost)
