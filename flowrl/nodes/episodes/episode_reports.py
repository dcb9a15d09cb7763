"""What a node that plays episodes reports about them: figures for the metrics, records for `flowrl show`.

The names of the figures are explained in docs/episodes.md.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.agents import TokenSequence
from flowrl.graph.node import Context
from flowrl.messages import Prompt
from flowrl.models.tokens.vocabulary import TokenPieces
from flowrl.nodes.episodes.attempt import Played
from flowrl.training.batch_stats import length_name

RETOKENIZED_ONE_IN = 8
"""One episode in this many is tokenized again: a reply takes 0.1 ms or more, as much as everything else together."""
MOST_TEXT = 8192
"""Most characters that are kept of a failure's text: those at its end."""
SEAT_REWARD = re.compile(r"seat_\d+_reward")
"""Names of metrics that an episode of several seats has from flowrl itself."""


class EpisodeReports:
    """Counts and records the attempts of one node replica. `name_of` gives the name of what plays a prompt."""

    def __init__(self, context: Context, tokenizer: Any, *, name_of: Callable[[Prompt], str]) -> None:
        self._context = context
        self._tokenizer = tokenizer
        self._name_of = name_of
        self._pieces = TokenPieces(tokenizer)
        self._failing = FailingByLength()
        self._num_finished = 0
        self._told_metrics: set[str] = set()

    def report_finished(self, prompt: Prompt, attempt: int, played: Played, reward: float) -> None:
        """An episode was played to its end at this attempt, counted from 0."""
        self._failing.add_finished(prompt.group_id, prompt.group_size, played.turns)
        self._count_played(played)
        # The metrics of an environment or an agent are no figures: say once for each name where they are.
        of_seats = {name for name in played.metrics if played.seat_rewards and SEAT_REWARD.fullmatch(name)}
        if new := played.metrics.keys() - of_seats - self._told_metrics:
            self._told_metrics |= new
            self._context.progress(
                f"metrics of episodes ({', '.join(sorted(new))}) are shown by flowrl show, episode by episode; they "
                "are not in metrics.jsonl"
            )
        if self._num_finished % RETOKENIZED_ONE_IN == 0:
            for sequence in played.sequences:
                edges = np.flatnonzero(np.diff(sequence.policy_mask.astype(np.int8), prepend=0, append=0))
                sampled = zip(edges[::2], edges[1::2], strict=True)
                spans = [sequence.token_ids[start:stop].tolist() for start, stop in sampled]
                self._context.metric("replies_checked", len(spans))
                changed = sum(is_retokenized(self._tokenizer, ids) for ids in spans)
                self._context.metric("replies_retokenized", changed)
        self._num_finished += 1
        self._count_attempt("")
        if self._context.keep_episodes:
            line = self._record_line(prompt, attempt, played, reward=reward)
            self._context.episode(prompt.sample_id, line, failed=False)

    def report_failed(
        self, prompt: Prompt, attempt: int, played: Played | None, cause: str, text: str, *, last: bool
    ) -> None:
        """An attempt failed; `last` says whether it was the last one of its episode.

        `played` is None if it failed before its first observation.
        """
        self._failing.add_failed(prompt.group_id, prompt.group_size, 0 if played is None else played.turns)
        if last:
            self._failing.end_member(prompt.group_id, prompt.group_size)
        self._count_attempt(cause)
        if self._context.keep_episodes:
            line = self._record_line(prompt, attempt, played, cause=cause, text=text)
            self._context.episode(prompt.sample_id, line, failed=True)

    def _count_attempt(self, cause: str) -> None:
        metric = self._context.metric
        metric("attempts", 1)
        metric("attempts_failed", int(bool(cause)))
        if cause:
            metric(f"attempts_failed/{cause}", 1)
        if (score := self._failing.score) is not None:
            self._context.gauge("failing_by_length", score)

    def _count_played(self, played: Played) -> None:
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

    def _record_line(
        self,
        prompt: Prompt,
        attempt: int,
        played: Played | None,
        *,
        reward: float | None = None,
        cause: str = "",
        text: str = "",
    ) -> str:
        """The record of an attempt, counted from 0. `played` is None if it failed before its first observation."""
        played = played or Played()
        record = {
            "sample_id": prompt.sample_id,
            "attempt": attempt,
            "ended_s": time.time(),
            "seconds": round(played.seconds, 3),
            "environment": self._name_of(prompt),
            "turns": played.turns,
            "reward": reward,
            "cut": played.cut,
            "cause": cause,
            "text": text[-MOST_TEXT:],
            "metrics": played.metrics,
            "seat_rewards": played.seat_rewards,
            "rewards": played.rewards,
            "sequences": [
                {
                    "pieces": self._pieces.text_pieces(sequence.token_ids.tolist()),
                    "spans": spans_of(sequence),
                    "roles": fed_roles(played.messages[number]) if played.messages else [],
                    "seat": played.seats[number] if played.seats else None,
                }
                for number, sequence in enumerate(played.sequences)
            ],
        }
        return json.dumps(record)


def is_retokenized(tokenizer: Any, token_ids: list[int]) -> bool:
    """Whether tokenizing the text of these ids gives other ids."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) != token_ids


def spans_of(sequence: TokenSequence) -> list[tuple[int, int]]:
    """(number of tokens, version) of each run of tokens of one origin; version -1 for what was fed."""
    versions = np.where(sequence.policy_mask, sequence.versions, -1)
    starts = np.flatnonzero(np.diff(versions, prepend=-2))
    sizes = np.diff(starts, append=versions.size)
    return [(int(size), int(versions[start])) for start, size in zip(starts, sizes, strict=True)]


def fed_roles(messages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The roles of the messages before each reply."""
    blocks: list[list[str]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            blocks.append([])
        else:
            blocks[-1].append(str(message["role"]))
    return blocks[: sum(message["role"] == "assistant" for message in messages)]


MOST_GROUPS = 256
"""Number of the last groups that the scores are computed from."""
MOST_OPEN = 256
"""Most incomplete groups. If there are more, the oldest one is counted as it is: its members may be elsewhere."""
LEAST_GROUPS, LEAST_FAILED = 32, 12
"""With fewer groups, or fewer groups with a failed attempt, there is no score."""
LEAST_SPREAD = 0.5
"""The smallest standard deviation, in turns, that differences within groups are taken to have."""

Floats = npt.NDArray[np.float64]


@dataclass
class GroupTurns:
    """The turns of a group's attempts."""

    size: int
    failed: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    num_ended: int = 0
    """Number of members, not of attempts."""


class FailingByLength:
    """Whether the failure of attempts depends on the length of episodes: then the episodes that are left are biased.

    The length that a failed attempt would have had is not known, and the turns until it failed say little about it: an
    attempt that fails in its first turn may belong to a long episode. So a failed attempt is compared with the finished
    episodes of its group, which have the same start. There are two scores, both about 0 if failing does not depend on
    length, whether attempts fail at their first step, at their last step or anywhere in between:

    - between groups: the rank correlation of a group's share of failed attempts with the mean turns of its finished
      episodes, times sqrt(n - 1). It finds environments that fail more the longer an episode is.
    - within groups: the mean of (turns of failed attempts) - (turns of finished episodes), divided by its standard
      error. A failed attempt has at most the turns that it would have had without the failure, so if failing does not
      depend on length, this is 0 or below.

    A group counts once, so attempts of one group may fail together (a broken task) without a false alarm.
    """

    def __init__(self) -> None:
        self._open: dict[str, GroupTurns] = {}
        self._rows: deque[tuple[float, float, float]] = deque(maxlen=MOST_GROUPS)
        self.score: float | None = None
        """Standard deviations by which failing seems to depend on length; None for too few groups."""

    def add_failed(self, group_id: str, size: int, turns: int) -> None:
        """An attempt failed after `turns` turns."""
        self._open_group(group_id, size).failed.append(turns)

    def add_finished(self, group_id: str, size: int, turns: int) -> None:
        """An episode ended by its own rules or by a limit."""
        self._open_group(group_id, size).finished.append(turns)
        self.end_member(group_id, size)

    def end_member(self, group_id: str, size: int) -> None:
        """A member of the group will not be tried again."""
        group = self._open_group(group_id, size)
        group.num_ended += 1
        if group.num_ended == size:
            self._close_group(group_id)

    def _open_group(self, group_id: str, size: int) -> GroupTurns:
        if group_id not in self._open:
            if len(self._open) == MOST_OPEN:
                self._close_group(next(iter(self._open)))
            self._open[group_id] = GroupTurns(size)
        return self._open[group_id]

    def _close_group(self, group_id: str) -> None:
        group = self._open.pop(group_id)
        if group.finished:
            share = len(group.failed) / (len(group.failed) + len(group.finished))
            failed = sum(group.failed) / len(group.failed) if group.failed else nan
            self._rows.append((share, sum(group.finished) / len(group.finished), failed))
            self.score = score_of(np.array(self._rows))


def score_of(rows: Floats) -> float | None:
    """The larger of both scores; None for too few groups. `rows` has a row for each group: the share of
    attempts that failed, the mean turns of finished episodes, and of failed attempts (NaN without one)."""
    both = rows[~np.isnan(rows[:, 2])]
    if len(rows) < LEAST_GROUPS or len(both) < LEAST_FAILED:
        return None
    return max(abs(between_groups(rows[:, 0], rows[:, 1])), within_groups(both[:, 2] - both[:, 1]))


def between_groups(shares: Floats, lengths: Floats) -> float:
    """Spearman's rank correlation of failed shares and lengths, in its standard deviations; 0 if one is constant."""
    a, b = ranks(shares), ranks(lengths)
    if not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1]) * sqrt(len(a) - 1)


def within_groups(differences: Floats) -> float:
    """How many more turns failed attempts had than the finished episodes of their group, in standard errors."""
    error = max(float(differences.std(ddof=1)), LEAST_SPREAD) / sqrt(len(differences))
    return float(differences.mean()) / error


def ranks(values: Floats) -> Floats:
    """The place of each value in their order; equal values get the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)
