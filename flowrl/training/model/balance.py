"""The load-balancing loss of a mixture of experts, as transformers defines it for the model's family.

E · Σ_e f_e P_e over all layers and tokens of a pass, padding excluded (arXiv 2101.03961, equations 4 to 6): f_e is the
share of the tokens that are routed to expert e, through which no gradient flows, P_e the mean probability of e.

Axes: R rows, L positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class Balance:
    """The loss of one model."""

    of_family: Callable[..., Tensor]
    num_experts: int
    num_chosen: int
    """Number of experts that compute a token."""

    def __call__(self, router_logits: tuple[Tensor, ...], real_RL: Tensor) -> Tensor:
        return self.of_family(router_logits, self.num_experts, self.num_chosen, real_RL)


def found_balance(causal_lm: Any) -> Balance:
    """The loss of this model. Raises ConfigError if its family has none."""
    family = getattr(sys.modules[type(causal_lm).__module__], "load_balancing_loss_func", None)
    experts, chosen = (getattr(causal_lm, name, None) for name in ("num_experts", "num_experts_per_tok"))
    if family is None or not experts or not chosen:
        raise ConfigError(
            f"router_aux_loss_coef needs a load-balancing loss, and transformers has none for "
            f"{type(causal_lm).__name__}; set it to 0"
        )
    return Balance(family, experts, chosen)
