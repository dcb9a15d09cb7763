"""One seat of an episode: its conversation, what it was shown since its last reply, and the rewards of its turns.

An environment for one player has one seat. Seats never share tokens: what one seat does, another sees only in what
the environment shows to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowrl.agents import ChatTemplate, Conversation, History
from flowrl.environments import Observation
from flowrl.environments.middle import without_middle
from flowrl.episode import Reply
from flowrl.errors import ConfigError
from flowrl.messages import Int32


class Seat:
    """Starts with its first observation. `trained`: the policy plays the seat, and the seat's replies are trained."""

    def __init__(
        self,
        number: int,
        first: Observation,
        template: ChatTemplate,
        *,
        history: History,
        observation_bytes: int,
        trained: bool,
    ) -> None:
        self.number = number
        self.trained = trained
        self.tools = first.tools
        self.conversation = Conversation(template, history=history)
        self.turns = 0
        self.malformed_in_a_row = 0
        self.rewards: list[tuple[int, float]] = []
        """(index of the turn's last token, through all sequences of this seat, reward)"""
        self.reward = 0.0
        """The sum of all rewards of the seat, including the rewards before its first turn."""
        self._observation_bytes = observation_bytes
        self._shown: list[Observation] = []
        self._calls: Sequence[Any] = ()
        self._early = 0.0
        self._reading = False
        self.show(first)

    def show(self, observation: Observation) -> None:
        """Show an observation, which the seat reads when its next turn begins. An empty observation shows nothing."""
        if observation.text or observation.messages:
            self._shown.append(observation)

    def read(self) -> Int32:
        """Begin the seat's turn: the context of its reply, with everything shown to it since its last reply."""
        self.conversation.feed(joined(self._shown, self._calls, self._observation_bytes))
        self._shown, self._calls, self._reading = [], (), True
        return self.conversation.context()

    def unanswered(self) -> Int32:
        """The context of the reply that the seat has not given yet."""
        return self.conversation.context() if self._reading else self.read()

    def sampled(self, reply: Reply, message: Mapping[str, Any], calls: Sequence[Any]) -> None:
        """Add the seat's reply; `calls` are the calls in it, which the next observation answers."""
        self.conversation.sampled(reply.token_ids, reply.behavior_logprobs, reply.versions, message)
        self.turns += 1
        self._calls, self._reading = calls, False

    def rewarded(self, reward: float) -> None:
        """Add a reward to the seat's last turn. Before its first turn, the reward is kept and added to that turn."""
        self.reward += reward
        if not self.turns:
            self._early += reward
            return
        last = self.conversation.num_tokens - 1
        if self.rewards and self.rewards[-1][0] == last:
            self.rewards[-1] = (last, self.rewards[-1][1] + reward)
        else:
            self.rewards.append((last, reward + self._early))
            self._early = 0.0


def after_system_prompt(first: Observation, prompt: str) -> Observation:
    """`first` after a system message with `prompt`. Raises ConfigError if `first` has its own system message."""
    if not prompt:
        return first
    shown = first.messages or ({"role": "user", "content": first.text},) * bool(first.text)
    if shown and shown[0]["role"] == "system":
        raise ConfigError(
            "the environment begins an episode with a system message of its own, and there is a system prompt besides; "
            "leave --task.system-prompt out"
        )
    return replace(first, text="", messages=({"role": "system", "content": prompt}, *shown))


def joined(shown: Sequence[Observation], calls: Sequence[Any], most_bytes: int) -> list[Mapping[str, Any]]:
    """Observations as messages, each at most `most_bytes` long. Several texts become one message, a line for each."""
    if not any(observation.messages for observation in shown):
        return messages_of(Observation("\n".join(observation.text for observation in shown)), calls, most_bytes)
    first, *others = shown
    return [
        *messages_of(first, calls, most_bytes),
        *(message for other in others for message in messages_of(other, (), most_bytes)),
    ]


def messages_of(observation: Observation, calls: Sequence[Any], most_bytes: int) -> list[Mapping[str, Any]]:
    """An observation as messages, each at most `most_bytes` long.

    A text becomes one message of the user. After `calls`, it is the answer to the first call, and the other calls get
    an empty answer.
    """
    if observation.messages:
        return [
            {**message, "content": without_middle(message["content"], most_bytes)} for message in observation.messages
        ]
    text = without_middle(observation.text, most_bytes)
    if not calls:
        return [{"role": "user", "content": text}]
    return [
        {"role": "tool", "content": "" if index else text, "name": call.name, "tool_call_id": call.call_id}
        for index, call in enumerate(calls)
    ]
