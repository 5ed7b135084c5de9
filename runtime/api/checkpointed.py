"""A run's checkpoints as one network: export, the model itself, and its evaluation."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dni_runtime.errors import DamagedError, DivergedError, UnavailableError, UsageError
from dni_runtime.run.cuts import choose_cut, tensors_file
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.replicas import replicas_of

if TYPE_CHECKING:  # torch takes a while to import
    from torch import Tensor, nn


def check_ending(output: Path, *, state_dict: bool) -> None:
    """Refuse a file that the network, or its state dict, cannot be exported to."""
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

    def choose_cut(
        self, wanted: str | None = None, *, force: bool = False
    ) -> tuple[int, list[DamagedError]]:
        """The checkpoint that is meant; see :func:`dni_runtime.run.cuts.choose_cut`."""
        return choose_cut(self.directory, self.modules, wanted, force=force)

    def export(
        self,
        output: Path | str,
        cut: int | None = None,
        *,
        force: bool = False,
        state_dict: bool = False,
    ) -> None:
        """Write the trained network to one file, which :func:`dni_runtime.load` reads.

        Args:
            output: ``.safetensors``, ``.pt2`` or ``.onnx``; ``.safetensors`` or ``.pt`` of a state
                dict.
            cut: The checkpoint's stream position; by default :meth:`choose_cut`'s.
            force: Write weights that are not finite, too.
            state_dict: Write :meth:`state_dict` instead, which needs nothing of this package.

        Raises:
            DniError: As :meth:`choose_cut`, and as ``core.export.export_model``.
        """
        check_ending(Path(output), state_dict=state_dict)
        from dni_runtime.core.export import export_model, write_state_dict
        from dni_runtime.plan.prepare import importing_from

        if state_dict:
            return write_state_dict(self.state_dict(cut, force=force), Path(output))
        self.check_trusted()
        states = self._states_of(self.choose_cut(force=force)[0] if cut is None else cut)
        with importing_from(self.directory.sources):
            export_model(self.record.specs()[1], states, Path(output), force=force)

    def state_dict(self, cut: int | None = None, *, force: bool = False) -> dict[str, Tensor]:
        """The trained weights under the names of the network that they are from.

        That is the one of ``Piece``, or the one that ``init`` has taken them from. It loads them:
        ``load_state_dict(strict=True)``. Else it is :meth:`model`: ``bottom.0.weight``.

        Args:
            cut: The checkpoint's stream position; by default :meth:`choose_cut`'s.
            force: Return weights that are not finite, too.

        Raises:
            UsageError: ``init.names`` leaves out some of a module's weights.
            DniError: As :meth:`choose_cut`.
        """
        from dni_runtime.core.export import trained_tensors
        from dni_runtime.core.finite import all_finite_or_masks
        from dni_runtime.plan.initial import name_in_file, network_names

        states = self._states_of(self.choose_cut(force=force)[0] if cut is None else cut)
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
                found[theirs] = value
        return found

    def model(self, cut: int | None = None) -> nn.Module:
        """The trained network, as one plain torch module in eval mode.

        Args:
            cut: The checkpoint's stream position; by default :meth:`choose_cut`'s.

        Raises:
            DniError: As :meth:`choose_cut`.
        """
        from dni_runtime.core.export import assemble
        from dni_runtime.plan.prepare import importing_from

        self.check_trusted()
        states = self._states_of(self.choose_cut()[0] if cut is None else cut)
        with importing_from(self.directory.sources):
            return assemble(self.record.specs()[1], states)

    def evaluate(self, cut: int | None = None) -> dict[str, float]:
        """Loss and metrics of the trained network on the test set, else the evaluation samples.

        They are computed here, in one process, as the run's own evaluations are: in the modules'
        ``precision``, and recurrent layers carry their state from batch to batch.

        Args:
            cut: The checkpoint's stream position; by default :meth:`choose_cut`'s.

        Raises:
            DniError: As :meth:`choose_cut`; or the data cannot be read here.
        """
        from dni_runtime.core.chain import predict
        from dni_runtime.core.evaluation import evaluate
        from dni_runtime.core.export import load_trained
        from dni_runtime.core.forward import ModuleForward
        from dni_runtime.data import open_data
        from dni_runtime.plan.prepare import importing_from

        self.check_trusted()
        states = self._states_of(self.choose_cut()[0] if cut is None else cut)
        (chain, workers), sources = self.record.specs(), self.directory.sources
        with importing_from(sources):
            modules = [ModuleForward(worker) for worker in workers]
            for module in modules:
                load_trained(module.layers, module.spec, states)
            source = open_data(
                chain.data.at(self.record.data).of_replica(1), sources, seed=chain.seed
            )
            batches = source.test_batches() if source.has_test else source.eval_batches()
            return evaluate(lambda x: predict(modules, x), batches, workers[-1])

    def _states_of(self, cut: int) -> dict[str, Path]:
        return {  # replicas are the same at a checkpoint
            module: tensors_file(self.directory.checkpoint(cut, workers[0]))
            for module, workers in replicas_of(self.modules).items()
        }
