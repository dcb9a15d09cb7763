"""Messages to feed to a node: every field filled in, arrays that fit together, and what matters to a test by name.

A rollout has three prompt tokens; its `response` policy tokens were sampled under version 0 with logprob -0.5 each.
Replies to what a node asks have a token for each character, its code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flowrl.messages import Int32, Prompt, Sample, Scored, Tombstone
from flowrl.messages.episode import Reply, Turn

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


def said(turn: Turn, text: str, **more: Any) -> Reply:
    """The reply of a policy that says `text` to what an Ask port asked. `more` sets further fields of Reply."""
    ids = _codes(text)[: turn.max_tokens]
    told = turn.messages[1:] if turn.reply_tokens else turn.messages
    new = _codes("".join(f"<{message['role']}>{message['content']}" for message in told))
    fields: dict[str, Any] = {
        "request_id": turn.request_id,
        "token_ids": ids,
        "behavior_logprobs": np.full(ids.size, LOGPROB, np.float32),
        "versions": np.zeros(ids.size, np.int32),
        "finish_reason": "stop" if ids.size == len(text) else "length",
        "message": {"role": "assistant", "content": text[: ids.size]},
        "malformed": "",
        "cached_tokens": 0,
        "queued_s": 0.0,
        "generated_s": 0.0,
        "generator": "generator/0",
        "context_ids": np.concatenate([turn.token_ids, new]) if turn.messages else turn.token_ids,
    }
    return Reply(**(fields | more))


def script(*texts: str) -> Callable[[Turn], Reply]:
    """The answer to an Ask port for `answers` of a rig: says the texts one after the other, then from the beginning."""
    said_before = 0

    def answer(turn: Turn) -> Reply:
        nonlocal said_before
        said_before += 1
        return said(turn, texts[(said_before - 1) % len(texts)])

    return answer


def _codes(text: str) -> Int32:
    return np.array([ord(one) for one in text], np.int32)


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
