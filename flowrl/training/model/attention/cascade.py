"""Attention over a forest in blocks: each stem on itself, and all places behind a stem on that stem.

The places that continue a stem are one range, so its keys are multiplied once with all of their queries. Partial
results are merged relative to their largest scores, as in flash attention; the backward pass computes the scores
again. Blocks of similar size are padded to one batch, and a batch is cut so that its scores
stay in the cache. Everything is computed in fp32, whatever the dtype of the model.

Axes: L places; of a block, B blocks of one batch, Q queries and K keys; h heads of keys, g queries' heads of each,
D channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.forest import Forest

SCORES_A_CHUNK = 1 << 20
"""Scores that are computed at a time, 4 MiB in fp32."""
PADDED_SHARE = 0.5
"""A batch of blocks takes a smaller block only if at least this share of its padded area is left in use."""


@dataclass(frozen=True)
class KeyBlock:
    """Queries `q_start` to `q_stop` on keys `k_start` to `k_stop`; the same places if it is causal."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_stop - self.q_start, self.k_stop - self.k_start


@dataclass(frozen=True)
class BlockBatch:
    """Blocks padded to one size. No place is the query of two blocks."""

    q_BQ: Tensor
    """Places of the queries; a padded one repeats place 0."""
    k_BK: Tensor
    real_BQ: Tensor
    """False at padding."""
    real_BK: Tensor
    causal: bool
    padded: bool

    def chunks(self, num_heads: int) -> Iterator[BlockBatch]:
        """Parts whose scores fit into a chunk: fewer blocks, or fewer queries of a single one."""
        (blocks, queries), keys = self.q_BQ.shape, self.k_BK.shape[1]
        most = SCORES_A_CHUNK // num_heads
        if blocks > 1 and blocks * queries * keys > most:
            step = max(1, most // (queries * keys))
            for start in range(0, blocks, step):
                yield from self._rows(slice(start, start + step)).chunks(num_heads)
        elif queries * keys > most and queries > 1:
            step = max(16, most // keys)
            for start in range(0, queries, step):
                yield self._queries(start, min(queries, start + step))
        else:
            yield self

    def _rows(self, rows: slice) -> BlockBatch:
        return BlockBatch(
            self.q_BQ[rows], self.k_BK[rows], self.real_BQ[rows], self.real_BK[rows], self.causal, self.padded
        )

    def _queries(self, start: int, stop: int) -> BlockBatch:
        keys = slice(0, stop if self.causal else self.k_BK.shape[1])
        of = slice(start, stop)
        return BlockBatch(
            self.q_BQ[:, of], self.k_BK[:, keys], self.real_BQ[:, of], self.real_BK[:, keys], self.causal, self.padded
        )

    def hidden_BQK(self) -> Tensor | None:
        """True where a query must not see a key; None if every query sees every key."""
        (_, queries), (_, keys) = self.q_BQ.shape, self.k_BK.shape
        hidden = None
        if self.causal and queries > 1:
            later = torch.ones(queries, keys, dtype=torch.bool, device=self.q_BQ.device)
            hidden = later.triu_(keys - queries + 1)[None]
        if self.padded:
            unreal = ~self.real_BK[:, None]
            hidden = unreal if hidden is None else hidden | unreal
        return hidden


@dataclass(frozen=True)
class Cascade:
    """The batches of blocks of one forest: together, every query meets every key that it sees exactly once."""

    batches: tuple[BlockBatch, ...]

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> Cascade:
        stems = forest.stems()
        own = [KeyBlock(s.start, s.stop, s.start, s.stop) for s in stems]
        batches = [batch_of(part, device, causal=True) for part in alike(own)]
        for depth in range(1 + max((s.depth for s in stems), default=0)):
            behind = [KeyBlock(s.stop, s.end, s.start, s.stop) for s in stems if s.depth == depth and s.end > s.stop]
            batches += [batch_of(part, device, causal=False) for part in alike(behind)]
        return cls(tuple(batches))


def alike(blocks: Sequence[KeyBlock]) -> Iterator[list[KeyBlock]]:
    """Blocks in parts of similar sizes, the largest first."""
    part: list[KeyBlock] = []
    for block in sorted(blocks, key=lambda block: (-block.shape[1], -block.shape[0], block.q_start)):
        widest = max([block.shape[0], *(one.shape[0] for one in part)])
        used = block.shape[0] * block.shape[1]
        if part and used < PADDED_SHARE * widest * part[0].shape[1]:
            yield part
            part = []
        part.append(block)
    if part:
        yield part


def batch_of(blocks: Sequence[KeyBlock], device: torch.device, *, causal: bool) -> BlockBatch:
    most = np.array([block.shape for block in blocks]).max(axis=0)
    queries, real_queries = _padded([(p.q_start, p.q_stop) for p in blocks], int(most[0]))
    keys, real_keys = _padded([(p.k_start, p.k_stop) for p in blocks], int(most[1]))
    q_BQ, k_BK, real_BQ, real_BK = (
        torch.from_numpy(array).to(device) for array in (queries, keys, real_queries, real_keys)
    )
    return BlockBatch(q_BQ, k_BK, real_BQ, real_BK, causal, bool(not (real_queries.all() and real_keys.all())))


def _padded(ranges: Sequence[tuple[int, int]], width: int) -> tuple[Any, Any]:
    starts, stops = np.array(ranges).T
    places = starts[:, None] + np.arange(width)
    real = places < stops[:, None]
    return np.where(real, places, 0), real


def cascade_attention(q: Tensor, k: Tensor, v: Tensor, cascade: Cascade, scale: float) -> Tensor:
    """Attention [1, L, heads, D] of queries [1, heads, L, D]; keys and values may have fewer heads."""
    found: Tensor = _CascadeAttention.apply(q, k, v, cascade, scale)  # type: ignore[no-untyped-call]
    return found


class _CascadeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cascade: Cascade, scale: float) -> Tensor:
        q_LhgD, k_LhD, v_LhD = _by_place(q, k.shape[1]), _by_place(k), _by_place(v)
        so_far = _SoFar.nothing(q_LhgD, v_LhD)
        for batch in cascade.batches:
            for chunk in batch.chunks(q.shape[1]):
                weights_BhQgK, _, _ = _scores(q_LhgD, k_LhD, chunk, scale)
                top_BhQg = weights_BhQgK.amax(dim=-1)
                weights_BhQgK.sub_(top_BhQg[..., None]).exp_()
                values_BhKD = _gathered(v_LhD, chunk.k_BK).transpose(1, 2)
                out_BhQgD = torch.matmul(weights_BhQgK.flatten(2, 3), values_BhKD).view(*top_BhQg.shape, -1)
                so_far.add(chunk, out_BhQgD, top_BhQg, weights_BhQgK.sum(dim=-1))
        out_LhgD = so_far.out_LhgD.div_(so_far.sum_Lhg[..., None])
        ctx.cascade, ctx.scale = cascade, scale
        ctx.save_for_backward(q, k, v, out_LhgD, so_far.top_Lhg, so_far.sum_Lhg)
        return out_LhgD.flatten(1, 2)[None].to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out_LhgD, top_Lhg, sum_Lhg = ctx.saved_tensors
        q_LhgD, k_LhD, v_LhD = _by_place(q, k.shape[1]), _by_place(k), _by_place(v)
        heads, each = q_LhgD.shape[1:3]
        # Divided by the sum here, the gradients need no normalised probabilities.
        grad_LhgD = grad[0].float().view(-1, heads, each, grad.shape[-1]) / sum_Lhg[..., None]
        mean_Lhg = torch.linalg.vecdot(grad_LhgD, out_LhgD)
        dq, dk, dv = torch.zeros_like(q_LhgD), torch.zeros_like(k_LhD), torch.zeros_like(v_LhD)
        for batch in ctx.cascade.batches:
            for chunk in batch.chunks(heads * each):
                weights_BhQgK, q_BhXD, k_BhKD = _scores(q_LhgD, k_LhD, chunk, ctx.scale)
                weights_BhQgK.sub_(_per_query(top_Lhg, chunk)[..., None]).exp_()
                weights_BhXK = weights_BhQgK.flatten(2, 3)
                if chunk.padded:
                    weights_BhQgK.masked_fill_(~chunk.real_BQ[:, None, :, None, None], 0.0)
                grad_BhXD = _gathered(grad_LhgD, chunk.q_BQ).transpose(1, 2).flatten(2, 3)
                v_BhKD = _gathered(v_LhD, chunk.k_BK).transpose(1, 2)
                slopes_BhXK = torch.matmul(grad_BhXD, v_BhKD.transpose(2, 3))
                slopes_BhXK.sub_(_per_query(mean_Lhg, chunk).flatten(2, 3)[..., None]).mul_(weights_BhXK)
                _add(dv, chunk.k_BK, torch.matmul(weights_BhXK.transpose(2, 3), grad_BhXD).transpose(1, 2))
                _add(dk, chunk.k_BK, torch.matmul(slopes_BhXK.transpose(2, 3), q_BhXD).transpose(1, 2))
                dq_BhXD = torch.matmul(slopes_BhXK, k_BhKD)
                dq_BhQgD = dq_BhXD.view(*dq_BhXD.shape[:2], -1, each, dq_BhXD.shape[-1])
                _add(dq, chunk.q_BQ, dq_BhQgD.transpose(1, 2))
        grads = (dq.flatten(1, 2).mul_(ctx.scale), dk.mul_(ctx.scale), dv)
        return *(one.transpose(0, 1)[None].to(q.dtype) for one in grads), None, None


@dataclass(frozen=True)
class _SoFar:
    """The attention of each query to the keys that it has met: weights relative to the largest score."""

    out_LhgD: Tensor
    """Weighted sum of the values."""
    top_Lhg: Tensor
    """Largest score."""
    sum_Lhg: Tensor
    """Sum of the weights."""

    @classmethod
    def nothing(cls, q_LhgD: Tensor, v_LhD: Tensor) -> _SoFar:
        shape = q_LhgD.shape[:-1]
        return cls(
            q_LhgD.new_zeros(*shape, v_LhD.shape[-1]), q_LhgD.new_full(shape, -torch.inf), q_LhgD.new_zeros(shape)
        )

    def add(self, chunk: BlockBatch, out_BhQgD: Tensor, top_BhQg: Tensor, sum_BhQg: Tensor) -> None:
        """Merge a chunk's partial attention into the sums of its queries."""
        rows_X = chunk.q_BQ.flatten()
        parts = [part.transpose(1, 2).flatten(0, 1) for part in (out_BhQgD, top_BhQg, sum_BhQg)]
        if chunk.padded:
            real_X = chunk.real_BQ.flatten()
            rows_X, parts = rows_X[real_X], [part[real_X] for part in parts]
        out_XhgD, top_Xhg, sum_Xhg = parts
        before_Xhg = self.top_Lhg.index_select(0, rows_X)
        after_Xhg = torch.maximum(before_Xhg, top_Xhg)
        old_Xhg, new_Xhg = (before_Xhg - after_Xhg).exp_(), (top_Xhg - after_Xhg).exp_()
        kept_XhgD = self.out_LhgD.index_select(0, rows_X).mul_(old_Xhg[..., None])
        self.out_LhgD.index_copy_(0, rows_X, kept_XhgD.addcmul_(out_XhgD, new_Xhg[..., None]))
        kept_Xhg = self.sum_Lhg.index_select(0, rows_X).mul_(old_Xhg)
        self.sum_Lhg.index_copy_(0, rows_X, kept_Xhg.addcmul_(sum_Xhg, new_Xhg))
        self.top_Lhg.index_copy_(0, rows_X, after_Xhg)


def _by_place(tensor: Tensor, heads: int | None = None) -> Tensor:
    """[1, heads, L, D] as [L, heads, D], or [L, h, g, D] with `heads` of keys, contiguous in fp32."""
    found = tensor[0].transpose(0, 1).float().contiguous()
    return found if heads is None else found.view(len(found), heads, -1, found.shape[-1])


def _gathered(tensor: Tensor, places: Tensor) -> Tensor:
    return tensor.index_select(0, places.flatten()).view(*places.shape, *tensor.shape[1:])


def _per_query(tensor_Lhg: Tensor, chunk: BlockBatch) -> Tensor:
    """[B, h, Q, g]"""
    return _gathered(tensor_Lhg, chunk.q_BQ).transpose(1, 2)


def _scores(q_LhgD: Tensor, k_LhD: Tensor, chunk: BlockBatch, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The scores [B, h, Q, g, K], with the queries [B, h, Q·g, D] and keys [B, h, K, D] that they are made of."""
    q_BhXD = _gathered(q_LhgD, chunk.q_BQ).transpose(1, 2).flatten(2, 3)
    k_BhKD = _gathered(k_LhD, chunk.k_BK).transpose(1, 2)
    scores = torch.matmul(q_BhXD, k_BhKD.transpose(2, 3)).mul_(scale)
    scores = scores.view(*scores.shape[:2], chunk.q_BQ.shape[1], -1, scores.shape[-1])
    if (hidden_BQK := chunk.hidden_BQK()) is not None:
        scores.masked_fill_(hidden_BQK[:, None, :, None], -torch.inf)
    return scores, q_BhXD, k_BhKD


def _add(total: Tensor, places: Tensor, parts: Tensor) -> None:
    total.index_add_(0, places.flatten(), parts.flatten(0, 1))
