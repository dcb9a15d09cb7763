"""Whatever the bytes of a peer hold ends as a refusal, a failed lane or a failed request."""

from __future__ import annotations

import asyncio

import pytest

from tests.wire.fuzz_frames import fuzz


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_frames_are_refused_and_nothing_else_is_raised(seed: int) -> None:
    outcomes = asyncio.run(fuzz(1500, seed))
    assert outcomes["WireError"] > 100
    assert outcomes["request: WireError"] and outcomes["request: NodeFailed"], "answers were damaged, and came whole"
