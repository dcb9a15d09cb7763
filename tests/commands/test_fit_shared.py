"""What `flowrl check --cluster` proposes where ranks have to share a micro-batch, and what it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.training.memory_table import CLUSTERS, MODELS, SHAPES, USUAL, _processes
from flowrl.commands.fit import Overrides, Variations, changed_config, find_fitting, option_text
from flowrl.graph.analysis.check import check
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB, Cluster

SMALL, SEVEN, LARGE = (str(SHAPES / f"{name}.json") for name in ("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b"))
BF16 = ("--dtype", "bfloat16", "--trainer.gpus", "1")
LONG = ("--max-tokens", "130000", "--token-budget", "131072")
EIGHT, SIXTEEN = "1 x 8 x 80GB", "2 x 8 x 80GB"
CHECKPOINTED = "--zero.gradient-checkpointing"
TURNS = "--time-share generator trainer"
DOCS = Path(__file__).parents[2] / "docs"


def variations(policy: str, *options: str, cluster: str = EIGHT, graph: str = "grpo") -> Variations:
    file = load_file(graph)
    return Variations(file, file.parse(["--policy", policy, *BF16, *options]), Cluster.parse(cluster))


def proposed(given: Variations) -> str:
    found = find_fitting(given.file, given.cfg, given.cluster)
    assert found is not None
    assert check(given.file.build(changed_config(given.cfg, found)), given.cluster).ok
    return option_text(found)


def activations(given: Variations, overrides: Overrides) -> float:
    """GiB on each GPU of the trainer."""
    report = check(given.file.build(changed_config(given.cfg, overrides)), given.cluster)
    (trainer,) = (one for one in report.residents if one.replica == "trainer/0")
    return sum(term.num_bytes for term in trainer.footprint.terms if term.name == "activations") / GB


def test_ranks_divide_the_positions_of_sequences_that_fit_no_gpu() -> None:
    given = variations(SEVEN, *LONG)
    assert proposed(given) == f"{CHECKPOINTED} --trainer.replicas 4 --trainer.sequence-parallel-size 2"
    plain: Overrides = {"zero.gradient_checkpointing": True, "trainer.replicas": 4}
    shared = plain | {"trainer.sequence_parallel_size": 2}
    assert activations(given, plain) == pytest.approx(64.26, abs=0.01)
    assert activations(given, shared) == pytest.approx(33.62, abs=0.01)


def test_longer_sequences_need_more_ranks_for_each() -> None:
    given = variations(SEVEN, "--max-tokens", "260000", "--token-budget", "262144")
    assert proposed(given) == f"{CHECKPOINTED} --trainer.replicas 4 --trainer.sequence-parallel-size 4"


def test_ranks_divide_matrices_where_every_rank_has_whole_weights() -> None:
    given = variations(LARGE, "--zero.stage", "2", cluster=SIXTEEN)
    assert proposed(given) == (
        f"{CHECKPOINTED} --token-budget 2048 --trainer.replicas 16 --trainer.tensor-parallel-size 2 {TURNS}"
    )


def test_ranks_divide_matrices_where_attention_cannot_divide_positions() -> None:
    given = variations(SEVEN, *LONG, "--zero.attention", "flex_attention")
    assert proposed(given) == (
        f"{CHECKPOINTED} --zero.stage 2 --trainer.replicas 8 --trainer.tensor-parallel-size 2 {TURNS}"
    )


def test_smaller_micro_batches_come_before_ranks_that_share_them() -> None:
    given = variations(SEVEN, "--lora.rank", "16", "--token-budget", "65536", cluster="1 x 2 x 24GB")
    assert proposed(given) == f"{CHECKPOINTED} --token-budget 8192"
    least = [way["token_budget"] for way in given._smaller_budgets][-1]
    assert least == 2048 >= 2 * 544, "a preference pair of the longest samples stays in one micro-batch"


def test_both_trainers_of_ppo_save_memory() -> None:
    given = variations(SEVEN, "--max-tokens", "16384", "--token-budget", "32768", graph="ppo")
    assert proposed(given) == (
        f"{CHECKPOINTED} --critic-zero.gradient-checkpointing --trainer.replicas 2 --trainer.sequence-parallel-size 2"
    )


@pytest.mark.parametrize(
    ("policy", "options", "sequence", "tensor"),
    [
        (SMALL, (), {2, 7}, set()),  # 14 heads, 2 of keys
        (SEVEN, (), {2, 4, 7}, set()),  # 28 and 4
        (SEVEN, ("--zero.stage", "2"), {2, 4, 7}, {2, 4}),
        (SEVEN, ("--zero.attention", "flex_attention"), set(), {2, 4}),
        (LARGE, ("--zero.attention", "flex_attention"), set(), {2, 4, 8}),  # 40 and 8
        (SEVEN, ("--zero.stage", "2", "--lora.rank", "8"), {2, 4, 7}, set()),
        (SEVEN, ("--zero.stage", "2", "--zero.optimizer", "muon"), {2, 4, 7}, set()),
        (SEVEN, ("--zero.offload", "all", "--zero.attention", "flex_attention"), set(), set()),
        (SEVEN, ("--trainer.sequence-parallel-size", "2", "--trainer.replicas", "4"), {4, 7}, set()),
        (SEVEN, ("--groups-per-step", "1", "--group-size", "2", "--trainer.replicas", "4"), {2, 4, 7}, set()),
    ],
)
def test_only_sizes_that_the_checks_let_through(
    policy: str, options: tuple[str, ...], sequence: set[int], tensor: set[int]
) -> None:
    given = variations(policy, *options)
    for name, sizes in (("sequence", sequence), ("tensor", tensor)):
        tried = [way for way in given._shared_ranks if f"trainer.{name}_parallel_size" in way]
        assert {way[f"trainer.{name}_parallel_size"] for way in tried} == sizes
        assert all(way["trainer.replicas"] % way[f"trainer.{name}_parallel_size"] == 0 for way in tried)
        assert all(given.cfg.trainer.size.replicas <= way["trainer.replicas"] <= 8 for way in tried)


def test_ranks_that_share_a_micro_batch_are_on_one_machine() -> None:
    sizes = {way["trainer.sequence_parallel_size"] for way in variations(SEVEN, cluster="4 x 2 x 80GB")._shared_ranks}
    assert sizes == {2}


def test_a_cluster_without_gpus_divides_nothing() -> None:
    given = variations(SEVEN, cluster="cpus=8 memory=64")
    assert given._shared_ranks == [] and given._smaller_budgets == []


def test_the_table_of_the_docs_is_what_the_checks_say() -> None:
    lines = (DOCS / "memory.md").read_text().split("| model | machines |")[1].splitlines()[2:]
    shown = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    told: list[tuple[str, ...]] = []
    file = load_file("grpo")
    for model, cluster, options, *_ in (row for row in shown if row[0]):
        if options == "does not fit":
            told.append((model, cluster, options, *("",) * 9))
            continue
        given = re.findall("`(.*)`", options)
        words = [word for text in given for word in text.split()]
        cfg = file.parse(["--policy", str(SHAPES / f"{MODELS[model]}.json"), *USUAL, *words])
        report = check(file.build(cfg), Cluster.parse(cluster))
        assert report.ok, (model, cluster, report.problems)
        told += [tuple(row) for row in _processes(model, cluster, "".join(given), report)]
    assert shown == told, "print it anew with python -m benchmarks.training.memory_table"
    assert len({row[:2] for row in shown if row[0]}) == len(MODELS) * len(CLUSTERS)
