"""``python -m dni_runtime.worker``: serves one module. What a module image runs."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dni_runtime.errors import DniError, exited
from dni_runtime.garbage import collect_seldom, run_program
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.start import IMAGE_SPEC, WorkerStart, parser

if TYPE_CHECKING:  # it imports zmq
    from dni_runtime.worker.signals import StopRequest

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


def keep_log(path: Path) -> None:
    """Write the log to a file, too: no supervisor keeps what the launcher prints."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().addHandler(handler)


@contextmanager
def started(start: WorkerStart) -> Iterator[StopRequest]:
    """Prepare the process of a worker, and turn its errors into messages and exit codes."""
    os.umask(0o077)
    logging.basicConfig(
        level=start.log_level.upper(),
        stream=sys.stderr,
        format=FORMAT,
    )
    from dni_runtime.worker.memory import keep_freed_memory
    from dni_runtime.worker.signals import StopRequest

    keep_freed_memory()
    stop = StopRequest()
    stop.install()
    source = Path("/opt/dni/src") if IMAGE_SPEC.is_file() else Path(start.run, "src")
    sys.path.insert(0, str(source))
    try:
        yield stop
    except DniError as error:
        logging.getLogger("dni_runtime.worker").error("%s", error)
        sys.exit(error.exit_code)
    except SystemExit as error:
        if (of_user := exited(error)) is None:
            raise
        logging.getLogger("dni_runtime.worker").error("%s", of_user)
        sys.exit(of_user.exit_code)
    except Exception:
        logging.getLogger("dni_runtime.worker").exception("the worker failed: please report this")
        sys.exit(70)
    finally:
        stop.ignore()


def main() -> None:
    """Parse, and serve."""
    began = time.time()
    collect_seldom()  # until the worker serves
    options = vars(parser().parse_args())
    selftest = options.pop("selftest")
    start = WorkerStart(**options)
    with started(start) as stop:
        from dni_runtime.core.dynamo import postpone_dynamo
        from dni_runtime.worker import main as worker  # torch: seconds to import
        from dni_runtime.worker.options import by_rank, load_spec

        postpone_dynamo()
        if start.by_rank:
            start = by_rank(start, os.environ)
            keep_log(RunDir(Path(start.run)).log(start.module, start.attempt))
        if selftest:
            worker.selftest(load_spec(start))
        else:
            worker.serve(start, stop, began)


if __name__ == "__main__":
    run_program(main)
