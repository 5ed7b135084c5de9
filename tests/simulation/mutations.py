"""The protocol without one of its mends: the simulation has to find what they were made for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dni_runtime.link import Drain, Marker, handshake, input, output, receiver, sender
from dni_runtime.supervise import pool, stall, supervisor
from dni_runtime.wire import Mark
from dni_runtime.worker import (
    evaluations,
    exchange,
    fanout,
    head,
    join,
    neighbours,
    resume,
    server,
)


@contextmanager
def replaced(*what: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in what]
    try:
        for owner, name, value in what:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def gradients_once() -> Any:
    """A gradient that somebody waits for is sent once, and lost with its connection."""
    real = input.Answers.repeat

    def repeat(self: Any) -> None:
        kept, self._gradients = self._gradients, self._gradients.__class__()
        real(self)
        self._gradients = kept

    return replaced((input.Answers, "repeat", repeat))


def connections_once() -> Any:
    """What an output end did not accept before WELCOME is sent again on a new connection only."""
    real = input.Answers.repeat

    def repeat(self: Any) -> None:
        count = self._receiver.counters.handshakes
        if getattr(self, "connections", 0) != count:
            self.connections = count
            real(self)

    return replaced((input.Answers, "repeat", repeat))


def newest_read() -> Any:
    """The HELLO that is read last takes the link, whatever connection it comes from.

    Nobody is asked, or told that it has been forgotten, as it was then.
    """
    real, count = handshake.Hello.of, itertools.count(1)

    def of(message: Any) -> Any:
        hello = real(message)
        object.__setattr__(hello, "number", next(count))
        return hello

    def reply(self: Any, identity: bytes, kind: Any, body: Any, ack: int = 0) -> None:
        if "number" in body:
            body = body | {"number": 1}
        real_reply(self, identity, kind, body, ack)

    def welcome(self: Any, message: Any) -> None:
        self._since = 1
        real_welcome(self, message)

    def stranger(self: Any, identity: bytes, frames: Any) -> None:
        self._invited.append(identity)
        real_stranger(self, identity, frames)

    real_reply, real_welcome = receiver.Receiver._reply, sender.Sender._welcome
    real_stranger = receiver.Receiver._stranger
    return replaced(
        (receiver.Hello, "of", of),
        (receiver.Receiver, "_reply", reply),
        (receiver.Receiver, "_stranger", stranger),
        (sender.Sender, "_welcome", welcome),
        (output, "_ASK_S", 1e9),
    )


def narrow_gaps() -> Any:
    """Nobody tells what was left out: a gap that is too wide is refused for ever."""
    real = handshake.Hello.of

    def of(message: Any) -> Any:
        hello = real(message)
        object.__setattr__(hello, "newest", 0)
        return hello

    return replaced((receiver.Hello, "of", of))


def own_cuts() -> Any:
    """Each module looks for the newest cut itself, and nobody compares what they have found."""
    real = handshake.Hello.of

    def of(message: Any) -> Any:
        hello = real(message)
        object.__setattr__(hello, "cut", None)
        return hello

    return replaced((receiver.Hello, "of", of), (pool, "AUTO", "nothing"))


def exit_code_0() -> Any:
    """Whoever ends with 0 has finished, whether it says so or not."""

    def complete(self: Any, name: str) -> bool:
        return bool(self.state.modules[name].exit_code == 0)

    return replaced(
        (supervisor.Supervisor, "_complete", complete),
        (supervisor, "is_over", lambda run, workers: True),
    )


def tail_decides() -> Any:
    """A run is over when its tail is: others get the time that they have to stop."""
    late, conclude = supervisor.Supervisor._kill_late, supervisor.conclusion

    def kill_late(self: Any) -> None:
        since_s = self.__dict__.get("tail_ended_s")
        if [*self.state.modules.values()][-1].state != "finished":
            self.tail_ended_s = None
        elif since_s is None:
            self.tail_ended_s = self._clock()
        elif self._clock() >= since_s + self._plan.stop_grace_s:
            self._stop("the tail has finished, other modules have not")
        late(self)

    def conclusion(failed: Any, workers: Any, killed_by: Any, *, whole: Any) -> Any:
        return conclude(failed, [*workers][-1:], killed_by, whole=lambda: True)

    return replaced(
        (supervisor.Supervisor, "_kill_late", kill_late),
        (supervisor, "conclusion", conclusion),
        (stall.StallRule, "saves", lambda self, name: False),
    )


def steps_unasked() -> Any:
    """What stands for a worker here is believed, however long the worker has been silent."""
    return replaced((pool.WorkerPool, "kill_gone", lambda self, modules: None))


def gaps_untold() -> Any:
    """A batch that a join leaves out is not told further down, where another join waits for it."""
    real = join.Join.receive

    def receive(self: Any) -> Any:
        while isinstance(item := real(self), Marker) and Mark.MISSED in item.mark:
            self.ack(item.id)
            self.send_drained(item.id, awaited=True)
        return item

    return replaced((join.Join, "receive", receive))


def links_in_turn() -> Any:
    """At the end one link is flushed after the other, and the next ones are not served."""

    def flush(self: Any, output: Any, left_s: float) -> None:
        end_s, over = time.monotonic() + left_s, self._stage is server.Stage.FINISHED
        for link in output.links:
            while not link.finish(0.5):
                self._neighbours.look(link)
                if (not over or self._stop()) and time.monotonic() >= end_s:
                    return

    return replaced((server.ModuleServer, "_flush", flush))


def half_sums() -> Any:
    """A gradient that one of two modules has lost is waited for until both have sent all.

    Nor does a module that waits for room hear one upstream: the seed that finds this is of before.
    """
    real = server.ModuleServer._sleep

    def sleep(self: Any) -> None:
        if self._input is None:
            return real(self)
        self._input.listen = lambda: None
        try:
            real(self)
        finally:
            del self._input.listen

    def given_up(self: Any) -> Any:
        until = min(link.drained for link in self.links)
        if until <= self._drained:
            return []
        self._drained = until
        return [Drain(until)]

    return replaced((fanout.Fanout, "_given_up", given_up), (server.ModuleServer, "_sleep", sleep))


def means_awaited() -> Any:
    """A replica waits for a mean that has been sent to its former process."""
    real = exchange.Exchange.begin

    def begin(self: Any, marker: Marker) -> None:
        real(self, marker)
        if self.output is not None:
            self.output._sender.drained = 0

    return replaced((exchange.Exchange, "begin", begin))


def ids_unagreed() -> Any:
    """A replica of the head goes on while the others still say which ids they have used."""
    return replaced((head.Rounds, "holds", lambda self, id: False))


def parts_unawaited() -> Any:
    """The first replica of the tail reports what is there when its own part ends."""
    real = evaluations.Shares.others

    def others(self: Any, id: int) -> Any:
        return real(self, id) or []

    return replaced((evaluations.Shares, "others", others))


def counts_left() -> Any:
    """Nobody goes on with the counts of a replica that is left out."""
    return replaced((resume, "_take_over", lambda *given: None))


def numbers_kept() -> Any:
    """Nobody minds that other numbers of replicas are wanted before all have to restart."""
    return replaced((supervisor.Supervisor, "_scale", lambda self, wanted: None))


def left_out_judged() -> Any:
    """A replica that is left out because its host is lost is restarted, as others that end are."""
    real = supervisor.Supervisor._judge

    def judge(self: Any, name: str, module: Any) -> None:
        if module.state == "inactive":
            module.state = "running"
        real(self, name, module)

    return replaced((supervisor.Supervisor, "_judge", judge))


def addresses_kept() -> Any:
    """A worker is looked for where it was before all were started, with other links."""
    real = neighbours.Neighbours._find

    def find(self: Any, target: str) -> Any:
        self._since = 0
        return real(self, target)

    return replaced((neighbours.Neighbours, "_find", find))


MUTATIONS: dict[str, Callable[[], Any]] = {
    "gradients-once": gradients_once,
    "connections-once": connections_once,
    "newest-read": newest_read,
    "narrow-gaps": narrow_gaps,
    "own-cuts": own_cuts,
    "exit-code-0": exit_code_0,
    "tail-decides": tail_decides,
    "steps-unasked": steps_unasked,
    "gaps-untold": gaps_untold,
    "links-in-turn": links_in_turn,
    "half-sums": half_sums,
    "means-awaited": means_awaited,
    "ids-unagreed": ids_unagreed,
    "parts-unawaited": parts_unawaited,
    "counts-left": counts_left,
    "numbers-kept": numbers_kept,
    "left-out-judged": left_out_judged,
    "addresses-kept": addresses_kept,
}
