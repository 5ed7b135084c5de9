"""Whether the package was replaced while a run goes on: a restarted worker is of the new one."""

from __future__ import annotations

from collections.abc import Mapping

from dni_runtime import __version__
from dni_runtime.errors import HandshakeError

STARTED_WITH = "DNI_STARTED_WITH"
"""The variable that tells a worker with what its run was started."""


def this_version() -> str:
    """What it holds: the version of this package, and of the protocol of its links."""
    from dni_runtime.wire import PROTOCOL_VERSION  # numpy: not for those who only read plans

    return f"{__version__} {PROTOCOL_VERSION}"


def replaced(environ: Mapping[str, str]) -> str | None:
    """What to warn of, where the run was started with another version of this package.

    Raises:
        HandshakeError: The links of that version do not fit to this one's.
    """
    this = this_version()
    started_with = environ.get(STARTED_WITH, this)
    if started_with == this:
        return None
    version, _, protocol = started_with.partition(" ")
    own_protocol = this.partition(" ")[2]
    what = f"the run was started with dni-runtime {version}, and {__version__} is installed now"
    if protocol != own_protocol:
        raise HandshakeError(
            f"{what}: their links differ (protocol {protocol}, {own_protocol})",
            hint="'dnictl resume' goes on from the newest checkpoint with all modules in the new "
            "version; a restart of one module needs the old one",
        )
    return f"{what}: other modules still run the old one; 'dnictl stop', then 'dnictl resume'"
