"""Answers that are compared with each other: which pair is made, and what a comparison may say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError, FlowrlError
from flowrl.nodes import PairMaker, Reward
from flowrl.nodes.scoring.reward import FAILURES_IN_A_ROW
from flowrl.tasks import Task, load_rows
from flowrl.testing import NodeRecord, NodeRig, run_node, scored
from tests.tasks.test_rewards_http import Server, served

LONGER = """
def longer(prompts, firsts, seconds, **columns):
    return [0.5 if len(a) == len(b) else float(len(a) > len(b)) for a, b in zip(firsts, seconds, strict=True)]


def broken(prompts, firsts, seconds):
    return [2.0 for _ in firsts]


def first(prompts, firsts, seconds):
    return [1.0 for _ in firsts]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "compare.py").write_text(LONGER)
    return str(tmp_path / "compare.py")


def through(prefer: str, *texts: str) -> NodeRecord:
    """One group, in which rewards say the opposite of lengths."""
    samples: list[Any] = [scored(n, -float(len(text)), response_text=text) for n, text in enumerate(texts)]
    node = PairMaker(size=len(texts), prefer=prefer, task=Task())
    return run_node(node, {"scored": samples})


def test_the_answer_that_wins_most_comparisons_is_chosen_whatever_its_reward(file: str) -> None:
    record = through(f"{file}:longer", "aa", "a", "aaaa", "aaa")
    (group,) = record.sent("groups")
    assert [(sample.response_text, sample.label, sample.reward) for sample in group.samples] == [
        ("aaaa", 1, -4.0),
        ("a", -1, -1.0),
    ]
    assert record.reasons() == [("filtered", "not_paired")] * 2


def test_a_preference_for_the_first_place_evens_out(file: str) -> None:
    record = through(f"{file}:first", "a", "b", "c")
    assert record.sent("groups") == [] and record.reasons() == [("filtered", "tie")] * 3


def test_a_comparison_that_says_nothing_sensible_fails_the_group(file: str) -> None:
    record = through(f"{file}:broken", "a", "b")
    assert record.sent("groups") == [] and record.reasons() == [("failed", "reward_malformed")] * 2


def test_comparisons_that_only_fail_end_the_run(file: str) -> None:
    """A failed group counts for no step: such a run would sample without an end."""
    samples: list[Any] = [
        scored(member, 0.0, group_id=f"g{group}", sample_id=f"g{group}:{member}")
        for group in range(FAILURES_IN_A_ROW // 2)
        for member in range(2)
    ]
    node = PairMaker(size=2, prefer=f"{file}:broken", task=Task())
    with pytest.raises(FlowrlError, match=f"the reward failed for {FAILURES_IN_A_ROW} samples in a row; the last time"):
        run_node(node, {"scored": samples})


def test_the_function_is_tried_before_the_run_and_told_apart_from_rewards(file: str, tmp_path: Path) -> None:
    PairMaker(size=2, prefer=f"{file}:longer", task=Task()).preflight()
    (tmp_path / "other.py").write_text("def f(prompts, responses): return [0.0]\n")
    with pytest.raises(
        ConfigError, match=r"compares no two answers; it needs the parameters \(prompts, firsts, seconds\)"
    ):
        PairMaker(size=2, prefer=f"{tmp_path}/other.py:f", task=Task()).preflight()
    (problem,) = Reward(Task(reward=f"{file}:longer")).check(None)
    assert "compares two responses, but a reward scores one" in problem


@pytest.mark.parametrize("graph", ["iterative_dpo", "pairs"])
@pytest.mark.parametrize("prefer", ["verifier", "reward_model", "{file}:longer + 0.5*verifier"])
def test_words_for_rewards_of_one_answer_are_refused(
    file: str, graph: str, prefer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", graph, "--prefer", prefer.format(file=file)]) == 2
    word = prefer.rpartition("*")[2]
    said = f"flowrl: --prefer names {word}, which scores one answer; a comparison of two is a function "
    assert capsys.readouterr().err.startswith(f"{said}(prompts, firsts, seconds), as FILE.py:FUNCTION, or a server")


def test_graphs_of_pairs_take_it(file: str) -> None:
    for graph in ("iterative_dpo", "pairs"):
        assert main(["check", graph, "--prefer", f"{file}:longer"]) == 0


def test_a_server_gets_the_conversation_in_the_trial_and_in_the_run(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in (turns, turns[2:])))
    task = Task(str(tmp_path / "rows.jsonl"), system_prompt="Be brief.")
    rows = load_rows(task, whole=True)
    row = next(row for row in (*rows.train, *rows.held_out) if row.turns == tuple(turns))
    server = Server(lambda body: [1.0] * len(body["prompts"]))

    async def scenario() -> None:
        async with served(server):
            node = PairMaker(size=2, prefer=server.url, task=task)
            await asyncio.to_thread(node.preflight)
            async with NodeRig(node, preflight=False) as rig:
                samples: list[Any] = [scored(n, 0.0, prompt_id=row.prompt_id, response_text=str(n)) for n in range(2)]
                rig.feed("scored", *samples)
                await rig.finished()

    asyncio.run(scenario())
    tried, compared = (request["columns"] for request in server.requests)
    system = {"role": "system", "content": "Be brief."}
    assert tried["messages"] in ([[system, *turns]], [[system, *turns[2:]]])
    assert compared["messages"] == [[system, *turns]] and compared["second"] in (["0"], ["1"])
