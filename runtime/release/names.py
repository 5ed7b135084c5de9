"""Names of releases, and of their parts: ``digits:1.2.0`` here, ``oci://host/name:1.2.0`` there."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dni_runtime.errors import UsageError
from dni_runtime.run.releases import parse_name

_REPOSITORY = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
_ADDRESS = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(?::\d+)?|\[[0-9a-fA-F:]+\](?::\d+)?)"
    rf"/(?P<repository>{_REPOSITORY})"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)

HUB = "registry-1.docker.io"
HUB_NAMES = ("docker.io", "index.docker.io", HUB)
"""What Docker Hub is called: by people, by itself, and where its registry is."""


@dataclass(frozen=True)
class Address:
    """A release in a registry, or all of its versions."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address; raises ``UsageError`` if it is none."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{text!r} is not the address of a release",
                hint="oci://HOST/NAME:VERSION, or oci://HOST/NAME@sha256:…; names are lower-case",
            )
        return cls(**match.groupdict())

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"oci://{self.host}/{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"

    @property
    def reference(self) -> str | None:
        """What names the release in its repository."""
        return self.digest or self.tag

    def beside(self, name: str) -> Address:
        """Return a further repository: Docker Hub's have two levels (docker/hub-feedback#1404)."""
        joint = "-" if self.host in HUB_NAMES else "/"
        return replace(self, repository=f"{self.repository}{joint}{name}")


def parse_local(text: str) -> tuple[str, str]:
    """Return name and version of a release; raises ``UsageError``."""
    parsed = parse_name(text)
    if parsed is None:
        raise UsageError(
            f"{text!r} is not the name of a release",
            hint="NAME:VERSION, as in digits:1.2.0; see 'dnictl models'",
        )
    return parsed


CHAIN = "application/vnd.dni.chain.v1+json"
"""An index: a manifest for each module, and one for the run."""
MODULE = "application/vnd.dni.module.v1+json"
"""A module's manifest: what its image consists of; its config has labels and the serving spec."""
RECORD = "application/vnd.dni.record.v1+json"
"""The run's manifest: its files, the lock of the images, the report; its config has the front."""

BASE = "application/vnd.dni.base.v1.squashfs"
LAYER = "application/vnd.dni.layer.v1.squashfs"
WEIGHTS = "application/vnd.cncf.model.weight.v1.raw"
"""A safetensors file."""
MODEL = "application/vnd.cncf.model.manifest.v1+json"
MODEL_CONFIG = "application/vnd.cncf.model.config.v1+json"
FILE_PATH = "org.cncf.model.filepath"
"""All weights of a chain (github.com/modelpack/model-spec, ``docs/spec.md``, ``config.md``)."""
RUN = "application/vnd.dni.run.v1.tar"
REPORT = "application/vnd.dni.report.v1+json"

TITLE = "org.opencontainers.image.title"
VERSION = "org.opencontainers.image.version"
CREATED = "org.opencontainers.image.created"
LICENSES = "org.opencontainers.image.licenses"
