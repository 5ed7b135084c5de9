"""What an input end sends upstream once the link is open: pure state, no sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from dni_runtime.link.receiver import Receiver
from dni_runtime.link.tensors import to_buffers
from dni_runtime.wire import Buffer, Kind, Message, encode

_CONTROL_KEPT = 64


class Answers:
    """Gradients, then DRAINED and requests, then an acknowledgement.

    What cannot be sent now waits for :meth:`send_due`, in this order: DRAINED promises that
    gradients have been sent. A gradient waits only if a module upstream waits for it.

    ``resend`` is the number of gradients to send again on a new connection; 0: none is waited for.
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
        self._control: deque[list[Buffer]] = deque(maxlen=_CONTROL_KEPT)
        self._drained = 0
        self._handshakes = 0
        self._session = ""

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
        self._send_control(Message(Kind.DRAINED, self._run, self._module, id=id))

    def drained_again(self) -> None:
        """Repeat the newest announcement, if there was one."""
        if self._drained:
            self.drained(self._drained)

    def request(self, what: str) -> None:
        """Ask the head for something."""
        self._send_control(Message(Kind.REQUEST, self._run, self._module, body={"what": what}))

    def send_due(self) -> None:
        """Send what waits, as far as possible."""
        while self._unsent and self._send(self._unsent[0]):
            self._counters.gradients += 1
            self._unsent.popleft()
        if self._unsent:
            return
        while self._control and self._send(self._control[0]):
            self._control.popleft()
        if self.ack_due:
            ack = self._receiver.order.acked
            message = Message(Kind.ACK, self._run, self._module, ack=ack)
            self.ack_due = not self._send(encode(message))

    def repeat(self) -> None:
        """After a handshake, send again what the lost connection may have swallowed."""
        if self._counters.handshakes == self._handshakes:
            return
        self._handshakes = self._counters.handshakes
        self.ack_due = False  # WELCOME carried it
        if self._session != self._receiver.session:  # another process, which waits for none
            self._session = self._receiver.session
            self._gradients.clear()
        self._unsent = self._gradients.copy()
        self.drained_again()

    def _send_control(self, message: Message) -> None:
        self._control.append(encode(message))
        self.send_due()
