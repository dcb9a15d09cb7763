"""One ZeRO rank of the reward-model test, started by `tests.stack.ranks.ranks`.

Trains a reward model for a few steps of plain SGD from the policy in DIRECTORY/policy, at stage 3 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.messages import Batch, Trainable
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.learner import Learner
from flowrl.training.loss.objective import loss_masks
from flowrl.training.loss.preference_objectives import BradleyTerry
from flowrl.training.settings import ZeroSettings
from tests.models.word_policy import EOS, WORDS
from tests.stack.ranks.ranks import as_rank

EVERYTHING_SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STAGES = (3, 2)
STEPS, LR = 3, 0.02
OBJECTIVE = BradleyTerry(margin=True, centring=0.02)
SEED = 11


def sequence(draw: np.random.Generator, prompt: list[int]) -> list[int]:
    return [*prompt, *draw.integers(0, WORDS, int(draw.integers(1, 7))).tolist(), EOS]


def make_pairs(step: int, num_pairs: int = 5) -> list[Trainable]:
    """Chosen and rejected by turns, of uneven lengths, each pair with its margin."""
    draw = np.random.default_rng(step)
    samples = []
    for pair in range(num_pairs):
        prompt = draw.integers(0, WORDS, int(draw.integers(1, 5))).tolist()
        margin = float(draw.uniform(0, 1))
        for label in (1, -1):
            tokens = sequence(draw, prompt)
            samples.append(make_sample(f"{step}.{pair}", label, tokens, len(prompt), margin))
    return samples


def make_sample(pair: str, label: int, tokens: list[int], num_prompt: int, margin: float) -> Trainable:
    mask = np.arange(len(tokens)) >= num_prompt
    named: dict[str, Any] = {"sample_id": f"{pair}:{label}", "group_id": pair, "prompt_id": pair, "pair": pair}
    return Trainable(
        **named,
        epoch=0,
        member=int(label < 0),
        group_size=2,
        prompt_text="",
        response_text="",
        token_ids=np.array(tokens, np.int32),
        policy_mask=mask,
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int32),
        prompt_tokens=num_prompt,
        truncated=False,
        generator="",
        columns={"margin": margin},
        label=label,
    )


def whole(samples: list[Trainable], token_budget: int) -> Batch:
    tokens = sum(sample.response_tokens for sample in samples)
    return Batch(tuple(samples), (), len(samples), tokens, len(samples) // 2, token_budget=token_budget)


def train(stage: int, gang: Gang, directory: Path) -> None:
    torch.manual_seed(SEED)
    settings = ZeroSettings(
        stage=stage, optimizer="sgd", clip_grad_norm=0.0, attention="sdpa", deepspeed=EVERYTHING_SHARDED
    )
    engine = ZeroEngine(directory / "policy", settings, gang, head="scalar", start="policy")
    learner = Learner(engine, OBJECTIVE)
    engine.export_model(directory / f"start-{stage}")
    updates = []
    for step in range(STEPS):
        part = whole(make_pairs(step), token_budget=26).split(gang.size)[gang.rank]
        updates.append(learner.train_piece(part, loss_masks(part.samples, -1, step), step, LR))
    engine.record_scores(0.25, 1.5)
    engine.export_model(directory / f"end-{stage}")
    if gang.rank == 0:
        told = [dict(update.stats) | {"tokens": update.token_passes} for update in updates]
        torch.save(told, directory / f"told-{stage}.pt")


def train_all(gang: Gang, directory: Path, _: Sequence[str]) -> None:
    for stage in STAGES:
        train(stage, gang, directory)


if __name__ == "__main__":
    as_rank(train_all)
