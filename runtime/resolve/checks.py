"""Checks of a chain once its shapes are known, before anything starts: what it may combine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dni_runtime.core.chain import part_sizes
from dni_runtime.core.interfaces import (
    Boundary,
    ResolvedInterface,
    Timing,
    build_interface,
    resolve_interface,
)
from dni_runtime.core.layers import build_module
from dni_runtime.core.optimization import Optimization, check_groups, check_patterns, freeze
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.replication import find_strategy
from dni_runtime.core.training import empty_batch, sparse_parameters
from dni_runtime.errors import SpecError
from dni_runtime.resolve.shapes import check_gradients
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.choices import Location


def check_training(chain: ChainSpec, workers: Sequence[WorkerSpec], micro_batches: int) -> None:
    """Make optimizers, schedules and interfaces once, so that their errors come now."""
    _check_ties(chain, workers, micro_batches)
    layers = [build_module(worker, "meta") for worker in workers]
    _check_groups(chain, layers)
    _check_freeze(chain, layers)
    learns: set[str] = set()
    for worker, network in zip(workers, layers, strict=True):
        at = ("modules", worker.index)
        trains = worker.interface is None or resolve_interface(worker.interface).timing.trains
        freeze(network, worker.freeze if trains else ("*",))
        try:
            Optimization(worker, network).try_schedules()
        except SpecError as error:
            field, *rest = error.location
            location = (*setting_location(chain, worker.index, str(field)), *rest)
            raise SpecError(error.message, location=location, hint=error.hint) from None
        if any(isinstance(layer, Recurrent) for layer in network.modules()):
            _check_recurrent(chain, worker, network, micro_batches)
        if worker.precision == "float16":
            _check_float16(chain, worker, network)
        strategy = worker.strategy
        if strategy is not None:
            _check_shared(worker, network)
        if strategy is not None and find_strategy(strategy).dense and sparse_parameters(network):
            raise SpecError(
                f"{strategy.name!r} changes gradients of all rows, and those of a sparse embedding "
                "have few",
                location=("replication", "strategy"),
                hint="leave 'sparse' out of the embedding, or choose another strategy",
            )
        if worker.interface is not None:
            if not worker.output.dtype.startswith(("float", "bfloat")):
                raise SpecError(
                    f"the module's output is {worker.output}, which has no gradient",
                    location=(*at, "layers"),
                    hint="cut the chain where activations are floating-point numbers",
                )
            with torch.device("meta"):
                build_interface(
                    worker.interface,
                    Boundary.of(worker),
                    setting_location(chain, worker.index, "interface"),
                )
        check_gradients(worker, network, learns)
        if any(p.requires_grad for p in network.parameters()) or any(
            edge.tensor and edge.source in learns for edge in worker.sources
        ):
            learns.add(worker.module)


def _check_shared(worker: WorkerSpec, layers: nn.Module) -> None:
    """Refuse replicas of a module with numbers that the rows which they send would round."""
    for name, tensor in (*layers.named_parameters(), *layers.named_buffers()):
        if tensor.dtype in (torch.float64, torch.complex128):
            raise SpecError(
                f"{name!r} of module {worker.module!r} is of {str(tensor.dtype).split('.')[-1]}, "
                "and replicas share numbers of 32 bits",
                location=("modules", worker.index, "replicas"),
                hint="make it float32 (complex64) in the layer, or set 'replicas: 1'",
            )


def _check_ties(chain: ChainSpec, workers: Sequence[WorkerSpec], micro_batches: int) -> None:
    """Refuse what tied weights do not travel with (``network.piece.BorrowedParameter``)."""
    smallest = min(part_sizes(chain.data.batch_size, micro_batches))
    for worker in workers:
        for number, layer in enumerate(worker.layers):
            if layer.type != "Piece" or not layer.args.get("lends"):
                continue
            for field in ("dtype", "gradient_dtype"):
                if getattr(chain.links, field) == "int8":
                    raise SpecError(
                        f"'int8' has one scale for the output of {worker.module!r} and the tied "
                        "weights beside it, of which the small ones would become 0",
                        location=("links", field),
                        hint="'int8-channel' has one for each number of a sample, 'bfloat16' none",
                    )
            rows = layer.args.get("rows", 1)
            if rows > smallest or not chain.data.drop_last:
                raise SpecError(
                    f"the tied weights of {worker.module!r} travel with batches of {rows} samples, "
                    f"but the smallest training batch may have fewer",
                    location=("modules", worker.index, "layers", number),
                    hint=f"'drop_last: true' in 'data', and 'rows: {smallest}' wherever 'rows' is",
                )


def _check_recurrent(
    chain: ChainSpec, worker: WorkerSpec, network: nn.Module, micro_batches: int
) -> None:
    """Refuse options that do not work with a state carried from batch to batch."""
    interface = worker.interface
    if worker.replicas > 1:
        raise SpecError(
            "a recurrent layer needs all batches, one after the other, and each replica gets some",
            location=("modules", worker.index, "replicas"),
        )
    if micro_batches > 1:  # of any module
        wrong = "'micro_batches': each part would continue from another one's state"
        location: Location = ("modules", worker.index, "layers")
    elif interface is not None and interface.args.get("keep") == "input":
        wrong = "'keep: input': the pass would be recomputed from another state"
        location = setting_location(chain, worker.index, "interface")
    elif (
        interface is not None
        and interface.name == "corrected"
        and any(isinstance(one, Recurrent) and one.synthesizer for one in network.modules())
    ):
        wrong = "'synthetic': 'corrected' passes backward twice, and would count it twice"
        location = ("modules", worker.index, "layers")
    else:
        return
    raise SpecError(
        f"module {worker.module!r} has a recurrent layer; remove {wrong}", location=location
    )


def _check_float16(chain: ChainSpec, worker: WorkerSpec, layers: nn.Module) -> None:
    """Refuse what does not work with a loss scale, which is found by gradients that overflow."""
    strategy, location = worker.strategy, setting_location(chain, worker.index, "precision")
    hint = "'bfloat16' needs no loss scale"
    if worker.on_nan != "skip":
        wrong = f"stop the run ('on_nan: {worker.on_nan}') when they overflow"
        location, hint = ("on_nan",), f"'on_nan: skip' leaves such batches out; {hint}"
    elif any(isinstance(layer, Recurrent) for layer in layers.modules()):
        wrong = "do not fit those that a recurrent layer carries from batch to batch"
    elif strategy is not None and find_strategy(strategy).per_step:
        wrong = f"overflow in one replica, and with {strategy.name!r} only the first would see it"
    else:
        return
    raise SpecError(
        f"module {worker.module!r} computes in float16; its scaled gradients would {wrong}",
        location=location,
        hint=hint,
    )


def _check_groups(chain: ChainSpec, layers: Sequence[nn.Module]) -> None:
    shared = []
    for index, (module, network) in enumerate(zip(chain.modules, layers, strict=True)):
        if module.groups is None:
            shared.append(network)
        else:
            check_groups(module.groups, [network], ("modules", index, "groups"))
    if shared:
        check_groups(chain.defaults.groups or (), shared, ("defaults", "groups"))


def _check_freeze(chain: ChainSpec, layers: Sequence[nn.Module]) -> None:
    """Refuse a name or pattern of what is frozen that matches nothing."""
    entries = [
        (module.freeze, [network]) for module, network in zip(chain.modules, layers, strict=True)
    ]
    for index, (patterns, matched) in enumerate([*entries, (chain.defaults.freeze, layers)]):
        at = ("modules", index) if index < len(entries) else ("defaults",)
        for pattern in set(patterns or ()) - {"*"}:
            check_patterns([pattern], matched, (*at, "freeze"))


def check_links(chain: ChainSpec, workers: Sequence[WorkerSpec]) -> None:
    """Refuse settings of links that do not fit some module."""
    head = workers[0].head
    for field in ("replay", "synthetic_inputs"):
        if getattr(chain.links, field) and head is not None and head.micro_batches > 1:
            raise SpecError(
                "a module cannot train on other batches between the micro-batches of one",
                location=("links", field),
                hint="leave it out, or 'micro_batches: 1'",
            )
    for worker in workers:
        if chain.links.synthetic_inputs is not None and chain.data.max_length is not None:
            raise SpecError(
                "predicted inputs have one length, and 'data.max_length' lets it vary",
                location=("links", "synthetic_inputs"),
                hint="leave it out, or use 'replay'",
            )
        if chain.links.synthetic_inputs is not None and len(worker.inputs) > 1 and worker.sources:
            raise SpecError(
                f"module {worker.module!r} has {len(worker.inputs)} inputs, and they are predicted "
                "for one only",
                location=("links", "synthetic_inputs"),
                hint="leave it out, or use 'replay'",
            )
        interface = None if worker.interface is None else resolve_interface(worker.interface)
        if interface is not None and interface.timing.signals and worker.output.varying:
            raise SpecError(
                f"the gradient interface {interface.choice.name!r} of module {worker.module!r} has "
                "parts of the activation's size, which 'data.max_length' lets vary: "
                f"{worker.output}",
                location=setting_location(chain, worker.index, "interface"),
                hint="use 'delayed' or 'exact', or pad to one length, without 'data.max_length'",
            )
        alone = interface is None or interface.timing is not Timing.DEFERRED
        if not alone and chain.links.on_loss == "continue":
            raise SpecError(
                f"module {worker.module!r} is trained by true gradients alone: it cannot continue "
                "without its neighbour",
                location=("links", "on_loss"),
                hint="'on_loss: wait', or another gradient interface",
            )
    for field in ("dtype", "gradient_dtype"):
        if getattr(chain.links, field) != "int8-channel":
            continue
        for worker in workers[:-1]:
            if not worker.output.shape:
                raise SpecError(
                    f"'int8-channel' needs channels, but the output of module {worker.module!r} "
                    f"is {worker.output}",
                    location=("links", field),
                    hint="'int8' has one scale for the whole tensor",
                )


def micro_batches_of(chain: ChainSpec, interfaces: Sequence[ResolvedInterface | None]) -> int:
    """Return the number of parts of each batch; all interfaces that set it must agree."""
    counts = {
        interface.needs.micro_batches: index
        for index, interface in enumerate(interfaces)
        if interface is not None and interface.needs.micro_batches > 1
    }
    if len(counts) > 1:
        raise SpecError(
            f"modules ask for different numbers of micro-batches: {', '.join(map(str, counts))}",
            location=setting_location(chain, max(counts.values()), "interface"),
            hint="a batch is cut once, for all modules",
        )
    count = next(iter(counts), 1)
    if 2 * count > chain.data.batch_size and count > 1:
        raise SpecError(
            f"{count} micro-batches do not fit a batch of {chain.data.batch_size} samples",
            location=setting_location(chain, counts[count], "interface"),
            hint="each needs at least two samples",
        )
    return count


def check_labels(chain: ChainSpec, interfaces: Sequence[ResolvedInterface | None]) -> None:
    """Refuse what needs labels upstream, if they stay at the tail (its interface is None)."""
    if len(interfaces) == 1:
        raise SpecError(
            "the chain's only module reads samples and labels",
            location=("data", "labels"),
            hint="leave 'labels' out, or cut the chain into several modules",
        )
    for index, interface in enumerate(interfaces):
        if interface is not None and interface.needs.labels:
            raise SpecError(
                f"the gradient interface {interface.choice.name!r} of module "
                f"{chain.modules[index].name!r} needs labels, and they stay at the tail",
                location=setting_location(chain, index, "interface"),
                hint="use 'exact', 'delayed' or 'synthetic: {conditioned: false}'",
            )
    if chain.links.synthetic_inputs is not None:
        raise SpecError(
            "inputs are predicted from labels, and they stay at the tail",
            location=("links", "synthetic_inputs"),
            hint="use 'replay'",
        )


def setting_location(chain: ChainSpec, index: int, field: str) -> Location:
    """Locate a module's setting: in the module, or in the defaults."""
    explicit = getattr(chain.modules[index], field) is not None
    return ("modules", index, field) if explicit else ("defaults", field)


def check_accumulation(chain: ChainSpec, total: int | None) -> None:
    """Refuse a module that would be given fewer batches than one update needs: it would not learn.

    ``total`` is the number of batches in the whole run, if known.
    """
    if total is None:
        return
    for index, module in enumerate(chain.modules):
        replicas = module.replicas if isinstance(module.replicas, int) else 1
        update, share = chain.setting(index, "accumulate") or 1, -(-total // replicas)
        if update > share:
            raise SpecError(
                f"no update would be made: one takes {update} batches, and the whole run gives "
                f"{module.name!r} {share}",
                location=setting_location(chain, index, "accumulate"),
                hint="a smaller number, or more 'epochs' or 'steps'",
            )


def check_single_samples(workers: Sequence[WorkerSpec]) -> None:
    """Refuse layers that cannot take a batch of one sample, as BatchNorm may not."""
    for worker in workers:
        inputs = [empty_batch(sample, 1, "meta") for sample in worker.inputs]
        for number, layer in enumerate(build_module(worker, "meta")):
            try:
                inputs = [layer(*inputs)]
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    break
                raise SpecError(
                    f"{worker.layers[number].type} needs batches of more than one sample, "
                    "batch_size is 1",
                    location=("modules", worker.index, "layers", number),
                ) from None
            except Exception:  # a user's layer that cannot run without memory
                break
