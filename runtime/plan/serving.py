"""From a trained run to a chain that answers: the specs and weights of a run that serves."""

from __future__ import annotations

from collections.abc import Mapping

from dni_runtime.core.layers import exported
from dni_runtime.plan.initial import stored_tensors, trained_weights
from dni_runtime.plan.prepare import CheckedChain, Origin
from dni_runtime.run.cuts import tensors_file
from dni_runtime.run.record import Record
from dni_runtime.spec import ChainSpec, DataInfo
from dni_runtime.spec.predicting import exit_name, predicting
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.spec.worker import ExitRole

_RESTART = {"policy": "on-failure", "limit": 1000, "backoff_max_s": 5.0, "on_stall": "restart"}
"""A service does not give a module up: its front says meanwhile that it is not ready."""


def serving_chain(
    record: Record, cut: int, exits: Mapping[str, ExitRole] | None = None
) -> CheckedChain:
    """Return a run's network, with the weights of a checkpoint, as a chain that only predicts.

    ``exits`` are the early exits of modules, by name, whose heads the run has.
    """
    chain, workers = record.specs()
    head, tail = workers[0].head, workers[-1]
    assert head is not None
    front, *modules = predicting(workers, exits)
    sources, replicas = record.run.sources, replicas_of(record.modules)
    return CheckedChain(
        path=record.run.chain_file,
        written=_served(chain),
        chain=_served(chain),
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
        sources={
            str(path.relative_to(sources)): path for path in sources.rglob("*") if path.is_file()
        },
        initial={
            worker.module: trained_weights(
                worker, tensors_file(record.run.checkpoint(cut, replicas[worker.module][0]))
            )
            for worker in workers
        }
        | {exit_name(name): stored_tensors(record.run.exit_head(name)) for name in exits or {}},
        front=front,
        trained=Origin(record, cut),
    )


def _served(chain: ChainSpec) -> ChainSpec:
    modules = tuple(module.model_copy(update={"replicas": 1}) for module in chain.modules)
    return chain.model_copy(
        update={
            "modules": modules,
            "data": chain.data.model_copy(update={"labels": None}),
            "restart": chain.restart.model_copy(update=_RESTART),
        }
    )
