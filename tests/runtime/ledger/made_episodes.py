"""Episodes as an environment would send them, and the requests of their turns as generators report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrl.messages import Prompt
from flowrl.messages.episode import Episode, Reply, Turn
from flowrl.runtime.ledger.ledger_client import LedgerClient
from flowrl.runtime.ledger.token_digest import policy_spans

IDS = ("sample_id", "group_id", "prompt_id", "epoch", "member", "group_size")
BETWEEN = 2
"""Number of tokens that the environment says between two replies."""


def episode(prompt: Prompt, turns: Sequence[Sequence[int]], *, attempts: int = 1) -> Episode:
    """An episode whose replies have one token for each version in `turns`; every token and logprob is another one."""
    mask, versions = [False] * len(prompt.token_ids), [-1] * len(prompt.token_ids)
    for number, reply in enumerate(turns):
        said = BETWEEN if number else 0
        mask += [False] * said + [True] * len(reply)
        versions += [-1] * said + list(reply)
    policy_mask, places = np.array(mask), np.arange(len(mask))
    return Episode(
        **{name: getattr(prompt, name) for name in IDS},
        prompt_text=prompt.text,
        response_text="",
        token_ids=places.astype(np.int32),
        policy_mask=policy_mask,
        behavior_logprobs=np.where(policy_mask, -places / 8, 0).astype(np.float32),
        versions=np.array(versions, np.int32),
        prompt_tokens=0,
        truncated=False,
        generator="generator/0",
        reward=1.0,
        turns=len(turns),
        attempts=attempts,
        environment="counting",
    )


def asked(played: Episode, attempt: int = 0) -> list[tuple[Turn, Reply]]:
    """The turns of an episode, and their replies."""
    return [turn_of(played, attempt, number, *span[:2]) for number, span in enumerate(policy_spans(played))]


def turn_of(played: Episode, attempt: int, number: int, start: int, tokens: int) -> tuple[Turn, Reply]:
    request_id, part = f"{played.sample_id}:{attempt}:{number}", slice(start, start + tokens)
    ids = {"request_id": request_id, "sample_id": played.sample_id, "group_id": played.group_id}
    place: dict[str, Any] = {"turn": number, "attempt": attempt, "ticket": 0, "seed": 1, "max_tokens": 64}
    reply = Reply(
        request_id,
        played.token_ids[part],
        played.behavior_logprobs[part],
        played.versions[part],
        finish_reason="stop",
        message={"role": "assistant", "content": ""},
        malformed="",
        cached_tokens=start // 2,
        queued_s=0.0,
        generated_s=0.0,
        generator="generator/0",
    )
    return Turn(**ids, **place, token_ids=played.token_ids[:start]), reply


def ask(client: LedgerClient, played: Episode, attempt: int = 0) -> None:
    """Report the requests of an attempt that says what this episode has."""
    for turn, reply in asked(played, attempt):
        client.request(turn, reply)


def play(client: LedgerClient, prompt: Prompt, turns: Sequence[Sequence[int]], *, void: Sequence[str] = ()) -> Episode:
    """Report an episode with its requests, after an attempt for each cause in `void`; returns it."""
    for attempt, cause in enumerate(void):
        ask(client, episode(prompt, turns[:1]), attempt)
        client.attempt_void(prompt.sample_id, attempt, cause)
    played = replace(episode(prompt, turns), attempts=len(void) + 1)
    ask(client, played, len(void))
    client.episode(played, truncated=None, seconds=1.5)
    client.scored(played)
    return played
