"""``python -m dni_runtime.worker``: serves one module. What a module image runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from dni_runtime import __version__
from dni_runtime.errors import DniError
from dni_runtime.garbage import collect_seldom, run_program
from dni_runtime.rundir import RunDir

IMAGE_SPEC = Path("/opt/dni/module.json")
FORMAT = "%(asctime)s %(levelname)-7s %(message)s"

EPILOG = """\
In an image the module's spec is the image's own, and everything else has a default: two modules are
wired by giving both the same --run folder. Without a shared folder, give one a --listen address and
the other the same as --connect. Exit codes: 0 finished, 75 stopped after a checkpoint (start it
again to go on), others as in sysexits(3).
"""


def parser() -> argparse.ArgumentParser:
    """The worker's command line."""
    p = argparse.ArgumentParser(
        prog="dni-worker", description="Serves one module of a chain.", epilog=EPILOG
    )
    run = "/dni/run" if IMAGE_SPEC.is_file() else "."
    p.add_argument("--run", type=Path, default=Path(run), help="run directory (%(default)s)")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--module", help="which module (default: the image's)")
    which.add_argument(
        "--by-rank", action="store_true", help="the worker of this process's rank: mpirun, srun"
    )
    p.add_argument("--spec", type=Path, help="the module's spec (default: image's, else run's)")
    p.add_argument("--data", help="folder or file of the data, for the head")
    p.add_argument("--listen", help="address to listen on: ipc://PATH or tcp://IP:PORT")
    p.add_argument("--transport", choices=["ipc", "tcp"], help="of the link from upstream")
    p.add_argument("--interface", help="for tcp: interface, address or network to listen on")
    p.add_argument("--connect", help="address of the module downstream")
    p.add_argument("--ipc", type=Path, help="folder for ipc sockets")
    p.add_argument(
        "--start",
        type=int,
        metavar="N",
        help="with --by-rank: which start of the whole chain this is, the same for all ranks and "
        "each time a higher number, such as $(date +%%s)",
    )
    p.add_argument("--attempt", type=int, default=1, help="which start of the module this is")
    p.add_argument("--first", type=int, help="the attempt that --resume is meant for (this one)")
    p.add_argument("--resume", default="auto", help="auto, own, none, or a checkpoint's number")
    p.add_argument("--replicas", help="JSON: replicas in this start, of each elastic module")
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    p.add_argument("--selftest", action="store_true", help="train on two batches of zeros and exit")
    p.add_argument("--version", action="version", version=f"dni-runtime {__version__}")
    return p


def keep_log(path: Path) -> None:
    """Write the log to a file, too: no supervisor keeps what the launcher prints."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)


def main() -> None:
    """Parse, serve, and turn errors into messages and exit codes."""
    began = time.time()
    collect_seldom()  # until the worker serves
    given: dict[str, Any] = vars(parser().parse_args())
    level, selftest = given.pop("log_level"), given.pop("selftest")
    if given["resume"] not in ("auto", "own", "none") and not given["resume"].isdecimal():
        parser().error(f"argument --resume: {given['resume']!r} is not auto, own, none or a number")
    os.umask(0o077)
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=FORMAT,
    )
    from dni_runtime.worker.memory import keep_freed_memory
    from dni_runtime.worker.signals import StopRequest

    keep_freed_memory()
    stop = StopRequest()
    stop.install()
    source = Path("/opt/dni/src") if IMAGE_SPEC.is_file() else given["run"] / "src"
    sys.path.insert(0, str(source))
    try:
        from dni_runtime.core.dynamo import postpone_dynamo
        from dni_runtime.worker import main as worker  # torch: seconds to import
        from dni_runtime.worker.options import Options, by_rank, load_spec

        postpone_dynamo()
        options = Options(**given, image_spec=IMAGE_SPEC)
        if options.by_rank:
            options = by_rank(options, os.environ)
            keep_log(RunDir(options.run).log(str(options.module), options.attempt))
        if selftest:
            worker.selftest(load_spec(options))
        else:
            worker.serve(options, stop, began)
    except DniError as error:
        logging.getLogger("dni_runtime.worker").error("%s", error)
        sys.exit(error.exit_code)
    except Exception:
        logging.getLogger("dni_runtime.worker").exception("the worker failed: please report this")
        sys.exit(70)
    finally:
        stop.ignore()


if __name__ == "__main__":
    run_program(main)
