"""Figures of a batch by the source of its rows."""

from __future__ import annotations

from rich.console import Console

from flowrl.graph.load import load_file
from flowrl.nodes import BestOfN, DynamicSampling, GroupAdvantage, TokenBatch
from flowrl.runtime.telemetry.view import Board, PlainView, draw_board, rewards_by_source
from flowrl.tasks import Task
from flowrl.testing import run_node, scored
from tests.nodes.groups import arriving, members

MIXTURE = Task("0.7*arithmetic + 0.3*reasoning_gym/chain_sum:size=20")
OF = {"a": "arithmetic", "c": "reasoning_gym/chain_sum:size=20"}


def group(name: str, *raw: float, response: int = 2) -> object:
    columns = {"of_task": OF[name[0]]}
    items = [scored(m, r, raw_reward=r, group=name, response=response, columns=columns) for m, r in enumerate(raw)]
    return members(items, size=len(items))


GROUPS = (group("a1", 1.0, 0.0), group("a2", 1.0, 1.0), group("c1", 0.5, 0.0, response=4), group("a3", 0.0, 0.0))


def test_each_source_has_its_own_figures() -> None:
    kept = run_node(GroupAdvantage(size=2, dynamic=DynamicSampling(2)), {"scored": arriving(*GROUPS)}).sent("groups")
    batcher = TokenBatch(2, sources=MIXTURE.source_names)
    (batch,) = run_node(batcher, {"groups": kept}, window=0).sent("batches")
    found = {name.removeprefix("source/"): value for name, value in batch.metrics.items() if name.startswith("source/")}
    assert found == {
        "arithmetic/num_samples": 2,
        "arithmetic/reward_mean": 0.5,
        "arithmetic/pass_rate": 0.5,
        "arithmetic/response_tokens_mean": 2,
        "arithmetic/filtered_share": 0.5,
        "chain_sum/num_samples": 2,
        "chain_sum/reward_mean": 0.25,
        "chain_sum/pass_rate": 0.0,
        "chain_sum/response_tokens_mean": 4,
        "chain_sum/filtered_share": 0.0,
    }
    assert batch.metrics["filtered_share"] == 1 / 3, "of both together, of the groups judged until the batch was full"


def test_nodes_that_select_count_by_source_too() -> None:
    node = BestOfN(size=2, least_reward=0.6)
    kept = run_node(node, {"scored": arriving(*GROUPS)}).sent("groups")
    (batch,) = run_node(TokenBatch(2, sources=MIXTURE.source_names), {"groups": kept}, window=0).sent("batches")
    assert batch.metrics["source/arithmetic/filtered_share"] == 0
    assert "source/chain_sum/num_samples" not in batch.metrics


def test_without_a_filter_there_is_no_filtered_share() -> None:
    kept = run_node(GroupAdvantage(size=2), {"scored": arriving(*GROUPS)}).sent("groups")
    (batch,) = run_node(TokenBatch(4, sources=MIXTURE.source_names), {"groups": kept}, window=0).sent("batches")
    assert batch.metrics["source/arithmetic/num_samples"] == 6
    assert not any("filtered_share" in name for name in batch.metrics)


def test_names_are_short_and_differ() -> None:
    def names(task: str) -> list[str]:
        return list(Task(task).source_names.values())

    assert names("arithmetic") == []
    assert names("reasoning_gym/gsm_symbolic + data/a.jsonl.gz:answer=x") == ["gsm_symbolic", "a"]
    assert names("x/a.jsonl + y/a.jsonl + b.csv as harder") == ["a_1", "a_2", "harder"]
    assert names("a.jsonl + b/a.jsonl + a_1.jsonl") == ["a_1_1", "a_2", "a_1"]


def test_every_online_graph_tells_its_batcher() -> None:
    for name in ("grpo", "ppo", "raft", "agent_openai"):
        file = load_file(name)
        batcher = file.build(file.parse(["--task.name", MIXTURE.name])).nodes["batcher"]
        assert isinstance(batcher, TokenBatch) and batcher.sources == {OF["a"]: "arithmetic", OF["c"]: "chain_sum"}


def test_a_run_prints_them() -> None:
    record = {"step": 1, "time_s": 1.0, "reward_mean": 0.5, "source/a/reward_mean": 0.25, "source/b/pass_rate": 1.0}
    assert rewards_by_source(record) == {"a": 0.25}
    console = Console(record=True, width=120)
    PlainView(Board("x", "run", None), console).step(record)
    board = Board("x", "run", None)
    board.add_line(record)
    console.print(draw_board(board))
    printed = console.export_text()
    assert "  a 0.25" in printed and "a 0.250" in printed
