"""What the replicas of a module share, and each one's part in it.

Shapes: P trained parameters, R numbers in a row.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dni_runtime.core.forward import ModuleForward
from dni_runtime.core.optimization import Optimization
from dni_runtime.core.replication.base import Sync, mean_of
from dni_runtime.core.replication.compression import (
    Compression,
    Differences,
    build_compression,
    words_of,
)
from dni_runtime.core.replication.strategies import ParameterServer, build_strategy
from dni_runtime.core.training import real, split_like
from dni_runtime.errors import SpecError, WireError

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<IId")
HEADER_WORDS = _HEADER.size // 4
ROW, PACKED, ASKS, WAITS = 1, 2, 4, 8


@dataclass(frozen=True)
class ReplicaMessage:
    """What a replica offers, or the answer: as 32-bit words (docs/wire.md, "Replicas")."""

    row: Tensor | None = None  # float32
    weight: float = 0.0  # in the mean
    # The row's words, if compressed; its parameters are differences then.
    packed: Tensor | None = None
    tag: int = 0  # checksum of the base that the replica has; 0 without compression
    asks: bool = False  # that all offer their rows at the next point
    waits: bool = False  # for the answer, though the strategy does not

    def words(self) -> Tensor:
        """Return its words, ``int32``."""
        flags = ASKS * self.asks | WAITS * self.waits
        flags |= ROW * (self.row is not None) | PACKED * (self.packed is not None)
        header = bytearray(_HEADER.pack(flags, self.tag, self.weight))
        parts = [torch.frombuffer(header, dtype=torch.int32)]
        if self.packed is not None:
            parts.append(self.packed)
        elif self.row is not None:
            parts.append(words_of(self.row))
        return torch.cat(parts)

    @classmethod
    def read(cls, words: Tensor, size: int, compression: Compression | None) -> ReplicaMessage:
        """Return the message of some words; raises ``WireError`` if there is none in them."""
        if len(words) < HEADER_WORDS:
            raise WireError("body", f"a message of {len(words)} words")
        header = words[:HEADER_WORDS].contiguous().view(torch.uint8).numpy().tobytes()
        flags, tag, weight = _HEADER.unpack(header)
        payload, row, packed = words[HEADER_WORDS:], None, None
        if not (math.isfinite(weight) and weight >= 0):
            raise WireError("body", f"a row has the weight {weight}")
        if flags & ~(ROW | PACKED | ASKS | WAITS) or (flags & PACKED and not flags & ROW):
            raise WireError("body", f"a message has the flags {flags}")
        if flags & PACKED:
            if compression is None:
                raise WireError("body", "a compressed row, but rows are not compressed here")
            count, rest = compression.total, size - sum(compression.sizes)
            if len(payload) != count + rest:
                raise WireError("body", f"{len(payload)} words instead of {count + rest}")
            try:
                row_P, packed = compression.unpack(payload[:count]), payload
                row = torch.cat([row_P, payload[count:].view(torch.float32)])
            except ValueError as error:
                raise WireError("body", f"a compressed row: {error}") from None
        elif flags & ROW:
            row = payload.view(torch.float32)
        if len(payload) != (0 if row is None else size) and packed is None:
            raise WireError("body", f"{len(payload)} words in a row of {size}")
        return cls(row, weight, packed, tag, bool(flags & ASKS), bool(flags & WAITS))


class SharedWeights:
    """What the replicas of a module share: one row of numbers, trained parameters first.

    That is all state of the layers, the gradient interface and the weights' average but integers;
    these and the state of the optimizers are each replica's own. Only trained parameters are
    compressed: the rest is not a sum of steps, so what compression left out would be counted twice.
    """

    def __init__(
        self,
        module: ModuleForward,
        interface: nn.Module | None,  # whose parameters are shared, too
        optimization: Optimization,
    ) -> None:
        self._module, self._optimization = module, optimization
        modules = [part for part in (module.layers, interface) if part is not None]
        self._trained = [p for part in modules for p in part.parameters() if p.requires_grad]
        self._shapes = [real(p.detach()).shape for p in self._trained]
        self._learnt = sum(shape.numel() for shape in self._shapes)
        self._device = torch.device("cpu") if module.spec.backend is None else module.device
        self.size = sum(tensor.numel() for tensor in self._tensors)  # of the row
        self.begin()
        longest = self._learnt
        if self.differences is not None:
            longest = max(longest, self.differences.compression.total)
        # Of the longest message.
        self.words = HEADER_WORDS + longest + self.size - self._learnt

    @property
    def _tensors(self) -> list[Tensor]:
        """The tensors that are there now: a layer may have replaced its buffers."""
        known, tensors = {id(p) for p in self._trained}, list[Tensor](self._trained)
        for layer in (layer for part in self._module.parts() for layer in part.modules()):
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if tensor is not None and id(tensor) not in known:
                    tensors.append(tensor)
        return [
            real(tensor.detach())
            for tensor in tensors
            if tensor.is_floating_point() or tensor.is_complex()
        ]

    def begin(self) -> None:
        """Begin with the module's weights as they are now."""
        spec, row = self._module.spec, self.row()
        assert spec.strategy is not None
        self.samples = 0  # that the replica was trained on since it took the last result
        self._proven = False  # whether this process has taken one
        self.strategy = build_strategy(spec.strategy, row[: self._learnt])
        self.strategy.attach(spec, self._optimization)
        self.differences: Differences | None = None
        if spec.compression is not None and spec.backend is None:
            compression = build_compression(spec.compression, self._shapes)
            self.differences = Differences(compression, row[: self._learnt])

    def joined(self) -> None:
        """Begin with another replica's state, without what was its own: it has learnt nothing."""
        self.samples = 0
        self.strategy.joined(self.row()[: self._learnt])
        if self.differences is not None:
            self.differences.error.zero_()

    def row(self) -> Tensor:
        """Return a copy of the tensors, float32, ``[R]``; on the CPU, but for a process group."""
        parts = [tensor.to(self._device, torch.float32).flatten() for tensor in self._tensors]
        row = torch.cat([torch.zeros(0, device=self._device), *parts])  # there may be none
        if len(row) != self.size:
            raise SpecError(
                f"a buffer of module {self._module.spec.module!r} has changed its size while it "
                "was trained, and replicas share buffers",
                hint="give it its size when the layer is made, or set 'replicas: 1'",
            )
        return row

    @property
    def gradients(self) -> list[torch.Size]:
        """The sizes of the gradients at the beginning of an offer."""
        ends, most = accumulate(shape.numel() for shape in self._shapes), self.strategy.gradients
        return [shape for shape, end in zip(self._shapes, ends, strict=True) if end <= most]

    def read(self, words: Tensor) -> ReplicaMessage:
        """Return another replica's message; raises ``WireError`` if it is not one."""
        compression = None if self.differences is None else self.differences.compression
        return ReplicaMessage.read(words, self.size, compression)

    def offer(self, sync: Sync, *, whole: bool = False) -> ReplicaMessage:
        """Return this replica's contribution at a point; ``whole``: not compressed.

        At a full point it is whole anyway, so that the first replica can always read it.
        """
        local, differences, weight = (
            self.row(),
            self.differences,
            self.strategy.weight(self.samples),
        )
        offered_P = self.strategy.offer(local[: self._learnt], sync)
        tag = 0 if differences is None else differences.tag
        if offered_P is None:
            return ReplicaMessage(tag=tag, asks=self.strategy.asks)
        packed_P = None
        if differences is not None and self._module.spec.replica > 1:  # the first's goes nowhere
            if whole or sync.full:
                offered_P = differences.whole(offered_P)
            else:
                near_P, feedback = self.strategy.base(differences.base), self.strategy.feedback
                packed_P, _ = differences.pack(offered_P, near_P, feedback=feedback)
        row = torch.cat([offered_P, local[self._learnt :]])
        packed = None if packed_P is None else self._with_rest(packed_P, row)
        waits = sync.full and not self.strategy.waits
        return ReplicaMessage(row, weight, packed, tag, waits=waits)

    def agree(self, sync: Sync, offers: Mapping[Any, ReplicaMessage]) -> dict[Any, ReplicaMessage]:
        """Make of all offers what all go on with, and take it; return the answer to each offer.

        This is for the first replica, which adds its own offer to those of the others. If it was
        restarted, the others may have gone on to a base that it lacks. Then all keep what they have
        learnt, and offer it whole at the next point.
        """
        differences = self.differences
        tag = 0 if differences is None else differences.tag
        unread = sum(one.packed is not None and one.tag != tag for one in offers.values())
        if unread:
            log.warning(
                "at %d the differences of %d replicas are from other weights than those here: %s",
                sync.id, unread, "they are left out" if self._proven else "all keep their own",
            )  # fmt: skip
            if not self._proven:
                self.strategy.asked = True
                return {who: ReplicaMessage(tag=tag, asks=True) for who in offers}
        local = self.offer(sync)
        if not self.strategy.common:
            return self._pass_on(local, offers)
        asks, rows = local.asks or any(offer.asks for offer in offers.values()), []
        for offer in (local, *offers.values()):
            row = offer.row
            if row is not None and offer.packed is not None and differences is not None:
                near_P = self.strategy.base(differences.base)
                row = self._moved(row, near_P) if offer.tag == local.tag else None
            if row is not None:
                rows.append((row, offer.weight))
        if not rows:
            self.strategy.asked = asks
            return {who: ReplicaMessage(tag=tag, asks=asks) for who in offers}
        weights = [weight for _, weight in rows]
        agreed = self._agreed(mean_of([row for row, _ in rows], weights), moved=any(weights))
        packed = None
        if differences is not None:
            agreed_P, feedback = agreed[: self._learnt], self.strategy.feedback
            packed_P, agreed_P = differences.pack(agreed_P, differences.base, feedback=feedback)
            agreed = torch.cat([agreed_P, agreed[self._learnt :]])
            packed = self._with_rest(packed_P, agreed)
        whole, short = ReplicaMessage(agreed), ReplicaMessage(agreed, packed=packed, tag=local.tag)
        self._take(agreed)
        return {who: short if offer.tag == local.tag else whole for who, offer in offers.items()}

    def settle(self, mean: ReplicaMessage) -> None:
        """Go on with what the strategy makes of a mean, as all others do, each by itself.

        The mean's weight is the sum of the weights of all offers.
        """
        row = mean.row
        if row is not None:
            row = self._agreed(row, moved=mean.weight > 0)
        self.take(ReplicaMessage(row, asks=mean.asks))

    def _agreed(self, mean: Tensor, *, moved: bool) -> Tensor:
        """Return the row that all take; ``moved``: somebody has learnt something."""
        if not moved:
            return mean
        self._put(mean, self._learnt)  # the average of weights follows a step
        agreed_P = self.strategy.agree(mean[: self._learnt])
        return torch.cat([agreed_P, self.row()[self._learnt :]])

    def _pass_on(
        self, local: ReplicaMessage, offers: Mapping[Any, ReplicaMessage]
    ) -> dict[Any, ReplicaMessage]:
        """Give each replica, the first one too, the row of another one."""
        present = [local, *offers.values()]
        if len(present) == 1:
            return {}
        by = self.strategy.other(len(present))
        rows = [present[(place + by) % len(present)].row for place in range(len(present))]
        if rows[0] is not None:
            self._take(rows[0])
        return {who: ReplicaMessage(row) for who, row in zip(offers, rows[1:], strict=True)}

    def apply_own(self) -> None:
        """Let the first replica's own progress count as the others' pushes, at each point."""
        strategy = self.strategy
        assert isinstance(strategy, ParameterServer)
        self._put(strategy.with_own(self.row(), self._learnt, self._module.spec.replicas))
        self._changed()

    def apply(self, offer: ReplicaMessage, replica: int, id: int) -> None:
        """Add another replica's push to the first one's weights, unless that was done before.

        ``replica`` counts the others from 0; ``id`` is the point.
        """
        strategy = self.strategy
        assert isinstance(strategy, ParameterServer)
        if offer.row is not None and id > int(strategy.applied_N[replica]):
            replicas = self._module.spec.replicas
            self._put(strategy.with_push(self.row(), offer.row, self._learnt, replicas))
            self._changed()
            strategy.applied_N[replica] = id

    def take(self, answer: ReplicaMessage) -> bool:
        """Take the first replica's answer; return whether it can read differences from here."""
        self.strategy.asked = answer.asks
        row = answer.row
        if row is None:
            return self.differences is None or answer.tag == self.differences.tag
        if answer.packed is not None and self.differences is not None:
            row = self._moved(row, self.differences.base)
        self._take(row)
        return True

    def pull(self, xs: tuple[Tensor, ...], h_BH: Tensor) -> Tensor | None:
        """Return what the strategy adds to the error signal of a batch, per sample."""
        module = self._module

        def activation(row_P: Tensor) -> Tensor:
            # BatchNorm changes its statistics, which the backward pass still needs as they are.
            tensors = {name: buffer.clone() for name, buffer in module.layers.named_buffers()}
            trained = {k: p for k, p in module.layers.named_parameters() if p.requires_grad}
            tensors |= zip(trained, split_like(row_P, trained.values()), strict=True)
            with torch.no_grad():
                return module.activation(
                    xs, lambda *xs: functional_call(module.layers, tensors, xs)
                )

        return self.strategy.pull(h_BH, activation)

    def _take(self, agreed: Tensor) -> None:
        local, agreed_P = self.row(), agreed[: self._learnt]
        rest = (agreed if self.strategy.common else local)[self._learnt :]
        self._put(torch.cat([self.strategy.take(local[: self._learnt], agreed_P), rest]))
        self.samples = 0
        self._proven = True
        self.strategy.asked = False
        self._changed()
        if self.differences is not None:
            self.differences.base = agreed_P.clone()

    def _changed(self) -> None:
        """Tell the optimization that its weights have moved, by no update of its own."""
        self._optimization.before = None
        self._optimization.changed()

    def _with_rest(self, packed_P: Tensor, row: Tensor) -> Tensor:
        """Return the words of compressed parameters, followed by the rest of the row as it is."""
        return torch.cat([packed_P, words_of(row[self._learnt :])])

    def _moved(self, row: Tensor, base_P: Tensor) -> Tensor:
        """Return a row whose parameters are differences from a base as a row of parameters."""
        return torch.cat([row[: self._learnt] + base_P, row[self._learnt :]])

    @torch.no_grad()
    def _put(self, row: Tensor, first: int = 0) -> None:
        """Set the tensors to a row's numbers, from the ``first`` one on."""
        at = 0
        for tensor in self._tensors:
            if at >= first:
                tensor.copy_(row[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of it, beside ``samples`` and ``strategy.asked``."""
        tensors = {f"strategy.{k}": v for k, v in self.strategy.state_dict().items()}
        if self.differences is not None:
            tensors |= {f"differences.{k}": v for k, v in self.differences.state_dict().items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with the module's weights as they are now, and with what :meth:`state` returned.

        Raises ``RuntimeError`` if that is of another strategy or compression.
        """
        self.begin()
        for name, part in (("strategy.", self.strategy), ("differences.", self.differences)):
            part_state = {k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)}
            if part_state and part is not None:  # a run without replicas has none
                part.load_state_dict(part_state)
