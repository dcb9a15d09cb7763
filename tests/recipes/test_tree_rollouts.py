"""GRPO on trees: what each segment is compared with, and that every sampled token is trained once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from flowrl import Scored
from flowrl.options import AnswerSteps, EvaluationOptions, SamplingOptions
from flowrl.recipes.tree_rollouts import segment_advantages
from flowrl.testing import run_graph, scored

SMALL = {
    "sampling": SamplingOptions(group_size=2, max_tokens=8),
    "steps": AnswerSteps(groups_per_step=2),
    "evaluation": EvaluationOptions(evaluate=0),
    "branches": 2,
}


def made(member: int, reward: float, tokens: int, parent: str = "", cut: int = 4) -> Scored:
    sample = scored(member, reward, response=tokens, group_size=2)
    at = cut if parent else sample.prompt_tokens
    return replace(sample, parent_id=parent, prompt_tokens=at, policy_mask=np.arange(len(sample.token_ids)) >= at)


def test_a_segment_is_compared_with_the_value_of_where_it_begins() -> None:
    trunk, other = made(0, 1.0, 6), made(1, 0.0, 3)
    begin = trunk.prompt_tokens
    cut = begin + 2
    branches = [made(2 + i, reward, 6, "g:0", cut) for i, reward in enumerate((0.0, 0.0))]
    found = list(segment_advantages([trunk, other, *branches]))
    root, value = 0.5, 1 / 3
    assert found[0].advantages[begin:].tolist() == pytest.approx([value - root] * 2 + [1.0 - value] * 4)
    assert found[1].advantages[begin:].tolist() == [0.0 - root] * 3, "a trunk without branches is one segment"
    assert [one.advantages[cut:].tolist() for one in found[2:]] == [pytest.approx([-value] * 4)] * 2
    assert not any(one.advantages[: one.prompt_tokens].any() for one in found)


@pytest.mark.slow
def test_a_run_trains_each_sampled_token_once_and_is_resumed_in_the_middle(tmp_path: Path) -> None:
    run = partial(run_graph, "tree_rollouts", tmp_path / "run", SMALL, stand_ins=True, preflight=False, save_every=1)
    run(steps=2)
    ran = run(steps=4, resume=True)
    report = ran.audit()
    assert report.ok, str(report)
    assert ran.rows("SELECT COUNT(*) FROM derived")[0][0] > 0
    fed = ran.rows("SELECT SUM(tokens) FROM spans")[0][0]
    assert fed == report.figures["  trained"], "no token is in two samples"
