"""An environment of verifiers, as its packages have it."""

from __future__ import annotations

from typing import Any

import verifiers


def load_environment(gym: str = "chain_sum", seed: int = 0, train: int = 40, held_out: int = 8) -> Any:
    return verifiers.ReasoningGymEnv(
        gym, num_train_examples=train, num_eval_examples=held_out, system_prompt="Answer in tags.", seed=seed
    )
