"""Reward functions: every shape that is accepted, every fault named, and a process that can be killed."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.tasks import Task, reward_parts
from flowrl.tasks.reward_calls import reward_client
from flowrl.tasks.reward_calls.judge import BadReward, Judge, Verdicts, load_judge, place_of
from flowrl.tasks.reward_calls.reward_client import RewardWorker, open_client
from flowrl.tasks.rewards import open_reward, parse_reward
from flowrl.tasks.user_code import load_user_module


def judge(tmp_path: Path, source: str, name: str = "f") -> Judge:
    path = tmp_path / f"reward_{abs(hash(source))}.py"
    path.write_text(source)
    return load_judge(f"{path}:{name}")


def ask(tmp_path: Path, source: str, columns: dict[str, Any] | None = None) -> Verdicts:
    return judge(tmp_path, source)(["p", "q"], ["a", "bb"], [columns or {}] * 2)


@pytest.mark.parametrize(
    "source",
    [
        "def f(prompts, responses): return [len(r) for r in responses]",
        "def f(prompt, response): return len(response)",
        "def f(prompts, responses): return {'rewards': [1, 2]}",
        "def f(prompt, response): return {'reward': len(response)}",
        "import numpy as np\ndef f(prompts, responses): return np.array([1.0, 2.0])",
        "def f(prompts, responses, answer=None, **rest): return [1, 2]",
        "def f(*, prompts, responses): return [len(r) for r in responses]",
        "def f(prompts, *, responses): return [len(r) for r in responses]",
        "def f(prompts, /, *, responses, **rest): return [len(r) for r in responses]",
        "def f(*, prompt, response): return len(response)",
    ],
)
def test_every_accepted_shape_gives_the_same_rewards(tmp_path: Path, source: str) -> None:
    assert ask(tmp_path, source) == Verdicts((1.0, 2.0), (1.0, 2.0))


def test_a_mapping_carries_scores_and_named_parts(tmp_path: Path) -> None:
    source = "def f(prompts, responses): return {'rewards': [1, 2], 'scores': [0, 1], 'logs': {'form': [3, 4]}}"
    assert ask(tmp_path, source) == Verdicts((1.0, 2.0), (0.0, 1.0), {"form": (3.0, 4.0)})


def test_parts_of_single_samples_are_joined_by_name(tmp_path: Path) -> None:
    source = "def f(prompt, response): return {'reward': 1, 'logs': {response: 2}}"
    assert ask(tmp_path, source).logs == {"a": (2.0, 0.0), "bb": (0.0, 2.0)}


def test_columns_go_by_name_to_those_who_want_them(tmp_path: Path) -> None:
    columns = {"answer": "x", "level": 3}
    assert ask(tmp_path, "def f(prompt, response, level): return level", columns).rewards == (3.0, 3.0)
    everything = "def f(prompts, responses, **columns): return [len(columns)] * 2"
    assert ask(tmp_path, everything, columns).rewards == (2.0, 2.0)


@pytest.mark.parametrize(
    ("head", "rewards"),
    [
        ("def f(prompt, response, **columns)", "sorted(columns) == ['level'] and response in ('a', 'bb')"),
        ("def f(*, prompt, response, **columns)", "sorted(columns) == ['level'] and response in ('a', 'bb')"),
        ("def f(prompt, response, /, **columns)", "sorted(columns) == ['level', 'response'] and response != 'theirs'"),
    ],
)
def test_a_column_with_the_name_of_a_first_parameter_does_not_replace_it(
    tmp_path: Path, head: str, rewards: str
) -> None:
    found = ask(tmp_path, f"{head}: return float({rewards})", {"response": "theirs", "level": 1})
    assert found.rewards == (1.0, 1.0)


def test_lists_and_other_conventions_with_columns_of_our_names(tmp_path: Path) -> None:
    columns = {"prompts": "x", "responses": "theirs", "prompt": "x", "response": "theirs"}
    ours = ask(tmp_path, "def f(prompts, responses, **rest): return [float(r != 'theirs') for r in responses]", columns)
    trl = ask(tmp_path, "def f(completions, responses): return [float(r == 'theirs') for r in responses]", columns)
    verl = ask(tmp_path, "def f(solution_str, extra_info): return float(extra_info['response'] == 'theirs')", columns)
    openrlhf = ask(tmp_path, "def f(queries, responses): return [float(r == 'theirs') for r in responses]", columns)
    assert [one.rewards for one in (ours, trl, verl, openrlhf)] == [(1.0, 1.0)] * 4


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    needy = judge(tmp_path, "def f(prompt, response, answer, level=1): return 1")
    needy.check_columns({"answer": "x"})
    with pytest.raises(ConfigError, match="needs the column answer, but the task's rows have entry"):
        needy.check_columns({"entry": 1})
    named = judge(tmp_path, "def f(*, prompt, response, answer): return 1")
    assert named.required == {"answer"} and named.hidden_columns({"response": "x"}) == frozenset()
    starred = judge(tmp_path, "def f(*, prompt, response, **columns): return 1")
    assert starred.hidden_columns({"response": "x", "answer": 1}) == {"response"}


@pytest.mark.parametrize(
    ("body", "reason", "says"),
    [
        ("return 'good'", "reward_malformed", "returned rewards = 'good'"),
        ("return ['1', '2']", "reward_malformed", "with '1'; it needs numbers"),
        ("return [None, 1]", "reward_malformed", "with None"),
        ("return 1.0", "reward_malformed", "rewards = 1.0; it needs a list of 2"),
        ("return [1.0]", "reward_wrong_length", "1 rewards for 2"),
        ("return [float('nan'), 1]", "reward_not_finite", "nan"),
        ("return [float('inf'), 1]", "reward_not_finite", "inf"),
        ("return {'score': [1, 2]}", "reward_malformed", "a mapping of score; it needs the key 'rewards'"),
        ("return {'rewards': [1, 2], 'logs': {'a': [1]}}", "reward_wrong_length", "logs['a']"),
        ("return {'rewards': [1, 2], 'logs': [1, 2]}", "reward_malformed", "logs = [1, 2]; it needs lists under names"),
        ("return {'form': [1, 2], 'logs': 'a'}", "reward_malformed", "logs = 'a'; it needs lists under names"),
        ("return [10**400, 1]", "reward_not_finite", "it needs finite numbers"),
        ("raise KeyError('answer')", "reward_raised", "KeyError: 'answer'"),
    ],
)
def test_a_bad_answer_is_named(tmp_path: Path, body: str, reason: str, says: str) -> None:
    with pytest.raises(BadReward) as error:
        ask(tmp_path, f"def f(prompts, responses):\n    {body}")
    assert error.value.reason == reason
    assert says in str(error.value)


@pytest.mark.parametrize("logs", ["None", "{}"])
@pytest.mark.parametrize("head", ["'reward': 1.0", "'form': 1.0"])
def test_logs_that_are_none_are_absent(tmp_path: Path, head: str, logs: str) -> None:
    found = ask(tmp_path, f"def f(prompt, response):\n    return {{{head}, 'logs': {logs}}}")
    assert found.rewards == (1.0, 1.0)


def test_logs_of_one_sample_need_names(tmp_path: Path) -> None:
    with pytest.raises(BadReward, match=r"returned logs = \[1.0\]; it needs numbers under names"):
        ask(tmp_path, "def f(prompt, response):\n    return {'reward': 1.0, 'logs': [1.0]}")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def g(prompts, responses): ...", "has no function 'f'; it has g"),
        ("def f(x): ...", "begins with the parameters (x)"),
        ("def f(*, text, truth): ...", "begins with the parameters (text, truth)"),
        ("from builtins import max as f", "has a signature that Python cannot read, as functions in C often have"),
        ("def f(:", "does not import: SyntaxError"),
        ("import no_such_package", "does not import: ModuleNotFoundError"),
        ("import sys\nsys.exit(0)", "calls sys.exit(0) while it is imported; put what it does as a script under if"),
        ("raise SystemExit", "calls sys.exit(None) while it is imported"),
    ],
)
def test_a_function_that_does_not_load_is_refused(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        judge(tmp_path, source)
    assert says in str(error.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rewards.py does not exist"):
        load_judge("no/such/rewards.py:f")


def test_a_package_that_ends_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_script_of_rewards.py").write_text("import sys\ndef f(prompt, response): return 1\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"the reward's module 'a_script_of_rewards' calls sys.exit\(0\) while it is imported"
    with pytest.raises(ConfigError, match=said):
        load_judge("a_script_of_rewards:f")


@pytest.mark.parametrize("place", [":f", "f"])
def test_a_place_without_a_module_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=f"reward '{place}' names no function; write file.py:function"):
        parse_reward(place)


def module_level(prompt: str, response: str) -> float:
    return 1.0


def test_a_function_object_is_found_again_by_its_place() -> None:
    assert load_judge(place_of(module_level))(["p"], ["r"], [{}]).rewards == (1.0,)
    with pytest.raises(ConfigError, match="cannot be found again"):
        place_of(lambda prompt, response: 1.0)
    with pytest.raises(ConfigError, match="cannot be found again"):
        place_of(functools.partial(module_level, "p"))


def test_a_decorated_function_is_found_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "deco.py").write_text(
        "import functools\ndef timed(f):\n    @functools.wraps(f)\n"
        "    def g(*a, **k): return f(*a, **k)\n    return g\n"
    )
    (tmp_path / "rew.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom deco import timed\n"
        "@timed\ndef score(prompt, response): return 2.0\n"
    )
    found = load_user_module(str(tmp_path / "rew.py"), owner="reward").score
    assert place_of(found) == f"{tmp_path / 'rew.py'}:score"
    assert load_judge(place_of(found))(["p"], ["r"], [{}]).rewards == (2.0,)


async def asked_once(function: Judge, limit_s: float) -> Verdicts:
    client = open_client(function, limit_s)
    try:
        return await client.ask(["p", "q"], ["a", "bb"], [{}, {}])
    finally:
        await client.close()


@pytest.mark.slow
def test_an_async_function_is_awaited_and_timed(tmp_path: Path) -> None:
    quick = judge(tmp_path, "async def f(prompts, responses): return [1, 2]")
    each = judge(tmp_path, "async def f(prompt, response): return len(response)")
    stuck = judge(tmp_path, "import asyncio\nasync def f(prompts, responses): await asyncio.Event().wait()")
    named = judge(tmp_path, "async def f(*, prompt, response): return len(response)")
    for function in (quick, each, named):
        assert asyncio.run(asked_once(function, 5.0)).rewards == (1.0, 2.0)
    for head in ("prompts, responses", "prompt, response"):
        ends = judge(tmp_path, f"import sys\nasync def f({head}): sys.exit(0)")
        with pytest.raises(BadReward, match=r"raised RuntimeError: it called sys.exit\(0\)"):
            asyncio.run(asked_once(ends, 5.0))
    with pytest.raises(BadReward, match=r"took more than 0.01 s$") as error:
        asyncio.run(asked_once(stuck, 0.01))
    assert error.value.reason == "reward_timed_out"


WORKER = """
import os
def f(prompt, response):
    print("chatter")
    if response == "loop":
        while True: pass
    if response == "die":
        os._exit(3)
    if response == "text":
        return "text"
    return os.getpid()
"""


@pytest.mark.slow
def test_a_worker_is_killed_on_timeout_and_another_takes_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = RewardWorker(judge(tmp_path, WORKER).place, timeout_s=1.0)

        async def one(response: str) -> float:
            return (await worker.ask(["p"], [response], [{"unused": (1, "x")}])).rewards[0]

        reasons = {}
        try:
            first = await one("fine")
            assert await one("fine") == first
            for response in ("text", "loop", "die"):
                with pytest.raises(BadReward) as error:
                    await one(response)
                reasons[response] = error.value.reason
            assert await one("fine") != first
            with pytest.raises(ProcessLookupError):
                __import__("os").kill(int(first), 0)
        finally:
            await worker.close()
        assert reasons == {"text": "reward_malformed", "loop": "reward_timed_out", "die": "reward_died"}

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_that_cannot_load_its_function_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="does not exist"):
            await RewardWorker(f"{tmp_path}/gone.py:f", timeout_s=5.0).start_child()

    asyncio.run(scenario())


NEVER_LOADED = "import threading\nthreading.Event().wait()\n"


def test_a_module_that_hangs_when_it_is_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_client, "LOADED_WITHIN_S", 0.3)
    (tmp_path / "hangs.py").write_text(NEVER_LOADED)
    with pytest.raises(ConfigError, match=r"hangs.py:f is not loaded after 0.3 s; do slow set-up at its first"):
        asyncio.run(RewardWorker(f"{tmp_path}/hangs.py:f", timeout_s=5.0).ask(["p"], ["r"], [{}]))


def test_a_call_after_one_that_was_cancelled_while_the_function_loaded(tmp_path: Path) -> None:
    """It gets its own answer."""
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    (tmp_path / "slow.py").write_text(
        "import pathlib\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "if not first.exists():\n"
        f"    first.touch()\n    open({str(fifo)!r}, 'w').close()\n"
        "def f(prompt, response, **columns):\n    return 1.0\n"
    )

    async def scenario() -> None:
        one = RewardWorker(f"{tmp_path}/slow.py:f", timeout_s=30.0)
        asking = asyncio.create_task(one.ask(["p"], ["r"], [{}]))
        await asyncio.to_thread(lambda: open(fifo).close())  # its import has begun
        asking.cancel()
        await asyncio.wait({asking})
        assert (await one.ask(["p"], ["r"], [{}])).rewards == (1.0,)
        await one.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("place", "needs"),
    [("flowrl.tasks.checks.maths:score", "math_verify"), ("flowrl.tasks.reasoning:score", "reasoning_gym.factory")],
)
def test_a_verifier_has_imported_what_it_needs_before_a_call_is_timed(place: str, needs: str) -> None:
    """Such an import takes seconds, and more than a call's ten on a machine that is loaded."""
    ours = "ours, theirs = socket.socketpair(); ours.shutdown(socket.SHUT_WR)"
    serves = f"from flowrl.tasks.reward_calls.worker_child import serve_calls; serve_calls(theirs, {place!r})"
    code = f"import socket, sys; {ours}; {serves}; assert {needs!r} in sys.modules"
    subprocess.run((sys.executable, "-c", code), stdin=subprocess.DEVNULL, check=True, timeout=100)


@pytest.mark.parametrize(
    ("mixture", "needed"),
    [
        ("{0} + {1}:check=math", {"math_verify"}),
        ("{0} + {1}:check=code + reasoning_gym/chain_sum:size=9", {"reasoning_gym.factory"}),
        ("{0} + {1}:check=gsm8k", set()),
    ],
)
def test_the_verifier_of_a_mixture_has_imported_what_its_sources_need(
    mixture: str, needed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing that they do not. What it is asked about needs neither."""
    task = Task(mixture.format("arithmetic", f"{tmp_path}/rows.jsonl"))
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")

    async def ask() -> tuple[float, ...]:
        client = open_reward(reward_parts(task), timeout_s=100.0, concurrency=1)
        try:
            return (await client.ask(["1+1="], ["2"], [{"answer": "2", "of_task": "arithmetic"}])).rewards
        finally:
            await client.close()

    assert asyncio.run(ask()) == (1.0,)
    imported = {line.rpartition("|")[2].strip() for line in capfd.readouterr().err.splitlines()}
    assert imported & {"math_verify", "reasoning_gym.factory"} == needed


def test_a_child_that_ends_while_it_loads_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")

    async def run() -> None:
        worker = RewardWorker(f"{tmp_path}/ends.py:f", timeout_s=5.0)
        with pytest.raises(BadReward, match=r"ends.py:f ended its process \(status 3\) while it was loaded") as error:
            await worker.ask(["p"], ["r"], [{}])
        assert error.value.reason == "reward_died"

    asyncio.run(run())
