"""Attention of ranks that share each micro-batch: which positions each rank has, and how their results come together.

Ulysses (arXiv 2309.14509): Everything except attention works position by position. For attention, the ranks of a group
exchange data: each rank sends its positions of all heads and receives all positions of its heads, so every kernel sees
whole sequences. After the kernel, the results are exchanged back. A forward pass with the keyword `exchange` does that
around the implementation that the model was loaded with, whichever it is, or uses a ring instead of it. Without the
keyword nothing changes. Gradient checkpointing repeats a layer with the same keywords, and so repeats the exchanges, in
the same order on all ranks.

Ring attention (arXiv 2310.01889): a rank keeps its queries, and gets the keys and values of all ranks.

Every rank starts with its own keys and values. While it computes with this block, it sends the block to the next rank
and receives that of the rank before. After as many blocks as there are ranks, each query has met every key. Results of
blocks are merged by their log-sum-exps. In the backward pass the keys and values take the same path again, and their
gradient follows them: each rank adds what its queries contribute, and the last hop brings the gradient back to the rank
of these keys. Sums are in fp32 whatever the model's dtype.

A rank has two runs of positions (`SequenceGroup`), so with another rank's block it computes half of the scores, and
needs no mask for them.

Waits: for the neighbours' blocks; all ranks of a group make the same hops in the same order.

A kernel computes the attention of each query to only these keys, and the logarithm of the sum of the query's weights
(its log-sum-exp), by which blocks are merged. In the backward pass it gets the result and the log-sum-exp over *all*
keys, from which the weights of this block follow without the other blocks.

With Ulysses a rank has one run of neighbouring positions. With a ring it has two, the nth from the beginning and the
nth from the end. Because a place looks at every place before it, this gives all ranks the same number of scores.

Axes: R rows, L positions and l of one rank, h heads of queries, k of keys (g = h/k), D channels of a head, N ranks or
values of the micro-batch, M values of this rank, Q queries and K keys of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.training.settings import SequenceKind


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each micro-batch; this one is `rank` of `size` among them."""

    process_group: Any
    rank: int
    size: int
    kind: SequenceKind = "ulysses"

    def slice_width(self, length: int) -> int:
        """Positions that each rank has of rows of this length, padding included."""
        return self._runs * self._slice_run(length)

    def columns_l(self, length: int, rank: int) -> Tensor:
        """The positions that `rank` has of rows of this length, ascending; those from `length` on are padding."""
        run, last = self._slice_run(length), self._runs * self.size - 1
        starts = (rank, last - rank)[: self._runs]
        return torch.cat([torch.arange(start * run, (start + 1) * run) for start in starts])

    @property
    def _runs(self) -> int:
        return 2 if self.kind == "ring" else 1

    def _slice_run(self, length: int) -> int:
        return -(-length // (self._runs * self.size))


def make_sequence_group(rank: int, size: int, group_size: int, kind: SequenceKind = "ulysses") -> SequenceGroup | None:
    """Rank's group of `group_size` consecutive ranks of `size`; None for groups of one. Collective."""
    if group_size == 1:
        return None
    mine: Any = None
    for start in range(0, size, group_size):
        members: Sequence[int] = range(start, start + group_size)
        made = torch.distributed.new_group([*members])
        mine = made if rank in members else mine
    return SequenceGroup(mine, rank % group_size, group_size, kind)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, mine_M: Tensor, number: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(mine_M)
        values_N = values_M.new_zeros(number).index_copy_(0, mine_M, values_M)
        torch.distributed.all_reduce(values_N, group=group.process_group)
        return values_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        (mine_M,) = ctx.saved_tensors
        return grad_N.index_select(0, mine_M), None, None, None


def gather_slices(values_M: Tensor, mine_M: Tensor, number: int, group: SequenceGroup) -> Tensor:
    """The values of all ranks, [number], on every rank; `mine_M` are the indices of `values_M` among them.

    Every rank computes the same loss from these values, but its gradient flows only into the rank's own values. So the
    gradients of the ranks add up to that of one loss.
    """
    found: Tensor = _Whole.apply(values_M, mine_M, number, group)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Sight:
    """What the places of the rows of one pass see; it is the same for every row."""

    length: int
    """Places of a row."""
    device: torch.device
    ends_S: Tensor | None = None
    """If the input is one packed row: a 0, then the place behind each sequence."""
    _sequence_L: list[Tensor] = field(default_factory=list, compare=False)
    _masks: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def effective_window(self, width: int | None) -> int | None:
        """`width`, or None if the rows are not longer than a window of that many places."""
        return None if width is None or width >= self.length else width

    def is_plain(self, width: int | None) -> bool:
        """Whether a place sees every place before it."""
        return self.ends_S is None and self.effective_window(width) is None

    def mask_11LL(self, width: int | None) -> Tensor | None:
        """True where the row's place sees the column's, within a window of `width`; None: each sees all before it."""
        if self.is_plain(width):
            return None
        key = self.effective_window(width) or 0
        if key not in self._masks:  # every layer of a pass needs it
            place_L = torch.arange(self.length, device=self.device)
            self._masks[key] = self.seen_QK(place_L, place_L, width)[None, None]
        return self._masks[key]

    def seen_QK(self, asking_Q: Tensor, looked_at_K: Tensor, width: int | None) -> Tensor:
        """Whether each place of `asking_Q` sees each place of `looked_at_K`."""
        back_QK = asking_Q[:, None] - looked_at_K[None]
        seen_QK = back_QK >= 0
        if (window := self.effective_window(width)) is not None:
            seen_QK &= back_QK < window
        if self.ends_S is not None:
            if not self._sequence_L:
                lengths_S = self.ends_S.diff()
                numbers_S = torch.arange(len(lengths_S), device=self.device)
                self._sequence_L.append(torch.repeat_interleave(numbers_S, lengths_S))
            sequence_L = self._sequence_L[0]
            seen_QK &= sequence_L[asking_Q][:, None] == sequence_L[looked_at_K][None]
        return seen_QK


SCORES_A_CHUNK = 1 << 24
"""Number of scores that `PlainBlock` computes at a time, 64 MiB in fp32."""
CAPABILITY = (8, 0)
"""Lowest compute capability of a GPU that torch's flash attention runs on."""
WIDEST_HEAD = 256


class BlockKernel(Protocol):
    """[R, h, Q, D] of queries, [R, k, K, D] of keys and values; log-sum-exps are fp32, [R, h, Q]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(attended, log-sum-exp)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; `out` and `lse` are those over all keys."""


@dataclass(frozen=True)
class CpuFlashBlock:
    """torch's flash attention on a CPU. `causal`: the nth query sees the first n keys; else every query sees all."""

    scale: float
    causal: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, self.causal, scale=self.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, self.causal, scale=self.scale)
        return dq, dk, dv


@dataclass(frozen=True)
class CudaFlashBlock:
    """torch's flash attention on a GPU, in 16 bits. It needs as many heads of keys as of queries."""

    scale: float
    causal: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        each = q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(each, dim=1) for one in (k, v))
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal, False, scale=self.scale)
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, each = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (one.repeat_interleave(each, dim=1) for one in (k, v))
        rows = (None, None, q.shape[2], k.shape[2])  # all rows have one length
        undropped = [torch.zeros(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]
        dq, *repeated = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *rows, 0.0, self.causal, *undropped, scale=self.scale
        )
        dk, dv = (_by_key(one, heads).sum(dim=2) for one in repeated)
        return dq, dk, dv


@dataclass(frozen=True)
class PlainBlock:
    """Attention with any mask and a soft cap, computed in fp32, some queries at a time."""

    scale: float
    seen: Callable[[slice], tuple[slice, Tensor]]
    """Slice of queries -> (slice of the keys that any of them sees, mask [queries, keys])."""
    cap: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q_RkgQD, k, v = _by_key(q, k.shape[1]), k.float(), v.float()
        parts = []
        for rows in self._split_queries(q_RkgQD, k):
            keys, seen_QK = self.seen(rows)
            scores, _ = self._compute_scores(q_RkgQD[..., rows, :], k[:, :, keys], seen_QK)
            lse = scores.logsumexp(dim=-1)
            weights = attention_weights(scores, lse, seen_QK)
            parts.append((split_key_heads(weights.flatten(2, 3) @ v[:, :, keys], scores), lse))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=-2).flatten(1, 2), torch.cat(lses, dim=-1).flatten(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_RkgQD, q_RkgQD, out_RkgQD = (_by_key(one, k.shape[1]) for one in (grad, q, out))
        lse_RkgQ, k, v = _by_key(lse[..., None], k.shape[1])[..., 0], k.float(), v.float()
        dq, dk, dv = torch.zeros_like(q_RkgQD), torch.zeros_like(k), torch.zeros_like(v)
        mean_RkgQ = torch.linalg.vecdot(grad_RkgQD, out_RkgQD)
        for rows in self._split_queries(q_RkgQD, k):
            keys, seen_QK = self.seen(rows)
            scores, slope = self._compute_scores(q_RkgQD[..., rows, :], k[:, :, keys], seen_QK)
            weights = attention_weights(scores, lse_RkgQ[..., rows], seen_QK)
            some = grad_RkgQD[..., rows, :].flatten(2, 3)
            dv[:, :, keys] += weights.flatten(2, 3).mT @ some
            slopes = (
                (some @ v[:, :, keys].mT)
                .view_as(weights)
                .sub_(mean_RkgQ[..., rows, None])
                .mul_(weights)
                .mul_(self.scale)
            )
            if slope is not None:
                slopes *= slope
            flat = slopes.flatten(2, 3)
            dq[..., rows, :] = split_key_heads(flat @ k[:, :, keys], slopes)
            dk[:, :, keys] += flat.mT @ q_RkgQD[..., rows, :].flatten(2, 3)
        return dq.flatten(1, 2), dk, dv

    def _split_queries(self, q_RkgQD: Tensor, k: Tensor) -> Iterator[slice]:
        rows, heads, each, queries, _ = q_RkgQD.shape
        step = max(1, SCORES_A_CHUNK // (rows * heads * each * k.shape[2]))
        for start in range(0, queries, step):
            yield slice(start, min(queries, start + step))

    def _compute_scores(self, q_RkgQD: Tensor, k: Tensor, seen_QK: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores [R, k, g, Q, K], and the slope of the soft cap at them, None without a cap."""
        scores = split_key_heads(q_RkgQD.flatten(2, 3) @ k.mT, q_RkgQD).mul_(self.scale)
        slope = None
        if self.cap is not None:
            share = scores.div_(self.cap).tanh_()
            slope = 1.0 - share.square()
            scores = share.mul_(self.cap)
        return scores.masked_fill_(~seen_QK, -torch.inf), slope


def _by_key(tensor: Tensor, heads: int) -> Tensor:
    """[R, h, Q, D] as [R, k, g, Q, D], in fp32."""
    rows, all_heads, places, channels = tensor.shape
    return tensor.float().reshape(rows, heads, all_heads // heads, places, channels)


def split_key_heads(tensor: Tensor, like: Tensor) -> Tensor:
    """[R, k, g·Q, X] as [R, k, g, Q, X], with g and Q as in `like`."""
    return tensor.view(*like.shape[:4], tensor.shape[-1])


def attention_weights(scores: Tensor, lse: Tensor, seen_QK: Tensor) -> Tensor:
    """Weights, written over the scores; 0 at keys that are not seen, also for a query that sees none (`lse` -inf)."""
    return scores.sub_(lse[..., None]).exp_().masked_fill_(~seen_QK, 0.0)


def has_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether torch has a kernel for blocks of such queries and values without a mask."""
    if q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type != "cuda":
        return q.device.type == "cpu"
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= WIDEST_HEAD
    return fits and torch.cuda.get_device_capability(q.device) >= CAPABILITY


ALL = slice(None)


@dataclass(frozen=True)
class Ring:
    """Attention of one layer in one pass."""

    group: SequenceGroup
    sight: Sight
    scale: float
    window: int | None = None
    cap: float | None = None

    def make_block(self, step: int, q: Tensor, v: Tensor) -> tuple[slice, slice, BlockKernel]:
        """(the queries of this rank that see any key of the step's source rank, the keys that any of them sees, what
        computes with them). In step 0 the rank computes its own block."""
        source, half = (self.group.rank - step) % self.group.size, q.shape[2] // 2
        queries = slice(half, None) if source > self.group.rank else ALL
        keys = slice(0, half) if source < self.group.rank else ALL
        if self.cap is not None or not self.sight.is_plain(self.window) or not has_kernel(q, v):
            return queries, keys, PlainBlock(self.scale, self._mask_block(source, queries, keys), self.cap)
        flash = CudaFlashBlock if q.device.type == "cuda" else CpuFlashBlock
        return queries, keys, flash(self.scale, causal=step == 0)

    def _mask_block(self, source: int, queries: slice, keys: slice) -> Callable[[slice], tuple[slice, Tensor]]:
        """Slice of these queries -> (keys neither after them nor before their windows, which query sees which)."""
        length, device = self.sight.length, self.sight.device
        asking_Q = self.group.columns_l(length, self.group.rank)[queries]
        looked_at_K = self.group.columns_l(length, source)[keys]

        def seen(some: slice) -> tuple[slice, Tensor]:
            first, last = asking_Q[some][[0, -1]].tolist()
            earliest = first - (self.sight.effective_window(self.window) or length) + 1
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
        # The queries' results over all keys so far: attention, and the log-sum-exp of the scores.
        merged_out = merged_lse = q.new_empty(0)
        for step, keys_values in enumerate(_coming_by(ring.group, torch.cat((k, v), dim=-1))):
            queries, keys, kernel = ring.make_block(step, q, v)
            out, lse = kernel.forward(q[:, :, queries], *split_block(keys_values[:, :, keys], k))
            if step == 0:
                merged_out, merged_lse = out.float(), lse.contiguous()
                continue
            # Merge results of some of the queries. A query that sees none of the keys has -inf as log-sum-exp.
            before = merged_lse[:, :, queries].clone()
            after = torch.logaddexp(before, lse)
            kept, new = ((one - after).exp_()[..., None] for one in (before, lse))
            merged_out[:, :, queries].mul_(kept).add_(out.float().mul_(new))
            merged_lse[:, :, queries] = after
        attended = merged_out.transpose(1, 2).to(q.dtype).contiguous()
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, attended, merged_lse)
        return attended

    @staticmethod
    def backward(ctx: Any, grad_RlhD: Tensor) -> Any:
        q, k, v, attended, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        asking = (grad_RlhD.transpose(1, 2), q, attended.transpose(1, 2), lse)
        dq, arrived = torch.zeros(q.shape, dtype=torch.float32, device=q.device), None
        for step, keys_values in enumerate(_coming_by(ring.group, torch.cat((k, v), dim=-1))):
            queries, keys, kernel = ring.make_block(step, q, v)
            grad, q_own, out, lse_own = (one[:, :, queries] for one in asking)
            k_block, v_block = split_block(keys_values[:, :, keys], k)
            parts = kernel.backward(grad, q_own, k_block, v_block, out, lse_own)
            dq[:, :, queries] += parts[0]
            if arrived is None:
                gradient = torch.zeros(keys_values.shape, dtype=torch.float32, device=q.device)
            else:
                gradient = arrived()
            for part, sums in zip(parts[1:], split_block(gradient, k), strict=True):
                sums[:, :, keys] += part
            arrived = start_hop(ring.group, gradient)
            del k_block, v_block, parts, gradient  # frees them before the next block is computed
        assert arrived is not None
        dk, dv = split_block(arrived(), k)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _coming_by(group: SequenceGroup, own: Tensor) -> Iterator[Tensor]:
    """The rank's own keys and values, then those of the ranks before it. Each is sent on while the caller uses it."""
    for _ in range(group.size - 1):
        arrived = start_hop(group, own)
        yield own
        own = arrived()
    yield own


def split_block(keys_values: Tensor, key: Tensor) -> Sequence[Tensor]:
    """Keys and values, or their gradients, split: they are concatenated along the channels."""
    return keys_values.tensor_split((key.shape[-1],), dim=-1)


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


Implementation = Callable[..., tuple[Tensor, Any]]
WITH_BOUNDS = ("flash", "varlen")
"""Parts of names of implementations that separate the sequences of a packed row by their ends, without a mask."""


@dataclass(frozen=True)
class Exchange:
    """The value of the keyword `exchange` in a pass over slices."""

    group: SequenceGroup
    sight: Sight


class Exchanging:
    """An implementation of attention in transformers' interface that knows the keyword `exchange`."""

    def __init__(self, inner: Implementation, name: str) -> None:
        self.inner = inner
        self.has_bounds = any(word in name for word in WITH_BOUNDS)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        exchange: Exchange | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if exchange is None:
            return self.inner(module, query, key, value, attention_mask, **kwargs)
        if exchange.group.kind == "ring":
            assert kwargs.get("tree") is None, "a trainer whose attention is a ring lays out rows"
            scale = kwargs.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            window, cap = kwargs.get("sliding_window"), kwargs.get("softcap")
            ring = Ring(exchange.group, exchange.sight, scale, window, cap)
            return ring_attention(query, key, value, ring), None
        kwargs.pop("position_ids", None)  # of this rank's slice; kernels would take a restart for a new sequence
        mask = None if self.has_bounds else exchange.sight.mask_11LL(kwargs.get("sliding_window"))
        q, k, v = send_to_heads(exchange.group, query, key, value)
        with say_key_groups(module, q.shape[1] // k.shape[1]):
            found, _ = self.inner(module, q, k, v, mask, **kwargs)
        attended = send_to_positions(exchange.group, found)
        rows, heads, positions, _ = query.shape
        assert attended.shape[:3] == (rows, positions, heads), (attended.shape, query.shape)
        return attended, None


def attend_eagerly(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """The "eager" attention of the module's own architecture. It adds a mask and, unlike others, needs one.

    Only some architectures have a soft cap (Gemma 2), and only their own function computes it.
    """
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~mask, torch.finfo(query.dtype).min
        )
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, mask, **kwargs)


def make_exchanging(name: str) -> None:
    """Make transformers' implementation `name` accept the keyword. The name stays, because kernels are chosen by it."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ALL_ATTENTION_FUNCTIONS.get(name, attend_eagerly)  # only "eager" is not in the table
    if not isinstance(known, Exchanging):
        AttentionInterface.register(name, Exchanging(known, name))


def send_to_heads(group: SequenceGroup, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values [R, h, l, D] of this rank's positions as [R, h/N, L, D] of its heads, in one exchange.

    Heads of keys are repeated if their number is not a multiple of N, so that each rank has those of its queries.
    """
    repeats = lcm(key.shape[1], group.size) // key.shape[1]
    tensors = [query, *(one.repeat_interleave(repeats, dim=1) if repeats > 1 else one for one in (key, value))]
    parts = []  # [N, R, l, h/N·D]: for each rank its heads
    for one in tensors:
        rows, heads, length, channels = one.shape
        by_rank = one.reshape(rows, group.size, heads // group.size, length, channels)
        parts.append(by_rank.permute(1, 0, 3, 2, 4).flatten(3))
    received_NRlX = exchange_parts(group, torch.cat(parts, dim=-1))
    whole_RLX = received_NRlX.transpose(0, 1).flatten(1, 2)
    widths = [part.shape[-1] for part in parts]
    return [
        one.view(*one.shape[:2], -1, tensor.shape[-1]).transpose(1, 2).contiguous()
        for one, tensor in zip(torch.split(whole_RLX, widths, dim=-1), tensors, strict=True)
    ]


def send_to_positions(group: SequenceGroup, attended: Tensor) -> Tensor:
    """[R, L, h/N, D] of this rank's heads as [R, l, h, D] of its positions."""
    rows, length = attended.shape[:2]
    sent_NRlhD = attended.reshape(rows, group.size, length // group.size, *attended.shape[2:]).transpose(0, 1)
    received_NRlhD = exchange_parts(group, sent_NRlhD)
    return received_NRlhD.permute(1, 2, 0, 3, 4).flatten(2, 3)


def exchange_parts(group: SequenceGroup, tensor_N: Tensor) -> Tensor:
    """Send the nth part to rank n; the part from rank n takes its place. Uses DeepSpeed's operator (NCCL and gloo)."""
    from deepspeed.sequence.layer import _dim_zero_all_to_all, register_all_to_all_group

    register_all_to_all_group(group.process_group)
    received: Tensor = _dim_zero_all_to_all(group.process_group, tensor_N)
    return received


@contextmanager
def say_key_groups(module: nn.Module, queries_a_key: int) -> Iterator[None]:
    """Within this context the module says that `queries_a_key` heads of queries share one head of keys."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == queries_a_key:
        yield
        return
    module.num_key_value_groups = queries_a_key  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before
