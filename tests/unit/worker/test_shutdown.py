"""A module that was told to stop: what it requests, when, and at which marker it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from dni_runtime.wire import Mark
from dni_runtime.worker.farewell import ASK_AGAIN_S, REQUEST_AFTER_S, Shutdown

GRACE_S = 30.0


@dataclass
class Stop:
    """A request to stop, of an age that the test sets."""

    alone: bool = False
    age_s: float = 0.0
    drained: int = 0

    def drain(self) -> None:
        self.drained += 1


@dataclass
class Metrics:
    state: str = "running"
    spec: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(stop_grace_s=GRACE_S))

    def set_state(self, state: str) -> None:
        self.state = state


@dataclass
class Head:
    wanted: list[Mark] = field(default_factory=list)

    def want(self, mark: Mark) -> None:
        self.wanted.append(mark)


@dataclass
class Input:
    requests: list[str] = field(default_factory=list)

    def request(self, what: str) -> None:
        self.requests.append(what)


def shutdown(stop: Stop, head: Head | None = None, input: Input | None = None) -> Shutdown:
    return Shutdown(stop, Metrics(), head=head, input=input)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("alone", "mark"), [(False, Mark.CHECKPOINT | Mark.STOP), (True, Mark.CHECKPOINT)]
)
def test_the_head_makes_the_marker(alone: bool, mark: Mark) -> None:
    """Alone, it leaves at it and the others train on."""
    stop, head = Stop(alone), Head()
    leaving = shutdown(stop, head)
    assert not leaving.heed()
    assert (head.wanted, leaving.asked, stop.drained) == ([mark], alone, 1)


def test_others_wait_for_the_heads_marker_first_and_ask_more_than_once() -> None:
    stop, input = Stop(), Input()
    leaving = shutdown(stop, input=input)
    for age_s, requests in (
        (0.0, 0), (REQUEST_AFTER_S, 0), (REQUEST_AFTER_S + 0.1, 1), (ASK_AGAIN_S, 1),
        (REQUEST_AFTER_S + ASK_AGAIN_S + 0.2, 2),
    ):  # fmt: skip
        stop.age_s = age_s
        assert not leaving.heed()
        assert len(input.requests) == requests
    assert leaving.asked


def test_one_that_leaves_alone_asks_at_once() -> None:
    stop, input = Stop(alone=True, age_s=0.01), Input()
    assert not shutdown(stop, input=input).heed()
    assert input.requests == ["checkpoint"]


def test_without_a_marker_it_leaves_in_the_end() -> None:
    stop = Stop(age_s=GRACE_S)
    leaving = shutdown(stop, input=Input())
    assert not leaving.heed()
    stop.age_s += 0.1
    assert leaving.heed()


@pytest.mark.parametrize("alone", [True, False])
def test_the_marker_to_leave_at(alone: bool) -> None:
    """Of several modules that stop, some have passed a checkpoint that nobody asked for."""
    stop = Stop(alone, age_s=2.0)
    leaving = shutdown(stop, input=Input())
    assert not leaving.at(Mark.CHECKPOINT | Mark.ASKED)
    leaving.heed()
    assert leaving.at(Mark.CHECKPOINT | Mark.ASKED)
    assert leaving.at(Mark.CHECKPOINT) == alone
    assert not leaving.at(Mark.EPOCH)
