"""What an input end sends upstream, and in which order, with a list for a socket."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dni_runtime.errors import WireError
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.counters import LinkCounters
from dni_runtime.link.input import Answers
from dni_runtime.link.receiver import Receiver
from dni_runtime.link.sender import Sender
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Buffer, Kind, Limits, decode

G = torch.zeros(2, 4)
LIMITS = Limits(1, 1 << 10)


class Upstream:
    """The module upstream, which can be away.

    ``refuses``: messages that it does not take before it takes the next one. ``got``: the kind of
    each message that has come, and its id, or what it acknowledges.
    """

    def __init__(self, spec: WorkerSpec, resend: int) -> None:
        self.there, self.refuses = True, 0
        self.got: list[tuple[str, int]] = []
        contract = LinkContract.of(spec, spec.sources[0])
        self.receiver = Receiver(contract, run="run", received=0, counters=LinkCounters())
        for id in range(1, 10):
            assert self.receiver.order.accept(id)
        self.answers = Answers(self.receiver, resend=resend, send=self.take)

    def take(self, frames: list[Buffer]) -> bool:
        if self.refuses:
            self.refuses -= 1
            return False
        if self.there:
            message = decode(frames, LIMITS)
            id = message.ack if message.kind is Kind.ACK else message.id
            self.got.append((message.kind.name, id))
        return self.there

    def back(self, session: str = "") -> None:
        """Come back, by a new handshake."""
        self.there = True
        self.receiver.session = session
        self.receiver.number += 1
        self.answers.repeat()
        self.answers.send_due()


Make = Callable[[int], Upstream]


@pytest.fixture
def make(make_spec: Callable[..., WorkerSpec]) -> Make:
    return lambda resend: Upstream(make_spec("tail"), resend)


def test_a_gradient_that_nobody_waits_for_is_dropped(make: Make) -> None:
    upstream = make(0)
    upstream.there = False
    upstream.answers.gradient(1, G, 1)
    upstream.there = True
    upstream.answers.send_due()
    assert upstream.got == [("ACK", 1)], "but what it acknowledges is told"
    counters = upstream.receiver.counters
    assert (counters.gradients, counters.gradients_dropped) == (0, 1)


def test_a_gradient_carries_the_acknowledgement(make: Make) -> None:
    upstream = make(0)
    upstream.there = False
    upstream.answers.ack()
    upstream.there = True
    upstream.answers.gradient(1, G, 1)
    upstream.answers.send_due()
    assert upstream.got == [("GRADIENT", 1)]


def test_what_waits_goes_in_order(make: Make) -> None:
    upstream = make(2)
    upstream.there = False
    upstream.answers.request("checkpoint")
    upstream.answers.drained(7)
    for id in (4, 5, 6):
        upstream.answers.gradient(id, G, id)
    upstream.there = True
    upstream.answers.send_due()
    gradients = [("GRADIENT", 5), ("GRADIENT", 6)]
    assert upstream.got == [*gradients, ("REQUEST", 0), ("DRAINED", 7), ("ACK", 6)]
    assert upstream.receiver.counters.gradients == 2


def test_nothing_overtakes_a_gradient_that_could_not_be_sent(make: Make) -> None:
    """DRAINED would promise that it has been sent."""
    upstream = make(2)
    upstream.refuses = 2  # it has room again in between
    upstream.answers.gradient(1, G, 1)
    upstream.answers.drained(2)
    assert upstream.got == []
    upstream.answers.send_due()
    assert upstream.got == [("GRADIENT", 1), ("DRAINED", 2), ("ACK", 1)]


def test_a_later_gradient_does_not_overtake(make: Make) -> None:
    upstream = make(2)
    upstream.there = False
    upstream.answers.gradient(1, G, 1)
    upstream.there = True
    upstream.answers.gradient(2, G, 2)
    upstream.answers.send_due()
    assert upstream.got == [("GRADIENT", 1), ("GRADIENT", 2), ("ACK", 2)]


def test_a_new_connection_gets_again_what_the_old_one_may_have_lost(make: Make) -> None:
    upstream = make(1)
    upstream.answers.gradient(1, G, 1)
    upstream.answers.gradient(2, G, 2)
    upstream.answers.drained(3)
    upstream.got.clear()
    upstream.back()
    assert upstream.got == [("GRADIENT", 2), ("DRAINED", 3)]
    upstream.got.clear()
    upstream.answers.repeat()
    assert upstream.got == [], "once for each handshake"


def test_what_came_before_a_welcome_comes_again_on_the_same_connection(
    make_spec: Callable[..., WorkerSpec],
) -> None:
    """An output end whose messages were not read for long believes that its connection is gone."""
    spec, up = make_spec("tail"), list[list[Buffer]]()
    contract = LinkContract.of(spec, spec.sources[0])
    receiver = Receiver(contract, run="run", received=0, counters=LinkCounters())
    sender = Sender(contract, run="run", window=2, next_id=1, counters=LinkCounters(), cut=0)
    answers = Answers(receiver, resend=1, send=lambda frames: up.append(frames) is None)

    def greet() -> None:
        receiver.handle(b"peer", sender.hello())
        sender.handle(receiver.replies.popleft()[1])
        answers.repeat()
        assert sender.connected

    greet()
    sender.lose()  # it could not send: nothing was read
    answers.drained(3)
    with pytest.raises(WireError, match="DRAINED before WELCOME"):
        sender.handle(up.pop())
    greet()
    sender.handle(up.pop())
    assert (sender.drained, receiver.counters.handshakes) == (3, 1)


def test_announcements_that_cannot_be_sent_push_no_request_out(make: Make) -> None:
    upstream = make(0)
    upstream.there = False
    upstream.answers.request("checkpoint")
    for id in range(1, 100):
        upstream.answers.drained(id)
    upstream.there = True
    upstream.answers.send_due()
    assert upstream.got == [("REQUEST", 0), ("DRAINED", 99)]


def test_another_process_waits_for_no_gradient_of_the_former_one(make: Make) -> None:
    upstream = make(1)
    upstream.answers.gradient(1, G, 1)
    upstream.got.clear()
    upstream.back("another")
    assert upstream.got == []


def test_an_acknowledgement_tells_whether_the_module_is_there(make: Make) -> None:
    upstream = make(0)
    upstream.there = False
    upstream.receiver.order.acknowledge(9)
    upstream.answers.ack()
    assert upstream.answers.ack_due
    upstream.there = True
    upstream.answers.send_due()
    assert not upstream.answers.ack_due
    assert upstream.got == [("ACK", 9)]
