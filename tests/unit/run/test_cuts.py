"""Which cuts a run has, which are whole, and what is left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from dni_runtime.errors import DamagedError
from dni_runtime.run import cuts
from dni_runtime.run.rundir import RunDir

MODULES = ["a", "b"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with the cuts 10, 20 and 30."""
    run = RunDir(tmp_path)
    run.create()
    for cut in (10, 20, 30):
        for module in MODULES:
            write(run, cut, module)
    return run


def write(run: RunDir, cut: int, module: str, **more: object) -> None:
    part = run.checkpoint(cut, module)
    part.parent.mkdir(exist_ok=True)
    data = save({"x": torch.full((100,), float(cut)), "e": torch.zeros(0), "z": torch.tensor(True)})
    cuts.tensors_file(part).write_bytes(data)
    document = {"cut": cut, "milestones": {2: 1, 10: 1}, "bytes": len(data), **more}
    cuts.document_file(part).write_text(cuts.sealed(data, document))


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def flip(file: Path, at: int = -7) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_whole_cuts_are_complete(run: RunDir) -> None:
    assert cuts.complete_cuts(run, MODULES) == [10, 20, 30]
    assert cuts.newest_cut(run, MODULES) == (30, [])
    cuts.verify(run, 30, MODULES)


def test_no_cut_at_all(tmp_path: Path) -> None:
    assert cuts.newest_cut(RunDir(tmp_path), MODULES) == (0, [])
    assert not cuts.is_over(RunDir(tmp_path), MODULES)


def test_the_cut_at_the_end_is_known_by_all_its_parts(run: RunDir) -> None:
    assert not cuts.is_over(run, MODULES)
    for module in MODULES:
        assert not cuts.is_over(run, MODULES)
        document = cuts.document_file(run.checkpoint(30, module))
        document.write_text(json.dumps(json.loads(document.read_text()) | {"over": True}))
    assert cuts.is_over(run, MODULES)
    document.write_text("{")
    assert not cuts.is_over(run, MODULES)


@pytest.fixture
def with_two(run: RunDir) -> list[str]:
    """Cuts 40 with three replicas, and 50 with two of them; the names of all workers."""
    workers = ["a", "wide.1", "wide.2", "wide.3"]
    for cut, count in ((40, 3), (50, 2)):
        write(run, cut, "a", replicas=1)
        for number in range(1, count + 1):
            write(run, cut, f"wide.{number}", replicas=count)
    return workers


def test_a_cut_has_parts_of_the_replicas_that_there_were(run: RunDir, with_two: list[str]) -> None:
    assert cuts.parts_of(run, 40, with_two) == with_two
    assert cuts.parts_of(run, 50, with_two) == ["a", "wide.1", "wide.2"]
    assert cuts.parts_of(run, 50, ["wide.3"]) == []
    assert cuts.written_cuts(run, with_two) == [40, 50]
    assert cuts.complete_cuts(run, with_two) == [40, 50]
    assert cuts.newest_cut(run, with_two) == (50, [])
    cuts.verify(run, 50, with_two)
    write(run, 50, "wide.3", replicas=3)  # left from an earlier start, with other replicas
    assert cuts.parts_of(run, 50, with_two) == ["a", "wide.1", "wide.2"]


def test_a_cut_is_written_when_all_replicas_that_there_were_have_written(
    run: RunDir, with_two: list[str]
) -> None:
    for cut in (40, 50):
        cuts.document_file(run.checkpoint(cut, "wide.2")).unlink()
    assert cuts.written_cuts(run, with_two) == []
    write(run, 50, "wide.2", replicas=2)
    assert cuts.written_cuts(run, with_two) == [50]
    cuts.document_file(run.checkpoint(50, "wide.1")).unlink()  # nobody knows how many there were
    assert cuts.parts_of(run, 50, with_two) == with_two
    assert cuts.written_cuts(run, with_two) == []


def test_a_damaged_part_of_a_replica_that_took_no_part_harms_nobody(
    run: RunDir, with_two: list[str]
) -> None:
    write(run, 50, "wide.3", replicas=3)
    cut_off(cuts.tensors_file(run.checkpoint(50, "wide.3")))
    assert cuts.newest_cut(run, with_two) == (50, [])
    cut_off(cuts.tensors_file(run.checkpoint(50, "wide.2")))
    newest, (problem,) = cuts.newest_cut(run, with_two)
    assert newest == 40
    assert "'wide.2'" in problem.message


def test_the_end_is_known_by_the_replicas_that_there_were(run: RunDir, with_two: list[str]) -> None:
    for worker in with_two[:2]:
        write(run, 50, worker, replicas=2, over=True)
    assert not cuts.is_over(run, with_two)
    write(run, 50, "wide.2", replicas=2, over=True)
    assert cuts.is_over(run, with_two)


def test_a_part_that_is_still_to_come_is_no_damage(run: RunDir) -> None:
    run.checkpoint(30, "b").with_suffix(".json").unlink()
    assert cuts.newest_cut(run, MODULES) == (20, [])


def test_other_names_are_somebody_elses(run: RunDir) -> None:
    for name in ("000000000030.bak", "notes", "40", "000000000040 (copy)", "00000000004\u0660"):
        shutil.copytree(run.checkpoint(30, "a").parent, run.checkpoints / name)
    (run.checkpoints / "000000000050").write_text("a file")
    assert list(cuts.cut_folders(run)) == [10, 20, 30]
    assert cuts.complete_cuts(run, MODULES) == [10, 20, 30]
    cuts.forget(run, MODULES, lambda cut: True)
    assert len(list(run.checkpoints.iterdir())) == 6
    assert (run.checkpoints / "000000000030.bak" / "a.json").exists()


@pytest.mark.parametrize("damage", ["cut off", "tensors gone", "document"])
def test_a_cut_of_the_wrong_size_is_passed_over(run: RunDir, damage: str) -> None:
    part = run.checkpoint(30, "b")
    if damage == "cut off":
        cut_off(part.with_suffix(".safetensors"))
    elif damage == "tensors gone":
        part.with_suffix(".safetensors").unlink()
    else:
        cut_off(part.with_suffix(".json"))
    assert cuts.complete_cuts(run, MODULES) == [10, 20]
    newest, problems = cuts.newest_cut(run, MODULES)
    assert newest == 20
    (problem,) = problems
    assert "the part of module 'b' in checkpoint 30" in str(problem)
    assert str(part) in str(problem)
    assert cuts.newest_cut(run, MODULES, below=20) == (10, [])


def test_a_cut_is_looked_at_once_where_that_is_enough(run: RunDir) -> None:
    """Whoever removes old cuts looks for them after each checkpoint."""
    cut_off(run.checkpoint(20, "b").with_suffix(".safetensors"))
    assert cuts.complete_cuts(run, MODULES) == [10, 30]
    assert cuts.complete_cuts(run, MODULES, [10, 20]) == [10, 20, 30]
    run.checkpoint(10, "b").with_suffix(".json").unlink()
    assert cuts.complete_cuts(run, MODULES, [10, 20]) == [20, 30]


def test_there_may_be_no_older_one(run: RunDir) -> None:
    """A run whose checkpoints are all damaged does not begin from scratch by itself."""
    with pytest.raises(DamagedError, match="checkpoint at 10 is damaged, and no older"):
        cuts.newest_cut(run, MODULES, below=10)
    for cut in (10, 20, 30):
        cut_off(run.checkpoint(cut, "a").with_suffix(".safetensors"))
    with pytest.raises(DamagedError, match=r"checkpoint 10 .* no older"):
        cuts.newest_cut(run, MODULES)


FLIPS: dict[str, Callable[[Path], None]] = {
    "tensors": lambda part: flip(part.with_suffix(".safetensors")),
    "header": lambda part: flip(part.with_suffix(".safetensors"), 12),
    "length": lambda part: flip(part.with_suffix(".safetensors"), 7),
    "document": lambda part: part.with_suffix(".json").write_text(
        part.with_suffix(".json").read_text().replace('"cut": 30', '"cut": 31')
    ),
}


@pytest.mark.parametrize("where", FLIPS)
def test_a_flipped_bit_is_found(run: RunDir, where: str) -> None:
    FLIPS[where](run.checkpoint(30, "b"))
    assert cuts.complete_cuts(run, MODULES) == [10, 20, 30]  # it costs too much to look for it
    with pytest.raises(DamagedError, match=r"checkpoint 30 .*b'\) is damaged: its SHA-256"):
        cuts.verify(run, 30, MODULES)


def test_a_part_must_have_a_size_and_a_sum(run: RunDir) -> None:
    path = run.checkpoint(30, "b").with_suffix(".json")
    size = path.with_suffix(".safetensors").stat().st_size
    path.write_text(json.dumps({"cut": 30, "bytes": size}))
    with pytest.raises(DamagedError, match=r"checkpoint 30 .*b'\) is damaged: its SHA-256"):
        cuts.verify(run, 30, MODULES)
    path.with_suffix(".safetensors").write_bytes(b"no tensors")
    path.write_text(json.dumps({"cut": 30, "bytes": 10}))
    with pytest.raises(DamagedError, match="its SHA-256"):
        cuts.verify(run, 30, MODULES)
    path.write_text(json.dumps({"cut": 30}))
    assert cuts.complete_cuts(run, MODULES) == [10, 20]


def test_half_written_files_of_one_module_go(run: RunDir) -> None:
    alone = run.checkpoint(40, "a").parent
    alone.mkdir()
    names = [".a.safetensors.node1.1234abcd", ".a.json.node1.1234abcd"]
    for folder in (alone, run.checkpoint(30, "a").parent, run.snapshot("a").parent):
        for name in names:
            (folder / name).touch()
    others = [run.checkpoint(30, "b").parent / ".b.safetensors.node1.1234abcd"]
    others += [run.snapshot("b").parent / ".a-b.safetensors.node1.1234abcd"]
    for path in others:
        path.touch()
    cuts.remove_temporaries(run, ["a"])
    assert not list(run.root.rglob(".a.*"))
    assert all(path.exists() for path in others)
    assert not alone.exists()
    assert cuts.complete_cuts(run, MODULES) == [10, 20, 30]


def test_half_written_files_of_replicas_go(run: RunDir) -> None:
    """Their names have a dot of their own."""
    folder, alone = run.checkpoint(30, "a").parent, run.checkpoint(5, "a").parent
    alone.mkdir()
    of_two = [folder / ".wide.2.safetensors.n1.1234abcd", alone / ".wide.2.json.n1.1234abcd"]
    of_two.append(run.snapshot("a").parent / ".wide.2.safetensors.n1.1234abcd")
    others = [folder / ".wide.21.json.n1.1234abcd", folder / ".wide.1.json.n1.1234abcd"]
    others.append(folder / ".wide.json.n1.1234abcd")
    for path in (*of_two, *others):
        path.touch()
    cuts.remove_temporaries(run, ["a", "wide.2"])
    assert not any(path.exists() for path in of_two)
    assert all(path.exists() for path in others)
    assert not alone.exists()


def test_a_cut_that_is_not_finite_is_no_place_to_begin(run: RunDir) -> None:
    part = run.checkpoint(30, "b").with_suffix(".json")
    document = json.loads(part.read_text()) | {"finite": False}
    data = part.with_suffix(".safetensors").read_bytes()
    part.write_text(cuts.sealed(data, document))
    assert cuts.complete_cuts(run, MODULES) == [10, 20]
    assert cuts.diverged_cuts(run, MODULES, [10, 20]) == [30]
    newest, (problem,) = cuts.newest_cut(run, MODULES)
    assert newest == 20
    assert "module 'b' in checkpoint 30" in problem.message
    assert "not finite" in problem.message
    cuts.verify(run, 30, MODULES)  # it is whole


def test_a_cut_that_is_a_link(run: RunDir, tmp_path: Path) -> None:
    """Code in a container can put one there: what it leads to is no cut, and is left alone."""
    outside = tmp_path / "outside"
    shutil.copytree(run.checkpoint(30, "a").parent, outside)
    (outside / ".a.safetensors.host.1").touch()
    before = {path.name for path in outside.iterdir()}
    run.checkpoint(40, "a").parent.symlink_to(outside)
    assert cuts.newest_cut(run, MODULES) == (30, [])
    cuts.forget(run, MODULES, lambda cut: cut == 40)
    cuts.remove_temporaries(run, MODULES)
    assert cuts._remove(run.checkpoint(40, "a").parent, sorted(before)) == 0
    assert {path.name for path in outside.iterdir()} == before
    cuts.forget(run, MODULES, lambda cut: cut == 30)
    assert not run.checkpoint(30, "a").parent.exists()


def test_a_part_that_is_a_link(run: RunDir, tmp_path: Path) -> None:
    """Of any file of the user's: it is not read into anything."""
    part = cuts.tensors_file(run.checkpoint(30, "a"))
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="is a link, or no plain file"):
        cuts.choose_cut(run, MODULES)
