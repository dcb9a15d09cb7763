"""Rollouts as a generator and a reward would leave them, recorded to a file once for all cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from flowrl.messages import Scored
from flowrl.wire.encoding.codec import dump_value, load_value
from tests.oracle.cases import BATCHES, FIRST, GROUP_SIZE, MAX_STALENESS, TEMPERATURE
from tests.training.training_cases import VOCABULARY

SIZES = (3, 2, 4, 3)
"""Scored members of each group of a batch; what is missing of GROUP_SIZE was lost on the way."""
Recorded = tuple[tuple[Scored, ...], ...]


def record(model_dir: Path, path: Path) -> None:
    """Groups for BATCHES batches, in order of admission; batch n updates version FIRST + n.

    Behavior logprobs are the model's own with the noise that older weights and other numerics bring.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    draw = np.random.default_rng(11)
    groups = [
        _group(model, draw, version, group, size)
        for version in range(FIRST, FIRST + BATCHES)
        for group, size in enumerate(SIZES)
    ]
    path.write_bytes(dump_value(tuple(groups)))


def _group(
    model: torch.nn.Module, draw: np.random.Generator, version: int, group: int, size: int
) -> tuple[Scored, ...]:
    """Members of a group have their prompt in common."""
    prompt = draw.integers(0, VOCABULARY, int(draw.integers(2, 8)))
    return tuple(_rollout(model, draw, version, group, member, prompt) for member in range(size))


def load(path: Path) -> Recorded:
    groups: Recorded = load_value(path.read_bytes())
    return groups


def _rollout(
    model: torch.nn.Module, draw: np.random.Generator, version: int, group: int, member: int, prompt_ids: np.ndarray
) -> Scored:
    prompt, response = len(prompt_ids), int(draw.integers(1, 15))
    token_ids = np.concatenate([prompt_ids, draw.integers(0, VOCABULARY, response)]).astype(np.int32)
    mask = np.arange(prompt + response) >= prompt
    if response > 5:
        mask[prompt + 2 : prompt + 4] = False  # a tool's answer between two turns
    ages = np.sort(draw.integers(0, MAX_STALENESS + 1, len(mask)))[::-1]
    if (group, member) == (1, 0):
        ages = np.full(len(mask), MAX_STALENESS)  # with masking nothing of it is left
    own = _logprobs(model, token_ids)
    places = np.flatnonzero(mask)

    def at_policy(values: np.ndarray, elsewhere: float = 0.0) -> np.ndarray:
        return np.where(mask, values, elsewhere)

    parts = np.random.default_rng((version, group, member)).normal(0, 1, 2)
    return Scored(
        sample_id=f"{version}-{group}-{member}",
        group_id=f"{version}-{group}",
        prompt_id=str(group),
        epoch=0,
        member=member,
        group_size=GROUP_SIZE,
        prompt_text="",
        response_text="",
        token_ids=token_ids,
        policy_mask=mask,
        behavior_logprobs=at_policy(own + draw.normal(0, 0.2, len(mask))).astype(np.float32),
        versions=at_policy(version - ages, -1).astype(np.int32),
        prompt_tokens=prompt,
        truncated=False,
        generator="generator/0",
        turn_rewards=((int(places[1]), 0.25), (int(places[-1]), -0.5)) if member == 1 and len(places) > 3 else (),
        reward_parts={"first": float(parts[0] > 0), "second": float(parts[1])},
        ref_logprobs=at_policy(own + draw.normal(0, 0.4, len(mask))).astype(np.float32),
        values=at_policy(draw.normal(0.3, 0.5, len(mask))).astype(np.float32),
        reward=0.1 if group == 3 else float(draw.choice([0.0, 0.5, 1.0]) + draw.normal(0, 0.1)),
    )


def _logprobs(model: torch.nn.Module, token_ids: np.ndarray) -> np.ndarray:
    """log p of each token given those before it; 0 for the first."""
    ids = torch.tensor(token_ids.astype(np.int64))
    with torch.no_grad():
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0] / TEMPERATURE, -1)
    return np.concatenate([[0.0], log_p[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])
