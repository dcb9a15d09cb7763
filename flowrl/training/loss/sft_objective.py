"""The objective of supervised finetuning, as plain data. Axes: B samples, T policy tokens of the longest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flowrl.errors import ConfigError
from flowrl.messages import Trainable
from flowrl.training.loss.objective import Column, LossInputs, Totals
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SFT:
    """Maximum likelihood of the tokens in the loss mask."""

    aggregation: str = "token"
    """token | sequence"""

    def __post_init__(self) -> None:
        if self.aggregation not in ("token", "sequence"):
            raise ConfigError(f"aggregation is {self.aggregation!r}; choose token or sequence")

    head: ClassVar[Head] = "lm"
    at_end = False
    offline = True
    needs_proximal = False
    needs_reference = False
    needs_entropy_gradient = False
    needs_mismatched = False
    stats = ("entropy",)

    def enough(self, totals: Totals) -> bool:
        return totals.num_tokens > 0

    def columns(self, sample: Trainable) -> Column:
        return {}

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
