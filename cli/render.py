"""Files for other programs: ``render kubernetes``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from dni_runtime.errors import UsageError
from dnictl.options import chain_argument, data_option, level_option, planned_run, tell


@click.group()
def render() -> None:
    """Write files by which other programs start a chain."""


@render.command()
@chain_argument
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), required=True,
              help="Folder for the files; must not exist, or be empty.")  # fmt: skip
@click.option("--image", "images", multiple=True, required=True, metavar="[MODULE=]IMAGE",
              help="Image of all modules, or of one: REPOSITORY@DIGEST.")  # fmt: skip
@click.option("--name", metavar="NAME", help="The run's name (default: the chain's).")
@click.option("--namespace", metavar="NAME", help="Namespace of the objects.")
@click.option("--queue", metavar="NAME", help="Kueue's queue that admits the run.")
@click.option("--claim", metavar="NAME", help="A volume claim for the run (default: a new one).")
@click.option("--storage", default="10Gi", show_default=True, help="Size of the new one.")
@click.option("--data-claim", metavar="NAME", help="A volume claim that has the data.")
@click.option("--user", type=click.IntRange(1), default=1000, show_default=True,
              help="User and group id of the pods, to whom the volume belongs.")  # fmt: skip
@click.option("--no-jobset", is_flag=True, help="Write plain Jobs, for clusters without JobSet.")
@data_option
@level_option
def kubernetes(
    chain: Path,
    out: Path,
    images: tuple[str, ...],
    name: str | None,
    namespace: str | None,
    queue: str | None,
    claim: str | None,
    storage: str,
    data_claim: str | None,
    user: int,
    no_jobset: bool,
    data: Path | None,
    log_level: str,
) -> None:
    """Write a training's objects for Kubernetes: a JobSet, and what it needs.

    It talks to no cluster: look at the files, then 'kubectl apply -f FOLDER'. keys.yaml holds
    secrets.

    \b
    Example:
      dnictl render kubernetes chain.yaml -o k8s --image registry.example/digits@sha256:...
    """
    import tempfile

    from dni_runtime.plan.prepare import prepare
    from dni_runtime.plan.settings import StartSettings
    from dni_runtime.schedulers.kubernetes import Cluster, Training

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out: {str(out)!r} is not an empty folder", hint="name a new one")
    cluster = Cluster(
        images=_by_module(images),
        namespace=namespace,
        queue=queue,
        claim=claim,
        data_claim=data_claim,
        storage=storage,
        user=user,
        jobset=not no_jobset,
    )
    prepared = prepare(chain, data=data)
    if unknown := set(cluster.images) - {"", *prepared.modules}:
        raise UsageError(
            f"--image: chain {prepared.chain.name!r} has no module {min(unknown)!r}",
            hint=f"its modules: {', '.join(prepared.modules)}",
        )
    name = name or prepared.chain.name
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / name.replace("/", "-")
        settings = StartSettings(root, "process", scheduler="kubernetes", log_level=log_level)
        planned = planned_run(prepared, settings)
        run = planned.create()
        files = {
            str(path.relative_to(run.root)): path.read_bytes()
            for path in sorted(run.root.rglob("*"))
            if path.is_file()
        }
    training = Training(
        name, prepared.chain, prepared.replicas, planned.plan, files, cluster
    ).manifests()
    _write(out, training)
    for file in training:
        click.echo(str(out / file))
    loose = [image for image in cluster.images.values() if "@sha256:" not in image]
    if loose:
        tell(f"not pinned by a digest, so a registry may change it: {', '.join(loose)}")


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
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, text_of)
    out.mkdir(parents=True, exist_ok=True)
    for name, objects in files.items():
        text = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, allow_unicode=True)
        write_atomic(out / name, text, mode=0o600 if name == "keys.yaml" else 0o644)
