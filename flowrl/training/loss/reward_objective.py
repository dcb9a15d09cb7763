"""The objective of a reward model, as plain data; the formula is in `flowrl.training.loss.preference_losses`.

Axes: B samples, P pairs of the micro-batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Trainable
from flowrl.training.loss.objective import Column, LossInputs, MeanOver, Objective, Totals
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BradleyTerry(Objective):
    """−log σ(chosen − rejected − margin) on neighbouring samples of one `pair`, scored at their last token."""

    margin: bool = False
    """Use each pair's margin (2307.09288) from the column `margin` of its row."""
    centring: float = 0.0
    """Weight of the mean of (chosen + rejected)², which keeps scores around 0."""

    head: ClassVar[Head] = "scalar"
    at_end = True
    offline = True
    mean_over: ClassVar[MeanOver] = "pairs"
    stats = ("preference_accuracy", "score_margin", "chosen_score", "rejected_score", "score_mean", "score_square")

    def __post_init__(self) -> None:
        if not 0 <= self.centring < float("inf"):
            raise ConfigError(f"centring is {self.centring}; it has to be 0 or more")

    def enough(self, totals: Totals) -> bool:
        return totals.num_pairs > 0

    def columns(self, sample: Trainable) -> Column:
        if not self.margin:
            return {}
        margin = sample.columns.get("margin", None if sample.label else 0.0)  # label 0: not in a pair, needs none
        if not isinstance(margin, int | float):
            raise FlowrlError(
                f"sample {sample.sample_id!r} has the margin {margin!r}; with margin=True every row of the pairs "
                "needs a column margin that holds a number"
            )
        return {"margin": np.full(len(sample.token_ids), margin, np.float32)}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.preference_losses import reward_model_loss

        chosen, rejected = inputs.pairs_P2.unbind(dim=1)
        scores_B, num_pairs = inputs.values_BT[:, 0], inputs.totals.num_pairs  # `at_end`: one value for each sequence
        margin_P = inputs.columns["margin"][chosen, 0] if self.margin else None
        loss, stats = reward_model_loss(
            scores_B[chosen], scores_B[rejected], margin_B=margin_P, centring=self.centring, num_pairs=num_pairs
        )
        both_P2 = scores_B.detach()[inputs.pairs_P2]
        return loss, {
            "preference_accuracy": stats["accuracy"],
            "score_margin": stats["margin"],
            "chosen_score": both_P2[:, 0].sum() / num_pairs,
            "rejected_score": both_P2[:, 1].sum() / num_pairs,
            "score_mean": both_P2.sum() / (2 * num_pairs),
            "score_square": both_P2.square().sum() / (2 * num_pairs),
        }
