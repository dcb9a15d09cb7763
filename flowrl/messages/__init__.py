"""The messages that travel along edges.

A message is a frozen dataclass, a subclass of `Message`. Its fields hold scalars, str, bytes, tuples, lists, dicts (or
`MappingProxyType`), messages and numpy arrays and numbers. Every value keeps its type on every path: within a process,
between processes, and in a checkpoint. `send` rejects values whose type cannot be kept (a named tuple, an enum, an
OrderedDict, a masked array, a torch tensor, an integer beyond 64 bits, text with lone surrogates). Arrays are read-only
on arrival and valid until the item is finished; copy what has to live longer. A message is frozen after `send`: do not
change lists and dicts in it either.

Array axes: T tokens of one sample, prompt included.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from flowrl.errors import FlowrlError
from flowrl.messages import packing
from flowrl.messages.base import Column as Column
from flowrl.messages.base import Message as Message
from flowrl.messages.base import node_context

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
TensorRow = tuple[str, str, tuple[int, ...], int, int]
"""(name, dtype, shape, offset_bytes, num_bytes)"""


def no_ids() -> Int32:
    """Ids, or versions, of no tokens."""
    return np.zeros(0, np.int32)


def no_logprobs() -> Float32:
    """Logprobs of no tokens."""
    return np.zeros(0, np.float32)


@dataclass(frozen=True)
class Record(Message):
    """What a node has done for an item so far, for a checkpoint (`In.keep`). Subclasses add what the node needs.

    The checkpoint fills in the `prefix_*` arrays (equal lengths): the tokens sampled so far for the request `asked`.
    """

    request_ids: tuple[str, ...] = ()
    """Booked requests whose replies this record holds: these requests stay valid in a resumed run."""
    asked: str = ""
    """Id of the open request, "" if there is none."""
    prefix_token_ids: Int32 = field(default_factory=no_ids)
    prefix_logprobs: Float32 = field(default_factory=no_logprobs)
    prefix_versions: Int32 = field(default_factory=no_ids)


@dataclass(frozen=True)
class Prompt(Message):
    """One sample that is not generated yet: member `member` of group `group_id`.

    `seed` is derived from run seed, prompt, epoch and member, so it does not depend on replicas or
    timing. The `prefix_*` arrays (equal lengths) hold the tokens generated before a checkpoint;
    they are empty for a fresh prompt and count as response.
    """

    sample_id: str
    group_id: str
    prompt_id: str
    epoch: int
    member: int
    group_size: int
    seed: int
    text: str
    token_ids: Int32
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns (answer, metadata): handed to rewards by name."""
    prefix_token_ids: Int32 = field(default_factory=no_ids)
    prefix_logprobs: Float32 = field(default_factory=no_logprobs)
    prefix_versions: Int32 = field(default_factory=no_ids)
    record: Record | None = None
    """What a node had done for the prompt when the checkpoint was taken (`In.keep`); None for a fresh prompt."""
    top_k: int | None = None
    top_p: float | None = None
    """Like `top_k` and `temperature`, only for held-out prompts: used in place of the generator's value."""
    temperature: float | None = None
    """Only for held-out prompts: used in place of the generator's temperature."""
    parent_id: str = ""
    """The sample that a node derived this one from; "" for a sample of a source."""

    @property
    def derived_under(self) -> str:
        """The label under which a node derived this sample; "" for a sample of a source."""
        return _label_of(self)

    @classmethod
    def derived_from(cls, parent: Prompt | Sample, sample_id: str, member: int, seed: int) -> Self:
        """The prompt of a sample derived from another: as that one's prompt, with an identity of its own."""
        own: dict[str, Any] = {name: getattr(parent, name) for name in OF_PROMPT}
        own |= {"sample_id": sample_id, "member": member, "parent_id": parent.sample_id}
        if isinstance(parent, Prompt):
            return cls(**own, seed=seed, text=parent.text, token_ids=parent.token_ids)
        return cls(**own, seed=seed, text=parent.prompt_text, token_ids=parent.token_ids[: parent.prompt_tokens])


def _label_of(sample: Prompt | Sample) -> str:
    return sample.sample_id.removeprefix(f"{sample.parent_id}/").rpartition(".")[0] if sample.parent_id else ""


OF_PROMPT = ("sample_id", "group_id", "prompt_id", "epoch", "member", "group_size", "columns", "parent_id")
"""The fields that a sample takes from its prompt."""


@dataclass(frozen=True)
class ColumnValues(Message):
    """The values of a column that a node has added to a sample, with what the column's declaration says."""

    flat: npt.NDArray[Any]
    """All values one after the other: short arrays of one axis are sent together."""
    shape: tuple[int, ...] = ()
    per: str = "token"
    in_digest: bool = False

    @property
    def values(self) -> npt.NDArray[Any]:
        """[tokens of all sequences, ...], or [1, ...] if there is one value for the sample."""
        return self.flat.reshape(-1, *self.shape)

    def cut(self, start: int, end: int | None) -> ColumnValues:
        """The values of these tokens; of a column of the sample, its one value."""
        return self if self.per == "sample" else replace(self, flat=self.values[start:end].reshape(-1))


@dataclass(frozen=True)
class Branch(Message):
    """A further sequence of an episode whose context was rewritten; its arrays are like those of `Sample`.

    `policy_mask` marks the tokens that were sampled and are in no earlier sequence of the sample.
    """

    token_ids: Int32
    policy_mask: Bool
    behavior_logprobs: Float32
    versions: Int32


@dataclass(frozen=True)
class Sample(Message):
    """A finished rollout: one class for single-turn, multi-turn, tools and images.

    `policy_mask` marks the tokens that the policy sampled; `behavior_logprobs` and `versions` are meaningful only there
    (0 and -1 elsewhere). An episode may have several sequences: its own and `branches`; `ref_logprobs` cover all.
    """

    token_columns: ClassVar[tuple[Column, ...]] = (
        Column("token_ids", "int32", in_digest=True, in_branches=True),
        Column("policy_mask", "bool", in_branches=True),
        Column("behavior_logprobs", in_digest=True, in_branches=True),
        Column("versions", "int32", in_digest=True, in_branches=True),
        Column("ref_logprobs"),
        Column("teacher_logprobs"),
        Column("values"),
    )
    """The fields that hold a value for each token; those that nodes may leave out are None."""

    sample_id: str
    group_id: str
    prompt_id: str
    epoch: int
    member: int
    group_size: int
    prompt_text: str
    response_text: str
    token_ids: Int32
    policy_mask: Bool
    behavior_logprobs: Float32
    versions: Int32
    prompt_tokens: int
    truncated: bool
    generator: str
    """Node replica that generated it, as "generator/0"."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(index of the turn's last policy token, reward), for environments that reward single turns."""
    media: tuple[str, ...] = ()
    """Content hashes of attachments."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    ref_logprobs: Float32 | None = None
    teacher_logprobs: Float32 | None = None
    """Logprobs of the policy tokens under a teacher (distillation); 0 elsewhere."""
    teacher_hidden: Float32 | None = None
    """[policy tokens, teacher's hidden size]: what the teacher's output layer computes its logits from."""
    values: Float32 | None = None
    """The critic's V of the state before each policy token; 0 elsewhere."""
    values_version: int = -1
    """Version of the critic that gave `values`."""
    generated_s: float = 0.0
    branches: tuple[Branch, ...] = ()
    """The sequences after the first, in the order of their beginnings."""
    added_columns: Mapping[str, ColumnValues] | None = None
    """By name, the columns that nodes have declared (`Facts.columns`) and added. Read them by `column`."""
    parent_id: str = ""
    """The sample that a node derived this one from; "" for a sample of a source."""

    @property
    def derived_under(self) -> str:
        """The label under which a node derived this sample; "" for a sample of a source."""
        return _label_of(self)

    @classmethod
    def of_prompt(cls, prompt: Prompt, **content: Any) -> Self:
        """The rollout of a prompt: member of its group, with its columns and text unless `content` has others.

        `content` are the other fields by name.
        """
        own = {name: getattr(prompt, name) for name in OF_PROMPT}
        return cls(**{**own, "prompt_text": prompt.text, **content})

    @property
    def sequences(self) -> tuple[Sample | Branch, ...]:
        """Everything that has the arrays of a sequence: the sample itself, and its branches."""
        return (self, *self.branches)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(sequence.token_ids.size for sequence in self.sequences)

    def column(self, name: str) -> npt.NDArray[Any] | None:
        """The values of a column for all sequences, one after the other; None if the sample lacks it.

        The column is one of `token_columns`, or one that a node has added.
        """
        if self.added_columns is not None and name in self.added_columns:
            return self.added_columns[name].values
        found: npt.NDArray[Any] | None
        declared = next((column for column in self.token_columns if column.name == name), None)
        if declared is None:
            return None
        if declared.in_branches and self.branches:
            found = np.concatenate([getattr(sequence, name) for sequence in self.sequences])
        else:
            found = getattr(self, name)
        return found

    def with_column(self, column: Column, values: npt.ArrayLike) -> Self:
        """The sample with the values of `column`: one for each token of all sequences, in their order, or a single one.

        Raises FlowrlError if the values are not what the column declares, or the sample has such a column already.
        """
        array = np.asarray(values)
        wanted = (self.num_tokens if column.per == "token" else 1, *column.shape)
        if array.dtype != column.dtype or array.shape != wanted:
            raise FlowrlError(
                f"sample {self.sample_id!r}: the column {column} got an array of {array.dtype} {[*array.shape]}; it "
                f"needs {column.dtype} {[*wanted]}"
            )
        if hasattr(self, column.name) or column.name in (self.added_columns or ()):
            raise FlowrlError(
                f"sample {self.sample_id!r} has {column.name!r} already; give the column {column} another name"
            )
        made = ColumnValues(array.reshape(-1), column.shape, column.per, column.in_digest)
        return replace(self, added_columns={**(self.added_columns or {}), column.name: made})

    def with_columns_of(self, other: Sample) -> Self:
        """The sample with those columns of `other`, the same sample from another branch of the graph, that it lacks."""
        lacking = {
            column.name: value
            for column in self.token_columns
            if getattr(self, column.name) is None and (value := getattr(other, column.name, None)) is not None
        }
        if other.added_columns:
            lacking["added_columns"] = {**other.added_columns, **(self.added_columns or {})}
        return replace(self, **lacking)

    def cut_tokens(self, start: int) -> Self:
        """The sample, which has no branches, without its first `start` tokens, all of which are of its prompt."""
        kept: dict[str, Any] = {
            column.name: values[start:]
            for column in self.token_columns
            if (values := getattr(self, column.name)) is not None
        }
        if self.added_columns is not None:
            kept["added_columns"] = {name: added.cut(start, None) for name, added in self.added_columns.items()}
        return replace(self, **kept, prompt_tokens=self.prompt_tokens - start)

    def split_rows(self) -> list[Self]:
        """One sample for each sequence."""
        if not self.branches:
            return [self]
        ends = np.cumsum([sequence.token_ids.size for sequence in self.sequences]).tolist()
        spans = [*pairwise([0, *ends])]
        rows: list[dict[str, Any]] = [{"branches": ()} for _ in spans]
        for column in self.token_columns:
            if column.in_branches:
                parts = [getattr(sequence, column.name) for sequence in self.sequences]
            elif (values := getattr(self, column.name)) is None or len(values) != ends[-1]:
                continue
            else:
                parts = [values[start:end] for start, end in spans]
            for row, part in zip(rows, parts, strict=True):
                row[column.name] = part
        if self.added_columns is not None:
            for row, (start, end) in zip(rows, spans, strict=True):
                row["added_columns"] = {name: added.cut(start, end) for name, added in self.added_columns.items()}
        return [replace(self, **row) for row in rows]

    @property
    def whole_mask(self) -> Bool:
        """`policy_mask` of all sequences, one after the other."""
        return cast(Bool, self.column("policy_mask"))

    @property
    def whole_versions(self) -> Int32:
        """`versions` of all sequences, one after the other."""
        return cast(Int32, self.column("versions"))

    @property
    def response_tokens(self) -> int:
        """Number of policy tokens of all sequences."""
        return int(self.whole_mask.sum())


@dataclass(frozen=True)
class Scored(Sample):
    """A sample with its reward. `raw_reward` is the reward before shaping; parts are logged by name."""

    reward: float = 0.0
    raw_reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    scored_s: float = 0.0
    seats: tuple[int, ...] = ()
    """Only for episodes: the seat of each sequence; () if the environment has one seat."""
    seat_rewards: tuple[tuple[int, float], ...] = ()
    """(seat, its reward after shaping) of each seat that the policy has played, also of one without a turn."""

    @classmethod
    def of(cls, sample: Sample, reward: float, raw_reward: float | None = None, /, **parts: float) -> Scored:
        """`sample` with its reward, and the `parts` that are logged by name; the ledger learns it from the node that
        calls this.

        Without a `raw_reward`, the reward was not shaped.
        """
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Sample)}
        raw = reward if raw_reward is None else raw_reward
        made = Scored(**fields, reward=reward, raw_reward=raw, reward_parts=parts, scored_s=time.time())
        if (context := node_context.get()) is not None:
            context.ledger.scored(made)
        return made


@dataclass(frozen=True)
class Mismatched(Message):
    """A prompt with the completion of another row; KTO computes its baseline on it."""

    token_ids: Int32
    mask: Bool
    """The completion's tokens, its end included."""
    ref_logprobs: Float32 | None = None
    """Logprobs of the completion's tokens under the reference; 0 elsewhere."""


@dataclass(frozen=True)
class Trainable(Scored):
    """A scored sample with its advantage at every policy token (0 elsewhere).

    `advantages`, `loss_mask` and `returns` cover all sequences, one after the other.
    """

    token_columns: ClassVar[tuple[Column, ...]] = (
        *Scored.token_columns,
        Column("advantages"),
        Column("loss_mask", "bool"),
        Column("returns"),
    )

    advantages: Float32 = field(default_factory=lambda: np.zeros(0, np.float32))
    loss_mask: Bool | None = None
    """Tokens that enter the loss; None means `whole_mask`. Narrowed by staleness masking."""
    returns: Float32 | None = None
    """What the critic learns to predict at each policy token; 0 elsewhere."""
    label: int = 0
    """1: chosen or desirable, -1: rejected or undesirable, 0: neither."""
    pair: str = ""
    """Samples of one batch with the same non-empty pair are neighbours and stay together."""
    mismatched: Mismatched | None = None
    """This sample's prompt with another row's completion."""
    times_trained: int = 0
    """Number of batches that have used it before this one; above 0 only for samples that a batcher replays."""

    @classmethod
    def of(  # type: ignore[override]
        cls, scored: Scored, advantages: npt.ArrayLike | None = None, /, *, returns: npt.ArrayLike | None = None
    ) -> Trainable:
        """`scored` with its advantages: one number for all policy tokens, or an array over the tokens of all sequences.

        What is left of a longer array is padding. None: a later node has them. Raises FlowrlError for a shorter array.
        """

        def per_token(values: npt.ArrayLike) -> Float32:
            array = np.asarray(values, np.float32)
            if array.ndim == 0:
                return scored.whole_mask * array
            if array.ndim != 1 or array.size < scored.num_tokens:
                raise FlowrlError(
                    f"sample {scored.sample_id!r} has {scored.num_tokens} tokens, but was given an array of the shape "
                    f"{array.shape}; give a number for each token of all sequences, or one number"
                )
            return array[: scored.num_tokens]

        made = {field.name: getattr(scored, field.name) for field in dataclasses.fields(Scored)}
        loss_mask = scored.loss_mask if isinstance(scored, Trainable) else None
        if getattr(scored, "masked", False):  # an episode that stays out of the loss
            loss_mask = np.zeros(scored.num_tokens, np.bool_)
        return Trainable(
            **made,
            advantages=no_logprobs() if advantages is None else per_token(advantages),
            returns=None if returns is None else per_token(returns),
            loss_mask=loss_mask,
        )

    @property
    def pass_tokens(self) -> int:
        """The number of tokens that a pass over the sample's longest sequence needs space for."""
        longest = max(sequence.token_ids.size for sequence in self.sequences)
        return int(longest if self.mismatched is None else max(longest, self.mismatched.token_ids.size))


@dataclass(frozen=True)
class Group(Message):
    """The scored and advantaged members of one prompt; failed members are absent."""

    group_id: str
    samples: tuple[Trainable, ...]
    group_size: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts that the batch adds up, such as what was filtered since the group before."""


@dataclass(frozen=True)
class Batch(Message):
    """One optimizer batch, or one rank's part of it. A batch makes one version.

    `num_sequences` and `num_tokens` are those of the whole batch, so that every rank has the global denominators; a
    sample counts as one sequence. `micro_batches` holds sequence numbers, counted through all `samples`; if no sample
    has branches, they are indices into `samples`. All ranks have the same number of micro-batches. An empty micro-batch
    runs on padding, because ZeRO-3's collectives need every rank.
    """

    samples: tuple[Trainable, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    num_sequences: int
    num_tokens: int
    num_groups: int
    mask_staleness: int = -1
    """>= 0: the trainer masks tokens older than this out of the loss (`on_limit="mask"`)."""
    token_budget: int = 0
    """Maximum number of tokens in a micro-batch, padding included, used by `split`; 0: one micro-batch per step."""
    layout: str = "rows"
    """Whether micro-batches are packed as rows or as trees of shared prefixes. auto: trees if enough is shared. The
    parts that `split` makes then say which of the two they are."""
    optimizer_steps: int = 1
    """Mini-batches the samples are cut into, in their order: one optimizer step each."""
    step_ends: tuple[int, ...] = ()
    """Set by `split`: number of micro-batches after which each optimizer step ends."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    piece: int = 0
    """A batch may come in pieces, as its groups finish: the number of this piece, from 0. Counts are the piece's."""
    last: bool = True
    """Whether this piece completes the batch, so that the optimizer step follows. `metrics` are those of the whole
    batch in the last piece, and empty in earlier ones. A batch that comes whole is a single piece, the last."""

    @property
    def whole(self) -> bool:
        """Whether the batch came whole."""
        return self.last and not self.piece

    def split(self, n: int) -> tuple[Batch, ...]:
        """The parts for `n` ranks: balanced by tokens, equal micro-batch counts (gang dispatch).

        Raises ConfigError if a single sequence, or a single pair, exceeds the token budget.
        """
        units, way = packed(self.samples), self.how_packed()
        owners = [number for number, sample in enumerate(self.samples) for _ in sample.sequences]
        names = [f"pair {s.pair!r}" if s.pair else f"sample {s.sample_id!r}" for s in self.samples for _ in s.sequences]
        packing.require_budget(units, self.token_budget, names, way)
        parts = packing.split_batch(units, n, optimizer_steps=self.optimizer_steps, packing=way)
        layout = "tree" if isinstance(way, packing.ByTree) else "rows"
        return tuple(
            replace(
                self, samples=tuple(self.samples[i] for i in mine), micro_batches=found, step_ends=ends, layout=layout
            )
            for mine, found, ends in (part.by_sample(owners) for part in parts)
        )

    def how_packed(self) -> packing.Packing:
        """How to pack the samples: as trees if the layout is "tree", or "auto" and they share enough prefixes."""
        twice = any(sample.mismatched is not None for sample in self.samples)
        passes = [found for sample in self.samples for found in _passes(sample, twice)]
        if self.layout == "tree" or (self.layout == "auto" and packing.share_enough([tokens for tokens, *_ in passes])):
            return packing.ByTree(self.token_budget, passes)
        return packing.ByRows(self.token_budget)


def packed(samples: Sequence[Trainable]) -> list[packing.PackedUnit]:
    """The units that one rank trains in one optimizer step, pairs and single samples, as sequence numbers."""
    units = packing.join_pairs([s.pass_tokens for s in samples], [s.pair for s in samples])
    lengths = [[one.token_ids.size for one in s.sequences] if s.branches else [s.pass_tokens] for s in samples]
    return packing.split_by_sequences(units, lengths) if any(s.branches for s in samples) else units


def _passes(sample: Trainable, twice: bool) -> list[tuple[Int32, ...]]:
    """For each sequence, its tokens in the pass over it and, if `twice`, in the pass over mismatched completions."""
    other = sample.mismatched
    found = [(one.token_ids, one.token_ids if other is None else other.token_ids) for one in sample.sequences]
    return [one[: 1 + twice] for one in found]


@dataclass(frozen=True)
class ValueQuestion(Message):
    """All sequences of a batch for which a critic is asked for values. They are stored one after the other, so that a
    question about any number of samples is three arrays."""

    lengths: Int32
    token_ids: Int32
    policy_mask: Bool

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """The first sequences of `samples`, in their order."""
        return cls(
            np.array([sample.token_ids.size for sample in samples], np.int32),
            np.concatenate([no_ids(), *(sample.token_ids for sample in samples)]),
            np.concatenate([np.zeros(0, np.bool_), *(sample.policy_mask for sample in samples)]),
        )

    @property
    def sequences(self) -> list[tuple[Int32, Bool]]:
        """(token ids, policy mask) of each sequence."""
        ends = np.cumsum(self.lengths)[:-1]
        return [*zip(np.split(self.token_ids, ends), np.split(self.policy_mask, ends), strict=True)]


@dataclass(frozen=True)
class Values(Message):
    """A critic's values for a question, one sequence after the other: V before each policy token, 0 elsewhere."""

    version: int
    """Version of the critic, the same for all values."""
    values: Float32


def _no_numbers() -> Int64:
    return np.zeros(0, np.int64)


def _int64(values: Iterable[int]) -> Int64:
    return np.array([*values], np.int64)


@dataclass(frozen=True)
class TensorTable(Message):
    """Rows of N tensors of a manifest of weights, in the transport's order, as columns. Iterate it for the rows.

    A model with hundreds of experts has some hundred thousand tensors. A message with one value for each field of each
    tensor is refused by its receiver, which cannot know what decoding so many values costs. A few arrays cost the
    receiver nothing, however long they are.
    """

    names: bytes = b""
    """All names in UTF-8, each followed by a zero byte, which no name has."""
    dtypes: tuple[str, ...] = ()
    """The dtypes that occur."""
    dtype: Int64 = field(default_factory=_no_numbers)
    """[N], indices into `dtypes`."""
    axes: Int64 = field(default_factory=_no_numbers)
    """[N], the numbers of axes."""
    sizes: Int64 = field(default_factory=_no_numbers)
    """[sum of `axes`], the shapes one after the other."""
    offset_bytes: Int64 = field(default_factory=_no_numbers)
    """[N]"""
    num_bytes: Int64 = field(default_factory=_no_numbers)
    """[N]"""

    @staticmethod
    def of(rows: Iterable[TensorRow]) -> TensorTable:
        names, dtypes, shapes, offsets, lengths = zip(*rows, strict=True) if (rows := [*rows]) else ((),) * 5
        known = tuple(dict.fromkeys(dtypes))
        return TensorTable(
            b"".join(name.encode() + b"\0" for name in names),
            known,
            _int64(map(known.index, dtypes)),
            _int64(map(len, shapes)),
            _int64(size for shape in shapes for size in shape),
            _int64(offsets),
            _int64(lengths),
        )

    def __len__(self) -> int:
        return len(self.dtype)

    def __iter__(self) -> Iterator[TensorRow]:
        names = self.names.decode().split("\0")[:-1]
        dtypes = [self.dtypes[number] for number in self.dtype.tolist()]
        sizes, ends = self.sizes.tolist(), accumulate(self.axes.tolist(), initial=0)
        shapes = [tuple(sizes[start:end]) for start, end in pairwise(ends)]
        return zip(names, dtypes, shapes, self.offset_bytes.tolist(), self.num_bytes.tolist(), strict=True)


@dataclass(frozen=True)
class Weights(Message):
    """The manifest of one published version; the tensors are in the transport it names.

    `probe_logprobs` are the trainer's logprobs of the fixed probe sequences; empty if this
    publication has no probe.
    """

    policy: str
    version: int
    base_version: int
    kind: str
    """full | adapter | delta | unchanged"""
    transport: str
    """Where to fetch the tensors: "shm:SEGMENT", see `flowrl.graph.routes.WeightTransport.at`."""
    num_bytes: int
    checksum: int
    tensors: TensorTable = field(default_factory=TensorTable)
    probe_token_ids: tuple[tuple[int, ...], ...] = ()
    probe_logprobs: tuple[tuple[float, ...], ...] = ()
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Only for kind "adapter": r, lora_alpha, use_rslora and target_modules, as PEFT names them."""


@dataclass(frozen=True)
class Tombstone(Message):
    """Replaces a sample (member >= 0) or a whole group (member -1) that will not arrive.

    `state` is the state in which the ledger closes it: failed, filtered or dropped.
    """

    group_id: str
    member: int
    state: str
    reason: str
    node: str
    sample_ids: tuple[str, ...] = ()
    group_size: int = 0
    response_tokens: int = 0
    whole_group: bool = False
    """Whether the whole group was given up with this sample."""
