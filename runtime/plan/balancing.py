"""Better cuts for a chain or a run: ``dnictl balance``, ``Chain.balance`` and ``Run.balance``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dni_runtime.core.optimization import freeze
from dni_runtime.data import describe, with_defaults
from dni_runtime.errors import UsageError
from dni_runtime.files import write_atomic
from dni_runtime.network.source import NetworkSpec, NetworkWrapper, build_network
from dni_runtime.plan.pace import worker_seconds
from dni_runtime.plan.prepare import importing_from
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.record import Record
from dni_runtime.spec import ChainSpec
from dni_runtime.spec.load import load_chain, naming_file, parse_chain, parse_yaml
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.split.balance import SLACK, Balance
from dni_runtime.split.chainfile import HEADER, chain_text
from dni_runtime.split.network import Recut, cut_again
from dni_runtime.split.plan import SplitRequest


@dataclass(frozen=True)
class Proposal:
    """Better cuts of a chain."""

    path: Path  # the chain file
    base: str  # its text
    recut: Recut
    hosts: Sequence[str | None]  # for each module, where it ran; None: not known
    measured: Sequence[bool]  # for each module; else its time is estimated
    text: str  # the better chain file

    @property
    def faster(self) -> float:
        """By which factor more batches are expected in a second; near 1 is no gain."""
        return max(self.recut.seconds) / max(self.recut.better_seconds)

    @property
    def worthwhile(self) -> bool:
        """Whether the better cuts are faster by more than a measurement's uncertainty."""
        return self.faster > SLACK

    def write(self, path: Path | None = None, *, force: bool = False) -> Path:
        """Write the better chain file, by default over the chain file itself; return its path.

        ``path`` must be in the same folder. ``force`` replaces a file that has changed since the
        run, or that this program has not written.
        """
        path = path or self.path
        if path.parent.absolute() != self.path.parent.absolute():
            raise UsageError(
                f"{str(path)!r} is not in the folder of {str(self.path)!r}, where its paths start",
                hint=f"write {str(self.path.parent / path.name)!r}",
            )
        text = path.read_text("utf-8") if path.exists() else HEADER
        changed = path.absolute() == self.path.absolute() and text not in (HEADER, self.base)
        if not force and (changed or not text.startswith(HEADER)):
            why = "has changed since the run" if changed else "was not written by 'dnictl split'"
            raise UsageError(
                f"{str(path)!r} {why}", hint="name another file with -o, or replace it with --force"
            )
        write_atomic(path, self.text, mode=0o644)
        return path


def balance_chain(path: Path, balance: Balance = "time", links: str = "fast") -> Proposal:
    """Find better cuts for a chain, by what its parts cost on this machine.

    ``links`` is ``fast`` or ``slow``.
    """
    chain = load_chain(path)
    return _proposed(
        path, path.read_text("utf-8"), chain, path.parent.absolute(), balance=balance, links=links
    )


def balance_run(record: Record, balance: Balance = "time", links: str = "fast") -> Proposal:
    """Find better cuts for a run, by how long a batch took where its modules ran."""
    run = record.run
    text = run.chain_file.read_text("utf-8")
    chain = parse_chain(text, file=str(run.chain_file))
    chain = chain.model_copy(update={"data": chain.data.at(record.data)})
    replicas = replicas_of(record.modules)
    return _proposed(
        record.chain_file, text, chain, run.sources,
        balance=balance, links=links,
        measured=[  # replicas share the batches
            None if (mean_s := worker_seconds(run, workers)) is None else mean_s / len(workers)
            for workers in replicas.values()
        ],
        hosts=[Report.read(run.worker(workers[0])).host for workers in replicas.values()],
    )  # fmt: skip


def _proposed(
    path: Path,
    text: str,
    chain: ChainSpec,
    base: Path,
    *,
    balance: Balance,
    links: str,
    measured: Sequence[float | None] = (),
    hosts: Sequence[str | None] = (),
) -> Proposal:
    pieces = [module.layers[0] for module in chain.modules]
    if len(pieces) == 1 or not all(
        len(module.layers) == 1 and module.layers[0].type == "Piece" for module in chain.modules
    ):
        raise UsageError(
            f"chain {chain.name!r} is not one network that is cut into modules",
            hint="'dnictl split' takes a network apart; layers are moved from module to module by "
            "hand ('dnictl bench module' measures them, 'dnictl up --carry' goes on)",
        )
    count = range(len(pieces))
    request = SplitRequest(
        at=tuple(piece.args["until"] for piece in pieces[:-1]),
        balance=balance,
        links=links,
        batch_size=chain.data.batch_size,
        loss=chain.loss,
        losses=chain.losses,
        labelled=chain.data.labels is None,
        interfaces=tuple(chain.setting(number, "interface") for number in count),
        frozen=tuple(bool(module.freeze) for module in chain.modules),
        names=tuple(module.name for module in chain.modules),
        threads=chain.resources(0).cpus or 1,
    )
    with naming_file(path), importing_from(base):
        info = describe(with_defaults(chain.data, base).of_replica(1), base)
        spec = NetworkSpec.model_validate(pieces[0].args["network"])
        network = build_network(spec).train()
        freeze(nn.Sequential(NetworkWrapper(network, spec)), chain.defaults.freeze or ())
        recut = cut_again(spec, network, info, request, measured)
    document: dict[str, Any] = parse_yaml(text, str(path))[0]
    modules = document.pop("modules")
    document.pop("network", None)
    return Proposal(
        path=path,
        base=text,
        recut=recut,
        hosts=hosts or [None] * len(count),
        measured=[seconds is not None for seconds in measured] or [False] * len(count),
        text=chain_text(document, spec, recut.better, modules),
    )
