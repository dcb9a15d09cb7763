"""The ranks of one trainer: where they meet, and what plain objects they exchange.

Every method is collective: all ranks call it in the same order. It returns when the slowest rank has
called it; a rank that died is the supervisor's matter, who ends the others.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.constants import default_pg_timeout

T = TypeVar("T")


@dataclass(frozen=True)
class Gang:
    """Process group of `size` ranks, this one being `rank`."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def meet(cls, rank: int, size: int, address: str, device: torch.device) -> Gang:
        """Join the gang at "host:port", where rank 0 listens. One rank alone needs no address.

        Also readies DeepSpeed, which takes its place from the environment.
        """
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_SIZE": str(size)}
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if size == 1:
            # DeepSpeed keeps the process's first groups for good: two trainers of one process share them.
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            torch.distributed.init_process_group(backend, store=_store(rank, size, address), rank=rank, world_size=size)
        _ready_deepspeed()
        return cls(rank, size, device)

    def gather(self, item: T) -> list[T]:
        """The plain objects of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items

    def leave(self) -> None:
        """Part in order: rank 0 keeps the store that the others say goodbye to."""
        self.gather(None)
        torch.distributed.destroy_process_group()


def _store(rank: int, size: int, address: str) -> TCPStore:
    """Rank 0 listens at the address and at no other, which torch by itself does on all of the machine's."""
    host, _, port = address.rpartition(":")
    listening = None if rank else socket.create_server((host, int(port)), backlog=size).detach()
    return TCPStore(host, int(port), size, is_master=not rank, timeout=default_pg_timeout, master_listen_fd=listening)


def _ready_deepspeed() -> None:
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)  # the import has set it again
    # Its shared-memory all-reduce serves inference alone, and compiling it takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
