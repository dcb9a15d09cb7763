"""The oracle's other objectives: preferences, single verdicts and a critic's values, on made-up batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.messages import Batch, Mismatched, Trainable
from flowrl.training.loss.objective import Objective
from flowrl.training.loss.preference_objectives import DPOObjective, KTOObjective
from flowrl.training.loss.token_objectives import ValueObjective
from tests.oracle.cases import FIRST, IN_PIECES
from tests.training.training_cases import VOCABULARY

NUM_PAIRS = 5
PIECES = ((2, 4), (6,), (4, 6))
"""Samples in the pieces of each batch but its last one, pairs whole. The last batch's last one is empty."""
STALE = 1
"""Largest age of a token that enters the loss, where a case masks."""


@dataclass(frozen=True)
class OfflineCase:
    """One objective. `objective` are its fields."""

    name: str
    family: str
    """dpo | kto | value"""
    objective: dict[str, Any] = field(default_factory=dict)
    optimizer_steps: int = 2
    epochs: int = 1
    mask_staleness: int = -1

    @property
    def in_pieces(self) -> OfflineCase:
        """The same with batches in pieces, of which there is one optimizer step."""
        return replace(self, name=f"{self.name}{IN_PIECES}", optimizer_steps=1, epochs=1)

    @property
    def head(self) -> Any:
        return "scalar" if self.family == "value" else "lm"

    def made(self) -> Objective:
        made: dict[str, Any] = {"dpo": DPOObjective, "kto": KTOObjective, "value": ValueObjective}
        objective: Objective = made[self.family](**self.objective)
        return objective


OFFLINE_CASES = (
    OfflineCase("dpo", "dpo", {"beta": 0.3}),
    OfflineCase("dpo_nll", "dpo", {"beta": 0.3, "nll_coef": 0.2}, epochs=2),
    OfflineCase("ipo", "dpo", {"beta": 0.3, "kind": "ipo"}),
    OfflineCase("cdpo", "dpo", {"beta": 0.3, "kind": "cdpo", "label_smoothing": 0.2}, optimizer_steps=1),
    OfflineCase("kto", "kto", {"beta": 0.3}),
    OfflineCase("kto_weighted", "kto", {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.7}, epochs=2),
    OfflineCase("value", "value", {"clip": None}),
    OfflineCase("value_clipped", "value", {"clip": 0.05}, epochs=2, mask_staleness=STALE),
)


def make_batch(case: OfflineCase, number: int) -> Batch:
    """Pairs of uneven lengths, the rejected one first in every other; for `value` rollouts of several ages."""
    draw = np.random.default_rng(100 + number)
    samples = [_sample(draw, FIRST + number, pair, label) for pair in range(NUM_PAIRS) for label in (-1, 1)]
    if case.family != "dpo":
        samples = [_alone(sample) for sample in samples]
    if case.family == "kto":
        samples = [_mismatched(draw, a, b) for a, b in zip(samples, samples[2:] + samples[:2], strict=True)]
    return Batch(
        tuple(samples),
        (),
        num_sequences=len(samples),
        num_tokens=sum(s.response_tokens for s in samples),
        num_groups=NUM_PAIRS,
        mask_staleness=case.mask_staleness,
        token_budget=45,
        optimizer_steps=case.optimizer_steps,
    )


def _sample(draw: np.random.Generator, version: int, pair: int, label: int) -> Trainable:
    prompt, response = 3 + pair, int(draw.integers(1, 14))
    mask = np.arange(prompt + response) >= prompt

    def column(mean: float, scale: float) -> Any:
        return np.where(mask, draw.normal(mean, scale, mask.size), 0).astype(np.float32)

    ages = np.sort(draw.integers(0, 3, mask.size))[::-1]
    return Trainable(
        sample_id=f"{version}-{pair}-{label}",
        group_id=f"{version}-{pair}",
        prompt_id=str(pair),
        epoch=0,
        member=int(label > 0),
        group_size=2,
        prompt_text="",
        response_text="",
        token_ids=draw.integers(0, VOCABULARY, mask.size).astype(np.int32),
        policy_mask=mask,
        behavior_logprobs=column(-3.5, 0.5),
        versions=np.where(mask, version - ages, -1).astype(np.int32),
        prompt_tokens=prompt,
        truncated=False,
        generator="generator/0",
        ref_logprobs=column(-4.5, 0.5),
        values=column(0.0, 0.5),
        returns=column(0.3, 0.7),
        advantages=column(0.0, 1.0),
        label=label,
        pair=f"{version}-{pair}",
    )


def _alone(sample: Trainable) -> Trainable:
    return Trainable(**(vars(sample) | {"pair": ""}))


def _mismatched(draw: np.random.Generator, sample: Trainable, other: Trainable) -> Trainable:
    """`sample` with its prompt before the completion of `other`."""
    prompt, response = sample.token_ids[: sample.prompt_tokens], other.token_ids[other.prompt_tokens :]
    mask = np.arange(len(prompt) + len(response)) >= len(prompt)
    ref = np.where(mask, draw.normal(-5.5, 0.5, mask.size), 0).astype(np.float32)
    return Trainable(**(vars(sample) | {"mismatched": Mismatched(np.concatenate([prompt, response]), mask, ref)}))
