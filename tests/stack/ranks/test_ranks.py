"""The harness of gangs in tests: whatever goes wrong in a rank is told, soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.stack.ranks import ranks
from tests.stack.ranks.ranks import run_ranks

RANK = """
import sys, time
rank, size, port, directory, what = sys.argv[1:]
print(f"rank {rank} of {size} begins", flush=True)
open(f"{directory}/{rank}", "w").write(port)
if what == "fails" and rank == "1":
    raise ValueError("no such tensor")
if what != "ends":
    import faulthandler, signal
    faulthandler.register(signal.SIGUSR1)
    print("waits", flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A rank without torch."""
    (tmp_path / "rank_of_a_test.py").write_text(RANK)
    monkeypatch.setattr(ranks, "ROOT", tmp_path)
    return "rank_of_a_test"


def test_all_ranks_get_one_port_and_are_waited_for(module: str, tmp_path: Path) -> None:
    run_ranks(module, tmp_path, "ends", size=3)
    assert len({(tmp_path / str(rank)).read_text() for rank in range(3)}) == 1


def test_a_rank_that_fails_ends_the_others_and_each_is_heard(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "OTHERS_WITHIN_S", 0.2)
    began_s = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(module, tmp_path, "fails")
    assert time.monotonic() - began_s < 60
    told = str(caught.value)
    assert told.startswith("rank_of_a_test failed\n\nrank 0 was still running:\nrank 0 of 2 begins")
    assert "rank 1 ended with status 1:\n" in told and "ValueError: no such tensor" in told


def test_ranks_that_take_too_long_say_where_they_stand(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "STACKS_WITHIN_S", 0.5)
    with pytest.raises(AssertionError) as caught:
        run_ranks(module, tmp_path, "hangs", timeout_s=2.0)
    told = str(caught.value)
    assert told.startswith("rank_of_a_test took longer than 2 s\n\nrank 0 was still running:")
    assert told.count("rank_of_a_test.py") == 2, "one stack each"
