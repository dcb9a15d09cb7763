"""Recorded rollouts through advantage node, batcher and two ZeRO-3 ranks, against a plain full-batch loop.

Every estimator with every ratio and every aggregation; groups of 2, 3 and 4, uneven lengths, stale masks,
several optimizer steps. `tests/oracle/plain.py` says what ought to come out.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.oracle import plain, rollouts
from tests.oracle.cases import BATCHES, CASES, OracleCase
from tests.training_cases import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RANKS = 2


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where two ranks left what the chosen cases gave."""
    directory = tmp_path_factory.mktemp("oracle")
    make_model(directory / "model", tied=True, num_layers=1)
    rollouts.record(directory / "model", directory / "rollouts")
    chosen = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    names = [case.name for case in chosen if isinstance(case, OracleCase)]
    (directory / "cases.json").write_text(json.dumps(names))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.oracle.rank", str(rank), str(RANKS), port, str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=580)
            assert rank.returncode == 0, output[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return directory


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other at every tiny product cost more than the products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_gradients_and_weights_equal_the_plain_loop(case: OracleCase, oracle: Path) -> None:
    found = torch.load(oracle / f"{case.name}.pt")
    expected = plain.run(case, rollouts.load(oracle / "rollouts"), oracle / "model")
    assert len(found["gradients"]) == len(expected.gradients) == BATCHES * case.epochs * case.optimizer_steps
    for ours, theirs in zip(found["gradients"], expected.gradients, strict=True):
        size = max(float(gradient.abs().max()) for gradient in theirs.values())
        assert size > 1e-3, "a gradient of nothing would prove nothing"
        assert worst(ours, theirs) <= 2e-5 * max(1.0, size)
    assert worst(found["weights"], expected.weights) <= 1e-5
    assert found["clip_fractions"] == pytest.approx(expected.clip_fractions, abs=1e-6)
    if case.ratio != "reinforce" and case.optimizer_steps > 1:
        assert any(0.0 < fraction < 1.0 for fraction in expected.clip_fractions)
