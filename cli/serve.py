"""``serve``: a trained network answers requests over HTTP; its versions."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import UsageError
from dnictl import options
from dnictl.show import console, modules_table
from dnictl.terminal import answered, noted, say, tell

if TYPE_CHECKING:
    from dni_runtime.serving.documents import ServiceState, What
    from dni_runtime.serving.settings import Settings as HttpSettings


@click.command()
@click.argument(
    "source", required=False, metavar="[RUN|FILE]", shell_complete=options.complete_runs
)
@options.runs
@click.option("--name", metavar="NAME", help="The service's name (default: the chain's).")
@options.detach
@click.option("--in-process", is_flag=True, help="The whole network in one process.")
@options.backend
@options.images
@options.hosts
@options.of_service()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any."
)
@click.option(
    "--tls", nargs=2, metavar="CERT KEY", type=options.THERE,
    help="Files of the certificate and its key, for HTTPS.",
)  # fmt: skip
@click.option(
    "--max-batch", type=click.IntRange(1, 4096), metavar="N", help="Most rows in a batch."
)
@click.option(
    "--batch-wait", "batch_wait_s", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
    help="Wait so long for a batch to fill (default: what queued during the last batch is one).",
)  # fmt: skip
@click.option(
    "--deadline", "deadline_s", type=click.FloatRange(0, min_open=True), default=30.0,
    show_default=True, metavar="SECONDS", help="Time in which a request is answered, or fails.",
)  # fmt: skip
@click.option(
    "--max-waiting", type=click.IntRange(1), default=4096, show_default=True, metavar="N",
    help="Rows that may wait; more are refused (429).",
)  # fmt: skip
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), metavar="N",
    help="Requests a second of one client, by its address; more are refused (429).",
)  # fmt: skip
@click.option(
    "--max-body", "max_body_bytes", type=click.IntRange(1), default=64 << 20, show_default=True,
    metavar="BYTES",
    help="Largest request; larger ones are refused (413).",
)  # fmt: skip
@click.option(
    "--probe", "probe_s", type=click.FloatRange(0, min_open=True), default=10.0,
    show_default=True, metavar="SECONDS",
    help="Ready: a batch has gone through all modules in this time.",
)  # fmt: skip
@click.option("--update", is_flag=True, help="Have a running service change to RUN or FILE.")
@click.option(
    "--canary", type=click.FloatRange(0, 100, min_open=True, max_open=True), metavar="PERCENT",
    help="With --update: give the new version only so many of the requests.",
)  # fmt: skip
@click.option("--promote", is_flag=True, help="Give the canary all requests.")
@click.option("--rollback", is_flag=True, help="Go back: drop the canary, else to the one before.")
@click.option("--stop", is_flag=True, help="Answer what is open, and end.")
@click.option("--status", is_flag=True, help="Show a service and its versions.")
@options.trust
@options.json
def serve(source: str | None, runs: Path, name: str | None, **values: Any) -> None:
    """Answer requests with a trained network, over HTTP.

    RUN is served by its modules, each in a process or container of its own, as it was trained;
    a FILE that 'dnictl export' wrote, or a run with --in-process, in one process. The protocol is
    the Open Inference Protocol, version 2.

    \b
    Examples:
      dnictl serve -d
      curl localhost:8000/v2/health/ready
      dnictl serve --update digits-20250101-120000
      dnictl serve --stop
    """
    from dni_runtime.api.services import (
        find_service,
        give_order,
        make_service,
        service_name,
        start_service,
    )
    from dni_runtime.serving.documents import Order, Settings

    orders: tuple[What, ...] = ("update", "promote", "rollback", "stop")
    actions = [what for what in (*orders, "status") if values[what]]
    if len(actions) > 1:
        raise UsageError(f"--{actions[0]} and --{actions[1]} exclude each other")
    if values["canary"] is not None and not values["update"]:
        raise UsageError("--canary is for --update")
    if actions and not values["update"] and source is not None:
        raise UsageError(f"--{actions[0]} takes no run", hint="name the service with --name")
    if actions:
        changes = {*orders, "status", *(("canary", "cut") if values["update"] else ())}
        for flag in options.flags_given(*(values.keys() - changes)):
            raise UsageError(
                f"--{actions[0]} changes no settings: {flag} is for the start of a service",
                hint=f"omit {flag}, or start another service",
            )
    how = options.serving_settings(values)
    path, cut = None, None
    if not actions or values["update"]:
        path, cut = _chosen(source, runs, values["cut"])
    if actions:
        state = find_service(name, runs)
        for what in orders:
            if values[what]:
                order = Order(
                    id=secrets.token_hex(4), what=what, source=path, cut=cut,
                    canary=values["canary"],
                )  # fmt: skip
                state = give_order(runs / state.name, order)
        _show(state)
        return
    assert path is not None
    if values["in_process"] or path.is_file():
        of_modules = {*options.SERVING, "backend", "images", "hosts"} - {"preprocess"}
        for flag in options.flags_given(*of_modules)[-1:]:
            raise UsageError(f"{flag} is for modules, and this is one process", hint=f"omit {flag}")
    folder = runs.absolute() / (name or service_name(path))
    settings = Settings(
        source=path,
        cut=cut,
        in_process=values["in_process"],
        backend=values["backend"],
        images=values["images"].absolute(),
        hosts=values["hosts"],
        trust=bool(noted("trust")),
        **how,
        http=_http(folder.name, values),
    )
    if values["detach"]:
        _show(start_service(folder, settings))
    else:
        make_service(folder, settings)
        from dni_runtime.api.service import Service

        Service(folder, settings, tell).serve()


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
def service(folder: Path) -> None:
    """Be the service in a folder, for --detach."""
    from dni_runtime.api.service import Service
    from dni_runtime.serving.documents import Settings

    settings = Settings.load(folder / "settings.json")
    if settings is None:
        raise UsageError(
            f"{str(folder)!r} is not a service's folder", hint="'dnictl serve -d' makes one"
        )
    Service(folder, settings, tell).serve()


def _chosen(source: str | None, runs: Path, choice: str | None) -> tuple[Path, int | None]:
    """Return the file, or the run and its checkpoint, that are meant."""
    if source is not None and Path(source).is_file():
        if choice is not None:
            raise UsageError("--from is for runs", hint=f"{source!r} is a file")
        return Path(source).absolute(), None
    its = options.chosen_run(source, runs)
    return its.directory.root, its.choose_cut(choice)


def _http(name: str, values: dict[str, Any]) -> HttpSettings:
    from dni_runtime.serving.settings import Settings as HttpSettings
    from dni_runtime.spec.choices import given

    cert, key = values["tls"] or (None, None)
    values = {**values, "name": name, "tls_cert": cert, "tls_key": key}
    chosen = {
        field: value.absolute() if isinstance(value, Path) else value
        for field in HttpSettings.model_fields
        if (value := values.get(field)) is not None
    }
    return given(HttpSettings, chosen)


def _show(state: ServiceState) -> None:
    from dni_runtime.measure.figures import MetricsReader
    from dni_runtime.run.record import Record

    if answered(state.model_dump(mode="json") | {"alive": state.alive}):
        return
    phase = state.phase if state.alive or state.phase in ("ended", "failed") else "killed"
    say(f"{state.name}: {phase}" + (f", {state.url}" if state.url else ""))
    for version in state.versions:
        cut = "" if version.cut is None else f", checkpoint {version.cut}"
        share = f", {version.share:g} % of the requests" if version.share else ""
        word = "not ready" if version.state == "ready" and version.error else version.state
        say(f"  version {version.name}: {word}{share}: {version.source}{cut}")
        if version.error:
            say(f"    {version.error}")
        if version.run is not None and version.state in ("ready", "draining"):
            record = Record.read(version.run)
            console().print(modules_table(MetricsReader(record, evaluations=1).read()))
