"""Mistakes of `together` and `time_share`, and what is said of the resources beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flowrl import Cluster, Machine
from flowrl.graph.analysis.check import check
from tests.graph.graph_nodes import MACHINE, Trainer, grpo


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (
            lambda p: p.graph.time_share(p.generator, Trainer()),
            "g.time_share got a Trainer, which is not in",
        ),
        (lambda p: p.graph.together(p.generator, "trainer"), "g.together got 'trainer', which is not in this graph"),
        (lambda p: p.graph.together(p.generator, p.trainer), "g.together needs the same number of replicas"),
        (lambda p: p.graph.time_share(p.generator, p.reward), "g.time_share names reward, which needs no cpus"),
    ],
)
def test_mistakes_of_sharing_are_no_lack_of_resources(share: Callable[[Any], None], told: str) -> None:
    """The graph would fit if the nodes that were meant shared their cores."""
    parts = grpo(num_generators=8)
    share(parts)
    report = check(parts.graph, MACHINE)
    (problem,) = report.problems
    assert told in problem
    assert not report.too_large


def test_weights_without_a_transport_are_no_lack_of_resources() -> None:
    parts = grpo()
    parts.graph.placed["generator"] = replace(parts.graph.placed["generator"], gpus=1)
    report = check(parts.graph, Cluster((Machine((0, 1, 2, 3), gpus=1),)))
    assert len(report.problems) == 1 and not report.too_large
