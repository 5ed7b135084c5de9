"""A run's checkpoints as one network: export, the model itself, and its evaluation.

It is one file because all begin with the same choice: of a checkpoint, and of data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from dni_runtime.errors import DivergedError, UnavailableError, UsageError
from dni_runtime.files import expanded
from dni_runtime.run.cuts import choose_cut, tensors_file
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.replicas import replicas_of

if TYPE_CHECKING:  # torch takes a while to import
    from torch import Tensor, nn

    from dni_runtime.core.forward import Inputs, ModuleForward
    from dni_runtime.data import DataSource
    from dni_runtime.measure.predictions import Metrics, Predictions
    from dni_runtime.run.documents.exits import Exits
    from dni_runtime.spec import DataSpec, Preprocessing, TensorSpec

Cut: TypeAlias = int | str | None
"""A checkpoint: its stream position, ``newest`` or ``best``; None: the best, else the newest."""

Data: TypeAlias = str | Path | Mapping[str, Any] | Callable[..., Any]
"""A data set by name or import path, its class, a path, or keys of the chain's ``data``."""


def check_ending(output: Path, *, state_dict: bool) -> None:
    """Refuse a file that the network, or its state dict, cannot be exported to."""
    if output.suffix == ".safetensors" and output.is_file():
        from dni_runtime.core.export import chain_of

        if (chain := chain_of(output)) is not None:
            raise UsageError(
                f"{str(output)!r} is what {chain!r} begins with: its initial weights",
                hint="name another file, such as 'trained.safetensors'",
            )
    allowed = (".safetensors", *((".pt", ".pth") if state_dict else (".pt2", ".onnx")))
    if output.suffix not in allowed:
        what = "a state dict" if state_dict else "a network"
        raise UsageError(
            f"{what} cannot be exported to {str(output)!r}",
            hint=f"end the name in one of {', '.join(allowed)}"
            + ("; --state-dict is for .pt" if output.suffix in (".pt", ".pth") else ""),
        )
    if output.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UnavailableError(
            "onnx and onnxscript are not installed", hint="pip install 'dni-runtime[onnx]'"
        )


class Checkpointed:
    """What is done with a run's checkpoints.

    ``trust``: it may be executed, too, if it belongs to somebody else.
    """

    def __init__(self, record: Record, *, trust: bool = False) -> None:
        self.record = record
        self._trust = trust
        self.directory: RunDir = record.run
        self.name = record.name
        self.modules = record.modules  # its workers, head first

    def check_trusted(self) -> None:
        """Refuse to execute a run of somebody else's that is not trusted."""
        self.record.check_trusted(self._trust)

    def choose_cut(self, wanted: str | None = None, *, force: bool = False) -> int:
        """The checkpoint that is meant; see :func:`dni_runtime.run.cuts.choose_cut`."""
        return choose_cut(self.directory, self.modules, wanted, force=force)

    def _position(self, cut: Cut, *, force: bool = False) -> int:
        """Return the stream position of a checkpoint; a number is taken as it is."""
        return cut if isinstance(cut, int) else self.choose_cut(cut, force=force)

    def export(
        self,
        output: Path | str,
        cut: Cut = None,
        *,
        force: bool = False,
        state_dict: bool = False,
    ) -> None:
        """Write the trained network to one file, which :func:`dni_runtime.load` reads.

        A model card, ``FILE.md``, is written beside it, and ``FILE.exits.json`` if :meth:`exits`
        has measured this checkpoint.

        Args:
            output: ``.safetensors``, ``.pt2`` or ``.onnx``; ``.safetensors`` or ``.pt`` of a state
                dict.
            cut: Which checkpoint (``Cut``); by default the best that is selected, else the newest.
            force: Write weights that are not finite, too.
            state_dict: Write :meth:`state_dict` instead, which needs nothing of this package.

        Raises:
            DniError: As :meth:`choose_cut`, and as ``core.export.export_model``.
        """
        check_ending(Path(output), state_dict=state_dict)
        from dni_runtime.api.card import write_card
        from dni_runtime.core.export import export_model, write_state_dict
        from dni_runtime.plan.prepare import importing_from

        if not state_dict:
            self.check_trusted()
        cut = self._position(cut, force=force)
        if state_dict:
            write_state_dict(self.state_dict(cut, force=force), Path(output))
        else:
            with importing_from(self.directory.sources):
                specs = self.record.specs()[1]
                export_model(
                    specs,
                    self._states_of(cut),
                    Path(output),
                    force=force,
                    preprocessing=self.record.preprocessing,
                )
        write_card(self.record, cut, Path(output), state_dict=state_dict)

    def export_folder(self, folder: Path | str, cut: Cut = None) -> None:
        """Write the trained network as a folder with the files of a Hugging Face repository.

        ``model.safetensors`` is for :func:`dni_runtime.load`, ``config.json`` describes its layers,
        ``README.md`` is the model card.

        Args:
            folder: It must not exist yet, or be empty.
            cut: Which checkpoint (``Cut``); by default the best that is selected, else the newest.

        Raises:
            DniError: As :meth:`export`.
        """
        from dni_runtime.core.export import read_header

        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{str(folder)!r} exists already", hint="name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "model.safetensors"
        self.export(model, cut)
        model.with_suffix(".md").rename(folder / "README.md")
        header = read_header(model).model_dump_json(indent=1) + "\n"
        (folder / "config.json").write_text(header, encoding="utf-8")

    def state_dict(self, cut: Cut = None, *, force: bool = False) -> dict[str, Tensor]:
        """The trained weights under the names of the network that they are from.

        That is the one of ``Piece``, or the one that ``init`` has taken them from. It loads them:
        ``load_state_dict(strict=True)``. Else it is :meth:`model`: ``bottom.0.weight``.

        Args:
            cut: Which checkpoint (``Cut``); by default the best that is selected, else the newest.
            force: Return weights that are not finite, too.

        Raises:
            UsageError: ``init.names`` leaves out some of a module's weights.
            DniError: As :meth:`choose_cut`.
        """
        import torch

        from dni_runtime.core.export import trained_tensors
        from dni_runtime.core.finite import all_finite_or_masks
        from dni_runtime.plan.initial import name_in_file, network_names

        states = self._states_of(self._position(cut, force=force))
        chain, workers = self.record.specs()
        found: dict[str, Tensor] = {}
        for worker, module in zip(workers, chain.modules, strict=True):
            names = network_names(worker.module, worker.layers, module.init)
            for own, value in trained_tensors(worker, states).items():
                theirs = name_in_file(own, names)
                if theirs is None:
                    raise UsageError(
                        f"{own!r} of module {worker.module!r} has no name in another network",
                        hint="'init.names' of the module maps names; or export without "
                        "--state-dict",
                    )
                if not force and not all_finite_or_masks((value,)):
                    raise DivergedError(
                        f"{theirs!r} is not finite ({str(states[worker.module])!r})",
                        hint="export an older checkpoint with --from, or this one with --force",
                    )
                if theirs in found and not torch.equal(found[theirs], value):
                    raise UsageError(
                        f"{own!r} of module {worker.module!r} was {theirs!r}, as was another one, "
                        "and training has made them differ",
                        hint="export without --state-dict",
                    )
                found[theirs] = value
        return found

    def model(self, cut: Cut = None) -> nn.Module:
        """The trained network, as one plain torch module in eval mode.

        Args:
            cut: Which checkpoint (``Cut``); by default the best that is selected, else the newest.

        Raises:
            DniError: As :meth:`choose_cut`.
        """
        from dni_runtime.core.export import assemble
        from dni_runtime.plan.prepare import importing_from

        self.check_trusted()
        states = self._states_of(self._position(cut))
        with importing_from(self.directory.sources):
            return assemble(self.record.specs()[1], states)

    def evaluate(
        self,
        cut: Cut = None,
        *,
        data: Data | None = None,
        metrics: Metrics | None = None,
    ) -> dict[str, float]:
        """Loss and metrics of the trained network on the test set, else the evaluation samples.

        They are computed here, in one process, as the run's own evaluations are: in the modules'
        ``precision``, and recurrent layers carry their state from batch to batch.

        Args:
            cut: Which checkpoint (``Cut``); by default the best that is selected, else the newest.
            data: As in :meth:`predict`.
            metrics: Instead of the chain's, as in ``chain.yaml``.

        Raises:
            DniError: As :meth:`choose_cut`; or the data cannot be read here.
        """
        from dni_runtime.core.chain import predict
        from dni_runtime.core.evaluation import evaluate
        from dni_runtime.core.losses import ChainLoss
        from dni_runtime.core.metrics import check_metrics
        from dni_runtime.measure.predictions import parse_metrics
        from dni_runtime.plan.prepare import importing_from

        if data is not None:  # which may have other samples and labels than the network takes
            with importing_from(self.directory.sources):
                return self.predict(data, cut).evaluate(metrics)
        with self._network(cut, None) as (modules, source):
            tail = modules[-1].spec
            if metrics is not None and tail.tail is not None:
                chosen = parse_metrics(metrics)
                loss = ChainLoss(tail.loss, tail.prediction, tail.label)
                check_metrics(chosen, loss, tail.prediction, tail.label)
                role = tail.tail.model_copy(update={"metrics": chosen})
                tail = tail.model_copy(update={"tail": role})
            return evaluate(partial(predict, modules), source.evaluated()[0], tail)

    def predict(self, data: Data | None = None, cut: Cut = None) -> Predictions:
        """The trained network's outputs on the test set, else the evaluation samples.

        Args:
            data: Other data: a data set by name or import path, its class, a path, or keys of the
                chain's ``data`` (``labels: none``: it has none), such as ``evaluation:
                {root: …}``; its evaluation samples are taken.
            cut: Which checkpoint (``Cut``); by default the best that is selected, else the newest.

        Raises:
            DniError: As :meth:`choose_cut`; or the data cannot be read here.
        """
        from dni_runtime.core.chain import predict
        from dni_runtime.measure.predictions import Predictions

        with self._network(cut, data) as (modules, source):
            tail = modules[-1].spec
            metrics = () if tail.tail is None else tail.tail.metrics
            network = partial(predict, modules)
            return Predictions.of(network, *source.evaluated(), tail.loss, metrics)

    def exits(
        self,
        cut: Cut = None,
        *,
        points: float = 0.5,
        confidence: float | None = None,
        retrain: bool = False,
    ) -> Exits:
        """Measure the early exits, choose who leaves where, and write that into the run.

        Args:
            cut: Which checkpoint (``Cut``); by default the best that is selected, else the newest.
            points: Points of accuracy that early answers may lose.
            confidence: The top probability at which samples leave, instead of ``points``.
            retrain: Whether to fit new early heads to the finished modules.

        Raises:
            UsageError: The chain does not classify samples, or has no early head.
            DniError: As :meth:`choose_cut`; or the data cannot be read here.
        """
        from dni_runtime.measure.exits import ChainExits

        cut = self._position(cut)
        with self._network(cut, None) as (modules, source):
            exits = ChainExits(self.directory, cut, modules)
            if retrain:
                exits.fit(source)
            else:
                exits.load(self._states_of(cut))
            document = exits.measure(source, points, confidence)
        exits.write(document)
        return document

    @contextmanager
    def _network(
        self, cut: Cut, data: Data | None
    ) -> Iterator[tuple[Sequence[ModuleForward], DataSource]]:
        """Give the modules with their trained weights, and the data."""
        from dni_runtime.core.export import load_trained
        from dni_runtime.core.forward import ModuleForward
        from dni_runtime.data import open_data
        from dni_runtime.network.piece import tie
        from dni_runtime.plan.prepare import importing_from

        self.check_trusted()
        states = self._states_of(self._position(cut))
        (chain, workers), sources = self.record.specs(), self.directory.sources
        with importing_from(sources):
            modules = [ModuleForward(worker) for worker in workers]
            for module in modules:
                load_trained(module.layers, module.spec, states)
            tie(layer for module in modules for layer in module.layers.modules())
            own = chain.data.at(self.record.data).of_replica(1)
            head, trained = workers[0].head, self.record.preprocessing
            floats = head is not None and head.samples[0].dtype == "float32" and own.normalize
            if data is not None and trained is None and floats and own.dataset == "npz":
                source = open_data(own, sources, seed=chain.seed, half="samples")
                trained = source.splits["train"].preprocessing()
            yield modules, evaluation_data(data, own, sources, trained, seed=chain.seed)

    def _states_of(self, cut: int) -> dict[str, Path]:
        return {  # replicas are the same at a checkpoint
            module: tensors_file(self.directory.checkpoint(cut, workers[0]))
            for module, workers in replicas_of(self.modules).items()
        }


def evaluation_data(
    data: Data | None,
    own: DataSpec | None,
    sources: Path,
    trained: Preprocessing | None = None,
    *,
    inputs: Sequence[TensorSpec] = (),
    seed: int = 0,
) -> DataSource:
    """Open a data set whose evaluation samples are wanted.

    ``own`` is the chain's, from which keys are taken that ``data`` leaves out. Raw samples of other
    data are normalised as the training's were (``trained``), never by figures of their own; they
    are vectors if the network's ``inputs`` are. Paths start in the working directory, imports in
    ``sources``.
    """
    from dni_runtime.data import DATASETS, Half, open_data, with_defaults
    from dni_runtime.resolve.describe import describe_settings
    from dni_runtime.spec.data import PATH, LabelsSpec

    half: Half | None
    spec, half = own, None
    if data is not None:
        if isinstance(data, str | Path):
            named = str(data) in DATASETS or ":" in str(data)
            data = {"dataset" if named else "path": str(data)}
        data = data if isinstance(data, Mapping) else {"dataset": data}
        data = describe_settings(data, Path.cwd(), ("data",))  # with classes by their names
        used = (
            "" if own is None or own.train is None else f"{own.args} {own.train} {own.evaluation}"
        )
        if set(data) == {"path"} and used and PATH not in used:
            raise UsageError(
                f"{str(data['path'])!r} names no other data: the data set takes no path",
                hint="give it other keywords: --data '{evaluation: {...}}'",
            )
        if data.get("path") is not None:
            data = {**data, "path": str(expanded(data["path"]).absolute())}
        half = "samples" if data.get("labels") == "none" else None
        keys = {key: data[key] for key in data if key != "labels" or half is None}
        spec = with_defaults(_other_data(keys, own), Path.cwd())
        if half is not None:  # as of a head whose tail has the labels
            spec = spec.model_copy(update={"labels": LabelsSpec(dataset=spec.dataset)})
    if spec is None:
        raise UsageError("no data is named", hint="--data '{dataset: npz, path: FILE}'")
    if data is None:
        return open_data(spec, sources, seed=seed)
    # Its training samples, if there are any, need not fill a batch.
    one = {"eval_batch_size": spec.eval_size, "batch_size": 1, "drop_last": False}
    spec = spec.model_copy(update=one)
    open_it = partial(open_data, base=sources, seed=seed, half=half, trained=trained, predicts=True)
    source = open_it(spec)
    sizes = [sample.shape for sample in source.info.samples]
    flat = [(math.prod(shape),) for shape in sizes]
    if "flatten" not in data and flat == [one.shape for one in inputs] != sizes:
        source = open_it(spec.model_copy(update={"flatten": True}))
    raw = source.splits["eval"].preprocessing() is not None and "normalize" not in data
    if source.splits["train"] is source.splits["eval"]:  # that file has no figures either
        raw = spec.normalize and source.info.sample.dtype == "float32"
    if raw and trained is None and spec.dataset == "npz":
        raise UsageError(
            f"how the training's samples were normalised is not known, and those in {spec.path!r} "
            "are not normalised yet",
            hint="--data '{dataset: npz, path: FILE, normalize: false}' takes them as the network "
            "expects them, 'normalize: true' by the figures of that file's x_train",
        )
    return source


def _other_data(data: Mapping[str, Any], own: DataSpec | None) -> DataSpec:
    """Return other data, read as ``own`` are, of which all evaluation samples are taken."""
    from pydantic import ValidationError

    from dni_runtime.data.user import paths_in
    from dni_runtime.spec import DataSpec
    from dni_runtime.spec.load import explain_details

    kept: dict[str, Any] = {}
    if own is not None:
        limits = {"train_limit", "eval_limit", "validation", "augment", "labels"}
        reading = {"batch_size", "eval_batch_size", "flatten", "normalize", "streams"}
        if ":" in str(data.get("dataset")):  # the network takes the same inputs of its rows
            reading |= {"inputs", "label", "collate", "max_length"}
        kept = own.model_dump(include=reading if "dataset" in data else None, exclude=limits)
    changed = dict(data)
    for part in ("args", "train", "evaluation"):
        if not isinstance(given := data.get(part), Mapping):
            continue
        if "path" not in data:
            given = {**given, **{key: str(at) for key, at in paths_in(given, Path.cwd()).items()}}
        changed[part] = {**(kept.get(part) or {}), **given}
    document = {**kept, **changed}
    if document.get("train") is None:  # nothing is trained on
        document["train"] = document.get("evaluation")
    try:
        return DataSpec.model_validate(document)
    except ValidationError as error:
        where, what, hint = explain_details(error, DataSpec)
        raise UsageError(f"{'.'.join(map(str, ('data', *where)))}: {what}", hint=hint) from None


def predict_model(file: Path, data: Data | None, *, trust: bool = False) -> Predictions:
    """Return the outputs of an exported network.

    Its loss is taken to be a cross-entropy, or a mean squared error if labels are no integers;
    those of several outputs, which are laid in one row, are not known.
    """
    from dni_runtime.core.export import load_model, read_header
    from dni_runtime.core.forward import as_inputs
    from dni_runtime.measure.predictions import Predictions
    from dni_runtime.packing import pack
    from dni_runtime.plan.prepare import importing_from
    from dni_runtime.spec import Choice

    with importing_from(Path.cwd()):
        model = load_model(file, trust=trust)
        header = None if file.suffix == ".pt2" else read_header(file)
        trained, inputs = (header.preprocessing, header.inputs) if header else (None, ())
        source = evaluation_data(data, None, Path.cwd(), trained, inputs=inputs)
        loss: Choice | None = Choice(name="CrossEntropyLoss")

        def network(x: Inputs) -> Tensor:
            nonlocal loss
            outputs = model(*as_inputs(x))
            if not isinstance(outputs, tuple | list):
                return cast("Tensor", outputs)
            loss = None
            return pack(outputs)

        found = Predictions.of(network, *source.evaluated(), loss)
    if loss is not None and found.labels is not None and found.labels.is_floating_point():
        loss = Choice(name="MSELoss")
    return replace(found, loss=loss)
