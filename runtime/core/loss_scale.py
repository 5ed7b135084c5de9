"""Loss scaling: gradients that float16 would round to zero are computed as multiples of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

_GROWTH_STEPS = 2000
"""Updates in a row with finite gradients after which the factor is doubled."""


class LossScale:
    """The factor of gradients within a module, from its output to its weights and inputs.

    Micikevicius et al. 2017, arXiv:1710.03740, sec. 3.2. The factor is halved and doubled by the
    rule, and with the defaults, of ``torch.amp.GradScaler``. That one divides gradients before the
    optimizer's step; here they are divided where they arrive, so that sums over batches, means over
    replicas, and what is sent upstream or saved, are true gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # Steps are updates with finite gradients since the factor last changed.
        self.value, self.steps = 65536.0, 0
        for p in parameters:
            _add(self._divided, p)

    def apply(self, xs: Iterable[Tensor], h: Tensor) -> None:
        """Multiply the gradients that come to a module's output, and divide those at its inputs."""
        _add(lambda g: g * self.value, h)
        for x in xs:
            if x.requires_grad:
                _add(self._divided, x)

    def _divided(self, g: Tensor) -> Tensor:
        return g / self.value

    def update(self, *, finite: bool) -> None:
        """Choose the next factor, by whether the newest update's gradients were all finite."""
        self.steps += 1
        if not finite:
            self.value, self.steps = self.value / 2, 0
        elif self.steps == _GROWTH_STEPS:
            self.value, self.steps = self.value * 2, 0


def _add(hook: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's has no types
