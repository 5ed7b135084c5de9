"""Commands on images: ``build``, ``verify``, ``inspect``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import DniError, ImageError
from dnictl import options
from dnictl.terminal import answered, json_wanted, say, tell

if TYPE_CHECKING:
    from dni_runtime.image.build import BuildResult
    from dni_runtime.image.plan import BuildPlan
    from dni_runtime.image.progress import Reporter, Step


@click.command()
@options.chain
@options.out
@options.data
@click.option("--full", is_flag=True, help="Build each module's image from its own definition.")
@click.option("--sign", is_flag=True, help="Sign the images, with your PGP key or with --key.")
@click.option(
    "--key", type=options.THERE, help="Private key in PEM form to sign with (implies --sign)."
)
@click.option("--force", is_flag=True, help="Rebuild everything, the base image too.")
@click.option(
    "--locked", is_flag=True,
    help="Install exactly the packages that dni.lock in --out names, by hash.",
)  # fmt: skip
@click.option(
    "--oci", type=options.FOLDER, metavar="FOLDER",
    help="Write them as plain OCI images, too: a layout, for Podman, Docker, Kubernetes.",
)  # fmt: skip
@click.option("--notest", is_flag=True, help="Do not run the images' %test.")
@click.option("--dry-run", is_flag=True, help="Print what would be built; build nothing.")
@click.option("--verbose", "-v", is_flag=True, help="Show the builder's whole output.")
@options.json
def build(
    chain: Path,
    out: Path,
    data: Path | None,
    sign: bool,
    key: Path | None,
    oci: Path | None,
    notest: bool,
    dry_run: bool,
    verbose: bool,
    **flags: bool,
) -> None:
    """Build the images that are out of date, one for each module.

    The base image (system, Python, torch) is built once and cached; each module's image is a copy
    of it with a small layer.

    \b
    Examples:
      dnictl build
      dnictl build chain.yaml --sign
      dnictl build --locked          (the packages of images/dni.lock)
    """
    from dni_runtime.image.apptainer import find_apptainer
    from dni_runtime.image.base import BuildOptions, cache_folder
    from dni_runtime.image.build import build_images
    from dni_runtime.image.layers import ModuleBuild
    from dni_runtime.image.plan import plan_build
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.spec.load import naming_file

    prepared = prepare(chain, data=data, tries=False)
    modules = [ModuleBuild(worker, prepared.sources) for worker in prepared.workers]
    image = prepared.chain.image_to_build
    how = BuildOptions(
        out=out.absolute(),
        cache=cache_folder(),
        folder=prepared.base.absolute(),
        test=not notest,
        sign=sign or key is not None,
        key=key,
        **flags,
    )
    with naming_file(chain):
        if dry_run:
            _show_plan(plan_build(modules, image, how), out)
            return
        tool = find_apptainer()
        with _reporting(verbose) as report:
            result = build_images(modules, image, how, tool=tool, report=report)
            if oci is not None:
                from dni_runtime.image.oci import Layout
                from dni_runtime.image.tarform import write_oci

                images = {name: out / one.image for name, one in result.lock.modules.items()}
                made = write_oci(tool, images, Layout(oci), image.environment)
                tell("\n".join(f"oci:{oci}:{name}  {one.digest}" for name, one in made.items()))
    _show_result(result, out)


@click.command()
@click.argument("images", nargs=-1, type=options.PATH, metavar="[IMAGE]...")
@options.out
@click.option(
    "--key", type=options.THERE, help="Public key in PEM form (default: your PGP keyring)."
)
@click.option("--signed", is_flag=True, help="Refuse images that are not signed.")
@options.json
def verify(images: tuple[Path, ...], out: Path, key: Path | None, signed: bool) -> None:
    """Compare images with dni.lock, and check their signatures.

    Without IMAGE all images in --out are checked.

    \b
    Examples:
      dnictl verify
      dnictl verify images/bottom.sif --key public.pem
    """
    from dni_runtime.image.check import locked_images, verify_image

    verdicts: list[dict[str, Any]] = []
    errors: list[DniError] = []
    for path in images or locked_images(out):
        try:
            image = verify_image(path, key=key, require_signature=signed)
        except DniError as error:
            errors.append(error)
            verdict, text = {"valid": False, "error": error.message}, "BAD"
        else:
            verdict = {"valid": True, "sha256": image.sha256, "signed": image.signed}
            text = f"ok  sha256 {image.sha256[:16]}…, "
            text += "signature good" if image.signed else "not signed"
        verdicts.append({"image": str(path), **verdict})
        if not json_wanted():
            say(f"{path}: {text}")
    answered(verdicts)
    if len(errors) == 1 or (errors and not all(isinstance(e, ImageError) for e in errors)):
        raise errors[0]
    if errors:
        text = "\n".join(error.message for error in errors)
        raise ImageError(f"{len(errors)} of {len(verdicts)} images:\n{text}", hint=errors[0].hint)


@click.command()
@click.argument("image", type=options.PATH)
@options.json
def inspect(image: Path) -> None:
    """Show an image's labels, and the spec of its module.

    \b
    Example:
      dnictl inspect images/bottom.sif
    """
    from dni_runtime.image.apptainer import find_apptainer
    from dni_runtime.image.check import inspect_image

    seen = inspect_image(find_apptainer(), image)
    if answered({"image": str(image), "labels": seen.labels, "module": seen.module}):
        return
    import yaml

    width = max(map(len, seen.labels), default=0)
    for name, value in sorted(seen.labels.items()):
        say(f"{name:{width}}  {value}")
    say("\n" + yaml.safe_dump(seen.module, sort_keys=False, allow_unicode=True).rstrip("\n"))


def _show_plan(plan: BuildPlan, out: Path) -> None:
    base = plan.base
    state = "is ready" if base.ready else "would be built"
    name = base.image.name if base.image else "its wheels would be downloaded first"
    modules = [
        {
            "module": p.module.name,
            "build": p.reason is not None,
            "sign": p.sign,
            "reason": p.reason,
        }
        for p in plan.modules
    ]
    image = str(base.image) if base.image else None
    if answered({"base": {"image": image, "ready": base.ready}, "modules": modules}):
        return
    click.echo(f"base image: {state} ({name})")
    for entry in plan.modules:
        what = "would be signed" if entry.sign else "is up to date"
        what = f"would be built ({entry.reason})" if entry.reason else what
        click.echo(f"{out / entry.module.name}.sif: {what}")


def _show_result(result: BuildResult, out: Path) -> None:
    if answered({"lock": str(result.path), "built": list(result.built)}):
        return
    for entry in result.lock.modules.values():
        click.echo(str(out / entry.image))
    tell(f"{len(result.built)} of {len(result.lock.modules)} images built, see {result.path}")


@contextmanager
def _reporting(verbose: bool) -> Iterator[Reporter]:
    """Progress on stderr: a live line per image on a terminal, plain lines elsewhere."""
    if verbose or not sys.stderr.isatty():
        yield _plain(verbose)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.fields[subject]:<12}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bars:

        def report(step: Step) -> None:
            text = escape(step.text[: max(20, console.width - 28)])
            if step.subject not in tasks:
                tasks[step.subject] = bars.add_task(text, total=1, subject=step.subject)
            forms = {"line": f"[dim]{text}[/]", "same": f"{text} (up to date)"}
            shown, ended = forms.get(step.state, text), step.state in ("done", "same")
            bars.update(tasks[step.subject], description=shown, completed=1 if ended else None)

        yield report


_QUIET_S = 15.0
"""Seconds between shown lines of a long build, without a terminal."""


def _plain(verbose: bool) -> Reporter:
    shown = time.monotonic()

    def report(step: Step) -> None:
        nonlocal shown
        now = time.monotonic()
        if step.state == "line" and not verbose and now - shown < _QUIET_S:
            return
        shown = now
        words: Sequence[str] = {
            "start": [step.text],
            "line": ["|", step.text],
            "done": ["done:", step.text],
            "same": [step.text, "(up to date)"],
        }[step.state]
        tell(f"{step.subject}: {' '.join(words)}")

    return report
