"""From a verdict to the reward that is trained on, and to the sample that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Overlong:
    """−`factor`·clip((length − (`max_tokens` − `buffer`)) / `buffer`, 0, 1), in policy tokens."""

    max_tokens: int
    buffer: int
    factor: float = 1.0

    def length_penalty(self, num_tokens: int) -> float:
        """The value added to the reward of a response of that length; never above 0."""
        over = (num_tokens - (self.max_tokens - self.buffer)) / self.buffer
        return -self.factor * min(max(over, 0.0), 1.0)


@dataclass(frozen=True)
class Shaping:
    """Steps between verdict and reward, in a fixed order; the default changes nothing.

    Weighted sum of named parts, stop penalty, overlong penalty (DAPO, arXiv 2503.14476), clip, sign.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the named parts (a reward's `logs`) that are added to the reward itself."""
    stop_penalty: float | None = None
    """For truncated responses: a value in [0, 1] scales the reward, a value below 0 replaces it."""
    overlong: Overlong | None = None
    clip: tuple[float, float] | None = None
    negate: bool = False
    """A control experiment: the sign of the shaped reward is inverted, so that training makes the policy worse."""

    def find_problems(self) -> list[str]:
        """Problems of these settings, as complete sentences."""
        found = []
        if self.stop_penalty is not None and self.stop_penalty > 1:
            found.append(f"shaping.stop_penalty is {self.stop_penalty}; it has to be in [0, 1], or below 0")
        if self.overlong is not None and self.overlong.buffer < 1:
            found.append(f"shaping.overlong.buffer is {self.overlong.buffer}; it needs at least 1 token")
        if self.clip is not None and self.clip[0] > self.clip[1]:
            found.append(f"shaping.clip is {self.clip}; the lower bound has to come first")
        return found

    def shape_reward(self, reward: float, parts: Mapping[str, float], *, num_tokens: int, truncated: bool) -> float:
        """The reward used for training."""
        reward += sum(weight * parts.get(name, 0.0) for name, weight in self.weights.items())
        if truncated and self.stop_penalty is not None:
            reward = reward * self.stop_penalty if self.stop_penalty >= 0 else self.stop_penalty
        if self.overlong is not None:
            reward += self.overlong.length_penalty(num_tokens)
        if self.clip is not None:
            reward = min(max(reward, self.clip[0]), self.clip[1])
        return -reward if self.negate else reward

    def rewards_by_turn(self, rewards: Sequence[float], shaped: float) -> list[float]:
        """The rewards of an episode's turns, whose sum is the `shaped` reward.

        With `negate`, the sign of each reward is inverted. All other changes by shaping are added to the last turn.
        """
        found = [-reward if self.negate else reward for reward in rewards]
        if found:
            found[-1] += shaped - sum(found)
        return found
