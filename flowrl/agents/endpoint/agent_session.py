"""One session: what was asked and answered in it, its calls, its reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from flowrl.agents.chat_template import ChatTemplate, TextBound
from flowrl.agents.endpoint.apis import CallAnswer
from flowrl.agents.endpoint.backend import FinishedSession, SampledAnswer, SessionTask
from flowrl.agents.endpoint.call_runs import CallRuns
from flowrl.agents.endpoint.problems import ApiProblem
from flowrl.agents.endpoint.tree import Asked, MessageTree, RawPrompts, SampledBranches
from flowrl.models.tokens.chat import Messages

SampledCall = list[tuple[Asked, SampledAnswer]]
"""The replies to a call, each with its context."""


class AgentSession:
    """An open session. `runs` has its calls, and `template_of` gives the chat template with tools."""

    def __init__(
        self,
        task: SessionTask,
        key: str,
        tokenizer: Any,
        template_of: Callable[[Messages], ChatTemplate],
        runs: CallRuns[SampledCall, CallAnswer],
        bound: TextBound,
    ) -> None:
        self.task = task
        self.key = key
        self.runs = runs
        self.branches = SampledBranches()
        self.tree = MessageTree(template_of, self.branches)
        self.prompts = RawPrompts(tokenizer, self.branches, bound)
        self.asking = asyncio.Lock()
        """Held while a call's contexts are made, which may be in a thread."""
        self.active_s = 0.0
        """Time of the client's last activity, on the loop's clock."""
        self.request_ids: list[str] = []
        self.reward: float | None = None
        self.full = False
        """Whether a call was refused because its context left no place for a reply."""
        self._responses: dict[str, Messages] = {}

    @property
    def session_id(self) -> str:
        return self.task.session_id

    def give_reward(self, reward: float) -> None:
        """Set the reward. Raises ApiProblem if the session already has another one."""
        if self.reward not in (None, reward):
            raise ApiProblem(409, f"the session has the reward {self.reward} already; a session has one reward")
        self.reward = reward

    def messages_of(self, response_id: str) -> Messages | None:
        """The conversation that ended with a response."""
        return self._responses.get(response_id)

    def keep_response(self, response_id: str, messages: Messages) -> None:
        self._responses[response_id] = messages

    def finished(self, cause: str) -> FinishedSession:
        return FinishedSession(
            session_id=self.session_id,
            sequences=self.branches.sequences(),
            request_ids=tuple(self.request_ids),
            reward=self.reward,
            full=self.full,
            cause=cause or ("no_reward" if self.reward is None else ""),
        )
