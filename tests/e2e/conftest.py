"""Real programs: what they need, and small helpers to run them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.image.apptainer import Apptainer, find_apptainer
from dni_runtime.measure.figures import MetricsReader, RunFigures
from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.state import RunState, lives, process_birth
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.child import session_of
from dni_runtime.spec import ChainSpec
from tests.conftest import eventually
from tests.e2e.programs import STAND_IN, STARTS, Program
from tests.e2e.workers import Chain

MODULES = ["bottom", "middle", "top"]

CHAIN = """\
name: digits
seed: 3
data: {dataset: digits, batch_size: 64, flatten: true}
epochs: %d
stop_grace_s: 20
defaults: {optimizer: {Adam: {lr: 0.002}}}
modules:
  - name: bottom
    layers: [{Linear: {in_features: 64, out_features: 64}}, {BatchNorm1d: {num_features: 64}}, ReLU]
  - name: middle
    layers: [{Linear: {in_features: 64, out_features: 64}}, {BatchNorm1d: {num_features: 64}}, ReLU]
  - name: top
    layers: [{Linear: {in_features: 64, out_features: 10}}]
"""

PAIR = re.sub(r"  - name: middle\n.*\n", "", CHAIN)
"""The chain without its module in the middle."""
ENDS = ["bottom", "top"]

PAUSE = """\
import time
from torch import nn

class Pause(nn.Module):
    def forward(self, h):
        if self.training:
            time.sleep(0.03)
        return h
"""
"""A layer that takes its time: a chain is still training when something happens to it, and leaves
the processors to what starts beside it."""

PAUSES = "{import: 'pause:Pause'}"

FOREVER = 100_000


def missing(reason: str) -> NoReturn:
    """A tool that is not there: a skip on a user's machine, a failure in CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"CI must run this test, but: {reason}")
    pytest.skip(reason)


def need(program: str) -> str:
    """The path of a program that a test cannot do without."""
    path = shutil.which(program)
    return path if path is not None else missing(f"{program} is not installed")


@pytest.fixture(autouse=True)
def _quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in STARTS:
        monkeypatch.setattr(module, "subprocess", STAND_IN)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[ChainSpec], Chain]]:
    """Makes chains of workers without a launcher."""
    made: list[Chain] = []

    def build(chain: ChainSpec) -> Chain:
        made.append(Chain(tmp_path / f"run {len(made)}", chain))
        return made[-1]

    yield build
    for chain in made:
        chain.kill()


@pytest.fixture(scope="session")
def tool() -> Apptainer:
    """The container program, as an ordinary user."""
    try:
        found = find_apptainer()
    except UnavailableError as error:
        missing(str(error))
    if os.geteuid() == 0:
        missing("Apptainer is not run as root: use scripts/as-user")
    return found


@pytest.fixture(scope="session")
def slurm() -> str:
    """A Slurm of three hosts; the network that they share."""
    need("sbatch")
    shown = run(["sinfo", "--noheader", "--Node", "--format=%N %T"], timeout_s=60)
    up = {line.split()[0] for line in shown.stdout.splitlines() if line.endswith(" idle")}
    if not {"n1", "n2", "n3"} <= up:
        missing(
            "no testbed of three idle hosts n1, n2, n3: 'scripts/slurm-testbed up' as root, and "
            f'eval "$(scripts/slurm-testbed env)"; sinfo says: {shown.stdout or shown.stderr}'
        )
    return "10.77.0.0/24"


@pytest.fixture
def dnictl(slurm: str, tmp_path: Path) -> Iterator[Dnictl]:
    """dnictl in a folder of its own, beside a Slurm; jobs that a test leaves are cancelled."""
    made = Dnictl(tmp_path)
    yield made
    for process in made.started:
        process.kill()
    for record in tmp_path.glob("runs/*/job.json"):
        job = json.loads(record.read_text())["job"]
        if job is not None:
            run(["scancel", "--quiet", job])
            eventually("the job is gone", lambda job=job: not state_of(job), within_s=90)


def state_of(job: str) -> str:
    """A Slurm job's state; empty when it has ended."""
    return run(["squeue", "--noheader", f"--jobs={job}", "--format=%T"]).stdout.strip()


@pytest.fixture(scope="session")
def fashion_mnist() -> Path:
    """The folder of the real data, got as ``make demo`` gets it."""
    root = Path(__file__).resolve().parents[2]
    done = run([root / "scripts" / "fetch-fashion-mnist", root / "build" / "fashion-mnist"])
    if done.returncode == 69:
        missing(done.stderr)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def command_of(pid: int) -> bytes:
    """A living process's command line; empty when there is none."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
    return command if process_birth(pid) is not None else b""


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names a folder."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    name = str(folder).encode()
    return [pid for pid in pids if pid != os.getpid() and name in command_of(pid)]


def sessions_of(folder: Path) -> list[int]:
    """Processes in the sessions of the workers of a folder's runs: a container's, too."""
    leaders = {
        module.pid
        for run in folder.glob("runs/*")
        for module in RunState.read(RunDir(run)).modules.values()
        if module.pid and (lives(module) or process_birth(module.pid) is None)  # helpers stay
    }
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if session_of(pid) in leaders and process_birth(pid) is not None]


def figures_of(run: Path) -> RunFigures:
    """The figures of a run."""
    return MetricsReader(Record.read(run)).read()


@dataclass(frozen=True)
class Dnictl:
    """Runs ``dnictl`` in a folder."""

    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)  # on top of this process's
    started: list[Program] = field(default_factory=list)  # so far

    def start(self, *arguments: str | Path) -> Program:
        """Start it."""
        environ = {**os.environ, **self.environ}
        process = Program("dnictl", [*map(str, arguments)], self.folder, environ)
        self.started.append(process)
        return process

    def run(
        self, *arguments: str | Path, expect: int = 0, timeout_s: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end; the exit status must be the expected one."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        assert process.returncode == expect, (
            f"dnictl {' '.join(map(str, arguments))}: exit status {process.returncode}\n"
            f"{out}\n{err}"
        )
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *arguments: str | Path, expect: int = 0) -> Any:
        """Run it with ``--json`` and return the document."""
        return json.loads(self.run(*arguments, "--json", expect=expect).stdout)


class Site(Dnictl):
    """A folder with a chain, and at most one run."""

    def write(self, epochs: int, *settings: str, slow: bool = False, chain: str = CHAIN) -> Path:
        """Write a chain; the head of a slow one takes 30 ms longer for each training batch."""
        text = "\n".join([chain % epochs, *settings, ""])
        if slow:
            (self.folder / "pause.py").write_text(PAUSE)
            text = text.replace("ReLU]", f"ReLU, {PAUSES}]", 1)
        path = self.folder / "chain.yaml"
        path.write_text(text)
        return path

    @property
    def latest(self) -> RunDir:
        """The one run."""
        (root,) = (self.folder / "runs").iterdir()
        return RunDir(root)

    @property
    def figures(self) -> RunFigures:
        """The figures of the one run, as ``dnictl status`` has them."""
        return figures_of(self.latest.root)

    def cuts(self, modules: list[str] = MODULES) -> list[int]:
        """Complete checkpoints of the one run."""
        runs = self.folder / "runs"
        return complete_cuts(self.latest, modules) if runs.is_dir() and any(runs.iterdir()) else []

    def wait_for_checkpoint(self, modules: list[str] = MODULES) -> None:
        """Wait until the run has written a new complete checkpoint."""
        first = self.cuts(modules)
        eventually("a complete checkpoint", lambda: self.cuts(modules) not in ([], first))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder to work in; whatever is left running in the end is a failure, and is ended."""
    made = Site(tmp_path)
    try:
        yield made
        eventually(
            "no process is left behind",
            lambda: not processes_of(tmp_path) and not sessions_of(tmp_path),
            15,
        )
    finally:
        for pid in {*processes_of(tmp_path), *sessions_of(tmp_path)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in made.started:
            process.kill()
            process.communicate(timeout=30)


def run(
    argv: Sequence[str | Path],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run another program, in this process's environment or in the one given."""
    words = [str(word) for word in argv]
    with subprocess.Popen(
        words,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.terminate()  # first: of who is killed, workers and containers stay
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)
