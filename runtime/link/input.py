"""The input end of a link: receives activations and markers, sends gradients.

For use by one thread. Only :meth:`InputLink.wait_for_peer` and :meth:`InputLink.finish` wait, and
both have a deadline. It is one file because it is one socket: the protocol's state, the
window and the addresses have theirs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from torch import Tensor

from dni_runtime.errors import StoppedError, UnavailableError, WireError
from dni_runtime.keys import Keyring
from dni_runtime.link import socketfile, sockets
from dni_runtime.link.address import encrypted
from dni_runtime.link.contract import LinkContract
from dni_runtime.link.counters import LinkCounters, Refusals
from dni_runtime.link.guard import REASONS, AllowList, Guard
from dni_runtime.link.items import Batch, Marker
from dni_runtime.link.receiver import Receiver, part_of
from dni_runtime.link.sender import WINDOWS
from dni_runtime.link.tensors import from_buffers, to_buffers
from dni_runtime.spec import EdgeSpec, WorkerSpec
from dni_runtime.spec.worker import ADJACENT_FAILURES
from dni_runtime.wire import Body, Buffer, Kind, Message, encode

log = logging.getLogger(__name__)

MESSAGES_PER_CALL = 64
_CONTROL_KEPT = 64
_POLL_S = 0.2


class InputLink:
    """The downstream end of a link.

    Args:
        spec: The module that receives.
        edge: The link (default: the module's only one).
        run: The run.
        received: Everything up to this id was processed before (a checkpoint's cut).
        keys: Its keys, for addresses where links are encrypted.
        again: Whether only this module was restarted: it takes all that the module upstream can
            still send, also what it has processed before.

    Attributes:
        counters: Counts of this end.
        awaited: Whether an update upstream waits for gradients.
        carries: Whether the batch with an id comes this way.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        edge: EdgeSpec | None = None,
        *,
        run: str,
        received: int = 0,
        keys: Keyring | None = None,
        again: bool = False,
    ) -> None:
        if edge is None:
            (edge,) = spec.sources
        self.awaited = edge.awaited
        self.carries = edge.carries
        self._contract = LinkContract.of(spec, edge)
        self._dtypes = {"h": self._contract.dtype}
        self._frames = 2 + self._contract.down.tensors  # with the peer's identity and the header
        self.counters = LinkCounters()
        self._receiver = Receiver(
            self._contract,
            run=run,
            received=received,
            counters=self.counters,
            again=again,
            carries=edge.carries if edge.route else None,
        )
        self._refuse = Refusals(self.counters, str(self._contract), log)
        self._context = sockets.open_context()
        self._socket = sockets.input_socket(
            self._context,
            window=spec.links.largest_window
            * (1 + ADJACENT_FAILURES),  # retained messages may come, too
            frame_limit=self._contract.frame_limit("input"),
        )
        self._links = spec.links
        self._keys = keys
        self._guard: Guard | None = None
        self._bound: list[tuple[str, tuple[int, int] | None]] = []
        self._ack_due = False
        self._drained = 0
        self._control: deque[list[Buffer]] = deque(maxlen=_CONTROL_KEPT)
        self._handshakes = 0
        self._windows: tuple[int, ...] = ()
        # Gradients that upstream waits for: the newest, and those to send before anything else.
        self._gradients: deque[list[Buffer]] = deque(maxlen=edge.resend)
        self._unsent: deque[list[Buffer]] = deque(maxlen=edge.resend)
        self._session = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def socket(self) -> sockets.Socket:
        """The socket, for ``zmq.Poller``: readable when :meth:`receive` has something to do."""
        return self._socket

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

    def next(self, after: int) -> int:
        """Return the lowest id above ``after`` of a batch that may still come this way."""
        return self._receiver.order.next(max(after, self.received))

    def bind(self, address: str) -> str:
        """Listen at ``address`` (``listen_address``).

        Returns:
            The actual address, with the port that was chosen for ``:*``.

        Raises:
            UnavailableError: It is in use, too long, or not this machine's; or links are encrypted
                there, and the module has no keys.
        """
        secret = encrypted(self._links, address)
        if address.startswith("tcp:"):
            if self._guard is None:
                self._guard = self._guarded(address, secret)
            elif self._guard.encrypted != secret:
                raise ValueError(f"{address}: one socket cannot be both encrypted and plain")
        actual = sockets.bind(self._socket, address)
        if self._guard is not None and actual.startswith("tcp:"):
            self._guard.start(int(actual.rpartition(":")[2]))
        self._bound.append((actual, socketfile.file_id(actual)))
        how = ", encrypted" if secret else ""
        log.info("link %s: listening on %s%s", self._contract, actual, how)
        return actual

    def _guarded(self, address: str, secret: bool) -> Guard:
        if not secret:
            return Guard(self._context, self._socket, None)
        keys, source = self._keys, self._contract.source
        if keys is None:
            raise UnavailableError(
                f"links at {address} are encrypted, and module {self._contract.target!r} has no "
                "keys",
                hint="give it a run directory, or set 'links.security: none'",
            )
        sockets.encrypt_input(self._socket, keys.own)
        return Guard(self._context, self._socket, AllowList(lambda: keys.public(source)))

    def wait_for_peer(self, deadline_s: float, stop: Callable[[], bool] | None = None) -> None:
        """Wait until the module upstream has completed HELLO.

        Raises:
            UnavailableError: It did not connect in time.
            StoppedError: ``stop``, called a few times a second, returned True.
        """
        end_s = time.monotonic() + deadline_s
        while not self.greet():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                source, refused = self._contract.source, self.counters.refused
                raise UnavailableError(
                    f"module {source!r} did not connect within {deadline_s:g} s"
                    + (f"; refused meanwhile: {dict(refused)}" if refused else ""),
                    hint=f"see 'dnictl logs {source}'; if it starts slowly, raise "
                    "'links.connect_timeout_s'",
                )
            if stop is not None and stop():
                raise StoppedError(f"stopped while waiting for module {self._contract.source!r}")
            sockets.wait(self._socket, min(left_s, _POLL_S))

    def greet(self) -> bool:
        """Answer handshakes, without waiting, while there is no peer.

        Returns:
            Whether there is a peer.
        """
        for _ in range(MESSAGES_PER_CALL):
            if self.connected or not self._take():
                break
        return self.connected

    def receive(self) -> Batch | Marker | None:
        """Return the next message of the stream, without waiting; also send what is due.

        Returns:
            The message, or None if there is none (or only refused ones: call again).
        """
        self._send_due()
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
        self._ack_due = True
        self._send_due()

    def send_gradient(self, id: int, g: Tensor, ack: int) -> None:
        """Send a true gradient upstream if that is possible now, else drop and count it.

        If an upstream module takes no other batch before it has the gradient, the gradient is sent
        as soon as possible, and again after a connection was lost. If the module upstream needs no
        gradients, only the acknowledgement is sent. The tensor MUST NOT be changed afterwards: its
        memory is sent.

        Args:
            id: The batch.
            g: ``dL_b/dh_b`` per sample ``[B, *input]``, not divided by the batch size.
            ack: Everything up to this id has been processed; beyond what has come here, all is.

        Raises:
            WireError: The tensor breaks the contract (a bug of the caller).
        """
        contract, order = self._contract.gradient, self._receiver.order
        ack = min(ack, order.received)
        if contract is None:
            self.ack(ack)
            return
        order.acknowledge(ack)
        entries, buffers = to_buffers(g, contract)
        message = Message(
            Kind.GRADIENT,
            self._receiver.run,
            self._contract.target,
            id=id,
            ack=order.acked,
            tensors=entries,
            buffers=buffers,
        )
        frames = encode(message)
        self._gradients.append(frames)
        if not self._unsent and self._send(frames):
            self.counters.gradients += 1
            self._ack_due = False
            return
        self._ack_due = True
        if self._gradients:
            self._unsent.append(frames)
        else:
            self.counters.gradients_dropped += 1

    def send_drained(self, id: int) -> None:
        """Announce that no gradient of a batch before marker ``id`` will follow."""
        self._drained = max(self._drained, id)
        self._send_control(Message(Kind.DRAINED, self._receiver.run, self._contract.target, id=id))

    def request(self, what: str) -> None:
        """Ask the head for something, such as ``checkpoint``."""
        self._send_control(
            Message(Kind.REQUEST, self._receiver.run, self._contract.target, body={"what": what})
        )

    def tell_windows(self, windows: tuple[int, ...]) -> None:
        """Report the windows of the links further down to the module upstream."""
        if windows != self._windows:
            self._windows = windows
            body: dict[str, Body] = {"what": WINDOWS, WINDOWS: list(windows)}
            request = Message(Kind.REQUEST, self._receiver.run, self._contract.target, body=body)
            self._send_control(request)

    def reaches_peer(self) -> bool:
        """Return whether the module upstream is connected now, by sending an acknowledgement."""
        self._ack_due = True
        self._send_due()
        return not self._ack_due

    def finish(self, deadline_s: float) -> bool:
        """Wait until the module upstream has received all acknowledgements and sent BYE.

        When a connection ends, unread messages are lost: a module that exits right after its last
        acknowledgement may leave its neighbour waiting for it.

        Returns:
            Whether BYE came before the deadline.
        """
        end_s = time.monotonic() + deadline_s
        while not self._receiver.left:
            if not self._take():
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._ack_due = True
                if self._drained:
                    self.send_drained(self._drained)
                self._send_due()
                sockets.wait(self._socket, min(left_s, _POLL_S))
        return True

    def close(self) -> None:
        """Stop listening; wait at most a second for acknowledgements to be sent."""
        self._send_due()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        for address, file in self._bound:
            socketfile.remove(address, file)
        sockets.close(self._socket, self._context)

    def _take(self) -> Message | bool:
        """Read one message: return a new one of the stream, else whether there was any."""
        if self._guard is not None and self._guard.alarmed:
            for reason, count in self._guard.take().items():
                self._refuse(WireError(reason, REASONS[reason]), count)
        frames = sockets.receive(self._socket, self._frames)
        if frames is None:
            return False
        identity, *rest = sockets.buffers(frames)
        peer = self._receiver.peer
        try:
            message = self._receiver.handle(bytes(identity), rest)
        except WireError as error:
            self._refuse(error)
            message = None
        if self._guard is not None and self._receiver.peer is not peer:
            self._guard.keep(sockets.descriptor(frames[0]))
        if self._receiver.replies:
            self._reply()
        return True if message is None else message

    def _item(self, message: Message) -> Batch | Marker:
        if message.kind is Kind.MARK:
            return Marker(message.id, message.epoch, message.mark, dict(message.body))
        tensors, buffers = message.tensors, message.buffers
        *given, y = [
            from_buffers(tensors[rows], buffers[rows], self._dtypes.get(one.name, one.dtype))
            for one, rows in self._contract.rows
        ]
        outputs = int(self._contract.activation is not None)
        xs, data = tuple(given[:outputs]), tuple(given[outputs:])
        part = part_of(message)
        return Batch(message.id, message.epoch, message.mode, xs, y, part, data)

    def _reply(self) -> None:
        replies = self._receiver.replies
        while replies:
            identity, frames = replies.popleft()
            # a peer that does not read its answer must ask again
            sockets.send(self._socket, [identity, *frames])
        if self.counters.handshakes != self._handshakes:
            self._handshakes = self.counters.handshakes
            self._ack_due = False  # WELCOME carried it
            if self._session != self._receiver.session:  # another process, which waits for none
                self._session = self._receiver.session
                self._gradients.clear()
            self._unsent = self._gradients.copy()
            if self._drained:
                self.send_drained(self._drained)
            windows, self._windows = self._windows, ()
            if windows:
                self.tell_windows(windows)

    def _send(self, frames: list[Buffer]) -> bool:
        peer = self._receiver.peer
        return peer is not None and sockets.send(self._socket, [peer, *frames])

    def _send_control(self, message: Message) -> None:
        self._control.append(encode(message))
        self._send_due()

    def _send_due(self) -> None:
        while self._unsent and self._send(self._unsent[0]):
            self.counters.gradients += 1
            self._unsent.popleft()
        if self._unsent:
            return  # DRAINED promises that they have been sent
        while self._control and self._send(self._control[0]):
            self._control.popleft()
        if self._ack_due:
            ack = Message(
                Kind.ACK,
                self._receiver.run,
                self._contract.target,
                ack=self._receiver.order.acked,
            )
            self._ack_due = not self._send(encode(ack))
