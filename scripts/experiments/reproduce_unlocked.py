#!/usr/bin/env python3
"""Jaderberg et al. (2016), sec. 3.1: asynchronous updates, and the complete unlock.

MNIST, four hidden layers of 256 units as in ``reproduce_paper.py``, each a module with a
synthesizer, in one process. For each batch a module is updated with some probability only
("asynchronous"); in "unlocked" the modules below the head take synthetic inputs, too, and so wait
for nobody. The control is the chain whose hidden layers are not trained. What is there already is
not trained again.
"""

from __future__ import annotations

from typing import Any

import torch
from remember import accuracies, grid, parser, table
from reproduce_paper import METHODS, ROOT, chain_spec, folder_of
from unlocked import UnlockedChain

from dni_runtime.core.evaluation import evaluate
from dni_runtime.data import describe, open_data
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import ChainSpec
from dni_runtime.spec.load import parse_choice

CONTROL = "none"


def train(one: dict[str, Any], data: str) -> float:
    """Test accuracy in per cent of one training."""
    spec = chain_spec(one["layers"], one["epochs"], 1, data)
    spec["seed"] = one["seed"]
    interface = METHODS[CONTROL if one["method"] == CONTROL else "cDNI"]
    spec["defaults"]["interface"] = parse_choice(interface)
    chain = ChainSpec.model_validate(spec)
    workers = worker_specs(chain, describe(chain.data, ROOT))
    source = open_data(chain.data, ROOT, seed=chain.seed)
    local = UnlockedChain(
        workers, probability=one["probability"], inputs=one["method"] == "unlocked"
    )
    for epoch in range(1, chain.epochs + 1):
        for x_BX, y_BY in source.train_batches(epoch):
            local.train_batch(x_BX, y_BY)
        local.end_epoch()
    return 100 * evaluate(local.predict, source.eval_batches(), workers[-1])["accuracy"]


def main() -> None:
    """Train what is missing, and print the table."""
    options = parser(__doc__, ROOT / "build" / "unlocked.jsonl")
    options.add_argument("--probabilities", default="1,0.5,0.2", help="of an update")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    data = folder_of("mnist", arguments.mnist)
    probabilities = map(float, arguments.probabilities.split(","))
    methods = (CONTROL, "asynchronous", "unlocked")
    wanted = grid(arguments, method=methods, probability=probabilities)
    results = accuracies(arguments.results, wanted, lambda one: train(one, data))
    print(table("probability of an update", results, "method", "probability"))


if __name__ == "__main__":
    main()
