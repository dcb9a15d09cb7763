"""Blocks of options: what graphs inherit from them, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowrl import Cluster, Graph, Machine, check
from flowrl.blocks import (
    DatasetOptions,
    EvaluationOptions,
    OnlineOptions,
    PolicyOptions,
    PreferenceOptions,
    SamplingOptions,
    TrainerOptions,
    evaluate_offline,
    too_low,
)
from flowrl.errors import ConfigError
from flowrl.graph.load import dump, load_file, restore
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, Evaluation, Generator, PromptSource, Sampling, TokenBatch
from flowrl.role_options import Size
from flowrl.tasks import Task
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.token_objectives import SFTObjective

GRAPHS = Path(__file__).parents[2] / "graphs"
CLUSTER = Cluster((Machine(cores=(0, 1)),))

OUT_OF_RANGE: list[tuple[type[PolicyOptions], str, Any, str]] = [
    (PolicyOptions, "time_share", ("generator",), "--time-share names only generator"),
    (SamplingOptions, "max_tokens", 0, "--max-tokens is 0; it has to be 1 or more"),
    (SamplingOptions, "group_size", 0, "--group-size is 0; it has to be 1 or more"),
    (SamplingOptions, "generator", Size(0), "--generator.replicas is 0; it has to be 1 or more"),
    (SamplingOptions, "temperature", 0, "--temperature is 0; it has to be above 0"),
    (SamplingOptions, "temperature", float("nan"), "--temperature is nan"),
    (TrainerOptions, "lr", -1, "--lr is -1; it has to be a finite number of at least 0"),
    (TrainerOptions, "lr", float("inf"), "--lr is inf"),
    (TrainerOptions, "trainer", Size(gpus=-1), "--trainer.gpus is -1; it has to be 0 or more"),
    (TrainerOptions, "token_budget", 0, "--token-budget is 0; it has to be 1 or more"),
    (EvaluationOptions, "evaluate", -1, "--evaluate is -1; it has to be 0 or more"),
    (EvaluationOptions, "evaluate_samples", 0, "--evaluate-samples is 0; it has to be 1 or more"),
    (EvaluationOptions, "evaluate_every", -1, "--evaluate-every is -1; it has to be 0 or more"),
    (OnlineOptions, "staleness", -1, "--staleness is -1; it has to be 0 or more"),
    (OnlineOptions, "look_ahead", 0, "--look-ahead is 0; it has to be 1 or more"),
    (OnlineOptions, "groups_per_step", 0, "--groups-per-step is 0; it has to be 1 or more"),
    (OnlineOptions, "optimizer_steps", 0, "--optimizer-steps is 0; it has to be 1 or more"),
    (OnlineOptions, "epochs", 0, "--epochs is 0; it has to be 1 or more"),
    (DatasetOptions, "batch", 0, "--batch is 0; it has to be 1 or more"),
    (DatasetOptions, "epochs", 0, "--epochs is 0; it has to be 1 or more"),
    (PreferenceOptions, "max_length", 1, "--max-length is 1; it has to be 2 or more"),
    (PreferenceOptions, "held_out", -1, "--held-out is -1; it has to be 0 or more"),
    (PreferenceOptions, "judge_every", -1, "--judge-every is -1; it has to be 0 or more"),
]


@pytest.mark.parametrize(("block", "name", "value", "words"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_option(
    block: type[PolicyOptions], name: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        block(**{name: value})
    assert str(error.value).startswith(words)


@dataclass(frozen=True)
class Mine(OnlineOptions):
    lr: float = 0.5
    bonus: int = 1

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, bonus=0)


def test_a_graph_adds_options_and_ranges_of_its_own() -> None:
    with pytest.raises(ConfigError, match="--bonus is -1; it has to be 0 or more"):
        Mine(bonus=-1)
    with pytest.raises(ConfigError, match="--group-size is 0"):
        Mine(group_size=0)
    with pytest.raises(ConfigError, match="--max-tokens is 1; it has to be 2 or more"):
        load_file(GRAPHS / "sft.py").parse(["--max-tokens", "1"])
    with pytest.raises(ConfigError, match="--held-out is 0; it has to be 1 or more"):
        load_file(GRAPHS / "reward_model.py").parse(["--held-out", "0"])


@pytest.mark.parametrize("name", ["model", "make_trainer", "problems"])
def test_an_option_cannot_take_the_name_of_what_a_block_makes(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the option {name} of Shadowing has the name of a block's method"):
        type("Shadowing", (OnlineOptions,), {"__annotations__": {name: str}, name: ""})


def test_the_nodes_that_blocks_make_have_their_options() -> None:
    cfg = Mine(max_tokens=7, temperature=0.5, epochs=3, token_budget=64, groups_per_step=2, optimizer_steps=2)
    trainer = cfg.make_trainer(PolicyObjective(), start_after=4)
    assert (trainer.lr, trainer.temperature, trainer.epochs, trainer.start_after) == (0.5, 0.5, 3, 4)
    batcher = cfg.batcher(whiten="full")
    assert (batcher.num_groups, batcher.token_budget, batcher.optimizer_steps, batcher.whiten) == (2, 64, 2, "full")
    generator = cfg.make_generator(cfg.sampling)
    assert generator.sampling == Sampling(temperature=0.5, max_tokens=7)
    assert {node.policy for node in (trainer, generator)} == {Policy("tiny", task=Task("arithmetic"))}


def test_another_default_keeps_the_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_file(GRAPHS / "kto.py").parse(["--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Held-out rows on which accuracy and changes of logprobs are measured; 0: none. (default: 512)" in text


@pytest.mark.parametrize("name", ["kto", "ppo", "sft"])
def test_inherited_options_reach_other_processes(name: str) -> None:
    file = load_file(GRAPHS / f"{name}.py")
    cfg = file.parse(
        ["--evaluate", "8", "--lora.rank", "4", "--evaluate-also", "arithmetic:max_value=9", "--evaluate-every", "3"]
    )
    assert restore(file, dump(cfg)) == cfg


# Evaluation of graphs without a generator


@dataclass(frozen=True)
class Copied(EvaluationOptions, DatasetOptions):
    """Options of a user's graph that imitates answers."""


def imitation(cfg: Copied) -> Graph:
    g = Graph("imitation")
    prompts = g.add("prompts", PromptSource(cfg.task, cfg.model))
    dataset = g.add("dataset", Demonstrations(cfg.task, cfg.model))
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget))
    trainer = g.add("trainer", cfg.make_trainer(SFTObjective()))
    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    evaluate_offline(g, cfg, trainer=trainer, prompts=prompts, sampling=Sampling(max_tokens=9))
    return g


def test_an_offline_graph_gets_a_generator_for_its_evaluation() -> None:
    g = imitation(Copied(evaluate=5, evaluate_samples=2, evaluate_also=("arithmetic:max_value=9",)))
    assert check(g, CLUSTER).problems == ()
    evaluation, generator = g.nodes["evaluation"], g.nodes["generator"]
    assert isinstance(evaluation, Evaluation) and isinstance(generator, Generator)
    assert (evaluation.num_prompts, evaluation.num_samples, len(evaluation.tasks)) == (5, 2, 2)
    assert generator.evaluation == Sampling(max_tokens=9), "several answers are sampled"
    assert evaluation.concurrency == generator.engine.concurrency
    assert check(g, CLUSTER).plan.numbers.max_staleness == 1


def test_without_evaluation_an_offline_graph_has_neither_generator_nor_tickets() -> None:
    g = imitation(Copied(evaluate=0))
    assert check(g, CLUSTER).problems == ()
    assert set(g.nodes) == {"prompts", "dataset", "batcher", "trainer"}
    assert g.admission is None


def test_sft_answers_in_its_own_length_and_from_the_weights_it_trains() -> None:
    file = load_file(GRAPHS / "sft.py")
    g = file.build(file.parse(["--evaluate", "8", "--max-tokens", "64", "--answer-tokens", "5"]))
    assert check(g, CLUSTER).problems == ()
    generator, dataset = g.nodes["generator"], g.nodes["dataset"]
    assert isinstance(generator, Generator) and isinstance(dataset, Demonstrations)
    assert (generator.sampling.max_tokens, dataset.max_tokens) == (5, 64)
    assert generator.policy == dataset.policy == Policy("tiny"), "no warm start on the task"


@pytest.mark.parametrize("name", ["grpo", "ppo", "evaluate", "agent_tools", "agent_openai", "self_play"])
def test_an_evaluation_asks_as_many_answers_as_the_generators_have_places(name: str) -> None:
    file = load_file(GRAPHS / f"{name}.py")
    options = ["--generator.replicas", "3", "--engine.concurrency", "40"]
    evaluation = file.build(file.parse(options)).nodes["evaluation"]
    assert isinstance(evaluation, Evaluation) and evaluation.concurrency == 120
