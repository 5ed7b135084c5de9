"""Which replicas of elastic modules take batches, by position in the stream.

Their set changes at SCALE markers: from the next id on other replicas take the batches. So which
one gets a batch stays a pure function, of its id and of this table. An entry never changes: a
worker may learn of it before the marker has come, or again, and routes in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from dni_runtime.spec.edge import EdgeSpec, replica_of
from dni_runtime.spec.named import module_of

Active = dict[str, tuple[int, ...]]
"""The numbers of the replicas that take batches, of each elastic module."""

CHANGES_KEPT = 16
"""Newest changes that are kept: nothing is routed by an older one any more."""


def active_of(document: object) -> Active:
    """Return the sets in a JSON document.

    Raises:
        ValueError: It holds something else.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"not sets of replicas: {document!r}")
    found: Active = {}
    for module, numbers in document.items():
        if not (isinstance(module, str) and isinstance(numbers, list | tuple) and numbers):
            raise ValueError(f"not the replicas of a module: {module!r}: {numbers!r}")
        if not all(type(one) is int and one > 0 for one in numbers):
            raise ValueError(f"not numbers of replicas: {numbers!r}")
        found[module] = tuple(sorted(set(numbers)))
    return found


def as_body(active: Active) -> dict[str, Any]:
    """Return sets as they travel: plain lists."""
    return {module: list(numbers) for module, numbers in active.items()}


def first_replicas(counts: Mapping[str, int]) -> Active:
    """Return the sets that consist of so many first replicas of each module."""
    return {module: tuple(range(1, count + 1)) for module, count in counts.items()}


def first_of(counts: Mapping[str, int], workers: Sequence[str]) -> Active:
    """Return the sets that consist of so many of the first ones of these workers."""
    numbers = {one: [number_of(it) for it in workers if module_of(it) == one] for one in counts}
    return {module: tuple(numbers[module][:count]) for module, count in counts.items()}


class Members:
    """The table of one worker.

    Args:
        begun: The sets at the beginning; modules that are not elastic are not in them.
        late: Whether the worker has not seen all changes since: its own first one tells the sets.
    """

    def __init__(self, begun: Mapping[str, Sequence[int]], *, late: bool = False) -> None:
        self._late = late
        self._begun: Active = {module: tuple(own) for module, own in begun.items()}
        self._changes: dict[int, Active] = {}

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the table in a document of :meth:`to_json`."""
        made = cls(active_of(document["begun"]))
        made._changes = {int(id): active_of(one) for id, one in document["changes"].items()}
        return made

    def to_json(self) -> dict[str, Any]:
        """Return the table as a JSON document."""
        return {"begun": self._begun, "changes": {str(id): it for id, it in self._changes.items()}}

    @property
    def now(self) -> Active:
        """The newest sets."""
        return next(reversed(self._changes.values()), self._begun)

    def at(self, id: int) -> Active:
        """Return the sets that the batch with this id is routed by."""
        newer = (it for since, it in reversed(self._changes.items()) if since < id)
        return next(newer, self._begun)

    def learn(self, id: int, before: Active, after: Active) -> None:
        """Note the change that a SCALE marker makes.

        Args:
            id: The marker.
            before: The sets until then.
            after: The sets from the next id on.
        """
        oldest = next(iter(self._changes), None)
        if oldest is None or id < oldest:  # of several links one may bring a newer one first
            if len(self._changes) == CHANGES_KEPT:
                return
            if self._late:
                self._begun = before
        elif self._late and self.at(id) != before:  # others have changed while it was away
            self._changes[id - 1] = before
        self._changes[id] = after
        self._changes = dict(sorted(self._changes.items()))
        while len(self._changes) > CHANGES_KEPT:
            self._begun = self._changes.pop(next(iter(self._changes)))

    def merge(self, other: Members) -> None:
        """Note all changes that another table holds."""
        before = other._begun
        if not self._changes:
            self._begun = before
        for id, after in other._changes.items():
            self.learn(id, before, after)
            before = after

    def carries(self, edge: EdgeSpec, id: int) -> bool:
        """Whether the batch with this id takes a link between two workers."""
        carries = edge.carries(id)
        if not (carries and self._begun):
            return carries
        for worker in (edge.source, edge.target):
            if self.chosen(module_of(worker), id) not in (None, number_of(worker)):
                return False
        return True

    def chosen(self, module: str, id: int) -> int | None:
        """Return which replica of a module gets a batch; None if their number cannot change."""
        own = self.at(id).get(module)
        return None if own is None else own[replica_of(id, len(own)) - 1]

    def passes(self, edge: EdgeSpec, id: int) -> bool:
        """Whether the marker with this id takes a link: those that leave or join get it, too."""
        return all(self.sees(worker, id) for worker in (edge.source, edge.target))

    def sees(self, worker: str, id: int) -> bool:
        """Whether a worker gets the marker with this id."""
        return self.takes(worker, id) or self.takes(worker, id + 1)

    def takes(self, worker: str, id: int) -> bool:
        """Whether a worker takes batches at an id, the one after a marker for instance."""
        own = self.at(id).get(module_of(worker))
        return own is None or number_of(worker) in own

    def has(self, worker: str) -> bool:
        """Whether a worker takes the newest batches."""
        own = self.now.get(module_of(worker))
        return own is None or number_of(worker) in own

    def joined(self, worker: str) -> int:
        """Return the marker at which a worker that takes batches has begun to; 0: the beginning."""
        since = (id for id in self._changes if not self.takes(worker, id))
        return max((id for id in since if self.takes(worker, id + 1)), default=0)

    def leaves(self, worker: str) -> int | None:
        """Return the marker after which a worker takes no batches; None if it takes the newest."""
        if self.has(worker):
            return None
        return max((id for id in self._changes if self.takes(worker, id)), default=None)

    def elastic(self, edge: EdgeSpec) -> bool:
        """Whether the workers of a link may change."""
        return any(module_of(one) in self._begun for one in (edge.source, edge.target))

    def siblings(self, worker: str, id: int) -> list[str]:
        """Return the other replicas of a worker's module that take batches at an id."""
        module = module_of(worker)
        found = [f"{module}.{one}" for one in self.at(id).get(module, ())]
        return [one for one in found if one != worker]

    def parked(self, worker: str, replicas: int, id: int) -> list[str]:
        """Return the replicas of a worker's module that take no batches at an id."""
        names = [f"{module_of(worker)}.{number + 1}" for number in range(replicas)]
        return [one for one in names if not self.takes(one, id)]


def number_of(worker: str) -> int:
    """Return which replica of its module a worker is, by its name."""
    return int(worker.partition(".")[2] or 1)
