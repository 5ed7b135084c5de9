"""The sender's states: each row of the table in its module, and what the table leaves out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dni_runtime.errors import HandshakeError, WireError
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.counters import LinkCounters
from dni_runtime.link.handshake import INVITATION, Refusal
from dni_runtime.link.sender import Sender, State
from dni_runtime.wire import ID_LIMIT, Kind, Mark, Message, encode
from tests.conftest import MakeSpec

Event = Callable[[Sender], object]
Make = Callable[[State], Sender]
LIVE = [state for state in State if state is not State.DISMISSED]


def mark(sender: Sender, id: int) -> None:
    sender.add(Message(Kind.MARK, "run", "stem", id=id, mark=Mark.EPOCH))


def up(sender: Sender, kind: Kind, **fields: object) -> Message | None:
    return sender.handle(encode(Message(kind, "run", "tail", **fields)))  # type: ignore[arg-type]


def invite(sender: Sender) -> None:
    up(sender, Kind.REFUSE, body=Refusal(INVITATION).body())


def greet(sender: Sender) -> None:
    sender.hello()
    sender.greeted()


def welcome(sender: Sender, received: int = 0) -> None:
    """Answer the newest HELLO."""
    up(sender, Kind.WELCOME, body={"number": sender._number, "received": received})


def ask(sender: Sender) -> None:
    sender.ask()


def lose(sender: Sender) -> None:
    sender.lose()


def dismiss(sender: Sender) -> None:
    sender.dismiss()


PATHS: dict[State, tuple[Event, ...]] = {
    State.SILENT: (),
    State.INVITED: (invite,),
    State.GREETING: (invite, greet),
    State.OPEN: (invite, greet, welcome),
    State.ASKING: (invite, greet, welcome, ask),
    State.DISMISSED: (dismiss,),
}
"""The events that lead to a state."""


@pytest.fixture
def make(make_spec: MakeSpec) -> Make:
    """Make a sender in a state, with a message in its window."""

    def make(state: State) -> Sender:
        contract, counters = (
            LinkContract.of(one := make_spec("stem"), one.targets[0]),
            LinkCounters(),
        )
        sender = Sender(contract, run="run", window=4, next_id=1, counters=counters)
        mark(sender, 1)
        for event in PATHS[state]:
            event(sender)
        assert sender.state is state
        return sender

    return make


@pytest.mark.parametrize(
    ("state", "event", "next"),
    [
        (State.SILENT, invite, State.INVITED),
        (State.SILENT, greet, State.SILENT),
        (State.INVITED, invite, State.INVITED),
        (State.INVITED, greet, State.GREETING),
        (State.GREETING, invite, State.INVITED),
        (State.GREETING, greet, State.GREETING),
        (State.GREETING, welcome, State.OPEN),
        (State.OPEN, invite, State.INVITED),
        (State.OPEN, ask, State.ASKING),
        (State.OPEN, welcome, State.OPEN),
        (State.ASKING, invite, State.INVITED),
        (State.ASKING, ask, State.ASKING),
        (State.ASKING, greet, State.ASKING),
        (State.ASKING, welcome, State.OPEN),
        *((state, lose, State.SILENT) for state in LIVE),
        *((state, dismiss, State.DISMISSED) for state in State),
        *((State.DISMISSED, event, State.DISMISSED) for event in (invite, greet, lose)),
    ],
)
def test_each_row(make: Make, state: State, event: Event, next: State) -> None:
    sender = make(state)
    event(sender)
    assert sender.state is next
    assert sender.connected == (next in (State.OPEN, State.ASKING))
    assert (sender.pending() is not None) == (next is State.OPEN)


def test_a_hello_without_an_invitation_may_be_answered(make: Make) -> None:
    sender = make(State.SILENT)
    greet(sender)
    welcome(sender)
    assert sender.state is State.OPEN


def test_an_answer_that_comes_after_the_invitation_needs_no_other_hello(make: Make) -> None:
    sender = make(State.SILENT)
    greet(sender)
    invite(sender)
    welcome(sender)
    assert sender.state is State.OPEN


@pytest.mark.parametrize("state", [State.SILENT, State.INVITED])
def test_a_welcome_to_no_hello_opens_nothing(make: Make, state: State) -> None:
    sender = make(state)
    up(sender, Kind.WELCOME, body={"number": 1, "received": 0})
    assert sender.state is state


@pytest.mark.parametrize("end", [lose, invite])
def test_a_welcome_of_a_connection_that_has_ended_opens_nothing(make: Make, end: Event) -> None:
    sender = make(State.OPEN)
    end(sender)  # a connection that was lost unnoticed ends with an invitation
    welcome(sender)
    assert not sender.connected
    greet(sender)
    welcome(sender)
    assert sender.state is State.OPEN


def test_a_late_welcome_is_no_answer_to_a_question(make: Make) -> None:
    sender = make(State.OPEN)
    late = sender._number
    sender.ask()
    up(sender, Kind.WELCOME, body={"number": late, "received": 0})
    assert sender.state is State.ASKING


@pytest.mark.parametrize("state", LIVE)
def test_a_refusal_is_an_error(make: Make, state: State) -> None:
    sender = make(state)
    with pytest.raises(HandshakeError, match="chain is 'a' for 'stem' but 'b'"):
        up(sender, Kind.REFUSE, body=Refusal("chain", "b", "a").body())
    assert sender.state is state


@pytest.mark.parametrize("state", LIVE)
def test_what_has_arrived_is_not_sent_again(make: Make, state: State) -> None:
    sender = make(state)
    mark(sender, 2)
    lose(sender)
    greet(sender)
    welcome(sender, received=1)
    assert sender.pending() is not None
    sender.transmitted()
    assert sender.pending() is None


@pytest.mark.parametrize("state", [State.OPEN, State.ASKING])
def test_an_answer_on_an_open_link_is_no_other_handshake(make: Make, state: State) -> None:
    sender = make(state)
    sender.hello()
    welcome(sender)
    assert sender.counters.handshakes == 1


@pytest.mark.parametrize("state", [State.GREETING, State.ASKING])
def test_a_welcome_that_is_refused_changes_nothing(make: Make, state: State) -> None:
    sender = make(state)
    body = {"number": sender._number, "received": 0}
    before = sender.drained, sender.window.received, len(sender.window), sender.pending()
    with pytest.raises(WireError, match="id 9 is acknowledged, but 1 is the last"):
        up(sender, Kind.WELCOME, ack=9, body=body)
    after = sender.drained, sender.window.received, len(sender.window), sender.pending()
    assert (sender.state, after) == (state, before)
    welcome(sender)
    assert sender.state is State.OPEN
    assert sender.drained == 0


@pytest.mark.parametrize("state", [State.SILENT, State.INVITED, State.GREETING])
def test_nothing_is_accepted_before_welcome(make: Make, state: State) -> None:
    sender = make(state)
    with pytest.raises(WireError) as caught:
        up(sender, Kind.ACK, ack=1)
    assert caught.value.reason == "stranger"
    assert len(sender.window) == 1


def test_a_neighbour_that_is_asked_still_acknowledges(make: Make) -> None:
    sender = make(State.ASKING)
    up(sender, Kind.ACK, ack=1)
    assert len(sender.window) == 0


@pytest.mark.parametrize("state", list(State))
def test_whoever_has_finished_has_everything(make: Make, state: State) -> None:
    """What was sent and what will be counts as processed, and nothing from there counts."""
    sender = make(state)
    assert sender.dismiss() == (state is not State.DISMISSED)
    assert not sender.dismiss()
    assert len(sender.window) == 0
    for id in range(2, 12):
        mark(sender, id)
    assert (len(sender.window), sender.window.acked, sender.drained) == (0, 11, ID_LIMIT)
    assert up(sender, Kind.REQUEST, body={"what": "checkpoint"}) is None
    assert up(sender, Kind.REFUSE, body=Refusal("chain", "b", "a").body()) is None
    assert sender.state is State.DISMISSED
