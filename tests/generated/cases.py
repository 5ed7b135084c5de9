"""Networks, data and chains that a seed draws, and the file of each, as a user would write it."""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pprint import pformat
from typing import Any, NamedTuple

from tests.generated import blocks

SIZE, TOKENS, WORDS, SIDE, CHANNELS, CLASSES, FEATURES = 8, 5, 11, 4, 4, 3, 6


class Block(NamedTuple):
    """A block of a network.

    Its tags say what equality depends on: ``norm`` (of the batch), ``draws`` random numbers,
    ``sparse`` gradients, ``complex`` or ``rough`` numbers, ``state`` that forward changes and uses;
    ``eval`` (it may be in eval mode on its own).
    """

    made: str  # what makes it
    kinds: str = "vsm"  # where it may be: in v vectors, s sequences, m maps
    tags: str = ""


def _of_size(name: str, kinds: str = "vs", tags: str = "", more: str = "") -> Block:
    return Block(f"{name}({SIZE}{more})", kinds, tags)


BLOCKS = {
    "linear": Block(f"nn.Linear({SIZE}, {SIZE})", "vs"),
    "linear-no-bias": Block(f"nn.Linear({SIZE}, {SIZE}, bias=False)", "vs"),
    "mlp": Block(
        f"nn.Sequential(nn.Linear({SIZE}, 6), nn.GELU(), nn.Linear(6, {SIZE}), nn.Tanh())", "vs"
    ),
    "relu": Block("nn.ReLU()"),
    "relu-in-place": Block("nn.ReLU(inplace=True)"),
    "gelu": Block("nn.GELU()"),
    "dropout-0": Block("nn.Dropout(0.0)"),
    "dropout": Block("nn.Dropout(0.3)", tags="draws"),
    "drops": Block("Drops()", tags="draws"),
    "noise": Block("Noise()", tags="draws"),
    "layer-norm": Block(f"nn.LayerNorm({SIZE})", "vs"),
    "group-norm": Block(f"nn.GroupNorm(2, {SIZE})", "v"),
    "group-norm-maps": Block(f"nn.GroupNorm(2, {CHANNELS})", "m"),
    "batch-norm": Block(f"nn.BatchNorm1d({SIZE})", "v", "norm eval"),
    "batch-norm-mean": Block(f"nn.BatchNorm1d({SIZE}, momentum=None)", "v", "norm eval"),
    "batch-norm-bare": Block(f"nn.BatchNorm1d({SIZE}, affine=False)", "v", "norm eval"),
    "batch-norm-maps": Block(f"nn.BatchNorm2d({CHANNELS})", "m", "norm eval"),
    "instance-norm": Block(f"nn.InstanceNorm2d({CHANNELS}, affine=True)", "m"),
    "conv": Block(f"nn.Conv2d({CHANNELS}, {CHANNELS}, 3, padding=1)", "m"),
    "conv-depthwise": Block(f"nn.Conv2d({CHANNELS}, {CHANNELS}, 3, padding=1, groups=2)", "m"),
    "residual": Block(f"Residual({CHANNELS})", "m", "norm"),
    "squeeze": Block(f"Squeeze({CHANNELS})", "m"),
    "whole-maps": Block(f"WholeMaps({CHANNELS})", "m"),
    "replaced": _of_size("Replaced", tags="state norm eval"),
    "watched": _of_size("Watched", tags="state norm eval"),
    "decorated": _of_size("Decorated", tags="state norm"),
    "codebook": _of_size("Codebook", tags="state norm"),
    "rounded": Block("Rounded()", tags="rough"),
    "signs": Block("Signs()", tags="rough"),
    "reversal": Block("Reversal()"),
    "in-place": _of_size("InPlace"),
    "changes-input": _of_size("ChangesInput"),
    "plain": _of_size("Plain"),
    "positions": Block(f"Positions({TOKENS}, {SIZE})", "s"),
    "doubled": _of_size("Doubled"),
    "halved": _of_size("Halved", tags="rough"),
    "recomputed": _of_size("Recomputed"),
    "side": _of_size("Side"),
    "extractor": _of_size("Extractor"),
    "severed": _of_size("Severed", tags="severed"),
    "adapted": _of_size("Adapted"),
    "twice": _of_size("Twice"),
    "alike": _of_size("Alike"),
    "weight-norm": _of_size("Normed", more=", 'weight'"),
    "spectral-norm": _of_size("Normed", tags="state norm", more=", 'spectral'"),
    "spectral-norm-old": _of_size("Normed", tags="state norm", more=", 'old-spectral'"),
    "orthogonal": _of_size("Normed", more=", 'orthogonal'"),
    "weight-norm-bare": Block(
        f"nn.utils.parametrizations.weight_norm(nn.Linear({SIZE}, {SIZE}))", "vs", "bare"
    ),
    "spectrum": _of_size("Spectrum", tags="complex"),
    "mixture": _of_size("Mixture", tags="rough"),
    "branches": _of_size("Branches"),
    "rolled": _of_size("Rolled"),
    "written": _of_size("Written"),
    "lstm": _of_size("Recurs", "s"),
    "gru": _of_size("Recurs", "s", more=", 'GRU'"),
    "attends": _of_size("Attends", "s"),
    "attends-both": _of_size("Attends", "s", more=", False"),
    "masked": Block(f"Masked({TOKENS}, {SIZE})", "s"),
    "multihead": _of_size("Multihead", "s"),
    "multihead-weights": _of_size("Multihead", "s", more=", True"),
    "encoder": Block(
        f"nn.TransformerEncoderLayer({SIZE}, 2, 12, dropout=0.0, batch_first=True)", "s"
    ),
    "encoder-drops": Block(
        f"nn.TransformerEncoderLayer({SIZE}, 2, 12, dropout=0.2, batch_first=True)", "s", "draws"
    ),
    "time-first": _of_size("TimeFirst", "s"),
    "along-time": _of_size("AlongTime", "s"),
}
STEMS = {
    "v": {"features": f"nn.Linear({FEATURES}, {SIZE})"},
    "s": {
        "words": f"nn.Embedding({WORDS}, {SIZE})",
        "words-padded": f"nn.Embedding({WORDS}, {SIZE}, padding_idx=0)",
        "words-sparse": f"nn.Embedding({WORDS}, {SIZE}, sparse=True)",
    },
    "b": {"bag-sparse": f"nn.EmbeddingBag({WORDS}, {SIZE}, mode='mean', sparse=True)"},
    "m": {"pixels": f"nn.Conv2d(2, {CHANNELS}, 3, padding=1)"},
}
ENDS = {
    "v": ("classes", "numbers"),
    "s": ("each", "classes"),
    "b": ("classes",),
    "m": ("classes", "numbers"),
}
NAMES = "abcdefgh"


@dataclass(frozen=True)
class Case:
    """A network, its data, and the chain that it becomes.

    Its ``wires`` are what is not a sequence: ``skip``, ``again`` and ``tie`` of two blocks; in
    ``modules``, ``skip`` of two modules.
    """

    seed: int  # of weights and data
    way: str  # "function" or "network" (that 'split' is given), or "modules"
    stem: str  # the first block
    blocks: tuple[str, ...]  # between the stem and the last
    labels: str  # "classes" of samples, of "each" token, or "numbers"
    begins: tuple[int, ...] = ()  # blocks with which a module begins, for "modules"
    modules: int = 2  # that 'split' makes
    at: tuple[str, ...] | None = None  # where 'split' cuts; None: drawn from what can be cut
    wires: tuple[tuple[str, int, int], ...] = ()
    frozen: tuple[int, ...] = ()  # blocks whose parameters are frozen
    still: tuple[int, ...] = ()  # blocks in eval mode
    returns: str = "tensor"  # "tensor", "tuple", "list" or "dict"
    ignored: bool = False  # some labels are ignored
    batch: int = 4  # samples
    samples: int = 12  # in an epoch
    epochs: int = 1
    replicas: int = 1  # of each module
    restart: int = 0  # batches after which all workers restart; 0: never
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the chain file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of all modules
    double: bool = False  # it computes in float64

    @property
    def kind(self) -> str:
        """What the network gets: ``v``, ``s``, ``b`` (a bag of words) or ``m``."""
        return next(kind for kind, stems in STEMS.items() if self.stem in stems)

    @property
    def tags(self) -> set[str]:
        """What its blocks are."""
        found = {tag for name in self.blocks for tag in BLOCKS[name].tags.split()}
        return found | ({"sparse"} if "sparse" in self.stem else set())

    @property
    def elements(self) -> set[str]:
        """All that it has, for counting and for reasons of refusals."""
        found = {self.way, self.stem, self.labels, self.returns, *self.blocks}
        found |= {kind for kind, _, _ in self.wires} | set(self.defaults) | set(self.settings)
        for name in ("frozen", "still", "ignored", "restart"):
            if getattr(self, name):
                found.add(name)
        if self.frozen == tuple(range(len(self.blocks) + 2)):
            found.add("all frozen")
        if self.replicas > 1:
            found.add("replicas")
        if self.samples % self.batch:
            found.add("unequal batches")
        if self.micro_batches > 1:
            found.add("micro-batches")
        return found

    @property
    def micro_batches(self) -> int:
        """Parts of each batch."""
        interface = self.defaults["interface"]
        options = {} if isinstance(interface, str) else next(iter(interface.values()))
        return int(options.get("micro_batches", 1))

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Case:
        """Read it from text."""

        def tuples(value: Any) -> Any:
            return tuple(map(tuples, value)) if isinstance(value, list) else value

        document = json.loads(text)
        own = {"settings": document.pop("settings"), "defaults": document.pop("defaults")}
        return cls(**{key: tuples(value) for key, value in document.items()}, **own)


def draw(seed: int) -> Case:
    """Draw a case; the same for the same seed."""
    dice = random.Random(seed)

    def often(share: float) -> bool:
        return dice.random() < share

    way = dice.choice(["modules", "modules", "function", "network"])
    kind = dice.choice("vvvsssbm")
    stem = dice.choice(sorted(STEMS[kind]))
    labels = dice.choice(ENDS[kind])
    inner = {"b": "v"}.get(kind, kind)
    fitting = sorted(name for name, one in BLOCKS.items() if inner in one.kinds)
    count = dice.randint(1, 6 if way == "modules" else 4)
    if way == "modules" and not often(0.2):
        fitting = [name for name in fitting if "bare" not in BLOCKS[name].tags]
    chosen = tuple(dice.choice(fitting) for _ in range(count))
    every = count + 2  # with the stem and the end
    modules = dice.randint(2, min(5, every))
    begins = tuple(sorted(dice.sample(range(1, every), modules - 1)))
    wires: list[tuple[str, int, int]] = []
    if way == "modules":
        if modules > 2 and often(0.25):
            wires.append(("skip", 0, modules - 2))
        if count > 1 and often(0.04):
            wires.append(("again", *sorted(dice.sample(range(1, every - 1), 2))))
    else:
        if often(0.3):
            wires.append(("skip", *sorted(dice.sample(range(every - 1), 2))))
        if count > 1 and often(0.2):
            wires.append(("again", *sorted(dice.sample(range(1, every - 1), 2))))
        linear = [number + 1 for number, name in enumerate(chosen) if name.startswith("linear")]
        if len(linear) > 1 and often(0.7):
            wires.append(("tie", *sorted(dice.sample(linear, 2))))
    frozen: tuple[int, ...] = ()
    if often(0.2):
        frozen = tuple(sorted(dice.sample(range(every), dice.randint(1, 2))))
    still = tuple(
        number + 1
        for number, name in enumerate(chosen)
        if "eval" in BLOCKS[name].tags and often(0.1)
    )
    returns = "tensor"
    if way != "modules" and often(0.25):
        returns = dice.choice(["tuple", "list", "dict"])
    case = Case(
        seed=seed,
        way=way,
        stem=stem,
        blocks=chosen,
        labels=labels,
        begins=begins,
        modules=modules,
        wires=tuple(wires),
        frozen=frozen,
        still=still,
        returns=returns,
        ignored=labels != "numbers" and often(0.3),
        batch=dice.choice([4, 5, 6, 8]),
        epochs=dice.randint(1, 2),
    )
    tags = case.tags
    optimizers: list[Any] = [{"SGD": {"lr": 0.1}}]
    if "sparse" not in tags:
        optimizers += [
            {"SGD": {"lr": 0.05, "momentum": 0.9}},
            {"SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
            {"AdamW": {"lr": 0.02, "eps": 0.001}},
            {"Adam": {"lr": 0.02, "eps": 0.001, "weight_decay": 0.01}},
            {"RMSprop": {"lr": 0.01, "eps": 0.01}},
        ]
        if "complex" in tags:
            del optimizers[-1]
    defaults: dict[str, Any] = {"optimizer": dice.choice(optimizers)}
    interfaces: list[Any] = [
        "exact",
        "exact",
        "delayed",
        {"delayed": {"keep": "input"}},
        {"delayed": {"keep": "graph"}},
        {"delayed": {"max_late": 1, "predict": True}},
    ]
    replicas, parts = 1, 1
    if "draws" not in tags and often(0.12):
        replicas = dice.randint(2, 3)
        defaults["interface"] = dice.choice(interfaces[2:5])
    elif often(0.35):
        parts = dice.randint(2, case.batch // 2)
        defaults["interface"] = {dice.choice(["exact", "delayed"]): {"micro_batches": parts}}
    else:
        defaults["interface"] = dice.choice(interfaces)
    if replicas == 1 and often(0.2):
        defaults["accumulate"] = dice.randint(2, 3)
    if "sparse" not in tags and often(0.2):
        clips: list[Any] = [{"norm": 0.05}]
        if "complex" not in tags:
            clips.append({"value": 0.01})
        defaults["clip"] = dice.choice(clips)
    if often(0.2):
        defaults["ema"] = dice.choice([0.5, 0.9])
    if often(0.2):
        defaults["schedule"] = dice.choice(
            [
                {"StepLR": {"step_size": 1, "gamma": 0.5}},
                {"LinearLR": {"start_factor": 0.25, "total_iters": 3}},
                {"CosineAnnealingLR": {"T_max": 4}},
            ]
        )
        defaults["schedule_every"] = dice.choice(["batch", "epoch"])
    if "state" in tags and defaults["interface"] == {"delayed": {"keep": "input"}}:
        defaults["interface"] = "delayed"  # such a pass is not the same when it is computed again
    batches = replicas * dice.randint(1, 2) if replicas > 1 else dice.randint(2, 4)
    rest = dice.randint(2, case.batch - 1) if replicas == 1 and often(0.3) else 0
    samples = case.batch * batches + rest
    steps = (batches + bool(rest)) * case.epochs
    return replace(
        case,
        samples=samples,
        replicas=replicas,
        restart=dice.randint(1, steps - 1) if replicas == 1 and steps > 1 and often(0.3) else 0,
        settings={"loss": _loss(dice, labels), "seed": seed % 1000},
        defaults=defaults,
    )


def _loss(dice: random.Random, labels: str) -> Any:
    if labels == "numbers":
        return dice.choice(["MSELoss", "SmoothL1Loss"])
    args: dict[str, Any] = {}
    if dice.random() < 0.3:
        args["weight"] = [0.5, 1.0, 2.0]
    if dice.random() < 0.2:
        args["label_smoothing"] = 0.1
    return {"CrossEntropyLoss": args} if args else "CrossEntropyLoss"


def simpler(case: Case) -> Iterator[Case]:
    """Yield what is left of a case without each one of its elements."""
    for name, none in (("restart", 0), ("replicas", 1), ("epochs", 1), ("returns", "tensor")):
        if getattr(case, name) != none:
            yield replace(case, **{name: none})
    for name in ("wires", "frozen", "still"):
        for number in range(len(getattr(case, name))):
            left = list(getattr(case, name))
            del left[number]
            yield replace(case, **{name: tuple(left)})
    for number in range(len(case.blocks)):
        at = number + 1  # the stem is block 0

        def moved(one: int, at: int = at) -> int:
            return one - (one > at)

        wires = case.wires
        if case.way != "modules":
            if any(at in wire[1:] for wire in wires):
                continue
            wires = tuple((kind, moved(i), moved(j)) for kind, i, j in wires)
        yield replace(
            case,
            blocks=case.blocks[:number] + case.blocks[at:],
            begins=tuple(sorted({max(1, moved(one)) for one in case.begins})),
            wires=wires,
            frozen=tuple(moved(one) for one in case.frozen if one != at),
            still=tuple(moved(one) for one in case.still if one != at),
            at=None,
        )
    for number in range(len(case.begins)) if len(case.begins) > 1 else ():
        if not any(kind == "skip" for kind, _, _ in case.wires):
            begins = case.begins[:number] + case.begins[number + 1 :]
            yield replace(case, begins=begins, modules=len(begins) + 1)
    if case.way != "modules" and case.modules > 2:
        yield replace(case, modules=case.modules - 1, at=None)
    for key in set(case.defaults) - {"interface", "optimizer", "schedule_every"}:
        yield replace(case, defaults={k: v for k, v in case.defaults.items() if k != key})
    plain = {"interface": "exact", "optimizer": {"SGD": {"lr": 0.1}}}
    for key, value in plain.items():
        if case.defaults[key] != value:
            yield replace(case, defaults={**case.defaults, key: value})
    loss = "MSELoss" if case.labels == "numbers" else "CrossEntropyLoss"
    if case.settings["loss"] != loss:
        yield replace(case, settings={**case.settings, "loss": loss})
    if case.ignored:
        yield replace(case, ignored=False)
    if case.samples % case.batch:
        yield replace(case, samples=case.samples - case.samples % case.batch)
    if case.samples > case.batch and case.replicas == 1:
        yield replace(case, samples=case.batch, restart=0)


def source(case: Case) -> str:
    """Return a Python file: the network, its data, and the chain."""
    stem = STEMS[case.kind][case.stem]
    if case.double and case.kind in "vm":
        stem = f"nn.Sequential(Double(), {stem})"
    made = [stem, *(BLOCKS[name].made for name in case.blocks)]
    vector = case.kind in "vb" or case.labels == "each"
    if not vector:
        made.append("MeanOfTokens()" if case.kind == "s" else "MeanOfMaps()")
    width = CHANNELS if case.kind == "m" else SIZE
    top = f"nn.Linear({width}, {2 if case.labels == 'numbers' else CLASSES})"
    text = f"{_HEAD}\n\n{_used([*made, top])}{_data(case)}\n\n\n"
    ends = [f"b{number}" for number in range(len(made))] + ["top"]
    if case.way == "modules":
        text += _modules(case, [*made, top], ends)
    else:
        text += _network(case, [*made, top], ends)
    settings = pformat({**case.settings, "defaults": dict(case.defaults)}, sort_dicts=False)
    call = f"data=DATA, path=path, epochs={case.epochs}, **SETTINGS)"
    if case.way == "modules":
        made_by = f"Chain.from_modules(build(), {_inputs(case)}{call}"
    else:
        target = '"{}:build".format(__name__)' if case.way == "function" else "build()"
        returns = {"tensor": "", "dict": 'returns="logits", '}.get(case.returns, 'returns="0", ')
        at = f"modules={case.modules}" if case.at is None else f"at={list(case.at)}"
        made_by = f"Chain.split({target}, {at}, {returns}{call}"
    text += f"""

SETTINGS = {settings}
DATA = {{"dataset": "{{}}:Data".format(__name__), "batch_size": {case.batch}}}


def chain(path="chain.yaml"):
    from dni_runtime import Chain

    return {made_by}
"""
    return text


_HEAD = """\
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint"""


def _used(made: list[str]) -> str:
    """Return the source of the classes that a network has."""
    found: dict[str, str] = {}
    own = (one for one in vars(blocks).items() if inspect.isclass(one[1]))
    classes = {name: one for name, one in own if one.__module__ == blocks.__name__}

    def add(text: str) -> None:
        for name, one in classes.items():
            if name not in found and re.search(rf"(?<![.\w]){name}[(.]", text):
                found[name] = ""
                own = inspect.getsource(one)
                add(own.partition("\n")[2])
                del found[name]  # after what it uses
                found[name] = own

    for one in made:
        add(one)
    return "".join(f"\n{one.rstrip()}\n\n" for one in found.values()) + "\n"


def _data(case: Case) -> str:
    shape, number = (
        "samples",
        {"v": f"torch.randn(samples, {FEATURES}, generator=draw, dtype=torch.float32)"},
    )
    number["m"] = f"torch.randn(samples, 2, {SIDE}, {SIDE}, generator=draw, dtype=torch.float32)"
    words = f"torch.randint(0, {WORDS}, (samples, {TOKENS}), generator=draw)"
    if case.labels == "each":
        shape = f"samples, {TOKENS}"
    label = f"torch.randint(0, {CLASSES}, ({shape},), generator=draw)"
    if case.labels == "numbers":
        label = "torch.randn(samples, 2, generator=draw, dtype=torch.float32)"
    ignored = classes = ""
    if case.ignored:
        ignored = f"""
        ignored = torch.rand({shape}, generator=draw) < 0.4
        ignored[:: {case.batch}] = False  # some label of each batch counts
        self.y[ignored] = -100"""
    if case.labels != "numbers":
        classes = f"\n    num_classes = {CLASSES}\n"
    return f"""
class Data(torch.utils.data.Dataset):{classes}
    def __init__(self, train):
        draw = torch.Generator().manual_seed({2 * case.seed} + train)
        samples = {case.samples} if train else 8
        self.x = {number.get(case.kind, words)}
        self.y = {label}{ignored}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]"""


def _marks(case: Case, name: str) -> list[str]:
    """Return what is done with a block once the network is made."""
    number = int(name[1:]) if name != "top" else len(case.blocks) + 1
    found = []
    if number in case.frozen and not (name != "top" and number > len(case.blocks)):
        found.append("requires_grad_(False)")
    if number in case.still and name != "top":
        found.append("eval()")
    return found


def _network(case: Case, made: list[str], names: list[str]) -> str:
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        self.{name} = {one}" for name, one in zip(names, made, strict=True)]
    ties = [wire[1:] for wire in case.wires if wire[0] == "tie"]
    lines += [f"        self.b{j}.weight = self.b{i}.weight" for i, j in ties]
    if case.still:  # it stays in eval mode, whatever is trained
        lines += ["", "    def train(self, mode=True):", "        super().train(mode)"]
        lines += [f"        self.b{number}.eval()" for number in case.still]
        lines += ["        return self"]
    lines += ["", "    def forward(self, x):", "        h = x"]
    for name in names:
        lines.append(f"        h = self.{name}(h)")
        for kind, i, j in case.wires if name != "top" else ():
            number = int(name[1:])
            if kind == "skip" and number == i:
                lines.append(f"        skip{i} = h{'.clone()' if case.seed % 2 else ''}")
            if kind == "skip" and number == j:
                lines.append(f"        h = h + skip{i}")
            if kind == "again" and number == j:
                lines.append(f"        h = self.b{i}(h)")
    results = {"tuple": "h, x", "list": "[h, x]", "dict": '{"logits": h, "x": x}'}
    lines.append(f"        return {results.get(case.returns, 'h')}")
    lines += ["", "", "def build():", f"    torch.manual_seed({case.seed})", "    net = Net()"]
    for name in names:
        lines += [f"    net.{name}.{mark}" for mark in _marks(case, name)]
    return "\n".join([*lines, "    return net"]) + "\n"


def _modules(case: Case, made: list[str], names: list[str]) -> str:
    lines = ["def build():", f"    torch.manual_seed({case.seed})"]
    for name, one in zip(names, made, strict=True):
        lines.append(f"    {name} = {one}")
        lines += [f"    {name}.{mark}" for mark in _marks(case, name)]
    again = {j: i for kind, i, j in case.wires if kind == "again"}
    ends = [0, *case.begins, len(names)]
    join = {j + 1 for kind, _, j in case.wires if kind == "skip"}
    lines.append("    return {")
    for number, (first, end) in enumerate(pairwise(ends)):
        inside = [f"b{again[one]}" if one in again else names[one] for one in range(first, end)]
        if number in join:
            inside.insert(0, "Add()")
        whole = inside[0] if len(inside) == 1 else f"nn.Sequential({', '.join(inside)})"
        lines.append(f'        "{NAMES[number]}": {whole},')
    lines.append("    }\n")
    text = "\n".join(lines)
    return f"from dni_runtime.core.layers import Add\n\n\n{text}" if join else text


def _inputs(case: Case) -> str:
    skips = {NAMES[j + 1]: [NAMES[j], NAMES[i]] for kind, i, j in case.wires if kind == "skip"}
    return f"inputs={skips}, " if skips else ""
