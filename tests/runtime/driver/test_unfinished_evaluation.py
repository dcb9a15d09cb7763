"""An evaluation that trains nothing goes on with the answers that are on disk, if they are answers to the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.load import dump_options, load_file
from flowrl.messages import Prompt
from flowrl.models import Policy
from flowrl.nodes import Evaluation
from flowrl.nodes.evaluation import digest_of_rows
from flowrl.nodes.writers import ProgressCount
from flowrl.runtime.checkpoints.rundir import RunDir
from flowrl.runtime.checkpoints.unfinished_evaluation import UNFINISHED, UnfinishedEvaluation, _stamp_files
from flowrl.runtime.samples.rollout_files import write_rollouts
from flowrl.runtime.samples.sample_notes import held_out_record
from flowrl.tasks import Row, Task
from flowrl.testing import NodeRecord, NodeRig, sample
from tests.nodes.test_nodes_evaluation import Answers, rows

TASK = Task("arithmetic:max_value=9")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in which runs begin, with a file of ten rows, a reward and a model's directory."""
    monkeypatch.chdir(tmp_path)
    write_rows(10)
    (tmp_path / "rules.py").write_text("def short(prompt, response):\n    return -len(response)\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")


def write_rows(number: int, answer: str = "1") -> None:
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": answer}) for n in range(number)]
    Path("rows.jsonl").write_text("\n".join(lines))


def unfinished(*args: str, graph: str = "evaluate") -> UnfinishedEvaluation | None:
    file = load_file(graph)
    cfg = file.parse(args)
    return UnfinishedEvaluation.of(file.build(cfg), dump_options(cfg))


def asked(*more: str) -> UnfinishedEvaluation:
    found = unfinished("--task", "rows.jsonl", "--policy", "model", "--task.reward", "1*rules.py:short", *more)
    assert found is not None
    return found


def begun(at: Path, *more: str) -> None:
    """A run that has begun, has kept an answer and a part of a ledger, and was killed."""
    directory = asked(*more).claim_directory(at)
    directory.write_json("config.json", {"hub": {}})
    asked(*more).mark_begun(directory)
    for name in ("ledger.sqlite", "evaluations.jsonl"):
        (at / name).write_text("")
    record = held_out_record(sample(0), phase="before", step=0, task="a", score=1.0, correct=True, token_ids=False)
    write_rollouts(at, [record | {"state": "held_out", "closed_s": 0.0}], 1)
    directory.release()


def test_only_a_graph_that_evaluates_and_trains_nothing_goes_on_so() -> None:
    assert unfinished() is not None
    assert unfinished(graph="grpo") is None
    assert unfinished(graph="generate") is None


def test_the_same_command_goes_on_where_it_ended(tmp_path: Path) -> None:
    at = Path("runs/evaluate-20260101-000000")
    begun(at)
    begun(Path("runs/evaluate-20260102-000000"), "--max-tokens", "64")
    for named in (None, at):
        directory = asked("--generator.replicas", "2").claim_directory(named)
        assert (directory.path, directory.goes_on) == (at, True), "the number of generators changes no answer"
        directory.release()
    directory = asked().claim_directory(None)
    asked().mark_begun(directory)
    assert sorted(path.name for path in at.iterdir() if not path.name.startswith(".")) == [
        "checkpoints",
        "config.json",
        "rollouts",
        UNFINISHED,
    ]
    other = asked().claim_directory(None)
    assert not other.goes_on, "another process has that one"
    other.release()
    directory.release()
    UnfinishedEvaluation.mark_ended(RunDir(at))
    assert not asked().claim_directory(None).goes_on
    (at / "ledger.sqlite").write_text("")
    with pytest.raises(ConfigError, match="holds a finished or interrupted run"):
        asked().claim_directory(at)


def change_reward() -> None:
    Path("rules.py").write_text("def short(prompt, response):\n    return 1.0\n")


def change_model() -> None:
    (Path("model") / "model.safetensors").write_text("")


def change_rows() -> None:
    """The rows of the run that ended early are others: those of a Hub dataset, say."""
    path = Path("runs/evaluate-20260101-000000") / UNFINISHED
    before = json.loads(path.read_text())
    assert before["rows"].keys() == {"evaluation/rows.jsonl"}
    path.write_text(json.dumps(before | {"rows": {"evaluation/rows.jsonl": "others"}}))


@pytest.mark.parametrize("prompt", ["Answer in ~50 words.", "\u8bf7" * 300, "Look at rules.py ."])
def test_the_words_of_a_system_prompt_are_no_files(prompt: str) -> None:
    with_prompt = asked("--task.system-prompt", prompt)
    assert with_prompt.files.keys() == asked().files.keys()
    assert with_prompt.options["task.system_prompt"] == prompt
    assert dict(_stamp_files({"policy.chat_template_kwargs": "x" * 300, "task.reward": "~nobody-here/a.py:f"})) == {}


def test_the_digest_of_rows_tells_prompts_and_answers_apart() -> None:
    found = {digest_of_rows([Row.ask(text, answer=answer)]) for text in "ab" for answer in "12"}
    assert len(found) == 4 and digest_of_rows([Row.ask("a", answer="1")]) in found


@pytest.mark.parametrize(
    ("more", "change", "said"),
    [
        (("--max-tokens", "64"), lambda: None, "max_tokens is 64, was 32"),
        (("--temperature", "0.5"), lambda: None, "temperature is 0.5, was None"),
        ((), change_reward, "rules.py has changed"),
        ((), change_model, "model has changed"),
        ((), lambda: write_rows(11), "rows.jsonl has changed"),
        ((), change_rows, "evaluation/rows.jsonl has other rows"),
    ],
)
def test_answers_to_something_else_are_not_taken_over(more: tuple[str, ...], change: object, said: str) -> None:
    at = Path("runs/evaluate-20260101-000000")
    begun(at)
    assert callable(change)
    change()
    with pytest.raises(ConfigError, match="and this one differs: ") as raised:
        asked(*more).claim_directory(at)
    assert said in str(raised.value)
    directory = asked(*more).claim_directory(None)
    assert not directory.goes_on and directory.path != at
    directory.release()


async def wrong(prompt: Prompt) -> dict[str, Any]:
    """The record of a wrong answer, as a file has it."""
    record = held_out_record(
        await Answers()(prompt), phase="before", step=0, task=TASK.name, score=0.5, correct=False, token_ids=False
    )
    ids = {"prompt_id": prompt.prompt_id, "member": prompt.member}
    return record | ids | {"state": "held_out", "closed_s": 0.0}


def evaluate(
    answers: Answers, kept: Sequence[Prompt] = (), *, marked: bool = True
) -> tuple[dict[str, float], NodeRecord]:
    """Figures of six answers; those to the prompts `kept` are in the run's files, wrong, with a score of one half."""
    node = Evaluation(TASK, Policy("tiny"), num_prompts=3, num_samples=2)

    async def life() -> tuple[dict[str, float], NodeRecord]:
        async with NodeRig(node, name="evaluation", answers={"generate": answers}, preflight=False) as rig:
            run_dir = Path(node.context.run_dir)
            records = [await wrong(prompt) for prompt in kept]
            write_rollouts(run_dir, records, 1)
            if marked:
                (run_dir / UNFINISHED).write_text("{}")
            figures = await node.evaluate(phase="before", step=0)
            await node.finish()
            return figures, await rig.finished()

    return asyncio.run(life())


def test_answers_that_are_kept_are_not_asked_again_and_are_booked() -> None:
    first, again, others = Answers(), Answers(), Answers()
    evaluate(first)
    assert len(first.asked) == 6
    figures, record = evaluate(again, first.asked[:2])
    (booked,) = rows(record)
    assert [prompt.sample_id for prompt in again.asked] == [prompt.sample_id for prompt in first.asked[2:6]]
    assert (figures["num_answers"], figures["score"], figures["exact_match"]) == (6, (2 * 0.5 + 4) / 6, 4 / 6)
    assert [(row.score, row.correct, row.newest_version) for row in booked[:3]] == [
        (0.5, False, 3),
        (0.5, False, 3),
        (1.0, True, 3),
    ]
    assert "2 of 6 answers are there already" in record.progress
    evaluate(others, first.asked[:2], marked=False)
    assert len(others.asked) == 6, "a run that trains asks everything"


def test_a_count_says_how_many_of_how_many_and_how_fast() -> None:
    said: list[str] = []
    now = [0.0]  # the first answer comes after 70 s
    count = ProgressCount("answers", said.append, total=5276, there=1000, now=lambda: now[0])
    for seconds, number in ((70.0, 40), (74.9, 100), (75.0, 100), (79.0, 10), (81.0, 5), (82.0, 1)):
        now[0] = seconds
        count.count_items(number)
    count.report_end()
    assert said == [
        "1,000 of 5,276 answers are there already",
        "1,240 of 5,276 answers (40/s)",
        "1,255 of 5,276 answers (2.5/s)",
        "1,256 of 5,276 answers",
    ]
    short: list[str] = []
    count = ProgressCount("answers", short.append, total=3, now=lambda: 0.0)
    count.count_items(3)
    count.report_end()
    assert short == [], "what takes no time is not told"
