"""A drawn case trained twice: by a loop of plain torch, and as a chain; and what differs."""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from dni_runtime import Chain
from dni_runtime.api.checkpointed import Checkpointed
from dni_runtime.core.chain import LocalChain
from dni_runtime.errors import DniError
from dni_runtime.network.tracing import trace
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import CheckedChain, importing_from
from dni_runtime.run.record import Record
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.replicas import workers_of
from dni_runtime.worker.checkpoint import copy_state, read, restore, write_part
from tests.generated.cases import Case, simpler, source
from tests.replicas import share

Batch = tuple[Tensor, Tensor]

ROUNDING = 1e-5, 1e-4
"""How far numbers may be apart, absolute and relative to a tensor's largest."""

ROUGH = 2e-2, 5e-2
"""The same in networks with layers in bfloat16."""

PRECISE = 1e-9
"""What differs in float32 was rounding if it is this near in float64."""

UNSTABLE = 1e-6
"""Rounding decides if plain torch itself, its weights changed by it in float64, is so far apart."""

ROUNDS = 1000
"""After how many deliveries without end a batch is one that never ends."""


_CUTS = {"severed", "extractor", "frozen", "codebook", "signs", "side"}
REASONS: dict[str, set[str]] = {
    "^by torch: ": set(),
    "'all-reduce' changes gradients of all rows": {"words-sparse", "bag-sparse"},
    "replicas share numbers of 32 bits": {"doubled"},
    "does not keep its argument": {"encoder", "encoder-drops"},
    "tied weights of .* the smallest training batch": {"unequal batches"},
    "has no gradient for module": _CUTS,
    "the output of module '.*' has no gradient": _CUTS,
    "needs other values in eval mode than in train mode": {"noise"},
    "it decides by the value of a tensor": {"batch-norm-mean"},
    "is in eval mode, and ": {"still"},
    "the memory of .* is that of .*, but its own in what workers build": {"again"},
    "modules '.*' and '.*' share ": {"again"},
    "which was made at run time": {"weight-norm-bare"},
    "can be cut in 0 places": set(),
    "no update would be made: one takes . batches": {"accumulate"},
    "tied weights of types float32, float64 pass": {"doubled"},
    "tied weights of types complex64, float32 pass": {"spectrum"},
    "tied weights of types bfloat16, float(32|64) pass": {"halved"},
    # plain torch says so, too, of a pass in eval mode with gradients, as it is traced
    "cannot be traced.* is a view and is being modified inplace": {"reversal"},
    # torch computes again what is checkpointed, and a module does not
    "changes a tensor in place that its gradient needs": {"recomputed"},
}
"""Why a case may be refused, and the elements (one of them) that are refused so."""


class Stalled(Exception):
    """A chain waits for a gradient that never comes."""


@dataclass
class Outcome:
    """What came of a case."""

    case: Case  # with its cuts
    # "equal", "refused", "different", "failed"; "rounded": equal in float64 alone; "unstable":
    # rounding decides in float64, too
    kind: str
    text: str = ""  # what differs, or the error
    apart: float = 0.0  # the largest difference of a number
    trace: str = ""  # the error's traceback

    @property
    def reason(self) -> str | None:
        """Why it is refused, if that is a known reason for one of its elements."""
        if self.kind != "refused":
            return None
        has = self.case.elements
        for pattern, elements in REASONS.items():
            if re.search(pattern, self.text) and (not elements or not has.isdisjoint(elements)):
                return pattern
        return None

    @property
    def wrong(self) -> bool:
        """Whether it is neither equal nor refused for a known reason."""
        return self.kind not in ("equal", "rounded", "unstable") and self.reason is None

    @property
    def cause(self) -> str:
        """What kind of difference or error it is."""
        if self.kind == "different":
            return self.text.partition(" ")[0]
        return re.sub(r"\d+|'[^']*'", "", self.text.partition("\n")[0])[-60:]


@dataclass
class Trained:
    """A network after training."""

    state: dict[str, Tensor] = field(default_factory=dict)  # by the user's own names
    evaluated: list[Tensor] = field(default_factory=list)  # after each epoch and at the end
    losses: list[float] = field(default_factory=list)  # of each batch

    def named(self) -> dict[str, Tensor]:
        """Return all numbers by what they are."""
        found = {f"state {key!r}": one for key, one in self.state.items()}
        found |= {f"evaluation {number}": one for number, one in enumerate(self.evaluated)}
        return {**found, "losses": torch.tensor(self.losses)}


@dataclass(frozen=True)
class Layout:
    """What the loop of plain torch has to know of a chain."""

    owners: Mapping[str, int]  # the module that has each tensor of the state dict
    random_states: Sequence[Tensor]  # the generator's, with which each module begins
    ends: Sequence[str]  # the network's own modules after which it is cut
    drop_last: bool = False  # smaller last batches are left out


def run_case(case: Case, folder: Path) -> Outcome:
    """Train a case twice, in files of their own in a folder."""
    name = f"drawn_{case.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    before, dtype = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if case.double else torch.float32)
    try:
        with importing_from(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compared(case, name, folder)
    finally:
        sys.modules.pop(name, None)
        torch.set_rng_state(before)
        torch.set_default_dtype(dtype)


def _compared(case: Case, name: str, folder: Path) -> Outcome:
    try:
        case = with_cuts(case, name, folder)
        nets = written(case, name, folder)
        chain = chain_of(case, nets, folder)
        found, layout = trained_chain(case, nets, chain.prepared, folder)
    except DniError as error:
        text = str(error).replace(str(folder), "")
        if re.search("in.?place", text) and (
            _torch_refuses(case, name, folder) or _torch_refuses_a_module(case, name, folder)
        ):
            text = f"by torch: {text}"
        return Outcome(case, "refused", text, trace=_trace())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and _torch_refuses(case, name, folder):
            return Outcome(case, "refused", f"by torch: {text}", trace=_trace())
        return Outcome(case, "failed", text, trace=_trace())
    try:
        wanted = trained_plainly(case, written(case, name, folder), layout)
    except RuntimeError as error:
        return Outcome(case, "different", f"torch refuses what the chain does: {error}")
    outcome = compared(case, found, wanted)
    if outcome.kind == "different":
        near = [trained_plainly(case, written(case, name, folder), layout, one) for one in (1, 2)]
        if case.double:
            decides = max(compared(case, one, wanted).apart for one in near) > UNSTABLE
            return replace(outcome, kind="unstable") if decides else outcome
        outcome = compared(case, found, wanted, near)
        precise = run_case(replace(case, double=True), folder / "double")
        if precise.kind == "equal" and precise.apart < PRECISE:
            outcome = replace(outcome, kind="rounded")
        elif precise.kind == "unstable":
            outcome = replace(outcome, kind="unstable")
    return outcome


def _torch_refuses(case: Case, name: str, folder: Path) -> bool:
    """Whether the user's network cannot be trained by plain torch either."""
    case = replace(case, defaults={"interface": "exact", "optimizer": {"SGD": {"lr": 0.0}}})
    try:
        trained_plainly(
            case, written(case, name, folder), Layout({}, [torch.get_rng_state()] * 9, ())
        )
    except RuntimeError:
        return True
    return False


def _torch_refuses_a_module(case: Case, name: str, folder: Path) -> bool:
    """Whether plain torch refuses the gradient of some module's output, which may never be taken.

    What comes after it may send no gradient back.
    """
    nets = written(case, name, folder)
    net, total = plain_network(case, nets), [torch.zeros(())]
    ends = net.children() if case.way == "modules" else map(net.get_submodule, case.at or ())

    def add(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        several = output if isinstance(output, tuple) else (output,)
        total.extend(one.sum() for one in several if isinstance(one, Tensor))

    for module in ends:
        module.register_forward_hook(add)
    x, _ = batches_of(case, nets, drop_last=False)[0]
    net(x.clone())
    whole = torch.stack(total).sum()
    try:
        if whole.requires_grad:
            whole.backward()  # type: ignore[no-untyped-call]  # torch's Tensor.backward has no types
    except RuntimeError:
        return True
    return False


def shrunk(outcome: Outcome, folder: Path, tries: int = 60) -> Outcome:
    """Return the outcome of a simpler case with the same fault."""
    found, left = outcome, tries
    while left:
        for case in simpler(found.case):
            left -= 1
            other = run_case(case, folder)
            if other.wrong and (other.kind, other.cause) == (found.kind, found.cause):
                found = other
                break
            if not left:
                break
        else:
            break
    return found


def _trace() -> str:
    return traceback.format_exc()


def written(case: Case, name: str, folder: Path) -> ModuleType:
    """Write the case's file, and import it."""
    (folder / f"{name}.py").write_text(source(case), encoding="utf-8")
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    with _uncached():
        return importlib.import_module(name)


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Read sources, not what was compiled of an earlier file within the same second."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def with_cuts(case: Case, name: str, folder: Path) -> Case:
    """Draw where 'split' cuts, of all that it allows."""
    if case.way == "modules" or case.at is not None:
        return case
    nets = written(case, name, folder)
    program = trace(network_spec(case, nets))
    places: dict[int, str] = {}
    for cut in program.cuts.values():
        if cut.reason is None:
            places.setdefault(cut.position, cut.name)
    dice = random.Random(case.seed)
    count = min(case.modules - 1, len(places))
    if not count:
        return case  # 'split' says so
    chosen = sorted(dice.sample(sorted(places), count))
    return replace(case, at=tuple(places[one] for one in chosen))


def network_spec(case: Case, nets: ModuleType) -> Any:
    """Return the network as 'split' describes it."""
    from dni_runtime.data import describe, with_defaults
    from dni_runtime.spec import DataSpec
    from dni_runtime.split.network import network_of

    base = Path(nets.__file__ or "").parent
    info = describe(with_defaults(DataSpec.model_validate(nets.DATA), base), base)
    returns = {"tensor": None, "dict": "logits"}.get(case.returns, "0")
    target = f"{nets.__name__}:{'build' if case.way == 'function' else 'Net'}"
    return network_of(target, info, args={}, returns=returns)[0]


def chain_of(case: Case, nets: ModuleType, folder: Path) -> Chain:
    """Make the chain as the user does; replicas are written into its file."""
    path = folder / "chain.yaml"
    path.unlink(missing_ok=True)
    chain: Chain = nets.chain(path)
    if case.replicas > 1:
        document = yaml.safe_load(path.read_text("utf-8"))
        for module in document["modules"]:
            module["replicas"] = case.replicas
        document["replication"] = {"strategy": "all-reduce"}
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        chain = Chain(path)
    return chain


def batches_of(case: Case, nets: ModuleType, drop_last: bool) -> list[Batch]:
    """Return the batches of an epoch."""
    data, ends = nets.Data(train=True), range(0, case.samples, case.batch)
    found = [(data.x[i : i + case.batch], data.y[i : i + case.batch]) for i in ends]
    return [one for one in found if len(one[1]) == case.batch or not drop_last]


class OneProcess(LocalChain):
    """A chain that says when it waits for ever."""

    def _deliver(self) -> None:
        self.rounds += 1
        if self.rounds > ROUNDS:
            waits = [step.spec.module for step in self.steps if step.blocked]
            raise Stalled(f"{waits} wait for a gradient that never comes")
        super()._deliver()

    def train_batch(self, x: Any, y_BY: Tensor) -> float:
        self.rounds = 0
        return super().train_batch(x, y_BY)


def trained_chain(
    case: Case, nets: ModuleType, prepared: CheckedChain, folder: Path
) -> tuple[Trained, Layout]:
    """Train a chain in one process, each module with all that its worker would have of it."""
    root = folder / f"run-{random.random()}"
    create_run(root, prepared, backend="process")
    record = Record.read(root)
    chain, workers = record.specs()
    every = workers_of(workers)
    names = [worker.module for worker in workers]
    replicas = [
        [one for one in every if one.replica == number + 1] for number in range(case.replicas)
    ]
    own = [
        [  # in one process a replica's neighbours are those of its own number
            one.model_copy(update={"module": name})
            for one, name in zip(replica, names, strict=True)
        ]
        for replica in replicas
    ]
    chains = [OneProcess(replica) for replica in own]
    for one in chains:
        for step in one.steps:
            if step.spec.initial:
                step.load_initial(record.run.initial(step.spec.module))
    layout = _layout(case, chains[0], nets, chain.data.drop_last)
    trained, number = Trained(), 0
    test = nets.Data(train=False)
    for _ in range(case.epochs):
        for x, y in batches_of(case, nets, layout.drop_last):
            current = chains[number % case.replicas]
            trained.losses.append(float(current.train_batch(x, y)))
            number += 1
            if case.replicas > 1 and number % case.replicas == 0:
                for steps in zip(*(one.steps for one in chains), strict=True):
                    share(steps, number)
            if number == case.restart:
                _write(record, chains, number)
                chains = [_restored(record, own[0], number)]
        for one in chains:
            one.end_epoch()
        trained.evaluated.append(chains[0].predict(test.x))
    _write(record, chains, number + 1)
    checkpointed, cut = Checkpointed(record), number + 1
    whole = checkpointed.model(cut)
    with torch.no_grad():
        trained.evaluated.append(whole(test.x))
    if case.way == "modules":
        trained.state = {_own_name(nets, key): one for key, one in whole.state_dict().items()}
    else:
        trained.state = checkpointed.state_dict(cut)
    return trained, layout


def _write(record: Record, chains: Sequence[LocalChain], cut: int) -> None:
    names = iter(record.modules)
    for steps in zip(*(one.steps for one in chains), strict=True):
        for step in steps:
            before = torch.get_rng_state()
            torch.set_rng_state(step.random_state)
            tensors, document = copy_state(step)
            torch.set_rng_state(before)
            write_part(record.run, next(names), (tensors, document | {"cut": cut}))


def _restored(record: Record, workers: Sequence[WorkerSpec], cut: int) -> LocalChain:
    chain = OneProcess(workers)
    before = torch.get_rng_state()
    for step in chain.steps:
        restore(step, *read(record.run.checkpoint(cut, step.spec.module)))
        step.random_state = torch.get_rng_state()
    torch.set_rng_state(before)
    return chain


def _layout(case: Case, chain: LocalChain, nets: ModuleType, drop_last: bool) -> Layout:
    owners: dict[str, int] = {}
    for index, step in enumerate(chain.steps):
        for key in step.layers.state_dict():
            name = key.removeprefix("0.network.")
            if case.way == "modules":
                name = _own_name(nets, f"{step.spec.module}.{key}")
            owners.setdefault(name, index)
    states = [step.random_state.clone() for step in chain.steps]
    return Layout(owners, states, case.at or (), drop_last)


def _own_name(nets: ModuleType, key: str) -> str:
    """Return the user's name of a tensor: in a chain a module is a list of layers."""
    name, _, rest = key.partition(".")
    if type(_modules(nets)[name]) is not nn.Sequential:
        rest = rest.removeprefix("0.")
    return f"{name}.{rest}"


def _modules(nets: ModuleType) -> dict[str, nn.Module]:
    found = getattr(nets, "_built", None)
    if found is None:
        found = nets._built = nets.build()
    return found


class Connected(nn.Module):
    """Modules one after the other; the last may take the first one's output, too."""

    def __init__(self, modules: Mapping[str, nn.Module], skips: bool) -> None:
        super().__init__()
        self._skips = skips
        self.after: Callable[[], None] = lambda: None
        for name, one in modules.items():
            self.add_module(name, one)

    def forward(self, x: Tensor) -> Tensor:
        *before, last = self._modules.values()  # one may be there twice
        outputs: list[Tensor] = []
        for one in before:
            x = one(x.clone())  # a module leaves its input as it is
            self.after()
            outputs.append(x)
        if not self._skips:
            return last(x.clone())
        assert isinstance(last, nn.Sequential)
        x = outputs[-1] + outputs[0]
        for layer in list(last)[1:]:
            x = layer(x)
        return x


def plain_network(case: Case, nets: ModuleType) -> nn.Module:
    """Return the user's network as it is before training."""
    if case.way != "modules":
        return nets.build()
    return Connected(nets.build(), any(kind == "skip" for kind, _, _ in case.wires))


def trained_plainly(case: Case, nets: ModuleType, layout: Layout, rounded: int = 0) -> Trained:
    """Train the user's network by a loop that has nothing of the runtime's.

    With ``rounded``, a seed, its weights are first changed by what is like rounding.
    """
    net = plain_network(case, nets)
    dice = torch.Generator().manual_seed(rounded)
    for one in net.parameters() if rounded else ():
        some = 8 * torch.finfo(one.dtype).eps * torch.randn(one.shape, generator=dice)
        one.data *= 1 + some.to(one.dtype)
    replicas = [net, *(copy.deepcopy(net) for _ in range(case.replicas - 1))]
    trainer = _Trainer(case, net, layout)
    draws = _Draws(case, net, layout)
    trained, number = Trained(), 0
    test = nets.Data(train=False)
    for _ in range(case.epochs):
        for x, y in batches_of(case, nets, layout.drop_last):
            own = replicas[number % case.replicas]
            number += 1
            outputs = torch.cat([draws.forward(own, part, case) for part in _parts(case, x)])
            loss = loss_of(case, outputs, y)
            if loss.requires_grad:  # nothing is trained otherwise
                loss.backward()
            trained.losses.append(float(loss.detach()))
            if case.replicas == 1:
                trainer.batch()
            elif number % case.replicas == 0:
                _reduce(replicas)
                trainer.batch()
                _spread(replicas)
        trainer.end_epoch()
        trained.evaluated.append(evaluated(trainer.averaged, test.x, case))
    trained.evaluated.append(evaluated(trainer.averaged, test.x, case))
    trained.state = {
        key: one.detach().clone() for key, one in trainer.averaged.state_dict().items()
    }
    return trained


def _parts(case: Case, x: Tensor) -> list[Tensor]:
    """Cut a batch as micro-batches are: none of one sample, over which nothing is normalised."""
    count, samples = case.micro_batches, len(x)
    if count == 1:
        return [x]
    size = max(-(-samples // count), min(samples, 2))
    parts = list(x.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def loss_of(case: Case, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a whole batch."""
    given = case.settings["loss"]
    name, args = (given, {}) if isinstance(given, str) else next(iter(given.items()))
    args = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in args.items()}
    if case.labels == "each":
        outputs = outputs.transpose(1, 2)
    return getattr(nn, name)(**args)(outputs, y)


def result_of(case: Case, result: Any) -> Tensor:
    """Return the scores of what a network returns."""
    return result if case.returns == "tensor" else result["logits" if case.returns == "dict" else 0]


def evaluated(net: nn.Module, x: Tensor, case: Case) -> Tensor:
    """Return the scores in eval mode; modules are in the same modes as before after that."""
    modes = [(one, one.training) for one in net.modules()]
    net.eval()
    with torch.no_grad():
        found = result_of(case, net(x.clone()))
    for one, mode in modes:
        one.training = mode
    return found


class _Draws:
    """Forward passes in which each module of the chain draws its own random numbers."""

    def __init__(self, case: Case, net: nn.Module, layout: Layout) -> None:
        self.states = [one.clone() for one in layout.random_states]
        self.now, self.running = 0, False
        if "draws" not in case.tags:
            return
        if case.way == "modules":
            assert isinstance(net, Connected)
            net.after = self.next
            return
        for name in layout.ends:
            net.get_submodule(name).register_forward_hook(self.next)

    def next(self, *_: Any) -> None:
        if not self.running:
            return
        self.states[self.now] = torch.get_rng_state()
        self.now = min(self.now + 1, len(self.states) - 1)
        torch.set_rng_state(self.states[self.now])

    def forward(self, net: nn.Module, x: Tensor, case: Case) -> Tensor:
        before, self.now = torch.get_rng_state(), 0
        torch.set_rng_state(self.states[0])
        self.running = True
        found = result_of(case, net(x.clone()))
        self.running = False
        self.states[self.now] = torch.get_rng_state()
        torch.set_rng_state(before)
        return found


class _Trainer:
    """Gradients to weights, as a training loop does it."""

    def __init__(self, case: Case, net: nn.Module, layout: Layout) -> None:
        self.case, self.net = case, net
        self.trained = [one for one in net.parameters() if one.requires_grad]
        groups: dict[int, list[nn.Parameter]] = {}
        for name, one in net.named_parameters():
            if one.requires_grad:
                groups.setdefault(layout.owners.get(name, 0), []).append(one)
        self.groups = list(groups.values())
        self.owners, self.moving = layout.owners, set(groups)
        (name, args), defaults = next(iter(case.defaults["optimizer"].items())), case.defaults
        self.optimizer = self.schedule = None
        if self.trained:
            self.optimizer = getattr(torch.optim, name)(self.trained, **args)
            if "schedule" in defaults:
                name, args = next(iter(defaults["schedule"].items()))
                self.schedule = getattr(torch.optim.lr_scheduler, name)(self.optimizer, **args)
        self.gathered = 0
        self.average = copy.deepcopy(net) if "ema" in defaults else None
        self.updates = 0

    @property
    def averaged(self) -> nn.Module:
        """The network that is evaluated."""
        if self.average is None:
            return self.net
        own = self.net.state_dict()
        for key, value in self.average.state_dict().items():
            if self.owners.get(key) not in self.moving:  # nothing to average
                value.copy_(own[key])
        return self.average

    def batch(self) -> None:
        defaults = self.case.defaults
        self.gathered += 1
        if self.gathered == defaults.get("accumulate", 1):
            for one in self.trained:
                if one.grad is not None:
                    one.grad /= self.gathered
            self.update()
        if self.schedule is not None and defaults["schedule_every"] == "batch":
            self.schedule.step()

    def update(self) -> None:
        clip = self.case.defaults.get("clip", {})
        for group in self.groups:  # each module clips its own
            if "norm" in clip:
                nn.utils.clip_grad_norm_(group, clip["norm"])
            if "value" in clip:
                # torch 2.13 fails where none has a gradient
                group = [one for one in group if one.grad is not None]
                if group:
                    nn.utils.clip_grad_value_(group, clip["value"])
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.gathered = 0
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        if self.average is None:
            return
        decay = self.case.defaults["ema"] if self.updates else 0.0
        self.updates += 1
        for value, own in zip(self.average.parameters(), self.net.parameters(), strict=True):
            value.copy_(decay * value + (1 - decay) * own if self.updates > 1 else own)
        buffers = dict(self.average.named_buffers()), dict(self.net.named_buffers())
        for key, value in buffers[0].items():
            value.copy_(buffers[1][key])

    def end_epoch(self) -> None:
        if self.schedule is not None and self.case.defaults["schedule_every"] == "epoch":
            self.schedule.step()


@torch.no_grad()
def _reduce(replicas: Sequence[nn.Module]) -> None:
    """Give the first network the mean of all gradients."""
    for every in zip(*(one.parameters() for one in replicas), strict=True):
        found = [one.grad for one in every if one.grad is not None]
        if found:
            every[0].grad = torch.stack(found).sum(0) / len(replicas)
    for one in replicas[1:]:
        one.zero_grad()
    for every in zip(*(dict(one.named_buffers()).values() for one in replicas), strict=True):
        if every[0].is_floating_point():
            mean = torch.stack(list(every)).mean(0)
            for one in every:
                one.copy_(mean)


@torch.no_grad()
def _spread(replicas: Sequence[nn.Module]) -> None:
    """Give all networks the first one's weights."""
    for every in zip(*(one.parameters() for one in replicas), strict=True):
        for one in every[1:]:
            one.copy_(every[0])


def compared(case: Case, found: Trained, wanted: Trained, near: Sequence[Trained] = ()) -> Outcome:
    """Compare what two trainings have made.

    Where losses and evaluations of trainings from weights that are ``near`` differ as much, it is
    rounding; the state must be equal in any case.
    """
    missing, more = set(wanted.state) - set(found.state), set(found.state) - set(wanted.state)
    if missing or more:
        text = f"names: {sorted(missing)} are missing, {sorted(more)} are too many"
        return Outcome(case, "different", text)
    pairs, others = found.named(), [one.named() for one in near]
    rough = "halved" in case.blocks
    absolute, relative = ROUGH if rough else ROUNDING
    apart, worst = 0.0, ""
    for name, other in wanted.named().items():
        one = pairs[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            text = f"{name} is {one.dtype}{list(one.shape)}, not {other.dtype}{list(other.shape)}"
            return Outcome(case, "different", text)
        if not one.numel():
            continue
        kind = torch.complex128 if one.is_complex() else torch.float64
        one, other = one.detach().to(kind), other.detach().to(kind)
        close = [float((every[name].detach().to(kind) - other).abs().max()) for every in others]
        if not torch.isfinite(other.abs()).all():
            if not torch.allclose(one, other, equal_nan=True):
                return Outcome(case, "different", f"{name} is not finite in the same places")
            continue
        far = float((one - other).abs().max())
        allowed = absolute + relative * float(other.abs().max())
        if not name.startswith("state"):  # they follow from it
            allowed += 16 * max(close, default=0.0)
        if not far <= allowed and not worst:
            worst = f"{name} differs by {far:.1e}"
        apart = max(apart, far)
    return Outcome(case, "different" if worst else "equal", worst, apart)
