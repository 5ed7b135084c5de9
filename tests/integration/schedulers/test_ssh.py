"""What a check of hosts finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.schedulers.ssh import Ssh
from dni_runtime.spec import ChainSpec, WorkerSpec
from tests.unit.runs import chain as small
from tests.unit.runs import workers
from tests.unit.schedulers.test_ssh import plan_of

__all__ = ["small", "workers"]


@pytest.fixture
def chain(small: ChainSpec) -> ChainSpec:
    links = small.links.model_copy(update={"interface": "10.0.0.0/24"})
    return small.model_copy(update={"links": links})


SSH = """\
#!/bin/sh
for last; do :; done
case "$*" in
*" b "*) {b} ;;
*) eval "$last" ;;
esac
"""


@pytest.mark.parametrize(
    ("b", "problem"),
    [
        ('eval "$last"', None),
        ("echo 'ssh: no route' >&2; exit 255", "host 'b' cannot be used: ssh: no route"),
        ("exit 255", "host 'b' cannot be used: exit status 255"),
        ("echo /some/python; exit 1", "host 'b' has no '/some/python'"),
    ],
)
def test_hosts_are_checked(
    chain: ChainSpec,
    workers: tuple[WorkerSpec, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    b: str,
    problem: str | None,
) -> None:
    """By a program ``ssh`` that knows two hosts: this one and ``b``."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(b=b))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    plan = plan_of(chain, workers, tmp_path, "a", "b")
    if problem is None:
        Ssh().check(plan)
    else:
        with pytest.raises(UnavailableError) as caught:
            Ssh().check(plan)
        assert caught.value.message == problem
