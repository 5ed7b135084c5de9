"""One process of several that train a small network with one contender after the other.

Started by ``test_peers.py``: steps the contenders that a JSON object names, with plain SGD where
the contender's own optimizer is not the point, and writes what the networks predict then.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "experiments"))

import torch
import torch.distributed as dist
from peers import networks, process
from torch import Tensor, nn

from dni_runtime.core.dynamo import postpone_dynamo

LEARNING_RATE = 0.5
BATCH = 8
SAMPLE = (6,)
_LM = replace(networks._lm(width=8, heads=2), batch=BATCH, sample=SAMPLE)
_EMBED, _BLOCK, *_, _NORM, _LINEAR = _LM.layers
_BATCH_NORM: networks.Layer = ("BatchNorm1d", {"num_features": SAMPLE[0]})
NETWORKS = {
    "lm": _LM,
    "batch-norm": replace(
        _LM, layers=(_EMBED, _BATCH_NORM, _BLOCK, _BATCH_NORM, _BLOCK, _NORM, _LINEAR)
    ),
}


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """The same in every process."""
    random = torch.Generator().manual_seed(5)
    shape = (BATCH, *SAMPLE)
    return [
        (
            torch.randint(256, shape, generator=random),
            torch.randint(256, shape, generator=random),
        )
        for _ in range(count)
    ]


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    process.adam = sgd  # type: ignore[assignment]
    for name, network, processes in job["cases"]:
        if job["rank"] >= processes:
            continue
        path = f"{job['folder']}/{name}-{network}-{processes}"
        process.join(job["rank"], processes, f"{path}.meet")
        case = {**job, "name": name, "processes": processes, "cut": None, "seed": 1}
        trainer = process.make_trainer(case, NETWORKS[network])
        for x_BT, y_BT in batches(job["steps"]):
            trainer.step(x_BT, y_BT)
        if hasattr(trainer, "finish"):
            trainer.finish()
        p_BTV = trainer.predict(batches(1)[0][0])
        if p_BTV is not None:
            torch.save(p_BTV, f"{path}.pt")
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # gloo's orderly end can take long


if __name__ == "__main__":
    postpone_dynamo()
    main(json.loads(sys.argv[1]))
