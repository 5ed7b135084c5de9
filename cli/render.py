"""Files for other programs: ``render kubernetes``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.terminal import tell

if TYPE_CHECKING:
    from dni_runtime.plan.prepare import CheckedChain
    from dni_runtime.schedulers.kubernetes.objects import Objects
    from dni_runtime.serving.documents import FrontSettings


@click.group()
def render() -> None:
    """Write files by which other programs start a chain."""


@render.command()
@options.chain
@click.option("-o", "--out", type=options.FOLDER, required=True,
              help="Folder for the files; must not exist, or be empty.")  # fmt: skip
@click.option("--serve", "source", metavar="RUN", shell_complete=options.complete_runs,
              help="Not a training: this run, or release NAME:VERSION, answers.")  # fmt: skip
@click.option("--image", "images", multiple=True, required=True, metavar="[MODULE=]IMAGE",
              help="Image of all modules, or of one: REPOSITORY@DIGEST.")  # fmt: skip
@click.option("--name", metavar="NAME", help="Name of the objects (default: the chain's).")
@click.option("--namespace", metavar="NAME", help="Namespace of the objects.")
@click.option("--user", type=click.IntRange(1), default=1000, show_default=True,
              help="User and group id of the pods, to whom the volume belongs.")  # fmt: skip
@options.log_level
@click.option("--queue", metavar="NAME", help="Kueue's queue that admits the run.")
@click.option("--claim", metavar="NAME", help="A volume claim for the run (default: a new one).")
@click.option("--storage", metavar="SIZE", help="Size of the new one (default: 10Gi).")
@click.option("--data-claim", metavar="NAME", help="A volume claim that has the data.")
@click.option("--no-jobset", is_flag=True, help="Write plain Jobs, for clusters without JobSet.")
@options.data
@options.runs
@options.of_service("With --serve: ")
@click.option("--port", type=click.IntRange(1024, 65535),
              help="With --serve: where the front listens (default: 8000).")  # fmt: skip
@options.trust
def kubernetes(
    chain: Path, out: Path, source: str | None, images: tuple[str, ...], name: str | None,
    namespace: str | None, user: int, log_level: str, **values: Any,
) -> None:  # fmt: skip
    """Write objects for Kubernetes: of a training, or of a service.

    It talks to no cluster: look at the files, then 'kubectl apply --server-side -f FOLDER'.
    keys.yaml holds secrets.

    \b
    Examples:
      dnictl render kubernetes chain.yaml -o k8s --image registry.example/digits@sha256:...
      dnictl render kubernetes --serve digits:1.2.0 -o k8s --image bottom=registry.example/...
    """
    from dni_runtime.plan.settings import StartSettings
    from dni_runtime.schedulers.kubernetes.objects import Cluster
    from dni_runtime.spec.predicting import FRONT

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out: {str(out)!r} is not an empty folder", hint="name a new one")
    other = (*options.SERVING, "cut", "token_file", "port") if source is None else _OF_TRAINING
    for flag in options.flags_given(*other):
        hint = "it is for --serve" if source is None else "--serve has none"
        raise UsageError(f"{flag} is not for this", hint=hint)
    cluster = Cluster(
        images=_by_module(images),
        namespace=namespace,
        queue=values["queue"],
        claim=values["claim"],
        data_claim=values["data_claim"],
        storage=values["storage"] or "10Gi",
        user=user,
        jobset=not values["no_jobset"],
    )
    prepared, front = (_trained(chain, values), None) if source is None else _served(source, values)
    if unknown := set(cluster.images) - {"", *prepared.modules, *([FRONT] if front else ())}:
        raise UsageError(
            f"--image: chain {prepared.chain.name!r} has no module {min(unknown)!r}",
            hint=f"its modules: {', '.join(prepared.modules)}",
        )
    name = name or prepared.chain.name
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / name.replace("/", "-")
        settings = StartSettings(root, "process", scheduler="kubernetes", log_level=log_level)
        planned = options.planned_run(prepared, settings)
        run = planned.create()
        files = {
            str(path.relative_to(run.root)): path.read_bytes()
            for path in sorted(run.root.rglob("*"))
            if path.is_file()
        }
    objects: Objects
    if front is None:
        from dni_runtime.schedulers.kubernetes.training import Training

        objects = Training(
            name=name, chain=prepared.chain, workers=prepared.replicas, plan=planned.plan,
            files=files, cluster=cluster,
        )  # fmt: skip
    else:
        from dni_runtime.schedulers.kubernetes.service import Service, served_files
        from dni_runtime.serving.settings import Settings

        assert prepared.front is not None
        token = Settings(token_file=values["token_file"]).token()
        objects = Service(
            name=name, chain=prepared.chain, workers=(prepared.front, *prepared.replicas),
            plan=planned.plan, files=served_files(name, prepared, front, files), cluster=cluster,
            front=front, token=None if token is None else token.decode(),
        )  # fmt: skip
    rules = planned.plan.restart
    if front is None and rules.scope == "chain" and rules.policy == "on-failure":
        tell(
            f"all modules begin again together, at most {rules.limit} times ('restart.limit'); a "
            "drained node, and a pod that waits in vain for another one, count, too"
        )
    written = {file: some for file, some in objects.manifests().items() if some}
    _write(out, written)
    for file in written:
        click.echo(str(out / file))
    if loose := [image for image in cluster.images.values() if "@sha256:" not in image]:
        tell(f"not pinned by a digest, so a registry may change it: {', '.join(loose)}")


_OF_TRAINING = ("queue", "claim", "storage", "data_claim", "no_jobset", "data")


def _trained(chain: Path, values: dict[str, Any]) -> CheckedChain:
    from dni_runtime.plan.prepare import prepare

    return prepare(chain, data=values["data"])


def _served(source: str, values: dict[str, Any]) -> tuple[CheckedChain, FrontSettings]:
    from dni_runtime.api.answering import answering
    from dni_runtime.network.piece import BORROWED
    from dni_runtime.schedulers.kubernetes.service import TOKEN, for_pods
    from dni_runtime.serving.documents import FrontSettings, Settings
    from dni_runtime.serving.settings import Settings as HttpSettings

    its = options.chosen_run(source, values["runs"])
    its.check_trusted()
    cut = its.choose_cut(values["cut"])
    how = Settings(
        source=its.directory.root, http=HttpSettings(), **options.serving_settings(values)
    )
    signature, prepared = answering(its, cut, how)
    prepared = for_pods(prepared)
    http = HttpSettings(
        name=prepared.chain.name,
        host="::",
        port=values["port"] or 8000,
        token_file=Path(TOKEN, "token"),
        token_kept=True,
        probe_s=10,
    )
    version = "1"
    if its.record.release is not None:
        version = its.record.release.rpartition(":")[2]
        # Its images have the weights, but for the exits' heads and what modules share.
        given = {
            name: {
                key: tensor
                for key, tensor in weights.items()
                if name not in prepared.modules or BORROWED in key
            }
            for name, weights in prepared.initial.items()
        }
        given = {name: weights for name, weights in given.items() if weights}
        prepared = replace(prepared, initial=given)
    return prepared, FrontSettings(
        inputs=dict(signature.inputs),
        outputs=dict(signature.outputs),
        preprocessing=signature.preprocessing,
        modules=len(prepared.replicas),
        version=version,
        exit_wait_s=how.exit_wait_s,
        http=http,
    )


def _by_module(images: Sequence[str]) -> dict[str, str]:
    """Return the images by module; under "" that of all others."""
    pairs = [image.rpartition("=")[::2] for image in images]
    for module, image in pairs:
        if not re.fullmatch(r"[\w.\[\]:-]+(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", image):
            raise UsageError(
                f"--image: {image!r} is not an image",
                hint="write REPOSITORY@sha256:DIGEST, or REPOSITORY:TAG",
            )
        if [one for one, _ in pairs].count(module) > 1:
            raise UsageError(f"--image: there are two for {module or 'all modules'!r}")
    return dict(pairs)


def _write(out: Path, files: dict[str, list[dict[str, object]]]) -> None:
    import yaml

    from dni_runtime.files import write_atomic

    class Dumper(yaml.SafeDumper):
        """Texts of several lines as they are, and no references, for readers."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text_of(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        # kubectl reads more words as numbers and truth values than PyYAML does: 1e3, 0o17, y, n
        other = re.match(r"[-+.]*\d|[yYnN]$", text)
        style = "|" if "\n" in text else "'" if other else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, text_of)
    out.mkdir(parents=True, exist_ok=True)
    for name, objects in files.items():
        text = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, allow_unicode=True)
        write_atomic(out / name, text, mode=0o600 if name == "keys.yaml" else 0o644)
