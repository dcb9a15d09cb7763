"""Moves what an object keeps on a device to host memory and back, for a trainer that time-shares its GPU.

No tensor object is replaced: its storage releases its memory, and later gets new memory of the same size. So views of a
storage, such as the partitions that ZeRO takes from flat buffers, stay views of it, and references in hooks, optimizers
or an adapter stay valid. This works for every optimizer and ZeRO stage, and for tensors that are not DeepSpeed's (a
moving average, a teacher's output layer). DeepSpeed's own `offload_states` replaces tensors; at stage 3 it refuses
every optimizer except its compiled FusedAdam, and it does not support stage 1 with bfloat16.

Invariants
- Between `move_away` and `come_back` nothing computes with the object.
- After `come_back` every storage has the bytes it had before `move_away`.

The search follows attributes and containers, and includes gradients. A tensor that it misses stays on the device, which
costs memory but does no other harm.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from weakref import finalize

import torch
from torch import Tensor, UntypedStorage

ALIGNED = 512
PASSED_BY = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, str, bytes, int, float, torch.dtype)
"""Types that the search does not look into."""


def device_storages(root: object, device: torch.device) -> list[UntypedStorage]:
    """The storages on `device` that can be reached from `root`, each once; those of 0 bytes are left out."""
    found: dict[int, UntypedStorage] = {}
    for tensor in list_tensors(root):
        if tensor.device.type == device.type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def list_tensors(root: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting: list[object] = [root]
    kept = []  # objects made during the search must not be freed, or another one could get the same id
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, PASSED_BY):
            continue
        seen.add(id(thing))
        kept.append(thing)
        if isinstance(thing, Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                waiting.append(thing.grad)
        waiting.extend(list_attributes(thing))


def list_attributes(thing: object) -> Iterator[object]:
    if isinstance(thing, Mapping):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from thing
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(thing, name, None)


class Residence:
    """Moves what `root` has on `device`. `root` may change between moves, because every `move_away` searches it again.

    For a GPU, the host memory is page-locked if the machine allows it, and kept for the next `move_away`.
    """

    def __init__(self, root: object, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._away: list[UntypedStorage] = []
        self._host = HostMemory(pinned=device.type == "cuda")

    @property
    def is_away(self) -> bool:
        """Whether `move_away` was called, and `come_back` has not been called since."""
        return bool(self._away)

    def move_away(self) -> int:
        """Move everything to host memory; returns the bytes moved. Does nothing if it is already there."""
        if self._away:
            return 0
        self.wait_for_device()
        storages = device_storages(self._root, self._device)
        places = list_offsets([storage.nbytes() for storage in storages])
        host = self._host.reserve_for(places[-1])
        for storage, start in zip(storages, places, strict=False):
            host[start : start + storage.nbytes()].copy_(view_bytes(storage), non_blocking=True)
        self.wait_for_device()
        self._sizes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        self._away = storages
        gc.collect()
        if self._device.type == "cuda":  # return to the device the memory that torch caches for this process
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return sum(self._sizes)

    def come_back(self) -> int:
        """Move everything back to the device; returns the bytes moved. Does nothing if it is already there."""
        storages, self._away = self._away, []
        places = list_offsets(self._sizes) if storages else []
        host = self._host.reserve_for(places[-1] if places else 0)
        for storage, size, start in zip(storages, self._sizes if storages else (), places, strict=False):
            storage.resize_(size)
            view_bytes(storage).copy_(host[start : start + size], non_blocking=True)
        self.wait_for_device()
        return sum(self._sizes) if storages else 0

    def free_memory(self) -> None:
        """Free the host memory. Must not be called while the object is away."""
        self._host.free_memory()

    def wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class HostMemory:
    """One block of host memory that grows on demand. If it is page-locked, copies run at the speed of the bus."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unlock: finalize[..., object] | None = None

    def reserve_for(self, num_bytes: int) -> Tensor:
        """[at least `num_bytes`], uint8. The memory keeps its content if it was already large enough."""
        if self._memory.numel() < num_bytes:
            self.free_memory()
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            if self._pinned and page_lock(self._memory):
                # Unlock even without a call of `free_memory`: once it is freed, its addresses may be reused.
                self._unlock = finalize(self, page_unlock, self._memory)
                self._unlock.atexit = False
        return self._memory

    def free_memory(self) -> None:
        if self._unlock is not None:
            self._unlock()
        self._unlock = None
        self._memory = torch.empty(0, dtype=torch.uint8)


def page_lock(memory: Tensor) -> bool:
    """Page-lock existing host memory; torch's own pinned memory would be rounded up to a power of two.

    Returns False, and logs a warning, if that is not possible. The memory has to be unlocked before it is freed.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status == 0:
        return True
    _forget_error()
    logging.getLogger("flowrl").warning(
        "%.1f GiB of host memory could not be page-locked (CUDA error %d), so moving to and from the GPU takes longer; "
        "raise the machine's limit of locked memory (ulimit -l)",
        memory.numel() / (1 << 30),
        status,
    )
    return False


def page_unlock(memory: Tensor) -> None:
    """Undo `page_lock`."""
    if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):  # type: ignore[no-untyped-call]
        _forget_error()


def _forget_error() -> None:
    """Clear the error that CUDA keeps for this thread after a failed call; torch would raise it at its next kernel."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def list_offsets(sizes: list[int]) -> list[int]:
    """The offset of each piece in one block of memory, followed by the length of the block."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
    return starts


def view_bytes(storage: UntypedStorage) -> Tensor:
    """All of a storage as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
