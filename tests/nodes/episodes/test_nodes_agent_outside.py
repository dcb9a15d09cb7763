"""The node with agents, and outside workers that ask it for tasks; a script stands for the generator."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.channels.machines import free_ports
from flowrl.messages import Prompt
from flowrl.messages.episode import Episode
from flowrl.models import Policy
from flowrl.nodes import AgentProgram, Limits
from flowrl.testing import NodeRig
from tests.agents.outside_workers import Worker, a_worker
from tests.nodes.episodes.test_nodes_agent_program import FILE, PAGE, Script, a_rig, failure, only_episode, prompt, said

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def a_run(
    tmp_path: Path, *prompts: Prompt, script: Script | None = None, around: Any = None, **options: Any
) -> AsyncIterator[tuple[NodeRig, Worker]]:
    """The node, which was fed these prompts, and a worker beside it."""
    chosen: dict[str, Any] = {"limits": Limits(tokens=400, retries=0), "processes": 4, **options}
    node = AgentProgram(Policy("tiny"), agent="outside", **chosen)
    async with a_rig(node, script or Script(), run_dir=str(tmp_path), **(around or {})) as rig:
        if prompts:
            rig.feed("prompts", *prompts, ticket=3)
        async with a_worker(rig.record.progress) as worker:
            yield rig, worker


def test_a_worker_takes_tasks_and_its_replies_are_the_episodes(tmp_path: Path) -> None:
    script = Script()

    async def work() -> list[Episode]:
        async with a_run(tmp_path, prompt(0), prompt(1), script=script) as (rig, worker):
            for reward in (0.25, 0.5):
                session = await worker.take()
                assert session.task == {"messages": [{"role": "user", "content": "7+5="}], "answer": "12"}
                reply = await session.say()
                await session.say([*session.task["messages"], reply.to_dict(), {"role": "user", "content": "sure?"}])
                assert await session.finish(reward) == {"id": session.session_id, "reward": reward, "cause": ""}
            record = await rig.finished()
            assert record.reasons() == [] and record.metrics["turns"] == 4
            assert len(record.gauges["environment_reset_s"]) == 2
            return record.sent("episodes")

    episodes = asyncio.run(work())
    assert [(one.sample_id, one.reward, one.turns, one.environment) for one in episodes] == [
        ("g:0", 0.25, 2, "outside"),
        ("g:1", 0.5, 2, "outside"),
    ]
    for episode in episodes:
        assert said(episode.token_ids[episode.policy_mask]) == "abc<|end|>abc<|end|>"
    assert {turn.ticket for turn in script.turns} == {3}


def test_the_worker_of_the_page_plays_until_the_run_ends(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# worker.py\n.*?)```", PAGE, re.DOTALL)
    assert {name.partition(".")[0] for name in re.findall(r"^(?:import|from) (\S+)", code, re.MULTILINE)} == {
        "contextlib",
        "os",
        "time",
        "httpx",
        "openai",
    }
    (tmp_path / "worker.py").write_text(code)

    async def work() -> None:
        prompts = [prompt(member) for member in range(3)]
        async with a_run(tmp_path, *prompts, script=Script("12")) as (rig, worker):
            env = {**os.environ, "FLOWRL_URL": worker.url, "FLOWRL_KEY_FILE": str(worker.key_file)}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "worker.py", cwd=tmp_path, env=env, stderr=asyncio.subprocess.PIPE
            )
            await rig.until(lambda record: len(record.sent("episodes")) == 3)
            record = await rig.finished()
        _, errors = await process.communicate()
        assert [one.reward for one in record.sent("episodes")] == [1.0] * 3
        assert process.returncode == 0 and errors == b"", errors.decode()

    asyncio.run(work())


def test_a_worker_that_disappears_voids_the_attempt_and_the_next_one_is_offered(tmp_path: Path) -> None:
    script = Script()

    async def work() -> None:
        limits = Limits(tokens=400, retries=1)
        async with a_run(tmp_path, prompt(), script=script, limits=limits, idle_s=1.0) as (rig, worker):
            gone = await worker.take()
            await gone.say()
            again = await worker.take()  # waits until the first attempt is void
            assert again.task == gone.task and again.session_id != gone.session_id
            with pytest.raises(openai.ConflictError, match="has ended; ask for another one"):
                await gone.say()
            await again.say()
            await again.finish(1.0)
            record = await rig.finished()
            assert record.events("void") == [("g:0", 0, "session_idle")]
            assert (only_episode(record).attempts, only_episode(record).reward) == (2, 1.0)

    asyncio.run(work())
    assert [(turn.attempt, turn.ticket) for turn in script.turns] == [(0, 3), (1, 3)]
    assert len({turn.seed for turn in script.turns}) == 2


@pytest.mark.parametrize(("asks", "cause"), [(True, "no_reward"), (False, "no_calls")])
def test_what_a_worker_leaves_out_is_a_failure_with_its_cause(tmp_path: Path, asks: bool, cause: str) -> None:
    async def work() -> None:
        async with a_run(tmp_path, prompt()) as (rig, worker):
            session = await worker.take()
            if asks:
                await session.say()
            else:
                await session.post("reward", {"reward": 1.0})
            await session.post("end")
            assert failure(await rig.finished()) == cause

    asyncio.run(work())


@pytest.mark.parametrize("posts", [False, True])
def test_a_worker_that_takes_too_long_is_told_and_its_reward_counts(tmp_path: Path, posts: bool) -> None:
    async def work() -> None:
        async with a_run(tmp_path, prompt(), limits=Limits(tokens=400, retries=0, episode_s=0.5)) as (rig, worker):
            session = await worker.take()
            await session.say()
            if posts:
                await session.post("reward", {"reward": 0.5})
            record = await rig.finished()
            with pytest.raises(openai.ConflictError, match="has ended"):
                await session.say()
            if posts:
                assert (only_episode(record).cut, only_episode(record).reward) == ("seconds", 0.5)
            else:
                assert failure(record) == "no_reward"

    asyncio.run(work())


def test_a_checkpoint_waits_for_no_worker_and_a_resume_offers_again(tmp_path: Path) -> None:
    """One task is half done at the snapshot, one was never taken."""

    async def before() -> None:
        async with a_run(tmp_path, prompt(0), prompt(1)) as (rig, worker):
            session = await worker.take()
            await session.say()
            async with rig.paused():
                pass
            await rig.snapshot(tmp_path / "snapshot")
            rig.give_up("g")
            await rig.finished(leftovers=True)

    async def after() -> None:
        around = {"resume": tmp_path / "snapshot"}
        async with a_run(tmp_path, around=around) as (rig, worker):
            for _ in range(2):
                session = await worker.take()
                await session.say()
                await session.finish(1.0)
            record = await rig.finished()
            assert record.events("void") == [("g:0", 0, "resumed")]
            found = {one.sample_id: one.attempts for one in record.sent("episodes")}
            assert found == {"g:0": 2, "g:1": 1} and not record.metrics.get("attempts_failed")

    asyncio.run(before())
    asyncio.run(after())


def test_the_end_of_the_run_answers_whoever_waits_for_a_task(tmp_path: Path) -> None:
    """Of two requests, with room for one, the other is refused when that one waits."""

    async def work() -> None:
        async with AsyncExitStack() as beyond:
            node = AgentProgram(Policy("tiny"), agent="outside", limits=Limits(tokens=400), processes=1)
            async with a_rig(node, Script(), run_dir=str(tmp_path)) as rig:
                worker = await beyond.enter_async_context(a_worker(rig.record.progress))
                asked = {asyncio.create_task(worker.http.post("/sessions")) for _ in range(2)}
                done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                assert [one.result().status_code for one in done] == [429]
                await rig.finished()
            (answered,) = [await one for one in waiting]
            assert (answered.status_code, answered.json()["error"]["code"]) == (410, "run_ended")
            assert not worker.key_file.exists()
            with pytest.raises(httpx.ConnectError):
                await worker.http.post("/sessions")

    asyncio.run(work())


def test_no_more_workers_than_there_may_be(tmp_path: Path) -> None:
    async def work() -> None:
        prompts = [prompt(member) for member in range(3)]
        async with a_run(tmp_path, *prompts, processes=2) as (rig, worker):
            first, second = await worker.take(), await worker.take()
            refused = await worker.http.post("/sessions")
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
            for session in (first, second):
                await session.say()
                await session.finish(1.0)
            third = await worker.take()
            await third.say()
            await third.finish(1.0)
            assert len((await rig.finished()).sent("episodes")) == 3

    asyncio.run(work())


def test_a_group_that_is_given_up_ends_its_sessions_and_withdraws_its_tasks(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_run(tmp_path, prompt(0), prompt(1)) as (rig, worker):
            session = await worker.take()
            await session.say()
            rig.give_up("g")
            other = Prompt(**{**vars(prompt(0)), "group_id": "h", "sample_id": "h:0"})
            rig.feed("prompts", other, ticket=4)
            again = await worker.take()
            await again.say()
            await again.finish(0.75)
            with pytest.raises(openai.ConflictError, match="has ended"):
                await session.say()
            record = await rig.finished(leftovers=True)
            assert [(one.sample_id, one.reward) for one in record.sent("episodes")] == [("h:0", 0.75)]

    asyncio.run(work())


def test_held_out_tasks_go_last(tmp_path: Path) -> None:
    async def work() -> None:
        async with a_run(tmp_path) as (rig, worker):
            asked = asyncio.create_task(rig.ask("requests", prompt(7, held_out=True)))
            rig.feed("prompts", prompt(0), ticket=5)
            rig.feed("prompts", prompt(1), ticket=4)
            await rig.taken("prompts")
            sessions = []
            for _ in range(3):
                sessions.append(await worker.take())
                await sessions[-1].say()
                await sessions[-1].finish(1.0)
            assert ["held_out" in session.task for session in sessions] == [False, False, True]
            assert (await asked).reward == 1.0
            record = await rig.finished()
            assert [one.sample_id for one in record.sent("episodes")] == ["g:1", "g:0"]

    asyncio.run(work())


def test_workers_are_told_another_address_and_tasks_name_it(tmp_path: Path) -> None:
    async def work() -> None:
        (port,) = free_ports(1)
        node = AgentProgram(Policy("tiny"), agent="outside", limits=Limits(tokens=400), host="127.0.0.2", port=port)
        async with a_rig(node, Script(), run_dir=str(tmp_path)) as rig:
            assert any(f" http://127.0.0.2:{port}/sessions," in line for line in rig.record.progress)
            rig.feed("prompts", prompt())
            headers = {"Authorization": f"Bearer {(tmp_path / 'agents-0.key').read_text()}"}
            async with httpx.AsyncClient(headers=headers) as http:
                begun = (await http.post(f"http://127.0.0.2:{port}/sessions")).json()
                assert begun["openai_base_url"] == f"http://127.0.0.2:{port}/s/{begun['id']}/v1"
                with pytest.raises(httpx.ConnectError):
                    await http.post(f"http://127.0.0.1:{port}/sessions")
            rig.give_up("g")
            await rig.finished(leftovers=True)

    asyncio.run(work())


def test_settings_without_effect_on_outside_workers_are_refused() -> None:
    node = AgentProgram(
        Policy("tiny"),
        agent="outside",
        limits=Limits(reset_s=5),
        memory_bytes=1 << 20,
        port=70000,
        episodes_per_process=2,
        keep_variables=("OWN_KEY",),
    )
    problems = node.check(None)
    assert [problem.split()[0] for problem in problems] == [
        "port",
        "limits.reset_s",
        "memory_bytes",
        "episodes_per_process",
        "keep_variables",
    ]
    assert all("no effect on outside workers" in problem for problem in problems[1:])
    assert AgentProgram(Policy("tiny"), agent="outside").check(None) == []
    (both,) = AgentProgram(Policy("tiny"), agent="outside", command="node agent.js").check(None)
    assert "give one of them" in both


def test_a_run_that_starts_its_agents_has_no_tasks_for_others(tmp_path: Path) -> None:
    async def work() -> None:
        node = AgentProgram(Policy("tiny"), agent=f"{FILE}:answers", limits=Limits(tokens=400))
        async with a_rig(node, Script(), run_dir=str(tmp_path)) as rig:
            assert not [line for line in rig.record.progress if "outside workers" in line]
            key = (tmp_path / "agents-0.key").read_text()
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as http:
                refused = await http.post(f"{node._endpoint.url}/sessions")
            assert refused.status_code == 503 and "needs the agent 'outside'" in refused.text
            await rig.finished()

    asyncio.run(work())
