"""What benchmarks of episodes and agents make of their figures, and when they are content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.agents import agent_programs, agents_endpoint
from benchmarks.agents.agent_programs import Pair, Ran
from benchmarks.agents.agents_endpoint import CPU, RATE
from benchmarks.agents.episodes_stack import GRAPH, LoadedRun, busy, figures, options_of
from flowrl.cli import main
from flowrl.errors import FlowrlError
from flowrl.messages.episode import Turn


def turn(number: int, name: str) -> Turn:
    ids = np.zeros(1, np.int32)
    return Turn(name, "s", "g", turn=number, attempt=0, ticket=0, seed=0, token_ids=ids, max_tokens=1)


def test_a_loaded_run_is_held_against_what_the_waiting_and_the_generator_allow() -> None:
    """One turn in 0.1 s, the last episode begins at 40 s, the host takes 0.3 cores; the generator does 20 turns/s."""
    answered = [(turn(0 if n <= 400 else 1, str(n)), n / 10) for n in range(500)]
    used = [(n / 4, n / 4 * 0.3) for n in range(400)]
    again = [(asked, n / 20) for n, (asked, _) in enumerate(answered)]
    assert (busy(answered).start_s, busy(answered).end_s) == (10.0, 40.0)
    found = figures(LoadedRun(11, 401, 2, 8), answered, used, again)
    assert found["turns/s"] == pytest.approx(10) and found["the generator alone"] == pytest.approx(20, rel=0.01)
    assert found["episodes / mean sleep"] == pytest.approx(4) and found["of the smaller"] == pytest.approx(2.5)
    assert found["ms a turn"] == pytest.approx(30)
    slower = [(asked, at_s * 40) for asked, at_s in again]
    assert figures(LoadedRun(11, 401, 2, 8), answered, used, slower)["of the smaller"] == pytest.approx(20, rel=0.01)
    with pytest.raises(FlowrlError, match="499 requests were asked again, of 500"):
        figures(LoadedRun(11, 401, 2, 8), answered, used, again[1:])
    with pytest.raises(FlowrlError, match="raise --total"):
        busy(answered[:100])


@pytest.mark.parametrize("requests", ["", "requests.pickle"])
def test_the_loaded_run_is_a_graph_that_runs_with_these_options(
    tmp_path: Path, requests: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["check", str(GRAPH), *options_of(LoadedRun(11, 401, 2, 8), tmp_path, requests)])
    assert status == 0, capsys.readouterr()


def test_a_missed_figure_of_the_endpoint_is_seen() -> None:
    assert agents_endpoint.report([{RATE: 150.0, CPU: 4.0}, {RATE: 200.0, CPU: 3.0}, {RATE: 300.0, CPU: 1.0}])
    assert not agents_endpoint.report([{RATE: 199.0, CPU: 3.0}])
    assert not agents_endpoint.report([{RATE: 200.0, CPU: 3.1}])


def test_agents_programs_are_compared_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    def ran(graph: str, after: float, rate: float, audit_ok: bool = True) -> Ran:
        return Ran(graph, 3, 0.4, after, 0.01, 90.0, rate, audit_ok)

    def pair(apart: float, ratio: float, **options: Any) -> Pair:
        return Pair(ran("agent_tools", 0.9, 50.0), ran("agent_openai", 0.9 + apart, 50.0 * ratio, **options))

    assert str(pair(-0.02, 0.75)) == "difference       3  -0.020, 0.750 of the episodes/s"
    assert agent_programs.report([pair(0.08, 0.6), pair(0.0, 0.7), pair(0.02, 0.9)])
    assert "agent_tools: 0.700 (0.600 to 0.900)" in capsys.readouterr().out
    for bad in (pair(0.0, 0.69), pair(0.06, 0.9), pair(-0.06, 0.9), pair(0.0, 0.9, audit_ok=False)):
        assert not agent_programs.report([bad])


def test_the_command_of_agents_programs_is_that_of_the_table() -> None:
    told = agent_programs.arguments([])
    assert told.seeds == [0, 1, 2]
    words = " ".join(agent_programs.command_of("agent_openai", 1, Path("runs/a"), told))
    for part in (
        "run graphs/agent_openai.py --task.name arithmetic:min_value=30 --steps 50 --schedule.decay linear --seed 1",
        "--evaluate 128 --evaluate-samples 4 --episodes-per-process 16",
    ):
        assert part in words
