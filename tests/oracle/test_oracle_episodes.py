"""Episodes with branches through advantage node, batcher and two ZeRO-3 ranks, against a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.house.further_cases import chosen
from tests.oracle.branched import BATCHES, BRANCHED_CASES, VERSIONS, BranchedCase, recorded, run
from tests.oracle.branched_rank import TOKEN_BUDGET
from tests.stack.ranks.ranks import run_ranks
from tests.training.training_cases import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where two ranks left what the cases gave."""
    directory = tmp_path_factory.mktemp("branched")
    make_model(directory / "model", tied=True, num_layers=1)
    names = chosen(request, [case.name for case in BRANCHED_CASES])
    run_ranks("tests.oracle.branched_rank", directory, *names, timeout_s=500)
    return directory


def test_what_is_recorded_has_what_could_go_wrong() -> None:
    episodes = [one for version in VERSIONS for group in recorded(version) for one in group]
    assert max(len(one.sequences) for one in episodes) == 8 and min(len(one.sequences) for one in episodes) == 1
    assert max(one.num_tokens for one in episodes) > TOKEN_BUDGET


@pytest.mark.parametrize("case", BRANCHED_CASES, ids=[case.name for case in BRANCHED_CASES])
def test_loss_and_gradients_of_branched_episodes_equal_the_plain_loop(case: BranchedCase, oracle: Path) -> None:
    found, expected = torch.load(oracle / f"{case.name}.pt"), run(case, oracle / "model")
    assert found["losses"] == pytest.approx(expected.losses, abs=1e-5)
    assert len(found["gradients"]) == len(expected.gradients) == BATCHES * case.optimizer_steps
    for ours, theirs in zip(found["gradients"], expected.gradients, strict=True):
        size = max(float(gradient.abs().max()) for gradient in theirs.values())
        assert size > 1e-3, "a gradient of nothing would prove nothing"
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-5 * max(1.0, size)
    weights = found["weights"]
    assert max(float((weights[name] - expected.weights[name]).abs().max()) for name in weights) <= 1e-5
