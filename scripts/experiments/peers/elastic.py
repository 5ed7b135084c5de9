"""torchft's local SGD and DiLoCo: replicas that agree on who takes part before each average.

Each process is a replica group of its own. The lighthouse, by which they agree, is in the first.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from peers.whole import Whole, nesterov

_SIOCGIFADDR = 0x8915  # netdevice(7)


class Torchft(Whole):
    """A replica that torchft averages with the others after ``every`` batches; all begin equal.

    With ``diloco`` averages are steps of an outer optimizer. The other processes have joined.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, diloco: bool, every: int, rank: int, world: int
    ) -> None:
        super().__init__(model, optimizer, rank, world)
        self.period = every
        address = _address(os.environ["GLOO_SOCKET_IFNAME"])
        told: list[Any] = [None]
        if rank == 0:
            self._lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=world)
            port = self._lighthouse.address().rpartition(":")[2]
            told = [f"http://{address}:{port}"]
        dist.broadcast_object_list(told)
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            min_replica_size=world,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=told[0],
            replica_id=str(rank),
            hostname=address,
            init_sync=False,
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
        )
        self._averages: Any
        if diloco:
            outer = nesterov(list(model.parameters()))
            self._averages = DiLoCo(self._manager, [model], optimizer, outer, sync_every=every)
        else:
            self._averages = LocalSGD(self._manager, model, optimizer, sync_every=every)
        self._averages.__enter__()


def _address(interface: str) -> str:
    """The address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFADDR, request)[20:24])
