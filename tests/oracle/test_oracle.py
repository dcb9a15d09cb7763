"""Recorded rollouts through advantage node, batcher and two ZeRO-3 ranks, against a plain full-batch loop.

Every estimator with every ratio and every aggregation, in rows or in trees of the prompts that groups share; groups
of 2, 3 and 4, uneven lengths, stale masks, several optimizer steps. `tests/oracle/plain.py` says what ought to come
out. `make oracle` runs all of it in both layouts, `make test` a fifth in which each two choices meet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import plain, plain_offline, rollouts
from tests.oracle.cases import (
    BATCHES,
    CASES,
    EACH_PAIR,
    IN_PIECES,
    LATER_CASES,
    OTHER_CASES,
    PIECE_CASES,
    OracleCase,
    pairs_of,
)
from tests.oracle.offline import OFFLINE_CASES, OfflineCase
from tests.stack.ranks.ranks import run_ranks
from tests.training.training_cases import VOCABULARY, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where two ranks left what the chosen cases gave."""
    directory = tmp_path_factory.mktemp("oracle")
    make_model(directory / "model", tied=True, num_layers=1)
    name_a_pad_token(directory / "model")
    rollouts.record(directory / "model", directory / "rollouts")
    chosen = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    names = [case.name for case in chosen if isinstance(case, OracleCase | OfflineCase)]
    pieces = [item.callspec.params.get("cut") for item in request.session.items if hasattr(item, "callspec")]
    names += [f"{case.name}{IN_PIECES}" for case in pieces if isinstance(case, OracleCase | OfflineCase)]
    (directory / "cases.json").write_text(json.dumps(names))
    run_ranks("tests.oracle.rank", directory, timeout_s=580)
    return directory


def name_a_pad_token(model_dir: Path) -> None:
    """Models with a scalar head need one."""
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"pad_token_id": VOCABULARY - 1}))


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def assert_same(found: dict[str, Any], expected: plain.Outcome, num_steps: int) -> None:
    assert len(found["gradients"]) == len(expected.gradients) == num_steps
    for ours, theirs in zip(found["gradients"], expected.gradients, strict=True):
        size = max(float(gradient.abs().max()) for gradient in theirs.values())
        assert size > 1e-3, "a gradient of nothing would prove nothing"
        assert worst(ours, theirs) <= 2e-5 * max(1.0, size)
    assert worst(found["weights"], expected.weights) <= 1e-5


IN_BOTH_LAYOUTS = [
    pytest.param(case, id=case.name, marks=[] if case in EACH_PAIR else pytest.mark.matrix)
    for case in (*CASES, *OTHER_CASES)
]
LATER = [
    pytest.param(case, id=case.name, marks=pytest.mark.matrix if case.aggregation == "constant" else [])
    for case in LATER_CASES
]


def test_each_two_choices_meet_in_the_part_that_make_test_runs() -> None:
    def pairs(cases: Sequence[OracleCase]) -> set[object]:
        return set().union(*map(pairs_of, cases))

    assert pairs(EACH_PAIR) == pairs(CASES) and len(EACH_PAIR) < len(CASES) / 2


@pytest.mark.parametrize("case", [*IN_BOTH_LAYOUTS, *LATER])
def test_gradients_and_weights_equal_the_plain_loop(case: OracleCase, oracle: Path) -> None:
    found = torch.load(oracle / f"{case.name}.pt")
    expected = plain.run(case, rollouts.load(oracle / "rollouts"), oracle / "model")
    assert_same(found, expected, BATCHES * case.epochs * case.optimizer_steps)
    assert found["clip_fractions"] == pytest.approx(expected.clip_fractions, abs=1e-6)
    if case.ratio not in ("reinforce", "sapo", "vespo") and case.optimizer_steps > 1:
        assert any(0.0 < fraction < 1.0 for fraction in expected.clip_fractions)


@pytest.mark.parametrize("case", OFFLINE_CASES, ids=[case.name for case in OFFLINE_CASES])
def test_preferences_and_values_equal_the_plain_loop(case: OfflineCase, oracle: Path) -> None:
    found = torch.load(oracle / f"{case.name}.pt")
    expected = plain_offline.run(case, oracle / "model", oracle / "scalar_start_0.pt")
    assert_same(found, expected, BATCHES * case.epochs * case.optimizer_steps)


@pytest.mark.parametrize("cut", PIECE_CASES, ids=[case.name for case in PIECE_CASES])
def test_a_batch_in_pieces_equals_the_plain_loop(cut: OracleCase, oracle: Path) -> None:
    found = torch.load(oracle / f"{cut.name}{IN_PIECES}.pt")
    expected = plain.run(cut, rollouts.load(oracle / "rollouts"), oracle / "model")
    assert_same(found, expected, BATCHES)
    assert found["clip_fractions"] == pytest.approx(expected.clip_fractions, abs=1e-6)


OFFLINE_IN_PIECES = [case for case in OFFLINE_CASES if case.family != "kto"]


@pytest.mark.parametrize("cut", OFFLINE_IN_PIECES, ids=[case.name for case in OFFLINE_IN_PIECES])
def test_preferences_and_values_in_pieces_equal_the_plain_loop(cut: OfflineCase, oracle: Path) -> None:
    found = torch.load(oracle / f"{cut.name}{IN_PIECES}.pt")
    assert_same(found, plain_offline.run(cut.in_pieces, oracle / "model", oracle / "scalar_start_0.pt"), BATCHES)
