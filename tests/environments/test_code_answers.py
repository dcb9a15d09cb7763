"""check=code: which program a response has, which tests an answer holds, and what programs may try in vain."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl.environments.tools import PythonTool
from flowrl.environments.tools.code_answers import WITHOUT_NAMESPACES, Tried, code, try_program
from flowrl.environments.tools.sandbox.sandbox_process import SandboxProcess, SandboxRefused
from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, PromptSource, Reward
from flowrl.tasks import Task, load_rows, reward_parts
from flowrl.tasks.checks.answer_checks import CHECKS
from flowrl.tasks.checks.code_tests import CodeTests, given_tests, program_of, time_limits
from flowrl.tasks.reward_calls.judge import load_judge
from flowrl.tasks.reward_calls.reward_client import OWN_LIMITS
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
        ("```py\na = 1\n```\nOutput:\n```\n5\n```\n", "a = 1\n"),
        ("```py\na = 1\n```\nbetter:\n```python3\nb = 2\n```\nOutput:\n```\n5\n```\n", "b = 2\n"),
        ("Plan:\n```\nread\n```\n```python\na = 1\n", "a = 1\n"),
        ("```\na = 1\n```\nbetter:\n```\nb = 2\n```\n", "b = 2\n"),
        ("```\na = 1\n```\nor\n```\nb = 2\n", "a = 1\n"),
        ("```text\n1\n```\n```\na = 1\n```\n```text\n2\n```\n", "a = 1\n"),
        ("It is\n```Python3\nb = 2\n", "b = 2\n"),
        ("  ```python\n  a = 1\n  ```", "  a = 1\n"),
        ("a = '```'\n", "a = '```'\n"),
        ("```python\na = 1\n```\nor\n```python\nb = 2\n", "a = 1\n"),
        ("```\n```\n", ""),
        ("```bash\npip install x\n```\nthen\n```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\nprints\n```text\n1\n```\nand\n```text\n2\n```\n", "a = 1\n"),
        ("```text\n1\n```\n```python title=a.py\na = 1\n", "a = 1\n"),
        ("```python\r\na = 1\r\n```\r\n", "a = 1\r\n"),
        ('````python\na = "\n```\n"\n````\n', 'a = "\n```\n"\n'),
        ("```bash\npip install x\n```python\na = 1\n```", "a = 1\n"),
        ("```markdown\n```python\na = 1\n```\n```\n", "a = 1\n"),
        ("```cpp\nint a;\n```", "```cpp\nint a;\n```"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block(response: str, program: str) -> None:
    assert program_of(response) == program


CASES = "import unittest\nclass Cases(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n"
RUNNER = "if __name__ == '__main__':\n    unittest.main()\n"
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"
AGAIN = "def check(candidate, n=1):\n    assert candidate(n) == n + 1\n    return n > 3 or check(candidate, n + 1)\n"
LOOP = "def check(x, y):\n    assert f(x) == y\nfor x, y in [(1, 2)]:\n    check(x, y)\n"
ASSERTED = "def check(x):\n    return f(x) == x + 1\nassert all(map(check, range(3)))\n"
GUARD = "if __name__ == '__main__':\n"
WITHIN = "def test_f():\n    check(f)\n"


@pytest.mark.parametrize(
    ("answer", "entry_point", "found"),
    [
        (ASSERTS, None, CodeTests(tuple(ASSERTS))),
        (tuple(ASSERTS), "f", CodeTests(tuple(ASSERTS))),
        (json.dumps(ASSERTS), None, CodeTests(tuple(ASSERTS))),
        (CHECK, "f", CodeTests((f"{CHECK}\ncheck(f)",))),
        (CHECK, "Solution().f", CodeTests((f"{CHECK}\ncheck(Solution().f)",))),
        (f"{CHECK}\ncheck(f)\n", None, CodeTests((f"{CHECK}\ncheck(f)\n",))),
        (CHECK, None, None),
        (CHECK, "not a name", None),
        ("def test_f():\n    assert f(1) == 2\n", None, None),
        (["import math", "x = 1"], "f", None),
        (
            ["def right(x):\n    return x", "assert right(f(1))"],
            None,
            CodeTests(("def right(x):\n    return x", "assert right(f(1))")),
        ),
        (LOOP, None, CodeTests((LOOP,))),
        (LOOP, "f", CodeTests((LOOP,))),
        (ASSERTED, None, CodeTests((ASSERTED,))),
        (ASSERTED, "f", CodeTests((ASSERTED,))),
        ([CHECK, "check(f)"], None, CodeTests((CHECK, "check(f)"))),
        ([CHECK, "check(f)"], "f", CodeTests((CHECK, "check(f)"))),
        (f"{CHECK}{GUARD}    check(f)\n", "f", CodeTests((f"{CHECK}{GUARD}    check(f)\n",))),
        (f"{CHECK}{WITHIN}test_f()\n", None, CodeTests((f"{CHECK}{WITHIN}test_f()\n",))),
        (f"{CHECK}{WITHIN}test_f()\n", "f", CodeTests((f"{CHECK}{WITHIN}test_f()\n",))),
        (f"{CHECK}{WITHIN}", "f", CodeTests((f"{CHECK}{WITHIN}\ncheck(f)",))),
        (f"{CHECK}{WITHIN}", None, None),
        (f"{AGAIN}assert f(2) == 3\n", "f", CodeTests((f"{AGAIN}assert f(2) == 3\n\ncheck(f)",))),
        ([CHECK, "assert f(2) == 3"], "f", CodeTests((f"{CHECK}\ncheck(f)", "assert f(2) == 3"))),
        ("def check(x, y):\n    assert f(x) == y\n", "f", None),
        ("def check():\n    assert f(1) == 2\n", "f", None),
        ("def check(candidate, *, tries):\n    assert candidate(1) == 2\n", "f", None),
        ("Evelyn", None, None),
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


def run(kind: Any, program: str, tests: CodeTests, setup: str = "", **times: float) -> Tried:
    return asyncio.run(try_program(kind, setup, program, tests, **times))


def test_all_tests_have_to_pass_and_their_share_is_known(kind: Any) -> None:
    assert run(kind, RIGHT, CodeTests(tuple(ASSERTS))) == Tried(1.0)
    assert run(kind, "def f(x):\n    return 2", CodeTests(tuple(ASSERTS))) == Tried(0.5)
    assert run(kind, "f = math.ceil", CodeTests(("assert f(0.5) == 1",)), setup="import math") == Tried(1.0)
    assert run(kind, RIGHT, CodeTests((f"{CHECK}\ncheck(f)",))) == Tried(1.0)
    cases = CodeTests(cases=(("1 2\n", "3\n"), ("2 2", "4  \n\n"), ("1 1", "3")))
    assert run(kind, "print(sum(map(int, input().split())))", cases) == Tried(2 / 3)
    assert run(kind, "n = input()\nn", CodeTests(cases=(("5", "5"),))) == Tried(0.0), "a value is not printed"


OWN_CALLS = {
    "a loop": LOOP,
    "a condition": ASSERTED,
    "several pieces": [CHECK, "check(f)"],
    "a guard": f"{CHECK}{GUARD}    check(f)\n",
    "a function": f"{CHECK}{WITHIN}test_f()\n",
    "a test case": f"{CHECK}{CASES.replace('self.assertEqual(f(1), 2)', 'check(f)')}",
}


@pytest.mark.parametrize("name", OWN_CALLS)
@pytest.mark.parametrize("entry_point", [None, "f"])
def test_tests_that_call_their_check_are_run_as_they_are(kind: Any, name: str, entry_point: str | None) -> None:
    tests = given_tests(OWN_CALLS[name], entry_point)
    assert tests is not None
    assert run(kind, RIGHT, tests) == Tried(1.0)
    assert run(kind, "def f(x):\n    return 7", tests).passed < 1.0


@pytest.mark.parametrize("runner", ["", RUNNER, "unittest.main()"])
def test_test_cases_are_run(kind: Any, runner: str) -> None:
    tests = given_tests(CASES + runner)
    assert tests is not None
    assert run(kind, RIGHT, tests) == Tried(1.0)
    assert run(kind, "def f(x):\n    return 7", tests) == Tried(0.0)


READERS = {
    "the buffer of standard input": "import sys\nprint(int(sys.stdin.buffer.read()) + 1)",
    "lines of the buffer": "import sys\ninput = sys.stdin.buffer.readline\nprint(int(input()) + 1)",
    "the descriptor": "print(int(open(0).read()) + 1)",
    "lines": "import sys\nprint(*(int(line) + 1 for line in sys.stdin))",
    "an error output": "import sys\nn = int(input())\nprint('n is', n, file=sys.stderr)\nprint(n + 1)",
    "a warning of the compiler": "n = int(input())\nif n is 1:\n    n = 1\nprint(n + 1)",
}


@pytest.mark.parametrize("name", READERS)
def test_a_program_reads_and_prints_as_programs_do(kind: Any, name: str) -> None:
    assert run(kind, READERS[name], CodeTests(cases=(("41\n", "42\n"),))) == Tried(1.0)


def test_outputs_may_be_long(kind: Any) -> None:
    long = "\u00e4" * (3 << 19)
    assert run(kind, "print(input())", CodeTests(cases=((long, long),))) == Tried(1.0)
    assert run(kind, "print(input())", CodeTests(cases=((long, "x"),))) == Tried(0.0)


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
    found = run("namespaces" if namespaces() else "limits", HOSTILE[name], CodeTests(tuple(ASSERTS)), case_s=1.5)
    assert found.passed == 0.0 and time.monotonic() - start < 10.0
    assert set(psutil.Process().children(recursive=True)) <= before


def namespaces() -> bool:
    try:
        PythonTool(sandbox="namespaces").check()
    except ConfigError:
        return False
    return True


def test_a_program_that_takes_too_long_is_logged_as_such() -> None:
    if not namespaces():
        pytest.skip("no namespaces here")
    found = code(["", ""], ["while True: pass", RIGHT], answer=[ASSERTS, json.dumps(ASSERTS)], case_s=[1.0, None])
    assert found == {
        "rewards": [0.0, 1.0],
        "logs": {"tests_passed": [0.0, 1.0], "timed_out": [1.0, 0.0], "out_of_memory": [0.0, 0.0]},
    }


SLEEPS = "import time\ndef f(x):\n    time.sleep(0.25)\n    return x + 1\n"  # under test: right, and slow


def test_the_time_is_for_each_test_and_all_of_them_have_a_bound(kind: Any) -> None:
    """The limits of one test do not add up: a right program may take longer for all than for one."""
    asserts = CodeTests(tuple(f"assert f({n}) == {n + 1}" for n in range(12)))
    assert run(kind, SLEEPS, asserts, case_s=2.5, total_s=60.0) == Tried(1.0)  # 3 s and more for all of them
    assert run(kind, SLEEPS, asserts, case_s=30.0, total_s=1.0) == Tried(timed_out=True)
    assert run(kind, SLEEPS, asserts, case_s=0.1, total_s=30.0) == Tried(timed_out=True)
    cases = CodeTests(cases=(("1", "2"),) * 3)
    program = "import time\ntime.sleep(0.9)\nprint(int(input()) + 1)"  # under test: right, and slow
    assert run(kind, program, cases, case_s=2.5, total_s=60.0) == Tried(1.0)  # 2.7 s and more for all of them
    assert run(kind, program, cases, case_s=0.2, total_s=30.0) == Tried(timed_out=True)


def test_the_times_are_options_of_the_task_and_columns_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    name = written(path, test_list=ASSERTS)
    assert not {"case_s", "total_s"} & load_rows(Task(name)).train[0].columns.keys()
    given = load_rows(Task(f"{name},case_s=10,total_s=300")).train[0].columns
    assert (given["case_s"], given["total_s"]) == (10, 300)
    own = load_rows(Task(written(path, test_list=ASSERTS, case_s=2.5) + ",case_s=10")).train[0].columns
    assert own["case_s"] == 2.5
    null = load_rows(Task(written(tmp_path / "null.jsonl", test_list=ASSERTS, case_s=None) + ",case_s=10")).train[0]
    cell = load_rows(Task(written(tmp_path / "cell.jsonl", test_list=ASSERTS, case_s="10"))).train[0]
    assert null.columns["case_s"] == cell.columns["case_s"] == 10
    with pytest.raises(ConfigError, match="the column 'case_s' is 'soon'; it needs a number of seconds above 0"):
        load_rows(Task(written(tmp_path / "text.jsonl", test_list=ASSERTS, case_s="soon")))
    assert time_limits() == time_limits("soon", None) == time_limits(True, -1) == (6.0, 60.0)
    assert time_limits(2, 0.5) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("check=code,case_s=0", "option case_s of a task is 0; it has to be above 0"),
        ("check=code,total_s=long", "option total_s is 'long' and needs float"),
        ("check=gsm8k,case_s=3", "option case_s of a task is for check=code, and this one has check=gsm8k"),
    ],
)
def test_times_that_cannot_be_are_refused(tmp_path: Path, options: str, said: str) -> None:
    written(tmp_path / "rows.jsonl", test_list=ASSERTS)
    with pytest.raises(ConfigError, match=said):
        load_rows(Task(f"{tmp_path}/rows.jsonl:answer=test_list,{options}"))


def test_a_call_has_the_time_that_its_programs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    code_s, of_mixture = OWN_LIMITS[CHECKS["code"]], OWN_LIMITS["flowrl.tasks.mixture:score_with_code"]
    assert OWN_LIMITS[WITHOUT_NAMESPACES] is code_s
    assert [code_s([{}] * n) for n in (1, 2, 3)] == [65.0, 65.0, 125.0]
    assert code_s([{"total_s": 7}, {"total_s": 3}]) == 12.0
    assert of_mixture([{"of_task": "a.jsonl:check=code", "total_s": 100}, {"of_task": "arithmetic"}]) == 105.0
    assert of_mixture([{"of_task": "arithmetic"}]) < 10.0


def test_the_process_of_a_reward_is_not_killed_while_its_programs_may_run(tmp_path: Path) -> None:
    """Its timeout is that of other functions, here shorter than a right program takes."""
    if not namespaces():
        pytest.skip("no namespaces here")
    task = Task(written(tmp_path / "rows.jsonl", test_list=[f"assert f({n}) == {n + 1}" for n in range(4)]))
    row = load_rows(task).train[0]

    async def ask() -> float:
        client = open_reward(reward_parts(task), timeout_s=0.5)
        try:
            return (await client.ask([row.prompt], [SLEEPS], [row.columns])).rewards[0]
        finally:
            await client.close()

    assert asyncio.run(ask()) == 1.0


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
    for name, text, said in [
        ("check", CHECK, "needs the function that check.* is called with .12 of 12 have none.; name it in a column"),
        ("function", "def test_f():\n    assert f(1)\n", "needs tests that run, .* only defines something"),
    ]:
        task = Task(written(tmp_path / f"{name}.jsonl", test=text))
        with pytest.raises(ConfigError, match=rf"{name}.jsonl:\d+: the answer is .*, and check=code {said}"):
            PromptSource(task, Policy("tiny"), part="all").preflight()
    task = Task(written(tmp_path / "named.jsonl", test=CHECK, entry_point="f"))
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
        patched.setattr(SandboxProcess, "start_sandbox", start)
        with pytest.raises(ConfigError, match=r"\(user namespaces are off\); allow .*--task.reward (\S+)$") as refused:
            code([""], [RIGHT], answer=[ASSERTS])
    assert seen == ["namespaces"]
    other = load_judge(str(refused.value).split()[-1])
    shut_in = load_judge("flowrl.environments.tools.code_answers:code")
    assert (other.wanted, other.required) == (shut_in.wanted, shut_in.required) and "answer" in other.required
    assert other([""], [RIGHT], [{"answer": ASSERTS}]).rewards == (1.0,)
