"""The container program: versions, commands, environment, hints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.image import apptainer
from dni_runtime.image.apptainer import Apptainer, Mount

TOOL = Apptainer(Path("/opt/a/apptainer"), "apptainer", (1, 4, 5))
OLD = Apptainer(Path("/opt/a/singularity"), "singularity", (3, 8, 7))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("1.4.5\n", (1, 4, 5)),
        ("1.4.5-2.el9", (1, 4, 5)),
        ("apptainer version 1.5.0-rc.1", (1, 5, 0)),
        ("singularity-ce version 4.1", (4, 1, 0)),
        ("", None),
    ],
)
def test_version_is_parsed(text: str, version: tuple[int, int, int] | None) -> None:
    assert apptainer.parse_version(text) == version


def test_whole_run_command() -> None:
    argv = apptainer.run_argv(
        TOOL,
        "/images/head.sif",
        ["--module", "head"],
        mounts=[Mount("/runs/r1", "/dni/run", read_only=False), Mount("/data", "/dni/data")],
        nv=True,
    )
    assert argv == [
        "/opt/a/apptainer", "--quiet", "run", "--no-eval", "--no-home", "--no-mount", "cwd",
        "--pwd", "/", "--nv",
        "--mount", "type=bind,source=/runs/r1,destination=/dni/run",
        "--mount", "type=bind,source=/data,destination=/dni/data,ro",
        "/images/head.sif", "--module", "head",
    ]  # fmt: skip


def test_old_singularity_is_not_given_flags_it_lacks() -> None:
    argv = apptainer.run_argv(OLD, "i.sif", ["true"], rocm=True)
    assert "--no-eval" not in argv
    assert "--rocm" in argv
    assert argv[-2:] == ["i.sif", "true"]
    assert "--mksquashfs-args" not in apptainer.build_argv(OLD, "b.sif", "b.def")


def test_build_packs_with_zstd_and_tests_unless_told_not_to() -> None:
    argv = apptainer.build_argv(TOOL, "base.sif", "base.def")
    assert argv[-2:] == ["base.sif", "base.def"]
    assert any("zstd" in word for word in argv)
    assert "--notest" not in argv
    assert "--notest" in apptainer.build_argv(TOOL, "base.sif", "base.def", test=False)


@pytest.mark.parametrize("path", ["/a,b", "/a:b", '/say "hi"', "/with space", "/a=b,ro"])
def test_mounts_survive_odd_paths(path: str) -> None:
    # Apptainer reads --mount with Go's encoding/csv, which follows RFC 4180 as Python's csv does.
    (fields,) = csv.reader([str(Mount(path, "/dni/data"))])
    assert fields == ["type=bind", f"source={path}", "destination=/dni/data", "ro"]


@pytest.mark.parametrize("path", ["relative", "/two\nlines", ""])
def test_mounts_that_cannot_be_written_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be mounted"):
        str(Mount(path, "/dni/data"))


def test_signature_commands() -> None:
    key = Path("k.pem")
    assert apptainer.sign_argv(TOOL, "i.sif")[1:] == ["sign", "i.sif"]
    assert apptainer.sign_argv(TOOL, "i.sif", key=key)[1:] == ["sign", "--key", "k.pem", "i.sif"]
    assert apptainer.verify_argv(TOOL, "i.sif")[1:] == ["verify", "--local", "i.sif"]
    assert apptainer.verify_argv(TOOL, "i.sif", key=key)[1:3] == ["verify", "--key"]


def test_host_python_settings_do_not_reach_the_image() -> None:
    environ = {
        "PATH": "/usr/bin",
        "PYTHONPATH": "/site",
        "PYTHONHOME": "/py",
        "LD_PRELOAD": "x.so",
        "CONDA_PREFIX": "/conda",
        "BASH_FUNC_module%%": "() { :; }",
        "SLURM_JOB_ID": "7",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONUNBUFFERED": "1",
    }
    kept = apptainer.host_environment(environ)
    assert set(kept) == {"PATH", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED"}
    assert kept["PATH"].split(":")[0] == "/usr/bin"
    assert "/usr/sbin" in kept["PATH"].split(":")


def test_missing_program_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DNI_APPTAINER", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnavailableError, match="install Apptainer"):
        apptainer.find_apptainer()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("FATAL: while requesting capability set: operation not permitted", "ordinary user"),
        ("write /tmp/x: no space left on device", "APPTAINER_TMPDIR) has "),
        ("could not use fakeroot: no mapping entry found in /etc/subuid", "add-subuids"),
        ("dial tcp: lookup registry: no such host", "localimage"),
    ],
)
def test_known_failures_have_a_hint(
    line: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_TMPDIR", str(tmp_path / "not" / "there"))
    for other in ("TMPDIR", "XDG_CACHE_HOME", "APPTAINER_CACHEDIR"):
        monkeypatch.setenv(other, str(tmp_path))
    hint = apptainer.hint_for(["INFO: fine", line])
    assert hint is not None
    assert word in hint


def test_settings_for_other_containers_stay_outside() -> None:
    mine = {
        "APPTAINER_CACHEDIR": "/c",
        "SINGULARITY_TMPDIR": "/t",
        "APPTAINER_DOCKER_USERNAME": "u",
        "APPTAINER_KEYSDIR": "/k",
    }
    names = "APPTAINERENV_PYTHONPATH SINGULARITYENV_LD_LIBRARY_PATH APPTAINERENV_CACHEDIR"
    names += " APPTAINER_BIND APPTAINER_CONTAINALL SINGULARITY_BINDPATH PYTHONINSPECT"
    others = dict.fromkeys(names.split(), "x")
    kept = apptainer.host_environment({"SLURM_JOB_ID": "1", **mine, **others})
    assert {name for name in kept if name != "PATH"} == {"SLURM_JOB_ID", *mine}
