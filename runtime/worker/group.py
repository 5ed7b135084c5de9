"""The process group of torch.distributed that the replicas of a module form.

They find each other by files in the run directory: no port is open for that, and only the owner of
the run can write there. Their own connections are neither encrypted nor authenticated
(docs/security.md), and a group is broken as soon as one of its processes has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from dni_runtime.core.replication import ReplicaMessage, SharedWeights
from dni_runtime.core.replication.compression import PowerSgd
from dni_runtime.errors import UnavailableError, WorkerError
from dni_runtime.files import write_atomic
from dni_runtime.link import Marker
from dni_runtime.link.address import interface_name
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import Choice, LinksSpec, WorkerSpec
from dni_runtime.spec.choices import parse_options
from dni_runtime.spec.named import module_of
from dni_runtime.worker.exchange import Exchange, sync_at
from dni_runtime.worker.signals import StopRequest

logging.getLogger(powerSGD_hook.__name__).setLevel(logging.WARNING)  # else a line for each step

_VANILLA_STEPS = 2  # the fewest that torch allows before steps with PowerSGD


class Bucket:
    """Gradients in one row, as hooks see them (``torch.distributed.GradBucket``).

    Communication hooks are written for DistributedDataParallel, one bucket of gradients at a time
    (pytorch.org/docs/stable/ddp_comm_hooks.html); here a module's gradients are one bucket.
    """

    def __init__(self, row_N: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        parts = torch.split(row_N, [torch.Size(shape).numel() for shape in shapes])
        self._row_N = row_N
        self._gradients = [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self._row_N

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def hook_of(choice: Choice, shapes: Sequence[Sequence[int]]) -> Callable[[Tensor], int]:
    """Return what averages a row of gradients in place, over the default process group.

    It returns how many bytes of each replica's row have been exchanged.
    """
    if choice.name == "bfloat16":

        def averaged(row_N: Tensor) -> int:
            bucket: Any = Bucket(row_N, shapes)
            default_hooks.bf16_compress_hook(None, bucket).wait()  # type: ignore[arg-type]
            return row_N.numel() * torch.bfloat16.itemsize

        return averaged
    options = parse_options(PowerSgd.Options, choice, ("replication", "compression"))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=options.rank, start_powerSGD_iter=_VANILLA_STEPS
    )

    def averaged_by_rank(row_N: Tensor) -> int:
        before = state.total_numel_after_compression
        bucket: Any = Bucket(row_N, shapes)
        powerSGD_hook.powerSGD_hook(state, bucket).wait()
        sent = state.total_numel_after_compression - before
        return (sent or row_N.numel()) * row_N.element_size()

    return averaged_by_rank


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
        return all(self._file(key).exists() for key in keys)

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


class Group:
    """A replica's part in the process group of its module."""

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
            if row is None or (total and not weight):  # it may have infinities, as masks have
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


class Collective(Exchange):
    """A replica's part in the sharing of a process group (``replication.backend``).

    The group's all-reduce computes the mean of what all offer, and each replica makes the result of
    it by itself. There are no links; if a replica is lost, all workers begin again at the newest
    cut (``plan/settings.py``). The group has a thread, so that a wait does not stop the worker's
    loop.
    """

    def __init__(self, shared: SharedWeights, group: Group, stop: StopRequest) -> None:
        super().__init__(shared, inputs=[], done=0, gone=lambda name: False)
        self._group, self._stop = group, stop
        self._thread = ThreadPoolExecutor(1, "replicas")
        self._formed = self._thread.submit(group.form)
        self._mean: Future[ReplicaMessage] | None = None

    def begin(self, marker: Marker) -> None:
        offer = self._shared.offer(sync_at(marker))
        self._mean = self._thread.submit(self._group.mean, offer)
        self._mean.add_done_callback(lambda _: self._stop.wake())

    def done(self) -> bool:
        if self._formed.done():
            self._formed.result()
        if self._mean is None or not self._mean.done():
            return False
        mean, self._mean = self._mean.result(), None
        self._stop.drain()
        self._shared.settle(mean)
        self.sent = self._group.sent
        return True

    def finish(self, deadline_s: float) -> None:
        self._group.part(deadline_s)

    def close(self) -> None:
        self._group.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
