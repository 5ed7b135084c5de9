from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from dni_runtime.data import describe, locate, open_data
from dni_runtime.errors import DataError
from dni_runtime.spec import DataSpec

MEAN = torch.tensor((0.4914, 0.4822, 0.4465)).reshape(3, 1, 1)
STD = torch.tensor((0.2470, 0.2435, 0.2616)).reshape(3, 1, 1)


def spec(made, **keywords) -> DataSpec:
    return DataSpec(dataset="cifar10", path=str(made.folder), batch_size=20, **keywords)


def pixels_of(made) -> torch.Tensor:
    parts = [made.pixels[f"data_batch_{n}"] for n in range(1, 6)]
    return torch.from_numpy(np.concatenate(parts)).reshape(20, 3, 32, 32)


def test_reads_what_is_published(cifar_folder, tmp_path) -> None:
    one = spec(cifar_folder, shuffle=False, normalize=False)
    info = describe(one, tmp_path)
    assert info.sample.shape == (3, 32, 32)
    assert (info.classes, info.train_samples) == (10, None)
    source = open_data(one, tmp_path, seed=0)
    assert (source.info.train_samples, source.info.eval_samples) == (20, 4)
    ((x, y),) = source.train_batches(0)
    assert torch.equal(x, pixels_of(cifar_folder).float() / 255)
    assert y.tolist() == [k for n in range(1, 6) for k in cifar_folder.labels[f"data_batch_{n}"]]
    ((_, y),) = source.eval_batches()
    assert y.tolist() == cifar_folder.labels["test_batch"]


@pytest.mark.parametrize("flatten", [True, False])
def test_normalises_each_channel(cifar_folder, tmp_path, flatten: bool) -> None:
    one = spec(cifar_folder, shuffle=False, flatten=flatten)
    ((x, _),) = open_data(one, tmp_path, seed=0).train_batches(0)
    expected = (pixels_of(cifar_folder) / 255 - MEAN) / STD
    torch.testing.assert_close(x, expected.flatten(1) if flatten else expected)


def test_the_archives_parent_folder_will_do(cifar_folder, tmp_path) -> None:
    one = DataSpec(dataset="cifar10", path="cifar")
    assert locate(one, tmp_path) == cifar_folder.folder
    with pytest.raises(DataError, match=r"cifar-10-batches-py.*data_batch_1"):
        describe(DataSpec(dataset="cifar10", path="."), tmp_path)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_reads_what_python_3_writes(cifar_folder, tmp_path, protocol: int) -> None:
    content = {
        b"labels": cifar_folder.labels["test_batch"],
        b"data": cifar_folder.pixels["test_batch"],
    }
    (cifar_folder.folder / "test_batch").write_bytes(pickle.dumps(content, protocol=protocol))
    ((x, y),) = open_data(spec(cifar_folder, normalize=False), tmp_path, seed=0).eval_batches()
    assert torch.equal(x.flatten(1), torch.from_numpy(cifar_folder.pixels["test_batch"]) / 255)
    assert y.tolist() == cifar_folder.labels["test_batch"]


class Harmful:
    def __init__(self, call, *args) -> None:
        self.reduced = (call, args)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("call", "argument", "asked"),
    [
        (os.mkdir, "harm", r"posix\.mkdir"),
        (eval, "__import__('os').mkdir('harm')", r"(__builtin__|builtins)\.eval"),
        (np.load, "harm.npy", r"numpy\.load"),
        (getattr, (np, "load"), r"(__builtin__|builtins)\.getattr"),
    ],
)
def test_no_code_is_run(
    cifar_folder, tmp_path, monkeypatch, protocol: int, call, argument, asked: str
) -> None:
    monkeypatch.chdir(tmp_path)
    args = argument if isinstance(argument, tuple) else (argument,)
    if call is getattr:
        args = ("text", "upper")
    (cifar_folder.folder / "data_batch_3").write_bytes(
        pickle.dumps({"data": Harmful(call, *args)}, protocol=protocol)
    )
    with pytest.raises(DataError, match=rf"data_batch_3: refused: the file asks for {asked}"):
        open_data(spec(cifar_folder), tmp_path, seed=0)
    assert not Path("harm").exists()


def test_dotted_names_lead_nowhere(cifar_folder, tmp_path) -> None:
    """Protocol 4 may ask for ``numpy.dtype.__init__.__globals__`` and the like."""
    program = b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93."
    (cifar_folder.folder / "data_batch_1").write_bytes(program)
    with pytest.raises(DataError, match=r"asks for numpy\.dtype\.__init__"):
        open_data(spec(cifar_folder), tmp_path, seed=0)


def whole(**changes) -> dict[str, object]:
    return {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1], **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "a list instead of a dict"),
        ({"fine_labels": []}, r"but \['fine_labels'\]"),
        (whole(labels=None), "no 'data' array and 'labels' list"),
        (whole(data=np.zeros((2, 3072), np.float32)), "an array of 'f4'; u1 expected"),
        (whole(data=np.zeros((2, 3072), object)), "an array of 'O8'; u1 expected"),
        (whole(data=np.zeros((2, 3071), np.uint8)), r"shape \(2, 3071\)"),
        (whole(data=np.zeros(6144, np.uint8)), r"shape \(6144,\)"),
        (whole(data=np.asfortranarray(np.zeros((2, 3072), np.uint8))), "Fortran order: True"),
        (whole(labels=[1]), "with 1 labels"),
        (whole(labels=[1, 10]), "label 10; 0 to 9 expected"),
        (whole(labels=[1, -1]), "label -1"),
        (whole(labels=[1, True]), "label True"),
    ],
)
def test_foreign_contents(cifar_folder, tmp_path, content, message: str) -> None:
    (cifar_folder.folder / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=rf"test_batch: not a CIFAR-10 batch: .*{message}"):
        open_data(spec(cifar_folder), tmp_path, seed=0)


@pytest.mark.parametrize("keep", [0, 1, 20, 60, 200, 5000])
def test_truncated_files_are_named(cifar_folder, tmp_path, keep: int) -> None:
    path = cifar_folder.folder / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="data_batch_2: truncated or not a pickled batch"):
        open_data(spec(cifar_folder), tmp_path, seed=0)


def test_damaged_files_never_escape_as_another_error(cifar_folder, tmp_path) -> None:
    path = cifar_folder.folder / "data_batch_2"
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(content)
        for at in rng.integers(0, 200, 3):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(bytes(damaged))
        try:
            open_data(spec(cifar_folder), tmp_path, seed=0)
        except DataError:
            outcomes.add("refused")
        else:
            outcomes.add("read")  # only the name of the batch or a label was hit
    assert "refused" in outcomes
