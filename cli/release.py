"""Commands on releases: ``release``, ``push``, ``pull``, ``models``, ``diff``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.show import Column, megabytes, print_table
from dnictl.terminal import answered, say, tell

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.image.oci import Descriptor
    from dni_runtime.release.compare import Difference
    from dni_runtime.release.report import Report

_http_option = click.option(
    "--plain-http", is_flag=True, help="The registry has no TLS (one on this host may have none)."
)


@click.command()
@options.of_run
@click.option("--name", help="Name of the release; by default the chain's.")
@click.option("--version", required=True, help="Its version, as in 1.2.0.")
@options.cut
@click.option("--licence", "--license", metavar="SPDX", help="Licence of the weights.")
@click.option("--key", type=options.THERE,
              help="Private key in PEM form to sign with; by default your PGP key.")  # fmt: skip
@click.option("--unsigned", is_flag=True, help="Do not sign it.")
@options.images
@options.trust
@options.json
def release(
    run: Run,
    name: str | None,
    version: str,
    cut: str | None,
    licence: str | None,
    key: Path | None,
    unsigned: bool,
    images: Path,
) -> None:
    """Make a named version of a trained chain.

    Other machines pull and serve it. It has the chain's images, the weights of one checkpoint, the
    user's sources and a report; it is signed as a whole, and does not change. The same run always
    makes the same release.

    \b
    Examples:
      dnictl release --name digits --version 1.2.0
      dnictl push digits:1.2.0 oci://registry.example/models/digits
    """
    from dni_runtime.image.apptainer import usable_apptainer
    from dni_runtime.release.make import release_run
    from dni_runtime.release.signature import sign_release
    from dni_runtime.release.store import Store

    if unsigned and key is not None:
        raise UsageError("--key and --unsigned exclude each other")
    store, tool = Store(), usable_apptainer()
    run.check_trusted()
    chosen = run.choose_cut(cut)
    text = f"{name or run.record.chain}:{version}"
    with store.changing(tell):
        index = release_run(
            store, run.record, chosen, text, tool=tool, images=images.absolute(), licence=licence
        )
        if not unsigned:
            sign_release(tool, store.layout, index, key)
        store.add(index)
    _show(text, store.report(index), index)


@click.command()
@click.argument("name", metavar="NAME:VERSION")
@click.argument("address", metavar="oci://HOST/NAME[:VERSION]")
@click.option("--sif", is_flag=True, help="Send its images instead, for 'apptainer pull oras://'.")
@click.option("--oci", is_flag=True, help="Send its images instead, as plain OCI images.")
@_http_option
@options.json
def push(name: str, address: str, sif: bool, oci: bool, plain_http: bool) -> None:
    """Send a release to a registry. What is there already is not sent again.

    --oci prints the images as options of 'dnictl render kubernetes'.

    \b
    Examples:
      dnictl push digits:1.2.0 oci://registry.example/models/digits
      dnictl push digits:1.2.0 oci://registry.example/models/digits --oci
    """
    from dni_runtime.release import move
    from dni_runtime.release.names import Address
    from dni_runtime.release.registry import Repository
    from dni_runtime.release.store import Store

    target, moved = Address.parse(address), _Moved("sent")
    if sif and oci:
        raise UsageError("--sif and --oci exclude each other")
    if sif or oci:
        from dni_runtime.image.apptainer import usable_apptainer

        send = move.push_files if sif else move.push_oci
        sent = send(usable_apptainer(), Store(), name, target, plain_http, moved)
        if answered({module: str(there) for module, there in sent.items()}):
            return
        for module, there in sent.items():
            plain = str(there).removeprefix("oci://")
            say(f"oras://{plain}" if sif else f"--image={module}={plain}")
        return
    there = move.push(Store(), name, target, Repository(target, plain_http=plain_http), moved)
    if not answered({"address": str(there), "sent_bytes": moved.bytes}):
        tell(f"{moved}")
        say(str(there))


@click.command()
@click.argument("address", metavar="oci://HOST/NAME:VERSION[@sha256:…]")
@click.option("--key", type=options.THERE,
              help="Its signer's public key in PEM form; by default your PGP keyring.")  # fmt: skip
@click.option("--unsigned", is_flag=True, help="Take it whoever has written it.")
@_http_option
@options.json
def pull(address: str, key: Path | None, unsigned: bool, plain_http: bool) -> None:
    """Fetch a release from a registry.

    Its signature and all of its parts are checked. Then its name stands for a run: dnictl serve,
    predict, export. An address with a digest (@sha256:…) needs no signature; with --key it is
    checked, too.

    \b
    Example:
      dnictl pull oci://registry.example/models/digits:1.2.0
    """
    from dni_runtime.image.apptainer import find_apptainer
    from dni_runtime.release import move
    from dni_runtime.release.names import Address
    from dni_runtime.release.registry import Repository
    from dni_runtime.release.store import Store

    if unsigned and key is not None:
        raise UsageError("--key and --unsigned exclude each other")
    source, store, moved = Address.parse(address), Store(), _Moved("fetched")
    known = unsigned or (source.digest is not None and key is None)
    trust = move.Trust(None if known else find_apptainer(), key)
    with store.changing(tell):
        name = move.pull(store, source, Repository(source, plain_http=plain_http), trust, moved)
    tell(f"{moved}")
    index = store.find(name)
    _show(name, store.report(index), index)


@click.command()
@click.argument("address", required=False, metavar="[oci://HOST/NAME]")
@click.option("--remove", metavar="NAME:VERSION", help="Remove a release from this machine.")
@_http_option
@options.json
def models(address: str | None, remove: str | None, plain_http: bool) -> None:
    """List the releases here, or in a registry.

    \b
    Examples:
      dnictl models
      dnictl models oci://registry.example/models/digits
      dnictl models --remove digits:1.1.0
    """
    from dni_runtime.release.names import Address
    from dni_runtime.release.store import Store

    if address is not None and remove is not None:
        raise UsageError(
            "--remove is for releases on this machine", hint=f"omit {address}, or --remove"
        )
    if address is not None:
        from dni_runtime.release.registry import Repository

        source = Address.parse(address)
        tags = Repository(source, plain_http=plain_http).tags()
        versions = sorted(tag for tag in tags if not tag.endswith(".sig"))
        if answered({"versions": versions}):
            return
        for version in versions:
            say(str(replace(source, tag=version)))
        return
    store = Store()
    if remove is not None:
        with store.changing(tell):
            freed = store.remove(remove)
        if not answered({"removed": remove, "bytes": freed}):
            tell(f"removed {remove}: {megabytes(freed)}")
        return
    reports = {name: (index, store.report(index)) for name, index in store.releases().items()}
    if answered([_document(*row) for row in reports.values()]):
        return
    columns: list[Column[tuple[Descriptor, Report]]] = [
        Column("release", lambda row: f"{row[1].name}:{row[1].version}"),
        Column("figures", lambda row: _figures(row[1])),
        Column("from", lambda row: row[1].run),
        Column("digest", lambda row: row[0].digest[:19]),
    ]
    print_table(columns, list(reports.values()))


@click.command()
@click.argument("old", metavar="NAME:VERSION")
@click.argument("new", metavar="NAME:VERSION")
@options.json
def diff(old: str, new: str) -> None:
    """Say how two releases differ.

    In their settings and figures, and in parts of their images.

    \b
    Example:
      dnictl diff digits:1.1.0 digits:1.2.0
    """
    from dni_runtime.release.compare import differences
    from dni_runtime.release.store import Store

    changes = differences(Store(), old, new)
    if answered([{"what": what, "old": was, "new": now} for what, was, now in changes]):
        return
    columns: list[Column[Difference]] = [
        Column("what", lambda row: row[0]),
        Column(old, lambda row: row[1]),
        Column(new, lambda row: row[2]),
    ]
    print_table(columns, changes)
    if not changes:
        tell("they are the same")


class _Moved:
    """Says what is moved, and counts it."""

    def __init__(self, verb: str) -> None:
        self.bytes, self._verb, self._said = 0, verb, ""

    def __call__(self, blob: Descriptor, count: int) -> None:
        if blob.digest != self._said and blob.size > 1 << 20:
            tell(f"{blob.digest[:19]}: {megabytes(blob.size)}")
            self._said = blob.digest
        self.bytes += count

    def __str__(self) -> str:
        return f"{self._verb} {megabytes(self.bytes)}"


def _document(index: Descriptor, report: Report) -> dict[str, Any]:
    return report.model_dump(mode="json") | {"digest": index.digest}


def _show(name: str, report: Report, index: Descriptor) -> None:
    if answered(_document(index, report)):
        return
    say(f"{name} {index.digest}")
    say(f"  {report.chain}, checkpoint {report.checkpoint} of {report.run}")
    say(f"  {_figures(report) or 'no figures'}")


def _figures(report: Report) -> str:
    return ", ".join(
        f"{name} {value:.4g}" for name, value in report.figures.items() if value is not None
    )
