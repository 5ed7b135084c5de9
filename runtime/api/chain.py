"""A chain as an object: what Python does where the command line says ``dnictl up``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from dni_runtime.api.planning import plan_run
from dni_runtime.api.run import Run, active_runs
from dni_runtime.errors import UsageError
from dni_runtime.files import write_atomic
from dni_runtime.plan.create import check_place, run_root
from dni_runtime.plan.prepare import prepare, prepare_with
from dni_runtime.plan.settings import BackendChoice, StartSettings
from dni_runtime.spec.settings import find_setting
from dni_runtime.split.balance import Balance
from dni_runtime.split.part import Parts, doubt

if TYPE_CHECKING:
    from dni_runtime.plan.balancing import Proposal

_log = logging.getLogger(__name__)

_WRITTEN = "# Written by dni_runtime.Chain.from_modules; it may be replaced by it.\n"


class Chain:
    """A network that is cut into modules, checked as a whole.

    Args:
        path: Its ``chain.yaml``.
        data: Folder or file of the data, instead of the chain's ``data.path``.

    Attributes:
        prepared: What is known of it: specs, data, shapes.
        parts: What :meth:`split` has measured of each module; it prints as a table.

    Raises:
        SpecError: It cannot be used; names file, line and what is allowed.
        DataError: Its data is missing or malformed.
    """

    def __init__(self, path: Path | str = "chain.yaml", *, data: Path | str | None = None) -> None:
        self.prepared = prepare(Path(path), data=None if data is None else Path(data))
        self.parts = Parts()

    @classmethod
    def from_modules(
        cls,
        modules: Mapping[str, nn.Module],
        *,
        data: Mapping[str, Any],
        inputs: Mapping[str, Sequence[str]] | None = None,
        path: Path | str = "chain.yaml",
        **settings: Any,
    ) -> Chain:
        """Make a chain of modules that exist in this process, with the weights that they have.

        It is written to a chain file, beside a file of the weights: workers read these. A class of
        your own has to be in a file beside them, because workers import it; the source of one that
        a script or a notebook defines is written to such a file. Parameters that are frozen
        (``requires_grad_(False)``) stay so; what workers could not build is refused.

        Args:
            modules: The modules by name, head first. An ``nn.Sequential`` is a list of layers.
            data: The chain's ``data``; ``dataset`` may be a class or function, as may what is
                otherwise written ``{import: ...}``.
            inputs: Names of the modules that a module takes its inputs from, by its own name; by
                default the module before.
            path: The chain file; one that this method wrote is replaced.
            settings: The chain's other keys: ``epochs``, ``loss``, ``defaults``, ...

        Raises:
            SpecError: A module cannot be described in a file, or the chain cannot be used.
            UsageError: The file exists, and this method did not write it; or ``inputs`` names no
                module.
        """
        from dni_runtime.resolve.describe import describe_modules, describe_settings, with_frozen
        from dni_runtime.split.chainfile import (
            check_place,
            replacing,
            weights_beside,
            write_weights,
        )
        from dni_runtime.split.network import named_after

        if not isinstance(modules, Mapping | nn.ModuleDict):
            raise UsageError(
                f"a {type(modules).__name__} does not say which layers are a module",
                hint="give the modules by name, as in {'bottom': nn.Sequential(…), 'top': "
                "nn.Linear(…)}; Chain.split cuts one network by itself",
            )
        for name, module in modules.items():
            if not isinstance(module, nn.Module):
                raise UsageError(
                    f"module {name!r} is a {type(module).__name__}, not an nn.Module",
                    hint="nn.Sequential(…) makes one module of several layers",
                )
        path = Path(path)
        folder = path.parent.absolute()
        takes = {
            name: value if isinstance(value, str) else list(value)
            for name, value in (inputs or {}).items()
        }
        if unknown := set(takes) - set(modules):
            raise UsageError(f"'inputs' names {min(unknown)!r}, which is not one of the modules")
        check_place(path, _WRITTEN)
        settings = describe_settings(settings, folder)
        described = describe_modules(modules, folder)
        defaults = settings.get("defaults") or {}
        if not isinstance(defaults, Mapping):
            raise UsageError(
                f"'defaults' is {defaults!r}, not a mapping",
                hint="for example: {'optimizer': {'Adam': {'lr': 0.001}}}",
            )
        document = {
            "name": named_after(path.stem) or "chain",
            **settings,
            "data": describe_settings(data, folder, ("data",)),
            "defaults": {"init": {"file": weights_beside(path).name}, **defaults},
            "modules": [
                {
                    "name": name,
                    **({"inputs": names} if (names := takes.get(name)) else {}),
                    "layers": entry.layers,
                    **({"freeze": with_frozen(defaults, entry.freeze)} if entry.freeze else {}),
                }
                for name, entry in described.items()
            ],
        }
        tensors = {
            f"{name}.{key}": value
            for name, entry in described.items()
            for key, value in entry.state.items()
        }
        with replacing(path):
            write_weights(path, tensors)
            write_atomic(path, _WRITTEN + yaml.safe_dump(document, sort_keys=False), mode=0o644)
            return cls(path)

    @classmethod
    def split(
        cls,
        network: str | Callable[..., nn.Module] | nn.Module,
        *,
        data: Mapping[str, Any],
        modules: int = 2,
        at: str | Sequence[str] = (),
        args: Mapping[str, Any] | None = None,
        path: Path | str = "chain.yaml",
        balance: Balance = "time",
        links: str = "fast",
        takes: str | Sequence[str] = (),
        returns: str | int | None = None,
        weights: Path | str | None = None,
        freeze: str | Sequence[str] = (),
        **settings: Any,
    ) -> Chain:
        """Make a chain of one network, which is traced, measured and cut.

        It is written to a chain file, beside a file of the weights; both are replaced.

        Args:
            network: A function or class that returns it, or its import path, as
                ``torchvision.models:resnet18``; or a network of your own class, with its weights.
            data: The chain's ``data``; the network's inputs are those of the data.
            modules: Number of modules.
            at: Instead, the network's own modules after which to cut: ``["layer2", "layer3"]``,
                or ``"layer2,layer3"``, as the other names.
            args: Keyword arguments of the function or class.
            path: The chain file; import paths start in its folder.
            balance: What is to be equal among the modules: ``time``, ``memory`` or ``both``.
            links: ``fast`` (1 GB/s) or ``slow`` (100 Mbit/s).
            takes: Arguments of ``forward`` for the data's inputs; by default its first ones.
            returns: What to take of forward's result: ``logits``, 0, ``outputs.0.logits``.
            weights: A state dict to start from (safetensors, or a file of ``torch.save``).
            freeze: The network's modules or parameters that are not trained, by their names.
            settings: The chain's other keys: ``epochs``, ``loss``, ``defaults``, ...

        Raises:
            SpecError: The network cannot be traced or cut so; names the line and the reason.
            DataError: The data or the weights cannot be used.
            UsageError: The file exists, and neither this method nor 'dnictl split' wrote it.
        """
        from dni_runtime.plan.splitting import split_chain
        from dni_runtime.resolve.describe import describe_modules, describe_settings, import_path

        path = Path(path)
        folder, state = path.parent.absolute(), None
        if isinstance(network, nn.Module):
            described, state = describe_modules({"network": network}, folder)["network"], network
            entry: Any = described.layers[0] if type(network) is not nn.Sequential else ""
            if "import" not in entry:
                raise UsageError(
                    f"{type(network).__name__} is a layer of torch, not a network",
                    hint="give a function that returns it, as in 'def build(): return "
                    f"nn.{type(network).__name__}(…)', and weights=FILE for a state dict of yours; "
                    "or a network of a class of your own",
                )
            target, args = entry["import"], entry.get("args", {})
        else:
            target = network if isinstance(network, str) else import_path(network, folder)
        taken = split_chain(
            target,
            path,
            {
                **describe_settings(settings, folder),
                "data": describe_settings(data, folder, ("data",)),
            },
            args=args,
            modules=modules,
            at=at,
            balance=balance,
            links=links,
            takes=takes,
            returns=returns,
            weights=None if weights is None else Path(weights),
            freeze=freeze,
            state=state,
        )
        if (warning := doubt(taken.parts)) is not None:
            _log.warning("%s", warning)
        chain = cls.__new__(cls)
        chain.prepared, chain.parts = taken.prepared, taken.parts
        return chain

    def balance(self, balance: Balance = "time", links: str = "fast") -> Proposal:
        """Better cuts for its network, by what its parts cost on this machine.

        Args:
            balance: What is to be equal among the modules: ``time``, ``memory`` or ``both``.
            links: ``fast`` (1 GB/s) or ``slow`` (100 Mbit/s).

        Raises:
            UsageError: It is not one network that has been taken apart.
            SpecError: The network cannot be cut so.
        """
        from dni_runtime.plan.balancing import balance_chain

        return balance_chain(self.prepared.path, balance, links)

    def __repr__(self) -> str:
        return f"Chain({str(self.prepared.path)!r})"

    @property
    def modules(self) -> list[str]:
        """Names of its modules, head first."""
        return self.prepared.modules

    def train(
        self,
        *,
        epochs: int | None = None,
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        backend: BackendChoice = "auto",
        images: Path | str = "images",
        runs: Path | str = "runs",
        name: str | None = None,
        run_dir: Path | str | None = None,
        carry: Run | Path | str | None = None,
        log_level: str = "info",
    ) -> Run:
        """Start training on this host, with one worker per module.

        It goes on in the background, also when this program ends.

        Args:
            epochs: Instead of the chain's.
            seed: Instead of the chain's.
            settings: Values of other settings of the chain, by their paths or enough of their
                words: ``{"lr": 1e-3}``.
            backend: What the workers are: processes, or containers; ``auto`` takes containers
                where Apptainer and the images are there.
            images: Folder of the module images.
            runs: Folder in which the run gets a directory.
            name: The run's name; by default that of the chain, and the time.
            run_dir: That directory itself.
            carry: A run of the same layers, or its name, with other settings or cuts: go on from
                its newest checkpoint. If it has finished, ``epochs`` or the chain's are more.
            log_level: How much the workers log: ``debug``, ``info``, ``warning`` or ``error``.

        Raises:
            DniError: The run cannot start here; says what is missing.
        """
        prepared = self.prepared
        changes = {
            find_setting(name, prepared.written): value for name, value in (settings or {}).items()
        }
        options = {"epochs": epochs, "seed": seed}
        changes |= {name: value for name, value in options.items() if value is not None}
        if changes:
            prepared = prepare_with(prepared, changes)
        if carry is not None:
            from dni_runtime.plan.carrying import carry_over

            its = carry if isinstance(carry, Run) else Run.find(carry, runs)
            its.check_trusted()
            prepared = carry_over(prepared, its.record, its.state())
        place = (None if run_dir is None else Path(run_dir), Path(runs), name)
        check_place(*place)
        root = run_root(prepared.chain.name, *place)
        start = StartSettings(root, backend, Path(images), log_level=log_level)
        planned = plan_run(prepared, start)
        for notice in (*active_runs(runs, prepared.chain.name), *planned.site.notices):
            _log.warning("%s", notice)
        planned.launch().detach()
        return Run.open(root)
