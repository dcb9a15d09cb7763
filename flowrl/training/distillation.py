"""On-policy distillation: the student's own tokens, judged one by one by a teacher.

Axis T: tokens of one sample, prompt included.
"""

from __future__ import annotations

import numpy as np

from flowrl.messages import Bool, Float32
from flowrl.training.advantages import Array


def distillation_advantages(teacher_logprobs_T: Float32, behavior_logprobs_T: Float32, policy_mask_T: Bool) -> Array:
    """A_t = log π_teacher − log π_b at each policy token, 0 elsewhere.

    Each token stands for itself, without a return-to-go: in expectation the policy gradient is that of the
    reverse KL of each next token, KL(π‖π_teacher), at the prefixes that the student visits (2306.13649).
    """
    gap_T = teacher_logprobs_T.astype(np.float64) - behavior_logprobs_T
    return np.where(policy_mask_T, gap_T, 0.0)
