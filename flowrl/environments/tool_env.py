"""`tools/TASK`: a question of a task, which the policy answers with the help of tools.

A reply with tool calls gets a message of role "tool" for each, in their order. A reply without one is the answer: the
task's own verifier scores it, and the episode ends.

The row's seed picks the question: for a held-out row one of the task's held-out questions, for another row one of those
for training. Options of the adapter are `tools` (names joined by `+`, see `named_tools`), `calls` (8: the most calls of
an episode) and `reply_s` (40: seconds for the calls of one reply together, below the `step_s` of the episodes). All
other options belong to the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from flowrl.environments.environment_row import EnvironmentName, EnvironmentRow
from flowrl.environments.protocol import Action, Env, Observation, Step, without_middle
from flowrl.environments.task_questions import SET, TaskQuestions, load_questions, named_task, question_of
from flowrl.environments.tools import ToolResult, Tools, named_tools
from flowrl.errors import ConfigError
from flowrl.tasks import Row, check_answers
from flowrl.tasks.reward_calls.judge import BadReward, Judge, load_judge

DEFAULTS: Mapping[str, Any] = {"tools": "", "calls": 8, "reply_s": 40.0}
NAME_BYTES = 256
"""Maximum bytes that are shown of a tool's name and of a call's id, as the policy wrote them."""


@dataclass(frozen=True)
class ToolTask:
    """What the episodes of one environment share."""

    questions: TaskQuestions
    judge: Judge
    judges: Mapping[str, Judge]
    """Set that is evaluated -> its verifier."""
    tools: Tools
    calls: int
    reply_s: float


class ToolEnv(Env):
    """One question."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], ToolEnv]:
        """Reads the task and loads the tools. Raises ConfigError for what is wrong with them."""
        options = {**DEFAULTS, **{key: value for key, value in name.options.items() if key in DEFAULTS}}
        calls, reply_s = options["calls"], options["reply_s"]
        if not options["tools"] or not isinstance(options["tools"], str):
            raise ConfigError(
                f"environment {name.text!r} names no tools; write :tools=calculator, or tools=FILE.py:NAME"
            )
        if not isinstance(calls, int) or calls < 1:
            raise ConfigError(
                f"environment {name.text!r}: calls is {calls!r}; it has to be a whole number of at least 1"
            )
        if not isinstance(reply_s, int | float) or not reply_s > 0:
            raise ConfigError(f"environment {name.text!r}: reply_s is {reply_s!r}; it has to be a number above 0")

        task = named_task(name, name.place, own=DEFAULTS)
        questions = load_questions(name, task)
        judge = load_judge(task.own_verifier)
        check_verifier(name, chain(questions.rows.train, questions.rows.held_out), judge)
        judges = {key: load_judge(asked.task.own_verifier) for key, asked in questions.sets.items()}
        for key, asked in questions.sets.items():
            check_answers(asked.task, asked.by_id.values())
            check_verifier(name, asked.by_id.values(), judges[key])
        tools = named_tools(options["tools"])
        tools.check_tools()
        shared = ToolTask(questions, judge, judges, tools, calls, float(reply_s))
        kind = cls if tools.replays else UnrepeatableToolEnv
        return lambda: kind(shared)

    def __init__(self, shared: ToolTask) -> None:
        self._shared = shared
        self._calls = self._errors = 0
        self._open = AsyncExitStack()

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._row = self._shared.questions.row_of_question(EnvironmentRow(task["name"], task["options"], seed))
        self._asked_set = task["options"].get(SET, "")
        self._tools = await self._open.enter_async_context(self._shared.tools.session(seed))
        return replace(question_of(self._row), tools=self._tools.descriptions)

    async def close(self) -> None:
        await self._open.aclose()

    async def step(self, action: Action) -> Step:
        shared = self._shared
        until, messages = time.monotonic() + shared.reply_s, []
        for call in action.tool_calls:
            self._calls += 1
            if self._calls > shared.calls:
                text = f"No tool call is left of the {shared.calls} that are allowed. Answer without one."
                result = ToolResult(text, failed=True)
            else:
                result = await self._tools.execute(call, limit_s=until - time.monotonic())
            self._errors += result.failed
            message = {"role": "tool", "content": result.text, "name": without_middle(call.name, NAME_BYTES)}
            if call.call_id:
                message["tool_call_id"] = without_middle(call.call_id, NAME_BYTES)
            messages.append(message)

        metrics = {"tool_calls": self._calls, "tool_errors": self._errors}
        if messages:
            return Step(Observation(messages=tuple(messages)), metrics=metrics)
        judge = shared.judges[self._asked_set] if self._asked_set else shared.judge
        reward = judge([self._row.prompt], [action.text], [self._row.columns]).rewards[0]
        return Step(Observation(), reward, terminated=True, metrics=metrics)


class UnrepeatableToolEnv(ToolEnv):
    """One question, with a tool that must not be called again with the same arguments, as a resumed run would do."""

    replays = False


def check_verifier(name: EnvironmentName, rows: Iterable[Row], judge: Judge) -> None:
    """Raise ConfigError unless every row has what the verifier compares with, and the verifier works in this
    process."""
    rows = iter(rows)
    first = next(rows)
    for row in chain([first], rows):
        judge.check_columns(row.columns, row.place)
    try:
        judge([first.prompt], [str(first.answer)], [first.columns])  # imports once what every episode would import
    except BadReward as problem:
        raise ConfigError(
            f"the verifier of environment {name.text!r} cannot score the task's own answer: {problem}"
        ) from None
