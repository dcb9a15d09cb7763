"""Reward functions of OpenRLHF, TRL and verl, unedited: recognised by their parameters, called as those call them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.nodes import Reward
from flowrl.tasks import Row, Task, asked_columns, load_rows, reward_parts
from flowrl.tasks.reward_calls.http import request_body
from flowrl.tasks.reward_calls.judge import BadReward, Question, Verdicts, load_judge
from flowrl.tasks.reward_calls.reward_client import Gathered
from flowrl.tasks.reward_calls.signatures import (
    adapt_function,
    convention_of,
    declared_convention,
    label_of,
    openrlhf_answer,
    with_function,
)
from flowrl.tasks.rewards import open_reward, parse_reward
from flowrl.testing import run_node, sample

FILES = Path(__file__).parent / "foreign_rewards"
OPENRLHF, TRL, VERL = (FILES / f"{name}_reward.py" for name in ("openrlhf", "trl", "verl"))


@pytest.mark.parametrize(
    ("names", "convention"),
    [
        (["prompts", "responses", "answer"], "flowrl"),
        (["prompt", "response"], "flowrl"),
        (["queries", "prompts", "labels"], "openrlhf"),
        (["queries", "prompts"], "openrlhf"),
        (["prompts", "completions", "ground_truth"], "trl"),
        (["completions"], "trl"),
        (["data_source", "solution_str", "ground_truth", "extra_info"], "verl"),
        (["solution_str", "ground_truth"], "verl"),
        (["text"], None),
    ],
)
def test_a_convention_is_known_by_the_names_of_parameters(names: list[str], convention: str | None) -> None:
    assert convention_of(names) == convention


def test_a_file_is_read_without_being_imported(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("raise RuntimeError\ndef helper(x): ...\ndef reward_func(queries, prompts, labels): ...\n")
    assert declared_convention(f"{file}:reward_func") == "openrlhf" and declared_convention(f"{file}:helper") is None
    assert with_function(str(file)) == f"{file}:reward_func"
    assert declared_convention(f"{tmp_path}/absent.py:f") is None
    file.write_text("def f(completions): ...\ndef g(completions): ...\n")
    with pytest.raises(ConfigError, match=r"names a file with f, g; name the function"):
        with_function(str(file))
    file.write_text("def f(completions:\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"r.py is no Python: line 1: '\(' was never closed"):
        with_function(str(file))


def asked(place: str, rows: Sequence[Mapping[str, Any]], responses: Sequence[str]) -> Verdicts:
    return load_judge(place)([f"{n}?" for n in range(len(rows))], responses, rows)


def test_openrlhf_gets_queries_prompts_and_labels_at_once() -> None:
    found = asked(str(OPENRLHF) + ":reward_func", [{"answer": "4"}, {"label": "5"}, {}], ["4", "6", "1"])
    assert found.rewards == found.scores == (1.0, 0.0, 0.0)
    assert found.logs == {"answer_length": (1.0, 1.0, 1.0), "batch": (3.0, 3.0, 3.0)}


def trl_columns(*, messages: bool) -> dict[str, Any]:
    task = Task("arithmetic", reward=f"{TRL}:correct")
    row = Row(
        ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}), {"answer": "4"}, 0.0, messages
    )
    return {**row.columns, **asked_columns(reward_parts(task), task, row)}


@pytest.mark.parametrize("messages", [False, True])
def test_trl_gets_texts_or_messages_as_the_rows_have_them(messages: bool) -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        seen.append((prompts, completions, answer, kwargs))
        return [0.5]

    columns = {name: [value] for name, value in trl_columns(messages=messages).items()}
    assert adapt_function(reward, "trl")[0](["<|user|>2+2="], ["4"], **columns) == [0.5]
    ((prompts, completions, answer, kwargs),) = seen
    if messages:
        assert prompts == [[{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]]
        assert completions == [[{"role": "assistant", "content": "4"}]]
    else:
        assert (prompts, completions) == (["2+2="], ["4"])
    assert answer == ["4"] and kwargs == {}


def test_a_none_of_trl_counts_nothing_and_is_logged() -> None:
    found = asked(f"{TRL}:short", [{}, {}], ["", "abc"])
    assert found.rewards == (0.0, 0.25) and found.logs == {"not_applicable": (1.0, 0.0)}


def test_verl_gets_one_sample_its_source_and_its_truth() -> None:
    rows = [
        {"answer": "4"},
        {"reward_model": {"ground_truth": "7"}, "answer": "no", "data_source": "gsm8k"},
        {"ground_truth": "9", "flowrl.row": {"task": "unknown", "turns": [], "messages": False}},
    ]
    place = f"{VERL}:compute_score"
    found = asked(place, rows[:2], ["4", "7"])
    assert found.rewards == (1.0, 1.0) and found.logs == {"acc": (1.0, 1.0)}
    with pytest.raises(BadReward, match="unknown"):
        asked(place, rows[2:], ["9"])
    with pytest.raises(ConfigError, match=r"one of the columns answer, ground_truth, label, reward_model"):
        load_judge(place).check_columns({"other": 1})


def test_an_async_function_is_awaited() -> None:
    async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(solution_str == ground_truth)

    call, _, _ = adapt_function(compute_score, "verl")
    assert asyncio.run(call("2+2", "4", answer="4")) == 1.0


def test_what_only_trl_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completions, completion_ids): return [0.0]\n")
    with pytest.raises(ConfigError, match="needs completion_ids, which TRL hands over"):
        load_judge(f"{tmp_path}/r.py:f")


def test_a_function_of_no_convention_is_told_all_four(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(text, truth): return 0.0\n")
    with pytest.raises(ConfigError, match=r"begins with the parameters \(text, truth\).*OpenRLHF.*TRL.*verl"):
        load_judge(f"{tmp_path}/r.py:f")


# Many at once


PACKAGED = "def f(completions, **kwargs):\n    return [float(len(one[0]['content'])) for one in completions]\n"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a function of TRL's kind."""
    package = tmp_path / "judges_of_others"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nif os.environ:\n    from .lengths import f\n")
    (package / "lengths.py").write_text(PACKAGED)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("judges_of_others")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "body",
    [
        "from judges_of_others import f\n",
        "from judges_of_others.lengths import f as g\nf = g\n",
        "try:\n    from judges_of_others import f\nexcept ImportError:\n    pass\n",
    ],
)
def test_a_function_is_followed_to_its_file(packaged: Path, body: str) -> None:
    (packaged / "rules.py").write_text(body)
    assert declared_convention(f"{packaged}/rules.py:f") == "trl"
    assert declared_convention("judges_of_others:f") == declared_convention("judges_of_others.lengths:f") == "trl"
    assert declared_convention("judges_of_others:g") is declared_convention("judges_of_none:f") is None
    assert not [name for name in sys.modules if name.startswith("judges_of_others")]


def test_names_that_go_in_a_circle_are_given_up(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text("a = b\nb = a\n")
    assert declared_convention(f"{tmp_path}/rules.py:a") is None


def test_a_packages_function_is_called_as_its_own_program_calls_it(
    packaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "grpo", "--task.reward", "judges_of_others:f"]) == 0
    assert "judges_of_others:f is called as TRL calls it, with up to 64 samples" in capsys.readouterr().out


MADE = "from functools import partial\nfrom judges_of_others import f as whole\nf = partial(whole, scale=2)\n"


@pytest.mark.parametrize("body", [MADE, "from judges_of_others import f\n"])
def test_a_function_is_called_as_what_it_is_when_it_is_loaded(packaged: Path, body: str) -> None:
    (packaged / "rules.py").write_text(body)
    turn = {"role": "user", "content": "2+3="}
    (packaged / "rows.jsonl").write_text(json.dumps({"prompt": [turn], "answer": "5"}) + "\n")
    node = Reward(task := Task(f"{packaged}/rows.jsonl", reward=f"{packaged}/rules.py:f"))
    assert node.preflight() == f"{packaged}/rules.py:f is called as TRL calls it, with up to 64 samples at once"
    assert node.concurrency == 64
    rows = load_rows(task, whole=True)
    (row,) = (*rows.train, *rows.held_out)
    given = [sample(n, response_text="four", prompt_id=row.prompt_id, columns={}) for n in range(2)]
    record = run_node(Reward(task), {"rollouts": given}, preflight=False)
    assert [one.reward for one in record.sent("scored")] == [4.0, 4.0]


class Counting:
    """A client that notes the sizes of its calls; a response "bad" fails its whole call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: Any) -> Verdicts:
        self.sizes.append(len(responses))
        await asyncio.sleep(0)  # a tick, in which others ask
        if "bad" in responses:
            raise BadReward("reward_raised", "a bad one")
        return Verdicts(*[tuple(float(len(one)) for one in responses)] * 2)

    async def close(self) -> None: ...


def test_what_waits_is_asked_together_and_a_bad_sample_fails_alone() -> None:
    async def run() -> tuple[Counting, list[Any]]:
        client = Counting()
        gathered = Gathered([client], batch=4)
        asks = (gathered.ask(["p"], [text], [{}]) for text in ("a", "bb", "ccc", "bad", "eeeee"))
        answers = await asyncio.gather(*asks, return_exceptions=True)
        await gathered.close()
        return client, answers

    client, answers = asyncio.run(run())
    assert client.sizes == [4, 1, 1, 1, 1, 1]
    assert [one.rewards for one in answers if isinstance(one, Verdicts)] == [(1.0,), (2.0,), (3.0,), (5.0,)]
    assert isinstance(answers[3], BadReward)


class Slow(Counting):
    """A client that answers once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.told = asyncio.Event(), asyncio.Event()

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: Any) -> Verdicts:
        self.asked.set()
        verdicts = await super().ask(prompts, responses, columns)
        await self.told.wait()
        return verdicts


def test_several_clients_share_what_waits_and_work_at_the_same_time() -> None:
    async def run() -> tuple[list[list[int]], list[Verdicts]]:
        clients = [Slow(), Slow(), Slow()]
        gathered = Gathered(clients, batch=4)
        asks = [asyncio.ensure_future(gathered.ask(["p"], ["r" * n], [{}])) for n in range(1, 9)]
        for client in clients:
            await client.asked.wait()
        sizes = [list(client.sizes) for client in clients]
        for client in clients:
            client.told.set()
        answers = await asyncio.gather(*asks)
        later = await gathered.ask(["p"], ["r"], [{}])
        await gathered.close()
        return sizes, [*answers, later]

    sizes, answers = asyncio.run(run())
    assert sorted(sizes) == [[2], [3], [3]]
    assert [one.rewards[0] for one in answers] == [*map(float, range(1, 9)), 1.0]


PROCESS = "import os\ndef f(completions, **kwargs):\n    return [float(os.getpid())] * len(completions)\n"


def test_a_function_that_expects_many_has_as_many_processes_as_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "pids.py").write_text(PROCESS)

    async def run() -> set[float]:
        reward = open_reward(parse_reward(f"{tmp_path}/pids.py:f"), timeout_s=5.0, concurrency=2)
        try:
            answers = await asyncio.gather(*(reward.ask(["p"], ["r"], [{}]) for _ in range(4)))
            return {one.rewards[0] for one in answers}
        finally:
            await reward.close()

    assert len(asyncio.run(run())) == 2


def test_a_problem_that_is_no_verdict_reaches_all_who_wait() -> None:
    class Broken(Counting):
        async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: Any) -> Verdicts:
            raise ConfigError("it no longer loads")

    async def run() -> list[str]:
        gathered = Gathered([Broken()])
        asks = [asyncio.ensure_future(gathered.ask(["p"], [text], [{}])) for text in ("a", "b")]
        _, pending = await asyncio.wait(asks, timeout=5.0)
        await gathered.close()
        assert not pending
        return [str(one.exception()) for one in asks]

    assert asyncio.run(run()) == ["it no longer loads"] * 2


def test_functions_that_expect_many_get_many() -> None:
    assert Reward(Task(reward=str(OPENRLHF))).concurrency == 64
    assert Reward(Task(reward=f"{TRL}:correct")).concurrency == 64
    assert Reward(Task(reward=str(VERL))).concurrency == 1
    assert Reward(Task(reward=f"{TRL}:correct"), concurrency=3).concurrency == 192


# Servers


def test_a_server_of_openrlhf_gets_its_fields() -> None:
    (part,) = parse_reward("openrlhf+http://a:1/get_reward")
    assert part.urls == ("http://a:1/get_reward",) and part.of_openrlhf and part.name == "http"

    async def made() -> bytes:
        loop = asyncio.get_running_loop()
        question = Question("2+2=", "4", {"answer": "4"}, loop.create_future())
        return request_body([question], of_openrlhf=True)

    body = json.loads(asyncio.run(made()))
    assert (body["query"], body["prompts"], body["labels"], body["responses"]) == (["2+2=4"], ["2+2="], ["4"], ["4"])
    assert openrlhf_answer({"rewards": [1.0], "extra_logs": {"n": 2}}, 1) == {"rewards": [1.0], "logs": {"n": [2]}}
    assert label_of({}) == ""


# What the user is told


def test_check_says_how_a_function_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "grpo", "--task.reward", str(OPENRLHF)]) == 0
    assert "is called as OpenRLHF calls it, with up to 64 samples at once" in capsys.readouterr().out


def test_the_preflight_tries_each_of_them_on_the_first_row() -> None:
    for reward, title in ((str(OPENRLHF), "OpenRLHF"), (f"{TRL}:correct", "TRL"), (str(VERL), "verl")):
        told = Reward(Task(reward=reward)).preflight()
        assert told is not None and f"is called as {title} calls it" in told
    assert Reward(Task()).preflight() is None


def test_rows_know_whether_they_came_as_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    turn = {"role": "user", "content": "2+3="}
    lines = [
        {"prompt": "2+2=", "answer": "4"},
        {"prompt": [turn], "answer": "5"},
        {"messages": [turn | {"content": "1"}]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = load_rows(Task(str(file)), whole=True)
    found = {row.prompt: row.as_messages for row in (*rows.train, *rows.held_out)}
    assert found == {"2+2=": False, "2+3=": True, "1": True}
