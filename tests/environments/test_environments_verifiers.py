"""Environments of verifiers behind the endpoint: ReasoningGymEnv, whose rollouts ask a script over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowrl import ConfigError
from flowrl.agents.programs import ProgramName
from flowrl.environments import Action, environment_rows
from flowrl.environments.adapters.verifiers_env import VerifiersEnv
from flowrl.environments.environment_class import find_environment
from flowrl.messages.episode import Episode, Reply, Turn
from flowrl.models import Policy
from flowrl.nodes import AgentProgram, Environment, Limits
from flowrl.nodes.sources.row_source import prompt_fields
from flowrl.testing import NodeRecord, NodeRig
from tests.nodes.episodes.test_nodes_agent_program import TOKENIZER, Script, failure, prompt

pytest.importorskip("verifiers", reason="the package verifiers of requirements/environments.txt is not installed")
FILE = Path(__file__).parent / "rg_environment.py"
NAME = f"verifiers/{FILE}:gym=chain_sum"
ROWS = environment_rows(NAME, number=60)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Solver(Script):
    """Answers sums: right, or with one too much where the question has an 8."""

    async def __call__(self, turn: Turn) -> Reply:
        question = re.findall(r"problem: ([-+ \d]+)=", str(TOKENIZER.decode(turn.token_ids.tolist())))[-1]
        wrong = "8" in question
        self.text = f"<answer>{eval(question) + wrong}</answer>"
        return await super().__call__(turn)


def played(rows: list[Any], *, name: str = NAME, script: Any = None, tokens: int = 600) -> NodeRecord:
    async def life() -> NodeRecord:
        node = AgentProgram(Policy("tiny"), agent=name, limits=Limits(tokens=tokens, retries=0))
        prompts = [prompt(member, **prompt_fields(row)["columns"]) for member, row in enumerate(rows)]
        for one in prompts:
            for unasked in ("messages", "answer"):
                one.columns.pop(unasked)  # type: ignore[attr-defined]
        answers = {"generate": script or Solver()}
        async with NodeRig(node, name="agents", answers=answers, timeout_s=180, preflight=False) as rig:
            rig.feed("prompts", *prompts, ticket=3)
            return await rig.finished()

    return asyncio.run(life())


def by_member(record: NodeRecord) -> dict[int, Episode]:
    assert record.reasons() == []
    return {int(episode.sample_id.partition(":")[2]): episode for episode in record.sent("episodes")}


def plain(episode: Episode) -> Any:
    return (episode.token_ids.tolist(), episode.policy_mask.tolist(), episode.reward, dict(episode.metrics))


def question(episode: Episode) -> str:
    return re.findall(r"problem: ([-+ \d]+)=", str(TOKENIZER.decode(episode.token_ids.tolist())))[-1]


def test_the_same_row_is_the_same_episode_alone_and_among_32_others() -> None:
    rows = [*ROWS.train[:30], *ROWS.held_out[:3]]
    among = by_member(played(rows))
    (alone,) = by_member(played(rows[:1])).values()
    assert len(among) == 33 and plain(alone) == plain(among[0])
    assert all((episode.reward == 1.0) == ("8" not in question(episode)) for episode in among.values())
    assert 3 < sum(episode.reward == 1.0 for episode in among.values()) < 30
    assert {episode.metrics["format_reward_func"] for episode in among.values()} == {1.0}
    asked = [{question(among[member]) for member in part} for part in (range(30), range(30, 33))]
    assert len(asked[0]) > 10 and not asked[0] & asked[1], "held-out rows ask other questions"


def test_a_question_that_fills_the_context_has_no_made_up_reward() -> None:
    """verifiers scores a rollout without any reply; here it has not begun, and has no reward."""
    record = played([ROWS.train[0]], tokens=60)
    assert failure(record) == "no_calls"


def test_what_is_wrong_with_a_name_is_said_before_anything_starts(tmp_path: Path) -> None:
    for name, says in (
        ("verifiers/no-such-env", "needs the package no-such-env; pip install no-such-env"),
        ("verifiers/json", "json has no function load_environment"),
        (f"verifiers/{FILE}:size=3", "cannot be loaded: TypeError"),
        (f"verifiers/{tmp_path}/none.py:gym=chain_sum", "does not exist"),
    ):
        with pytest.raises(ConfigError) as error:
            find_environment(name)
        assert says in str(error.value)
    assert ProgramName(NAME).environment == NAME
    problems = Environment(NAME, Policy("tiny")).check(None)
    assert any("asks the policy itself; play it with AgentProgram(agent=...)" in problem for problem in problems)


def test_played_as_an_environment_or_with_other_rows_it_says_what_to_do() -> None:
    env = VerifiersEnv(None, {})
    with pytest.raises(ValueError, match="take EnvironmentSource\\('verifiers/"):
        asyncio.run(env.reset({"options": {"task": {"messages": []}}}, 0))
    with pytest.raises(ValueError, match="play them with the node AgentProgram"):
        asyncio.run(env.step(Action("12")))


class Rolled:
    """Stands for an environment of verifiers whose rollout came to this."""

    def __init__(self, **output: Any) -> None:
        self.output = output

    async def run_rollout(self, *asked: Any) -> dict[str, Any]:
        return {"reward": 0.25, "metrics": {"num_turns": 2}, **self.output}


def test_a_rollout_that_broke_has_no_reward_but_one_at_its_limit_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(error: Any) -> Any:
        env = VerifiersEnv(Rolled(error=error), {})
        env._example = {}
        return asyncio.run(env.step(Action(json.dumps({"OPENAI_API_KEY": "k"}))))

    monkeypatch.setenv("OPENAI_API_KEY", "k")
    result = {"reward": 0.25, "metrics": {"num_turns": 2.0}}
    for over in (None, {"error": "ModelError", "error_chain_repr": "ConflictError({'code': 'limit_reached'})"}):
        assert json.loads(step(over).observation.text) == result
    with pytest.raises(RuntimeError, match="the rollout of verifiers failed"):
        step({"error": "ModelError", "error_chain_repr": "InternalServerError()"})
