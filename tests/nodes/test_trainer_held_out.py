"""A trainer's figures on held-out rows: of the last version too, wherever the run ends, and measured once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowrl.messages import Batch
from flowrl.nodes.batch_records import HeldOutFigures
from flowrl.runtime.telemetry.metrics import EVALUATIONS, Metrics, read_lines
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.testing import NodeRecord, NodeRig
from tests.nodes.test_trainer_pieces import OneProcessTrainer, batch_of, model_dir

__all__ = ["model_dir"]


def judged(path: Path, num_batches: int, *, steps: int | None = None, **settings: Any) -> NodeRecord:
    """The record of a trainer that is given that many batches, and one that is held out."""

    async def life() -> NodeRecord:
        node = OneProcessTrainer(path, **settings)
        async with NodeRig(node, max_staleness=2, steps=steps) as rig:
            rig.feed(node.held_out, batch_of(7))
            rig.feed(node.batches, *map(batch_of, range(num_batches)))
            return await rig.finished()

    return asyncio.run(life())


def told(record: NodeRecord) -> list[int]:
    """The steps whose lines have figures of their weights."""
    return [line["step"] for _, line, _ in record.events("step") if "held_out/loss" in line]


@pytest.mark.parametrize(
    ("judge_every", "in_lines", "at_end"), [(0, [], [3]), (2, [2], [3]), (3, [3], []), (1, [1, 2, 3], [])]
)
def test_the_last_version_is_measured_where_the_data_end(
    model_dir: Path, judge_every: int, in_lines: list[int], at_end: list[int]
) -> None:
    record = judged(model_dir, 3, judge_every=judge_every)
    assert told(record) == in_lines
    assert [version for version, _ in record.judged] == at_end


def test_the_figures_are_those_that_a_line_of_that_step_has(model_dir: Path) -> None:
    ((version, figures),) = judged(model_dir, 2).judged
    (*_, (_, line, _)) = judged(model_dir, 2, judge_every=2).events("step")
    assert version == line["step"] == 2
    assert figures and figures == {name: line[name] for name in line if name.startswith("held_out/")}


def test_with_steps_the_last_line_has_the_figures(model_dir: Path) -> None:
    record = judged(model_dir, 3, steps=3)
    assert (told(record), record.judged) == ([3], [])


def test_without_a_batch_nothing_is_measured(model_dir: Path) -> None:
    assert judged(model_dir, 0).judged == []


def test_a_version_is_measured_once() -> None:
    """By a line and by the checkpoint of the same step."""

    class OneBatch:
        live = True

        def __init__(self) -> None:
            self.left = [batch_of(0)]

        def __aiter__(self) -> OneBatch:
            return self

        async def __anext__(self) -> Batch:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop()

        def finish(self, batch: Batch) -> None: ...

    passes: list[Batch] = []

    def judge(batch: Batch) -> dict[str, Any]:
        passes.append(batch)
        return {"loss": float(len(passes))}

    held_out = HeldOutFigures()
    assert not held_out.lacks_report(1), "there is nothing to measure"
    asyncio.run(held_out.collect_batches(OneBatch()))  # type: ignore[arg-type]
    assert held_out.measure_figures(0, judge, "held_out_before") == {"held_out_before/loss": 1.0}
    assert held_out.measure_figures(1, judge) == held_out.measure_figures(1, judge) == {"held_out/loss": 2.0}
    assert held_out.lacks_report(1) and not held_out.lacks_report(0)
    assert held_out.report_figures(1, judge) == {"held_out/loss": 2.0}
    assert not held_out.lacks_report(1) and len(passes) == 2


def test_the_line_of_the_end_has_the_names_of_metrics(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, Statistics(), roles={})
    metrics.write_line({"step": 3})
    metrics.write_evaluation("end", 3, {"held_out/loss": 0.5})
    metrics.close()
    ((line),) = read_lines(tmp_path / EVALUATIONS)
    assert (line["step"], line["phase"], line["held_out/loss"]) == (3, "end", 0.5)
