"""How a process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """\
import atexit, sys, threading, time
from dni_runtime.garbage import run_program

class Stays:
    def __del__(self):
        print("freed")

def main():
    def late():
        time.sleep(0.2)
        print("thread")
    atexit.register(print, "atexit")
    threading.Thread(target=late).start()
    print("main", end="")
    {ends}

stays = Stays()
run_program(main)
"""


@pytest.mark.parametrize(
    ("ends", "code"),
    [("", 0), ("sys.exit(75)", 75), ("sys.exit()", 0), ("1 / 0", 1)],
)
def test_all_but_memory_is_taken_care_of(ends: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ends=ends)], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("mainthread\natexit\n")
    assert ("freed" in done.stdout) is ("ZeroDivisionError" in done.stderr) is (ends == "1 / 0")


def test_torch_does_not_take_its_operators_apart() -> None:
    """That is work of a process that is about to end; finalizers of others are called."""
    program = """\
import atexit, weakref
from dni_runtime.garbage import run_program

class Named:
    pass

def main():
    atexit.register(lambda: print(len(weakref.finalize._registry) > 10))  # after those of torch
    import torch
    weakref.finalize(Named, print, "finalized")

run_program(main)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("finalized\nTrue\n", "")


def test_a_reader_that_is_gone_changes_no_exit_code() -> None:
    program = (
        "import sys; from dni_runtime.garbage import run_program; "
        "run_program(lambda: sys.exit(bool(print(1)) or 3))"
    )
    command = [sys.executable, "-E", "-c", program]  # -E: print waits for the end, as by default
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 3


def test_a_log_without_room_is_not_complained_about() -> None:
    code = """\
import logging, sys
from dni_runtime.garbage import run_program

def main():
    logging.basicConfig(filename="/dev/full")
    logging.warning("lost")
    sys.exit(74)

run_program(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (74, "")
