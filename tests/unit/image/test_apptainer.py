"""The container program: versions, commands, environment, hints."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from dni_runtime.errors import BuildError, UnavailableError, UsageError
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


def test_missing_program_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="install Apptainer"):
        apptainer.find_apptainer({"DNI_APPTAINER": str(tmp_path / "none"), "PATH": ""})


def _program(path: Path, answer: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


def test_program_on_the_path_is_found(tmp_path: Path) -> None:
    program = _program(tmp_path / "apptainer", "1.3.6")
    found = apptainer.find_apptainer({"PATH": str(tmp_path)})
    assert found == Apptainer(program, "apptainer", (1, 3, 6))
    assert str(found) == "apptainer 1.3.6"


def test_too_old_program_is_refused(tmp_path: Path) -> None:
    program = _program(tmp_path / "apptainer", "1.0.3")
    with pytest.raises(UnavailableError, match=r"too old: 1\.0\.3"):
        apptainer.find_apptainer({"DNI_APPTAINER": str(program)})


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("FATAL: while requesting capability set: operation not permitted", "ordinary user"),
        ("write /tmp/x: no space left on device", "APPTAINER_TMPDIR"),
        ("could not use fakeroot: no mapping entry found in /etc/subuid", "add-subuids"),
        ("dial tcp: lookup registry: no such host", "localimage"),
    ],
)
def test_known_failures_have_a_hint(line: str, word: str) -> None:
    hint = apptainer.hint_for(["INFO: fine", line])
    assert hint is not None
    assert word in hint


def test_failed_program_shows_its_last_lines(tmp_path: Path) -> None:
    code = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    seen: list[str] = []
    log = tmp_path / "log"
    with pytest.raises(BuildError, match="testing failed with exit status 3") as caught:
        apptainer.stream(
            [sys.executable, "-c", code], what="testing", on_line=seen.append, log=log, tail_lines=5
        )
    assert caught.value.tail == tuple(f"line {i}" for i in range(95, 100))
    assert len(seen) == 100
    assert log.read_text().splitlines() == seen
    assert str(log) in str(caught.value)


def test_program_that_cannot_start_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be started"):
        apptainer.stream([str(tmp_path / "none")], what="testing")
    with pytest.raises(UnavailableError, match="cannot be started"):
        apptainer.capture([str(tmp_path / "none")], what="testing")


def test_program_that_takes_too_long_is_ended() -> None:
    with pytest.raises(BuildError, match=r"longer than 0\.2 s"):
        apptainer.capture(
            [sys.executable, "-c", "import time; time.sleep(30)"], what="testing", timeout_s=0.2
        )


def test_program_that_prints_too_much_is_ended() -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * 4096)"
    with pytest.raises(BuildError, match="testing printed more than 10000 bytes"):
        apptainer.capture_bytes([sys.executable, "-c", code], what="testing", most_bytes=10_000)


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
