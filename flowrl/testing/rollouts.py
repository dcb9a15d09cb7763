"""Messages to feed to a node: every field filled in, arrays that fit together, and what matters to a test by name.

A rollout has three prompt tokens; its `response` policy tokens were sampled under version 0 with logprob -0.5 each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.messages import Prompt, Sample, Scored, Tombstone

PROMPT_TOKENS = 3
LOGPROB = -0.5
GROUP_SIZE = 4


def prompt(member: int = 0, *, group: str = "g", **more: Any) -> Prompt:
    """Member `member` of group `group`, not yet generated. `more` sets further fields of Prompt, or overrides these."""
    lineage = _lineage(member, group)
    token_ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
    fields: dict[str, Any] = {"seed": member, "text": "1+1=", "token_ids": token_ids, "columns": {"answer": "2"}}
    return Prompt(**(lineage | fields | more))


def sample(member: int = 0, *, response: int = 2, group: str = "g", **more: Any) -> Sample:
    """A rollout with `response` policy tokens. `more` sets further fields of Sample, or overrides these."""
    return Sample(**(_rollout(member, response, group) | more))


def scored(member: int, reward: float, *, response: int = 2, group: str = "g", **more: Any) -> Scored:
    """Like `sample`, with its reward."""
    return Scored(**(_rollout(member, response, group) | {"reward": reward, "raw_reward": reward} | more))


def lost(member: int, *, group: str = "g", state: str = "failed", reason: str = "test") -> Tombstone:
    """What arrives in place of a member that an earlier node lost: user code never sees it, but groups count it."""
    return Tombstone(group, member, state, reason, "reward/0", (f"{group}:{member}",), GROUP_SIZE)


def _lineage(member: int, group: str) -> dict[str, Any]:
    return {
        "sample_id": f"{group}:{member}",
        "group_id": group,
        "prompt_id": "p",
        "epoch": 0,
        "member": member,
        "group_size": GROUP_SIZE,
    }


def _rollout(member: int, response: int, group: str) -> dict[str, Any]:
    mask = np.array([False] * PROMPT_TOKENS + [True] * response)
    return _lineage(member, group) | {
        "prompt_text": "1+1=",
        "response_text": "2",
        "token_ids": np.arange(PROMPT_TOKENS + response, dtype=np.int32),
        "policy_mask": mask,
        "behavior_logprobs": np.where(mask, LOGPROB, 0.0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "prompt_tokens": PROMPT_TOKENS,
        "truncated": False,
        "generator": "generator/0",
        "columns": {"answer": "2"},
    }
