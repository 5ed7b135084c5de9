"""The process group of torch.distributed that the replicas of a module form.

They find each other by files in the run directory: no port is open for that, and only the owner of
the run can write there. Their own connections are neither encrypted nor authenticated
(docs/security.md), and a group is broken as soon as one of its processes has ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from dni_runtime.core.replication import ReplicaMessage, SharedWeights
from dni_runtime.core.replication.hooks import hook_of
from dni_runtime.errors import UnavailableError, WorkerError
from dni_runtime.files import write_atomic
from dni_runtime.link.address import interface_name
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import LinksSpec, WorkerSpec
from dni_runtime.spec.named import module_of

_LOOK_S = 0.05
_TIMEOUT = timedelta(days=7)  # it must not time out: the supervisor decides which replica is lost
_LOOPBACK = "lo"


class FolderStore(Store):
    """A key-value store (``torch.distributed.Store``) of which each value is a file of a folder.

    ``FileStore`` needs locks, which network file systems may lack, and ``TCPStore`` an open port.
    The folder is the same for all; ``over`` ends all waiting.
    """

    def __init__(self, folder: Path, over: threading.Event) -> None:
        super().__init__()
        self._folder, self._over = folder, over
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        write_atomic(self._file(key), value, durable=False)

    def get(self, key: str) -> bytes:
        """Return a value, as soon as there is one."""
        while True:
            with contextlib.suppress(OSError):  # a file system may be unavailable for a moment
                return self._file(key).read_bytes()
            if self._over.wait(_LOOK_S):
                raise WorkerError("the worker ends before its process group is complete")

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are values for all keys."""
        return all(self._file(key).exists() for key in keys)

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


class Group:
    """A replica's part in the process group of its module.

    ``form``, ``mean`` and ``part`` may wait for the other replicas.
    """

    def __init__(
        self,
        shared: SharedWeights,
        spec: WorkerSpec,
        run: RunDir,
        *,
        begun: int,  # the start of the whole chain: each has a group of its own
        device: torch.device,  # where rows lie
        links: LinksSpec,  # their interface is the group's if it is on several hosts
    ) -> None:
        assert spec.backend is not None
        self.sent = 0  # bytes, if messages go round in a ring
        self._shared = shared
        self._backend, self._module = spec.backend, module_of(spec.module)
        self._rank, self._size = spec.replica - 1, spec.replicas
        self._device, self._links = device, links
        self._over = threading.Event()
        self._store = FolderStore(run.group(self._module) / str(begun), self._over)
        self._hook: Callable[[Tensor], int] | None = None
        if spec.compression is not None:
            self._hook = hook_of(spec.compression, shared.gradients)
        if not dist.is_backend_available(self._backend):
            raise UnavailableError(
                f"this torch ({torch.__version__}) has no backend {self._backend!r}",
                hint="install a build of torch for this machine's GPUs, or set "
                "'replication.backend: gloo'",
            )
        if self._backend == "nccl" and device.type != "cuda":
            raise UnavailableError(
                f"'replication.backend: nccl' needs a GPU, and {spec.module!r} runs on {device}",
                hint="set 'device: cuda', or 'replication.backend: gloo'",
            )

    def form(self) -> None:
        """Meet the other replicas."""
        with self._broken():
            self._say("host", _host())
            one_host = len({self._store.get(self._key("host", rank)) for rank in self._all}) == 1
            interface = self._links.interface
            if not one_host and interface is None:
                raise UnavailableError(
                    f"the replicas of {self._module!r} are on several hosts, but no network "
                    "interface is set",
                    hint="set 'links.interface'",
                )
            name = _LOOPBACK if one_host or interface is None else interface_name(interface)
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
            dist.init_process_group(
                self._backend,
                store=self._store,
                rank=self._rank,
                world_size=self._size,
                timeout=_TIMEOUT,
            )

    def mean(self, offer: ReplicaMessage) -> ReplicaMessage:
        """Return the mean of all replicas' offers, with the sum of their weights."""
        row, weight = offer.row, 0.0 if offer.row is None else offer.weight
        counts = [weight, float(row is not None), float(offer.asks)]
        with self._broken():
            sums = torch.tensor(counts, dtype=torch.float64, device=self._device)
            self._sum_up(sums)
            total, rows, asks = sums.tolist()
            if not rows:
                return ReplicaMessage(asks=asks > 0)
            if row is None:
                row = torch.zeros(self._shared.size, device=self._device)
            else:
                row *= weight / total if total else 1 / rows
            split = 0 if self._hook is None else self._shared.strategy.gradients
            if self._hook is not None and split:
                row[:split] *= self._size  # hooks divide by it
                self._count(self._hook(row[:split]))
            self._sum_up(row[split:])
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return ReplicaMessage(row, total, asks=asks > 0)

    def part(self, deadline_s: float) -> None:
        """Wait until all others are done with the group, too."""
        with contextlib.suppress(OSError):  # a full disk is no reason to fail at the end
            self._say("over", "")
        until_s, others = time.monotonic() + deadline_s, [self._key("over", it) for it in self._all]
        while not self._store.check(others) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End all waiting for others that have not come yet.

        The group's connections end with the process: gloo's orderly end may take long.
        """
        self._over.set()

    @property
    def _all(self) -> range:
        return range(self._size)

    def _key(self, what: str, rank: int) -> str:
        return f"{what}.{rank}"

    def _say(self, what: str, value: str) -> None:
        self._store.set(self._key(what, self._rank), value)

    def _sum_up(self, numbers: Tensor) -> None:
        """Replace numbers by their sums over all replicas."""
        dist.all_reduce(numbers)
        self._count(numbers.nbytes)

    def _count(self, size: int) -> None:
        self.sent += size * 2 * (self._size - 1) // self._size

    @contextlib.contextmanager
    def _broken(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch.distributed.DistError is the former
            # gloo: "[file:line] what. what may have caused it"
            what = str(error).splitlines()[0].partition(". ")[0].rpartition("] ")[2]
            raise WorkerError(
                f"the process group of {self._module!r} is broken: {what}",
                hint="another replica has ended: see its log",
            ) from error


def _host() -> str:
    """Return what processes have in common that reach each other by loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
