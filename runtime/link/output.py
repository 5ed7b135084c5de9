"""The output end of a link: sends activations and markers, receives gradients.

For use by one thread. Only :meth:`OutputLink.connect` and :meth:`OutputLink.flush` wait, and both
have a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch import Tensor

from dni_runtime.errors import UnansweredError, WireError
from dni_runtime.link import sockets
from dni_runtime.link.dialer import Dialer
from dni_runtime.link.end import MESSAGES_PER_CALL, LinkEnd
from dni_runtime.link.items import Batch, Drain, Event, Gradient, StreamRequest
from dni_runtime.link.sender import Sender, State
from dni_runtime.link.tensors import from_buffers, to_table
from dni_runtime.packing import taken
from dni_runtime.run.keys import Keyring
from dni_runtime.spec import EdgeSpec, WorkerSpec
from dni_runtime.wire import ID_LIMIT, Kind, Mark, Message, body_of

log = logging.getLogger(__name__)

_GREET_S = 1.0
_RESPONDS_S = 1.0
_ASK_S = 5.0
"""Silence after which a neighbour is asked which messages it has received."""


class OutputLink(LinkEnd):
    """The upstream end of a link (default: the module's only one); see :class:`LinkEnd`."""

    def __init__(
        self,
        spec: WorkerSpec,
        edge: EdgeSpec | None = None,
        *,
        run: str,
        next_id: int = 1,  # the first id that will be sent
        keys: Keyring | None = None,  # for addresses where links are encrypted
        # where the whole chain started; None if only the module was restarted
        cut: int | None = None,
        attempt: int = 1,
    ) -> None:
        if edge is None:
            (edge,) = spec.targets
        super().__init__(spec, edge, "output")
        self._edge, self.outputs = edge, spec.outputs
        self._frames = 1 + self._contract.up.tensors  # with the header
        self._sender = Sender(
            self._contract,
            run=run,
            window=spec.links.window,
            next_id=next_id,
            counters=self.counters,
            retain=spec.retain,
            cut=cut,
            attempt=attempt,
        )
        self._dialer = Dialer(self._context, self._socket, self._contract, spec.links, keys)
        self.heard_s = time.monotonic()  # last message from downstream
        self._greet_again_s = 0.0
        self._events: list[Event] = []

    @property
    def target(self) -> str:
        """Name of the module downstream."""
        return self._contract.target

    @property
    def takes(self) -> tuple[int, ...]:
        """Which of the module's outputs it carries; none: all."""
        return self._edge.takes

    @property
    def teaches(self) -> bool:
        """Whether the module's own output is sent, of which there may be gradients."""
        return self._contract.activation is not None

    @property
    def window(self) -> int:
        """Maximum number of unacknowledged messages."""
        return self._sender.window.size

    @property
    def drained(self) -> int:
        """Id up to which no more gradients will come, even if a batch is sent again."""
        return self._sender.drained

    @property
    def room(self) -> bool:
        """Whether the window has room for another batch or marker."""
        return self._sender.window.room

    @property
    def first(self) -> int:
        """The lowest id that can still be sent to a restarted neighbour."""
        return self._sender.window.first

    @property
    def last(self) -> int:
        """The highest id that was sent."""
        return self._sender.window.last

    @property
    def received(self) -> int:
        """The highest id that the neighbour had when the link was opened."""
        return self._sender.window.received

    @property
    def responds(self) -> bool:
        """Whether it is connected, and not silent for long about what was sent."""
        silent_s = time.monotonic() - self.heard_s if self.in_flight else 0.0
        return self.connected and silent_s < _RESPONDS_S

    @property
    def address(self) -> str | None:
        """Address of the module downstream, connected or not; None before :meth:`connect`."""
        return self._dialer.address

    @property
    def in_flight(self) -> int:
        """Number of unacknowledged messages."""
        return len(self._sender.window)

    @property
    def connected(self) -> bool:
        """Whether WELCOME has come; a lost connection is noticed at the next send."""
        return self._sender.connected

    @property
    def dismissed(self) -> bool:
        """Whether the neighbour has finished; see :meth:`dismiss`."""
        return self._sender.state is State.DISMISSED

    @property
    def lost(self) -> bool:
        """Whether the neighbour is gone: its connection has ended and was not replaced."""
        if self.connected and not sockets.has_peer(self._socket):
            self._lose()
        return not self.connected and not self.dismissed

    def connect(
        self,
        address: str,
        *,
        deadline_s: float,
        server_key: bytes | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """Connect and shake hands; with another address than before, move the link there.

        Without ``server_key`` the keyring's is used; ``stop`` is asked a few times a second. Raises
        ``UnansweredError`` if the neighbour has not answered in time, and ``EncryptionError`` if
        it refused our key, has another one, or only one end encrypts: that, too, only at the
        deadline, because keys and addresses may appear late.
        """
        if self._dialer.dial(address, server_key):
            self._lose()

        def answered() -> bool:
            self._events += self._receive()
            return self.connected

        if not self._wait_until(answered, deadline_s, stop):
            if self._dialer.failure is not None:
                raise self._dialer.error(self._dialer.failure)
            raise UnansweredError(
                f"module {self.target!r} did not answer at {address} within {deadline_s:g} s "
                f"({self._sender.state.value})",
                hint=self._slow_hint,
            )
        log.info("link %s: connected to %s", self._contract, address)

    def move(self, address: str, server_key: bytes | None = None) -> None:
        """Reconnect, to the same or another address, without waiting for the other end."""
        if not self._dialer.dial(address, server_key):
            self._dialer.dial_again()
        self._lose()

    def dismiss(self) -> None:
        """Note that the module downstream has finished: it has all, and sends no more gradients."""
        if self._sender.dismiss():
            self._events.append(Drain(ID_LIMIT))

    def send_batch(self, batch: Batch, h: Tensor) -> None:
        """Send a batch downstream, without waiting; ids MUST grow, and the window MUST have room.

        ``h`` is the module's whole output ``[B, *output]`` for it, and travels in place of its
        inputs. The tensors MUST NOT be changed until the batch is acknowledged: their memory is
        sent, and sent again to a neighbour that restarts.
        """
        edge = self._edge
        activation = () if edge.tensor is None else (taken(h, self.outputs, edge),)
        tensors = (*activation, *(batch.data[index] for index in edge.data), batch.y)
        entries, buffers = to_table(tensors, self._contract.tensors)
        message = Message(
            Kind.BATCH,
            self._sender.run,
            self._contract.source,
            id=batch.id,
            epoch=batch.epoch,
            mode=batch.mode,
            tensors=entries,
            buffers=buffers,
            body=body_of(batch.part, batch.rows),
        )
        if not self.in_flight:
            self.heard_s = time.monotonic()  # nothing was to be heard
        self._sender.add(message, len(batch.y))
        self._transmit()

    def miss(self, id: int, epoch: int) -> None:
        """Tell downstream that a batch was left out: a join there must not wait for it."""
        self._sender.counters.missed += 1
        self.send_mark(id, epoch, Mark.MISSED)

    def send_mark(self, id: int, epoch: int, mark: Mark) -> None:
        """Send a marker downstream, without waiting; it takes room in the window like a batch.

        A full window accepts it, too: markers are never left out. Ids MUST grow.
        """
        run, source = self._sender.run, self._contract.source
        message = Message(Kind.MARK, run, source, id=id, epoch=epoch, mark=mark)
        self._sender.add(message, force=True)
        self._transmit()

    def receive(self) -> list[Event]:
        """Return what has come from downstream, without waiting; also resend and reconnect."""
        events, self._events = self._events, []
        return events + self._receive()

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything is acknowledged; return whether it was before the deadline.

        Events that come meanwhile are kept for :meth:`receive`.
        """

        def acknowledged() -> bool:
            self._events += self._receive()
            return not self.in_flight

        return self._wait_until(acknowledged, deadline_s)

    def finish(self, deadline_s: float) -> bool:
        """Do :meth:`flush`, then send BYE: the module downstream need not answer any more."""
        flushed = self.flush(deadline_s)
        if flushed and self._sender.state is not State.DISMISSED:
            sockets.send(self._socket, self._sender.bye())
        return flushed

    def close(self) -> None:
        """Close the socket; what is not acknowledged is lost."""
        self._dialer.close()
        super().close()

    def _receive(self) -> list[Event]:
        events: list[Event] = []
        failure = self._dialer.look(connected=self.connected)
        if failure is not None:
            self.refuse(WireError(failure.reason, failure.message))
        for _ in range(MESSAGES_PER_CALL):
            frames = sockets.receive(self._socket, self._frames)
            if frames is None:
                break
            self.heard_s = time.monotonic()
            drained = self._sender.drained
            try:
                message = self._sender.handle(sockets.buffers(frames))
                if message is not None:
                    events.append(self._event(message))
                elif self._sender.drained > drained:  # it has had that from another process
                    events.append(Drain(self._sender.drained))
            except WireError as error:
                self.refuse(error)
        self._greet()
        self._transmit()
        return events

    def _greet(self) -> None:
        """Send HELLO when invited, once a second until it is answered, and after long silence.

        An open link is checked, too, so that lost messages are sent again, whatever the reason.
        """
        now_s, state = time.monotonic(), self._sender.state
        due = now_s >= self._greet_again_s
        if self.connected:
            if due and now_s >= self.heard_s + _ASK_S:
                self._greet_again_s = now_s + _ASK_S
                if not sockets.send(self._socket, self._sender.ask()):
                    self._lose()
        elif state is State.INVITED or (due and state is not State.DISMISSED):
            self._greet_again_s = now_s + _GREET_S
            if sockets.send(self._socket, self._sender.hello()):
                self._sender.greeted()

    def _event(self, message: Message) -> Event:
        if message.kind is Kind.GRADIENT:
            g = from_buffers(message.tensors, message.buffers, self._contract.dtype)
            return Gradient(message.id, g)
        if message.kind is Kind.DRAINED:
            return Drain(message.id)
        return StreamRequest(str(message.body["what"]))

    def _transmit(self) -> None:
        while (frames := self._sender.pending()) is not None:
            if not sockets.send(self._socket, frames):
                # high-water marks lie above the window: the connection is gone
                self._lose()
                return
            self._sender.transmitted()

    def _lose(self) -> None:
        self._sender.lose()
        self._greet_again_s = time.monotonic() + _GREET_S
