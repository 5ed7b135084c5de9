"""Bodies of HELLO, WELCOME and REFUSE, and their checks (docs/wire.md, "Handshake")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from dni_runtime.errors import HandshakeError, WireError
from dni_runtime.wire import ID_LIMIT, Body, Message

TEXT_CHARS = 512

VERSION = "protocol version"
INVITATION = "hello"
REPLACED = "session"
CUT = "cut"


@dataclass(frozen=True, slots=True)
class Hello:
    """Content of an output end's HELLO."""

    session: str  # random identifier of its process's link
    first: int  # the lowest id that it can still send
    link: Mapping[str, str]  # what both ends must agree on
    # of this HELLO in its session, from 1: a connection that has ended may be read after its
    # successor
    number: int = 1
    newest: int = 0  # the highest id in its window, which may be far above what it has transmitted
    cut: int | None = None  # where the whole chain started; None if only its module was restarted
    attempt: int = 1  # of its module

    def body(self) -> dict[str, Body]:
        return asdict(self)

    @classmethod
    def of(cls, message: Message) -> Self:
        """Read a HELLO; ``WireError`` (``body``) if a field is missing or not valid."""
        link = message.body.get("link")
        if not isinstance(link, dict) or len(link) > 32:
            raise WireError("body", "HELLO without 'link'")
        for name in link:
            _text(link, name)
        return cls(
            session=_text(message.body, "session"),
            first=_natural(message.body, "first", 1),
            link={name: str(value) for name, value in link.items()},
            number=number_of(message),
            newest=_natural(message.body, "newest", 0),
            cut=None if message.body.get("cut") is None else _natural(message.body, "cut", 0),
            attempt=_natural(message.body, "attempt", 1),
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why an input end does not accept a HELLO."""

    field: str  # that differs; hello: send HELLO; session: another session took over
    mine: str = ""  # at the end that refuses
    yours: str = ""  # at the end that is refused

    def body(self) -> dict[str, Body]:
        return asdict(self)

    @classmethod
    def of(cls, message: Message) -> Self:
        """Read a REFUSE; ``WireError`` (``body``) if a field is missing or not valid."""
        body = message.body
        return cls(_text(body, "field"), _text(body, "mine"), _text(body, "yours"))

    def error(self, me: str, neighbour: str) -> HandshakeError:
        """Return the error for the module that was refused."""
        if self.field == REPLACED:
            return HandshakeError(
                f"module {neighbour!r} has accepted another process as module {me!r}",
                hint=f"two processes serve module {me!r} in this run: stop one of them",
            )
        return HandshakeError(
            f"modules {me!r} and {neighbour!r} do not fit together: {self.field} is "
            f"{self.yours!r} for {me!r} but {self.mine!r} for {neighbour!r}",
            hint=_HINTS.get(
                self.field,
                "their images come from different specs: build both from the same chain.yaml",
            ),
        )


_HINTS = {
    "run": "another run's worker listens there: stop it, or remove its stale endpoint",
    CUT: "start both from the same cut: use 'dnictl resume', or '--resume CUT' by hand",
    VERSION: "the images hold different versions of dni-runtime: build both with one version",
}


def compare(
    run: str, agreement: Mapping[str, str], theirs: Hello, their_run: str
) -> Refusal | None:
    """Return a refusal for the first field in which the ends differ, or None if they agree."""
    if their_run != run:
        return Refusal("run", run, their_run)
    for field, mine in agreement.items():
        yours = theirs.link.get(field, "nothing")
        if yours != mine:
            return Refusal(field, mine, yours)
    return None


def number_of(message: Message) -> int:
    """Return the number of a HELLO, or of the one that a WELCOME answers."""
    return _natural(message.body, "number", 1)


def received_of(message: Message) -> int:
    """Return the last id that the input end has accepted, from its WELCOME."""
    return _natural(message.body, "received", 0)


def _text(body: Mapping[str, Body], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or len(value) > TEXT_CHARS:
        raise WireError("body", f"{name!r} is not a short text")
    return value


def _natural(body: Mapping[str, Body], name: str, low: int) -> int:
    value = body.get(name)
    if type(value) is not int or not low <= value <= ID_LIMIT:
        raise WireError("body", f"{name!r} is not a whole number from {low} to {ID_LIMIT}")
    return value
