"""The output end of a link as pure state: frames in, messages and frames out.

Only :class:`Sender` changes its state (docs/wire.md, "Handshake")::

    state      event                                 next       may be sent
    silent     REFUSE hello                          invited    HELLO
    silent     WELCOME, to a HELLO without REFUSE    open       messages above ``received``
    invited    HELLO is sent: :meth:`Sender.greeted` greeting   HELLO, seldom
    invited    WELCOME, to an earlier HELLO          open       messages above ``received``
    greeting   WELCOME                               open       messages above ``received``
    greeting   REFUSE hello                          invited    HELLO
    open       REFUSE hello                          invited    HELLO
    open       long silence: :meth:`Sender.ask`      asking     HELLO, seldom
    asking     WELCOME                               open       messages above ``received``
    asking     REFUSE hello                          invited    HELLO
    these      connection ends: :meth:`Sender.lose`  silent     HELLO, seldom
    these      REFUSE anything else                  HandshakeError
    any        :meth:`Sender.dismiss`                dismissed  nothing; what comes is ignored

A WELCOME counts only if it answers a HELLO of the present connection, and changes nothing in open.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from dni_runtime.errors import WireError
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.counters import LinkCounters
from dni_runtime.link.handshake import (
    INVITATION,
    VERSION,
    Hello,
    Refusal,
    number_of,
    received_of,
)
from dni_runtime.link.window import JUMP_LIMIT, SendWindow
from dni_runtime.wire import (
    ID_LIMIT,
    PROTOCOL_VERSION,
    Buffer,
    Kind,
    Mark,
    Message,
    decode,
    encode,
)

SIZES_KEPT = 1 << 14
"""Batches whose size is kept, to check late gradients against it."""


class State(Enum):
    """Progress of the handshake, in words."""

    SILENT = "no connection"
    INVITED = "connected, but HELLO has not been sent"
    GREETING = "connected, but it does not answer HELLO"
    OPEN = "open"
    ASKING = "open, but it does not answer HELLO"
    DISMISSED = "it has finished"


class Sender:
    def __init__(
        self,
        contract: LinkContract,
        *,
        run: str,
        window: int,
        next_id: int,  # the first id that will be sent
        counters: LinkCounters,
        retain: int = 0,  # acknowledged messages to keep for a neighbour that restarts
        # where the whole chain started; None if only the module was restarted
        cut: int | None = None,
        attempt: int = 1,
    ) -> None:
        self.contract = contract
        self.run = run
        self.counters = counters
        self.window = SendWindow(window, next_id=next_id, retain=retain)
        self._state = State.SILENT
        # no more gradients will come up to this id: downstream has sent DRAINED, or had the batches
        # from an earlier process of this module
        self.drained = 0
        self._cut = cut
        self._attempt = attempt
        self._number = 0  # of the newest HELLO
        self._since = 1  # of the first HELLO on this connection
        self._welcomed = False
        self._session = secrets.token_hex(8)
        self._limits = contract.up
        # Of each batch: its number of samples, and the sizes of one.
        self._sizes: OrderedDict[int, tuple[int, tuple[int, ...]]] = OrderedDict()

    @property
    def state(self) -> State:
        return self._state

    @property
    def connected(self) -> bool:
        """Whether WELCOME has come, and the connection has not been lost since."""
        return self._state in (State.OPEN, State.ASKING)

    def hello(self) -> list[Buffer]:
        """Return the frames of HELLO; call :meth:`greeted` when they are sent."""
        self._number += 1
        hello = Hello(
            self._session,
            self.window.first,
            self.contract.agreement,
            number=self._number,
            newest=self.window.last,
            cut=self._cut,
            attempt=self._attempt,
        )
        return encode(Message(Kind.HELLO, self.run, self.contract.source, body=hello.body()))

    def greeted(self) -> None:
        """Note that HELLO has been sent."""
        if self._state is State.INVITED:
            self._state = State.GREETING

    def ask(self) -> list[Buffer]:
        """Return the frames of a HELLO on an open link, to ask what has arrived.

        Until the answer comes nothing else is sent; then all that has not arrived is sent again.
        """
        if self._state is State.OPEN:
            self._state, self._since = State.ASKING, self._number + 1
        return self.hello()

    def lose(self) -> None:
        """Note that the connection has ended."""
        if self._state is not State.DISMISSED:
            self._state, self._since = State.SILENT, self._number + 1

    def dismiss(self) -> bool:
        """Note that downstream has finished: it has all, and sends no more gradients.

        Returns whether that is new.
        """
        new = self._state is not State.DISMISSED
        self._state, self.drained = State.DISMISSED, ID_LIMIT
        self.window.acknowledge(self.window.last)
        return new

    def bye(self) -> list[Buffer]:
        return encode(Message(Kind.BYE, self.run, self.contract.source))

    def add(self, message: Message, samples: int | None = None, *, force: bool = False) -> None:
        """Put a BATCH (of so many samples) or MARK into the window; only ``force`` overfills it."""
        missed = message.kind is Kind.MARK and Mark.MISSED in message.mark
        self.window.add(message.id, encode(message), force=force, missed=missed)
        if self._state is State.DISMISSED:
            self.window.acknowledge(message.id)
        if samples is not None:
            self._sizes[message.id] = samples, message.tensors[0].shape[1:]
            if len(self._sizes) > SIZES_KEPT:
                self._sizes.popitem(last=False)

    def pending(self) -> Sequence[Buffer] | None:
        """Return the frames to transmit next, or None."""
        if self._state is not State.OPEN:
            return None
        sent = self.window.pending()
        return None if sent is None else sent.frames

    def transmitted(self) -> None:
        """Mark the frames of :meth:`pending` as transmitted."""
        if self.window.advance():
            self.counters.resent += 1

    def handle(self, frames: Sequence[Buffer]) -> Message | None:
        """Process a message from downstream; return a GRADIENT, DRAINED or REQUEST for the module.

        Raises ``WireError`` if it cannot be accepted, ``HandshakeError`` if the other end does not
        fit.
        """
        if self._state is State.DISMISSED:
            return None
        try:
            message = decode(frames, self._limits)
        except WireError as error:
            if error.version is None or self.connected:
                raise
            versions = Refusal(VERSION, mine=str(error.version), yours=str(PROTOCOL_VERSION))
            raise versions.error(self.contract.source, self.contract.target) from None
        if message.kind is Kind.REFUSE:
            self._refused(message)
            return None
        if message.run != self.run:
            raise WireError("run", f"a message of run {message.run!r}")
        if message.source != self.contract.target:
            raise WireError("source", f"a message of module {message.source!r}")
        return self._accept(message)

    def _refused(self, message: Message) -> None:
        refusal = Refusal.of(message)
        if refusal.field != INVITATION:
            raise refusal.error(self.contract.source, self.contract.target)
        if self._state is State.OPEN:
            self._since = self._number + 1  # the connection was lost unnoticed
        # else a HELLO was sent on this connection before the invitation came
        self._state = State.INVITED

    def _accept(self, message: Message) -> Message | None:
        if message.kind is Kind.WELCOME:
            self._welcome(message)
            return None
        if not self.connected:
            raise WireError("stranger", f"{message.kind.name} before WELCOME")
        if message.kind is Kind.ACK:
            self._acknowledge(message.ack)
            return None
        if message.kind is Kind.GRADIENT:
            self._check_gradient(message)
            self._acknowledge(message.ack)
            self.counters.gradients += 1
            return message
        if message.kind is Kind.DRAINED:
            return self._note_drained(message)
        if message.kind is Kind.REQUEST:
            if not isinstance(message.body.get("what"), str):
                raise WireError("body", "REQUEST without 'what'")
            return message
        raise WireError("kind", f"{message.kind.name} from downstream")

    def _welcome(self, message: Message) -> None:
        number, received = number_of(message), received_of(message)
        if not self._since <= number <= self._number or self._state is State.OPEN:
            return  # from a connection that has ended, or a second answer
        if message.ack > max(self.window.last, received):  # before anything changes
            raise self._unknown(message.ack)
        if not self._welcomed:
            self._welcomed = True
            self.drained = received
        self.window.rewind(received)
        self.window.acknowledge(message.ack)
        self.counters.handshakes += not self.connected
        self._state = State.OPEN

    def _acknowledge(self, id: int) -> None:
        if not self.window.acknowledge(id):
            raise self._unknown(id)

    def _unknown(self, id: int) -> WireError:
        return WireError("id", f"id {id} is acknowledged, but {self.window.last} is the last")

    def _note_drained(self, message: Message) -> Message | None:
        # It may be ahead: the neighbour has already had what this restarted module sends again.
        last = max(self.window.last, self.window.received)
        if message.id > last + JUMP_LIMIT:
            raise WireError("id", f"id {message.id} is drained, but {last} is the last")
        if message.id <= self.drained:
            return None
        self.drained = message.id
        return message

    def _check_gradient(self, message: Message) -> None:
        if self.contract.gradient is None:
            raise WireError("kind", "a gradient, though this module accepts none")
        samples = self.contract.gradient.check(message.tensors, message.buffers)
        due = self._sizes.get(message.id)
        if due is None:
            raise WireError("id", f"a gradient of batch {message.id}, which is unknown here")
        found = samples, message.tensors[0].shape[1:]
        if found != due and not self.contract.messages:
            (wrong, sizes), (right, wanted) = found, due
            raise WireError(
                "shape",
                f"a gradient of {wrong} samples for a batch of {right}"
                if wrong != right
                else f"a gradient of sizes {sizes} for an activation of {wanted}",
            )
