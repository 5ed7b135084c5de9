"""Definitions: literal, one of each section, and no value can open another."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.image.definition import render_base, render_module
from dni_runtime.image.layers import ModuleBuild
from dni_runtime.spec import BaseSpec, ImageSpec

SECTIONS = ["files", "post", "environment", "runscript", "startscript", "test", "labels", "help"]


def base(image: ImageSpec, source: str = "bookworm", mirror: str | None = "mirror:/debian") -> str:
    return render_base(
        image,
        source=source,
        mirror=mirror,
        requirements=["torch==2.13.0", "numpy>=1.26"],
        torch="2.13.0+cpu",
    )


def sections(text: str) -> list[str]:
    """What Apptainer takes for a section: a line whose first word begins with a percent sign."""
    return re.findall(r"^\s*%(\w+)", text, re.M)


def section(text: str, name: str) -> str:
    return text.split(f"%{name}\n")[1].split("\n%")[0]


def test_debootstrap_base() -> None:
    text = base(ImageSpec(packages=("libgomp1",), environment={"OMP_PROC_BIND": "close"}))
    assert text.splitlines()[:4] == [
        "Bootstrap: debootstrap",
        "OSVersion: bookworm",
        "MirrorURL: mirror:/debian",
        "Include: python3 libgomp1",
    ]
    assert sections(text) == SECTIONS
    assert "{{" not in text
    assert "{%" not in text
    assert "apt-get" not in text  # debootstrap has installed the packages
    assert "export OMP_PROC_BIND=close" in section(text, "environment")
    assert "torch==2.13.0 'numpy>=1.26'" in section(text, "post")
    assert "io.dni-runtime.torch 2.13.0+cpu" in section(text, "labels")


@pytest.mark.parametrize("agent", ["docker", "oras", "library", "localimage"])
def test_other_bases(agent: str) -> None:
    image = ImageSpec.model_validate(
        {"base": {"bootstrap": agent, "source": "python:3.12-slim", "python": "3.12"}}
    )
    text = base(image, source="python:3.12-slim", mirror=None)
    assert text.splitlines()[:2] == [f"Bootstrap: {agent}", "From: python:3.12-slim"]
    assert sections(text) == SECTIONS
    assert "MirrorURL" not in text
    assert "command -v python3.12" in text


def test_keeping_the_base_images_torch() -> None:
    image = ImageSpec(torch="base", base=BaseSpec(bootstrap="docker", source="vendor/pytorch"))
    text = base(image, source="vendor/pytorch", mirror=None)
    assert "--system-site-packages /opt/dni/venv" in text
    assert "--system-site-packages" not in base(ImageSpec())


def test_scripts_become_the_worker() -> None:
    for name in ("runscript", "startscript"):
        (line,) = section(base(ImageSpec()), name).split("\n")[:1]
        assert line.strip().startswith("exec ")  # without exec, SIGTERM never reaches the worker
        assert line.endswith('"$@"')


@pytest.mark.parametrize(
    "image",
    [
        ImageSpec(environment={"A": "x\n%setup\n    touch /owned"}),
        ImageSpec(environment={"A": "x\r%setup"}),
        ImageSpec(environment={"A": "{{ host }}"}),
        ImageSpec(environment={"A; reboot": "x"}),
        ImageSpec(environment={"A\n%setup": "x"}),
        ImageSpec(packages=("gcc\n%setup",)),
        ImageSpec(packages=("gcc; reboot",)),
        ImageSpec(packages=("-oDir::Etc=/tmp",)),
    ],
)
def test_values_cannot_leave_their_place(image: ImageSpec) -> None:
    with pytest.raises(SpecError) as caught:
        base(image)
    assert caught.value.location[0] == "image"


def test_requirements_and_source_cannot_leave_their_place() -> None:
    for source, requirement in [("a\n%setup", "torch"), ("a", "torch\n%setup"), ("a", "{{ x }}")]:
        with pytest.raises(SpecError):
            render_base(
                ImageSpec(), source=source, mirror="m", requirements=[requirement], torch="2"
            )


def test_module_definition() -> None:
    worker: Any = SimpleNamespace(module="head", chain="fashion")
    module = ModuleBuild(worker, {})
    text = render_module({"module": "head", "chain": "fashion"}, module.help)
    assert text.splitlines()[:2] == ["Bootstrap: localimage", "From: base.sif"]
    assert sections(text) == ["files", "labels", "help"]
    assert "    io.dni-runtime.chain fashion\n    io.dni-runtime.module head\n" in text
    assert "apptainer run head.sif --help" in section(text, "help")


def test_module_labels_and_help_cannot_open_a_section() -> None:
    with pytest.raises(SpecError):
        render_module({"module": "x\n%post"}, "help")
    text = render_module({"module": "x"}, "first\n%post\n  %setup")
    assert sections(text) == ["files", "labels", "help"]
