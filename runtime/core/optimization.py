"""From a module's gradients to its weights: loss scale, clipping, optimizers, averages.

It is one file because these are the steps of one update.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dni_runtime.core.backward import separate
from dni_runtime.core.finite import all_finite
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.training import (
    OPTIMIZERS,
    build_optimizer,
    build_schedule,
    sparse_parameters,
)
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, ClipSpec, GroupSpec, WorkerSpec
from dni_runtime.spec.choices import Location, check_keywords, check_numbers, find_class

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
        trained = list(parameters)
        for p in trained:
            _add(self._divided, p)
        # Gradients at inputs since the last update, by which a frozen module chooses the factor.
        self.passed: list[Tensor] | None = None if trained else []

    def apply(self, xs: Iterable[Tensor], h: Tensor) -> None:
        """Multiply the gradients that come to a module's output, and divide those at its inputs."""
        _add(lambda g: g * self.value, h)
        for x in xs:
            if x.requires_grad:
                _add(self._divided, x)

    def _divided(self, g: Tensor) -> Tensor:
        g = g / self.value
        if self.passed is not None:
            self.passed.append(g)
        return g

    def update(self, *, finite: bool) -> None:
        """Choose the next factor, by whether the newest update's gradients were all finite."""
        self.steps += 1
        if not finite:
            self.value, self.steps = self.value / 2, 0
        elif self.steps == _GROWTH_STEPS:
            self.value, self.steps = self.value * 2, 0


def _add(hook: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's has no types


_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    *((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()),
)


class Optimization:
    """Updates a module's weights.

    Gradients are summed up in ``Tensor.grad`` between updates. The layers come with
    ``requires_grad`` already set; ``predicts`` is whether :meth:`ahead` will be used.
    """

    def __init__(self, spec: WorkerSpec, layers: nn.Module, *, predicts: bool = False) -> None:
        self._spec = spec
        self._layers = layers
        self.parameters = [p for p in layers.parameters() if p.requires_grad]
        _check_clip(spec, layers)
        # The module's own first; none if nothing is trained.
        self.optimizers = build_optimizers(spec, layers)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] *= spec.lr_scale
        self.schedules = [  # one for each optimizer, if there is a schedule
            build_schedule(spec.schedule, optimizer, ("schedule",), length=spec.schedule_length)
            for optimizer in self.optimizers.values()
            if spec.schedule is not None
        ]
        self.average: AveragedModel | None = None
        if spec.ema is not None and self.parameters:
            self.average = _average(layers, spec.ema)
        # Batches whose gradients are summed up for the next update; updates that were not made,
        # as a gradient was not finite (``on_nan: skip``); what changes whenever the weights do.
        self.gathered = self.skipped = self.version = 0
        self.scale = LossScale(self.parameters) if spec.precision == "float16" else None
        self._predicts = predicts
        # The parameters before the newest update, if weights are predicted.
        self.before: list[Tensor] | None = None
        # Called with the parameters when their gradients are complete, before clipping and the
        # optimizer's step; it may change the gradients, as an average over replicas does.
        self.before_step: Callable[[Sequence[Tensor]], None] | None = None
        self.holds = False  # True: gradients are only summed up, until :meth:`step` is called

    def update(self) -> None:
        """Note a batch's complete gradient; update the weights every ``accumulate`` batches."""
        self.gathered += 1
        if self.scale is not None and self.scale.passed:
            self.scale.update(finite=all_finite(self.scale.passed))
            self.scale.passed.clear()
        if self.holds or self.gathered < self._spec.accumulate or not self.parameters:
            return
        if self.gathered > 1:
            separate(self.parameters)
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.div_(self.gathered)
        self.step()

    def step(self) -> None:
        if self.before_step is not None:
            self.before_step(self.parameters)
        gradients = (p.grad for p in self.parameters if p.grad is not None)
        if self._spec.on_nan == "skip":
            finite = all_finite(gradients)
            if self.scale is not None:
                self.scale.update(finite=finite)
            if not finite:
                self.skipped += 1
                self.clear()
                return
        clip = self._spec.clip
        with_gradient = [p for p in self.parameters if p.grad is not None]  # torch wants one
        if clip.value is not None and with_gradient:
            clip_grad_value_(with_gradient, clip.value)
        if clip.norm is not None:
            clip_grad_norm_(with_gradient, clip.norm)
        if self._predicts:
            self._remember()
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.clear()
        self.changed()
        if self.average is not None:
            self._follow(self.average)

    def changed(self) -> None:
        """Note that the weights have changed: passes that are kept must not use the new ones."""
        self.version += 1

    def clear(self) -> None:
        """Forget the gradients since the last update."""
        self.gathered = 0
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def try_schedules(self) -> None:
        """Step each schedule once, so that errors come before anything starts."""
        for schedule in self.schedules:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    schedule.step()
            except Exception as error:
                assert self._spec.schedule is not None
                name, args = self._spec.schedule.name, self._spec.schedule.args
                at = ("schedule", name)
                check_numbers(type(schedule), args, name=name, location=at)
                raise SpecError(f"{name} fails with {args}: {error}", location=at) from None

    def end_batch(self) -> None:
        """Step schedules that count batches; while it :attr:`holds`, :meth:`step` comes first."""
        if not self.holds:
            self.count(1)

    def end_epoch(self) -> None:
        """Step schedules that count epochs."""
        if self._spec.schedule_every == "epoch":
            self.step_schedules(1)

    def count(self, batches: int) -> None:
        """Step schedules that count batches."""
        if self._spec.schedule_every == "batch":
            self.step_schedules(batches)

    def catch_up(self, batches: int, epochs: int) -> None:
        """Step new schedules to where the module is."""
        self.step_schedules(batches if self._spec.schedule_every == "batch" else epochs)

    @contextlib.contextmanager
    def ahead(self, batches: int) -> Iterator[None]:
        """Use the weights that are expected after ``batches`` more batches.

        Updates until then are assumed to equal the newest one.

        For Adam and for SGD with momentum that is the prediction of SpecTrain (Chen et al. 2018,
        arXiv:1809.02839, eq. 4): their steps follow a mean of gradients that changes slowly.
        """
        updates = (self.gathered + batches) // self._spec.accumulate
        if not updates or self.before is None or self.holds:
            yield
            return
        now = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for p, before in zip(self.parameters, self.before, strict=True):
                p.mul_(1 + updates).sub_(before, alpha=updates)
        self.changed()
        try:
            yield
        finally:
            self.changed()
            with torch.no_grad():
                for p, value in zip(self.parameters, now, strict=True):
                    p.copy_(value)

    def _follow(self, average: AveragedModel) -> None:
        for mean, layer in zip(average.module.modules(), self._layers.modules(), strict=True):
            if isinstance(layer, Recurrent) and isinstance(mean, Recurrent):
                mean.take_state(layer)  # its size varies, which torch's copying does not expect
        average.update_parameters(self._layers)

    def _remember(self) -> None:
        if self.before is None:
            self.before = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for before, p in zip(self.before, self.parameters, strict=True):
                before.copy_(p)

    def step_schedules(self, count: int) -> None:
        """Step the schedules so often, to where the module is."""
        with warnings.catch_warnings():
            # A restarted module catches up before its optimizer's first step.
            warnings.filterwarnings("ignore", "Detected call of", UserWarning)
            for schedule in self.schedules:
                for _ in range(count):
                    schedule.step()


def freeze(layers: nn.Module, patterns: Sequence[str]) -> None:
    """Keep parameters as they are, beside those that their classes keep so."""
    kinds = _kinds(layers)
    for name, p in layers.named_parameters(remove_duplicate=False):
        if _matches(patterns, name, kinds):
            p.requires_grad_(False)


def trained_parameters(layers: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in layers.named_parameters() if p.requires_grad)


def _average(layers: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of a module that follows its weights.

    Tensors that layers compute from their weights and keep, as ``torch.nn.utils.weight_norm`` does,
    are results, which torch does not copy; the copy computes its own.
    """
    kept = [value for layer in layers.modules() for value in vars(layer).values()]
    results = [value for value in kept if isinstance(value, Tensor) and not value.is_leaf]
    try:
        copied = copy.deepcopy(layers, {id(tensor): tensor.detach().clone() for tensor in results})
    except Exception as error:
        raise SpecError(
            f"an average of the weights needs a copy of the layers, which fails: {error}",
            location=("ema",),
            hint="leave 'ema' out, or keep no results with gradients in attributes",
        ) from None
    return AveragedModel(copied, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]  # torch has none


def build_optimizers(spec: WorkerSpec, layers: nn.Module) -> dict[str, Optimizer]:
    """Build a module's optimizers: its own, and one for each group that has another."""
    remaining = dict(trained_parameters(layers))
    if not remaining:
        return {}
    kinds, sparse = _kinds(layers), sparse_parameters(layers)
    groups: list[dict[str, Any]] = []
    others: dict[str, Optimizer] = {}
    for number, group in enumerate(spec.groups):
        at: Location = ("groups", number)
        taken = [name for name in remaining if _matches(group.parameters, name, kinds)]
        if not taken:
            continue
        params = [remaining.pop(name) for name in taken]
        if group.optimizer is None:
            _check_options(spec, group, params, at, sparse)
            groups.append({"params": params, **group.options})
        else:
            others[f"group-{number}"] = build_optimizer(
                group.optimizer, params, (*at, "optimizer"), sparse=sparse
            )
    if remaining:
        groups.insert(0, {"params": list(remaining.values())})
    if not groups:
        return others
    try:
        module = build_optimizer(spec.optimizer, groups, ("optimizer",), sparse=sparse)
    except SpecError as error:
        raise _naming_refused(error, spec, remaining, sparse) from None
    return {"module": module, **others}


def _check_clip(spec: WorkerSpec, layers: nn.Module) -> None:
    """Refuse to clip sparse gradients: torch has no norms of them."""
    if spec.clip != ClipSpec() and sparse_parameters(layers):
        raise SpecError(
            "sparse gradients cannot be clipped",
            location=("clip",),
            hint=f"leave 'clip' out, or 'sparse' in the embeddings of module {spec.module!r}",
        )


def _naming_refused(
    error: SpecError, spec: WorkerSpec, named: Mapping[str, nn.Parameter], sparse: Collection[int]
) -> SpecError:
    """Return the error with the parameters that an optimizer refuses, if it takes others."""
    refused = []
    for name, p in named.items():
        try:
            build_optimizer(spec.optimizer, [p], sparse=sparse)
        except SpecError:
            refused.append(f"{name} ({' x '.join(map(str, p.shape))})")
    if len(refused) in (0, len(named)):
        return error
    return SpecError(
        f"{error.message}; of module {spec.module!r} it refuses {', '.join(refused[:3])}"
        + (", …" if len(refused) > 3 else ""),
        location=error.location,
        hint="give these an optimizer of their own under 'groups'",
    )


def _check_options(
    spec: WorkerSpec,
    group: GroupSpec,
    params: Sequence[nn.Parameter],
    at: Location,
    sparse: Collection[int],
) -> None:
    """Check a group's options, which torch does not check."""
    cls = find_class(spec.optimizer.name, "optimizer", OPTIMIZERS, Optimizer, ("optimizer",))
    check_keywords(
        cls, group.options, name=spec.optimizer.name, location=(*at, "options"), positional=1
    )
    choice = Choice(name=spec.optimizer.name, args={**spec.optimizer.args, **group.options})
    build_optimizer(choice, params, (*at, "options"), sparse=sparse)


def check_groups(groups: Sequence[GroupSpec], layers: Sequence[nn.Module], at: Location) -> None:
    """Refuse a group that matches no parameter of any module."""
    for number, group in enumerate(groups):
        check_patterns(group.parameters, layers, (*at, number, "parameters"))


def check_patterns(patterns: Sequence[str], layers: Sequence[nn.Module], at: Location) -> None:
    """Refuse patterns of which none matches a parameter of any module."""
    kinds = [(name, of_one) for of_one in map(_kinds, layers) for name in of_one]
    if not any(_matches(patterns, name, of_one) for name, of_one in kinds):
        raise SpecError(
            f"no parameter matches {', '.join(patterns)}",
            location=at,
            hint="kinds are norms, biases, embeddings, vectors and matrices; patterns match "
            f"names such as {', '.join(name for name, _ in kinds[:4])}",
        )


def _matches(patterns: Sequence[str], name: str, kinds: dict[str, set[str]]) -> bool:
    return any(what in kinds[name] or fnmatchcase(name, what) for what in patterns)


def _kinds(layers: nn.Module) -> dict[str, set[str]]:
    """Return what each parameter is, in the words that a group may use."""
    kinds: dict[str, set[str]] = {}
    for prefix, layer in layers.named_modules(remove_duplicate=False):
        for name, p in layer.named_parameters(recurse=False, remove_duplicate=False):
            words = {"vectors" if p.dim() < 2 else "matrices" if p.dim() == 2 else "tensors"}
            if isinstance(layer, _NORMS):
                words.add("norms")
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                words = {"embeddings"}
            if name.startswith("bias") or name.endswith("bias"):
                words.add("biases")
            kinds[f"{prefix}.{name}" if prefix else name] = words
    return kinds
