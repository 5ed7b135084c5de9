"""Real, short-lived processes: they obey, leave nothing behind, and outlive who starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.plan.plan import WorkerPlan
from dni_runtime.run.documents.state import ModuleState, process_birth, shell_status
from dni_runtime.schedulers import child, forkserver
from dni_runtime.schedulers.processes import CHILD, LocalStarter, Process
from dni_runtime.schedulers.runtimes import process_argv, worker_argv
from tests.conftest import eventually

ROOT = Path(__file__).resolve().parents[3]
PYTHON = [sys.executable, "-I", "-S", "-c"]


@pytest.fixture(autouse=True)
def _a_busy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "READY_S", 120.0)  # else others are started without the server


KINDS = ["process", "m.sif", "fork"]
"""Workers in containers have a watcher beside them, and forks a server; they do the same."""

FORKS_CODE = f"""\
#!{sys.executable}
import os, sys, types
for name in ("torch", "torch._dynamo", "dni_runtime.worker.main"):
    sys.modules[name] = types.ModuleType(name)
from dni_runtime.schedulers import forkserver
forkserver.worker.main = lambda: exec(os.environ["CODE"], {{}})
forkserver.main()
"""
"""An interpreter for the server, whose workers run CODE."""


def plan(tmp_path: Path, code: str, kind: str = "process", **environment: str) -> WorkerPlan:
    log = str(tmp_path / "m.log")
    python = tmp_path / "python"
    python.write_text(FORKS_CODE if kind == "fork" else f"#!{sys.executable} -IS\n{code}")
    python.chmod(0o700)
    return WorkerPlan(
        "", "m", log=log, environment=environment | {"CODE": code}, python=str(python),
        image=kind if kind == "m.sif" else None,
    )  # fmt: skip


def starter_of(kind: str, environ: dict[str, str] | None = None) -> LocalStarter:
    render = worker_argv if kind == "fork" else process_argv  # others have no server
    return LocalStarter(environ, render=render)


def finish(process: Process) -> int:
    """Return its exit code, as a shell reports it."""
    eventually("it ends", lambda: process.poll() is not None)
    code = process.poll()
    assert code is not None
    return shell_status(code)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_environment(tmp_path: Path, kind: str) -> None:
    code = (
        "import os, sys; print(os.environ['A']); print(os.environ['B'], file=sys.stderr); "
        "sys.exit(3)"
    )
    starter = starter_of(kind, {"A": "given", "B": "old"})
    assert finish(starter.start(plan(tmp_path, code, kind, B="planned"))) == 3
    log = tmp_path / "m.log"
    assert sorted(log.read_text().split()) == ["given", "planned"]
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", KINDS)
def test_signals(tmp_path: Path, kind: str) -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    process = starter_of(kind).start(plan(tmp_path, code, kind))
    eventually("it is ready", lambda: "ready" in (tmp_path / "m.log").read_text())
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process) == 128 + signal.SIGTERM
    process.kill()  # nobody is there any more


@pytest.mark.parametrize("kind", ["process", "fork"])
def test_no_terminal_and_a_session_of_its_own(tmp_path: Path, kind: str) -> None:
    code = "import os; print(os.getpid() == os.getsid(0) == os.getpgid(0), os.read(0, 1))"
    assert finish(starter_of(kind).start(plan(tmp_path, code, kind))) == 0
    assert (tmp_path / "m.log").read_text() == "True b''\n"


FORKS = """\
import os, time
child = os.fork()
if child == 0:
    if {own_group}:
        os.setpgid(0, 0)
    time.sleep(60)
print(child, flush=True)
{then}
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("then", ["os._exit(0)", "time.sleep(60)"])
def test_what_a_worker_started_ends_with_it(
    tmp_path: Path, then: str, own_group: bool, kind: str
) -> None:
    code = FORKS.format(then=then, own_group=own_group)
    process = starter_of(kind).start(plan(tmp_path, code, kind))
    log = tmp_path / "m.log"
    eventually("it writes", lambda: log.exists() and log.read_text().endswith("\n"))
    if "sleep" in then:
        process.kill()
    finish(process)
    eventually("it is gone", lambda: process_birth(int(log.read_text())) is None)


PARENT = """\
import sys, time
from pathlib import Path
from tests.integration.schedulers.test_processes import plan, starter_of
starter = starter_of(sys.argv[3])
print(starter.start(plan(Path(sys.argv[1]), sys.argv[2], sys.argv[3])).pid, flush=True)
time.sleep(60)
"""

SAYS_WHAT_IT_GETS = """\
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"SIGTERM"), os._exit(0)))
os.write(1, b"ready ")
time.sleep(60)
"""


def of_a_killed_parent(tmp_path: Path, kind: str) -> int:
    """Let a process start a worker, and kill it; return the worker's process id."""
    log = tmp_path / "m.log"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), SAYS_WHAT_IT_GETS, kind],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        eventually("it is ready", lambda: log.exists() and "ready" in log.read_text())
        parent.kill()
    return pid


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_goes_on_when_its_parent_is_killed(tmp_path: Path, kind: str) -> None:
    pid = of_a_killed_parent(tmp_path, kind)
    if kind == "fork":
        eventually("the server is gone", lambda: str(tmp_path / "python") not in processes())
    assert process_birth(pid) is not None
    os.kill(pid, signal.SIGTERM)
    eventually("it is gone", lambda: process_birth(pid) is None)
    assert (tmp_path / "m.log").read_text().split() == ["ready", "SIGTERM"]


def processes() -> str:
    """The command lines of all processes."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_a_fork_shows_its_own_command(tmp_path: Path) -> None:
    process = LocalStarter().start(plan(tmp_path, "import time; time.sleep(60)", "fork"))
    eventually("it has its name", lambda: "dni-worker --run  --module m" in processes())
    process.kill()
    assert finish(process) == 128 + signal.SIGKILL


def test_a_killed_fork_server_takes_no_worker_with_it(tmp_path: Path) -> None:
    """What has ended since has an unknown exit code; others are started without it."""
    starter = LocalStarter()
    worker = plan(tmp_path, "import time; print('ready', flush=True); time.sleep(60)", "fork")
    first, second = starter.start(worker), starter.start(worker)
    server = int(Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    eventually("it is gone", lambda: process_birth(server) is None)
    assert (first.poll(), second.poll()) == (None, None)
    first.kill()
    assert finish(first) == 128 + signal.SIGKILL
    script = tmp_path / "python"  # what it is given is a command now
    script.write_text("#!/bin/sh\nexit 3\n")
    assert finish(starter.start(worker)) == 3
    second.kill()
    assert finish(second) == 128 + signal.SIGKILL


def test_a_fork_server_that_does_not_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, or hangs: others are started without it, and none by it later."""
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.3)
    starter = LocalStarter()
    worker = plan(tmp_path, "import time; print('ready', flush=True); time.sleep(60)", "fork")
    first = starter.start(worker)
    eventually("it is ready", lambda: (tmp_path / "m.log").read_text() == "ready\n")
    server = int(Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGSTOP)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    assert finish(starter.start(worker)) == 3
    assert process_birth(server) is None
    assert (tmp_path / "m.log").read_text() == "ready\n"
    assert first.poll() is None
    first.kill()
    assert finish(first) == 128 + signal.SIGKILL


def test_a_worker_has_ended_though_its_server_does_not_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "_ANSWER_S", 0.3)
    worker = plan(tmp_path, "import time; print('ready', flush=True); time.sleep(60)", "fork")
    process = LocalStarter().start(worker)
    eventually("it is ready", lambda: (tmp_path / "m.log").read_text() == "ready\n")
    server = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process) == 128 + signal.SIGKILL
    assert process_birth(server) is None


def test_a_fork_server_that_cannot_begin(tmp_path: Path) -> None:
    worker = plan(tmp_path, "", "fork")
    (tmp_path / "python").write_text("#!/bin/sh\necho no torch >&2; exit 70\n")
    assert finish(LocalStarter().start(worker)) == 70
    assert (tmp_path / "m.log").read_text() == "no torch\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_watcher_ends_as_the_watched(tmp_path: Path, number: signal.Signals) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    assert finish(starter_of("m.sif").start(plan(tmp_path, code, "m.sif"))) == 128 + number


def wrapper(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHILD, *command],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


TIES = """\
import os, subprocess, sys
from dni_runtime.schedulers.processes import CHILD
subprocess.Popen([*CHILD, "tied", str(os.getpid()), *sys.argv[1:]])
os.read(0, 1)
"""


def test_a_tied_command_is_told_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", TIES, *PYTHON, SAYS_WHAT_IT_GETS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert os.read(parent.stdout.fileno(), 6) == b"ready "
        parent.kill()
        assert parent.stdout.read() == b"SIGTERM"


def test_the_wrapper_of_an_orphan_starts_nothing() -> None:
    done = wrapper("tied", "1", "echo", "hello")
    assert (done.returncode, done.stdout) == (143, "")


def test_the_wrapper_reports_what_cannot_be_run(tmp_path: Path) -> None:
    done = wrapper("watch", str(tmp_path / "nothing"))
    assert (done.returncode, done.stderr) == (
        127, f"{tmp_path}/nothing: No such file or directory\n",
    )  # fmt: skip
    (tmp_path / "text").write_text("x")
    assert wrapper("watch", str(tmp_path / "text")).returncode == 126


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    worker = WorkerPlan("", "m", log=str(tmp_path / "no" / "m.log"))
    with pytest.raises(UnavailableError, match="module 'm' cannot be started"):
        LocalStarter().start(worker)


def test_a_process_that_another_one_has_started(tmp_path: Path) -> None:
    starter = starter_of("process")
    worker = plan(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    child = starter.start(worker)
    known = ModuleState(state="running", pid=child.pid, born=process_birth(child.pid))
    process = starter.adopt(worker, known)
    eventually("it is ready", lambda: "ready" in (tmp_path / "m.log").read_text())
    assert (process.pid, process.poll()) == (child.pid, None)
    process.kill()
    assert finish(process) == 128 + signal.SIGKILL
    assert finish(child) == 128 + signal.SIGKILL
    process.kill()  # nobody is there


def test_a_number_that_is_another_processs_by_now(tmp_path: Path) -> None:
    born = process_birth(os.getpid())
    assert born is not None
    known = ModuleState(state="running", pid=os.getpid(), born=born - 1)
    process = LocalStarter().adopt(plan(tmp_path, ""), known)
    process.kill()
    assert process.poll() == -signal.SIGKILL


def distant(tmp_path: Path, code: str) -> Process:
    """A worker at the other end of a connection, which is a pipe here."""

    def connect(worker: WorkerPlan) -> list[str]:
        # in a session of its own, which the near end cannot reach
        far = ["setsid", sys.executable, "-I", "-S", child.__file__, "receive"]
        return [*far, *process_argv(worker)]

    return LocalStarter(render=connect, connected=True).start(plan(tmp_path, code))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_a_distant_worker(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        "print(os.getpid() == os.getsid(0), os.read(0, 1), flush=True); time.sleep(60)"
    )
    process = distant(tmp_path, code)
    eventually("it writes", lambda: (tmp_path / "m.log").read_text() == "True b''\n")
    os.kill(process.pid, number)
    assert finish(process) == (7 if number == signal.SIGUSR1 else 128 + signal.SIGTERM)


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("then", ["os._exit(0)", "time.sleep(60)"])
def test_what_a_distant_worker_started_ends_with_it(
    tmp_path: Path, then: str, own_group: bool
) -> None:
    """Also where the connection is lost, as it is with the process that stands for the worker."""
    process = distant(tmp_path, FORKS.format(then=then, own_group=own_group))
    log = tmp_path / "m.log"
    eventually("it writes", lambda: log.exists() and log.read_text().endswith("\n"))
    if "sleep" in then:
        os.kill(process.pid, signal.SIGKILL)
    assert finish(process) == (128 + signal.SIGKILL if "sleep" in then else 0)
    eventually("it is gone", lambda: process_birth(int(log.read_text())) is None)


def test_a_distant_worker_that_is_killed(tmp_path: Path) -> None:
    code = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert finish(distant(tmp_path, code)) == 128 + signal.SIGKILL


def test_silence_ends_a_distant_worker(tmp_path: Path) -> None:
    code = (
        "from dni_runtime.schedulers import child\n"
        "child._SILENT_S = 0.2\n"
        "child.receive(['sleep', '60'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 128 + signal.SIGKILL


def test_the_far_end_passes_its_own_signals_on(tmp_path: Path) -> None:
    far = [sys.executable, "-I", "-S", child.__file__, "receive", *PYTHON, SAYS_WHAT_IT_GETS]
    with subprocess.Popen(far, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 6) == b"ready "
        process.terminate()
        assert process.stdout.read() == b"SIGTERM"
        assert process.wait(30) == 0
