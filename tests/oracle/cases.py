"""What the oracle compares: every estimator with every ratio and every aggregation, in rows and in trees.

What is left to choose (stale masks, optimizer steps, epochs, KL in reward and loss, entropy) changes
from case to case, so that all of it meets all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from flowrl.training.settings import Layout

BATCHES = 3
LR = 0.02
TEMPERATURE = 0.8
GROUP_SIZE = 4
GROUPS = 4
MAX_STALENESS = 2
FIRST = MAX_STALENESS
"""The version that the first batch updates, so that its oldest tokens are of version 0."""
LENGTH = 12
"""The constant L of `aggregation="constant"`."""
LAM = 0.9
IN_PIECES = "-in-pieces"
PIECES = ((2, 4), (1, 1, 5), (4, 6))
"""Samples in the pieces of each batch but its last one; groups are whole, and cut, as by no batcher."""

ESTIMATORS = ("reinforce", "reinforce_baseline", "dr_grpo", "rloo", "group_norm", "gae")
AGGREGATIONS = ("token", "sequence", "constant")
NARROW = {"clip_low": 0.004, "clip_high": 0.006}
"""Bounds that a few small steps reach."""
RATIOS: dict[str, dict[str, Any]] = {
    "ppo": NARROW | {"correction": None},
    "dual_clip": NARROW | {"dual_clip": 1.003, "correction": "tis", "correction_range": (0.8, 1.25)},
    "behavior": {"old": "behavior", "dual_clip": 1.5, "correction": None},
    "decoupled": NARROW | {"correction": "decoupled", "correction_range": (0.0, 1.2)},
    "gspo": {
        "kind": "gspo",
        "clip_low": 0.001,
        "clip_high": 0.002,
        "correction": "sequence_mask",
        "correction_range": (0.85, 1.1),
    },
    "cispo": {
        "kind": "cispo",
        "clip_low": 0.995,
        "clip_high": 1.004,
        "correction": "icepop",
        "correction_range": (0.8, 1.25),
    },
    "reinforce": {
        "kind": "reinforce",
        "correction": "tis",
        "correction_level": "sequence",
        "correction_range": (0.5, 2.0),
    },
}
FROM_SAMPLER: dict[str, Any] = {"old": "behavior", "correction": None}
LATER_RATIOS: dict[str, dict[str, Any]] = {
    "sapo": {"kind": "sapo", "sapo_temperatures": (1.5, 3.0), "correction": "tis", "correction_range": (0.8, 1.25)},
    "gmpo": NARROW | {"kind": "gmpo", "correction": "icepop", "correction_range": (0.8, 1.25)},
    "vespo": FROM_SAMPLER | {"kind": "vespo", "vespo_powers": (1.5, 2.5), "vespo_decays": (2.0, 1.0)},
    "dppo": NARROW | FROM_SAMPLER | {"kind": "dppo", "ratio_penalty": 0.3},
    "clip_cov": NARROW | {"kind": "clip_cov", "cov_share": 0.2, "cov_range": (0.01, 5.0), "correction": None},
    "kl_cov": FROM_SAMPLER | {"kind": "kl_cov", "cov_share": 0.2, "ratio_penalty": 0.5},
}
"""Met by every aggregation and both layouts, under one estimator."""
LATER_ESTIMATORS = ("pass_at_k", "gdpo")
PASSES: dict[str, Any] = {"pass_k": 2, "pass_at": 0.45}
PART_WEIGHTS = (("first", 1.0), ("second", 0.5))
KL_LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {"kl_coef": 0.2, "kl_estimator": "k2"},
    {"kl_coef": 0.2, "kl_estimator": "k3"},
    {"kl_coef": 0.2, "kl_estimator": "k3_unbiased"},
)


@dataclass(frozen=True)
class OracleCase:
    """One way from recorded rollouts to weights."""

    number: int
    estimator: str
    ratio: str
    aggregation: str
    layout: Layout

    @property
    def name(self) -> str:
        return f"{self.estimator}-{self.ratio}-{self.aggregation}-{self.layout}"

    @property
    def in_other_layout(self) -> OracleCase:
        """The same in trees instead of rows, or the other way."""
        return replace(self, layout="rows" if self.layout == "tree" else "tree")

    @property
    def objective(self) -> dict[str, Any]:
        """Fields of PolicyObjective."""
        constant = {"length": LENGTH} if self.aggregation == "constant" else {}
        entropy = {"entropy_coef": 0.05} if self.number % 5 == 0 else {}
        return (
            (RATIOS | LATER_RATIOS)[self.ratio]
            | {"aggregation": self.aggregation}
            | constant
            | entropy
            | KL_LOSSES[self.number % len(KL_LOSSES)]
        )

    @property
    def kl_in_reward(self) -> tuple[float, str]:
        """Coefficient and estimator of the KL that the advantage node takes out of the reward."""
        return ((0.0, "k1"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3"))[self.number % 7 % 4]

    @property
    def gamma(self) -> float:
        return 0.95 if self.estimator in ("gae", "reinforce") else 1.0

    @property
    def whiten(self) -> str:
        if self.estimator not in ("gae", "reinforce", "reinforce_baseline", "gdpo"):
            return "off"
        return "mean" if self.number % 6 == 1 else "full"

    @property
    def mask_staleness(self) -> int:
        """-1: the batcher waits for old groups, and nothing is masked."""
        return 1 if self.number // 2 % 2 else -1

    @property
    def optimizer_steps(self) -> int:
        """Both numbers among the aggregations of every estimator with every ratio, and with and without masks."""
        return 2 if self.number % 2 else 1

    @property
    def epochs(self) -> int:
        return 2 if self.number % 8 in (2, 5) else 1


CASES = tuple(
    OracleCase(number, *choice, layout="tree" if number % 2 else "rows")
    for number, choice in enumerate(product(ESTIMATORS, RATIOS, AGGREGATIONS))
)
"""Every choice once; every estimator with every ratio in both layouts."""


def _is_in_square(case: OracleCase) -> bool:
    """In a Latin square, each estimator meets each ratio once, and each of the two meets each aggregation."""
    place = ESTIMATORS.index(case.estimator) + tuple(RATIOS).index(case.ratio) + 1
    return case.aggregation == AGGREGATIONS[place % len(AGGREGATIONS)]


CHOICES = (
    "estimator",
    "ratio",
    "aggregation",
    "layout",
    "optimizer_steps",
    "epochs",
    "mask_staleness",
    "whiten",
    "kl_in_reward",
)


def pairs_of(case: OracleCase) -> set[object]:
    """Each two choices that meet in this case."""
    return {(two, *(getattr(case, choice) for choice in two)) for two in combinations(CHOICES, 2)}


def _each_pair() -> tuple[OracleCase, ...]:
    """The square, and of the other cases those in which two choices meet that have not met before."""
    chosen = [case for case in CASES if _is_in_square(case)]
    met = set().union(*map(pairs_of, chosen))
    for case in CASES:
        if pairs_of(case) - met:
            chosen.append(case)
            met |= pairs_of(case)
    return tuple(chosen)


EACH_PAIR = _each_pair()
"""Some third of `CASES` in which each two choices meet that meet in all of them."""
OTHER_CASES = tuple(case.in_other_layout for case in CASES)
"""Every choice in the layout that it does not have in `CASES`."""
LATER_CASES = tuple(
    OracleCase(len(CASES) + number, "group_norm", *choice, layout="tree" if number % 2 else "rows")
    for number, choice in enumerate(product(LATER_RATIOS, AGGREGATIONS))
) + tuple(
    OracleCase(len(CASES) + number, *choice, layout="rows" if number % 2 else "tree")
    for number, choice in enumerate(product(LATER_ESTIMATORS, ("ppo", "gmpo"), ("token",)))
)
PIECE_CASES = tuple(
    case
    for case in CASES
    if case.name.rpartition("-")[0]
    in (
        "group_norm-ppo-token",
        "group_norm-dual_clip-sequence",
        "group_norm-behavior-constant",
        "group_norm-decoupled-sequence",
        "rloo-gspo-sequence",
        "rloo-cispo-token",
        "rloo-cispo-constant",
        "dr_grpo-reinforce-constant",
    )
)
"""Of those whose batches a batcher may send in pieces: all ratios, all aggregations, with masks, KL and entropy."""
