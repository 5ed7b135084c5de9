"""A service: what serves a network, what it is to do, and how it is (``service.json``)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from dni_runtime.run.documents.base import Document
from dni_runtime.run.documents.state import process_birth
from dni_runtime.serving.settings import Settings as HttpSettings
from dni_runtime.spec.edge import Preprocessing, TensorSpec

Phase = Literal["starting", "running", "draining", "ended", "failed"]

BEAT_S = 5.0
"""A service writes its state at least so often."""

What = Literal["update", "promote", "rollback", "stop"]


class Settings(Document):
    """What a service was started with (``settings.json``)."""

    source: Path  # a run, or an exported file
    cut: int | None = None  # the run's checkpoint
    in_process: bool = False
    backend: Literal["auto", "process", "apptainer"] = "auto"
    images: Path = Path("images")
    hosts: str | None = None
    # numbers of workers, by module; none: as many as have trained
    replicas: dict[str, int] = Field(default_factory=dict)
    trust: bool = False
    preprocess: bool = False  # requests have raw samples, as those of the training data were
    exit_accuracy: float | None = None  # points of accuracy that early exits may lose
    exit_confidence: float | None = None  # top probability at which samples leave, instead
    exit_wait_s: float = 2.0  # for the chain's output, until an exit answers for it
    ready_s: float = 120.0  # that a version may take to answer its first batch
    drain_s: float = 30.0  # that open requests may take at the end
    http: HttpSettings


class FrontSettings(Document):
    """What a front serves whose chain a launcher has started (``front.json`` of the run)."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    preprocessing: Preprocessing | None = None  # of the input, if requests have raw samples
    modules: int  # workers, and so batches on their way
    version: str = "1"
    exit_wait_s: float = 2.0
    drain_s: float = 30.0  # that open requests may take at the end
    http: HttpSettings


class Order(Document):
    """What a service is to do (``order.json``)."""

    id: str
    what: What
    source: Path | None = None  # of an update
    cut: int | None = None
    canary: float | None = None  # percent of the requests that the new version gets


class Version(Document):
    """One version of a service's network."""

    name: str
    source: Path
    cut: int | None = None
    written_ns: int | None = None  # when the file was, that it is from
    run: Path | None = None  # the directory of its workers' run; None: in the service's process
    state: Literal["starting", "ready", "draining", "stopped", "failed"] = "starting"
    share: float = 0.0  # percent of the requests that name no version
    error: str | None = None

    @property
    def changed(self) -> bool:
        """Whether it is from a file that is another one now."""
        if self.written_ns is None:
            return False
        return not self.source.is_file() or self.source.stat().st_mtime_ns != self.written_ns


class ServiceState(Document):
    """How a service is (``service.json``)."""

    name: str
    phase: Phase = "starting"
    pid: int = 0
    born: int | None = None  # start time of the process (``documents.state``)
    host: str = ""
    url: str | None = None
    started: float = 0.0  # Unix time
    updated: float = 0.0  # Unix time, by the clock of its host
    versions: tuple[Version, ...] = ()
    order: str | None = None  # id of the last order that was carried out
    error: str | None = None  # of that order, or of the service

    @property
    def alive(self) -> bool:
        """Whether its process runs; on another host, whether it has written this of late."""
        if self.phase in ("ended", "failed"):
            return False
        if self.host == os.uname().nodename:
            return process_birth(self.pid) == self.born
        return time.time() - self.updated < 12 * BEAT_S
