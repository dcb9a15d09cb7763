"""The ranks of one trainer: they join a process group and exchange plain objects.

Every method is collective: all ranks call it in the same order. It returns when the slowest rank has
called it. If a rank dies, the supervisor ends the others.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.constants import default_pg_timeout

from flowrl.training.model.sequence_attention import SequenceGroup, make_sequence_group
from flowrl.training.settings import SequenceKind

T = TypeVar("T")


def import_deepspeed(*, on_cpu: bool) -> Any:
    """DeepSpeed, told which device it is on, and quiet."""
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)  # importing deepspeed resets the level
    return deepspeed


@dataclass(frozen=True)
class Gang:
    """A process group of `size` ranks; this one is `rank`."""

    rank: int
    size: int
    device: torch.device
    sequence: SequenceGroup | None = None
    """The ranks that share their micro-batches, each with a slice of the positions; None: positions are not divided."""
    tensor_size: int = 1
    """Number of consecutive ranks that share their micro-batches, each with a part of the model's matrices."""

    @classmethod
    def meet_ranks(
        cls,
        rank: int,
        size: int,
        address: str,
        device: torch.device,
        *,
        sequence: int = 1,
        tensor: int = 1,
        kind: SequenceKind = "ulysses",
    ) -> Gang:
        """Join the gang at "host:port", where rank 0 listens. A single rank needs no address.

        Every `sequence` consecutive ranks share their micro-batches by positions, or every `tensor` consecutive ranks
        by matrices; both numbers have to divide `size`. `kind` says how ranks that share positions compute attention.
        Also prepares DeepSpeed, which reads its rank from the environment.
        """
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_SIZE": str(size)}
        deepspeed = import_deepspeed(on_cpu=device.type == "cpu")
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if size == 1:
            # DeepSpeed keeps the first process groups of a process forever, so two trainers in one process share them.
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            host, _, port = address.rpartition(":")
            # Rank 0 listens only at this address; torch by default listens at all addresses.
            listening = None if rank else socket.create_server((host, int(port)), backlog=size).detach()
            meeting_s = os.environ.get("FLOWRL_MEETING_S")  # --start-minutes of the run
            within = timedelta(seconds=float(meeting_s)) if meeting_s else default_pg_timeout
            store = TCPStore(host, int(port), size, is_master=not rank, timeout=within, master_listen_fd=listening)
            torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)

        # DeepSpeed's shared-memory all-reduce is only used for inference, and compiling it takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        return cls(rank, size, device, make_sequence_group(rank, size, sequence, kind), tensor)

    def gather_objects(self, item: T) -> list[T]:
        """Return the plain objects of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items

    def gather_parts(self, item: T) -> list[T]:
        """Return the plain object of each part of a batch, on every rank; ranks that share a part give one object."""
        return self.gather_objects(item)[:: self.ranks_per_part]

    @property
    def ranks_per_part(self) -> int:
        """Number of ranks that share a part of a batch."""
        return self.sequence_size * self.tensor_size

    @property
    def sequence_size(self) -> int:
        """Number of ranks that share the positions of a micro-batch."""
        return 1 if self.sequence is None else self.sequence.size

    @property
    def sequence_kind(self) -> SequenceKind:
        """How ranks that share positions compute attention."""
        return "ulysses" if self.sequence is None else self.sequence.kind

    @property
    def num_copies(self) -> int:
        """Number of copies of the model, sharded by ZeRO or not, among which gradients are averaged."""
        return self.size // self.tensor_size

    def leave_gang(self) -> None:
        """Leave the gang together: rank 0 keeps the store, to which the other ranks report that they leave."""
        self.gather_objects(None)
        torch.distributed.destroy_process_group()
