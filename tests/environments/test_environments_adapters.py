"""Environments of gymnasium and reasoning_gym, and tasks with tools, each in real processes."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl.environments import (
    Action,
    EnvironmentFailed,
    EnvironmentName,
    EnvironmentRow,
    Episodes,
    OpenEpisode,
    Step,
    ToolCall,
    environment_rows,
    task_questions,
)
from flowrl.environments.environment_class import find_environment
from flowrl.environments.tool_env import ToolEnv
from flowrl.errors import ConfigError
from flowrl.tasks import Row, load_rows
from flowrl.tasks.reasoning import make_problem
from flowrl.tasks.task import Task

LAKE = "gymnasium/FrozenLake-v1:is_slippery=False,actions=left/down/right/up"
SLIPPERY = "gymnasium/FrozenLake-v1"
SUMS = "reasoning_gym/chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def played(name: str, scenario: Callable[[Episodes], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with Episodes(name) as pool:
            await scenario(pool)

    asyncio.run(whole())


async def steps(episode: OpenEpisode, *texts: str) -> list[Step]:
    found = [await episode.step(Action(text)) for text in texts]
    await episode.close()
    return found


def test_frozen_lake_is_walked_to_its_goal() -> None:
    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(EnvironmentRow(LAKE))
        assert episode.observation.text == (
            "[S]FFF\nFHFH\nFFFH\nHFFG\n\nObservation: 0\n\nAnswer with one action: 0 left, 1 down, 2 right, 3 up."
        )
        walk = ("down", "I was thinking of right, but: 1", "Right.", "2", "DOWN", "right")
        *before, last = await steps(episode, *walk)
        assert [step.rewards[0] for step in before] == [0.0] * 5 and not any(step.over for step in before)
        assert (last.reward, last.terminated) == (1.0, True)
        assert last.observations[0].text == "(Right)\nSFFF\nFHFH\nFFFH\nHFF[G]\n\nObservation: 15"

    played(LAKE, scenario)


def test_a_reply_without_an_action_changes_nothing_and_the_third_truncates() -> None:
    async def scenario(pool: Episodes) -> None:
        replies = ("banana", "7", "down", "", "-1", "upwards")
        found = await steps(await pool.reset(EnvironmentRow(LAKE)), *replies)
        assert [step.metrics["malformed"] for step in found] == [1.0, 2.0, 2.0, 3.0, 4.0, 5.0]
        assert [step.truncated for step in found] == [False] * 5 + [True]
        assert "There is no action in this reply" in found[0].observations[0].text

    played(LAKE, scenario)


def test_the_same_seed_and_actions_give_the_same_episode_alone_and_among_32() -> None:
    async def one(pool: Episodes, seed: int) -> list[Step]:
        episode = await pool.reset(EnvironmentRow(SLIPPERY, {}, seed))
        found = [await episode.step(Action("2"))]
        while not found[-1].over and len(found) < 20:
            found.append(await episode.step(Action("1")))
        await episode.close()
        return found

    async def scenario(pool: Episodes) -> None:
        alone = [await one(pool, seed) for seed in range(4)]
        assert alone[0] != alone[1] or alone[0] != alone[2]
        assert (await asyncio.gather(*(one(pool, seed) for seed in range(32))))[:4] == alone

    played(SLIPPERY, scenario)


def test_a_problem_is_tried_until_it_is_right() -> None:
    async def scenario(pool: Episodes) -> None:
        row = environment_rows(SUMS).train[5]
        known = make_problem(Task(SUMS), row.seed)
        episode = await pool.reset(row)
        assert episode.observation.text == known.question
        wrong, right = await steps(episode, "fish", known.answer)
        assert (wrong.reward, wrong.over) == (0.0, False)
        assert wrong.observations[0].text == "That is not right. Tries left: 2."
        assert (right.reward, right.terminated) == (1.0, True)
        assert right.metrics == {"score": 1.0, "tries": 2.0}
        assert (await steps(await pool.reset(row), "a", "b", "c"))[-1].terminated

    played(SUMS, scenario)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gymnasium/FrozenLak-v1", "Environment `FrozenLak` doesn't exist"),
        ("gymnasium/FrozenLake-v1:slip=1", "gymnasium refuses it: .*unexpected keyword argument 'slip'"),
        ("gymnasium/FrozenLake-v1:actions=a/b", r"actions has 2 name\(s\) and the environment 4 actions"),
        ("gymnasium/CartPole-v1", "has observations in Box.*; only discrete ones become text"),
        ("gymnasium/Pendulum-v1", "has the actions Box.*; only discrete ones can be said"),
        ("reasoning_gym/chain_som", "has no task 'chain_som' among its .*; try chain_sum"),
        ("reasoning_gym/chain_sum:terms=3", "reasoning_gym refuses these options"),
        ("reasoning_gym/chain_sum:tries=0", "tries is 0; it has to be at least 1"),
        ("reasoning_gym/chain_sum:feedback=loud", "feedback is 'loud'; it has to be wrong or score"),
        ("reasoning_gym/chain_sum:seed=3", "has the option seed, which its rows decide"),
        ("tools/arithmetic", "names no tools; write :tools=calculator"),
        ("tools/arithmetic:tools=calculatr", "there is no tool 'calculatr'; did you mean calculator"),
        ("tools/arithmetic:tools=calculator,calls=0", "calls is 0; it has to be a whole number of at least 1"),
        ("tools/arithmetic:tools=calculator,reply_s=-1", "reply_s is -1; it has to be a number above 0"),
        ("tools/arithmetic:tools=calculator,max=3", "task 'arithmetic:max=3' has no option 'max'"),
        ("tools/arithmetik:tools=calculator", "there is no task 'arithmetik'.*Did you mean arithmetic"),
        ("tools/0.5*arithmetic + 0.5*b.jsonl:tools=calculator", "mixes several tasks; name one"),
        ("tools/:tools=calculator", "names no source"),
    ],
)
def test_a_users_mistake_gets_one_message_before_anything_starts(name: str, says: str) -> None:
    async def nothing(pool: Episodes) -> None:
        raise AssertionError

    assert EnvironmentName(name).adapter
    with pytest.raises(ConfigError, match=says):
        played(name, nothing)


# Tools

CASES = Path(__file__).parent / "tool_cases.py"
CALCULATOR = "tools/arithmetic:tools=calculator,calls=2,max_value=9"


def asked(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, "id1")


def test_a_question_is_answered_with_a_tool() -> None:
    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(environment_rows(CALCULATOR).train[0])
        question = episode.observation.text
        assert [tool["function"]["name"] for tool in episode.observation.tools] == ["calculator"]
        call = asked("calculator", expression=question.rstrip("="))
        used = await episode.step(Action("", (call,)))
        assert (used.reward, used.over) == (0.0, False)
        answer = str(sum(map(int, question.rstrip("=").split("+"))))
        message = {"role": "tool", "content": answer, "name": "calculator", "tool_call_id": "id1"}
        assert used.observations[0].messages == (message,)
        (right,) = await steps(episode, f" {answer}\n")
        assert (right.reward, right.terminated) == (1.0, True)
        assert right.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
        (wrong,) = await steps(await pool.reset(environment_rows(CALCULATOR).train[0]), "fish")
        assert (wrong.reward, wrong.terminated) == (0.0, True)

    played(CALCULATOR, scenario)


def test_calls_that_fail_are_answered_in_their_order_and_at_most_two_are_made() -> None:
    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(environment_rows(CALCULATOR).train[0])
        bad = ToolCall("calc\ud800", {"n": 10**40, "text": "\ud800"})
        step = await episode.step(Action("", (bad, asked("calculator", expression="1/0"), asked("calculator"))))
        assert [(m["name"], m["content"], m.get("tool_call_id")) for m in step.observations[0].messages] == [
            ("calc?", "There is no tool 'calc\\ud800'; the tools are: calculator.", None),
            ("calculator", "Division by zero.", "id1"),
            ("calculator", "No tool call is left of the 2 that are allowed. Answer without one.", "id1"),
        ]
        assert step.metrics == {"tool_calls": 3.0, "tool_errors": 3.0} and not step.over
        await episode.close()

    played(CALCULATOR, scenario)


def test_tools_of_a_file_that_hang_share_the_time_of_one_reply() -> None:
    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(EnvironmentRow("own"))
        calls = [asked("misbehaves", how=how) for how in ("loop", "loop", "well")]
        contents = [m["content"] for m in (await episode.step(Action("", tuple(calls)))).observations[0].messages]
        assert contents[0] == "misbehaves was stopped: it took more than 0.2 s."
        assert contents[1].startswith("misbehaves was ")
        assert contents[2] == "misbehaves was not called: no time is left."
        later = await episode.step(Action("", (asked("misbehaves", how="well"), asked("calculator", expression="2*3"))))
        assert [m["content"] for m in later.observations[0].messages] == ["well", "6"]
        await episode.close()

    played(f"tools/arithmetic:tools=calculator+{CASES}:COLLECTION,reply_s=0.4", scenario)


def test_a_tool_that_cannot_be_stopped_ends_with_its_process() -> None:
    async def scenario() -> None:
        async with Episodes(f"tools/arithmetic:tools={CASES}:COLLECTION", step_s=1.5) as pool:
            episode = await pool.reset(EnvironmentRow("own"))
            with pytest.raises(EnvironmentFailed) as failed:
                await episode.step(Action("", (asked("misbehaves", how="stubborn"),)))
            assert failed.value.cause == "env_timed_out"
            await episode.close()

    asyncio.run(scenario())


def test_rows_whose_reading_ends_its_process_are_a_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    monkeypatch.setattr(task_questions, "load_rows", lambda task: os._exit(3))
    with pytest.raises(ConfigError, match=r"reading task .*rows.jsonl' ended its process"):
        find_environment(f"tools/{tmp_path}/rows.jsonl:tools=calculator")


def test_held_out_rows_ask_what_training_never_sees() -> None:
    name = EnvironmentName("tools/arithmetic:tools=calculator,max_value=30")
    maker = ToolEnv.load_maker(name)

    async def questions(rows: Sequence[EnvironmentRow]) -> Counter[str]:
        return Counter([(await maker().reset(row.task, row.seed)).text for row in rows])

    rows, known = environment_rows(name.text), load_rows(Task("arithmetic:max_value=30"))
    train, held_out = asyncio.run(questions(rows.train)), asyncio.run(questions(rows.held_out))
    for asked, part in ((train, known.train), (held_out, known.held_out)):
        assert asked.keys() == {row.prompt for row in part}
        assert max(asked.values()) - min(asked.values()) <= 1, "each as often as the others"


def test_all_members_of_a_group_get_one_question_and_rows_may_come_from_parquet(tmp_path: Path) -> None:
    """Reading Parquet starts threads, and a process with threads forks no episodes."""
    import pyarrow
    import pyarrow.parquet

    talk = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n}?"}] for n in range(80)]
    table = pyarrow.table({"question": talk, "answer": [f"so #### {n}" for n in range(80)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    name = f"tools/{tmp_path}/rows.parquet:tools=calculator,prompt=question,check=math"

    async def scenario(pool: Episodes) -> None:
        row = environment_rows(name).train[3]
        members = await asyncio.gather(*(pool.reset(row) for _ in range(3)))
        first, *others = [member.observation.messages for member in members]
        assert first == others[0] == others[1] and first[0] == {"role": "system", "content": "Be brief."}
        (step,) = await steps(members[0], f"It is {first[1]['content'].rstrip('?')}.0")
        assert (step.reward, step.terminated) == (1.0, True)

    played(name, scenario)


def test_a_task_of_reasoning_gym_is_scored_by_its_own_verifier() -> None:
    name = "tools/reasoning_gym/chain_sum:tools=calculator,extract=number,size=40,max_digits=1"

    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(environment_rows(name).train[1])
        expression = episode.observation.text.partition(":")[2].rstrip(" =?")
        used = await episode.step(Action("", (asked("calculator", expression=expression),)))
        (step,) = await steps(episode, f"I found {used.observations[0].messages[0]['content']}")
        assert step.reward == 1.0

    played(name, scenario)


def test_a_folder_called_tools_is_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "own.py").write_text("from tests.environments.environment_cases import Counter\n")
    monkeypatch.chdir(tmp_path)
    assert find_environment("tools/own.py:Counter").kind.__name__ == "Counter"


ROWS = {
    "no answer": '{"prompt": "PROMPT"}',
    "an answer of the assistant": (
        '{"prompt": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "PROMPT"}], "answer": "1"}'
    ),
}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("no answer", "the row has no answer to compare responses with"),
        ("an answer of the assistant", "has an earlier answer of the"),
    ],
)
def test_rows_that_cannot_be_played_are_refused(tmp_path: Path, row: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(ROWS[row].replace("PROMPT", f"{n}?") for n in range(40)))
    with pytest.raises(ConfigError, match=says):
        find_environment(f"tools/{tmp_path}/rows.jsonl:tools=calculator")


def test_a_task_without_held_out_rows_is_refused(tmp_path: Path) -> None:
    row = next(r for r in map(Row.ask, map(str, range(100))) if not r.held_out)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": row.prompt, "answer": "1"}))
    with pytest.raises(ConfigError, match="has 1 rows, none of them held out"):
        find_environment(f"tools/{tmp_path}/rows.jsonl:tools=calculator")
