"""The dispatch rules: which replicas a message goes to, and what each rule says to those who ask."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from flowrl.graph.dispatch_rules import BROADCAST, GANG, KEY, LATEST, RULES, SHARE, Dispatch, DispatchRule
from tests.graph.graph_nodes import grpo

FLOWRL = Path(__file__).parents[2] / "flowrl"


def test_users_can_choose_every_rule_but_latest() -> None:
    assert (*get_args(Dispatch), LATEST.name) == tuple(RULES)


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule is not KEY])
def test_a_message_concerns_every_replica(rule: DispatchRule) -> None:
    assert list(rule.replicas("any", 3)) == [0, 1, 2]


def test_a_group_goes_to_one_replica_in_every_process() -> None:
    assert [KEY.replicas(f"group {index}", 4) for index in range(6)] == [(3,), (1,), (3,), (1,), (2,), (0,)]
    spread = Counter(KEY.replicas(f"group {index}", 4)[0] for index in range(4000))
    assert set(spread) == {0, 1, 2, 3}
    assert min(spread.values()) > 900


def test_what_each_rule_says() -> None:
    says = ("any_one", "by_group", "copies", "splits", "overwrites", "to_each", "carries_tombstones")
    assert {rule: {name for name in says if getattr(rule, name)} for rule in RULES.values()} == {
        SHARE: {"any_one", "carries_tombstones"},
        KEY: {"by_group", "carries_tombstones"},
        BROADCAST: {"copies", "to_each", "carries_tombstones"},
        GANG: {"splits", "to_each"},
        LATEST: {"overwrites"},
    }


def test_an_edge_has_the_rule_that_it_was_declared_with() -> None:
    rules = {edge.name: edge.rule for edge in grpo().graph.edges}
    assert rules["batcher.batches -> trainer.batches"] is GANG
    assert rules["trainer.weights -> generator.weights"] is LATEST
    assert rules["reward.scored -> advantage.scored"] is SHARE


def test_nothing_else_compares_the_names_of_rules() -> None:
    names = {SHARE.name, BROADCAST.name, GANG.name}
    found = [
        f"{path.relative_to(FLOWRL)}:{node.lineno}: {ast.unparse(node)}"
        for path in FLOWRL.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value in names for part in ast.walk(node))
    ]
    assert not found
