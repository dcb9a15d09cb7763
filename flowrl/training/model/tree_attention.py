"""Attention over a forest, in transformers' attention interface.

A model that is loaded with the implementation `TREE` computes rows as with "sdpa". A forward pass with the keyword
`tree` computes attention by that tree's kernel instead: every layer passes the keyword on. Gradient checkpointing
repeats a layer with the same keywords, so a backward pass needs no state.

`choose_kernel` takes the kernel by the number of places and the device.

The cascade computes in blocks of queries and keys. One block has a stem's places as queries, with the stem and the
short stems before it as keys. Another has all places that follow a long stem as queries, with that stem as keys. The
places that continue a stem are one range, so the keys of a long stem are multiplied once with all queries of that
range. Such partial results are merged by the logarithms of the sums of their weights (log-sum-exps), as in flash
attention. A short prefix is repeated among the keys of each stem behind it, which costs less than merging. The backward
pass computes the scores again. Blocks of similar size are padded to one batch. A batch is split so that its scores stay
in the cache, but the scores of 16 queries of one block are computed at once, however many keys they see.

Memory: on average, at most `REPEATED_IN_ALL` keys are repeated for each place of the stems that use them. So memory
grows with the number of tokens, however many tokens precede them.

Scores, softmax and the sums over blocks are in fp32, whatever the dtype of the model; log-sum-exps are merged in fp64.
For a model in bfloat16, on a CPU that is fast in bfloat16, both factors of every product that does not give scores or
their gradients are rounded to bfloat16. So is each block's result, before it is summed.

torch's flex attention skips blocks of keys that no query of a block sees; it is compiled on a GPU.

Axes: L places of a forest, D channels of a head. In the cascade: B blocks of one batch, Q queries and K keys of a
block; h heads of keys, g heads of queries for each head of keys; N = h·B, X = Q·g. A table has hL rows: one for each
head of keys and place. In flex attention: N blocks of places.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flowrl.errors import ConfigError
from flowrl.machine.cpu import is_slow_in_bfloat16
from flowrl.messages.forest import Forest, extended
from flowrl.training.layouts import Kernel, choose_kernel

SCORES_A_CHUNK = 1 << 18
"""Number of scores that are computed at a time, 1 MiB in fp32."""
PADDED_SHARE = 0.6
"""A batch takes a smaller block only if at least this share of its scores is then not padding."""
REPEATED_A_QUERY = 4
"""Most repeated keys of one prefix for each place of the stems behind it that are not long, on average."""
REPEATED_IN_ALL = 8
"""The same for all prefixes together that lie on the path from the root and are repeated for the same stem."""
LONG = 256
"""Most places of a stem whose own block also has its repeated prefixes; those of a longer one have another block."""
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KeyBlock:
    """Queries at the places `q_start` to `q_stop`, with the keys at the places `k_K`."""

    q_start: int
    q_stop: int
    k_K: Places
    causal: bool
    """The last keys are the queries' own places, and a query sees none behind its own."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_stop - self.q_start, len(self.k_K)


@dataclass(frozen=True)
class BlockBatch:
    """Blocks padded to one size. No place is the query of two blocks."""

    q_BQ: Places
    """Places of the queries; a padded one repeats place 0."""
    k_BK: Places
    seen_BQ: Places
    """How many keys each query sees, counted from the first key; 0 at padding."""

    @classmethod
    def pad_blocks(cls, blocks: Sequence[KeyBlock]) -> BlockBatch:
        most_queries, most_keys = np.array([block.shape for block in blocks]).max(axis=0)
        q_BQ, seen_BQ = (np.zeros((len(blocks), most_queries), np.int64) for _ in range(2))
        k_BK = np.zeros((len(blocks), most_keys), np.int64)
        for b, block in enumerate(blocks):
            queries, keys = block.shape
            q_BQ[b, :queries] = np.arange(block.q_start, block.q_stop)
            k_BK[b, :keys] = block.k_K
            seen_BQ[b, :queries] = np.arange(keys - queries, keys) + 1 if block.causal else keys
        return cls(q_BQ, k_BK, seen_BQ)

    def split_parts(self, num_heads: int) -> Iterator[list[BlockBatch]]:
        """Batches whose scores fit into a chunk, or of 16 queries. The batches of one list have the same keys."""
        (blocks, queries), keys = self.q_BQ.shape, self.k_BK.shape[1]
        most = SCORES_A_CHUNK // num_heads
        if blocks * queries * keys <= most:
            yield [self]
        elif blocks > 1:
            step = max(1, most // (queries * keys))
            for start in range(0, blocks, step):
                some, seen_BQ = slice(start, start + step), self.seen_BQ[start : start + step]
                # Without the padding that all of these blocks have in common.
                queries, keys = (seen_BQ > 0).sum(axis=1).max(), seen_BQ.max()
                part = BlockBatch(self.q_BQ[some, :queries], self.k_BK[some, :keys], seen_BQ[:, :queries])
                yield from part.split_parts(num_heads)
        else:
            step = max(16, most // keys)
            spans = [slice(start, start + step) for start in range(0, queries, step)]
            yield [BlockBatch(self.q_BQ[:, span], self.k_BK, self.seen_BQ[:, span]) for span in spans]


class PlaceRows:
    """Maps places [B, n] of blocks to rows of tables of h heads and L places; N = h·B."""

    def __init__(self, places_Bn: Places, num_heads: int, num_places: int, device: torch.device) -> None:
        self.num_heads, self.device = num_heads, device
        self.num_blocks, self._places = num_heads * len(places_Bn), num_places
        start, stop = int(places_Bn[0, 0]), int(places_Bn[0, -1]) + 1
        is_range = len(places_Bn) == 1 and stop - start == places_Bn.shape[1]
        self.range = slice(start, stop) if is_range else None
        self.rows: Tensor | None = None
        """The row of each head and place, [hBn]; None if the places are one range."""
        if self.range is None:
            rows = num_places * np.arange(num_heads)[:, None, None] + places_Bn
            self.rows = torch.from_numpy(rows.reshape(-1)).to(device)

    def read_rows(self, table: Tensor) -> Tensor:
        """The rows of `table`, [N, n, ...]: a view if the places are one range, else a copy."""
        if self.rows is None:
            return table.view(self.num_heads, self._places, *table.shape[1:])[:, self.range]
        return table.index_select(0, self.rows).view(self.num_blocks, -1, *table.shape[1:])


class Chunk:
    """Blocks that are computed together.

    A chunk stores little: the rows of queries and keys that are not one range, and a mask of the keys that only some of
    the queries see. The chunks of one block share the rows of its keys.
    """

    def __init__(self, batch: BlockBatch, q: PlaceRows, k: PlaceRows, *, first: bool) -> None:
        """`first`: no earlier chunk has these queries."""
        self.first = first
        self._q, self._k, self._keys = q, k, int(batch.seen_BQ.max())
        is_real_BQ = batch.seen_BQ > 0
        self._real = self.padding = None
        if not is_real_BQ.all():
            is_real_hBQ = np.broadcast_to(is_real_BQ, (k.num_heads, *is_real_BQ.shape))
            is_real = torch.from_numpy(is_real_hBQ.reshape(-1)).to(k.device)
            self._real, self.padding = is_real.nonzero()[:, 0], (~is_real).nonzero()[:, 0]
        seen_BQ = np.where(is_real_BQ, batch.seen_BQ, self._keys)
        self._seen_by_all = int(seen_BQ.min())
        self._hidden_BQ1K: Tensor | None = None
        """−inf where a query does not see a key, else 0; only for keys that not all queries see. None: no such keys."""
        if self._seen_by_all < self._keys:
            hidden_BQK = torch.from_numpy(np.arange(self._seen_by_all, self._keys) >= seen_BQ[..., None]).to(k.device)
            hidden = torch.zeros(hidden_BQK.shape, device=k.device).masked_fill_(hidden_BQK, -torch.inf)
            self._hidden_BQ1K = hidden[:, :, None]

    def read_queries(self, table: Tensor) -> Tensor:
        """The queries' rows of `table`, [N, Q, ...]; at padding, the row of an arbitrary place."""
        return self._q.read_rows(table)

    def write_queries(self, table: Tensor, rows_NQ: Tensor, *, adds: bool = False) -> None:
        """Write the queries' rows of `table`, or add to them."""
        if self._q.rows is None:
            view = self._q.read_rows(table)
            (view.add_ if adds else view.copy_)(rows_NQ)
            return
        rows, places = rows_NQ.flatten(0, 1), self._q.rows
        if self._real is not None:
            rows, places = rows[self._real], places[self._real]
        (table.index_add_ if adds else table.index_copy_)(0, places, rows)

    def read_keys(self, table: Tensor) -> Tensor:
        """The keys' rows of `table`, [N, K, D]."""
        return self._k.read_rows(table)[:, : self._keys]

    def add_to_keys(self, table: Tensor, rows_NKD: Tensor) -> None:
        if self._k.rows is None:
            self._k.read_rows(table)[:, : self._keys].add_(rows_NKD)
        else:
            places = self._k.rows.view(self._k.num_blocks, -1)[:, : self._keys].reshape(-1)
            table.index_add_(0, places, rows_NKD.flatten(0, 1).to(table.dtype))

    def compute_scores(self, q_NXD: Tensor, k_NKD: Tensor) -> Tensor:
        """[N, X, K], −inf at keys that a query does not see."""
        scores_NXK = torch.bmm(q_NXD, k_NKD.transpose(1, 2))
        if self._hidden_BQ1K is not None:
            blocks, queries = self._hidden_BQ1K.shape[:2]
            scores_hBQgK = scores_NXK.view(self._k.num_heads, blocks, queries, -1, self._keys)
            scores_hBQgK[..., self._seen_by_all :] += self._hidden_BQ1K
        return scores_NXK


class Cascade:
    """The blocks of one forest. In all of them together, every query meets each key that it sees exactly once."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self._num_places, self._device = len(forest), device
        own, behind = make_blocks(forest)
        self.own = tuple(batch_alike(own))
        """Blocks in batches; each place is a query in exactly one of these blocks."""
        self.behind = tuple(part for blocks in behind for part in batch_alike(blocks))
        self._chunks: dict[tuple[int, int], tuple[Chunk, ...]] = {}

    def make_chunks(self, q_heads: int, k_heads: int) -> tuple[Chunk, ...]:
        """The chunks in the order of computation, for a model with these numbers of heads."""
        if (q_heads, k_heads) not in self._chunks:
            table = (k_heads, self._num_places, self._device)
            found: list[Chunk] = []
            batches = [*((blocks, True) for blocks in self.own), *((blocks, False) for blocks in self.behind)]
            for blocks, first in batches:
                for parts in BlockBatch.pad_blocks(blocks).split_parts(q_heads):
                    k = PlaceRows(parts[0].k_BK, *table)  # the chunks of one block share the rows of its keys
                    found += [Chunk(part, PlaceRows(part.q_BQ, *table), k, first=first) for part in parts]
            self._chunks[q_heads, k_heads] = tuple(found)
        return self._chunks[q_heads, k_heads]


def make_blocks(forest: Forest) -> tuple[list[KeyBlock], list[list[KeyBlock]]]:
    """(one block for each stem, lists of further blocks). Within a list, no place is a query twice."""
    place = np.arange(len(forest))
    own: list[KeyBlock] = []
    apart: list[KeyBlock] = []
    behind: defaultdict[int, list[KeyBlock]] = defaultdict(list)
    repeated: list[tuple[int, Places]] = []  # on the path from the root: (end, keys repeated up to there)
    stems = forest.stems()
    # For each stem, the number of the stems behind it that are not long, and of their places.
    sizes = np.array([stem.stop - stem.start for stem in stems])
    sizes[sizes > LONG] = 0
    sums = np.pad(np.stack((sizes > 0, sizes), axis=1).cumsum(axis=0), ((1, 0), (0, 0)))
    past = np.searchsorted([stem.start for stem in stems], [stem.end for stem in stems])
    for stem, (num, size) in zip(stems, (sums[past] - sums[1:]).tolist(), strict=True):
        while repeated and repeated[-1][0] <= stem.start:
            repeated.pop()
        before, keys = repeated[-1][1] if repeated else place[:0], place[stem.start : stem.stop]
        both = np.concatenate((before, keys)) if len(before) else keys
        is_apart = len(before) > 0 and len(keys) > LONG
        if is_apart:
            apart.append(KeyBlock(stem.start, stem.stop, before, causal=False))
        own.append(KeyBlock(stem.start, stem.stop, keys if is_apart else both, causal=True))
        if stem.stop == stem.end:
            continue
        if not num or len(keys) * num > REPEATED_A_QUERY * size:
            behind[stem.depth].append(KeyBlock(stem.stop, stem.end, keys, causal=False))
        elif len(both) * num > REPEATED_IN_ALL * size:
            behind[stem.depth].append(KeyBlock(stem.stop, stem.end, both, causal=False))
            repeated.append((stem.end, place[:0]))
        else:
            repeated.append((stem.end, both))
    return own, [apart, *behind.values()]


def batch_alike(blocks: Sequence[KeyBlock]) -> Iterator[list[KeyBlock]]:
    """Lists of blocks of similar sizes, the largest blocks first."""
    part: list[KeyBlock] = []
    used = widest = 0
    for block in sorted(blocks, key=lambda block: (-block.shape[1], -block.shape[0], block.q_start)):
        queries, keys = block.shape
        padded = (len(part) + 1) * max(widest, queries) * (part or [block])[0].shape[1]
        if used + queries * keys < PADDED_SHARE * padded:
            yield part
            part, used, widest = [], 0, 0
        part.append(block)
        used, widest = used + queries * keys, max(widest, queries)
    if part:
        yield part


class _CascadeAttention(torch.autograd.Function):
    """Attention [1, L, heads, D] of queries [1, heads, L, D]; keys and values may have fewer heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cascade: Cascade, scale: float) -> Tensor:
        k_heads, rounded = k.shape[1], _factor_dtype(q)
        q_table, k_table, v_table = (
            make_table(q, k_heads).mul_(scale),
            make_table(k, k_heads),
            make_table(v, k_heads, rounded),
        )
        each = q.shape[1] // k_heads
        out_table = q_table.new_empty(len(q_table), each * v.shape[-1])
        lse_table = q_table.new_empty(len(q_table), each, dtype=torch.float64)  # rounding would add up in many merges
        for chunk in cascade.make_chunks(q.shape[1], k_heads):
            q_NQgD = chunk.read_queries(q_table)
            num, queries = q_NQgD.shape[:2]
            weights_NXK = chunk.compute_scores(q_NQgD.view(num, -1, k.shape[-1]), chunk.read_keys(k_table))
            top_NX1 = weights_NXK.amax(dim=-1, keepdim=True)
            weights_NXK.sub_(top_NX1).exp_()
            sum_NX1 = weights_NXK.sum(dim=-1, keepdim=True)
            out_NXD = torch.bmm(weights_NXK.to(rounded), chunk.read_keys(v_table)).float().div_(sum_NX1)
            out, lse = out_NXD.view(num, queries, -1), sum_NX1.log_().double().add_(top_NX1).view(num, queries, -1)
            if not chunk.first:  # merge with the results over earlier keys
                before = chunk.read_queries(lse_table)
                both = torch.logaddexp(before, lse)
                merged = chunk.read_queries(out_table).view(*lse.shape, -1) * (before - both).float().exp_()[..., None]
                merged.addcmul_(out.view_as(merged), (lse - both).float().exp_()[..., None])
                out, lse = merged.flatten(2), both
            chunk.write_queries(out_table, out)
            chunk.write_queries(lse_table, lse)
        ctx.cascade, ctx.scale = cascade, scale
        out = _by_place(out_table, q.shape[1], k_heads, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse_table.float())  # `out` costs nothing: the next layer keeps it too
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse_table = ctx.saved_tensors
        (_, q_heads, _, channels), k_heads, rounded = q.shape, k.shape[1], _factor_dtype(q)
        q_table, k_table, v_table = (
            make_table(q, k_heads).mul_(ctx.scale),
            make_table(k, k_heads),
            make_table(v, k_heads),
        )
        grad_table, out_table = (make_table(tensor.transpose(1, 2), k_heads) for tensor in (grad, out))
        each = lse_table.shape[1]
        mean_table = torch.linalg.vecdot(*(table.view(len(table), each, -1) for table in (grad_table, out_table)))
        dq, dk, dv = torch.empty_like(q_table), torch.zeros_like(k_table), torch.zeros_like(v_table)
        for chunk in ctx.cascade.make_chunks(q_heads, k_heads):
            q_NQgD, k_NKD = chunk.read_queries(q_table), chunk.read_keys(k_table)
            num, queries = q_NQgD.shape[:2]
            q_NXD = q_NQgD.view(num, -1, channels)
            weights_NXK = (
                chunk.compute_scores(q_NXD, k_NKD).sub_(chunk.read_queries(lse_table).reshape(num, -1, 1)).exp_()
            )
            if chunk.padding is not None:
                weights_NXK.view(num * queries, -1).index_fill_(0, chunk.padding, 0.0)
            grad_NXD, v_NKD = chunk.read_queries(grad_table).view(num, q_NXD.shape[1], -1), chunk.read_keys(v_table)
            slopes_NXK = torch.bmm(grad_NXD, v_NKD.transpose(1, 2))
            slopes_NXK.sub_(chunk.read_queries(mean_table).reshape(num, -1, 1)).mul_(weights_NXK)
            weights_NXK, slopes_NXK = weights_NXK.to(rounded), slopes_NXK.to(rounded)
            chunk.add_to_keys(dv, torch.bmm(weights_NXK.transpose(1, 2), grad_NXD.to(rounded)))
            chunk.add_to_keys(dk, torch.bmm(slopes_NXK.transpose(1, 2), q_NXD.to(rounded)))
            dq_NQgD = torch.bmm(slopes_NXK, k_NKD.to(rounded)).view(num, queries, -1).float()
            chunk.write_queries(dq, dq_NQgD, adds=not chunk.first)
        found = (
            _by_place(table, heads, k_heads, q.dtype)
            for table, heads in ((dq.mul_(ctx.scale), q_heads), (dk, k_heads), (dv, k_heads))
        )
        return *(gradient.transpose(1, 2) for gradient in found), None, None


@functools.cache
def _is_fast_in_bfloat16() -> bool:
    return not is_slow_in_bfloat16()


def _factor_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the factors of all products except those that give scores and their gradients."""
    fast = q.dtype == torch.bfloat16 and q.device.type == "cpu" and _is_fast_in_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def make_table(tensor: Tensor, k_heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, heads, L, D] as [hL, gD]."""
    _, heads, places, channels = tensor.shape
    table = torch.empty(k_heads, places, heads // k_heads, channels, dtype=dtype, device=tensor.device)
    table.copy_(tensor[0].view(k_heads, -1, places, channels).transpose(1, 2))
    return table.view(k_heads * places, -1)


def _by_place(table: Tensor, heads: int, k_heads: int, dtype: torch.dtype) -> Tensor:
    """[hL, gD] as [1, L, heads, D]."""
    table = table.view(k_heads, -1, heads // k_heads, table.shape[1] * k_heads // heads)
    found = torch.empty(table.shape[1], k_heads, *table.shape[2:], dtype=dtype, device=table.device)
    return found.copy_(table.transpose(0, 1)).flatten(1, 2)[None]


BLOCK = 128
"""Places of a block, of queries and of keys: torch's default."""


def make_block_mask(ends_L: Tensor) -> Any:
    """torch's BlockMask for `flex_attention`: place q sees key k if k <= q < ends_L[k]. Made once for a forest.

    `ends_L` is `Forest.ends`: for each place, the first place behind those that continue it. The result equals that
    of torch's `create_block_mask`, which makes tensors of L x L; here memory grows with L and with (L / BLOCK)².
    """
    from torch.nn.attention.flex_attention import BlockMask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_L[key])

    partial_NN, full_NN = _seen_blocks(ends_L)
    listed = (*list_blocks(partial_NN), *list_blocks(full_NN))
    size = len(ends_L)
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size))


def _seen_blocks(ends_L: Tensor) -> tuple[Tensor, Tensor]:
    """(partial, full), both [N, N]: whether some or all of the row's block of queries see the column's block of keys.

    The queries that see a key are one range, which starts at the key. So the range of a key in an earlier block meets a
    block of queries if the range ends behind the block's start, and covers the block if the range ends at the block's
    stop or later. For a block of keys, the last end decides the first question, and the first end the second. Behind
    the last place is padding, which nothing sees and which sees nothing: a block with padding is never full, because no
    end reaches its stop.
    """
    ends_NP = pad(ends_L, (0, -len(ends_L) % BLOCK)).view(-1, BLOCK)
    start_N1 = torch.arange(len(ends_NP), device=ends_L.device)[:, None] * BLOCK
    met_NN = (ends_NP.amax(1) > start_N1).tril()
    full_NN = (ends_NP.amin(1) >= start_N1 + BLOCK).tril(-1)  # in its own block, a place does not see those behind it
    return met_NN & ~full_NN, full_NN


def list_blocks(blocks_NN: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the number of its True columns, [1, 1, N], and all columns, True ones first, [1, 1, N, N]."""
    columns_NN = blocks_NN.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_NN.sum(-1).int()[None, None], columns_NN.int()[None, None]


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    """Attention [1, L, heads, D] of queries [1, heads, L, D]; keys and values may have fewer heads."""
    found = compile_flex(q.device.type)(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    attended: Tensor = found.transpose(1, 2).contiguous()
    return attended


@cache
def compile_flex(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Lengths differ from forest to forest; with dynamic shapes they share one compiled kernel.
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


TREE = "flowrl_tree"
"""Name of the implementation in transformers' interface."""
UNKNOWN = ("block_indices", "indices", "position_bias", "s_aux", "softcap")
"""Keywords of layers whose attention is more than a mask, positions and a scale. The kernels would ignore them."""


class TreeAttention:
    """Which places of one forest see which, in the form that its kernel takes."""

    def __init__(self, forest: Forest, device: torch.device, kernel: Kernel | None = None) -> None:
        """`kernel` is the one that the rule chooses, if none is given."""
        self.forest = forest
        self.device = device
        self.kernel: Kernel = kernel or choose_kernel(forest, device.type)
        self._padded: dict[int, TreeAttention] = {}

    @cached_property
    def ends_L(self) -> Tensor:
        return torch.from_numpy(self.forest.ends).to(self.device)

    @cached_property
    def mask_11LL(self) -> Tensor:
        """True where the row's place sees the column's."""
        place_L = torch.arange(len(self.forest), device=self.device)
        seen_LL = (place_L[None] <= place_L[:, None]) & (place_L[:, None] < self.ends_L[None])
        return seen_LL[None, None]

    @property
    def passed_mask(self) -> Tensor:
        """What a model gets as `attention_mask`."""
        return self.mask_11LL if self.kernel == "dense" else any_mask(self.device)

    @cached_property
    def cascade(self) -> Cascade:
        return Cascade(self.forest, self.device)

    @cached_property
    def block_mask(self) -> Any:
        return make_block_mask(self.ends_L)

    def with_padding(self, added: int) -> TreeAttention:
        """With `added` places at the end that see nothing but themselves, and that no other place sees."""
        if added and added not in self._padded:
            self._padded[added] = TreeAttention(extended(self.forest, added), self.device, self.kernel)
        return self._padded[added] if added else self

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention [1, L, heads, D] of queries [1, heads, L, D] over keys and values with as many heads or fewer."""
        if self.kernel == "cascade":
            attended: Tensor = _CascadeAttention.apply(q, k, v, self.cascade, scale)  # type: ignore[no-untyped-call]
            return attended
        if self.kernel == "flex":
            return flex_attention(q, k, v, self.block_mask, scale)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found, _ = sdpa_attention_forward(module, q, k, v, self.mask_11LL, scaling=scale)
        return found  # type: ignore[no-any-return]


def any_mask(device: torch.device) -> Tensor:
    """A mask that attention does not read: transformers makes no mask itself if it is given one with four axes."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class UnknownToTreesError(ConfigError):
    """The model's attention is not only what mask, positions and `tree` say; the text is part of a sentence."""


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreeAttention | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The implementation `TREE`, with the signature of transformers' interface.

    Raises UnknownToTreesError if a layer does not pass `tree` on, or needs what neither a tree nor "sdpa" computes.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if unknown := sorted(name for name in UNKNOWN if kwargs.get(name) is not None):
        raise UnknownToTreesError(f"its attention has {', '.join(unknown)}, which no kernel of trees computes")
    if tree is None:
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:  # that of `any_mask`
            raise UnknownToTreesError("its layers do not pass the keyword `tree` on to their attention")
        rows: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return rows
    return tree(module, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def register_trees() -> str:
    """Register the implementation with transformers and return its name. Only once, because it may be wrapped later."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if TREE not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(TREE, tree_attention_forward)
    AttentionMaskInterface.register(TREE, sdpa_mask)
    return TREE
