"""The reward node: verdicts, shaping, failed samples, and the preflight that finds faults before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Sample
from flowrl.nodes import Overlong, Reward, Shaping
from flowrl.nodes.scoring.reward import FAILURES_IN_A_ROW
from flowrl.tasks import Task
from flowrl.testing import NodeRecord, run_node, sample

TASK = Task("arithmetic:max_value=9")


def score(node: Reward, samples: list[Sample]) -> NodeRecord:
    return run_node(node, {"rollouts": samples}, preflight=False)


def reward_file(tmp_path: Path, body: str, head: str = "async def f(prompts, responses, **columns)") -> str:
    (tmp_path / "reward.py").write_text(f"{head}:\n    {body}\n")
    return f"{tmp_path}/reward.py:f"


def test_the_tasks_own_verifier_judges_by_exact_match() -> None:
    given = [sample(0), sample(1, response_text=" 2\n"), sample(2, response_text="3")]
    record = score(Reward(TASK), given)
    found = record.sent("scored")
    assert [(s.sample_id, s.reward, s.raw_reward) for s in found] == [("g:0", 1, 1), ("g:1", 1, 1), ("g:2", 0, 0)]
    assert record.events("scored") == [(s.sample_id, s.reward, s.scored_s) for s in found]
    assert len(record.ledger) == 3
    assert found[0].token_ids is given[0].token_ids
    assert found[0].columns == {"answer": "2"}
    assert found[0].scored_s > 0


def test_parts_are_logged_and_scores_stand_for_the_raw_reward(tmp_path: Path) -> None:
    place = reward_file(tmp_path, "return {'rewards': [2.0], 'scores': [1.0], 'logs': {'form': [0.5]}}")
    node = Reward(TASK, function=place, shaping=Shaping(weights={"form": 3.0}))
    (found,) = score(node, [sample()]).sent("scored")
    assert (found.reward, found.raw_reward, found.reward_parts) == (3.5, 1.0, {"form": 0.5})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 'text'", "reward_malformed"),
        ("return []", "reward_wrong_length"),
        ("return [float('nan')]", "reward_not_finite"),
        ("raise ValueError", "reward_raised"),
    ],
)
def test_a_sample_without_a_verdict_fails_and_the_others_go_on(tmp_path: Path, body: str, reason: str) -> None:
    place = reward_file(tmp_path, f"if responses == ['bad']: {body}\n    return [1.0]")
    record = score(Reward(TASK, function=place), [sample(0), sample(1, response_text="bad"), sample(2)])
    assert [s.member for s in record.sent("scored")] == [0, 2]
    assert [(one.message.member, one.state, one.reason) for one in record.lost] == [(1, "failed", reason)]
    assert [marker.member for marker in record.tombstones("scored")] == [1]
    assert record.metrics == {reason: 1}
    assert "a sample failed: " in record.progress[0]


def test_a_function_that_never_succeeds_ends_the_run(tmp_path: Path) -> None:
    node = Reward(TASK, function=reward_file(tmp_path, "raise RuntimeError('no judge')"))
    with pytest.raises(FlowrlError, match=rf"failed for {FAILURES_IN_A_ROW} samples in a row; .*no judge"):
        score(node, [sample(n) for n in range(FAILURES_IN_A_ROW)])


def test_a_success_ends_a_row_of_failures(tmp_path: Path) -> None:
    node = Reward(TASK, function=reward_file(tmp_path, "return [1.0] if responses == ['2'] else 1 / 0"))
    bad = [sample(n, response_text="bad") for n in range(FAILURES_IN_A_ROW - 1)]
    record = score(node, [*bad, sample(), *bad])
    assert (len(record.sent("scored")), len(record.lost)) == (1, 2 * len(bad))


def test_preflight_tries_the_function_once(tmp_path: Path) -> None:
    Reward(TASK).preflight()
    Reward(TASK, function=reward_file(tmp_path, "return [1.0]")).preflight()


@pytest.mark.parametrize(
    ("head", "body", "says"),
    [
        ("async def f(prompts, responses)", "return 'text'", "the trial reward failed"),
        ("async def f(prompts, responses, solution)", "return [1]", "needs the column solution"),
        ("async def f(responses)", "return [1]", "begins with the parameters"),
        ("async def g(prompts, responses)", "return [1]", "has no function 'f'"),
        ("async def f(prompts, responses", "return [1]", "does not import: SyntaxError"),
    ],
)
def test_preflight_names_what_cannot_work(tmp_path: Path, head: str, body: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Reward(TASK, function=reward_file(tmp_path, body, head)).preflight()
    assert says in str(error.value)


def told_of(tmp_path: Path, head: str, returned: str) -> str | None:
    """What the preflight says of a function where a later row has a column `response`."""
    place = reward_file(tmp_path, f"return {returned}", head)
    rows = [{"prompt": "1+1="}, {"prompt": "2+2=", "response": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Reward(Task(f"{tmp_path}/rows.jsonl", reward=place)).preflight()


def test_preflight_says_which_column_a_function_is_not_given(tmp_path: Path) -> None:
    assert told_of(tmp_path, "def f(prompt, response, **columns)", "1.0") == (
        f"{tmp_path}/reward.py:f is not given the column response: its own parameter has that name; rename the column "
        "if the function needs it"
    )


@pytest.mark.parametrize(
    ("head", "returned"), [("def f(prompts, responses, **columns)", "[1.0]"), ("def f(prompt, response)", "1.0")]
)
def test_preflight_says_nothing_of_a_column_that_a_function_does_not_take(
    tmp_path: Path, head: str, returned: str
) -> None:
    assert told_of(tmp_path, head, returned) is None


def test_preflight_does_not_wait_for_a_function_that_hangs(tmp_path: Path) -> None:
    place = reward_file(tmp_path, "while True: pass", "def f(prompts, responses)")
    with pytest.raises(ConfigError, match=r"took more than 0.5 s"):
        Reward(TASK, function=place, timeout_s=0.5).preflight()


@pytest.mark.slow
def test_synchronous_functions_run_in_a_process_that_a_timeout_kills(tmp_path: Path) -> None:
    place = reward_file(
        tmp_path, "while response == 'bad': pass\n    return len(answer)", "def f(prompt, response, answer)"
    )
    node = Reward(TASK, function=place, timeout_s=1.0)
    samples = [sample(0), sample(1, response_text="bad"), sample(2)]
    record = run_node(node, {"rollouts": samples}, preflight=False, timeout_s=60.0)  # it starts processes
    assert [(s.member, s.reward) for s in record.sent("scored")] == [(0, 1.0), (2, 1.0)]
    assert record.reasons() == [("failed", "reward_timed_out")]


@pytest.mark.parametrize(
    ("shaping", "truncated", "tokens", "expected"),
    [
        (Shaping(), True, 99, 1.0),
        (Shaping(stop_penalty=0.25), True, 10, 0.25),
        (Shaping(stop_penalty=0.25), False, 10, 1.0),
        (Shaping(stop_penalty=-2.0), True, 10, -2.0),
        (Shaping(overlong=Overlong(max_tokens=100, buffer=20)), False, 80, 1.0),
        (Shaping(overlong=Overlong(max_tokens=100, buffer=20)), False, 90, 0.5),
        (Shaping(overlong=Overlong(max_tokens=100, buffer=20, factor=2.0)), True, 100, -1.0),
        (Shaping(weights={"form": -4.0}, clip=(-1.0, 1.0)), False, 10, -1.0),
        (Shaping(weights={"absent": 5.0}), False, 10, 1.0),
        (Shaping(stop_penalty=0.5, overlong=Overlong(10, 10)), True, 10, -0.5),
        (Shaping(negate=True, clip=(-1.0, 0.5)), False, 10, -0.5),
    ],
)
def test_shaping_steps_in_their_order(shaping: Shaping, truncated: bool, tokens: int, expected: float) -> None:
    assert shaping.shape_reward(1.0, {"form": 1.0}, num_tokens=tokens, truncated=truncated) == pytest.approx(expected)


def test_settings_that_cannot_work_are_problems() -> None:
    shaping = Shaping(stop_penalty=1.5, overlong=Overlong(10, 0), clip=(1.0, 0.0))
    problems = Reward(TASK, timeout_s=0, concurrency=0, shaping=shaping).check(None)
    assert len(problems) == 5
    assert Reward(TASK).check(None) == []
