"""What a run has written so far: ``logs`` of its workers, ``events`` of its supervisor."""

from __future__ import annotations

import heapq
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UsageError
from dni_runtime.run.lines import LineReader, offset_of_last
from dnictl import options
from dnictl.terminal import json_text, json_wanted, printable, tell

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.run.documents.events import Event

SUPERVISOR = "supervisor"
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
# logging's own form: date, time and milliseconds, which sort as text.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")

lines_option = options.noted_option("--json", is_flag=True, help="Print one JSON object per line.")


@dataclass(frozen=True)
class LogLine:
    """One line of a log; continuation lines carry the time of the line that they continue."""

    module: str
    attempt: int
    time: str | None  # None: before the first line with one
    line: str


class Follower:
    """Reads a log's new lines; the first read begins about ``tail`` lines before the end."""

    def __init__(self, path: Path, module: str, attempt: int, tail: int | None = None) -> None:
        self.path = path
        self._module = module
        self._attempt = attempt
        self._lines = LineReader(
            path, bytes, offset=0 if tail is None else offset_of_last(path, tail)
        )
        self._stamp: str | None = None

    def new(self, *, all_of_it: bool = False) -> Iterator[LogLine]:
        """Yield added lines; with ``all_of_it`` also an unfinished last one."""
        for line in self._lines.new(all_of_it=all_of_it):
            text = line.decode(errors="replace")
            match = _STAMP.match(text)
            self._stamp = match[0] if match else self._stamp
            yield LogLine(self._module, self._attempt, self._stamp, text)


@click.command()
@click.argument(
    "names", nargs=-1, metavar="[RUN] [MODULE]...", shell_complete=options.complete_runs
)
@options.runs
@click.option("-f", "--follow", is_flag=True, help="Follow until the run has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option(
    "--attempt", type=click.IntRange(min=1), help="Only this attempt (default: the latest)."
)
@lines_option
def logs(
    names: tuple[str, ...], runs: Path, follow: bool, tail: int | None, attempt: int | None
) -> None:
    """Print the logs of a run's workers, merged by time.

    Without MODULE all modules are shown. The module 'supervisor' is the supervisor of a run in
    the background or of a job.

    \b
    Example:
      dnictl logs -f
      dnictl logs --tail 20 bottom
    """
    from dni_runtime.run.documents.reports import Report
    from dni_runtime.run.documents.state import RunState

    run, modules = _whose(names, runs)
    write = _printer(modules)
    followers: dict[Path, Follower] = {}

    def look(*, all_of_it: bool) -> Iterator[LogLine]:
        state = RunState.read(run.directory)
        for module in modules:
            report = state.modules.get(module) or Report.read(run.directory.worker(module))
            latest = attempt or report.attempt or 1
            path = (
                run.directory.supervisor_log
                if module == SUPERVISOR
                else run.directory.log(module, latest)
            )
            if path not in followers:
                followers[path] = Follower(path, module, latest, tail)
        batches = [list(follower.new(all_of_it=all_of_it)) for follower in followers.values()]
        yield from heapq.merge(*batches, key=lambda line: line.time or "")

    first: Iterator[LogLine] | deque[LogLine] = look(all_of_it=not follow)
    if tail is not None:
        first = deque(first, maxlen=tail)
    for line in first:
        write(line)
    if not follow:
        if not any(follower.path.exists() for follower in followers.values()):
            tell(f"{run.name} has no such logs")
        return
    for state in run.states():  # the state first, to miss nothing that is written before the end
        for line in look(all_of_it=not state.active):
            write(line)


def _whose(names: tuple[str, ...], runs: Path) -> tuple[Run, Sequence[str]]:
    """Return the run and the modules that NAMES stand for; RUN may be left out."""
    from dni_runtime.spec.named import module_of

    run: Run | None = None
    if names:
        try:
            latest = options.chosen_run(None, runs)
        except UsageError:
            latest = None
        known = [] if latest is None else [*latest.modules, *map(module_of, latest.modules)]
        if names[0] not in (*known, SUPERVISOR):
            run, names = options.chosen_run(names[0], runs), names[1:]
    run = run or options.chosen_run(None, runs)
    groups = [[name] if name == SUPERVISOR else run.workers_of(name) for name in names]
    return run, [worker for some in groups for worker in some] or run.modules


def _printer(modules: Sequence[str]) -> Callable[[LogLine], None]:
    width = max(len(module) for module in modules)
    colours = dict(zip(modules, _COLOURS * (len(modules) // len(_COLOURS) + 1), strict=False))

    shown = printable if sys.stdout.isatty() else str  # a file keeps the log as it is

    def write(line: LogLine) -> None:
        if json_wanted():
            click.echo(json_text(asdict(line)))
            return
        prefix = f"{line.module:{width}} | " if len(modules) > 1 else ""
        click.echo(click.style(prefix, fg=colours[line.module]) + shown(line.line))

    return write


@click.command()
@options.of_run
@click.option("-f", "--follow", is_flag=True, help="Follow until the run has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N events.")
@lines_option
def events(run: Run, follow: bool, tail: int | None) -> None:
    """Print what has happened in a run.

    Starts, ends and restarts of workers, and why.

    \b
    Example:
      dnictl events -f
    """
    from dni_runtime.run.documents.events import Event

    path = run.directory.events
    reader = LineReader(path, Event.parse, offset=0 if tail is None else offset_of_last(path, tail))
    limit = tail
    for _ in run.states():  # the state first, to miss nothing that is written before the end
        new = reader.new()
        if limit is not None:
            new, limit = iter(deque(new, maxlen=limit)), None
        for event in new:
            click.echo(json_text(event.to_dict()) if json_wanted() else _event_line(event))
        if not follow:
            return


def _event_line(event: Event) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    hidden = ("time", "event", "module")
    rest = [f"{k}={v}" for k, v in event.to_dict().items() if k not in hidden and v is not None]
    return printable("  ".join([stamp, event.event, event.module or "-", *rest]))
