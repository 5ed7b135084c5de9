"""A definition's shell sections, read by a shell."""

from __future__ import annotations

import subprocess

import pytest

from dni_runtime.spec import ImageSpec
from tests.unit.image.test_definition import base, section


@pytest.mark.parametrize("name", ["post", "runscript", "startscript", "test"])
@pytest.mark.parametrize("agent", ["debootstrap", "docker"])
def test_shell_sections_are_shell(name: str, agent: str) -> None:
    image = ImageSpec.model_validate(
        {"base": {"bootstrap": agent}, "packages": ["gcc", "g++"], "torch": "base"}
    )
    script = section(base(image), name)
    done = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_environment_values_are_quoted() -> None:
    text = section(base(ImageSpec(environment={"A": "a b $(reboot) 'q'"})), "environment")
    shell = text + '\nprintf %s "$A"'
    done = subprocess.run(["sh"], input=shell, text=True, capture_output=True, check=True)
    assert done.stdout == "a b $(reboot) 'q'"
