from __future__ import annotations

import threading

import pytest
import torch

from dni_runtime.data import describe, locate, open_data
from dni_runtime.data.ahead import in_thread
from dni_runtime.errors import DataError, SpecError
from dni_runtime.spec import DataSpec, TensorSpec
from tests.specs import float32, int64

SQUARES = """
import torch
from torch.utils.data import Dataset

class Squares(Dataset):
    classes = ["even", "odd"]

    def __init__(self, train, count=10, path=None):
        self.count, self.path = count if train else 3, path

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((2, 3), float(index**2)), index % 2
"""


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def make(user_module, source: str = SQUARES, cls: str = "Squares", **keywords) -> DataSpec:
    name = user_module(source)
    return DataSpec.model_validate({"dataset": f"{name}:{cls}", "batch_size": 4, **keywords})


def test_describes_and_reads(user_module, tmp_path) -> None:
    spec = make(user_module, shuffle=False)
    info = describe(spec, tmp_path)
    assert info.sample == float32(2, 3)
    assert info.label == int64()
    assert (info.classes, info.train_samples, info.eval_samples) == (2, 10, 3)
    source = open_data(spec, tmp_path, seed=0)
    batches = list(source.train_batches(0))
    assert [x[:, 0, 0].tolist() for x, _ in batches] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    assert [y.tolist() for _, y in batches] == [[0, 1, 0, 1], [0, 1, 0, 1], [0, 1]]
    assert sum(len(y) for _, y in source.eval_batches()) == 3


def test_held_out_samples_need_no_others_for_evaluation(user_module, tmp_path) -> None:
    keywords = {"train": {"train": True}, "validation": 0.2, "eval_batch_size": 4}
    source = open_data(make(user_module, **keywords), tmp_path, seed=0)
    info = source.info
    assert (info.train_samples, info.eval_samples, info.test_samples) == (8, 2, None)
    trained, held_out = (
        {x[0, 0].item() for rows, _ in batches for x in rows}
        for batches in (source.train_batches(0), source.eval_batches())
    )
    assert trained | held_out == {float(number**2) for number in range(10)}
    assert (len(trained), len(held_out), list(source.test_batches())) == (8, 2, [])


def test_the_global_generator_is_left_alone(user_module, tmp_path) -> None:
    source = open_data(make(user_module), tmp_path, seed=0)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    list(source.train_batches(0))
    assert torch.equal(torch.rand(2), expected)


def test_arguments_path_limits_and_flatten(user_module, tmp_path) -> None:
    spec = make(
        user_module, args={"count": 50}, path="files", train_limit=7, flatten=True, shuffle=False
    )
    assert describe(spec, tmp_path).sample.shape == (6,)
    assert describe(spec, tmp_path).train_samples == 7
    assert locate(spec, tmp_path) == tmp_path / "files"
    assert locate(make(user_module), tmp_path) is None
    batches = list(open_data(spec, tmp_path, seed=0).train_batches(0))
    assert [tuple(x.shape) for x, _ in batches] == [(4, 6), (3, 6)]


@pytest.mark.parametrize(
    ("sample", "label", "sample_spec", "label_spec", "classes"),
    [
        ("np.ones(3)", "np.int16(1)", ((3,), "float32"), ((), "int64"), 2),
        ("torch.ones(3).half()", "1.5", ((3,), "float32"), ((), "float32"), None),
        (
            "torch.ones(3, dtype=torch.uint8)",
            "torch.ones(2)",
            ((3,), "int64"),
            ((2,), "float32"),
            None,
        ),
        ("0.5", "1", ((), "float32"), ((), "int64"), 2),
    ],
)
def test_types(user_module, tmp_path, sample, label, sample_spec, label_spec, classes) -> None:
    source = SQUARES.replace("torch.full((2, 3), float(index**2)), index % 2", f"{sample}, {label}")
    info = describe(make(user_module, "import numpy as np\n" + source), tmp_path)
    assert info.sample == TensorSpec(shape=sample_spec[0], dtype=sample_spec[1])
    assert info.label == TensorSpec(shape=label_spec[0], dtype=label_spec[1])
    assert info.classes == classes


@pytest.mark.parametrize(
    ("replace", "by", "message"),
    [
        (
            "return torch.full",
            "raise KeyError('gone')\n        return torch.full",
            "KeyError: 'gone'",
        ),
        (", index % 2", "", "not \\(sample, label\\) pairs"),
        (", index % 2", ", 'cat'", "a label is a str, not numbers"),
        (", index % 2", ", torch.ones(1) * 1j", "a label is a tensor of complex"),
        ("def __len__", "def size", "has no __len__ and __getitem__"),
        ("def __getitem__", "def item", "has no __len__ and __getitem__|NotImplementedError"),
        ("return self.count", "return 1 // 0", "its __len__ fails: ZeroDivisionError"),
        ("return self.count", "return 0", r"Squares\(train=True\) is empty"),
        (
            "(Dataset):",
            "(torch.utils.data.IterableDataset):\n    __iter__ = None",
            "has no __len__ and __getitem__",
        ),
        (
            "self.count, self",
            "raise OSError('no disk')\n        self.count, self",
            r"Squares\(train=True\) raises OSError: no disk",
        ),
        ("train, count=10", "count=10", "unexpected keyword argument 'train'"),
    ],
)
def test_a_class_that_fails_is_named(user_module, tmp_path, replace, by, message) -> None:
    assert replace in SQUARES
    spec = make(user_module, SQUARES.replace(replace, by))
    with pytest.raises(DataError, match=message) as caught:
        describe(spec, tmp_path)
    assert spec.dataset in str(caught.value)


def test_unknown_arguments_are_named(user_module, tmp_path) -> None:
    with pytest.raises(DataError, match=r"Squares\(train=True, colour='red'\) raises TypeError"):
        describe(make(user_module, args={"colour": "red"}), tmp_path)


def test_an_error_in_the_middle_comes_at_its_batch(user_module, tmp_path) -> None:
    source = SQUARES.replace(
        "return torch.full",
        "if index == 6:\n            raise ValueError('bad file')\n        return torch.full",
    )
    batches = open_data(make(user_module, source, shuffle=False), tmp_path, seed=0).train_batches(0)
    assert next(batches)[1].tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match=r"failed for samples 4, 5, 6, 7: ValueError: bad file"):
        next(batches)


@pytest.mark.parametrize(
    "sample",
    [
        "torch.ones(2 + (index > 5))",
        "torch.ones(2 + (index > 3))",
        "torch.ones(2).int() if index > 3 else torch.ones(2)",
    ],
)
def test_samples_of_different_shapes(user_module, tmp_path, sample: str) -> None:
    source = SQUARES.replace("torch.full((2, 3), float(index**2))", sample)
    batches = open_data(make(user_module, source, shuffle=False), tmp_path, seed=0).train_batches(0)
    next(batches)
    with pytest.raises(DataError, match=r"equal size|samples of (float32|int64)\[B . \d\], but"):
        next(batches)


def test_missing_module_says_where_it_looked(user_module, tmp_path) -> None:
    user_module("")
    with pytest.raises(SpecError, match=r"no module 'userdata_none'; looked in ") as caught:
        describe(DataSpec(dataset="userdata_none:Data"), tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.path == "data.dataset"


def test_missing_class_and_broken_modules(user_module, tmp_path) -> None:
    spec = make(user_module, cls="Cubes")
    with pytest.raises(SpecError, match=r"userdata_.*\.py has no class or function 'Cubes'"):
        describe(spec, tmp_path)
    user_module("import userdata_dependency", "userdata_lacking")
    with pytest.raises(SpecError, match="imports 'userdata_dependency', which is missing"):
        describe(DataSpec(dataset="userdata_lacking:Data"), tmp_path)
    user_module("1 +", "userdata_syntax")
    with pytest.raises(SpecError, match="importing 'userdata_syntax' failed: SyntaxError"):
        describe(DataSpec(dataset="userdata_syntax:Data"), tmp_path)
    user_module("import sys; sys.exit(3)", "userdata_program")
    with pytest.raises(SpecError, match="importing 'userdata_program' failed: SystemExit: 3"):
        describe(DataSpec(dataset="userdata_program:Data"), tmp_path)


def test_a_hidden_module_is_an_error(user_module, tmp_path) -> None:
    user_module(SQUARES, "json")
    with pytest.raises(SpecError, match=r"json\.py is hidden by .*json"):
        describe(DataSpec(dataset="json:Squares"), tmp_path)


def test_unknown_names_and_needless_arguments(tmp_path) -> None:
    with pytest.raises(SpecError, match=r"'mnst'\n.*did you mean 'mnist'.*digits.*package\.module"):
        describe(DataSpec(dataset="mnst"), tmp_path)
    with pytest.raises(SpecError, match=r"data\.args: .*takes no arguments, but got size"):
        open_data(DataSpec(args={"size": 3}), tmp_path, seed=0)


def test_an_abandoned_epoch_ends_its_thread(user_module, tmp_path) -> None:
    batches = open_data(make(user_module, args={"count": 1000}), tmp_path, seed=0).train_batches(0)
    next(batches)
    assert any(thread.name == "dni-data" for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name == "dni-data" for thread in threading.enumerate())


def test_reads_ahead_while_a_batch_is_in_use() -> None:
    made = threading.Semaphore(0)

    def batches():
        for number in range(6):
            made.release()
            yield torch.tensor(number), torch.tensor(number)

    ahead = in_thread(batches(), 3)
    assert int(next(ahead)[0]) == 0
    for _ in range(5):  # the batch in use, three in the queue, one in the thread's hand
        assert made.acquire(timeout=10)
    assert not made.acquire(timeout=0.05)
    assert [int(x) for x, _ in ahead] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("labels", "row", "found"),
    [
        ("(index % 2, torch.tensor([index, 3]))", "int64", [[1, 1, 3], [0, 2, 3]]),
        ("[index % 2, torch.full((2,), index / 2)]", "float32", [[1, 0.5, 0.5], [0, 1, 1]]),
    ],
)
def test_several_labels_are_a_row(user_module, tmp_path, labels: str, row: str, found) -> None:
    spec = make(user_module, SQUARES.replace("index % 2", labels), shuffle=False)
    info = describe(spec, tmp_path)
    assert info.label == TensorSpec(shape=(3,), dtype=row)
    assert [one.shape for one in info.labels] == [(), (2,)]
    assert info.labels[0].dtype == "int64"
    assert info.classes is None
    _, y = next(open_data(spec, tmp_path, seed=0).train_batches(0))
    assert str(y.dtype) == f"torch.{row}"
    assert y[1:3].tolist() == found


def test_the_number_of_labels_does_not_change(user_module, tmp_path) -> None:
    source = SQUARES.replace("index % 2", "(index,) * (2 + (index > 3))")
    batches = open_data(make(user_module, source, shuffle=False), tmp_path, seed=0).train_batches(0)
    next(batches)
    with pytest.raises(DataError, match="labels of 3 parts, but the first had 2"):
        next(batches)


REUSES = (
    SQUARES
    + """

class Fills:
    def __init__(self):
        self.x, self.y = torch.zeros(4, 2, 3), torch.zeros(4, dtype=torch.long)

    def __call__(self, rows):
        for number, (x, y) in enumerate(rows):
            self.x[number], self.y[number] = x, y
        return self.x[:len(rows)], self.y[:len(rows)]
"""
)


def test_a_collate_may_fill_one_memory_again_and_again(user_module, tmp_path) -> None:
    name = user_module(REUSES)
    keywords = {"dataset": f"{name}:Squares", "collate": {"import": f"{name}:Fills", "args": {}}}
    spec = DataSpec.model_validate({**keywords, "batch_size": 4, "shuffle": False})
    batches = list(open_data(spec, tmp_path, seed=0).train_batches(0))  # read ahead
    assert [x[:, 0, 0].tolist() for x, _ in batches] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    assert [y.tolist() for _, y in batches] == [[0, 1, 0, 1], [0, 1, 0, 1], [0, 1]]


DRAWN = """
import random

import numpy
import torch
from torch.utils.data import TensorDataset, random_split

def points(train):
    x = [torch.rand(6, 3), numpy.random.rand(6, 3), random.random()]
    return TensorDataset(torch.cat([torch.as_tensor(one).expand(6, 3) for one in x]).float(),
                         torch.arange(18) % 2)

def halves(train, fixed=False):
    generator = torch.Generator().manual_seed(0) if fixed else None
    parts = random_split(TensorDataset(torch.arange(18.0)[:, None], torch.arange(18) % 2), [9, 9],
                         generator=generator)
    return parts[0 if train else 1]
"""


def test_what_a_data_set_draws_is_the_same_in_every_process(user_module, tmp_path) -> None:
    spec = make(user_module, DRAWN, "points", shuffle=False)
    found = []
    for seed in (0, 1):  # of the process, not of the chain
        torch.manual_seed(seed)
        source = open_data(spec, tmp_path, seed=0)
        assert source.splits["train"].drawn
        parts = source.splits["train"], source.splits["eval"]
        found.append([part.batch(torch.arange(18))[0] for part in parts])
        assert not torch.equal(*found[-1])
    assert all(map(torch.equal, *found))


RANDOM = """
import torch
from torch.utils.data import Dataset

class Varied(Dataset):
    def __init__(self, train, both=False):
        self.vary = train or both
    def __len__(self):
        return 12
    def __getitem__(self, index):
        x = torch.full((3,), float(index))
        return x + (torch.rand(3) if self.vary and index > 4 else 0), index % 2
"""


@pytest.mark.parametrize(
    ("keywords", "draws"),
    [
        ({}, [True, False]),
        ({"validation": 4}, [True, False]),
        ({"args": {"both": True}}, [True] * 2),
    ],
)
def test_each_evaluation_draws_the_same(user_module, tmp_path, keywords, draws) -> None:
    """Samples after the first may be the ones that vary, and training samples held out."""
    source = open_data(make(user_module, RANDOM, "Varied", **keywords), tmp_path, seed=0)
    assert [source.splits[part].draws for part in ("train", "eval")] == draws
    torch.manual_seed(7)
    expected = torch.rand(2)
    found = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        found.append(torch.cat([x for x, _ in source.eval_batches()]))
        assert torch.equal(torch.rand(2), expected) == (seed == 7), "the model's numbers stay"
    assert torch.equal(*found)


FOLDERS = """
from torch.utils.data import TensorDataset
import torch

def folders(train, less=False):
    made = TensorDataset(torch.zeros(6, 3), torch.arange(6) % 2)
    made.classes = ["ant", "bee", "cat"] if train else ["ant", "bee"] if less else ["ant", "cat"]
    return made
"""


def test_classes_are_numbered_alike(user_module, tmp_path) -> None:
    with pytest.raises(DataError, match="class 1 is 'bee' in the training, and 'cat' in the"):
        describe(make(user_module, FOLDERS, "folders"), tmp_path)
    describe(make(user_module, FOLDERS, "folders", args={"less": True}), tmp_path)


def test_a_split_drawn_twice_is_refused(user_module, tmp_path) -> None:
    with pytest.raises(DataError, match=r"(?s)of 9 samples for evaluation are also.*manual_seed"):
        describe(make(user_module, DRAWN, "halves"), tmp_path)
    spec = make(user_module, DRAWN, "halves", args={"fixed": True}, shuffle=False)
    source = open_data(spec, tmp_path, seed=0)
    assert not source.splits["train"].drawn
    first, second = (
        set(source.splits[part].batch(torch.arange(9))[0].flatten().tolist())
        for part in ("train", "eval")
    )
    assert not first & second
