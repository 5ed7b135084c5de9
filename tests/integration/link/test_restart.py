"""A neighbour that goes away and comes back, over real sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dni_runtime.link import Batch, Gradient, InputLink, OutputLink, StreamRequest
from dni_runtime.spec import LinksSpec
from dni_runtime.wire import Mark, Mode
from tests.integration.link.conftest import Links

H = torch.ones(2, 4)
Y = torch.zeros(2, dtype=torch.int64)


def stands(output: OutputLink, input: InputLink) -> Callable[[], bool]:
    """Both ends do what they have to, until the link stands."""

    def done() -> bool:
        output.receive()
        input.greet()
        assert input.receive() is None
        return not output.lost

    return done


def test_a_lost_neighbour_is_noticed_and_found_elsewhere(links: Links, address: str) -> None:
    output, input, actual = links.pair(address, retain=2)
    for id in (1, 2, 3):
        output.send_batch(Batch(id, 1, Mode.TRAIN, (), Y), H)
        links.collect(input, 1)
        input.ack(id)
    links.until(lambda: bool(output.receive() or not output.in_flight), "acknowledged")
    assert not output.lost
    input.close()
    links.until(lambda: output.lost, "lost")
    output.send_batch(Batch(4, 1, Mode.TRAIN, (), Y), H)

    again = links.input(received=2, restarted=True)
    elsewhere = again.bind(address.replace("tail", "elsewhere"))
    assert elsewhere != actual or address.startswith("tcp")
    output.move(elsewhere)
    links.shake(output, again, elsewhere)
    assert not output.lost
    assert again.received == 1  # what upstream retains comes again
    assert [item.id for item in links.collect(again, 3, output=output)] == [2, 3, 4]
    assert again.counters.gaps == 0


def test_moving_to_the_same_place_connects_anew(links: Links, address: str) -> None:
    output, input, actual = links.pair(address)
    output.move(actual)
    assert output.lost
    links.until(stands(output, input), "it stands")
    output.send_mark(1, 1, Mark.EPOCH)
    links.collect(input, 1)


def test_one_that_has_finished_takes_everything(links: Links) -> None:
    output = links.output(links=LinksSpec(window=2))
    output.dismiss()
    for id in range(1, 9):
        assert output.room
        output.send_batch(Batch(id, 1, Mode.TRAIN, (), Y), H)
    assert not output.lost
    assert output.finish(1)


def test_the_peer_is_found_gone(links: Links, address: str) -> None:
    output, input, _ = links.pair(address)
    assert input.reaches_peer()
    output.close()
    links.until(lambda: not input.reaches_peer(), "gone")


def with_batches(
    links: Links, address: str, count: int, *, resend_out: int
) -> tuple[OutputLink, InputLink, str]:
    """A pair of links over which training batches have gone, and the address of the input."""
    output, input, actual = links.pair(address, resend_out=resend_out)
    for id in range(1, count + 1):
        output.send_batch(Batch(id, 1, Mode.TRAIN, (), Y), H)
    links.collect(input, count)
    return output, input, actual


def test_gradients_that_are_waited_for_come_again(links: Links, address: str) -> None:
    """The newest of them, after a connection was lost that may have taken them with it."""
    output, input, actual = with_batches(links, address, 3, resend_out=2)
    output.move(actual)
    for id in (1, 2, 3):
        input.send_gradient(id, id * H, ack=id)
    found: list[tuple[int, float]] = []

    def came() -> bool:
        input.greet()
        input.receive()
        for event in output.receive():
            assert isinstance(event, Gradient)
            found.append((event.id, float(event.g[0, 0])))
        return found[-2:] == [(2, 2.0), (3, 3.0)] and not output.lost

    links.until(came, "the newest gradients")
    assert input.counters.gradients_dropped == 0


@pytest.mark.parametrize("lost", ["before", "after"])
def test_gradients_come_again_before_what_promises_that_none_will(
    links: Links, address: str, lost: str
) -> None:
    """The module upstream would give up the batches, and drop their gradients."""
    output, input, actual = with_batches(links, address, 3, resend_out=3)
    if lost == "before":
        output.move(actual)
    for id in (1, 2, 3):
        input.send_gradient(id, id * H, ack=id)
    input.send_drained(4)
    if lost == "after":
        output.move(actual)
    found: list[int] = []

    def came() -> bool:
        input.receive()
        found.extend(event.id for event in output.receive() if not isinstance(event, StreamRequest))
        return 4 in found and not output.lost

    links.until(came, "what was sent")
    assert {1, 2, 3} <= set(found[: found.index(4)])


def test_another_process_gets_no_gradients_of_batches_that_it_has_not_sent(
    links: Links, address: str
) -> None:
    output, input, actual = with_batches(links, address, 2, resend_out=2)
    for id in (1, 2):
        input.send_gradient(id, H, ack=id)
    output.close()
    successor = links.output(next_id=2, resend_out=2)
    successor.move(actual)
    successor.send_batch(Batch(3, 1, Mode.TRAIN, (), Y), H)
    links.collect(input, 1, output=successor)
    input.send_gradient(3, 3 * H, ack=3)
    found: list[int] = []

    def came() -> bool:
        input.receive()
        found.extend(event.id for event in successor.receive() if isinstance(event, Gradient))
        return 3 in found

    links.until(came, "the gradient")
    assert found == [3]
    assert not successor.counters.refused
