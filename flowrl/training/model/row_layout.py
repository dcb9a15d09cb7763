"""From samples to model input, and from the model's output to one row of policy tokens per sample.

Axes: B samples, R rows of the input, L input tokens of a row, l of one rank, N policy tokens of all samples, M of one
rank, T policy tokens of the longest sample.

`place_sequences` decides where a sequence's tokens are. Then each policy token gets the place that
predicts it: the place of the token before it. In a tree, a place may predict several tokens of different samples.

A sequence's last token is not part of the input, because it predicts nothing, unless a score is read there
(`lay_out_ends`).

Three layouts give the same results. `padded`: one right-padded row per sequence, which needs no attention mask, because
causal attention never looks to the right. `packed`: one row without padding, whose position ids restart at each
sequence; it is only for attention that splits sequences there (flash attention's variable-length kernels). With dense
kernels packing costs more than it saves, and a mask or a cache would let neighbours attend to each other. `tree`: one
row that has every prefix that sequences share only once (`flowrl.messages.forest`), with its own attention. `auto`
chooses `tree` if that saves enough places, else `padded`.

One rank's slice of a micro-batch (`slice_rows`): the same positions of every row, equally many for each rank of a
group.

Targets are assigned before rows are divided: each policy token, with its target, belongs to the rank that has the place
that predicts it, even if the token itself is in the next slice. Rows are padded at their end, which no other place
sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32
from flowrl.messages.forest import Places, make_forest, num_unique
from flowrl.training.layouts import Placing, possible_kernels
from flowrl.training.model.logprobs import Taught
from flowrl.training.model.sequence_attention import Exchange, SequenceGroup, Sight, gather_slices
from flowrl.training.model.tree_attention import TreeAttention, UnknownToTreesError, any_mask
from flowrl.training.settings import Dtype

TREE_SHARE = 0.9
"""Most places of a tree, as a share of those of padded rows, with which "auto" chooses the tree."""


@dataclass(frozen=True)
class PackedBounds:
    """Where the sequences of a packed row begin and end; computed once, so that not every layer has to find it out."""

    ends_S: Tensor
    """int32: a 0, then the place behind each sequence."""
    longest: int

    def with_padding(self, added: int) -> PackedBounds:
        """With one more sequence of `added` places at the end."""
        if not added:
            return self
        return PackedBounds(torch.cat((self.ends_S, self.ends_S[-1:] + added)), max(self.longest, added))


@dataclass(frozen=True)
class Placement:
    """The model's input, and where each sequence is in it."""

    input_ids_BL: Tensor
    position_ids_BL: Tensor | None
    """None: 0, 1, 2 ... in every row."""
    places: Sequence[Places]
    """For every sequence, the flat index of each of its tokens."""
    tree: TreeAttention | None = None
    bounds: PackedBounds | None = None
    """Bounds of the sequences in a packed row; None for other layouts."""


def place_sequences(sequences: Sequence[Int32], layout: Placing, device: torch.device | None = None) -> Placement:
    """The input of a pass over `sequences`."""
    where = device or torch.device("cpu")
    if layout == "tree" or (layout == "auto" and tree_saves_places(sequences)):
        forest = make_forest(sequences)
        return Placement(
            to_int64(forest.token_ids[None], where),
            to_int64(forest.positions[None], where),
            forest.places,
            TreeAttention(forest, where),
        )
    lengths = np.array([len(tokens) for tokens in sequences])
    widest = int(lengths.max())
    if layout == "packed":
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return Placement(
            to_int64(np.concatenate(sequences)[None], where),
            to_int64(np.concatenate([np.arange(n) for n in lengths])[None], where),
            [start + np.arange(length) for start, length in zip(ends[:-1], lengths, strict=True)],
            bounds=PackedBounds(torch.from_numpy(ends).to(where), widest),
        )
    rows = np.zeros((len(sequences), widest), np.int64)
    for row, tokens in zip(rows, sequences, strict=True):
        row[: len(tokens)] = tokens
    places = [n * widest + np.arange(length) for n, length in enumerate(lengths)]
    return Placement(to_int64(rows, where), None, places)


def tree_saves_places(sequences: Sequence[Int32]) -> bool:
    """Whether a tree saves so many places that its attention, slower for each place than a row's, is worth it."""
    return num_unique(sequences) <= TREE_SHARE * len(sequences) * max(map(len, sequences))


def to_int64(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


@dataclass(frozen=True)
class RowLayout:
    """One micro-batch as input of `PolicyModel` or `ScalarModel`."""

    input_ids_RL: Tensor
    position_ids_RL: Tensor | None
    """None: 0, 1, 2 ... in every row."""
    real_RL: Tensor
    """False at padding."""
    places_N: Tensor
    """For each policy token the flat index of the place that predicts it."""
    targets_N: Tensor
    cells_N: Tensor
    """For each policy token its flat index into [B, T]."""
    shape: tuple[int, int]
    taught: Taught | None = None
    """A teacher's distributions at these places; with it, entropies are relative to the teacher's."""
    tree: TreeAttention | None = None
    """If the input is a forest: which places see which."""
    bounds: PackedBounds | None = None
    """If the input is a packed row: where its sequences end."""
    exchange: Exchange | None = None
    """If the input is a slice of the positions (`flowrl.training.model.row_layout`): how ranks compute attention."""

    @property
    def model_input(self) -> dict[str, object]:
        """Arguments of a transformers model. They have an attention mask only with `tree` or `exchange`: for packed
        rows, the model would take a mask for padding."""
        found: dict[str, object] = {
            "input_ids": self.input_ids_RL,
            "position_ids": self.position_ids_RL,
            "use_cache": False,
        }
        if self.tree is not None:
            found |= {"attention_mask": self.tree.passed_mask, "tree": self.tree}
        if self.exchange is not None:
            found |= {"attention_mask": any_mask(self.input_ids_RL.device), "exchange": self.exchange}
        if self.bounds is not None:  # for variable-length attention, to which transformers' models pass these on
            found |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.bounds.ends_S)
            found |= dict.fromkeys(("max_length_q", "max_length_k"), self.bounds.longest)
        return found

    @property
    def num_computed(self) -> int:
        """Tokens that a pass computes, padding included."""
        return self.input_ids_RL.numel()

    def spread_values(self, values_N: Tensor) -> Tensor:
        """[N, ...] as [B, T, ...], 0 at padding. Differentiable."""
        flat = values_N.new_zeros(self.shape[0] * self.shape[1], *values_N.shape[1:])
        return flat.index_copy(0, self.cells_N, values_N).view(*self.shape, *values_N.shape[1:])

    def make_column(self, arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
        """One array per sample, already reduced to its policy tokens, as [B, T, ...]."""
        values = torch.from_numpy(np.concatenate(arrays)).to(device)
        return self.spread_values(values)


def policy_places(policy_mask_T: Bool) -> npt.NDArray[np.intp]:
    """Indices of the policy tokens. A sequence's first token is never one, because nothing predicts it."""
    places = np.flatnonzero(policy_mask_T)
    return places[1:] if places.size and places[0] == 0 else places


def lay_out(
    token_ids: Sequence[Int32],
    policy_masks: Sequence[Bool],
    *,
    layout: Placing = "padded",
    device: torch.device | None = None,
) -> RowLayout:
    """RowLayout of the given sequences, each of at least two tokens."""
    placed = place_sequences([tokens[:-1] for tokens in token_ids], layout, device)
    chosen = [policy_places(mask) for mask in policy_masks]
    before = [where[c - 1] for where, c in zip(placed.places, chosen, strict=True)]
    targets = [t[c] for t, c in zip(token_ids, chosen, strict=True)]
    return make_layout(placed, before, targets)


def lay_out_ends(
    token_ids: Sequence[Int32], *, layout: Placing = "padded", device: torch.device | None = None
) -> RowLayout:
    """RowLayout of whole sequences that are read only at their last token: N = B, T = 1."""
    placed = place_sequences(token_ids, layout, device)
    return make_layout(placed, [where[-1:] for where in placed.places], [np.zeros(1, np.int32)] * len(token_ids))


def make_layout(
    placed: Placement, places: Sequence[npt.NDArray[np.int64]], targets: Sequence[npt.NDArray[np.int32]]
) -> RowLayout:
    """The layout of sequences that are read at `places`, one array for each."""
    counts = [len(where) for where in places]
    most = max(1, *counts)
    device = placed.input_ids_BL.device

    def tensor(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)

    real = np.zeros(placed.input_ids_BL.numel(), np.bool_)
    real[np.concatenate(placed.places)] = True
    return RowLayout(
        input_ids_RL=placed.input_ids_BL,
        real_RL=torch.from_numpy(real).view(placed.input_ids_BL.shape).to(device),
        position_ids_RL=placed.position_ids_BL,
        places_N=tensor(places),
        targets_N=tensor(targets),
        cells_N=tensor([b * most + np.arange(n) for b, n in enumerate(counts)]),
        shape=(len(counts), most),
        tree=placed.tree,
        bounds=placed.bounds,
    )


@dataclass(frozen=True)
class RowSlice:
    """What one rank computes of a micro-batch that all ranks of its group have."""

    rows: RowLayout
    mine_M: Tensor
    """Indices of this rank's policy tokens among all. A rank without any computes one place, which is not read."""


def num_sliced(rows: RowLayout, group: SequenceGroup) -> int:
    """Tokens that the ranks of `group` compute together, padding included."""
    height, length = rows.input_ids_RL.shape
    return height * group.size * group.slice_width(length)


def compute_in_slices(
    model: Callable[..., Tensor | tuple[Tensor, ...]], rows: RowLayout, group: SequenceGroup | None, *settings: Any
) -> tuple[Tensor, ...]:
    """What `model` gives for `rows`, [N] each; each rank of a group computes a slice. Collective."""
    part = None if group is None else slice_rows(rows, group)
    found = model(rows if part is None else part.rows, *settings)
    each = (found,) if isinstance(found, Tensor) else found
    if part is None or group is None:
        return each
    number, mine_M = len(rows.places_N), part.mine_M
    return tuple(gather_slices(values[: len(mine_M)], mine_M, number, group) for values in each)


def slice_rows(rows: RowLayout, group: SequenceGroup) -> RowSlice:
    """This rank's slice of `rows`."""
    length, device = rows.input_ids_RL.shape[1], rows.places_N.device
    own = group.slice_width(length)
    added = own * group.size - length
    columns_l = group.columns_l(length, group.rank).to(device)
    positions = rows.position_ids_RL
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    own_L = torch.full((own * group.size,), -1, device=device).index_copy_(
        0, columns_l, torch.arange(own, device=device)
    )
    row_N, own_N = rows.places_N // length, own_L[rows.places_N % length]
    mine_M = torch.nonzero(own_N >= 0).flatten()
    places_M = (row_N * own + own_N)[mine_M]
    # ZeRO reduces a gradient of the output layer from every rank: one without policy tokens computes its place 0.
    none = len(mine_M) == 0
    bounds = None if rows.bounds is None else rows.bounds.with_padding(added)
    return RowSlice(
        replace(
            rows,
            input_ids_RL=pad(rows.input_ids_RL, (0, added))[:, columns_l],
            position_ids_RL=pad(positions, (0, added))[:, columns_l],
            real_RL=pad(rows.real_RL, (0, added))[:, columns_l],
            places_N=mine_M.new_zeros(1) if none else places_M,
            targets_N=mine_M.new_zeros(1) if none else rows.targets_N[mine_M],
            taught=None if none or rows.taught is None else rows.taught.at_places(mine_M),
            tree=None if rows.tree is None else rows.tree.with_padding(added),
            bounds=bounds,
            exchange=Exchange(group, Sight(length + added, device, None if bounds is None else bounds.ends_S)),
        ),
        mine_M,
    )


TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference that rounding explains, as a share of the mean size of the results.

In bfloat16, rounding causes 0.007 for SmolLM2's logprobs and 0.04 for the values of a new head on `tiny`.
"""
START, LENGTHS = 6, (9, 5, 7)
"""Lengths of the common start of the sequences, and of what follows it."""


def require_trees(
    score: Callable[[RowLayout], Tensor], *, name: str, vocab_size: int, dtype: Dtype, device: torch.device
) -> None:
    """Raise ConfigError if `score` gives other results for a tree of three sequences than for rows; collective.

    Each kernel that the device may choose is tried.
    """
    tree = make_trial_rows("tree", vocab_size, device)
    # Results that would change if a token saw the other sequences. There is one for each token except a sequence's
    # first. The first token after the common start does not count, because it is predicted from the start.
    ends = accumulate(START + length - 1 for length in LENGTHS)
    behind = [n for end, length in zip(ends, LENGTHS, strict=True) for n in range(end - length + 1, end)]
    assert tree.tree is not None
    attentions = (TreeAttention(tree.tree.forest, device, kernel) for kernel in possible_kernels(device.type))
    try:
        with torch.no_grad():
            rows = score(make_trial_rows("padded", vocab_size, device))
            trees = [score(replace(tree, tree=attention)) for attention in attentions]
    except UnknownToTreesError as error:
        raise ConfigError(
            f"{name} cannot compute shared prefixes once: {error}; set layout to rows (--zero.layout rows)"
        ) from error
    differences = [mean_difference(one[some], rows[some]) for one in trees for some in (slice(None), behind)]
    difference = float(torch.tensor(differences).max())  # Python's max would ignore a nan
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"{name} gives other results if prefixes that sequences share are computed once: they differ by "
            f"{difference:.2g} of their size; its attention sees more than mask and positions say, so set "
            "layout to rows (--zero.layout rows)"
        )


def require_slices(
    whole: Callable[[RowLayout], Tensor],
    sliced: Callable[[RowLayout], Tensor],
    *,
    layout: Placing,
    name: str,
    vocab_size: int,
    dtype: Dtype,
    device: torch.device,
) -> None:
    """Raise ConfigError unless ranks that share positions get the results of a rank with all positions; collective."""
    with torch.no_grad():
        rows = make_trial_rows(layout, vocab_size, device)
        difference = mean_difference(sliced(rows), whole(rows))
    if not difference <= TOLERANCE[dtype]:
        raise ConfigError(
            f"{name} gives other results if its positions are divided among ranks: they differ by {difference:.2g} of "
            "their size; some layer other than attention looks at neighbouring positions, so set "
            "sequence_parallel_size to 1 (--trainer.sequence-parallel-size 1)"
        )


def make_trial_rows(layout: Placing, vocab_size: int, device: torch.device) -> RowLayout:
    """Three sequences with a common start."""
    draw = np.random.default_rng(0)
    start = draw.integers(0, vocab_size, START)
    sequences = [np.concatenate([start, draw.integers(0, vocab_size, n)]).astype(np.int32) for n in LENGTHS]
    return lay_out(sequences, [np.ones(len(tokens), np.bool_) for tokens in sequences], layout=layout, device=device)


def mean_difference(one: Tensor, other: Tensor) -> float:
    """Mean difference as a share of the mean size."""
    return float((one - other).abs().mean() / other.abs().mean().clamp(min=1e-6))
