"""What a worker is told when it starts: its command line, as data.

Each field of :class:`WorkerStart` is an option of ``python -m dni_runtime.worker``. The parser and
the commands of planned workers (``schedulers/runtimes.py``) follow from the fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dni_runtime import __version__
from dni_runtime.errors import HandshakeError

IMAGE_SPEC = Path("/opt/dni/module.json")
OWN = "own"
"""``--resume`` of a worker that starts while the others go on (``worker/resume.py``)."""
IMAGE_SERVING = Path("/opt/dni/serving")
"""In a release's image: ``module.json``, as which it answers, and ``weights.safetensors``."""

EPILOG = """\
In an image the module's spec is the image's own, and everything else has a default: two modules are
wired by giving both the same --run folder. Without a shared folder, give one a --listen address and
the other the same as --connect. Exit codes: 0 finished, 75 stopped after a checkpoint (start it
again to go on), others as in sysexits(3).
"""


def _option(
    help: str,
    default: Any = None,
    *,
    type: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
) -> Any:
    """Return a field that is an option, with what ``add_argument`` needs."""
    metadata = {"help": help, "type": type, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def _where_to_resume(text: str) -> str:
    if text not in ("auto", "own", "none") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, own, none or a number")
    return text


def _number_of_start(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else uuid.UUID(text).int >> 65
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a UUID") from None


@dataclass(frozen=True)
class WorkerStart:
    """One start of one worker; paths are as the worker sees them."""

    run: str = _option("run directory (%(default)s)", ".")
    module: str = _option("which module (default: the image's)", "")
    by_rank: bool = _option(
        "the worker of this process's rank: mpirun, srun; in an Indexed Job that of --module", False
    )
    spec: str | None = _option("the module's spec (default: image's, else run's)")
    ipc: str = _option("folder for ipc sockets", "")
    attempt: int = _option("which start of the module this is", 1, type=int)
    first: int | None = _option("the attempt that --resume is meant for (this one)", type=int)
    start: int | None = _option(
        "with --by-rank: which start of the whole chain this is, the same for all ranks and each "
        "time another: a higher number, such as $(date +%%s), or the UUID of a Job",
        type=_number_of_start,
    )
    resume: str = _option(
        "auto, own, none, or a checkpoint's number", "auto", type=_where_to_resume
    )
    replicas: dict[str, int] = dataclasses.field(
        default_factory=dict,
        metadata={
            "help": "JSON: replicas in this start, of each elastic module",
            "type": json.loads,
        },
    )
    log_level: str = _option(
        "how much to log (%(default)s)", "info", choices=("debug", "info", "warning", "error")
    )
    transport: str | None = _option("of the link from upstream", choices=("ipc", "tcp"))
    interface: str | None = _option("for tcp: interface, address or network to listen on")
    listen: str | None = _option("address to listen on: ipc://PATH or tcp://IP:PORT")
    connect: str | None = _option("address of the module downstream")
    data: str | None = _option("folder or file of the data or labels that the module reads")
    keys: str | None = _option(
        "folder of the worker's key pair and its neighbours' public keys, which the launcher keeps "
        "from others, such as a Secret's (default: the run's)"
    )
    given: str | None = _option(
        "with --by-rank: folder of the run's first files, for a run directory without them"
    )

    def argv(self) -> list[str]:
        """Return the arguments of a worker that is to start so."""
        words = list[str]()
        for field in dataclasses.fields(WorkerStart):
            value, name = getattr(self, field.name), _name_of(field)
            if value in (field.default, {}):
                continue
            if isinstance(value, bool):
                words.append(name)
            else:
                words += [name, json.dumps(value) if isinstance(value, dict) else str(value)]
        return words


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="dni-worker", description="Serves one module of a chain.", epilog=EPILOG
    )
    for field in dataclasses.fields(WorkerStart):
        if field.default is False:
            p.add_argument(_name_of(field), action="store_true", help=field.metadata["help"])
        else:
            p.add_argument(_name_of(field), default=field.default, **field.metadata)
    p.set_defaults(replicas={})
    if IMAGE_SPEC.is_file():
        p.set_defaults(run="/dni/run")
    p.add_argument("--selftest", action="store_true", help="train on two batches of zeros and exit")
    p.add_argument("--version", action="version", version=f"dni-runtime {__version__}")
    return p


def _name_of(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


STARTED_WITH = "DNI_STARTED_WITH"
"""Environment variable with the versions that the run was started with."""


def this_version() -> str:
    """Return this package's value of ``STARTED_WITH``: its version and its links' protocol."""
    from dni_runtime.wire import PROTOCOL_VERSION  # imports numpy: not only to read plans

    return f"{__version__} {PROTOCOL_VERSION}"


def replaced(environ: Mapping[str, str]) -> str | None:
    """Return a warning if the run was started with another version of this package.

    Raises ``HandshakeError`` if the links of the two versions are incompatible.
    """
    this = this_version()
    started_with = environ.get(STARTED_WITH, this)
    if started_with == this:
        return None
    version, _, protocol = started_with.partition(" ")
    own_protocol = this.partition(" ")[2]
    what = f"the run was started with dni-runtime {version}, and {__version__} is installed now"
    if protocol != own_protocol:
        raise HandshakeError(
            f"{what}: their links are incompatible (protocol {protocol}, {own_protocol})",
            hint="'dnictl resume' continues from the newest checkpoint with all modules in the new "
            "version; to restart a single module, reinstall the old one",
        )
    return f"{what}: other modules still run the old one; 'dnictl stop', then 'dnictl resume'"
