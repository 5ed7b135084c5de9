"""Detection of a package upgrade during a run: a restarted worker uses the new version."""

from __future__ import annotations

from collections.abc import Mapping

from dni_runtime import __version__
from dni_runtime.errors import HandshakeError

STARTED_WITH = "DNI_STARTED_WITH"
"""Environment variable with the versions that the run was started with."""


def this_version() -> str:
    """Return this package's value of ``STARTED_WITH``: its version and its links' protocol."""
    from dni_runtime.wire import PROTOCOL_VERSION  # imports numpy: not only to read plans

    return f"{__version__} {PROTOCOL_VERSION}"


def replaced(environ: Mapping[str, str]) -> str | None:
    """Return a warning if the run was started with another version of this package.

    Raises ``HandshakeError`` if the links of the two versions are incompatible.
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
            f"{what}: their links are incompatible (protocol {protocol}, {own_protocol})",
            hint="'dnictl resume' continues from the newest checkpoint with all modules in the new "
            "version; to restart a single module, reinstall the old one",
        )
    return f"{what}: other modules still run the old one; 'dnictl stop', then 'dnictl resume'"
