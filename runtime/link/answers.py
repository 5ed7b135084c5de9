"""What an input end sends upstream once the link is open: pure state, no sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from dni_runtime.link.receiver import Receiver
from dni_runtime.link.tensors import to_buffers
from dni_runtime.wire import Buffer, Kind, Message, encode

_REQUESTS_KEPT = 64


class Answers:
    """Gradients, then requests and DRAINED, then an acknowledgement.

    What cannot be sent now waits for :meth:`send_due`, in this order: DRAINED promises that
    gradients have been sent. A gradient waits only if a module upstream waits for it.

    ``resend`` is the number of gradients to send again after WELCOME; 0: none is waited for.
    ``send`` returns whether it could send.
    """

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
        """Send the newest acknowledgement."""
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
        """Ask the head for something."""
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
