"""A service, as others see it."""

from __future__ import annotations

import os
import time

from dni_runtime.run.documents.state import process_birth
from dni_runtime.serving.documents import ServiceState


def test_a_service_lives_as_long_as_its_process() -> None:
    pid, host = os.getpid(), os.uname().nodename
    state = ServiceState(name="a", phase="running", pid=pid, born=process_birth(pid), host=host)
    assert state.alive, "however old what it has written is"
    assert not state.model_copy(update={"born": 1}).alive
    assert not state.model_copy(update={"phase": "ended"}).alive


def test_on_another_host_as_long_as_it_says_so() -> None:
    state = ServiceState(name="a", phase="running", host="elsewhere", updated=time.time() - 20)
    assert state.alive
    assert not state.model_copy(update={"updated": time.time() - 90}).alive, "it was killed"
