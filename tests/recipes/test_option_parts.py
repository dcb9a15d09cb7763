"""Parts of a configuration: what graphs compose of them, how their options are named, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowrl import Cluster, Graph, Machine, check
from flowrl.errors import ConfigError
from flowrl.graph.command_line import parse_options
from flowrl.graph.load import dump_options, load_file, restore_options
from flowrl.graph.option_types import (
    changed_config,
    compose_config,
    fill_config,
    has_option,
    named,
    options_of,
    value_of,
)
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, Evaluation, Generator, PromptSource, Sampling
from flowrl.options import (
    ConfigPart,
    EpochOptions,
    EvaluationOptions,
    GeneratorOptions,
    GraphConfig,
    OnlineConfig,
    PlacementOptions,
    PreferenceData,
    SamplingOptions,
    Size,
    StepOptions,
    TimedReward,
    TrainerOptions,
    TrainerSize,
    add_offline_evaluation,
    find_unused,
    make_batcher,
    make_generator,
    make_trainer,
    too_low,
)
from flowrl.tasks import Task
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.token_objectives import SFTObjective

GRAPHS = Path(__file__).parents[2] / "graphs"
CLUSTER = Cluster((Machine(cores=(0, 1)),))

OUT_OF_RANGE: list[tuple[type[ConfigPart], str, Any, str]] = [
    (PlacementOptions, "time_share", ("generator",), "--time-share names only generator"),
    (SamplingOptions, "max_tokens", 0, "--max-tokens is 0; it has to be 1 or more"),
    (SamplingOptions, "group_size", 0, "--group-size is 0; it has to be 1 or more"),
    (SamplingOptions, "temperature", 0, "--temperature is 0; it has to be above 0"),
    (SamplingOptions, "temperature", float("nan"), "--temperature is nan"),
    (TrainerOptions, "lr", -1, "--lr is -1; it has to be a finite number of at least 0"),
    (TrainerOptions, "lr", float("inf"), "--lr is inf"),
    (TrainerOptions, "token_budget", 0, "--token-budget is 0; it has to be 1 or more"),
    (EvaluationOptions, "evaluate", -1, "--evaluate is -1; it has to be 0 or more"),
    (EvaluationOptions, "evaluate_samples", 0, "--evaluate-samples is 0; it has to be 1 or more"),
    (EvaluationOptions, "evaluate_every", -1, "--evaluate-every is -1; it has to be 0 or more"),
    (StepOptions, "staleness", -1, "--staleness is -1; it has to be 0 or more"),
    (StepOptions, "look_ahead", 0, "--look-ahead is 0; it has to be 1 or more"),
    (StepOptions, "groups_per_step", 0, "--groups-per-step is 0; it has to be 1 or more"),
    (StepOptions, "optimizer_steps", 0, "--optimizer-steps is 0; it has to be 1 or more"),
    (StepOptions, "epochs", 0, "--epochs is 0; it has to be 1 or more"),
    (EpochOptions, "batch", 0, "--batch is 0; it has to be 1 or more"),
    (EpochOptions, "epochs", 0, "--epochs is 0; it has to be 1 or more"),
    (PreferenceData, "max_length", 1, "--max-length is 1; it has to be 2 or more"),
    (PreferenceData, "held_out", -1, "--held-out is -1; it has to be 0 or more"),
    (PreferenceData, "judge_every", -1, "--judge-every is -1; it has to be 0 or more"),
]


@pytest.mark.parametrize(("kind", "name", "value", "words"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_option(
    kind: type[ConfigPart], name: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        kind(**{name: value})
    assert str(error.value).startswith(words)


@dataclass(frozen=True)
class Bonus(ConfigPart):
    """A part of a user's own."""

    amount: int = named("bonus", 1)
    """How much."""
    share: float = 0.5

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, share=0)

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if self.amount > cfg.get_part(SamplingOptions).max_tokens:
            yield f"--bonus is {self.amount}, more than --max-tokens"
        if not self.amount:
            yield from find_unused(cfg, ("share",), "there is no --bonus; leave this out")


@dataclass(frozen=True)
class Mine(OnlineConfig):
    help_texts = {"lr": "Mine.", "generator": "Those of mine."}

    trainer: TrainerOptions = TrainerOptions(lr=0.5)
    bonus: Bonus = Bonus(share=0.25)
    own: int = 1

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, own=0)


def mine(**options: Any) -> Any:
    return compose_config(Mine, options)


def test_a_graph_adds_parts_options_and_ranges_of_its_own() -> None:
    with pytest.raises(ConfigError, match="--own is -1; it has to be 0 or more"):
        Mine(own=-1)
    with pytest.raises(ConfigError, match="--share is -1"):
        mine(share=-1)
    with pytest.raises(ConfigError, match="--group-size is 0"):
        mine(group_size=0)
    with pytest.raises(ConfigError, match="--max-tokens is 1; it has to be 2 or more"):
        load_file(GRAPHS / "sft.py").parse(["--max-tokens", "1"])
    with pytest.raises(ConfigError, match="--held-out is 0; it has to be 1 or more"):
        load_file(GRAPHS / "reward_model.py").parse(["--held-out", "0"])


@pytest.mark.parametrize(("role", "words"), [("generator", "replicas is 0; it has to be 1"), ("trainer", "gpus is -1")])
def test_a_size_out_of_range_is_refused_by_the_name_of_its_role(role: str, words: str) -> None:
    size = Size(0) if role == "generator" else TrainerSize(gpus=-1)
    with pytest.raises(ConfigError, match=f"^--{role}.{words}"):
        mine(**{role: size})


def test_a_part_is_checked_within_its_configuration() -> None:
    assert Bonus(amount=33).amount == 33, "by itself it is in range"
    with pytest.raises(ConfigError, match="--bonus is 33, more than --max-tokens"):
        mine(bonus=33)
    assert mine(bonus=33, max_tokens=40).bonus.amount == 33
    assert mine(bonus=0).bonus.share == 0.25, "the default of the configuration, not that of the part"
    with pytest.raises(ConfigError, match="--share: there is no --bonus"):
        mine(bonus=0, share=0.5)


def test_options_stand_without_the_name_of_their_part(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(Mine)
    places = {name: ".".join(options[name].path) for name in ("lr", "bonus", "share", "own", "generator", "policy")}
    assert places == {
        "lr": "trainer.lr",
        "bonus": "bonus.amount",
        "share": "bonus.share",
        "own": "own",
        "generator": "generator.size",
        "policy": "policy.name",
    }
    cfg = parse_options(Mine, ["--bonus", "3", "--lr=1", "--generator.replicas", "2", "--policy", "x"], prog="p")
    found = (cfg.bonus, cfg.trainer.lr, cfg.generator.size.replicas, cfg.policy.name)
    assert found == (Bonus(3, 0.25), 1.0, 2, "x")
    assert {"bonus": 3, "share": 0.25, "lr": 1.0}.items() <= dump_options(cfg).items() and not {"steps", "data"} & {
        *dump_options(cfg)
    }
    with pytest.raises(ConfigError, match="--share is 'x'; it needs a number"):
        parse_options(Mine, ["--share", "x"], prog="p")
    with pytest.raises(SystemExit):
        parse_options(Mine, ["--help-all"], prog="p")
    text = " ".join(capsys.readouterr().out.split())
    assert "bonus: A part of a user's own. --bonus <integer> How much. (default: 1)" in text
    assert "--lr <number> Mine. (default: 0.5)" in text


def test_values_are_read_and_changed_by_the_names_of_options() -> None:
    cfg = changed_config(mine(), {"bonus": 2, "generator.replicas": 3, "zero.stage": 1, "task.name": "a.jsonl"})
    names = ("bonus", "generator.replicas", "zero.stage", "task")
    assert [value_of(cfg, name) for name in names] == [2, 3, 1, Task("a.jsonl")]
    assert cfg.trainer.lr == 0.5 and cfg.bonus.share == 0.25
    assert has_option(cfg, "zero.stage") and not has_option(cfg, "trainer.lr") and not has_option(cfg, "steps")
    filled_with = fill_config(Mine, {"bonus": -7, "lora.rank": 8})
    assert (filled_with.bonus.amount, filled_with.bonus.share, filled_with.trainer.lora.rank) == (-7, 0.25, 8)


def test_two_parts_cannot_have_one_option() -> None:
    told = r"twice, as trainer\.lr and lr; for another default, write trainer: TrainerOptions = TrainerOptions\(lr="
    with pytest.raises(ConfigError, match=told):
        options_of(dataclass(frozen=True)(type("Twice", (Mine,), {"__annotations__": {"lr": float}, "lr": 1.0})))


def test_a_help_text_of_no_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Told\.help_texts has bonsu, and there is no such option"):
        options_of(dataclass(frozen=True)(type("Told", (Mine,), {"help_texts": {"bonsu": "How much."}})))


def test_a_part_that_is_missing_is_told() -> None:
    assert GraphConfig().find_part(TrainerOptions) is None
    with pytest.raises(ConfigError, match="GraphConfig has no TrainerOptions; give it a field, as in: part: "):
        GraphConfig().get_part(TrainerOptions)


@pytest.mark.parametrize("name", ["model", "place", "problems"])
def test_an_option_cannot_take_the_name_of_a_method(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the option {name} of Shadowing has the name of a method that it inherits"):
        type("Shadowing", (OnlineConfig,), {"__annotations__": {name: str}, name: ""})


def test_the_nodes_that_parts_make_have_their_options() -> None:
    cfg = mine(max_tokens=7, temperature=0.5, epochs=3, token_budget=64, groups_per_step=2, optimizer_steps=2)
    trainer = make_trainer(cfg, PolicyObjective(), start_after=4)
    assert (trainer.lr, trainer.temperature, trainer.epochs, trainer.start_after) == (0.5, 0.5, 3, 4)
    batcher = make_batcher(cfg, whiten="full")
    assert (batcher.num_groups, batcher.token_budget, batcher.optimizer_steps, batcher.whiten) == (2, 64, 2, "full")
    generator = make_generator(cfg)
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
    assert restore_options(file, dump_options(cfg)) == cfg


# Evaluation of graphs without a generator


@dataclass(frozen=True)
class Copied(GraphConfig):
    """Options of a user's graph that imitates answers."""

    trainer: TrainerOptions = TrainerOptions()
    epochs: EpochOptions = EpochOptions()
    generator: GeneratorOptions = GeneratorOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    reward: TimedReward = TimedReward()


def imitation(cfg: Copied) -> Graph:
    g = Graph("imitation")
    prompts = g.add("prompts", PromptSource(cfg.data.task, cfg.model))
    dataset = g.add("dataset", Demonstrations(cfg.data.task, cfg.model))
    batcher = g.add("batcher", cfg.epochs.build(cfg.trainer, cfg.model))
    trainer = g.add("trainer", cfg.trainer.build(cfg.model, SFTObjective()))
    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    add_offline_evaluation(g, cfg, trainer=trainer, prompts=prompts, sampling=Sampling(max_tokens=9))
    return g


def test_an_offline_graph_gets_a_generator_for_its_evaluation() -> None:
    g = imitation(Copied(evaluation=EvaluationOptions(5, 2, evaluate_also=("arithmetic:max_value=9",))))
    assert check(g, CLUSTER).problems == ()
    evaluation, generator = g.nodes["evaluation"], g.nodes["generator"]
    assert isinstance(evaluation, Evaluation) and isinstance(generator, Generator)
    assert (evaluation.num_prompts, evaluation.num_samples, len(evaluation.tasks)) == (5, 2, 2)
    assert generator.evaluation == Sampling(max_tokens=9), "several answers are sampled"
    assert evaluation.concurrency == generator.engine.concurrency
    assert check(g, CLUSTER).plan.numbers.max_staleness == 1


def test_without_evaluation_an_offline_graph_has_neither_generator_nor_tickets() -> None:
    g = imitation(Copied(evaluation=EvaluationOptions(evaluate=0)))
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
