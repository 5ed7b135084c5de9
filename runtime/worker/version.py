"""Whether the package was replaced while a run goes on: a restarted worker is of the new one."""

from __future__ import annotations

from collections.abc import Mapping

from dni_runtime import __version__
from dni_runtime.errors import HandshakeError
from dni_runtime.wire import PROTOCOL_VERSION

STARTED_WITH = "DNI_STARTED_WITH"
"""The variable that tells a worker with what its run was started."""

THIS = f"{__version__} {PROTOCOL_VERSION}"
"""What it holds: the version of this package, and of the protocol of its links."""


def replaced(environ: Mapping[str, str]) -> str | None:
    """What to warn of, where the run was started with another version of this package.

    Raises:
        HandshakeError: The links of that version do not fit to this one's.
    """
    started_with = environ.get(STARTED_WITH, THIS)
    if started_with == THIS:
        return None
    version, _, protocol = started_with.partition(" ")
    what = f"the run was started with dni-runtime {version}, and {__version__} is installed now"
    if protocol != str(PROTOCOL_VERSION):
        raise HandshakeError(
            f"{what}: their links differ (protocol {protocol}, {PROTOCOL_VERSION})",
            hint="'dnictl resume' goes on from the newest checkpoint with all modules in the new "
            "version; a restart of one module needs the old one",
        )
    return f"{what}: other modules still run the old one; 'dnictl stop', then 'dnictl resume'"
