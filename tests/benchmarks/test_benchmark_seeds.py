"""The command that runs jobs seed by seed: its commands, and what it says of finished runs."""

from __future__ import annotations

import pytest

from benchmarks.training.gain import Gain
from benchmarks.training.seeds import JOBS, Learnt, command, table
from flowrl.commands.prepare import prepare_graph
from flowrl.commands.run_graph import RunFileOptions
from flowrl.runtime.driver.job import RunOptions


@pytest.mark.parametrize("job", JOBS)
def test_every_job_is_a_command_that_flowrl_takes(job: str) -> None:
    name, *arguments = command(job, 3)
    prepared = prepare_graph(name, (RunOptions, RunFileOptions), arguments)
    assert prepared.own[0].seed == 3
    assert prepared.cfg.evaluation.evaluate > 0


def test_options_of_the_caller_replace_those_of_the_job() -> None:
    assert command("agent_tools", 1, ["--steps", "5", "--lr=1e-4"]) == (
        ["run", "agent_tools", "--evaluate", "512", "--steps", "5", "--lr=1e-4", "--seed", "1"]
    )


def learnt(seed: int, gained: float, **fields: object) -> Learnt:
    found = Gain(prompts=4, before=0.25, after=0.25 + gained, error=0.05)
    settings: dict[str, object] = {"curve": ((0, 0.25), (9, 0.25 + gained)), "minutes": 2.0, "audit": True}
    return Learnt("chat", seed, gain=found, staleness_max=1, **{**settings, **fields})  # type: ignore[arg-type]


def test_a_run_is_good_if_its_audit_is_and_its_interval_is_above_zero() -> None:
    assert learnt(0, 0.2).good
    assert learnt(0, 0.2, audit=None).good
    assert not learnt(0, 0.2, audit=False).good
    assert not learnt(0, 0.09).good


def test_the_table_has_every_seed_and_their_spread() -> None:
    lines = table([learnt(0, 0.2), learnt(1, 0.4, curve=((0, 0.25), (3, 0.5)), audit=None)]).splitlines()
    assert lines[2:4] == [
        "| 0 | 0.250 | – | 0.450 | +0.200 [+0.102, +0.298] | 2.0 | ok |",
        "| 1 | 0.250 | 0.500 | – | +0.400 [+0.302, +0.498] | 2.0 | – |",
    ]
    assert lines[-1] == "Mean gain +0.300 (+0.200 to +0.400) of 2 seeds."
