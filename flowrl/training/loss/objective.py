"""Objectives, the functions that a trainer minimises, as plain data that a graph file can build without torch.

An objective declares the data that it needs from a sample (`columns`: arrays over the sample's tokens, or None if the
sample lacks one) and computes the loss of one micro-batch (`loss`). Loss and stats are sums divided by the denominators
in `Totals`, which count the whole optimizer step: the results of all its micro-batches and ranks add up to the mean
over the step, however it is divided.

Masks of the tokens that enter a loss go over all sequences of a sample, one after the other.

Axes: B samples, T policy tokens of the longest one, P pairs.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from flowrl.messages import Bool, Column, Float32, Trainable
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = tuple(sorted(column.name for column in Trainable.token_columns if column.dtype == "float32"))
"""The fields of a `Trainable` that hold one number for each token."""


def trained_mask(sample: Trainable) -> Bool:
    """The tokens of `sample` that enter the loss, before staleness masking by the trainer."""
    return sample.whole_mask if sample.loss_mask is None else sample.loss_mask


def loss_masks(samples: Sequence[Trainable], mask_staleness: int, version: int) -> list[Bool]:
    """The tokens of each sample that enter the loss in an update of `version`; -1 masks no token by age.

    Tokens of data, which no version has sampled, have no age.
    """
    masks = [trained_mask(sample) for sample in samples]
    if mask_staleness < 0:
        return masks
    return [
        mask & ((version - s.whole_versions <= mask_staleness) | (s.whole_versions < 0))
        for s, mask in zip(samples, masks, strict=True)
    ]


SampleColumns = Mapping[str, "npt.NDArray[Any] | None"]
"""Name -> what a sample has in that column, for all its tokens; None if it lacks the column."""
MeanOver = Literal["tokens", "sequences", "pairs"]
"""What a loss is a mean over: the count of an optimizer step by which the whole loss is divided."""


@dataclass(frozen=True)
class Totals:
    """Denominators of one optimizer step, over all micro-batches and ranks."""

    num_tokens: int
    """Tokens that enter the loss."""
    num_sequences: int
    """Samples with at least one such token; an episode counts once, however many rows it has."""
    num_pairs: int = 0
    """Pairs in which both sequences have at least one such token."""
    num_desirable: int = 0
    """Sequences labelled 1 that have at least one such token."""
    num_places: int = 0
    """Tokens that the model computes in one pass over the samples, padding excluded; a shared prefix counts once."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def undivided_over(cls, over: MeanOver) -> Totals:
        """Denominators with which a loss and its stats are undivided sums, still to be divided by the number of `over`.

        Parts of them that have another denominator are 0.
        """
        ones = {name: 1.0 if name == f"num_{over}" else math.inf for name in (field.name for field in fields(cls))}
        return cls(**ones)  # type: ignore[arg-type]

    def number_of(self, over: MeanOver) -> int:
        """The denominator of a mean over tokens, sequences or pairs."""
        return int(getattr(self, f"num_{over}"))


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, as the input of a loss.

    With a scalar head, `values_BT` has the values, and logprobs, entropies and old logprobs are [B, 0]. With a language
    model, these three have values, and `values_BT` is [B, 0].
    """

    logprobs_BT: Tensor
    """log π_θ of the policy tokens. Gradients flow through them."""
    entropies_BT: Tensor
    """Entropy of the next token's distribution π; with a teacher π_T it is relative to the teacher's, −KL(π‖π_T)."""
    old_logprobs_BT: Tensor
    """log π_p. If a batch makes only one optimizer step, these are the logprobs themselves, detached."""
    mask_BT: Tensor
    """True at tokens that enter the loss."""
    columns: Mapping[str, Tensor]
    """The columns that the objective asked for, [B, T, the column's own axes] each; a column that a sample lacks is
    absent."""
    totals: Totals
    values_BT: Tensor
    labels_B: Tensor
    """Each sample's `label`."""
    pairs_P2: Tensor
    """Row of the chosen and of the rejected sequence of each pair in this micro-batch."""
    mismatched_kl: float = 0.0
    """Mean of log π/ref over the optimizer step's mismatched completions, for objectives with `needs_mismatched`."""
    sample_tokens_B: Tensor | None = None
    """For each row, the number of tokens of its sample that enter the loss, over all rows of that sample: the
    denominator of the mean of one sequence. None: every row is a sample of its own."""
    balance: Tensor | None = None
    """The load-balancing loss of this pass, if the trainer adds it to the objective's loss."""


CHOSEN = Column("chosen", "bool")
"""The tokens that an objective has chosen among all of an optimizer step, see `Objective.choose_tokens`."""


@dataclass(frozen=True)
class StepTokens:
    """All tokens in the loss of one optimizer step, as their samples carry them; their order says nothing (axis N)."""

    advantages_N: Float32
    behavior_logprobs_N: Float32
    keys_N: npt.NDArray[np.float64]
    """A number for each token, evenly distributed over [0, 1), the same however the step is divided."""

    @classmethod
    def collect_tokens(cls, rows: Sequence[Trainable], masks: Sequence[Bool]) -> StepTokens:
        """The marked tokens of these rows, one after the other; a further row of a sample has keys of its own."""
        numbers: Counter[str] = Counter()
        keys = [np.zeros(0)]
        for row, mask in zip(rows, masks, strict=True):
            seed = zlib.crc32(f"{row.sample_id}/{numbers[row.sample_id]}".encode())
            keys.append(np.random.default_rng(seed).random(mask.size)[mask])
            numbers[row.sample_id] += 1
        none = np.zeros(0, np.float32)
        advantages = [none, *(row.advantages[mask] for row, mask in zip(rows, masks, strict=True))]
        behavior = [none, *(row.behavior_logprobs[mask] for row, mask in zip(rows, masks, strict=True))]
        return cls(np.concatenate(advantages), np.concatenate(behavior), np.concatenate(keys))

    @classmethod
    def join_parts(cls, parts: Sequence[StepTokens]) -> StepTokens:
        """The tokens of all parts, part by part."""
        return cls(
            np.concatenate([part.advantages_N for part in parts]),
            np.concatenate([part.behavior_logprobs_N for part in parts]),
            np.concatenate([part.keys_N for part in parts]),
        )


LossFunction = Callable[[LossInputs], "Tensor | tuple[Tensor, Mapping[str, Tensor]]"]
"""A loss of a micro-batch as one function, see `flowrl.training.loss.function_objective`."""


class Objective(ABC):
    """A subclass defines `loss`, and `columns` if the loss needs data of the samples besides the model's output.

    The defaults fit a language model that is trained on rollouts. A subclass replaces a property by a class
    attribute (`offline = True`) or by a property of its own.
    """

    @property
    def head(self) -> Head:
        """Whether the loss uses logprobs of a language model or values of a scalar head."""
        return "lm"

    @property
    def at_end(self) -> bool:
        """Whether a scalar head is read only at each sequence's last token (T = 1), not before each policy token."""
        return False

    @property
    def offline(self) -> bool:
        """Whether the samples are data, not rollouts: they have no rewards, versions or behavior logprobs."""
        return False

    @property
    def needs_proximal(self) -> bool:
        """Whether π_p has to be computed before a batch with several optimizer steps, for `old_logprobs_BT`."""
        return self.head == "lm" and not self.offline

    @property
    def correction_name(self) -> str | None:
        """Name of the loss's term that corrects for sampling by another policy than π_p; "" if it has none.

        None: the loss does not depend on the sampling policy, or it is not known whether it corrects for it.
        """
        return None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads `ref_logprobs`. A trainer of adapters computes the ones that samples lack."""
        return False

    @property
    def needed_columns(self) -> tuple[Column, ...]:
        """Columns that the loss reads and that are no fields of `Trainable`: a node before the trainer has to add them,
        which `flowrl check` checks."""
        return ()

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether gradients flow through `entropies_BT`."""
        return False

    @property
    def needs_mismatched(self) -> bool:
        """Whether each optimizer step starts with a pass over the samples' mismatched completions."""
        return False

    @property
    def chooses_tokens(self) -> bool:
        """Whether `choose_tokens` marks tokens of each optimizer step; samples then have the column `CHOSEN`."""
        return False

    @property
    def mean_over(self) -> MeanOver | None:
        """What all of the loss is a mean over: tokens, sequences or pairs of the optimizer step.

        If it is set, a trainer may start before the whole batch has arrived, when the number is not known yet, and
        divides the gradient at the end. None, the default: the loss has another form, or does not say, so batches stay
        whole.
        """
        return None

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the stats that `loss` may return; every metrics line contains them."""
        return ()

    def enough(self, totals: Totals) -> bool:
        """Whether an optimizer step has something to average over; otherwise the step is skipped."""
        return totals.num_tokens > 0

    def has_gradient(self, sample: Trainable, mask: Bool) -> bool:
        """Whether the sample can change the gradient. `mask` marks its tokens that enter the loss.

        A trainer makes no backward pass over groups of samples for which this is False. True, the default, is always
        right; False means that the sample's loss is a constant.
        """
        return True

    def choose_tokens(self, step: StepTokens) -> Bool:
        """Mark tokens of an optimizer step, before its first pass and over all ranks; equal on every rank."""
        raise NotImplementedError

    def columns(self, sample: Trainable) -> SampleColumns:
        """Arrays over all tokens of the sample, by name."""
        return {}

    @abstractmethod
    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(loss, stats) of a micro-batch, sums divided by `inputs.totals`.

        The loss has a gradient even if no token is in the mask: every rank takes part in every backward pass.
        """

    def problems(self) -> list[str]:
        """Mistakes for `flowrl check` to report, as complete sentences."""
        return []
