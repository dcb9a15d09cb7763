"""check=code: which program a response has, which tests an answer holds, and what programs may try in vain."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl.environments.tools import PythonTool, code_answers
from flowrl.environments.tools.code_answers import Tried, code, tried
from flowrl.environments.tools.sandbox.sandbox_process import SandboxProcess, SandboxRefused
from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, PromptSource, Reward
from flowrl.tasks import Task, load_rows, reward_parts
from flowrl.tasks.code_tests import CodeTests, given_tests, program_of
from flowrl.tasks.judge import load_judge
from flowrl.tasks.rewards import open_reward

pytestmark = pytest.mark.timeout(60)
ASSERTS = ["assert f(1) == 2", "assert f(2) == 3"]
RIGHT = "def f(x):\n    return x + 1\n"


@pytest.fixture(scope="module", params=["namespaces", "limits"])
def kind(request: pytest.FixtureRequest) -> Any:
    try:
        PythonTool(sandbox=request.param).check()
    except ConfigError as problem:
        pytest.skip(str(problem))
    return request.param


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("So:\n```python\na = 1\n```\ndone", "a = 1\n"),
        ("```py\na = 1\n```\nbetter:\n```\nb = 2\n```\n", "b = 2\n"),
        ("It is\n```Python3\nb = 2\n", "b = 2\n"),
        ("  ```python\n  a = 1\n  ```", "  a = 1\n"),
        ("a = '```'\n", "a = '```'\n"),
        ("```python\na = 1\n```\nor\n```python\nb = 2\n", "a = 1\n"),
        ("```\n```\n", ""),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block(response: str, program: str) -> None:
    assert program_of(response) == program


CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    ("answer", "entry_point", "found"),
    [
        (ASSERTS, None, CodeTests(tuple(ASSERTS))),
        (tuple(ASSERTS), "f", CodeTests(tuple(ASSERTS))),
        (json.dumps(ASSERTS), None, CodeTests(tuple(ASSERTS))),
        (CHECK, "f", CodeTests((f"{CHECK}\ncheck(f)",))),
        ("assert f(1) == 2", "f", CodeTests(("assert f(1) == 2",))),
        ({"inputs": ["1", "2"], "outputs": ["2", "3"]}, None, CodeTests(cases=(("1", "2"), ("2", "3")))),
        ({"inputs": ["1"], "outputs": []}, None, None),
        ({"inputs": [], "outputs": []}, None, None),
        ({"inputs": "1", "outputs": "2"}, None, None),
        ([], None, None),
        (["assert f(1) =="], None, None),
        (["assert 1", 2], None, None),
        ("no code at all", None, None),
        ("  ", None, None),
        (7, None, None),
    ],
)
def test_the_tests_of_an_answer(answer: Any, entry_point: str | None, found: CodeTests | None) -> None:
    assert given_tests(answer, entry_point) == found


def run(kind: Any, program: str, tests: CodeTests, setup: str = "", time_s: float = 6.0) -> Tried:
    return asyncio.run(tried(kind, setup, program, tests, time_s=time_s))


def test_all_tests_have_to_pass_and_their_share_is_known(kind: Any) -> None:
    assert run(kind, RIGHT, CodeTests(tuple(ASSERTS))) == Tried(1.0)
    assert run(kind, "def f(x):\n    return 2", CodeTests(tuple(ASSERTS))) == Tried(0.5)
    assert run(kind, "f = math.ceil", CodeTests(("assert f(0.5) == 1",)), setup="import math") == Tried(1.0)
    assert run(kind, RIGHT, CodeTests((f"{CHECK}\ncheck(f)",))) == Tried(1.0)
    cases = CodeTests(cases=(("1 2\n", "3\n"), ("2 2", "4  \n\n"), ("1 1", "3")))
    assert run(kind, "print(sum(map(int, input().split())))", cases) == Tried(2 / 3)
    assert run(kind, "n = input()\nn", CodeTests(cases=(("5", "5"),))) == Tried(0.0), "a value is not printed"


HOSTILE = {
    "an endless loop": "while True:\n    pass",
    "a long sleep": "import time\ntime.sleep(100)",  # in a program that is ended
    "forks without end": "import os\nwhile True:\n    os.fork()",
    "a child that stays": "import os, time\nif os.fork() == 0:\n    time.sleep(100)",  # in a program that is ended
    "much memory": "x = bytearray(10**11)",
    "memory little by little": "x = []\nwhile True:\n    x.append(bytearray(10**7))",
    "an exit": "import sys\nsys.exit(0)",
    "a hard exit": "import os\nos._exit(0)",
    "a signal to itself": "import os\nos.kill(os.getpid(), 9)",
    "an exit when tested": "import os\nclass F:\n    def __call__(self, x):\n        os._exit(0)\nf = F()",
    "an exception that says it is none": "def f(x):\n    raise SystemExit(0)",
    "the word passed": "print('passed\\n' * 1000)",
    "a text without end": "while True:\n    print('y' * 10**6)",
    "no program": "I cannot do that.",
    "a syntax that is none": "def f(x) return x",
    "a deep nesting": "(" * 10000 + ")" * 10000,
    "a null byte": "a = 1\0",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HOSTILE)
def test_programs_that_do_something_else_fail_and_leave_nothing(name: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    start = time.monotonic()
    found = run("namespaces" if namespaces() else "limits", HOSTILE[name], CodeTests(tuple(ASSERTS)), time_s=1.5)
    assert found.passed == 0.0 and time.monotonic() - start < 10.0
    assert set(psutil.Process().children(recursive=True)) <= before


def namespaces() -> bool:
    try:
        PythonTool(sandbox="namespaces").check()
    except ConfigError:
        return False
    return True


def test_a_program_that_takes_too_long_is_logged_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    if not namespaces():
        pytest.skip("no namespaces here")
    monkeypatch.setattr(code_answers.tried, "__kwdefaults__", {"time_s": 1.0})
    found = code(["", ""], ["while True: pass", RIGHT], answer=[ASSERTS, json.dumps(ASSERTS)])
    assert found == {"rewards": [0.0, 1.0], "logs": {"tests_passed": [0.0, 1.0], "timed_out": [1.0, 0.0]}}


def written(path: Path, **columns: Any) -> str:
    rows = [{"prompt": f"write f, case {n}", **columns} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{path}:check=code,answer={next(iter(columns))}"


def test_a_file_as_mbpp_has_them_is_scored_by_name(tmp_path: Path) -> None:
    if not namespaces():
        pytest.skip("no namespaces here")
    columns = {"test_list": ["assert f(4) == 2.0"], "test_imports": ["from math import sqrt"], "test_setup_code": ""}
    task = Task(written(tmp_path / "mbpp.jsonl", **columns))
    PromptSource(task, Policy("tiny"), part="all").preflight()
    reward = Reward(task)
    reward.preflight()
    assert reward.concurrency == 4 and Reward(Task("arithmetic")).concurrency == 1
    row = load_rows(task).train[0]
    assert row.columns["answer"] == ("assert f(4) == 2.0",)

    async def ask() -> list[float]:
        client = open_reward(reward_parts(task), timeout_s=10.0)
        try:
            verdicts = [await client.ask([row.prompt], [said], [row.columns]) for said in ("f = sqrt", "f = abs")]
        finally:
            await client.close()
        return [one.rewards[0] for one in verdicts]

    assert asyncio.run(ask()) == [1.0, 0.0]


def test_answers_without_tests_are_refused(tmp_path: Path) -> None:
    task = Task(written(tmp_path / "rows.jsonl", test_list=["assert f(4) =="]))
    with pytest.raises(ConfigError, match=r"rows.jsonl:\d+: the answer is .* check=code needs tests"):
        PromptSource(task, Policy("tiny"), part="all").preflight()
    plain = Task(written(tmp_path / "plain.jsonl", test_list=ASSERTS).replace("check=code,", ""))
    with pytest.raises(ConfigError, match=r"plain.jsonl:\d+: the answer is .* check=exact compares with a text"):
        PromptSource(plain, Policy("tiny"), part="all").preflight()
    with pytest.raises(ConfigError, match=r"to learn from it needs text"):
        Demonstrations(plain, Policy("tiny"), part="all").preflight()


def test_it_can_be_asked_where_an_event_loop_runs() -> None:
    if not namespaces():
        pytest.skip("no namespaces here")

    async def ask() -> dict[str, Any]:
        return code([""], [RIGHT], answer=[ASSERTS])

    assert asyncio.run(ask())["rewards"] == [1.0]


def test_where_programs_cannot_be_shut_in_the_refusal_names_the_judge_that_runs_them_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    async def start(process: Any) -> None:
        seen.append(process._settings.kind)
        raise SandboxRefused("user namespaces are off")

    with monkeypatch.context() as patched:
        patched.setattr(SandboxProcess, "start", start)
        with pytest.raises(ConfigError, match=r"\(user namespaces are off\); allow .*--task.reward (\S+)$") as refused:
            code([""], [RIGHT], answer=[ASSERTS])
    assert seen == ["namespaces"]
    other = load_judge(str(refused.value).split()[-1])
    shut_in = load_judge("flowrl.environments.tools.code_answers:code")
    assert (other.wanted, other.required) == (shut_in.wanted, shut_in.required) and "answer" in other.required
    assert other([""], [RIGHT], [{"answer": ASSERTS}]).rewards == (1.0,)
