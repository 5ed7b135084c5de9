"""What 'split' calls checked: a network that its parts do not compute is refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dni_runtime import Chain
from dni_runtime.core.chain import LocalChain
from dni_runtime.core.layers import tensors_of
from dni_runtime.errors import SpecError
from dni_runtime.plan.splitting import split_chain

SOURCE = '''\
import random
import warnings
import torch
from torch import nn


class Data(torch.utils.data.Dataset):
    num_classes = 3

    def __init__(self, train):
        self.x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.x[index], index % 3


class Net(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.last, self.scale = nn.Linear(8, 3), scale

    def middle(self, h):
        return self.drop(self.norm(h))

    def forward(self, x):
        return self.last(self.middle(self.first(x)).tanh()) * self.scale


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Passes(Net):
    """In eval mode what 'drop' gets is what passes, beside what the norm makes of it."""

    def __init__(self):
        super().__init__()
        self.turn, self.out = nn.Identity(), nn.Dropout()

    def forward(self, x):
        h = self.drop(self.first(x))
        return self.out(self.last(Turned.apply(self.norm(h) + h)))


class Rests(Net):
    """A norm that is always in eval mode, where it does not use all that it has."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class Tiny(Net):
    """Gradients that are small are compared, too."""

    def __init__(self):
        super().__init__(1e-9)

    def middle(self, h):
        h = super().middle(h)
        return h + (1 + random.random()) * (h - h.detach())  # which is zero, but its gradient


class Calls(Net):
    calls = 0

    def middle(self, h):
        self.calls += 1
        return h * self.calls


class Python(Net):
    def middle(self, h):
        return h * random.random()


class Skips(Net):
    """Both training steps take the path that is traced, nearly always."""

    def middle(self, h):
        return h if random.random() < 0.1 else self.norm(h)


class Lazy(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.LazyLinear(3)


class Scripted(Net):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            self.norm = torch.jit.script(self.norm)


class Named(Net):
    def forward(self, *, x):
        return super().forward(x)


class Statistic(Net):
    """A statistic that is wrong, beside large numbers that are no statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("mask", torch.full((8,), torch.finfo(torch.float32).min))
        self.register_buffer("calls", torch.full((), 10**9))

    def middle(self, h):
        with torch.no_grad():
            self.calls += 1
            self.seen += h.mean(0) * (1 + 0.01 * random.random())
        return h + self.mask.clamp(min=0) + self.calls.clamp(max=0)


class Imaginary(Net):
    """Half of a complex number is wrong."""

    def __init__(self):
        super().__init__()
        self.register_buffer("spun", torch.ones(8, dtype=torch.cfloat))

    def middle(self, h):
        with torch.no_grad():
            self.spun.mul_(torch.complex(torch.ones(8), torch.full((8,), random.random())))
            self.spun.real.fill_(1)
        return h


class Noise(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(8), persistent=False)

    def middle(self, h):
        return h + self.noise


class Crowd(Net):
    def middle(self, h):
        return -h if h.shape[0] > 3 else h


class Fourth(Net):
    def middle(self, h):
        return h + h[3] if h.shape[0] > 3 else h


class Alone(Net):
    def middle(self, h):
        return -h if h.shape[0] == 1 else h


class Several(Net):
    def middle(self, h):
        if not self.training and h.shape[0] == 1:
            raise ValueError("one sample has no neighbour")
        return -h if h.shape[0] == 40 else h


class Learners(Net):
    def middle(self, h):
        return -h if self.training and h.shape[0] > 20 else h


class Near(Net):
    def middle(self, h):
        return h + torch.cdist(h, h[:1])  # another way for more than 25 samples


class Late(Net):
    def middle(self, h):
        self.register_buffer("made", torch.full((8,), 0.5))
        return h + self.made


class Unseen(Net):
    """A parameter without a use in the trace, whose gradient is zero elsewhere: it decays."""

    def middle(self, h):
        return h if torch.compiler.is_exporting() else h + 0 * self.norm.weight


class Fails(Net):
    def middle(self, h):
        return h + (h.detach().numpy() if not torch.compiler.is_exporting() else 0)


class Unlearnt(Net):
    """The gradient of 'tanh' would not be right, but none comes there."""

    def middle(self, h):
        h = h.tanh()
        h += 1
        return self.norm(h).detach()


class Nothing(Net):
    def middle(self, h):
        return (h - h) / (h - h)


class Flips(Net):
    """Freezes a parameter when it runs, as some GANs do."""

    def middle(self, h):
        self.norm.weight.requires_grad = False
        return self.norm(h)


class Calm(Net):
    """Nothing is drawn."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Identity()


class Setting(Calm):
    """It runs in eval mode, and then in train mode again."""

    def middle(self, h):
        self.norm.requires_grad_(self.training)
        return self.norm(h)


class Still(Calm):
    """Its norm is frozen by 'train', as in object detection."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval().requires_grad_(False)
        return self


class Frozen(Calm):
    """Changes in place what no gradient needs: nothing before it is trained."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.norm.requires_grad_(False)

    def middle(self, h):
        return self.norm(h).tanh().relu_()


class Hooked(Calm):
    """Half of the gradient of a parameter, by both kinds of hooks."""

    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda g: g / 2)
        self.last.weight.register_post_accumulate_grad_hook(halve)


def halve(p):
    p.grad.div_(2)


class Filtered(Calm):
    """A complex parameter is used twice, and what is between can be a part of its own."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def middle(self, h):
        return self.filtered(self.more(self.filtered(self.norm(h))))

    def filtered(self, h):
        return torch.fft.irfft(torch.fft.rfft(h) * self.filter, n=8)


class Halved(Calm):
    """A layer of another type, whose values pass as they are."""

    dtype = torch.bfloat16

    def __init__(self):
        super().__init__()
        self.norm = nn.Linear(8, 8, dtype=self.dtype)

    def forward(self, x):
        return self.last(self.norm(self.first(x).to(self.dtype)).float().tanh())


class Doubled(Halved):
    dtype = torch.float64


class Bag(Calm):
    """A layer with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.EmbeddingBag(8, 8, sparse=True)

    def forward(self, x):
        return super().forward((x * 4).long().clamp(-4, 3) + 4)


class Cover(nn.Module):
    def forward(self, h):
        return h.masked_fill(h < h.mean(1, keepdim=True), float("-inf"))


class Covers(Calm):
    """A mask of minus infinity passes."""

    def __init__(self):
        super().__init__()
        self.norm = Cover()


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("not yet")


class NotBack(Net):
    def middle(self, h):
        return Raises.apply(h)


class Queue(Net):
    """Changes in place what the gradient needs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.ones(8))

    def middle(self, h):
        h = h * self.queue
        with torch.no_grad():
            self.queue[:1] = 2
        return h


class NaN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g / 0 * 0


class NaNBack(Net):
    def middle(self, h):
        return NaN.apply(h)


class Mapped(Net):
    def middle(self, h):
        return torch.func.vmap(lambda row: row * self.norm.weight)(h)


class More(Net):
    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state):
        pass
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "violates.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    yield
    sys.modules.pop("violates", None)


def split(name: str, *at: str, **keywords: Any) -> None:
    settings = {
        "data": {"dataset": "violates:Data", "batch_size": 16},
        "defaults": {"interface": "exact", "optimizer": {"SGD": {"lr": 0.1}}},
    }
    split_chain(f"violates:{name}", Path("chain.yaml"), settings, at=at or ["first"], **keywords)


@pytest.mark.parametrize(
    ("name", "keywords"), [("Net", {}), ("Near", {}), ("Named", {"takes": ["x"]})]
)
def test_statistics_and_dropout_are_the_same(name: str, keywords: dict[str, Any]) -> None:
    split(name, **keywords)
    assert Path("chain.yaml").exists()


def test_a_value_may_come_from_elsewhere_in_eval_mode() -> None:
    split("Passes", "first", "norm", "last")
    assert Path("chain.yaml").exists()


@pytest.mark.parametrize(
    "name",
    [
        "Calm",
        "Setting",
        "Frozen",
        "Hooked",
        "Still",
        "Filtered",
        "Halved",
        "Doubled",
        "Bag",
        "Covers",
    ],
)
def test_parameters_are_trained_as_by_plain_torch(name: str) -> None:
    split(name, "first", "norm")
    chain, state = LocalChain(Chain("chain.yaml").prepared.workers), load_file("chain.safetensors")
    violates: Any = sys.modules["violates"]
    net, data, y = getattr(violates, name)(), violates.Data(train=True), torch.arange(16) % 3
    net.load_state_dict(state)
    net.train()
    for step in chain.steps:
        for key, value in step.layers.state_dict().items():
            value.copy_(state[key.removeprefix("0.network.")])
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data.x.clone()), y).backward()
        optimizer.step()
        chain.train_batch(data.x, y)
    found = {
        key.removeprefix("0.network."): value
        for step in chain.steps
        for key, value in step.layers.state_dict().items()
    }
    for key, value in net.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


def test_what_a_module_does_not_use_stays_with_it() -> None:
    split("Rests", "first", "norm")
    chain = Chain("chain.yaml")
    names = [set(tensors_of(worker)) for worker in chain.prepared.workers]
    assert "0.network.norm.num_batches_tracked" in names[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Tiny", "the gradient of 'first.*' of 'part-1' differs by .* in training step 1"),
        ("Calls", "the output differs by .*"),
        ("Python", "'forward' of .* depends on random numbers of Python or NumPy"),
        ("Skips", "'forward' of .* depends on random numbers of Python or NumPy"),
        ("Lazy", r"'last.weight' without a shape.*\n.*call the network once"),
        ("Scripted", "a part 'norm' of torch.jit.script"),
        ("Named", r"takes 1 positional argument .*\n.*--takes"),
        ("Noise", "differs by .* in training step 1"),
        ("Statistic", "the buffer 'seen' of 'part-2' differs by .* in training step 1"),
        ("Imaginary", "the buffer 'spun' of 'part-2' differs by .* in training step 1"),
        ("Crowd", r"differs by .* in eval mode after training, for 1 samples of float32\["),
        ("Fourth", r"they fail in eval mode after training, for 1 samples of float32\[.*index 3"),
        ("Alone", r"differs by .* in eval mode after training, for 1 samples of float32\["),
        ("Several", r"differs by .* in eval mode after training, for 40 samples of float32\["),
        ("Learners", r"differs by .* in training step \d, for 21 samples of float32\["),
        ("Late", "'made'"),
        ("Unseen", "the gradient of 'norm.weight' is only in the network in training step 1"),
        ("Fails", r"fails on a batch of .* \(.*violates.py:\d+\)"),
        ("Nothing", "returns NaN for a batch"),
        ("Flips", "'forward' of .* sets 'requires_grad' of 'norm.weight'"),
        ("NotBack", r"fails on a batch of .* \(.*violates.py:\d+\): NotImplementedError: not yet"),
        ("Queue", r"fails on a batch of .* inplace operation.*\n.*plain PyTorch, too"),
        ("NaNBack", "has a gradient of NaN at 'first.weight' for a batch"),
        ("Mapped", "uses torch.func"),
        ("More", "'_extra_state', which is no parameter and no buffer"),
    ],
)
def test_a_difference_is_refused(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        split(name)
    assert not Path("chain.yaml").exists()


def test_what_learns_nothing_is_refused_by_its_place_in_the_chain() -> None:
    message = "'part-2' has no gradient for module 'part-1', which waits for it"
    with pytest.raises(SpecError, match=message) as caught:
        split("Unlearnt", "norm")
    assert caught.value.location == ("modules", 1, "layers")
