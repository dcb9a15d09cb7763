"""The node that runs agents' programs, in the hands of a test; a script stands for the generator."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.agents.programs import AGENT_CAUSES
from flowrl.errors import ConfigError, FlowrlError, SampleFailed
from flowrl.messages import Prompt
from flowrl.messages.episode import Episode, Reply, Turn
from flowrl.models import Policy
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.nodes import AgentProgram, Limits, Sampling
from flowrl.nodes.episodes.attempt_outcomes import FIRST_ATTEMPTS
from flowrl.runtime.ledger.token_digest import spans_of
from flowrl.testing import NodeRecord, NodeRig
from tests.agents import agent_programs

FILE = str(Path(agent_programs.__file__))
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "endpoint.md").read_text(encoding="utf-8")
TOKENIZER = character_tokenizer()
ONCE = Limits(tokens=400, retries=0)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def prompt(member: int = 0, **columns: Any) -> Prompt:
    return Prompt(
        sample_id=f"g:{member}",
        group_id="g",
        prompt_id="p",
        epoch=0,
        member=member,
        group_size=8,
        seed=100 + member,
        text="",
        token_ids=np.zeros(0, np.int32),
        columns={"messages": [{"role": "user", "content": "7+5="}], "answer": "12", **columns},
    )


class Script:
    """Stands for the generator. A context that says "slow" waits until it is cancelled."""

    def __init__(self, text: str = "abc", *, also: Callable[[Turn], None] = lambda turn: None) -> None:
        self.text, self.also = text, also
        self.turns: list[Turn] = []
        self.cancelled = 0

    async def __call__(self, turn: Turn) -> Reply:
        self.turns.append(turn)
        self.also(turn)
        if "slow" in TOKENIZER.decode(turn.token_ids.tolist()):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        ids = TOKENIZER(f"{self.text}<|end|>")["input_ids"][: turn.max_tokens]
        return Reply(
            request_id=turn.request_id,
            token_ids=np.array(ids, np.int32),
            behavior_logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), turn.turn, np.int32),
            finish_reason="stop" if len(ids) > len(self.text) else "length",
            message={"role": "assistant", "content": self.text[: len(ids)]},
            malformed="",
            cached_tokens=1,
            queued_s=0.0,
            generated_s=0.0,
            generator="generator/0",
        )


def play(
    agent: str, *, script: Any = None, prompts: int = 1, limits: Limits = ONCE, columns: Any = None, **options: Any
) -> NodeRecord:
    """Run agents to their end."""

    async def life() -> NodeRecord:
        place = agent if ":" in agent else f"{FILE}:{agent}"
        named = {"command": agent} if " " in agent else {"agent": place}
        node = AgentProgram(Policy("tiny"), limits=limits, **named, **options)
        async with a_rig(node, script or Script()) as rig:
            rig.feed("prompts", *(prompt(member, **(columns or {})) for member in range(prompts)), ticket=3)
            return await rig.finished()

    return asyncio.run(life())


def a_rig(node: AgentProgram, script: Any, **around: Any) -> NodeRig:
    answers = {"generate": script}
    return NodeRig(node, name="agents", answers=answers, timeout_s=40, preflight=False, **around)


def only_episode(record: NodeRecord) -> Episode:
    assert record.reasons() == []
    (episode,) = record.sent("episodes")
    assert isinstance(episode, Episode)
    return episode


def failure(record: NodeRecord) -> str:
    """The cause of the only sample, which has failed."""
    ((state, cause),) = record.reasons()
    assert state == "failed" and not record.sent("episodes")
    assert not record.events("scored") and not record.events("episode")
    assert cause in AGENT_CAUSES
    return cause


def said(ids: Any) -> str:
    return str(TOKENIZER.decode(ids.tolist()))


@pytest.mark.parametrize(("episodes", "played"), [(1, [1, 1, 1, 1]), (3, [1, 1, 2, 3])])
def test_a_process_plays_as_many_episodes_as_it_may(episodes: int, played: list[int]) -> None:
    """One process at a time; each episode has a session of its own."""
    record = play("counts", prompts=4, processes=1, episodes_per_process=episodes)
    found = [one.metrics for one in record.sent("episodes") if isinstance(one, Episode)]
    assert sorted(int(one["played"]) for one in found) == played
    assert len({one["pid"] for one in found}) == played.count(1)
    assert all(one["sessions"] == one["played"] for one in found)


def test_an_episode_is_the_session_of_an_agent_by_id() -> None:
    script = Script()
    episode = only_episode(play("answers", script=script))
    assert said(script.turns[0].token_ids) == "<|user|>7+5=<|end|><|assistant|>"
    assert said(episode.token_ids) == said(script.turns[1].token_ids) + "abc<|end|>"
    assert said(episode.token_ids[episode.policy_mask]) == "abc<|end|>abc<|end|>"
    assert episode.versions[episode.policy_mask].tolist() == [0] * 4 + [1] * 4
    assert (episode.reward, episode.turns, episode.attempts, episode.cut) == (3.0, 2, 1, "")
    assert episode.rewards_by_turn == ((script.turns[0].token_ids.size + 3, 0.0), (episode.token_ids.size - 1, 3.0))
    assert episode.environment == f"{FILE}:answers" and episode.prompt_text == said(script.turns[0].token_ids)
    assert episode.metrics == {"turns": 2.0, "forked": 1.0}, "the file is imported before the processes are forked"


def test_the_agent_of_the_documentation_plays(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# short_agent.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "short_agent.py").write_text(code)
    episode = only_episode(play(str(tmp_path / "short_agent.py:play"), script=Script("12")))
    assert (episode.reward, episode.turns, episode.metrics["letters"]) == (1.0, 2, 2.0)
    assert "Are you sure?" in said(episode.token_ids)


def test_turns_carry_the_place_of_their_prompt() -> None:
    script = Script()
    record = play("answers", script=script, prompts=3)
    assert len(record.sent("episodes")) == 3
    assert {(turn.sample_id, turn.turn, turn.attempt, turn.ticket) for turn in script.turns} == {
        (f"g:{member}", number, 0, 3) for member in range(3) for number in range(2)
    }
    assert len({turn.request_id for turn in script.turns}) == len({turn.seed for turn in script.turns}) == 6


@pytest.mark.parametrize(
    ("agent", "columns", "cause", "text"),
    [
        ("raises", {}, "agent_raised", "LookupError: a bug of the agent(.|\n)*about to fail"),
        ("returns_text", {}, "agent_raised", "returned 'good'; it needs a finite number"),
        ("dies", {}, "agent_died", "status 7"),
        ("returns_nothing", {}, "no_reward", "gave no reward; return a number, or post one"),
        ("asks_nothing", {}, "no_calls", "ended without a reply of the policy"),
        ("posts", {"posts": [1.0, 2.0]}, "agent_raised", "409 .*has the reward 1.0 already"),
        ("posts", {"posts": [1.0], "returns": 0.0}, "agent_raised", r"posted the reward 1.0 and gave 0.0 back"),
    ],
)
def test_what_an_agent_does_wrong_is_a_failure_with_its_cause(agent: str, columns: Any, cause: str, text: str) -> None:
    record = play(agent, columns=columns)
    assert failure(record) == cause
    ((sample_id, number, void),) = record.events("void")
    assert (sample_id, number, void) == ("g:0", 0, cause)
    (line,) = [line for line in record.progress if line.startswith("an attempt at an episode failed: ")]
    assert re.search(text, line), line


def test_a_run_of_failures_ends_with_the_commonest_cause() -> None:
    with pytest.raises(FlowrlError, match=r"16 of the last 16 attempts .* mostly by no_reward(.|\n)*gave no reward"):
        play("returns_nothing", prompts=FIRST_ATTEMPTS)


def test_a_failed_attempt_is_void_and_the_next_has_the_same_ticket(tmp_path: Path) -> None:
    script = Script()
    limits = Limits(tokens=400, retries=2)
    record = play("fails_at_first", script=script, limits=limits, columns={"begun": str(tmp_path / "begun")})
    assert (only_episode(record).attempts, only_episode(record).reward) == (3, 1.0)
    assert record.events("void") == [("g:0", 0, "agent_raised"), ("g:0", 1, "agent_raised")]
    assert [(turn.attempt, turn.ticket) for turn in script.turns] == [(0, 3), (1, 3), (2, 3)]
    assert len({turn.seed for turn in script.turns}) == 3


@pytest.mark.parametrize(
    ("agent", "sampled"),
    [
        ("answers", ["abc<|end|>abc<|end|>"]),
        ("asks_for_two", ["abc<|end|>", "abc<|end|>"]),
        ("continues_the_text", ["ab", "abc<|end|>"]),
        ("branches", ["abc<|end|>abc<|end|>", "abc<|end|>"]),
    ],
)
def test_every_reply_is_in_the_loss_of_one_sequence_after_its_own_context(agent: str, sampled: list[str]) -> None:
    script = Script()
    episode = only_episode(play(agent, script=script))
    assert [said(one.token_ids[one.policy_mask]) for one in episode.sequences] == sampled
    spans = {
        (tuple(one.token_ids[: span.start].tolist()), tuple(one.token_ids[span.start :][: span.tokens].tolist()))
        for one in episode.sequences
        for span in spans_of(one)
    }
    assert {context for context, _ in spans} == {tuple(turn.token_ids.tolist()) for turn in script.turns}
    ends = np.flatnonzero(np.diff(episode.whole_mask.astype(np.int8), append=0) == -1)
    assert [place for place, _ in episode.rewards_by_turn] == ends.tolist()
    assert len(ends) == episode.turns == len(script.turns)
    assert [reward for _, reward in episode.rewards_by_turn] == [0.0] * (len(ends) - 1) + [episode.reward]


def test_what_failed_says_how_far_it_came() -> None:
    record = play("raises", script=Script())
    (line,) = record.episodes
    assert (line["cause"], line["turns"], line["environment"]) == ("agent_raised", 1, f"{FILE}:raises")
    assert "abc" in "".join(line["sequences"][0]["pieces"]) and "a bug of the agent" in line["text"]
    assert record.metrics["attempts"] == record.metrics["attempts_failed/agent_raised"] == 1


def test_figures_are_those_of_every_episode() -> None:
    record = play("answers")
    assert record.gauges["episode_turns"] == [2] and len(record.gauges["turn_environment_s"]) == 2
    assert record.metrics["turns"] == 2 and len(record.gauges["environment_reset_s"]) == 1


@pytest.mark.parametrize("posts", [False, True])
def test_an_agent_that_takes_too_long_is_killed_with_all_that_it_started(posts: bool, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    columns = {"begun": str(begun), **({"posts": True} if posts else {})}
    record = play("hangs", limits=Limits(tokens=400, retries=0, episode_s=1.0), columns=columns)
    assert not any(Path(f"/proc/{pid}").exists() for pid in begun.read_text().split())
    if posts:
        assert (only_episode(record).cut, only_episode(record).reward) == ("seconds", 0.5)
    else:
        assert failure(record) == "no_reward"


def test_an_agent_that_asks_nothing_more_is_ended(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    assert failure(play("hangs", columns={"begun": str(begun)}, idle_s=0.5)) == "session_idle"
    assert not any(Path(f"/proc/{pid}").exists() for pid in begun.read_text().split())


def test_a_reward_may_be_posted_again_and_returned_too() -> None:
    for columns in ({"posts": [0.5, 0.5]}, {"posts": [0.5], "returns": 0.5}, {"posts": [0.5], "ends": True}):
        assert only_episode(play("posts", columns=columns)).reward == 0.5


@pytest.mark.parametrize("silent", [False, True])
def test_the_limit_of_turns_is_told_to_the_agent_and_cuts_the_episode_off(silent: bool) -> None:
    limits = Limits(tokens=400, retries=0, turns=2)
    record = play("goes_on", limits=limits, columns={"silent": silent})
    if silent:
        assert failure(record) == "no_reward"
        return
    episode = only_episode(record)
    assert (episode.cut, episode.reward, episode.turns, episode.masked) == ("turns", 2.0, 2, False)


@pytest.mark.parametrize("wanted", ["train", "mask", "drop"])
def test_a_context_that_is_full_cuts_the_episode_off(wanted: Any) -> None:
    script = Script()
    record = play("goes_on", script=script, limits=Limits(tokens=60, retries=0, on_truncated=wanted))
    ((*_, row),) = record.events("episode")
    assert row[3] == "tokens"
    assert all(turn.token_ids.size + turn.max_tokens <= 60 for turn in script.turns)
    if wanted == "drop":
        assert record.reasons() == [("dropped", "truncated")] and not record.sent("episodes")
    else:
        assert only_episode(record).masked == (wanted == "mask")


def test_a_client_that_leaves_has_its_reply_cancelled_and_its_turn_booked_as_abandoned() -> None:
    script = Script()
    record = play("leaves", script=script)
    episode = only_episode(record)
    assert script.cancelled == 1 and episode.turns == 1 and len(script.turns) == 2
    assert said(episode.token_ids[episode.policy_mask]) == "abc<|end|>"
    assert set(record.events("abandoned")) == {("g:0/0.0", "cancelled")}
    ((request_id, *_),) = record.events("request")
    assert request_id == "g:0/0.0", "the rig's script books nothing; the node books what was given up"


@pytest.mark.parametrize(("kind", "reward"), [("posts", 2.0), ("prints", 3.0), ("helped", 3.0)])
def test_a_command_gets_the_task_and_gives_a_reward(kind: str, reward: float) -> None:
    episode = only_episode(play(f"{sys.executable} {FILE} {kind}"))
    assert (episode.reward, episode.turns) == (reward, 1)
    assert episode.metrics == {"turns": 1.0, **({"seen": 1.0} if kind != "posts" else {})}


def test_a_command_that_fails_says_how() -> None:
    assert failure(play(f"{sys.executable} {FILE} fails")) == "agent_died"
    assert failure(play(f"{sys.executable} {FILE} silent")) == "no_reward"
    assert failure(play("/no/such/program of mine")) == "agent_died"


def test_held_out_episodes_come_last_and_are_not_booked() -> None:
    script = Script()

    async def life() -> tuple[Episode, NodeRecord]:
        node = AgentProgram(Policy("tiny"), agent=f"{FILE}:answers", limits=ONCE)
        async with a_rig(node, script) as rig:
            episode = await rig.ask("requests", prompt())
            return episode, await rig.finished()

    episode, record = asyncio.run(life())
    assert episode.reward == 3.0 and {turn.ticket for turn in script.turns} == {-1}
    assert not record.events("episode") and not record.events("request") and not record.events("abandoned")


def test_a_held_out_episode_that_fails_has_no_reward() -> None:
    async def life() -> None:
        node = AgentProgram(Policy("tiny"), agent=f"{FILE}:leaves", limits=ONCE)
        script = Script(also=lambda turn: None)
        async with a_rig(node, script) as rig:
            assert (await rig.ask("requests", prompt())).turns == 1
            assert not (await rig.finished()).events("abandoned")
        node = AgentProgram(Policy("tiny"), agent=f"{FILE}:raises", limits=ONCE)
        async with a_rig(node, Script()) as rig:
            with pytest.raises(SampleFailed, match="agent_raised"):
                await rig.ask("requests", prompt())

    asyncio.run(life())


def test_what_the_generator_raises_is_the_nodes_failure() -> None:
    def broken(turn: Turn) -> Reply:
        raise SampleFailed("no_generator")

    ((state, cause),) = play("answers", script=broken).reasons()
    assert (state, cause) == ("failed", "no_generator")


def test_the_key_is_for_its_user_alone_while_the_node_lives(tmp_path: Path) -> None:
    seen: list[int] = []
    key = tmp_path / "agents-0.key"
    script = Script(also=lambda turn: seen.append(stat.S_IMODE(key.stat().st_mode)))

    async def life() -> None:
        node = AgentProgram(Policy("tiny"), agent=f"{FILE}:answers", limits=ONCE)
        async with a_rig(node, script, run_dir=str(tmp_path)) as rig:
            rig.feed("prompts", prompt(), ticket=0)
            await rig.finished()

    asyncio.run(life())
    assert seen == [0o600, 0o600] and not key.exists()
    assert "OPENAI_API_KEY" not in os.environ


def appeared(file: Path) -> None:
    """Wait until another process has written to a file."""
    while not (file.exists() and file.read_text()):
        time.sleep(0.02)  # nothing tells of a file of another process


def test_a_group_that_is_given_up_leaves_nothing_running(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    async def life() -> None:
        node = AgentProgram(Policy("tiny"), agent=f"{FILE}:hangs", limits=ONCE, idle_s=50)
        async with a_rig(node, Script()) as rig:
            rig.feed("prompts", prompt(begun=str(begun), posts=True), ticket=0)
            await asyncio.to_thread(appeared, begun)
            rig.give_up("g")
            await rig.finished(leftovers=True)

    asyncio.run(life())
    assert not any(Path(f"/proc/{pid}").exists() for pid in begun.read_text().split())


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ("nothing", "has no function 'nothing'"),
        ("not_async", "is not async; write async def not_async"),
        ("one_parameter", "needs two parameters"),
    ],
)
def test_an_agent_that_cannot_be_run_is_refused_before_anything_starts(agent: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        AgentProgram(Policy("tiny"), agent=f"{FILE}:{agent}").preflight()


def test_agents_are_told_how_they_are_sampled() -> None:
    node = AgentProgram(
        Policy("tiny"), agent="a.py:f", sampling=Sampling(temperature=0.7, max_tokens=9), limits=Limits(turn_tokens=20)
    )
    assert node.facts().concurrency == 1024
    script = Script()
    play("answers", script=script, sampling=Sampling(max_tokens=2))
    assert {turn.max_tokens for turn in script.turns} == {2}
