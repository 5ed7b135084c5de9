"""From a trained run to a chain that answers: the specs and weights of a run that serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dni_runtime.core.layers import exported
from dni_runtime.errors import SpecError, UsageError
from dni_runtime.plan.initial import StoredTensor, Weights, stored_tensors, trained_weights
from dni_runtime.plan.prepare import CheckedChain, Origin, importing_from
from dni_runtime.run.cuts import tensors_file
from dni_runtime.run.record import Record
from dni_runtime.serving.protocol import Signature
from dni_runtime.spec import ChainSpec, DataInfo, WorkerSpec
from dni_runtime.spec.predicting import exit_name, predicting
from dni_runtime.spec.replicas import modules_of, replicas_of, workers_of
from dni_runtime.spec.worker import ExitRole

_RESTART = {"policy": "on-failure", "limit": 1000, "backoff_max_s": 1.0, "on_stall": "restart"}
"""A service does not give a module up: its front says meanwhile that it is not ready."""


def serving_chain(
    record: Record,
    cut: int,
    exits: Mapping[str, ExitRole] | None = None,
    replicas: Mapping[str, int] | None = None,
) -> CheckedChain:
    """Return a run's network, with the weights of a checkpoint, as a chain that only predicts.

    ``exits`` are the early exits of modules, by name, whose heads the run has. ``replicas`` are
    numbers of workers, by module; by default as many as have trained, or one of each if these
    cannot be served. Raises ``UsageError`` if there are no such modules.
    """
    chain, workers = record.specs()
    head, tail = workers[0].head, workers[-1]
    assert head is not None
    served = _expanded(workers, exits, replicas)
    modules = modules_of(served)[1:]
    sources, trained = record.run.sources, replicas_of(record.modules)
    chain = _served(chain, {module.module: module.replicas for module in modules})
    if record.release is not None:  # signed as a whole; its images are put together here
        image = chain.image.model_copy(update={"require_signed": False})
        chain = chain.model_copy(update={"image": image})
    return CheckedChain(
        path=record.run.chain_file,
        written=chain,
        chain=chain,
        info=DataInfo(
            sample=head.samples[0],
            further=head.samples[1:],
            label=tail.label,
            classes=tail.classes,
        ),
        data=None,
        workers=tuple(
            module.model_copy(
                update={"initial": True, "layers": tuple(map(exported, module.layers))}
            )
            for module in modules
        ),
        sources=record.run.source_files,
        initial=_with_borrowed(
            workers,
            {
                worker.module: trained_weights(
                    worker, tensors_file(record.run.checkpoint(cut, trained[worker.module][0]))
                )
                for worker in workers
            },
            sources,
        )
        | {exit_name(name): stored_tensors(record.run.exit_head(name)) for name in exits or {}},
        front=served[0],
        trained=Origin(record, cut),
    )


def _with_borrowed(workers: Sequence[WorkerSpec], weights: Weights, sources: Path) -> Weights:
    """Give parts of a network that share weights those of the part which has them.

    In a batch of few samples they do not travel (``network.piece.BorrowedParameter``).
    """
    if not any(layer.args.get("borrows") for worker in workers for layer in worker.layers):
        return weights
    from dni_runtime.core.layers import build_module
    from dni_runtime.network.piece import BORROWED, Piece

    lent = dict[str, StoredTensor]()
    with importing_from(sources):
        for worker in workers:
            its = weights[worker.module]
            for number, piece in enumerate(build_module(worker, "meta")):
                if not isinstance(piece, Piece):
                    continue
                names = {id(p): name for name, p in piece.named_parameters()}
                for name in piece.lends:
                    lent[name] = its[f"{number}.{names[id(piece.lent(name))]}"]
                its |= {f"{number}.{BORROWED}{name}": lent[name] for name in piece.borrowed}
    return weights


def signature_of(record: Record) -> Signature:
    """Return what a run's network takes and returns."""
    chain, workers = record.specs()
    head, tail = workers[0].head, workers[-1]
    assert head is not None
    return Signature.of(head.samples, tail.outputs or (tail.output,), chain.data.inputs)


def _expanded(
    trained: Sequence[WorkerSpec],
    exits: Mapping[str, ExitRole] | None,
    replicas: Mapping[str, int] | None,
) -> tuple[WorkerSpec, ...]:
    """Return the specs of all workers, the front's first."""
    if replicas:
        names = [worker.module for worker in trained]
        for name in replicas:
            if name not in names:
                hint = f"modules: {', '.join(names)}"
                raise UsageError(f"there is no module {name!r} to have replicas", hint=hint)
        try:
            return workers_of(predicting(trained, exits, replicas))
        except SpecError as error:
            raise UsageError(error.message, hint=error.hint) from None
    numbers = {one.module: one.elastic.get(one.module, one.replicas) for one in trained}
    try:
        return workers_of(predicting(trained, exits, numbers))
    except SpecError:
        return workers_of(predicting(trained, exits))


def _served(chain: ChainSpec, replicas: Mapping[str, int]) -> ChainSpec:
    modules = tuple(
        module.model_copy(update={"replicas": replicas[module.name]}) for module in chain.modules
    )
    return chain.model_copy(
        update={
            "modules": modules,
            "data": chain.data.model_copy(update={"labels": None}),
            "restart": chain.restart.model_copy(update=_RESTART),
        }
    )
