"""A neighbour that goes away and comes back, over real sockets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dni_runtime.link import InputLink, OutputLink
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
    got = []
    for id in (1, 2, 3):
        output.send_batch(id, 1, Mode.TRAIN, H, Y)
        links.until(lambda: bool(got.append(input.receive()) or got[-1]), "it has come")
        input.ack(id)
    links.until(lambda: bool(output.receive() or not output.in_flight), "acknowledged")
    assert not output.lost
    input.close()
    links.until(lambda: output.lost, "lost")
    output.send_batch(4, 1, Mode.TRAIN, H, Y)

    again = links.input(received=2, again=True)
    elsewhere = again.bind(address.replace("tail", "elsewhere"))
    assert elsewhere != actual or address.startswith("tcp")
    output.move(elsewhere)
    links.shake(output, again, elsewhere)
    assert not output.lost
    assert again.received == 1  # what upstream retains comes again
    ids = []

    def take() -> bool:
        output.receive()
        item = again.receive()
        if item is not None:
            ids.append(item.id)
        return len(ids) == 3

    links.until(take, "three messages")
    assert ids == [2, 3, 4]
    assert again.counters.gaps == 0


def test_moving_to_the_same_place_connects_anew(links: Links, address: str) -> None:
    output, input, actual = links.pair(address)
    output.move(actual)
    assert output.lost
    links.until(stands(output, input), "it stands")
    output.send_mark(1, 1, Mark.EPOCH)
    links.until(lambda: input.receive() is not None, "it has come")


def test_one_that_has_finished_takes_everything(links: Links) -> None:
    output = links.output(links=LinksSpec(window=2))
    output.dismiss()
    for id in range(1, 9):
        assert output.room
        output.send_batch(id, 1, Mode.TRAIN, H, Y)
    assert not output.lost
    assert output.finish(1)


def test_the_peer_is_found_gone(links: Links, address: str) -> None:
    output, input, _ = links.pair(address)
    assert input.reaches_peer()
    output.close()
    links.until(lambda: not input.reaches_peer(), "gone")
