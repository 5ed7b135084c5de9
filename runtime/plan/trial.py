"""A trial of a chain in this process, with its own data, before anything starts.

Shape suffixes: B samples of a batch, Y one label.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dni_runtime.core.chain import LocalChain, inputs_of
from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.forward import ModuleForward, as_inputs
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.training import torch_dtype
from dni_runtime.data import Batch, open_data
from dni_runtime.data.splits import Halves, MemorySplit, Split
from dni_runtime.errors import DataError, DniError, SpecError
from dni_runtime.network.source import built_once, first_line, guilty_line
from dni_runtime.plan.initial import Weights, read_initial
from dni_runtime.resolve.facts import facts_of
from dni_runtime.resolve.resolve import parameter_counts
from dni_runtime.spec import ChainSpec, DataSpec, Preprocessing, WorkerSpec
from dni_runtime.split.verify import alike
from dni_runtime.wire import holds

ROWS = 4
"""Samples that go through the modules; more if the chain cuts batches into parts."""

LOOK_S = 1.0
"""Seconds in which samples of a split are read, if a user's own class reads them."""

LARGEST_BYTES, LARGEST_PARAMETERS = 4 << 30, 100_000_000
"""Size of a data file, and of all modules together, above which they are not tried here."""

_PURPOSES = {"train": "training", "eval": "evaluation", "test": "the test at the end"}

_PROBABILITIES = "all elements of input should be between 0 and 1"
"""What torch says of outputs that BCELoss does not take."""

_ALONE = {"replicas": 1, "strategy": None, "compression": None, "backend": None}


class Coverage(NamedTuple):
    """What has been looked at, and what has not: clauses for the user."""

    checked: tuple[str, ...] = ("names, keywords and shapes",)
    unchecked: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None  # of all data alike

    def and_at(self, *checked: str) -> Coverage:
        """Return it with more that has been looked at."""
        return self._replace(checked=(*self.checked, *checked))


def try_chain(
    chain: ChainSpec,
    workers: Sequence[WorkerSpec],
    base: Path,
    path: Path | None,
    initial: Weights,
) -> Coverage:
    """Look at a chain's data, and train and evaluate its modules on a few samples of it.

    ``base`` is the folder of the chain file, ``path`` the folder or file of the data, if it needs
    one; ``initial`` weights are those that its file names.
    """
    looked, stops = Coverage(), chain.on_nan == "stop"
    if path is not None and path.is_file() and path.stat().st_size > LARGEST_BYTES:
        size = path.stat().st_size / 2**30
        return looked._replace(unchecked=(f"the data: a file of {size:.0f} GiB",))
    head, tail = workers[0].head, workers[-1]
    rows = max(ROWS, 2 * (1 if head is None else head.micro_batches))
    if any("rows" in layer.args for worker in workers for layer in worker.layers):
        rows = chain.data.batch_size  # tied weights travel with whole batches
    few = {"batch_size": min(rows, chain.data.batch_size), "eval_batch_size": rows}
    loss = ChainLoss(tail.loss, tail.prediction, tail.label)
    batches, warned = list[Batch | None](), list[str]()
    if chain.data.train is not None and chain.data.train == chain.data.evaluation:
        warned.append(
            "'data.train' and 'data.evaluation' are the same: it is evaluated on what it has "
            "learnt; leave 'evaluation' out, with 'validation: 0.1'"
        )
    for replica in range(chain.modules[0].most if chain.data.per_replica else 1):
        data = chain.data.of_replica(replica + 1)
        source = open_data(data.model_copy(update=few), base, seed=chain.seed)
        made = source.splits["train"].preprocessing()
        alike = replica == 0 or made == looked.preprocessing
        looked = looked._replace(preprocessing=made if alike else None)
        labels = dict[str, Tensor | None]()
        for part, split in source.splits.items():
            if not len(split) and source.holds_out:
                continue
            seen, labels[part] = _look(part, split, data, loss, stops=stops)
            looked = looked.and_at(f"{seen} of {len(split)} samples ({part})")
            if chain.eval_every and not len(split):
                warned.append(f"there are no samples for {_PURPOSES[part]}")
        if replica == 0 and source.splits["train"].drawn:
            warned.append(
                f"{chain.data.dataset!r} draws random numbers when it is made: a split that it "
                "draws there is another one for training than for evaluation"
            )
        if replica == 0 and source.holds_out and source.splits["train"].draws:
            warned.append(
                f"{chain.data.dataset!r} varies its training samples at random, also those that "
                "'data.validation' holds out: use 'augment' instead, or samples of its own"
            )
        for part in source.one_class(labels):
            warned.append(f"all samples for {_PURPOSES[part]} are of one class")
        batches = batches or [
            next(source.some_batches(part, 1, 0, lambda: True), None) for part in ("train", "eval")
        ]
    looked = looked._replace(warnings=tuple(warned))
    count = sum(parameter_counts(workers).values())
    if count > LARGEST_PARAMETERS:
        return looked._replace(unchecked=(f"a batch: {count:,} parameters would be trained here",))
    if (problem := _run(workers, initial, *batches, warned=warned, stops=stops)) is not None:
        return looked._replace(unchecked=(problem,))
    return looked._replace(warnings=tuple(warned)).and_at(
        f"training and evaluation of {rows} in all modules, with gradient interfaces, losses and "
        "metrics"
    )


def _look(
    part: str, split: Split, data: DataSpec, loss: ChainLoss, *, stops: bool
) -> tuple[int, Tensor | None]:
    """Look at the samples of a split; return how many, and if all, their classes if they have any.

    They may be the first ones only.
    """
    x_name, y_name = (
        f"{kind}_{part}" if data.dataset == "npz" else f"{data.dataset}, {part}: {what} "
        for kind, what in (("x", "sample"), ("y", "label"))
    )
    seen, labels = 0, list[Tensor]()
    for order_B, xs, y_BY in _read(split):
        seen += len(order_B) if xs else 0
        labels += [y_BY] if y_BY.ndim == 1 else []
        for x in xs if stops else ():
            for row, *inner in (~x.isfinite()).nonzero()[:1].tolist():
                raise DataError(
                    f"{x_name}{[int(order_B[row]), *inner]} is {x[row][tuple(inner)].item()}",
                    hint="correct it or leave it out; 'on_nan: skip' skips batches that have one",
                )
        loss.check_labels(y_BY, y_name, order_B)
    seen = seen if split.slow else len(split)
    whole = labels and seen == len(split) and loss.class_axis is not None
    return seen, torch.cat(labels) if whole else None


def _read(split: Split) -> Iterator[tuple[Tensor, tuple[Tensor, ...], Tensor]]:
    """Yield numbers, samples and labels: of arrays all labels, of a user's class what is quick."""
    order_B = torch.arange(len(split))
    labels = split.labels if isinstance(split, Halves) else split
    if isinstance(labels, MemorySplit):  # its samples have been checked when they were read
        yield order_B, (), labels.y
    until = time.monotonic() + LOOK_S
    for some_B in torch.split(order_B, 32) if split.slow and len(split) else ():
        x, y_BY = split.batch(some_B)
        yield some_B, as_inputs(x), y_BY
        if time.monotonic() > until:
            return


def _run(
    workers: Sequence[WorkerSpec],
    initial: Weights,
    train: Batch | None,
    evaluated: Batch | None,
    *,
    warned: list[str],  # gets what is likely to be wrong
    stops: bool,
) -> str | None:
    """Train and evaluate all modules on a batch; return why they cannot be tried here."""
    assert train is not None  # the data fill a batch
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), built_once():
        warnings.simplefilter("ignore")  # about a batch that is not the training's
        chain = LocalChain([worker.model_copy(update=_ALONE) for worker in workers])
        steps = {step.spec.module: step for step in chain.steps}
        for module, weights in read_initial(initial):
            steps[module].layers.load_state_dict(weights, strict=False)
        try:
            loss = chain.train_batch(*train)
            if stops and not math.isfinite(loss):
                raise SpecError(
                    f"the loss of the first samples is {loss}, with initial weights",
                    location=("loss",),
                    hint="look at the size of the data's numbers, and at the loss",
                )
            if evaluated is not None:
                _evaluate(chain, workers, evaluated)
            outputs = _check_kept(chain, workers, train)
            warned += chain.steps[-1].loss.doubts(outputs)
        except DniError:
            raise
        except Exception as error:
            worker = workers[chain.at]
            what = f"{type(error).__name__}: {first_line(error)}{guilty_line(error)[0]}"
            if worker.device != "cpu":
                return f"a batch: on the CPU module {worker.module!r} fails with {what}"
            arguments = " and ".join(map(str, worker.arguments))
            if _PROBABILITIES in what:
                raise SpecError(
                    f"BCELoss takes outputs from 0 to 1, and module {worker.module!r} has others",
                    location=("loss",),
                    hint="end with 'Sigmoid', or choose BCEWithLogitsLoss",
                ) from None
            raise SpecError(
                f"module {worker.module!r} fails on samples of the data, {arguments}: {what}",
                location=("modules", chain.at, "layers"),
                hint="integers are numbers of tokens or classes: store other numbers as float32"
                if any(tensor.dtype == "int64" for tensor in worker.inputs)
                else None,
            ) from error
    return None


def _check_kept(chain: LocalChain, workers: Sequence[WorkerSpec], batch: Batch) -> Tensor:
    """Refuse modules of which forward changes more than checkpoints hold; return the prediction.

    What was trained computes what a module built anew computes with its state.
    """
    data, outputs = as_inputs(batch[0]), list[Tensor]()
    for number, step in enumerate(chain.steps):
        chain.at = number
        inputs = inputs_of(workers, number, outputs, data)
        new = _rebuilt(step, number)
        facts = [dict(facts_of(module.layers)) for module in (step, new)]
        computed, expected = _computed(step, inputs), _computed(new, inputs)
        outputs.append(computed[-1])
        tensors = [*step.layers.parameters(), *step.layers.buffers()]
        types = {torch_dtype(step.spec.precision), *(tensor.dtype for tensor in tensors)}
        if _alike(computed, expected, types) or not _alike(
            _computed(_rebuilt(step, number), inputs), expected, types
        ):
            continue  # or it draws random numbers of its own
        changed = [
            f"{what.removeprefix('.')} of {place!r}"
            for place, what in facts[1]
            if facts[0].get((place, what)) != facts[1][place, what]
        ]
        raise SpecError(
            f"module {step.spec.module!r} depends on what forward changes, and no checkpoint holds"
            + (f": {', '.join(changed[:3])}" if changed else ""),
            location=("modules", number, "layers"),
            hint="restarted, resumed and exported it would compute something else: keep it as a "
            "buffer, by self.register_buffer(name, tensor)",
        )
    return outputs[-1]


def _rebuilt(step: ModuleForward, number: int) -> ModuleForward:
    """Return a module as a worker builds it that takes another one's state over."""
    state, module = step.layers.state_dict(), step.spec.module
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise SpecError(
                f"{name!r} of module {module!r} is no tensor, and checkpoints hold only tensors",
                location=("modules", number, "layers"),
                hint="let 'get_extra_state' return a tensor, or register a buffer",
            )
    new = ModuleForward(step.spec)
    try:
        new.layers.load_state_dict(state)
    except RuntimeError as error:
        raise SpecError(
            f"module {module!r} cannot load its own state after a batch: {error}",
            location=("modules", number, "layers"),
            hint="buffers keep the shape that they are built with",
        ) from None
    return new


def _computed(module: ModuleForward, xs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return a module's outputs in train and in eval mode, which change nothing of its state."""
    outputs = list[Tensor]()
    for training in (True, False):
        torch.manual_seed(0)
        module.layers.train(training)
        module.end_evaluation()
        outputs.append(module.forward_again(xs).clone())
    module.end_evaluation()
    module.layers.train()
    return outputs


def _alike(some: Sequence[Tensor], others: Sequence[Tensor], types: set[torch.dtype]) -> bool:
    return all(alike(*pair, types) for pair in zip(some, others, strict=True))


def _evaluate(chain: LocalChain, workers: Sequence[WorkerSpec], batch: Batch) -> None:
    """Evaluate the chain and its early heads on a batch."""
    data, outputs = as_inputs(batch[0]), list[Tensor]()
    for number, step in enumerate(chain.steps):
        chain.at = number
        h_BH = step.evaluate(inputs_of(workers, number, outputs, data))
        outputs.append(h_BH)
        due = step.spec.output
        if len(h_BH) != len(data[0]) or not holds(due.shape, due.varying, h_BH.shape[1:]):
            raise SpecError(
                f"module {step.spec.module!r} returns a tensor of shape {tuple(h_BH.shape)} for "
                f"{len(data[0])} samples in eval mode; in train mode it is {step.spec.output}",
                location=("modules", number, "layers"),
                hint="return the same in both: the loss and the metrics are those of training",
            )
        if (prediction := step.predict(h_BH)) is not None:
            evaluation = EvaluationSums.of(step)
            evaluation.add(prediction, batch[1])
            evaluation.result()
