"""What a node that plays episodes reports about them: figures for the metrics, records for `flowrl show`.

The names of the figures are explained in docs/episodes.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from flowrl.agents import TokenSequence
from flowrl.graph.node import Context
from flowrl.messages import Prompt
from flowrl.nodes.episodes.episode_record import EpisodeRecords
from flowrl.nodes.episodes.failing_by_length import FailingByLength
from flowrl.nodes.episodes.played import Played
from flowrl.training.batch_stats import length_name

RETOKENIZED_ONE_IN = 8
"""One episode in this many is tokenized again: a reply takes 0.1 ms or more, as much as everything else together."""
SEAT_REWARD = re.compile(r"seat_\d+_reward")
"""Names of metrics that an episode of several seats has from flowrl itself."""


class EpisodeReports:
    """Counts and records the attempts of one node replica. `name_of` gives the name of what plays a prompt."""

    def __init__(self, context: Context, tokenizer: Any, *, name_of: Callable[[Prompt], str]) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self._records = EpisodeRecords(tokenizer, name_of)
        self._failing = FailingByLength()
        self._num_finished = 0
        self._told_metrics: set[str] = set()

    def finished(self, prompt: Prompt, attempt: int, played: Played, reward: float) -> None:
        """An episode was played to its end at this attempt, counted from 0."""
        self._failing.finished(prompt.group_id, prompt.group_size, played.turns)
        self._count(played)
        self._tell_metrics(played)
        if self._num_finished % RETOKENIZED_ONE_IN == 0:
            for sequence in played.sequences:
                self._count_retokenized(sequence)
        self._num_finished += 1
        self._attempt_ended("")
        if self._context.keep_episodes:
            line = self._records.line(prompt, attempt, played, reward=reward)
            self._context.episode(prompt.sample_id, line, failed=False)

    def _tell_metrics(self, played: Played) -> None:
        """Say once for each name where the metrics of an environment or an agent are, because they are no figures."""
        of_seats = {name for name in played.metrics if played.seat_rewards and SEAT_REWARD.fullmatch(name)}
        new = played.metrics.keys() - of_seats - self._told_metrics
        if new:
            self._told_metrics |= new
            self._context.progress(
                f"metrics of episodes ({', '.join(sorted(new))}) are shown by flowrl show, episode by episode; they "
                "are not in metrics.jsonl"
            )

    def failed(self, prompt: Prompt, attempt: int, played: Played | None, cause: str, text: str, *, last: bool) -> None:
        """An attempt failed; `last` says whether it was the last one of its episode.

        `played` is None if it failed before its first observation.
        """
        self._failing.failed(prompt.group_id, prompt.group_size, 0 if played is None else played.turns)
        if last:
            self._failing.ended(prompt.group_id, prompt.group_size)
        self._attempt_ended(cause)
        if self._context.keep_episodes:
            line = self._records.line(prompt, attempt, played, cause=cause, text=text)
            self._context.episode(prompt.sample_id, line, failed=True)

    def _attempt_ended(self, cause: str) -> None:
        metric = self._context.metric
        metric("attempts", 1)
        metric("attempts_failed", int(bool(cause)))
        if cause:
            metric(f"attempts_failed/{cause}", 1)
        if (score := self._failing.score()) is not None:
            self._context.gauge("failing_by_length", score)

    def _count(self, played: Played) -> None:
        metric, gauge = self._context.metric, self._context.gauge
        gauge("episode_turns", played.turns)
        gauge("episode_s", played.seconds)
        gauge("episode_tokens", sum(sequence.token_ids.size for sequence in played.sequences))
        sampled = sum(int(sequence.policy_mask.sum()) for sequence in played.sequences)
        metric(f"lengths_offered/{length_name(sampled)}", 1)
        for seconds in played.step_seconds:
            gauge("turn_environment_s", seconds)
        for figures in played.figures:
            gauge("turn_generate_s", figures.generate_s)
            gauge("turn_slot_s", figures.slot_s)
        metric("turns", played.turns)
        metric("later_context_tokens", sum(figures.context_tokens for figures in played.later_figures))
        metric("later_cached_tokens", sum(figures.cached_tokens for figures in played.later_figures))
        metric("malformed_calls", played.malformed)
        metric("episodes", 1)
        metric("episodes_truncated", int(bool(played.cut)))
        if played.cut:
            metric(f"episodes_truncated/{played.cut}", 1)

    def _count_retokenized(self, sequence: TokenSequence) -> None:
        spans = sampled_spans(sequence)
        self._context.metric("replies_checked", len(spans))
        self._context.metric("replies_retokenized", sum(retokenizes(self._tokenizer, ids) for ids in spans))


def sampled_spans(sequence: TokenSequence) -> list[list[int]]:
    """The ids of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(sequence.policy_mask.astype(np.int8), prepend=0, append=0))
    return [sequence.token_ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]


def retokenizes(tokenizer: Any, token_ids: list[int]) -> bool:
    """Whether tokenizing the text of these ids gives other ids."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) != token_ids
