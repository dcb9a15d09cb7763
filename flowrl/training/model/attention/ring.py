"""Ring attention (arXiv 2310.01889): a rank keeps its queries, and gets the keys and values of all ranks.

Every rank starts with its own keys and values. While it computes with this block, it sends the block to the next rank
and receives that of the rank before. After as many blocks as there are ranks, each query has met every key. Results of
blocks are merged by their log-sum-exps. In the backward pass the keys and values take the same path again, and their
gradient follows them: each rank adds what its queries contribute, and the last hop brings the gradient back to the rank
of these keys. Sums are in fp32 whatever the model's dtype.

A rank has two runs of positions (`sequence_group`), so with another rank's block it computes half of the scores, and
needs no mask for them.

Waits: for the neighbours' blocks; all ranks of a group make the same hops in the same order.

Axes: R rows, l positions of one rank, h heads of queries, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.training.model.attention.ring_blocks import (
    BlockKernel,
    CpuFlashBlock,
    CudaFlashBlock,
    PlainBlock,
    has_kernel,
)
from flowrl.training.model.attention.sequence_group import SequenceGroup
from flowrl.training.model.attention.sight import Sight

ALL = slice(None)


@dataclass(frozen=True)
class RingBlock:
    """The queries of this rank that see any key of a source rank, and the keys that any of these queries sees."""

    queries: slice
    keys: slice
    kernel: BlockKernel


@dataclass(frozen=True)
class Ring:
    """Attention of one layer in one pass."""

    group: SequenceGroup
    sight: Sight
    scale: float
    window: int | None = None
    cap: float | None = None

    def block(self, step: int, q: Tensor, v: Tensor) -> RingBlock:
        """What the rank computes in this step; in step 0 it computes its own block."""
        source, half = (self.group.rank - step) % self.group.size, q.shape[2] // 2
        queries = slice(half, None) if source > self.group.rank else ALL
        keys = slice(0, half) if source < self.group.rank else ALL
        if self.cap is not None or not self.sight.is_plain(self.window) or not has_kernel(q, v):
            return RingBlock(queries, keys, PlainBlock(self.scale, self._seen(source, queries, keys), self.cap))
        flash = CudaFlashBlock if q.device.type == "cuda" else CpuFlashBlock
        return RingBlock(queries, keys, flash(self.scale, causal=step == 0))

    def _seen(self, source: int, queries: slice, keys: slice) -> Callable[[slice], tuple[slice, Tensor]]:
        """Slice of these queries -> (keys neither after them nor before their windows, which query sees which)."""
        length, device = self.sight.length, self.sight.device
        asking_Q = self.group.columns_l(length, self.group.rank)[queries]
        looked_at_K = self.group.columns_l(length, source)[keys]

        def seen(some: slice) -> tuple[slice, Tensor]:
            first, last = asking_Q[some][[0, -1]].tolist()
            earliest = first - (self.sight.window(self.window) or length) + 1
            near = slice(*torch.searchsorted(looked_at_K, torch.tensor([earliest, last + 1])).tolist())
            places = (asking_Q[some].to(device), looked_at_K[near].to(device))
            return near, self.sight.seen_QK(*places, self.window)

        return seen


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Attention [R, l, heads, D] of queries [R, heads, l, D]; keys and values may have fewer heads. Collective."""
    found: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        merged: _Merged | None = None
        for step, keys_values in enumerate(_coming_by(ring.group, torch.cat((k, v), dim=-1))):
            block = ring.block(step, q, v)
            found = block.kernel.forward(q[:, :, block.queries], *_parted(keys_values[:, :, block.keys], k))
            if merged is None:
                merged = _Merged(found[0].float(), found[1].contiguous())
            else:
                merged.add(block.queries, *found)
        assert merged is not None
        attended = merged.out.transpose(1, 2).to(q.dtype).contiguous()
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, attended, merged.lse)
        return attended

    @staticmethod
    def backward(ctx: Any, grad_RlhD: Tensor) -> Any:
        q, k, v, attended, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        asking = (grad_RlhD.transpose(1, 2), q, attended.transpose(1, 2), lse)
        dq, arrived = torch.zeros(q.shape, dtype=torch.float32, device=q.device), None
        for step, keys_values in enumerate(_coming_by(ring.group, torch.cat((k, v), dim=-1))):
            block = ring.block(step, q, v)
            parts = _gradients(block, *asking, *_parted(keys_values[:, :, block.keys], k))
            dq[:, :, block.queries] += parts[0]
            if arrived is None:
                gradient = torch.zeros(keys_values.shape, dtype=torch.float32, device=q.device)
            else:
                gradient = arrived()
            for part, sums in zip(parts[1:], _parted(gradient, k), strict=True):
                sums[:, :, block.keys] += part
            arrived = start_hop(ring.group, gradient)
            del parts, gradient  # frees them before the next block is computed
        assert arrived is not None
        dk, dv = _parted(arrived(), k)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _coming_by(group: SequenceGroup, own: Tensor) -> Iterator[Tensor]:
    """The rank's own keys and values, then those of the ranks before it. Each is sent on while the caller uses it."""
    for _ in range(group.size - 1):
        arrived = start_hop(group, own)
        yield own
        own = arrived()
    yield own


def _parted(keys_values: Tensor, key: Tensor) -> Sequence[Tensor]:
    """Keys and values, or their gradients, split: they are concatenated along the channels."""
    return keys_values.tensor_split((key.shape[-1],), dim=-1)


def _gradients(
    block: RingBlock, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values of a block."""
    grad, q, out, lse = (one[:, :, block.queries] for one in (grad, q, out, lse))
    return block.kernel.backward(grad, q, k, v, out, lse)


@dataclass(frozen=True)
class _Merged:
    """The queries' results over all keys so far: attention, and the log-sum-exp of the scores."""

    out: Tensor
    lse: Tensor

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge results of some of the queries over further keys. A query that sees none of them has -inf as `lse`."""
        before = self.lse[:, :, queries].clone()
        after = torch.logaddexp(before, lse)
        kept, new = ((one - after).exp_()[..., None] for one in (before, lse))
        self.out[:, :, queries].mul_(kept).add_(out.float().mul_(new))
        self.lse[:, :, queries] = after


def start_hop(group: SequenceGroup, sent: Tensor) -> Callable[[], Tensor]:
    """Send to the next rank. The returned function, called once, waits for and returns what the rank before sent.

    Until that call returns, `sent` must not change.
    """
    from torch.distributed import P2POp, batch_isend_irecv, get_global_rank, irecv, isend

    following, before = (get_global_rank(group.process_group, (group.rank + n) % group.size) for n in (1, -1))
    out, back = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
    sides = ((isend, out, following), (irecv, back, before))
    operations = [P2POp(way, tensor, peer, group.process_group) for way, tensor, peer in sides]
    hops = batch_isend_irecv(operations)

    def arrived() -> Tensor:
        while hops:
            hops.pop(0).wait()
        received: Tensor = operations[1].tensor
        operations.clear()  # frees what was sent, which was needed until now
        return received

    return arrived
