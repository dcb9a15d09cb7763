"""Schedules, settings and objectives: wrong values are refused, right ones give the known numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.node import Saved
from flowrl.models import Policy
from flowrl.nodes.trainer import Trainer
from flowrl.training.batch_stats import BatchStats
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.token_objectives import SFTObjective
from flowrl.training.settings import Schedule, ZeroSettings
from tests.training.training_cases import CASES, make_batch


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [1, 1, 1, 1, 1, 1]),
        (Schedule(warmup_steps=2), [0.5, 1, 1, 1, 1, 1]),
        (Schedule("linear"), [1, 0.8, 0.6, 0.4, 0.2, 0]),
        (Schedule("linear", warmup_steps=1, floor=0.2), [1, 1, 0.8, 0.6, 0.4, 0.2]),
        (Schedule("cosine", warmup_steps=1), [1, 1, 0.8535534, 0.5, 0.1464466, 0]),
    ],
)
def test_learning_rate_of_six_steps(schedule: Schedule, expected: list[float]) -> None:
    assert [schedule.rate_factor(step, 6) for step in range(1, 7)] == pytest.approx(expected)


def test_a_decay_needs_the_number_of_steps() -> None:
    assert Schedule(warmup_steps=3).rate_factor(9, None) == 1.0
    with pytest.raises(ConfigError, match="--steps"):
        Schedule("cosine").rate_factor(1, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "dpo"}, "kind is 'dpo'; choose one of ppo"),
        ({"kl_estimator": "k1"}, "expected gradient of k1 is zero"),
        ({"old": "behavior"}, "set correction=None"),
        ({"kind": "cispo"}, "needs clip_high"),
        ({"aggregation": "constant", "length": 0}, "length is 0; it has to be 1 or more"),
        ({"dual_clip": 0.5}, "above 1"),
        ({"correction_range": (2.0, 1.0)}, "0 <= low < high"),
    ],
)
def test_objectives_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PolicyObjective(**options)


def test_the_constant_aggregation_without_a_length_is_a_problem_of_the_graph() -> None:
    (problem,) = PolicyObjective(aggregation="constant").problems()
    assert "needs length" in problem
    assert PolicyObjective(aggregation="constant", length=3).problems() == []


def test_a_kl_loss_without_reference_names_the_missing_node() -> None:
    from dataclasses import replace

    sample = replace(make_batch(0, CASES[0]).samples[0], ref_logprobs=None)
    with pytest.raises(FlowrlError, match=r"'0-0-0' has no reference logprobs.*connect a Reference node"):
        PolicyObjective(kl_coef=0.1).columns(sample)
    assert PolicyObjective().columns(sample)["ref_logprobs"] is None
    assert SFTObjective().columns(sample) == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stage": 4}, "choose 0, 1, 2 or 3"),
        ({"dtype": "float16"}, "choose one of float32, bfloat16"),
        ({"offload": "all", "stage": 2}, "needs ZeRO stage 3"),
        ({"dtype": "bfloat16", "stage": 0}, "fp32 master weights"),
        ({"clip_grad_norm": -1.0}, "a finite number of at least 0"),
        ({"betas": (-0.1, 0.999)}, r"^betas is \(-0.1, 0.999\); it has to lie between 0 and 1, 1 excluded$"),
        ({"ema_decay": 1.0}, "^ema_decay is 1.0; it has to lie between 0 and 1, 1 excluded$"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ZeroSettings(**options)


def test_one_rank_shards_no_parameters_unless_they_are_offloaded() -> None:
    assert ZeroSettings().effective_stage(1) == 2
    assert ZeroSettings().effective_stage(2) == 3
    assert ZeroSettings(offload="all").effective_stage(1) == 3
    assert ZeroSettings(stage=1).effective_stage(1) == 1


def test_the_trainer_names_its_wrong_settings() -> None:
    trainer = Trainer(Policy("tiny"), lr=-1.0, epochs=0, publish_every=0, temperature=0.0)
    assert [problem.split(" is ")[0] for problem in trainer.check(None)] == [
        "epochs",
        "publish_every",
        "lr",
        "temperature",
    ]


def test_tallies_of_parts_add_up_to_the_whole() -> None:
    samples = make_batch(3, CASES[0]).samples
    masks = [s.policy_mask & (np.arange(len(s.policy_mask)) % 2 == 0) for s in samples]
    whole = BatchStats.collect_stats(samples, masks, 3)
    parts = [BatchStats.collect_stats(samples[i::2], masks[i::2], 3) for i in range(2)]
    assert BatchStats.add_up(parts).make_metrics() == pytest.approx(whole.make_metrics())
    assert BatchStats.add_up(parts).lengths == whole.lengths and whole.lengths.total() > 1
    trained = np.concatenate([s.versions[m] for s, m in zip(samples, masks, strict=True)])
    assert whole.make_metrics()["staleness_mean"] == pytest.approx((3 - trained).mean())
    assert whole.make_metrics()["tokens_trained"] == trained.size
    assert BatchStats().make_metrics()["staleness_max"] is None
    assert set(whole.make_metrics(offline=True)) == {"num_samples", "response_tokens_mean", "tokens_trained"}


def test_a_part_of_the_reward_is_a_mean_over_the_samples_that_have_it() -> None:
    samples = make_batch(3, CASES[0]).samples[:3]
    with_parts = [
        replace(one, reward_parts={"exact": float(n)} | ({"step_1": 0.8} if n == 2 else {}))
        for n, one in enumerate(samples)
    ]
    parts = [BatchStats.collect_stats([one], [one.policy_mask], 3) for one in with_parts]
    metrics = BatchStats.add_up(parts).make_metrics()
    assert (metrics["reward/exact"], metrics["reward/step_1"]) == (pytest.approx(1.0), pytest.approx(0.8))


@pytest.mark.parametrize(
    ("files", "zero", "ranks", "text"),
    [
        (["r0_optim_states.pt", "r1_optim_states.pt"], ZeroSettings(), 2, ""),
        (
            ["r0_optim_states.pt", "r1_optim_states.pt"],
            ZeroSettings(),
            3,
            "written by 2 trainer ranks, but this run has 3",
        ),
        (["r0_optim_states.pt"], ZeroSettings(stage=0), 4, ""),
        (["r0_optim_states.pt"], ZeroSettings(offload="all", nvme_path="/tmp"), 1, "written without nvme_path"),
        (["on_disk_rank_0"], ZeroSettings(), 1, "written with nvme_path"),
    ],
)
def test_a_trainer_that_cannot_take_up_a_checkpoint_says_so_before_it_starts(
    tmp_path: Path, files: list[str], zero: ZeroSettings, ranks: int, text: str
) -> None:
    trainer = Trainer(Policy("tiny"), zero=zero)
    trainer.name = "actor"
    (tmp_path / "actor_state" / "zero").mkdir(parents=True)
    for name in files:
        (tmp_path / "actor_state" / "zero" / name).touch()
    problems = trainer.check_resume(Saved(tmp_path, ranks, 0, {}))
    assert len(problems) == bool(text) and text in "".join(problems)
