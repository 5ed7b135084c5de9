"""Augmentation of training samples by classes of the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dni_runtime.data import describe, open_data
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataSpec, parse_chain, source_files

CLASSES = """
import torch


class Noise:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, x):
        return x + self.scale * torch.randn_like(x)


class Flip(torch.nn.Module):
    '''Mirrors half of the samples, in place.'''

    def forward(self, x):
        chosen = torch.rand(len(x)) < 0.5
        x[chosen] = x[chosen].flip(-1)
        return x


class Halve:
    def __call__(self, x):
        return x / 2


class AddOne:
    def __call__(self, x):
        return x + 1


class Odd:
    def __init__(self, what):
        self.what = what

    def __call__(self, x):
        if self.what == "late" and len(x) == 2:  # what validate tries
            return x
        return eval(self.what, {"x": x, "torch": torch, "late": x.double()})


class Idle:
    pass
"""

MakeSpec = Callable[..., DataSpec]


@pytest.fixture
def make(user_module) -> MakeSpec:
    """A spec whose augmentations are written ``Class`` or ``(Class, args)``."""
    name = user_module(CLASSES)

    def spec(*chosen: str | tuple[str, dict[str, Any]], **keywords: Any) -> DataSpec:
        pairs = [(one, {}) if isinstance(one, str) else one for one in chosen]
        augment = [{"import": f"{name}:{cls}", "args": args} for cls, args in pairs]
        return DataSpec.model_validate({"batch_size": 200, "augment": augment, **keywords})

    return spec


def samples(spec: DataSpec, base: Path, epoch: int = 1, start: int = 0, seed: int = 3):
    return [x for x, _ in open_data(spec, base, seed=seed).train_batches(epoch, start)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_restart_finds_the_same_batches(make: MakeSpec, tmp_path: Path) -> None:
    spec = make("Noise", "Flip")
    whole = samples(spec, tmp_path)
    torch.manual_seed(99)
    for start in range(len(whole) + 1):
        assert same(samples(spec, tmp_path, start=start), whole[start:])
    plain = make(shuffle=False)
    noisy = make("Noise", shuffle=False)

    def noise(epoch: int, seed: int = 3) -> list[torch.Tensor]:
        pairs = zip(samples(noisy, tmp_path, epoch, seed=seed), samples(plain, tmp_path),
                    strict=True)  # fmt: skip
        return [a - b for a, b in pairs]

    drawn = [*noise(1), *noise(2), *noise(1, seed=4)]
    full = [one for one in drawn if len(one) == 200]
    for number, one in enumerate(full):
        assert abs(float(one.std()) - 1) < 0.05
        assert all(not torch.allclose(one, other) for other in full[:number])


def test_the_global_generator_is_left_alone(make: MakeSpec, tmp_path: Path) -> None:
    source = open_data(make("Noise"), tmp_path, seed=0)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(source.train_batches(1))
    assert torch.equal(torch.rand(3), expected)


def test_only_training_samples_are_augmented(make: MakeSpec, tmp_path: Path) -> None:
    more = {"validation": 100, "eval_batch_size": 64}
    plain, noisy = (
        open_data(spec, tmp_path, seed=0) for spec in (make(**more), make("Noise", **more))
    )
    for ours, theirs in (
        (plain.eval_batches(), noisy.eval_batches()),
        (plain.test_batches(), noisy.test_batches()),
    ):
        assert same([x for x, _ in ours], [x for x, _ in theirs])
    assert not torch.equal(next(plain.train_batches(1))[0], next(noisy.train_batches(1))[0])


def test_they_are_applied_in_order_after_scaling(make: MakeSpec, tmp_path: Path) -> None:
    (x, *_) = samples(make(), tmp_path)
    (both, *_) = samples(make("Halve", "AddOne"), tmp_path)
    assert torch.equal(both, x / 2 + 1)


def test_images_are_flattened_afterwards(make: MakeSpec, tmp_path: Path) -> None:
    (x, *_), (flat, *_) = (samples(make("Flip", flatten=f), tmp_path) for f in (False, True))
    assert torch.equal(flat, x.flatten(1))
    assert describe(make("Flip", flatten=True), tmp_path).sample.shape == (64,)
    (plain, *_) = samples(make(), tmp_path)
    mirrored = (x == plain.flip(-1)).flatten(1).all(1)
    assert torch.equal(x, torch.where(mirrored.view(-1, 1, 1, 1), plain.flip(-1), plain))
    assert 60 < int(mirrored.sum()) < 140


def test_a_data_set_of_ones_own(make: MakeSpec, user_module, tmp_path: Path) -> None:
    name = user_module(
        "import torch\n"
        "class Ones(torch.utils.data.Dataset):\n"
        "    def __init__(self, train): pass\n"
        "    def __len__(self): return 12\n"
        "    def __getitem__(self, index): return torch.ones(3), 0\n"
    )
    spec = make("Noise", dataset=f"{name}:Ones", batch_size=4)
    whole = samples(spec, tmp_path)
    assert same(samples(spec, tmp_path, start=1), whole[1:])
    assert len(torch.unique(torch.cat(whole))) == 36


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("x[:, 0]", r"makes float32 of shape \(2, 8, 8\) of a batch of .*\(2, 1, 8, 8\)\n.*keep"),
        ("x.double()", r"makes float64 of shape"),
        ("(x, x)", r"makes a tuple of a batch"),
        ("1 // 0", r"fails on a batch of shape .*: ZeroDivisionError"),
    ],
)
def test_what_it_makes_is_checked(make: MakeSpec, tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        describe(make("Halve", ("Odd", {"what": what})), tmp_path)
    assert caught.value.path == "data.augment[1]"


def test_what_it_makes_is_checked_in_each_batch(make: MakeSpec, tmp_path: Path) -> None:
    spec = make(("Odd", {"what": "late"}))
    describe(spec, tmp_path)
    with pytest.raises(DataError, match=r":Odd' makes float64 of shape \(200, 1, 8, 8\)"):
        samples(spec, tmp_path)


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ("RandomCrop", r"unknown augmentation 'RandomCrop'\n.*import: package\.module:Class"),
        ({"import": "userdata_gone:Flip"}, "augmentation 'userdata_gone:Flip': there is no module"),
        ({"import": "NAME:Flop"}, r"userdata_\d+\.py has no class or function 'Flop'"),
        ({"import": "NAME:Noise", "args": {"sale": 1}}, r"Noise\(sale=1\) raises TypeError"),
        ({"import": "NAME:Idle"}, r"an object of Idle cannot be called\n.*__call__"),
    ],
)
def test_wrong_augmentations(user_module, tmp_path: Path, augment: Any, message: str) -> None:
    name = user_module(CLASSES)
    if isinstance(augment, dict):
        augment = augment | {"import": augment["import"].replace("NAME", name)}
    spec = DataSpec.model_validate({"augment": [augment]})
    for ask in (describe, lambda spec, base: open_data(spec, base, seed=0)):
        with pytest.raises(SpecError, match=message) as caught:
            ask(spec, tmp_path)
        assert caught.value.path == "data.augment[0]"


def test_tokens_are_not_augmented(make: MakeSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"samples are int64\[B x 64\]; only floats"):
        describe(make("Halve", dataset="text"), tmp_path)


def test_their_source_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    chain = parse_chain(
        "name: x\n"
        "data: {augment: [{import: 'mine:Flip'}, {import: 'torchvision.transforms.v2:Resize'}]}\n"
        "modules: [{name: a, layers: [ReLU]}]\n"
    )
    assert list(source_files(chain, tmp_path)) == ["mine.py"]
    assert DataSpec.model_validate_json(chain.data.model_dump_json()) == chain.data
