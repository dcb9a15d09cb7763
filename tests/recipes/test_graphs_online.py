"""The graphs that learn from their own samples: the same options everywhere, and each one's own as declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.analysis.check import check
from flowrl.graph.graph import Graph
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB, Cluster, Machine
from flowrl.graph.node import Node
from flowrl.graph.option_types import options_of
from flowrl.nodes import Generator, GroupAdvantage, PairMaker, Reward, RewardModel, TokenBatch, Trainer
from flowrl.training.loss.policy_kinds import KINDS

GRAPHS = Path(__file__).parents[2] / "graphs"
ONLINE = ("grpo", "reinforce_pp", "rloo", "dapo", "raft", "iterative_dpo")
EVERY_ONLINE = (*ONLINE, "distill", "ppo", "custom_node", "tree_rollouts")
SHARED = (
    "policy",
    "trust_remote_code",
    "chat_template",
    "chat_template_kwargs",
    "tokenizer",
    "task",
    "max_prompt_tokens",
    "too_long",
    "num_prompts",
    "time_share",
    "generator",
    "engine",
    "stop_strings",
    "max_tokens",
    "temperature",
    "group_size",
    "reward_timeout_s",
    "staleness",
    "on_limit",
    "look_ahead",
    "groups_per_step",
    "optimizer_steps",
    "epochs",
    "overlong_filter",
    "lr",
    "trainer",
    "dtype",
    "token_budget",
    "lora",
    "zero",
    "schedule",
    "router_aux_loss_coef",
    "accumulate",
    "evaluate",
    "evaluate_samples",
    "evaluate_every",
    "evaluate_also",
    "evaluate_task",
    "evaluate_max_prompt_tokens",
    "probe_tolerance",
)
TRAINED = (*EVERY_ONLINE, "sft", "dpo", "kto", "reward_model")
EVALUATED = (*EVERY_ONLINE, "sft", "dpo", "kto")
CLUSTER = Cluster((Machine(cores=(0, 1, 2, 3), memory_bytes=16 * GB),))
N = TypeVar("N", bound=Node)


def graph(name: str, *options: str) -> Graph:
    file = load_file(GRAPHS / f"{name}.py")
    return file.build(file.parse(options))


def node(of: Graph, kind: type[N]) -> N:
    (found,) = [node for node in of.nodes.values() if isinstance(node, kind)]
    return found


def node_options(name: str, *options: str) -> dict[str, Any]:
    """The values of a graph's options, those of its parts, too."""
    cfg = load_file(GRAPHS / f"{name}.py").parse(options)
    return {one.name: one.value_in(cfg) for one in options_of(type(cfg)).values()}


def problems(name: str, options: str) -> list[str]:
    return list(check(graph(name, *options.split()), CLUSTER).problems)


@pytest.mark.parametrize("name", [path.stem for path in sorted(GRAPHS.glob("*.py"))])
def test_every_graph_passes_the_check_with_and_without_evaluation(name: str) -> None:
    settings = ("", "--evaluate 0", "--evaluate 7 --evaluate-samples 4 --evaluate-every 2")
    for options in settings if name in EVALUATED else settings[:1]:
        made = graph(name, *options.split())
        assert check(made, CLUSTER).problems == (), options
        wanted = name == "evaluate" or node_options(name, *options.split()).get("evaluate", 0) > 0
        assert ("evaluation" in made.nodes) == wanted


@pytest.mark.parametrize("name", EVERY_ONLINE)
def test_the_shared_options_stand_first_and_in_one_order(name: str) -> None:
    options = options_of(load_file(GRAPHS / f"{name}.py").config_type)
    assert tuple(one for one in options if one in SHARED) == SHARED and "negate_rewards" in options
    own = [name for name, one in options.items() if len(one.path) == 1]
    assert [*options][len(options) - len(own) :] == own, "after those of all parts"


@pytest.mark.parametrize("name", TRAINED)
def test_a_trainers_settings_are_options_of_its_graph(name: str) -> None:
    options = "--lora.rank 8 --zero.stage 2 --zero.optimizer muon --schedule.warmup-steps 3 --dtype bfloat16"
    made = graph(name, *options.split())
    assert check(made, CLUSTER).ok
    trainer, *others = [node for node in made.nodes.values() if isinstance(node, Trainer)]
    assert (trainer.lora.rank, trainer.schedule.warmup_steps) == (8, 3)
    assert (trainer.zero.stage, trainer.zero.optimizer, trainer.zero.dtype) == (2, "muon", "bfloat16")
    for generator in (node for node in made.nodes.values() if isinstance(node, Generator)):
        assert generator.facts().adapter_rank == 8
    for critic in others:
        assert (critic.lora.rank, critic.zero.stage, critic.zero.dtype) == (0, 3, "bfloat16")
    with pytest.raises(ConfigError, match="set only dtype"):
        graph(name, "--zero.dtype", "bfloat16")


@pytest.mark.parametrize("name", ONLINE)
def test_the_shared_options_mean_the_same(name: str) -> None:
    options = "--lr 0.5 --max-tokens 7 --temperature 0.5 --group-size 3 --groups-per-step 5 --negate-rewards"
    made = graph(name, *options.split(), "--staleness", "2", "--token-budget", "2048", "--evaluate-samples", "4")
    assert check(made, CLUSTER).ok
    generator, trainer, batcher = node(made, Generator), node(made, Trainer), node(made, TokenBatch)
    assert (generator.sampling.max_tokens, generator.sampling.temperature) == (7, 0.5)
    assert generator.evaluation == generator.sampling, "several answers are sampled"
    assert (trainer.lr, trainer.temperature) == (0.5, 0.5)
    assert (batcher.num_groups, batcher.token_budget) == (5, 2048)
    assert node(made, Reward).shaping.negate
    assert check(made, CLUSTER).plan.numbers.max_staleness == 2


@pytest.mark.parametrize("name", EVERY_ONLINE)
def test_batches_and_admission_have_the_same_options_everywhere(name: str) -> None:
    options = "--optimizer-steps 3 --epochs 2 --staleness 2 --look-ahead 4 --generator.replicas 2"
    made = graph(name, *options.split())
    assert check(made, CLUSTER).problems == ()
    assert node(made, TokenBatch).optimizer_steps == 3
    assert {trainer.epochs for trainer in made.nodes.values() if isinstance(trainer, Trainer)} == {2}
    assert made.admission is not None
    assert (made.admission.staleness, made.admission.on_limit, made.admission.look_ahead) == (2, "wait", 4)
    assert made.placed["generator"].replicas == 2


@pytest.mark.parametrize("name", sorted({*EVERY_ONLINE} - {"iterative_dpo"}))
def test_tokens_beyond_the_limit_can_be_masked(name: str) -> None:
    made = graph(name, "--on-limit", "mask", "--staleness", "1")
    assert check(made, CLUSTER).problems == ()
    assert made.admission is not None and made.admission.on_limit == "mask"


def test_half_a_pair_is_not_masked() -> None:
    with pytest.raises(ConfigError, match="--on-limit is 'mask', which can mask one answer of a pair"):
        graph("iterative_dpo", "--on-limit", "mask")


@pytest.mark.parametrize("name", ONLINE)
def test_one_held_out_answer_is_greedy_and_none_needs_no_node(name: str) -> None:
    assert node(graph(name), Generator).evaluation.temperature == 0
    assert "evaluation" not in graph(name, "--evaluate", "0").nodes


REFERENCES = {
    "grpo": (("", False), ("--objective.kl-coef 0.1", True), ("--reward-kl-coef 0.1", True)),
    "reinforce_pp": (("", True), ("--kl-coef 0", False)),
    "rloo": (("", True), ("--kl-coef 0", False)),
    "dapo": (("", False),),
    "iterative_dpo": (("", False), ("--reference.weights initial", True)),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_there_is_a_reference_where_one_is_needed(name: str) -> None:
    for options, needed in REFERENCES[name]:
        made = graph(name, *options.split())
        assert ("reference" in made.nodes) == needed, options
        assert check(made, CLUSTER).ok


def test_grpo_whitens_where_the_estimator_wants_it() -> None:
    found = {
        name: node(graph("grpo", "--advantage", name), TokenBatch).whiten
        for name in ("group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce")
    }
    assert [name for name, how in found.items() if how == "full"] == ["reinforce_baseline", "reinforce"]
    assert node(graph("grpo", "--advantage", "reinforce", "--whiten", "mean"), TokenBatch).whiten == "mean"


def test_gdpo_normalises_the_parts_of_a_sum() -> None:
    made = graph("grpo", "--advantage", "gdpo", "--task.reward", "verifier + 0.5*flowrl.tasks:right_answer")
    assert node(made, GroupAdvantage).estimate.part_weights == (("verifier", 1.0), ("right_answer", 0.5))
    assert node(made, TokenBatch).whiten == "full"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--advantage gdpo", "this reward has no two; give it a sum, as with --task.reward"),
        ("--advantage pass_at_k", "pass_k is None; estimator 'pass_at_k' needs it"),
        ("--advantage pass_at_k --pass-k 9 --group-size 8", "pass_k is 9, but a group has 8 samples; lower it"),
        ("--advantage max_rl --normalise-rewards", "estimator 'max_rl' reads more than their differences"),
        ("--advantage max_rl --reward-kl-coef 0.1 --kl-before-baseline", "subtracted token by token"),
    ],
)
def test_advantages_that_cannot_be_are_problems_of_the_check(options: str, says: str) -> None:
    problems = check(graph("grpo", *options.split()), CLUSTER).problems
    assert any(says in problem for problem in problems)


@pytest.mark.parametrize("name", ["grpo", "agent_tools", "agent_game", "step_groups", "agent_openai", "self_play"])
@pytest.mark.parametrize("advantage", ["max_rl", "pass_at_k"])
def test_graphs_that_choose_their_advantage_take_those_of_the_scale(name: str, advantage: str) -> None:
    more = ("--pass-k", "2") if advantage == "pass_at_k" else ()
    made = graph(name, "--advantage", advantage, *more)
    assert check(made, CLUSTER).ok
    assert node(made, GroupAdvantage).estimate.estimator == advantage


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", ["tis", "icepop", "sequence_mask", "decoupled", "None"])
def test_grpo_takes_every_objective_with_every_correction(kind: str, correction: str) -> None:
    clip = ("--objective.clip-high", "2.0") if kind == "cispo" else ()
    options = ("--objective", kind, "--objective.correction", correction, *clip)
    if KINDS[kind].against_sampler:
        if correction != "None":
            with pytest.raises(ConfigError, match="give old='behavior' and correction=None with it"):
                graph("grpo", *options)
            return
        options = (*options, "--objective.old", "behavior")
    assert check(graph("grpo", *options), CLUSTER).ok


def test_the_batcher_makes_advantages_as_the_advantage_node_does() -> None:
    for name in ("grpo", "reinforce_pp", "rloo"):
        made = graph(name)
        assert node(made, TokenBatch).estimate is node(made, GroupAdvantage).estimate


def test_dapo_filters_on_the_way_to_as_many_groups_as_a_batch_has() -> None:
    dynamic = node(graph("dapo", "--groups-per-step", "6"), GroupAdvantage).dynamic
    assert dynamic is not None and dynamic.groups_per_step == 6
    assert node(graph("dapo", "--overlong-buffer", "0"), Reward).shaping.overlong is None


def test_a_round_of_iterative_dpo_begins_when_the_last_ones_weights_are_everywhere() -> None:
    made = graph("iterative_dpo")
    numbers = check(made, CLUSTER).plan.numbers
    assert (numbers.max_staleness, numbers.tickets) == (0, node(made, TokenBatch).num_groups)
    assert node(made, PairMaker).reference == "round"


@pytest.mark.parametrize(
    ("name", "shares_with"),
    [
        ("raft", "trainer"),
        ("iterative_dpo", "trainer"),
        ("ppo", "reference"),
        ("grpo", "trainer"),
        ("dapo", "trainer"),
        ("rloo", "trainer"),
        ("reinforce_pp", "trainer"),
    ],
)
def test_a_reward_model_takes_the_rewards_place_and_shares_time(name: str, shares_with: str) -> None:
    made = graph(name, "--reward-model", "/a/reward/model", "--negate-rewards", "--dtype", "bfloat16")
    reward = node(made, RewardModel)
    assert (reward.model, reward.shaping.negate, reward.dtype) == ("/a/reward/model", True, "bfloat16")
    assert not [node for node in made.nodes.values() if isinstance(node, Reward)]
    assert any({shares_with, "reward"} <= set(names) for names in made.time_shared)
    assert check(made, CLUSTER).ok


def test_a_sum_may_have_the_reward_model_and_needs_its_directory() -> None:
    total = "verifier + 0.5*reward_model"
    made = graph("grpo", "--reward-model", "/a/reward/model", "--task.reward", total)
    assert node(made, RewardModel).weight == 0.5
    with pytest.raises(ConfigError, match="names reward_model; name its directory with --reward-model"):
        graph("grpo", "--task.reward", total)


MISTAKES = {
    ("reinforce_pp", "--kl-target 0"): "adaptive_kl.target is 0.0",
    ("dapo", "--max-filtered-per-step 0"): "max_filtered_per_step is 0",
    ("dapo", "--mean-between 0.8 0.2"): "the lower bound has to come first",
    ("dapo", "--overlong-buffer -1"): "shaping.overlong.buffer is -1",
    ("raft", "--group-size 1"): "the best of a group needs at least 2",
    ("iterative_dpo", "--group-size 1"): "a pair needs at least 2",
    ("rloo", "--group-size 1"): "compares the members of a group",
}


@pytest.mark.parametrize("name", MISTAKES, ids=" ".join)
def test_settings_that_cannot_work_are_problems(name: tuple[str, str]) -> None:
    (problem,) = [problem for problem in problems(*name) if MISTAKES[name] in problem]
    assert problem
