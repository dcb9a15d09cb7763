"""Objectives, the functions that a trainer minimises, as plain data that a graph file can build without torch.

An objective declares the data it needs from a sample (`columns`: arrays over the sample's tokens, or None if the
sample lacks it), whether it needs the proximal policy, and the loss of one micro-batch. Losses and
stats are sums over the global denominators in `Totals`, see `flowrl.training.loss.policy_losses`.

Axes: B samples, T policy tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flowrl.messages import Float32, Trainable
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor

Column = Mapping[str, "Float32 | None"]


@dataclass(frozen=True)
class Totals:
    """Denominators of one optimizer step, over all micro-batches and ranks."""

    num_tokens: int
    """Tokens that enter the loss."""
    num_sequences: int
    """Sequences with at least one such token."""
    num_pairs: int = 0
    """Pairs of which both sequences have one."""
    num_desirable: int = 0
    """Sequences labelled 1 that have one."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, as the input of a loss."""

    logprobs_BT: Tensor
    entropies_BT: Tensor
    """Of the next token's distribution π; where a teacher π_T is at hand relative to it, −KL(π‖π_T)."""
    old_logprobs_BT: Tensor
    """π_p, or the logprobs themselves, detached, where the batch makes one optimizer step."""
    mask_BT: Tensor
    """True at tokens that enter the loss."""
    columns: Mapping[str, Tensor]
    """What the objective asked for, [B, T] each; absent where a sample lacks it."""
    totals: Totals
    values_BT: Tensor
    """What a scalar head says; its objectives see this, and logprobs, entropies and old ones [B, 0]."""
    labels_B: Tensor
    """Each sample's `label`."""
    pairs_P2: Tensor
    """RowLayout of the chosen and the rejected sequence of each pair in this micro-batch."""
    mismatched_kl: float = 0.0
    """Mean of log π/ref over the optimizer step's mismatched completions, where the objective asks for it."""


class Objective(Protocol):
    """The interface of an objective for the trainer."""

    @property
    def head(self) -> Head:
        """Whether the loss uses logprobs of a language model or values of a scalar head."""
        ...

    @property
    def at_end(self) -> bool:
        """Whether a scalar head is read only at each sequence's last token (T = 1), not before each policy token."""
        ...

    @property
    def offline(self) -> bool:
        """Whether the samples are data, not rollouts: they have no rewards, versions or behavior logprobs."""
        ...

    @property
    def needs_proximal(self) -> bool:
        """Whether π_p has to be computed before a batch with several optimizer steps."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether its loss reads `ref_logprobs`. A trainer of adapters computes those that the samples lack."""
        ...

    @property
    def needs_entropy_gradient(self) -> bool: ...

    @property
    def needs_mismatched(self) -> bool:
        """Whether each optimizer step starts with a pass over the samples' mismatched completions."""
        ...

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the stats that `loss` may return; every metrics line contains them."""
        ...

    def enough(self, totals: Totals) -> bool:
        """Whether an optimizer step has something to average over; otherwise the step is skipped."""
        ...

    def columns(self, sample: Trainable) -> Column:
        """Arrays over all tokens of the sample, by name."""
        ...

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]: ...
