"""A module's links as one stream and one output, with fakes of the links."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from dni_runtime.link import Batch, Drain, Event, Gradient, LinkCounters, Marker, StreamRequest
from dni_runtime.link.window import ReceiveOrder
from dni_runtime.spec import TensorSpec
from dni_runtime.wire import Mark, Mode
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join

Y = torch.zeros(2, dtype=torch.int64)


def batch(id: int, *values: float, data: tuple[float, ...] = ()) -> Batch:
    xs = tuple(torch.full((2, 1), value) for value in values)
    return Batch(id, 1, Mode.TRAIN, xs, Y, None, tuple(torch.full((2, 1), one) for one in data))


def marker(id: int) -> Marker:
    return Marker(id, 1, Mark.CHECKPOINT)


class Above:
    """A link from upstream."""

    def __init__(
        self, *items: Batch | Marker, awaited: bool = False, route: tuple[int, int] | None = None
    ) -> None:
        self.items = deque(items)
        self.route = route
        self.order = ReceiveOrder(carries=self.carries)
        self.awaited, self.connected, self.left_at = awaited, True, 0
        self.counters = LinkCounters(gaps=1)
        self.acked: list[int] = []
        self.drained: list[int] = []
        self.asked: list[str] = []
        self.finishes = 0

    @property
    def received(self) -> int:
        return self.order.received

    def may_bring(self, after: int, until: int) -> bool:
        return self.order.may_bring(after, until)

    def carries(self, id: int) -> bool:
        return self.route is None or id % self.route[0] == self.route[1]

    def receive(self) -> Batch | Marker | None:
        if not self.items:
            return None
        self.order.accept(self.items[0].id)
        return self.items.popleft()

    def ack(self, id: int) -> None:
        self.acked.append(id)

    def send_drained(self, id: int) -> None:
        self.drained.append(id)

    def request(self, what: str) -> None:
        self.asked.append(what)

    def finish(self, deadline_s: float) -> bool:
        self.finishes += 1
        return self.finishes > self.left_at


def missed(id: int) -> Marker:
    return Marker(id, 1, Mark.MISSED)


def join(*links: Any) -> Join:
    return Join([[link] for link in links])


def taken(joined: Join) -> list[tuple[int, list[float]] | int]:
    """What comes out: batches with their inputs, and ids of markers."""
    found: list[tuple[int, list[float]] | int] = []
    while (item := joined.receive()) is not None:
        is_batch = isinstance(item, Batch)
        found.append((item.id, [float(x[0, 0]) for x in item.xs]) if is_batch else item.id)  # type: ignore[union-attr]
    return found


def test_batches_are_joined_in_the_order_of_the_inputs() -> None:
    left, right = Above(batch(1, 1.0), batch(2, 2.0), marker(3)), Above(batch(1, -1.0))
    both = join(left, right)
    assert taken(both) == [(1, [1.0, -1.0])]
    assert not left.items, "what has come is read: it must not wake the worker up again"
    right.items += [batch(2, -2.0), marker(3)]
    assert taken(both) == [(2, [2.0, -2.0]), 3]


@pytest.mark.parametrize("links", [1, 2])
def test_what_is_heard_while_nothing_is_taken_is_kept(links: int) -> None:
    above = [Above(batch(1, 1.0), batch(2, 2.0)) for _ in range(links)]
    joined = join(*above)
    joined.listen()
    assert not any(one.items for one in above)
    assert not any(one.acked for one in above), "upstream has no more room than before"
    for one in above:
        one.items.append(marker(3))
    assert taken(joined) == [(1, [1.0] * links), (2, [2.0] * links), 3]


def test_replicas_are_one_input() -> None:
    """Batches come in turn from the links of two replicas, markers on both."""
    odd = Above(batch(1, 1.0), batch(3, 3.0), marker(4), batch(5, 5.0), route=(2, 1))
    even = Above(route=(2, 0))
    both = Join([[odd, even]])  # type: ignore[list-item]
    assert taken(both) == [(1, [1.0])], "3 must not overtake 2"
    even.items.append(batch(2, 2.0))
    assert taken(both) == [(2, [2.0]), (3, [3.0])]
    even.items.append(marker(4))
    assert taken(both) == [4, (5, [5.0])]
    assert both.of(7) == [odd]
    assert both.of(8) == [even]
    both.ack(5)
    assert (odd.acked, even.acked) == ([5], [4])


def test_replicas_beside_a_link_that_brings_all() -> None:
    odd, even = Above(batch(1, 1.0), route=(2, 1)), Above(batch(2, 2.0), route=(2, 0))
    skip = Above(batch(1, -1.0), batch(2, -2.0))
    joined = Join([[odd, even], [skip]])  # type: ignore[list-item]
    assert taken(joined) == [(1, [1.0, -1.0]), (2, [2.0, -2.0])]
    odd.items.append(missed(5))
    skip.items += [batch(3, -3.0), batch(4, -4.0)]
    assert taken(joined) == [3], "left out, and 4 may still come"
    assert joined.of(4) == [even, skip]


def test_what_replicas_can_still_bring_is_not_passed_over() -> None:
    odd, even = (
        Above(batch(1, 1.0), batch(3, 3.0), route=(2, 1)),
        Above(batch(2, 2.0), route=(2, 0)),
    )
    both = Join([[odd, even]])  # type: ignore[list-item]
    both.listen()
    assert both.received == 2


def test_inputs_of_the_data_come_last() -> None:
    one = join(Above(batch(1, 1.0, data=(7.0, 8.0))))
    assert taken(one) == [(1, [1.0, 7.0, 8.0])]
    two = join(Above(batch(1, 1.0, data=(7.0,))), Above(batch(1, 2.0)))
    assert taken(two) == [(1, [1.0, 2.0, 7.0])]


def test_a_batch_that_one_link_has_lost_is_left_out() -> None:
    left, right = Above(batch(1, 1.0), batch(2, 2.0)), Above(batch(2, -2.0))
    both = join(left, right)
    assert both.receive() == missed(1), "further down, too"
    assert taken(both) == [(2, [2.0, -2.0])]
    assert both.counters.gaps == 2 + 1


def test_a_batch_is_not_waited_for_where_one_link_says_that_it_is_left_out() -> None:
    left = Above(batch(1, 1.0), batch(2, 2.0), batch(3, 3.0))
    both = join(left, Above(missed(2)))
    assert [both.receive(), both.receive(), both.receive()] == [missed(1), missed(2), None]
    assert both.counters.gaps == 2 + 2


def test_what_all_links_have_left_out_is_said_once() -> None:
    both = join(Above(missed(3), batch(4, 4.0)), Above(missed(3), batch(4, -4.0)))
    assert both.receive() == missed(3)
    assert taken(both) == [(4, [4.0, -4.0])]
    assert both.counters.gaps == 2, "each link has counted it"


def test_a_marker_is_not_lost_with_a_link() -> None:
    left, right = Above(marker(1), batch(2, 2.0)), Above(batch(2, -2.0))
    assert taken(join(left, right)) == [1, (2, [2.0, -2.0])]


def test_what_some_link_cannot_bring_any_more_is_passed_over() -> None:
    above = batch(4, 4.0), marker(5), batch(6, 6.0)
    left, right = Above(*above, awaited=True), Above(*above[:1], batch(6, -6.0))
    both = join(left, right)
    both.start_after(5)
    assert taken(both) == [(6, [6.0, -6.0])]
    assert (left.acked, left.drained) == ([4, 5], [4, 5])
    assert (right.acked, right.drained) == ([4], []), "nobody there waits for gradients"
    assert both.counters.gaps == 2, "it is not counted as lost here"


def test_one_link_is_passed_over_in_the_same_way() -> None:
    alone = Above(marker(1), batch(4, 4.0), marker(5), batch(6, 6.0), awaited=True)
    one = join(alone)
    one.start_after(4)
    assert taken(one) == [5, (6, [6.0])]
    assert (alone.acked, alone.drained) == ([1, 4], [1, 4])


def test_a_request_goes_the_way_that_stands() -> None:
    left, right = Above(), Above()
    left.connected = False
    join(left, right).request("checkpoint")
    assert (left.asked, right.asked) == ([], ["checkpoint"])


def test_at_the_end_every_link_gets_its_turn() -> None:
    left, right = Above(), Above()
    left.left_at = 3
    join(left, right).finish(1000)
    assert (left.finishes, right.finishes) == (4, 1)


class Below:
    """A link to downstream."""

    outputs: tuple[TensorSpec, ...] = ()  # of the module
    takes: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        teaches: bool = True,
        window: int = 4,
        in_flight: int = 0,
        route: tuple[int, int] | None = None,
        chosen: bool = False,
    ) -> None:
        self.route, self.chosen = route, chosen
        self.responds, self.connected, self.last, self.received = True, True, 0, 0
        self.teaches, self.window, self.in_flight = teaches, window, in_flight
        self.lost, self.drained, self.first = False, 0, 1
        self.counters = LinkCounters(missed=2)
        self.events: list[Event] = []
        self.sent: list[int] = []
        self.missed: list[int] = []
        self.marks: list[int] = []

    @property
    def room(self) -> bool:
        return self.in_flight < self.window

    def carries(self, id: int) -> bool:
        return self.route is None or id % self.route[0] == self.route[1]

    def send_batch(self, batch: Batch, h: Tensor) -> None:
        self.sent.append(batch.id)
        self.last, self.in_flight = batch.id, self.in_flight + self.chosen

    def send_mark(self, id: int, *rest: Any) -> None:
        self.marks.append(id)

    def miss(self, id: int, epoch: int) -> None:
        self.missed.append(id)

    def receive(self) -> list[Event]:
        events, self.events = self.events, []
        for event in events:
            if isinstance(event, Drain):
                self.drained = event.id
        return events


def fanout(*links: Any) -> Fanout:
    return Fanout([[link] for link in links])


def gradient(id: int, value: float) -> Gradient:
    return Gradient(id, torch.full((2, 1), value))


def come(output: Fanout) -> list[tuple[int, float] | str | int]:
    """Gradients with their values, requests, and how far no more will come."""
    found: list[tuple[int, float] | str | int] = []
    for event in output.receive():
        match event:
            case Gradient(id, g):
                found.append((id, float(g[0, 0])))
            case StreamRequest(what):
                found.append(what)
            case Drain(id):
                found.append(id)
    return found


def test_the_gradient_is_the_sum() -> None:
    a, b = Below(), Below()
    output = fanout(a, b)
    a.events = [gradient(1, 1.0), gradient(2, 2.0), StreamRequest("checkpoint")]
    assert come(output) == ["checkpoint"]
    b.events = [gradient(1, 10.0)]
    assert come(output) == [(1, 11.0)]


def test_a_batch_that_one_module_has_lost_is_given_up() -> None:
    """At once, though the other one has sent its gradient, or will."""
    a, b = Below(), Below()
    output = fanout(a, b)
    a.events = [gradient(1, 1.0)]
    b.events = [Drain(2)]
    assert come(output) == [1]
    assert output.drained == 2
    a.events = [gradient(2, 2.0), gradient(3, 3.0)]
    assert come(output) == [2]
    b.events = [gradient(3, 30.0)]
    assert come(output) == [(3, 33.0)]


def test_gradients_that_come_before_the_end_are_not_given_up() -> None:
    a, b = Below(), Below()
    output = fanout(a, b)
    a.events = [gradient(1, 1.0), Drain(2)]
    assert come(output) == []
    b.events = [gradient(1, 10.0), Drain(2)]
    assert come(output) == [(1, 11.0), 2]


def test_who_gets_only_inputs_of_the_data_sends_no_gradients() -> None:
    a, data = Below(), Below(teaches=False)
    output = fanout(a, data)
    a.events, data.events = [gradient(1, 1.0)], [Drain(9), StreamRequest("end")]
    assert come(output) == ["end", (1, 1.0)]
    assert output.drained == 0


def test_a_batch_goes_where_there_is_room() -> None:
    a, b = Below(in_flight=4), Below(in_flight=3)
    output = fanout(a, b)
    assert not output.room
    assert output.fullest is a
    assert not output.room_without_lost()
    a.lost = True
    assert output.room_without_lost()
    h: Tensor = torch.zeros(2, 1)
    output.send_batch(batch(5, 1.0), h)
    assert (a.missed, a.sent, b.missed, b.sent) == ([5], [], [], [5])
    assert output.counters.missed == 4


def test_a_batch_goes_to_one_replica_and_its_gradient_comes_from_there() -> None:
    odd, even, skip = Below(route=(2, 1)), Below(route=(2, 0)), Below()
    output = Fanout([[odd, even], [skip]])  # type: ignore[list-item]
    h = torch.zeros(2, 1)
    for id in (1, 2):
        output.send_batch(batch(id, 1.0), h)
    output.miss(batch(3, 1.0))
    assert (odd.sent, even.sent, skip.sent) == ([1], [2], [1, 2])
    assert (odd.missed, even.missed, skip.missed) == ([3], [], [3])
    odd.events, even.events = [gradient(1, 1.0)], [gradient(2, 2.0)]
    skip.events = [gradient(1, 10.0), gradient(2, 20.0)]
    assert come(output) == [(1, 11.0), (2, 22.0)]
    odd.events, skip.events = [Drain(9)], [Drain(9)]
    assert come(output) == [], "the other replica may still send gradients"
    even.events = [Drain(9)]
    assert come(output) == [9]


def test_a_batch_to_predict_goes_to_the_least_busy_replica() -> None:
    one, two, skip = Below(chosen=True), Below(chosen=True), Below()
    output = Fanout([[one, two], [skip]])  # type: ignore[list-item]
    h = torch.zeros(2, 1)
    for id in (1, 2, 3):
        output.send_batch(batch(id, 1.0), h)
    assert (one.sent, two.sent, skip.sent) == ([1, 3], [2], [1, 2, 3]), "in turn if all are alike"
    one.first, two.first = 1, 2
    one.in_flight = 0
    assert output.unanswered(after=4) == 2, "what had all its answers keeps nothing back"
    output.send_mark(4, 1, Mark.MISSED)
    assert (one.marks, two.marks) == ([4], [])
    two.in_flight = 4
    assert output.room, "one of them has"
    two.responds = two.connected = False
    assert output.connected
    output.send_batch(batch(5, 1.0), h)
    output.send_batch(batch(6, 1.0), h)
    assert one.sent[-2:] == [5, 6], "the other does not respond"
    one.first = 5
    assert output.unanswered(after=7) == 5, "nor must what waits for it be sent again"
    one.responds = False
    assert output.unanswered(after=7) == 2, "nobody does"
    one.received, two.received = 8, 9
    output.send_batch(batch(9, 1.0), h)
    assert one.sent[-1] == 9, "the other one had 9 before this worker was restarted, or another"


def test_a_marker_that_stands_for_a_batch_goes_the_batchs_way() -> None:
    odd, even = Below(route=(2, 1)), Below(route=(2, 0))
    output = fanout(odd, even)
    for id in (1, 2, 3, 4):
        output.send_mark(id, 1, Mark.MISSED)
    output.send_mark(5, 1, Mark.EPOCH)
    assert (odd.marks, even.marks) == ([1, 3, 5], [2, 4, 5])
