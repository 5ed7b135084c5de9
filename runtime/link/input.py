"""The input end of a link: receives activations and markers, sends gradients.

For use by one thread. Only :meth:`InputLink.wait_for_peer` and :meth:`InputLink.finish` wait, and
both have a deadline.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from torch import Tensor

from dni_runtime.errors import UnansweredError, UnavailableError, WireError
from dni_runtime.link import sockets
from dni_runtime.link.address import encrypted
from dni_runtime.link.end import MESSAGES_PER_CALL, LinkEnd
from dni_runtime.link.guard import REASONS, AllowList, Guard
from dni_runtime.link.items import Batch, Marker
from dni_runtime.link.receiver import Receiver
from dni_runtime.link.tensors import from_buffers, to_buffers
from dni_runtime.run.keys import Keyring
from dni_runtime.spec import EdgeSpec, WorkerSpec
from dni_runtime.wire import Buffer, Kind, Message, encode, samples_of

_REQUESTS_KEPT = 64


class Answers:
    """Gradients, then requests and DRAINED, then an acknowledgement."""

    def __init__(
        self, receiver: Receiver, *, resend: int, send: Callable[[list[Buffer]], bool]
    ) -> None:
        self.ack_due = False
        self._receiver = receiver
        self._counters = receiver.counters
        self._run, self._module = receiver.run, receiver.contract.target
        self._contract = receiver.contract.gradient
        self._send = send
        self._gradients: deque[list[Buffer]] = deque(maxlen=resend)  # the newest ones
        self._unsent: deque[list[Buffer]] = deque(maxlen=resend)  # before anything else
        self._requests: deque[list[Buffer]] = deque(maxlen=_REQUESTS_KEPT)
        self._drained = 0
        self._drained_due = False
        self._welcomed = ("", 0)  # session and number of the newest HELLO that was answered

    def ack(self) -> None:
        self.ack_due = True
        self.send_due()

    def gradient(self, id: int, g: Tensor, ack: int) -> None:
        """Send a gradient with an acknowledgement; see :meth:`InputLink.send_gradient`."""
        order = self._receiver.order
        order.acknowledge(min(ack, order.received))
        if self._contract is None:
            self.ack()
            return
        entries, buffers = to_buffers(g, self._contract)
        message = Message(
            Kind.GRADIENT,
            self._run,
            self._module,
            id=id,
            ack=order.acked,
            tensors=entries,
            buffers=buffers,
        )
        frames = encode(message)
        self._gradients.append(frames)
        if not self._unsent and self._send(frames):
            self._counters.gradients += 1
            self.ack_due = False
            return
        self.ack_due = True
        if self._gradients:
            self._unsent.append(frames)
        else:
            self._counters.gradients_dropped += 1

    def drained(self, id: int) -> None:
        """Announce that no gradient of a batch before marker ``id`` will follow."""
        self._drained = max(self._drained, id)
        self._drained_due = self._drained > 0
        self.send_due()

    def drained_again(self) -> None:
        """Repeat the newest announcement, if there was one."""
        self.drained(self._drained)

    def request(self, what: str) -> None:
        message = Message(Kind.REQUEST, self._run, self._module, body={"what": what})
        self._requests.append(encode(message))
        self.send_due()

    def send_due(self) -> None:
        """Send what waits, as far as possible."""
        while self._unsent and self._send(self._unsent[0]):
            self._counters.gradients += 1
            self._unsent.popleft()
        if self._unsent:
            return
        while self._requests and self._send(self._requests[0]):
            self._requests.popleft()
        if self._drained_due:
            message = Message(Kind.DRAINED, self._run, self._module, id=self._drained)
            self._drained_due = not self._send(encode(message))
        if self.ack_due:
            ack = self._receiver.order.acked
            message = Message(Kind.ACK, self._run, self._module, ack=ack)
            self.ack_due = not self._send(encode(message))

    def repeat(self) -> None:
        """After a WELCOME, send again what may not have been accepted before it.

        That also happens on a connection that stands: an output end that could not send, as this
        end has read nothing for long, accepts nothing until WELCOME.
        """
        welcomed = (self._receiver.session, self._receiver.number)
        if self._welcomed == welcomed:
            return
        self.ack_due = False  # WELCOME carried it
        if self._welcomed[0] != self._receiver.session:  # another process, which waits for none
            self._gradients.clear()
        self._welcomed = welcomed
        self._unsent = self._gradients.copy()
        self.drained_again()


log = logging.getLogger(__name__)


class InputLink(LinkEnd):
    """The downstream end of a link (default: the module's only one); see :class:`LinkEnd`."""

    def __init__(
        self,
        spec: WorkerSpec,
        edge: EdgeSpec | None = None,
        *,
        run: str,
        received: int = 0,  # all up to this id was processed before (a checkpoint's cut)
        keys: Keyring | None = None,  # for addresses where links are encrypted
        # only this module was restarted: it takes all that the module upstream can still send, also
        # what it has processed before
        restarted: bool = False,
    ) -> None:
        if edge is None:
            (edge,) = spec.sources
        super().__init__(spec, edge, "input")
        self.awaited = edge.awaited  # an update upstream waits for gradients
        self._dtypes = {"h": self._contract.dtype}
        self._frames = 2 + self._contract.down.tensors  # with the peer's identity and the header
        self._receiver = Receiver(
            self._contract,
            run=run,
            received=received,
            counters=self.counters,
            restarted=restarted,
            carries=self.carries if self.routed else None,
        )
        self._answers = Answers(self._receiver, resend=edge.resend, send=self._send)
        self._links = spec.links
        self._keys = keys
        self._guard: Guard | None = None
        self._file: sockets.SocketFile | None = None

    @property
    def source(self) -> str:
        """Name of the module upstream."""
        return self._contract.source

    @property
    def connected(self) -> bool:
        """Whether a peer has completed HELLO (it may have gone since)."""
        return self._receiver.peer is not None

    @property
    def received(self) -> int:
        """The highest id that has been accepted."""
        return self._receiver.order.received

    def may_bring(self, after: int, until: int) -> bool:
        """Return whether a batch with an id above ``after``, up to ``until``, may still come."""
        return self._receiver.order.may_bring(after, until)

    def bind(self, address: str) -> str:
        """Listen at ``address`` (``listen_address``); call it once.

        Returns the actual address, with the port that was chosen for ``:*``.
        """
        if self._guard is not None or self._file is not None:
            raise ValueError(f"{address}: a link listens at one address")
        keys, source, allowed, how = self._keys, self._contract.source, None, ""
        if encrypted(self._links, address):
            if keys is None:
                raise UnavailableError(
                    f"links at {address} are encrypted, and module {self._contract.target!r} has "
                    "no keys",
                    hint="give it a run directory, or set 'links.security: none'",
                )
            sockets.encrypt_input(self._socket, keys.pair)
            allowed, how = AllowList(lambda: keys.public(source)), ", encrypted"
        if address.startswith("tcp:"):
            self._guard = Guard(self._context, self._socket, allowed)
        actual = sockets.bind(self._socket, address)
        if self._guard is not None:
            self._guard.start(int(actual.rpartition(":")[2]))
        else:
            self._file = sockets.SocketFile(actual)
        log.info("link %s: listening on %s%s", self._contract, actual, how)
        return actual

    def wait_for_peer(self, deadline_s: float, stop: Callable[[], bool] | None = None) -> None:
        """Wait until the module upstream has completed HELLO; ``UnansweredError`` if not in time.

        ``stop`` is asked a few times a second.
        """
        if not self._wait_until(self.greet, deadline_s, stop):
            refused = self.counters.refused
            raise UnansweredError(
                f"module {self.source!r} did not connect within {deadline_s:g} s"
                + (f"; refused meanwhile: {dict(refused)}" if refused else ""),
                hint=self._slow_hint,
            )

    def greet(self) -> bool:
        """Answer handshakes, without waiting, while there is no peer.

        Returns whether there is a peer.
        """
        for _ in range(MESSAGES_PER_CALL):
            if self.connected or not self._take():
                break
        return self.connected

    def receive(self) -> Batch | Marker | None:
        """Return the next message of the stream, without waiting; also send what is due.

        None: there is none, or only refused ones have come (call again).
        """
        self._answers.send_due()
        for _ in range(MESSAGES_PER_CALL):
            taken = self._take()
            if isinstance(taken, Message):
                return self._item(taken)
            if not taken:
                return None
        return None

    def ack(self, id: int) -> None:
        """Acknowledge everything up to ``id``: it has been processed, upstream may drop it."""
        self._receiver.order.acknowledge(id)
        self._answers.ack()

    def send_gradient(self, id: int, g: Tensor, ack: int) -> None:
        """Send a true gradient upstream if that is possible now, else drop and count it.

        If an upstream module takes no other batch before it has the gradient, the gradient is sent
        as soon as possible, and again after a connection was lost. If the module upstream needs no
        gradients, only the acknowledgement is sent. The tensor MUST NOT be changed afterwards: its
        memory is sent.

        ``g`` is ``dL_b/dh_b`` per sample ``[B, *input]``, not divided by the batch size. ``ack``:
        everything up to this id has been processed; if it is beyond what has come here, all that
        has.
        """
        self._answers.gradient(id, g, ack)

    def send_drained(self, id: int) -> None:
        """Announce that no gradient of a batch before marker ``id`` will follow."""
        self._answers.drained(id)

    def request(self, what: str) -> None:
        """Ask the head for something, such as ``checkpoint``."""
        self._answers.request(what)

    def reaches_peer(self) -> bool:
        """Return whether the module upstream is connected now, by sending an acknowledgement."""
        self._answers.ack()
        return not self._answers.ack_due

    def finish(self, deadline_s: float) -> bool:
        """Wait until upstream has all acknowledgements and has sent BYE; return whether in time.

        When a connection ends, unread messages are lost: a module that exits right after its last
        acknowledgement may leave its neighbour waiting for it.
        """

        def over() -> bool:
            while not self._receiver.ended:
                if not self._take():
                    self._answers.drained_again()
                    self._answers.ack()
                    return False
            return True

        return self._wait_until(over, deadline_s)

    def close(self) -> None:
        """Stop listening; wait at most a second for acknowledgements to be sent."""
        self._answers.send_due()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._file is not None:
            self._file.remove()
        super().close()

    def _take(self) -> Message | bool:
        """Read one message: return a new one of the stream, else whether there was any."""
        if self._guard is not None and self._guard.alarmed:
            for reason, count in self._guard.take().items():
                self.refuse(WireError(reason, REASONS[reason]), count)
        frames = sockets.receive(self._socket, self._frames)
        if frames is None:
            return False
        identity, *rest = sockets.buffers(frames)
        peer = self._receiver.peer
        try:
            message = self._receiver.handle(bytes(identity), rest)
        except WireError as error:
            self.refuse(error)
            message = None
        if self._guard is not None and self._receiver.peer is not peer:
            self._guard.keep(sockets.descriptor(frames[0]))
        if self._receiver.replies:
            self._reply()
        return True if message is None else message

    def _item(self, message: Message) -> Batch | Marker:
        if message.kind is Kind.MARK:
            return Marker(message.id, message.epoch, message.mark)
        tensors, buffers = message.tensors, message.buffers
        *values, y = [
            from_buffers(tensors[rows], buffers[rows], self._dtypes.get(tensor.name, tensor.dtype))
            for tensor, rows in self._contract.rows
        ]
        outputs = int(self._contract.activation is not None)
        xs, data = tuple(values[:outputs]), tuple(values[outputs:])
        part, rows = samples_of(message)
        return Batch(message.id, message.epoch, message.mode, xs, y, part, data, rows)

    def _reply(self) -> None:
        replies = self._receiver.replies
        while replies:
            identity, frames = replies.popleft()
            # a peer that does not read its answer must ask again
            sockets.send(self._socket, [identity, *frames])
        self._answers.repeat()

    def _send(self, frames: list[Buffer]) -> bool:
        peer = self._receiver.peer
        return peer is not None and sockets.send(self._socket, [peer, *frames])
