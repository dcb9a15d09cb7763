"""The commands that break agents: which cells they have, and how benchmarks/agents/agent_faults.py compares runs."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agents.agent_faults import Options, Played, difference, report
from benchmarks.agents.faulty_env import AT_RESET, CHANCE, KINDS, Faulty
from flowrl.environments import Action
from tests.faults.agent_faults import MOMENTS, REAL, Cell, cells, play


def test_the_matrix_is_whole_and_says_why_it_leaves_cells_out() -> None:
    found = list(cells())
    assert len({str(cell) for cell in found}) == 7 * 4 * 5
    done = [cell for cell in found if not cell.senseless]
    assert {cell.target for cell in done} == {cell.target for cell in found}
    assert {(cell.way, cell.moment) for cell in done if cell.target == "process"} == {
        (cell.way, cell.moment) for cell in found
    }


def test_with_vllm_the_generator_is_killed_and_stopped_at_every_moment_and_each_other_target_fails_once() -> None:
    done = {cell for cell in REAL if not cell.senseless}
    generators = {(cell.way, cell.moment) for cell in done if cell.target == "generator"}
    assert generators == {*itertools.product(("kill", "stop"), MOMENTS), ("garbage", "step")}
    assert {(cell.way, cell.moment) for cell in done if cell.target == "replica"} == {("kill", m) for m in MOMENTS}
    assert sorted(cell.target for cell in done if cell.target not in ("generator", "replica")) == [
        "agent",
        "client",
        "process",
        "tool",
        "zygote",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell("zygote", "kill", "step"),
        Cell("process", "garbage", "generating"),
        Cell("agent", "kill", "generating"),
        Cell("client", "kill", "generating"),
        Cell("tool", "stop", "checkpoint"),
        Cell("replica", "kill", "generating"),
    ],
    ids=str,
)
def test_a_cell(cell: Cell, tmp_path: Path) -> None:
    assert play(cell, tmp_path) == []


def test_each_group_is_compared_with_itself_in_the_clean_run() -> None:
    ours = [{"a": [1.0, 3.0], "b": [4.0], "late": [9.0]}, {"a": [1.0]}]
    clean = [{"a": [1.0], "b": [0.0, 0.0, 3.0]}, {"a": [0.0], "late": [9.0]}]
    found = difference(ours, clean)  # 1, 3 and 1
    assert str(found) == "+1.6667  95% [+0.3600, +2.9733] of 0.6667, 3 groups"


def test_a_missed_figure_of_faults_is_seen() -> None:
    groups = {"a": [1.0], "b": [2.0]}
    clean = Played(10.0, 0.0, 1.0, groups, groups)
    found = {"clean": [clean], "clean again": [clean]}
    good = {"retries=0": [replace(clean, rate=7.0)], "retries=2": [replace(clean, trained=0.96)]}
    other = {"a": [9.0], "b": [9.1]}
    assert report(found | good, Options())
    for bad in (
        good | {"retries=0": [replace(clean, rate=6.7)]},
        good | {"retries=2": [replace(clean, trained=0.94)]},
        good | {"retries=2": [replace(clean, trained=0.96, rewards=other)]},
        good | {"retries=2": [replace(clean, trained=0.96, lengths=other)]},
    ):
        assert not report(found | bad, Options())


def test_an_attempt_fails_by_chance_and_answers_sums_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANCE, "0.25")
    drawn = [Faulty() for _ in range(400)]
    assert {env.kind for env in drawn} == {*KINDS}
    assert all(env.moment != AT_RESET for env in drawn if env.kind == "hang")
    monkeypatch.setenv(CHANCE, "0.0")

    async def body() -> list[tuple[float, bool]]:
        env = Faulty(most=2, step_s=0.0)
        assert env.kind == ""
        await env.reset({}, 7)
        steps = [await env.step(Action(env.answer)) for _ in range(2)]
        other = Faulty(step_s=0.0)
        await other.reset({}, 7)
        await other.step(Action(str(int(other.answer) + 1)))
        steps.append(await other.step(Action("no")))
        return [(step.reward, step.terminated) for step in steps]

    assert asyncio.run(body()) == [(0.5, False), (0.5, True), (0.0, True)]
