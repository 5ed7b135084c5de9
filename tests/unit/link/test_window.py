"""The window and the order of the stream."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dni_runtime.link.window import GAP_COUNTED, ReceiveOrder, SendWindow


def transmit(window: SendWindow) -> list[int]:
    ids = []
    while (sent := window.pending()) is not None:
        ids.append(sent.id)
        window.advance()
    return ids


def filled(size: int, count: int, next_id: int = 1) -> SendWindow:
    window = SendWindow(size, next_id=next_id)
    for id in range(next_id, next_id + count):
        window.add(id, [b"%d" % id])
    return window


def test_room_is_for_so_many_and_no_more() -> None:
    window = filled(3, 3)
    assert not window.room
    with pytest.raises(ValueError, match="id 4 does not fit: 3 messages"):
        window.add(4, [b""])
    window.acknowledge(1)
    assert window.room
    assert len(window) == 2


def test_ids_grow() -> None:
    window = filled(3, 1)
    with pytest.raises(ValueError, match="id 1 after 1"):
        window.add(1, [b""])


def test_acknowledgements_are_cumulative_and_may_repeat() -> None:
    window = filled(4, 4)
    transmit(window)
    assert window.acknowledge(3)
    assert window.acknowledge(2)
    assert len(window) == 1
    assert window.first == 4
    assert window.acknowledge(4)
    assert window.first == 5


def test_an_acknowledgement_of_what_was_never_sent_changes_nothing() -> None:
    window = filled(4, 2)
    assert not window.acknowledge(3)
    assert len(window) == 2


def test_a_new_connection_gets_what_is_missing_there() -> None:
    window = filled(4, 4)
    transmit(window)
    window.acknowledge(1)
    window.rewind(2)
    assert transmit(window) == [3, 4]


def test_a_peer_that_lost_what_it_had_received_gets_it_again() -> None:
    window = filled(4, 4)
    transmit(window)
    window.rewind(4)
    assert transmit(window) == []
    window.rewind(1)
    assert transmit(window) == [2, 3, 4]


def test_advance_tells_the_first_time_from_others() -> None:
    window = filled(4, 1)
    assert window.pending() is not None
    assert not window.advance()
    window.rewind(0)
    window.add(2, [b""])
    again = []
    while window.pending() is not None:
        again.append(window.advance())
    assert again == [True, False]


def test_a_restarted_sender_leaves_out_what_the_peer_has() -> None:
    window = SendWindow(4, next_id=3)
    window.rewind(5)  # the peer is ahead
    assert window.acknowledge(4)
    for id in (3, 4, 5, 6):
        window.add(id, [b""])
    assert len(window) == 2  # 3 and 4 had been acknowledged
    assert transmit(window) == [6]


class WindowMachine(RuleBasedStateMachine):
    """A sender's window against a lossy world: nothing is lost, nothing exceeds the window."""

    def __init__(self) -> None:
        super().__init__()
        self.window = SendWindow(5)
        self.order = ReceiveOrder()
        self.wire: list[int] = []
        self.got: list[int] = []

    @precondition(lambda self: self.window.room)
    @rule()
    def add(self) -> None:
        self.window.add(self.window.last + 1, [b""])

    @rule(count=st.integers(0, 3))
    def transmit(self, count: int) -> None:
        for _ in range(count):
            sent = self.window.pending()
            if sent is None:
                return
            self.wire.append(sent.id)
            self.window.advance()

    @rule(count=st.integers(0, 3))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            id = self.wire.pop(0)
            if self.order.accept(id):
                self.got.append(id)

    @rule(share=st.floats(0, 1))
    def process(self, share: float) -> None:
        acked, received = self.order.acked, self.order.received
        self.order.acknowledge(acked + int(share * (received - acked)))
        assert self.window.acknowledge(self.order.acked)

    @rule()
    def reconnect(self) -> None:
        self.wire.clear()
        self.order.skip_to(self.window.first)
        self.window.rewind(self.order.received)

    @invariant()
    def stream_is_whole(self) -> None:
        assert self.got == list(range(1, len(self.got) + 1))
        assert len(self.window) <= 5
        assert self.order.gaps == 0


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_order_knows_duplicates_and_counts_gaps() -> None:
    order = ReceiveOrder(10)
    assert [order.accept(id) for id in (10, 11, 11, 14, 12)] == [False, True, False, True, False]
    assert (order.received, order.gaps) == (14, 2)


def test_gaps_are_those_of_the_route() -> None:
    order = ReceiveOrder(carries=lambda id: id % 2 == 1)
    assert order.may_bring(0, 1)
    assert not order.may_bring(1, 2)
    assert order.may_bring(1, 3)
    assert order.accept(1)
    assert order.accept(4), "a marker comes on all links"
    assert order.gaps == 1
    assert order.accept(7)
    assert order.gaps == 2


def test_a_gap_of_any_length_is_counted_at_once() -> None:
    """Whoever claims it: a HELLO may."""
    asked = 0

    def carries(id: int) -> bool:
        nonlocal asked
        asked += 1
        return id % 2 == 1

    order = ReceiveOrder(carries=carries)
    assert order.skip_to((1 << 62) + 1) == 1 << 61
    assert asked == GAP_COUNTED


def test_order_never_acknowledges_what_has_not_come() -> None:
    order = ReceiveOrder(3)
    with pytest.raises(ValueError, match="id 4 is acknowledged, but 3 is the last"):
        order.acknowledge(4)


def test_order_skips_what_cannot_come_any_more() -> None:
    order = ReceiveOrder(3)
    assert order.skip_to(4) == 0
    assert order.skip_to(2) == 0
    assert order.skip_to(9) == 5
    assert (order.received, order.acked, order.gaps) == (8, 8, 5)


def test_acknowledged_messages_are_retained_for_a_restarted_neighbour() -> None:
    window = SendWindow(2, retain=3)
    for id in range(1, 8):
        window.add(id, [b""])
        transmit(window)
        assert window.acknowledge(id)
    assert (len(window), window.first) == (0, 5)
    window.add(8, [b""])
    window.rewind(4)  # the neighbour has lost what it had not sent on
    assert transmit(window) == [5, 6, 7, 8]
    assert window.room
    assert window.acknowledge(6)  # once more: nothing changes
    assert (len(window), window.first) == (1, 5)


def test_what_is_forced_in_is_sent_when_there_is_room() -> None:
    """A neighbour that comes back after a long time must not be buried under markers."""
    window = filled(2, 2)
    for id in range(3, 9):
        window.add(id, [b""], force=True)
    window.rewind(0)
    assert transmit(window) == [1, 2]
    window.acknowledge(1)
    assert transmit(window) == [3]
    window.acknowledge(3)
    assert transmit(window) == [4, 5]
    window.rewind(5)
    assert transmit(window) == []
    window.acknowledge(5)
    assert transmit(window) == [6, 7]


def test_an_outage_takes_the_room_of_one_message() -> None:
    window = filled(2, 2)
    transmit(window)
    for id in (3, 4, 5):
        window.add(id, [b""], force=True, missed=True)
    assert len(window) == 3
    window.acknowledge(2)
    window.rewind(2)
    assert transmit(window) == [5]


def test_what_was_sent_is_not_taken_back() -> None:
    window = SendWindow(4, retain=4)
    window.add(1, [b""], missed=True)
    assert transmit(window) == [1]
    window.add(2, [b""], missed=True)
    window.acknowledge(2)
    window.add(3, [b""], missed=True)
    window.rewind(0)
    assert transmit(window) == [1, 2, 3]


def test_a_restarted_receiver_takes_what_can_still_come() -> None:
    order = ReceiveOrder(10)
    assert order.start_at(8) == 0
    assert [order.accept(id) for id in (8, 9, 10, 11)] == [True] * 4
    assert order.gaps == 0
    behind = ReceiveOrder(10)
    assert behind.start_at(14) == 3
    assert (behind.received, behind.gaps) == (13, 3)
