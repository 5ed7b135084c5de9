"""The input end of a link as pure state: frames in, messages and replies out.

It accepts one peer at a time, identified by its connection. A matching HELLO makes a peer the
accepted one; messages of others are refused and counted (docs/wire.md, "Handshake").
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from dni_runtime.errors import WireError
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.counters import LinkCounters
from dni_runtime.link.handshake import (
    CUT,
    INVITATION,
    REPLACED,
    VERSION,
    Hello,
    Refusal,
    compare,
)
from dni_runtime.link.window import JUMP_LIMIT, ReceiveOrder
from dni_runtime.wire import (
    PROTOCOL_VERSION,
    Body,
    Buffer,
    Kind,
    Mark,
    Message,
    Mode,
    decode,
    encode,
    samples_of,
)

log = logging.getLogger(__name__)

STRANGERS_HEADER_BYTES = 1 << 13
"""Maximum size of a header from a peer that has not completed HELLO."""

REPLACED_KEPT = 64
INVITED_KEPT = 64


class Receiver:
    def __init__(
        self,
        contract: LinkContract,
        *,
        run: str,
        received: int,  # everything up to this id was accepted and processed before
        counters: LinkCounters,
        # this module was restarted while its neighbours kept running: it takes all that the first
        # peer can still send, and passes it on again
        restarted: bool = False,
        # whether the batch with an id comes this way; None: all do
        carries: Callable[[int], bool] | None = None,
    ) -> None:
        self.contract = contract
        self.run = run
        self.counters = counters
        self.order = ReceiveOrder(received, carries, jumps=contract.predicts)
        self._begun_at = received
        self.peer: bytes | None = None  # identity of the accepted peer's connection
        self.ended = False  # whether the peer has sent BYE
        self._restarted = restarted
        # handshake messages to send, each with the identity of its receiver
        self.replies: deque[tuple[bytes, list[Buffer]]] = deque()
        self._limits = contract.down
        self._of_strangers = replace(contract.down, header_bytes=STRANGERS_HEADER_BYTES)
        self.session = ""  # random identifier of the accepted peer's process
        self._attempt = 0  # of the module upstream
        self.number = 0  # of the session's newest HELLO
        self._newest = 0  # the highest id in the peer's window by then
        self._replaced: deque[str] = deque(maxlen=REPLACED_KEPT)
        self._invited: deque[bytes] = deque(maxlen=INVITED_KEPT)

    def handle(self, identity: bytes, frames: Sequence[Buffer]) -> Message | None:
        """Process a message; return a new BATCH or MARK, in the stream's order, else None.

        Raises ``WireError`` if it cannot be accepted.
        """
        if identity != self.peer:
            self._stranger(identity, frames)
            return None
        message = decode(frames, self._limits)
        if message.kind is Kind.BATCH or message.kind is Kind.MARK:
            return self._stream(message)
        if message.kind is Kind.HELLO:
            self._hello(identity, message)
            return None
        if message.kind is Kind.BYE:
            self._check_origin(message)
            self.ended = True
            return None
        raise WireError("kind", f"{message.kind.name} from upstream")

    def _check_origin(self, message: Message) -> None:
        if message.run != self.run:
            raise WireError("run", f"a message of run {message.run!r}")
        if message.source != self.contract.source:
            raise WireError("source", f"a message of module {message.source!r}")

    def _stream(self, message: Message) -> Message | None:
        self._check_origin(message)
        if message.kind is Kind.BATCH:
            tensors, buffers = message.tensors, message.buffers
            samples = {
                tensor.name: tensor.check(tensors[rows], buffers[rows])
                for tensor, rows in self.contract.rows
            }
            labels = samples["y"]
            wrong = [
                f"{count} samples in {name}" for name, count in samples.items() if count != labels
            ]
            if wrong:
                raise WireError("shape", f"{wrong[0]} but {labels} in y")
            part, rows = samples_of(message)
            predicts = message.mode is Mode.PREDICT
            if predicts != self.contract.predicts:
                raise WireError("mode", f"a batch of mode {message.mode.name}")
            if (rows is None) != (self.contract.labelled or predicts):
                raise WireError("body", "a BATCH needs its labels, or the place of its samples")
            if part is not None and part.first + labels > part.samples:
                raise WireError("body", f"{labels} samples in part {tuple(part)} of a batch")
        order = self.order
        jump = message.id > max(order.received, self._newest) + JUMP_LIMIT
        if jump and not self.contract.predicts:  # replicas may get nothing for long
            raise WireError("id", f"id {message.id} after {order.received}")
        if not order.accept(message.id):
            self.counters.duplicates += 1
            return None
        order.gaps += message.kind is Kind.MARK and Mark.MISSED in message.mark
        self.counters.gaps = order.gaps
        return message

    def _stranger(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        if len(frames) == 1 and len(frames[0]) == 0:
            self._refuse(identity, Refusal(INVITATION))
            return
        try:
            message = decode(frames, self._of_strangers)
        except WireError as error:
            if error.version is not None and len(frames) == 1:
                versions = str(PROTOCOL_VERSION), str(error.version)
                self._refuse(identity, Refusal(VERSION, *versions))
            raise
        if message.kind is not Kind.HELLO:
            ours = message.kind in (Kind.BATCH, Kind.MARK) and message.run == self.run
            if ours and identity not in self._invited:
                # the neighbour believes that the link is open: invite it once to send HELLO
                self._invited.append(identity)
                self._refuse(identity, Refusal(INVITATION))
            raise WireError("stranger", f"{message.kind.name} before HELLO")
        self._hello(identity, message)

    def _hello(self, identity: bytes, message: Message) -> None:
        hello = Hello.of(message)
        refusal = compare(self.run, self.contract.agreement, hello, message.run)
        former = hello.session != self.session and hello.attempt < self._attempt
        if refusal is None and (former or hello.session in self._replaced):
            refusal = Refusal(REPLACED, self.session, hello.session)
        again = hello.cut != self._begun_at or hello.attempt > self._attempt
        if self.session not in ("", hello.session) and hello.cut is not None and again:
            # No answer: the neighbour is to find the process that has begun with it.
            raise WireError(
                "handshake",
                f"the chain has begun again at {hello.cut}; this process is of {self._begun_at}",
            )
        if refusal is None and hello.cut is not None and not (self.session or self._restarted):
            mine = self.order.received
            refusal = None if hello.cut == mine else Refusal(CUT, str(mine), str(hello.cut))
        if refusal is not None:
            self._refuse(identity, refusal)
            raise WireError(
                "handshake",
                f"{refusal.field} is {refusal.mine!r} here but {refusal.yours!r} for a peer that "
                f"claims to be module {message.source!r}",
            )
        if hello.session != self.session:
            self._replace(hello)
        elif hello.number <= self.number:
            raise WireError("handshake", "a HELLO of a connection that a newer one has replaced")
        self.number, self._newest = hello.number, hello.newest
        if identity != self.peer:
            self.peer = identity
            self.counters.handshakes += 1
        start = self.order.start_at if self._restarted else self.order.skip_to
        lost, self._restarted = start(hello.first), False
        if lost:
            self.counters.gaps = self.order.gaps
            log.warning(
                "link %s: %d messages before %d were processed by an earlier process of this "
                "module and will not come again",
                self.contract,
                lost,
                hello.first,
            )
        body: dict[str, Body] = {"number": hello.number, "received": self.order.received}
        self._reply(identity, Kind.WELCOME, body, ack=self.order.acked)

    def _replace(self, hello: Hello) -> None:
        """Let another process of the module upstream take the link over."""
        if self.session:
            self._replaced.append(self.session)
            log.info("link %s: the module upstream has been restarted", self.contract)
            if self.peer is not None:
                self._refuse(self.peer, Refusal(REPLACED, hello.session, self.session))
        self.session, self._attempt = hello.session, hello.attempt
        self.ended = False

    def _refuse(self, identity: bytes, refusal: Refusal) -> None:
        self._reply(identity, Kind.REFUSE, refusal.body())

    def _reply(self, identity: bytes, kind: Kind, body: dict[str, Body], ack: int = 0) -> None:
        message = Message(kind, self.run, self.contract.target, ack=ack, body=body)
        self.replies.append((identity, encode(message)))
