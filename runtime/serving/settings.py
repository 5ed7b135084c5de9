"""How a model is served."""

from __future__ import annotations

import os
import stat
from ipaddress import ip_address
from pathlib import Path

from pydantic import Field

from dni_runtime.errors import UsageError
from dni_runtime.spec.named import Frozen, Name
from dni_runtime.spec.predicting import ROWS


class Settings(Frozen):
    """How a model is served."""

    name: Name = "model"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: a free one
    token_file: Path | None = None  # of the token that requests must bear
    token_kept: bool = False  # its mode does not matter: a launcher keeps it from others
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_batch: int = Field(default=64, ge=1, le=ROWS)  # rows
    batch_wait_s: float = Field(default=0.0, ge=0)  # of a batch that is not full, for more rows
    deadline_s: float = Field(default=30.0, gt=0)  # of a request: to send it, and to answer it
    max_waiting: int = Field(default=4096, ge=1)  # rows
    rate: float | None = Field(default=None, gt=0)  # requests a second of each client, by address
    max_body_bytes: int = Field(default=64 << 20, ge=1)
    probe_s: float = Field(default=10.0, gt=0)  # a batch went through all modules: ready so long

    def token(self) -> bytes | None:
        """Return the token, if one is required.

        Raises ``UsageError`` if its file is not safe, or other hosts can connect without one.
        """
        if self.token_file is None:
            if not self._loopback():
                raise UsageError(
                    f"without a token, no other host may connect, but they can at {self.host!r}",
                    hint="set a token file, or serve at 127.0.0.1",
                )
            return None
        path = str(self.token_file)
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                token = file.read(4096).strip()
        except OSError as error:
            raise UsageError(f"the token file {path!r}: {error.strerror}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO) and not self.token_kept:
            raise UsageError(
                f"the token file {path!r} is open to others (mode {stat.S_IMODE(mode):04o})",
                hint=f"chmod 600 {path}, and write another token: others may have read this one",
            )
        if not (token and token.isascii()):
            what = "has other characters than ASCII" if token else "is empty"
            raise UsageError(
                f"the token file {path!r} {what}", hint=f"openssl rand -hex 32 > {path}"
            )
        return token

    def _loopback(self) -> bool:
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name, of any host
