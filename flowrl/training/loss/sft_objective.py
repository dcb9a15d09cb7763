"""The objective of supervised finetuning, as plain data. Axes: B samples, T policy tokens of the longest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.errors import ConfigError
from flowrl.training.loss.objective import LossInputs, MeanOver, Objective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SFTObjective(Objective):
    """Maximum likelihood of the tokens in the loss mask."""

    aggregation: str = "token"
    """token | sequence"""

    def __post_init__(self) -> None:
        if self.aggregation not in ("token", "sequence"):
            raise ConfigError(f"aggregation is {self.aggregation!r}; choose token or sequence")

    offline = True
    stats = ("entropy",)

    @property
    def mean_over(self) -> MeanOver:
        return "tokens" if self.aggregation == "token" else "sequences"

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.policy_losses import aggregate

        loss = aggregate(
            -inputs.logprobs_BT,
            inputs.mask_BT,
            self.aggregation,  # type: ignore[arg-type]
            num_tokens=inputs.totals.num_tokens,
            num_sequences=inputs.totals.num_sequences,
        )
        entropy = aggregate(inputs.entropies_BT.detach(), inputs.mask_BT, num_tokens=inputs.totals.num_tokens)
        return loss, {"entropy": entropy}
