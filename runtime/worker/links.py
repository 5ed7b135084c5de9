"""A worker's links to other workers: made from its spec, opened, and closed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dni_runtime.errors import UsageError
from dni_runtime.link import InputLink, OutputLink, listen_address
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.keys import Keyring
from dni_runtime.run.rundir import RunDir, socket_folder
from dni_runtime.spec import EdgeSpec, LinksSpec, WorkerSpec
from dni_runtime.spec.predicting import FRONT
from dni_runtime.worker.exchange import Exchange
from dni_runtime.worker.fanout import Fanout
from dni_runtime.worker.join import Join
from dni_runtime.worker.metrics import MetricsWriter
from dni_runtime.worker.neighbours import Neighbours, publish
from dni_runtime.worker.resume import Start
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import WorkerStart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One start of a worker, and what it needs in any role."""

    options: WorkerStart
    spec: WorkerSpec
    run: RunDir
    metrics: MetricsWriter
    stop: StopRequest
    keys: Keyring


class WorkerLinks:
    """The links of one worker.

    A worker that starts with its neighbours first opens its links downstream, then waits for those
    upstream. One that is restarted alone does it the other way round: what modules upstream can
    still send decides what it can send on. The front of a chain that predicts is both ends of it,
    and always opens its own first.
    """

    def __init__(self, attempt: Attempt, start: Start) -> None:
        options, spec, run = attempt.options, attempt.spec, attempt.run
        self._options, self._spec, self._run = options, spec, run
        self._keys, self._start = attempt.keys, start
        record = RunRecord.load(run.record)
        self._name = run.root.name if record is None else record.name
        self.neighbours = Neighbours(
            spec,
            run,
            address=options.connect,
            restarted=start.restarted,
            stop=attempt.stop,
            sockets=options.ipc,
            # attempts are counted for all workers together only by a supervisor
            since=0 if options.by_rank else options.first or 0,
            keys=attempt.keys,
        )
        self._listening: list[tuple[InputLink, EdgeSpec]] = []
        self.input: Join | None = None  # None for the head
        self.output: Fanout | None = None  # None for the tail
        self.exchange: Exchange | None = None  # None without other replicas
        self._beside = spec  # for its links
        if spec.sources:
            self.input = Join([self.inputs(spec, edge.links) for edge in spec.sources])
            self.neighbours.callers.append(self.input)

    def inputs(self, spec: WorkerSpec, edges: Sequence[EdgeSpec]) -> list[InputLink]:
        """Return the ends of links that other workers open."""
        links = [
            InputLink(
                spec,
                edge,
                run=self._name,
                received=self._start.cut,
                restarted=self._start.restarted,
                keys=self._keys,
            )
            for edge in edges
        ]
        self._listening += zip(links, edges, strict=True)
        return links

    def share_by(self, exchange: Exchange, spec: WorkerSpec) -> None:
        """Add what a replica shares with the others by; ``spec`` is that of its links."""
        self.exchange, self._beside = exchange, spec
        self.neighbours.callers.append(exchange)

    def _to(self, spec: WorkerSpec, edge: EdgeSpec, *, next_id: int) -> OutputLink:
        """Return the end of a link that this worker opens."""
        return OutputLink(
            spec.model_copy(update={"links": link_settings(self._options, spec)}),
            edge,
            run=self._name,
            next_id=next_id,
            keys=self._keys,
            cut=None if self._start.restarted else self._start.cut,
            attempt=self._options.attempt,
        )

    def listen(self) -> None:
        """Bind all links that others open, and say where."""
        if self._listening:
            publish(self._run, self._spec, self._options.attempt, self._bind(), self._keys)

    def _bind(self) -> dict[str, str]:
        """Bind all links that others open; return their addresses, by the links' numbers."""
        options, spec = self._options, self._spec
        if options.listen is not None and len(self._listening) > 1:
            raise UsageError(
                f"module {spec.module!r} has {len(self._listening)} inputs, and '--listen' one "
                "address",
                hint="use --transport, --interface and 'links.port'",
            )
        folder = Path(options.ipc) if options.ipc else socket_folder(Path(options.run))
        links = link_settings(options, spec)
        addresses: dict[str, str] = {}
        for link, edge in self._listening:
            socket = f"{spec.module}.{edge.number}" if addresses else spec.module
            address = options.listen or listen_address(links, edge.number, folder, socket)
            addresses[str(edge.number)] = link.bind(address)
            log.info("module %s listens on %s", spec.module, addresses[str(edge.number)])
        return addresses

    def meet(self) -> bool:
        """Open all links; return False if a module upstream has finished."""
        after = self._start.restarted and self._spec.module != FRONT
        if self.input is not None and after and not self._go_on_after(self.input):
            return False
        self._connect()
        if self.input is not None and not after:
            self.neighbours.wait_for_upstream(self.input)
        return True

    def _go_on_after(self, input: Join) -> bool:
        """Start where modules upstream can still send; False if one of them has finished."""
        if not self.neighbours.wait_for_upstream(input):
            return False
        received = input.received
        input.start_after(received)
        self._start.first_id = received + 1
        if had := max(received, self._start.cut):
            input.send_drained(had)  # it will not be trained on them again
        return True

    def _connect(self) -> None:
        """Open the links downstream, and a replica's to the first one."""
        spec, next_id = self._spec, self._start.first_id
        if spec.targets:
            self.output = Fanout(
                [
                    [self._to(spec, link, next_id=next_id) for link in edge.links]
                    for edge in spec.targets
                ]
            )
            for below in self.output.links:
                self.neighbours.connect(below)
        if self.exchange is not None:
            for edge in self._beside.targets:  # there is one, or none
                first = self._to(self._beside, edge, next_id=self._start.cut + 1)
                self.exchange.output = first
                self.neighbours.connect(first)

    def close(self) -> None:
        for link in (self.output, self.input, self.exchange):
            if link is not None:
                link.close()
        folder = self._options.ipc
        manual = self._options.by_rank or self._options.first is None
        if manual and folder:  # nobody else does it
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def link_settings(options: WorkerStart, spec: WorkerSpec) -> LinksSpec:
    """The chain's links, with the command line's settings."""
    settings = {"transport": options.transport, "interface": options.interface}
    return spec.links.model_copy(update={k: v for k, v in settings.items() if v is not None})
