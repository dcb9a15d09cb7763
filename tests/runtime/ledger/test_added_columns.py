"""Columns that a node adds: from the generator to the loss, in `flowrl check`, and in the digests of the ledger."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from flowrl import Column, check
from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.analysis.numbers import derive_numbers, message_bytes
from flowrl.graph.analysis.report import render_report
from flowrl.messages import Branch, Sample, Trainable
from flowrl.runtime.ledger.token_digest import policy_spans
from flowrl.testing import run_graph, sample, scored
from flowrl.training.loss.function_objective import FunctionObjective
from flowrl.wire.encoding.codec import dump_value, load_value
from tests.runtime.ledger import column_nodes

GRAPH = Path(__file__).parent / "graphs_proof" / "added.py"
STEPS = 3


@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_every_token_reaches_the_loss_with_its_values(tmp_path: Path, layout: str) -> None:
    ran = run_graph(GRAPH, tmp_path / "run", {"layout": layout}, steps=STEPS)
    report = ran.audit()
    assert report.ok and report.figures["policy spans proven"] == report.figures["policy spans"] == STEPS * 6
    fed = column_nodes.FED[str(ran.directory)]
    tokens = np.array([token for _, token, *_ in fed])
    assert len(fed) == STEPS * 2 * 3 * 8 == len({*tokens.tolist()})  # two groups of three sequences with eight tokens
    assert {rank for rank, *_ in fed} == {0, 1} and {found for *_, found, _, _, _, _ in fed} == {layout}
    for _, token, _, experts, entropy, image, advantage in fed:
        number, member = divmod(token // column_nodes.SPAN - 1, 2)
        assert experts == column_nodes.experts_of(np.array([token]))[0].tolist()
        assert entropy == column_nodes.entropy_of(np.array([token]))[0]
        assert image == column_nodes.image_of(f"group{number}:{member}")[0].tolist()
        assert np.sign(advantage) == (1 if member else -1)


@pytest.mark.parametrize("column", ["experts", "image"])
def test_the_audit_finds_a_changed_value_of_a_column_in_the_digest(tmp_path: Path, column: str) -> None:
    report = run_graph(GRAPH, tmp_path / "run", {"change": column}, steps=STEPS).audit()
    assert not report.ok and {v.kind for v in report.violations} >= {"spans", "requests"}
    assert all("group2:1" in v.text for v in report.violations)


def test_a_column_outside_the_digest_may_change(tmp_path: Path) -> None:
    assert run_graph(GRAPH, tmp_path / "run", {"change": "entropy"}, steps=STEPS).audit().ok


# In `flowrl check`


def test_check_shows_the_columns_and_counts_their_bytes() -> None:
    graph = column_nodes.graph(column_nodes.Added())
    report = check(graph)
    report.raise_for_problems()
    lines = [line.split() for line in render_report(report).splitlines()]
    assert ["experts", "generator", "uint8[4]", "4", "B", "a", "token", "yes"] in lines
    assert ["entropy", "generator", "float32", "4", "B", "a", "token", "no"] in lines
    assert ["image", "generator", "int64[2]", "16", "B", "a", "sample", "yes"] in lines

    numbers = derive_numbers(graph)
    prompts, samples, scored_samples, groups, *_ = (message_bytes(graph, edge, numbers) for edge in graph.edges)
    assert prompts == 1024 + 8 * 16
    assert samples == scored_samples == 1024 + 16 + (24 + 4 + 4) * 16
    assert groups == 2 * (1024 + 16 + (32 + 4 + 4) * 16)


def test_check_wants_a_node_that_adds_what_a_loss_reads() -> None:
    problems = check(column_nodes.graph(column_nodes.Added(declared=False))).problems
    assert [text.partition(", ")[0] for text in problems] == [
        "trainer reads the column entropy (float32 for each token)",
        "trainer reads the column image (int64[2] for each sample)",
    ]
    assert "which no node before it adds; declare it in the facts of the node that adds it" in problems[0]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ((Column("experts", "uint8", (8,)),), r"trainer reads the column experts \(uint8\[4\] .*, but it is declared"),
        ((Column("values"),), r"generator adds the column values .* samples have a field of this name"),
        ((column_nodes.EXPERTS, column_nodes.EXPERTS), r"generator and generator both add a column 'experts'"),
    ],
)
def test_check_finds_columns_that_cannot_be(columns: tuple[Column, ...], problem: str) -> None:
    graph = column_nodes.graph(column_nodes.Added())
    graph.nodes["generator"].declared = columns  # type: ignore[attr-defined]
    assert re.search(problem, "\n".join(check(graph).problems))


# On a sample


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        (column_nodes.EXPERTS, np.zeros((5, 3), np.uint8), r"an array of uint8 \[5, 3\]; it needs uint8 \[5, 4\]"),
        (column_nodes.EXPERTS, np.zeros((5, 4), np.int32), r"an array of int32 \[5, 4\]; it needs uint8 \[5, 4\]"),
        (column_nodes.EXPERTS, np.zeros((2, 4), np.uint8), r"\[2, 4\]; it needs uint8 \[5, 4\]"),
        (column_nodes.IMAGE, np.zeros(2, np.int64), r"\[2\]; it needs int64 \[1, 2\]"),
        (Column("values"), np.zeros(5, np.float32), "has 'values' already"),
    ],
)
def test_values_have_to_be_what_the_column_declares(column: Column, values: np.ndarray, reason: str) -> None:
    with pytest.raises(FlowrlError, match=reason):
        sample().with_column(column, values)


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        ({"name": "two words"}, "has to be an identifier"),
        ({"name": "x", "dtype": "complex64"}, "has dtype 'complex64'; choose one of bool, int8"),
        ({"name": "x", "shape": (0,)}, r"the shape \(0,\); it takes numbers of at least 1"),
    ],
)
def test_a_column_that_cannot_be_sent_is_refused(declaration: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Column(**declaration)  # type: ignore[arg-type]


def with_branch() -> Trainable:
    """Five tokens, and a branch of two."""
    ids = np.array([7, 8], np.int32)
    branch = Branch(ids, np.array([False, True]), np.zeros(2, np.float32), np.zeros(2, np.int32))
    whole = scored(0, 1.0, branches=(branch,), ref_logprobs=np.arange(7, dtype=np.float32))
    made = Trainable.of(whole, np.arange(7.0))
    made = made.with_column(column_nodes.EXPERTS, np.arange(28, dtype=np.uint8).reshape(7, 4))
    return made.with_column(column_nodes.IMAGE, np.array([[3, 4]]))


def test_rows_have_the_values_of_their_tokens() -> None:
    first, second = with_branch().split_rows()
    for row, tokens in ((first, slice(0, 5)), (second, slice(5, 7))):
        assert row.column("experts").tolist() == np.arange(28).reshape(7, 4)[tokens].tolist()  # type: ignore[union-attr]
        assert row.column("image").tolist() == [[3, 4]]  # type: ignore[union-attr]
        assert row.advantages.tolist() == row.ref_logprobs.tolist() == [*range(7)[tokens]]  # type: ignore[union-attr]
    assert second.token_ids.tolist() == [7, 8] and not second.branches and second.values is None


def test_a_cut_leaves_out_the_first_tokens_of_every_column() -> None:
    whole = scored(0, 1.0, ref_logprobs=np.arange(5, dtype=np.float32))
    cut = whole.with_column(column_nodes.EXPERTS, np.arange(20, dtype=np.uint8).reshape(5, 4)).cut_tokens(2)
    assert cut.token_ids.tolist() == whole.token_ids[2:].tolist() and cut.prompt_tokens == whole.prompt_tokens - 2
    assert cut.ref_logprobs.tolist() == [2, 3, 4]  # type: ignore[union-attr]
    assert cut.column("experts").tolist() == np.arange(8, 20).reshape(3, 4).tolist()  # type: ignore[union-attr]


def test_columns_of_two_branches_of_a_graph_are_joined() -> None:
    one = scored(0, 1.0).with_column(column_nodes.ENTROPY, np.arange(5, dtype=np.float32))
    other = replace(sample(), ref_logprobs=np.ones(5, np.float32), behavior_logprobs=np.zeros(5, np.float32))
    joined = one.with_columns_of(other.with_column(column_nodes.EXPERTS, np.ones((5, 4), np.uint8)))
    assert joined.reward == 1.0 and joined.behavior_logprobs is one.behavior_logprobs
    assert joined.ref_logprobs is other.ref_logprobs and {*(joined.added_columns or ())} == {"entropy", "experts"}


def test_columns_are_stored_with_their_sample() -> None:
    whole = with_branch()
    again = load_value(dump_value(whole))
    assert again.column("experts").tolist() == whole.column("experts").tolist()  # type: ignore[union-attr]
    assert again.column("image").tolist() == [[3, 4]] and policy_spans(again) == policy_spans(whole)


def test_every_array_of_a_sample_is_declared() -> None:
    """But for what has its own axes, and what is one for each policy token."""
    for kind in (Sample, Trainable):
        kinds = {field.name: str(field.type).removesuffix(" | None") for field in fields(kind)}
        arrays = {name for name, found in kinds.items() if found in ("Int32", "Float32", "Bool")}
        assert arrays - {"teacher_hidden"} == {column.name for column in kind.token_columns}
    assert {field.name for field in fields(Branch)} == {one.name for one in Sample.token_columns if one.in_branches}


def test_a_loss_gets_zeros_for_the_padding_of_an_empty_micro_batch() -> None:
    objective = FunctionObjective(column_nodes.read_experts, columns=("advantages", column_nodes.EXPERTS))
    found = objective.columns(replace(scored_trainable(), sample_id=""))
    assert found["experts"].tolist() == np.zeros((5, 4)).tolist()  # type: ignore[union-attr]
    with pytest.raises(FlowrlError, match="has no experts, which the loss read_experts reads"):
        objective.columns(scored_trainable())


def scored_trainable() -> Trainable:
    return Trainable.of(scored(0, 1.0), np.zeros(5))
