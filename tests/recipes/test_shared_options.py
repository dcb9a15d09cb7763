"""What one graph of a kind can, all can: the blocks of options reach every graph, or the graph says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl import Cluster, Graph, Machine, check
from flowrl.errors import ConfigError
from flowrl.graph.command_line import mapping_texts, option_names, parse_mapping
from flowrl.graph.graph import port_name
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB
from flowrl.nodes import (
    AdaptiveKL,
    Evaluation,
    Generator,
    GroupAdvantage,
    Reference,
    Reward,
    RewardModel,
    TokenBatch,
    Trainer,
)
from flowrl.nodes.episodes.episode_node import EpisodeNode
from flowrl.nodes.groups.group_filter import FilteringNode
from flowrl.nodes.scoring.reference import EpisodeReference
from flowrl.training.loss.policy_objective import PolicyObjective

GRAPHS = sorted(path.stem for path in (Path(__file__).parents[2] / "graphs").glob("*.py"))
AGENTS = ("agent_tools", "agent_game", "step_groups", "agent_openai", "self_play")
ONLINE = (
    "grpo",
    "reinforce_pp",
    "rloo",
    "dapo",
    "raft",
    "iterative_dpo",
    "distill",
    "ppo",
    "custom_node",
    "replay",
    "tree_rollouts",
    *AGENTS,
)
IDEAS = ("proposer", "judge", "teachers", "planner_executor")
"""Graphs of nodes of their own, whose options are those that the idea needs."""
CLUSTER = Cluster((Machine(cores=(0, 1, 2, 3), memory_bytes=16 * GB),))
NOT_COMPARED = {"raft", "iterative_dpo", "distill", "replay", "tree_rollouts"}
"""They have no advantages that an estimator compares."""
ABSENT: dict[str, set[str]] = {
    "objective.dual-clip": {"iterative_dpo"},  # its loss is DPO's
    "dynamic-sampling": {"distill"},  # a teacher scores tokens: there are no rewards
    "mean-between": {"distill"},
    "max-filtered-per-step": {"distill"},
    "curriculum.chosen": {"distill"},
    "curriculum.by": {"distill"},
    "normalise-rewards": {
        "distill",
        "raft",
        "iterative_dpo",
        "replay",
        "tree_rollouts",
    },  # they compare rewards, and use no more of them
    "reward-model": {"distill", *AGENTS},  # scored by the teacher, or by environment or agent
    "reward-clip": {"distill"},  # the teacher's logprobs are no rewards that are compared
    "reward-concurrency": {"distill", *AGENTS},
    "reward-away-s": {"distill", *AGENTS},
    "reward-timeout-s": set(),  # held-out answers have a reward, too
    "stop-penalty": {"distill"},
    "overlong-buffer": {
        "distill",
        *AGENTS,
    },  # --limits.tokens bounds a context, most of which others have written
    "overlong-filter": set(AGENTS),  # an episode has --limits.on-truncated mask
    "num-prompts": set(),
    "reference.refresh-every": set(),
    "objective.kl-coef": {"iterative_dpo"},  # DPO's loss has a KL to its reference in it: --beta
    "reward-kl-coef": {
        "rloo",
        "reinforce_pp",
        "ppo",
        "raft",
        "iterative_dpo",
        "distill",
        "replay",
        "tree_rollouts",
    },
    # ^ three have it as --kl-coef; of the others the first two compare raw rewards, and the last has none
    "whiten": {
        "raft",
        "iterative_dpo",
        "distill",
        "replay",
        "tree_rollouts",
    },  # they have no advantages that are compared
    "kl-target": {"raft", "iterative_dpo", "distill", "replay", "tree_rollouts"},
}
"""Option -> the online graphs that do not have it."""


def options(name: str) -> set[str]:
    return set(option_names(load_file(name).config_type))


def graph(name: str, *given: str) -> Graph:
    file = load_file(name)
    return file.build(file.parse(given))


def nodes(of: Graph, kind: Any) -> list[Any]:
    return [node for node in of.nodes.values() if isinstance(node, kind)]


def problems(name: str, *given: str) -> tuple[str, ...]:
    return tuple(check(graph(name, *given), CLUSTER).problems)


@pytest.mark.parametrize("option", ABSENT)
def test_what_one_online_graph_can_all_can(option: str) -> None:
    assert {name for name in ONLINE if option not in options(name)} == ABSENT[option]


def test_every_graph_that_trains_on_samples_is_looked_at() -> None:
    assert {name for name in GRAPHS if "staleness" in options(name)} == {*ONLINE, *IDEAS}


@pytest.mark.parametrize("name", [name for name in GRAPHS if "engine" in options(name)])
def test_texts_that_end_a_response_reach_every_generator(name: str) -> None:
    made = graph(
        name, "--stop-strings", "</answer>", "END", *(("--evaluate", "4") if "evaluate" in options(name) else ())
    )
    generators = nodes(made, Generator)
    assert generators or name in ("dpo", "kto", "sft")
    for generator in generators:
        assert generator.sampling.stop == generator.evaluation.stop == ("</answer>", "END")
    with pytest.raises(ConfigError, match="--stop-strings has an empty text"):
        graph(name, "--stop-strings", "")


@pytest.mark.parametrize("name", [name for name in GRAPHS if "zero" in options(name)])
def test_settings_of_deepspeed_reach_every_trainer(name: str) -> None:
    given = ("zero_optimization.overlap_comm=true", "wall_clock_breakdown=false", "communication_data_type=a=b")
    zero = {"overlap_comm": True}
    wanted = {"zero_optimization": zero, "wall_clock_breakdown": False, "communication_data_type": "a=b"}
    trainer, *others = nodes(graph(name, "--zero.deepspeed", *given), Trainer)
    assert trainer.zero.deepspeed == wanted
    theirs = wanted if name == "planner_executor" else {}  # ppo's critic has --critic-zero
    assert [other.zero.deepspeed for other in others] == [theirs for _ in others]


def test_settings_of_deepspeed_override_flowrls() -> None:
    from flowrl.training.engine.zero import deepspeed_config

    (trainer,) = nodes(graph("grpo", "--zero.deepspeed", "zero_optimization.reduce_bucket_size=7"), Trainer)
    config = deepspeed_config(trainer.zero, 2)
    assert (config["zero_optimization"]["reduce_bucket_size"], config["zero_optimization"]["stage"]) == (7, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("wall_clock_brakdown=true", "no setting of DeepSpeed; did you mean wall_clock_breakdown?"),
        ("zero_optimization.overlap_com=true", "'zero_optimization.overlap_com', which is no setting of ZeRO; did you"),
        ("zero_optimization=3", "sets zero_optimization to 3; name one of its settings"),
        ("gradient_clipping=3", "which a run decides itself; leave it out, and see --zero.clip-grad-norm"),
    ],
)
def test_a_setting_that_deepspeed_does_not_have_is_a_problem(given: str, said: str) -> None:
    (problem,) = problems("grpo", "--zero.deepspeed", given)
    assert said in problem


def test_known_settings_are_no_problem() -> None:
    given = ("zero_optimization.stage3_max_live_parameters=5", "zero_optimization.zero_hpz_partition_size=8")
    more = ("data_types.grad_accum_dtype=bf16", "activation_checkpointing.cpu_checkpointing=true", "aio.block_size=1")
    assert problems("grpo", "--zero.deepspeed", *given, *more) == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("a",), "--zero.deepspeed: 'a' is not NAME=VALUE"),
        (("a..b=1",), "'a..b=1' is not NAME=VALUE"),
        (("a=1", "a=2"), "--zero.deepspeed: a is given twice"),
        (("a=1", "a.b=2"), "a.b is given as a value and as a block of values"),
    ],
)
def test_a_mapping_that_cannot_be_read_is_told(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        graph("grpo", "--zero.deepspeed", *given)
    assert said in str(raised.value) and "Error parsing" not in str(raised.value)


names = st.text(st.characters(codec="ascii", categories=("L", "Nd"), include_characters="_"), min_size=1, max_size=4)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.lists(st.integers(), max_size=3)


@given(st.recursive(values, lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3), max_leaves=8))
def test_a_mapping_comes_back_from_its_texts(value: Any) -> None:
    mapping = value if isinstance(value, dict) else {"a": value}
    assert parse_mapping(list(mapping_texts(mapping))) == mapping


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["objective.dual-clip"]))
def test_the_loss_is_an_option_of_every_graph_with_advantages(name: str) -> None:
    made = graph(name, "--objective.kind", "gspo", "--objective.dual-clip", "3", "--objective.entropy-coef", "0.01")
    trainer, *_ = nodes(made, Trainer)
    assert (trainer.objective.kind, trainer.objective.dual_clip, trainer.objective.entropy_coef) == ("gspo", 3.0, 0.01)
    assert check(made, CLUSTER).problems == ()


def test_graphs_keep_their_own_loss() -> None:
    losses = {
        name: nodes(graph(name), Trainer)[0].objective for name in ("dapo", "rloo", "raft", "reinforce_pp", "ppo")
    }
    assert losses["dapo"] == PolicyObjective(clip_high=0.28)
    assert losses["rloo"] == PolicyObjective(kind="reinforce", aggregation="constant", length=32)
    assert losses["raft"] == PolicyObjective(kind="reinforce", correction=None)
    assert losses["reinforce_pp"] == PolicyObjective(kl_estimator="k2")
    assert losses["ppo"] == PolicyObjective()


@pytest.mark.parametrize(("name", "length"), [("grpo", 20), ("ppo", 20), ("agent_tools", 90)])
def test_the_constant_aggregation_divides_by_the_longest_response(name: str, length: int) -> None:
    given = ("--objective.aggregation", "constant", "--max-tokens", "20")
    longest = ("--limits.tokens", "90") if name in AGENTS else ()
    assert nodes(graph(name, *given, *longest), Trainer)[0].objective.length == length
    assert nodes(graph(name, *given, "--objective.length", "5"), Trainer)[0].objective.length == 5


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["dynamic-sampling"] - {"self_play"}))
def test_groups_without_a_signal_can_be_filtered_everywhere(name: str) -> None:
    made = graph(name, "--mean-between", "0.1", "0.9", "--max-filtered-per-step", "9", "--groups-per-step", "8")
    ((dynamic),) = [node.dynamic for node in nodes(made, FilteringNode)]
    assert (dynamic.groups_per_step, dynamic.mean_between, dynamic.max_filtered_per_step) == (8, (0.1, 0.9), 9)
    assert check(made, CLUSTER).problems == ()
    plain = graph(name, *(("--no-dynamic-sampling",) if name == "dapo" else ()))
    assert [node.dynamic for node in nodes(plain, FilteringNode)] == [None]


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["normalise-rewards"] - {"self_play"}))
def test_rewards_can_be_normalised_wherever_advantages_are_made_of_them(name: str) -> None:
    made = graph(name, "--normalise-rewards")
    assert [node.normalise_rewards for node in nodes(made, TokenBatch)] == [True]
    assert check(made, CLUSTER).problems == ()


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["overlong-buffer"]))
def test_rewards_are_shaped_by_the_same_options(name: str) -> None:
    given = ("--reward-clip", "-1", "2", "--stop-penalty", "0.5", "--overlong-buffer", "4", "--overlong-factor", "0.3")
    for model in ((), ("--reward-model", "a/reward/model")):
        (reward,) = nodes(graph(name, *given, "--max-tokens", "20", *model), (Reward, RewardModel))
        shaping = reward.shaping
        assert (shaping.clip, shaping.stop_penalty) == ((-1.0, 2.0), 0.5)
        assert (shaping.overlong.max_tokens, shaping.overlong.buffer, shaping.overlong.factor) == (20, 4, 0.3)
    assert "shaping.clip is (2.0, 1.0)" in " ".join(problems(name, "--reward-clip", "2", "1"))


SCORED = ("score", "generate", "pairs", *sorted({*ONLINE} - ABSENT["reward-concurrency"]))


@pytest.mark.parametrize("name", SCORED)
def test_how_rewards_are_asked_is_an_option_wherever_a_node_asks_them(name: str) -> None:
    given = ("--reward-timeout-s", "33", "--reward-concurrency", "7", "--reward-away-s", "9")
    found = graph(name, *given, *(("--score",) if name == "generate" else ()))
    (reward,) = nodes(found, Reward)
    assert (reward.timeout_s, reward.concurrency, reward.away_s) == (33.0, 7, 9.0)
    usual = nodes(graph(name), Reward)
    assert all((one.timeout_s, one.concurrency, one.away_s) == (10.0, 1, 600.0) for one in usual)
    for option, wrong in (("timeout-s", "0"), ("timeout-s", "nan"), ("concurrency", "0"), ("away-s", "-1")):
        with pytest.raises(ConfigError, match=f"--reward-{option} is {wrong}"):
            graph(name, f"--reward-{option}", wrong)


def test_the_functions_beside_a_reward_model_are_asked_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--reward-timeout-s", "33", "--reward-concurrency", "7", "--reward-away-s", "9")
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "flowrl.nodes.scoring.reward_model.RewardFunctions", lambda *parts, **given: found.append(given)
    )
    graph("grpo", *given, "--reward-model", "a/model", "--task.reward", "verifier + reward_model")
    assert found == [{"timeout_s": 33.0, "processes": 7, "away_s": 9.0}]
    with pytest.raises(ConfigError, match="--reward-concurrency is for reward functions and servers"):
        graph("grpo", *given, "--reward-model", "a/model")


@pytest.mark.parametrize("name", [name for name in GRAPHS if "reward-timeout-s" in options(name)])
def test_held_out_answers_have_the_time_limit_of_the_reward(name: str) -> None:
    if name in AGENTS:
        with pytest.raises(ConfigError, match="an episode's environment has --limits"):
            graph(name, "--reward-timeout-s", "33")
        return
    more = {"generate": ("--score",), "sft": ("--evaluate", "4")}.get(name, ())
    scoring = nodes(graph(name, "--reward-timeout-s", "33", *more), (Evaluation, Reward))
    assert scoring and {node.timeout_s for node in scoring} == {33.0}


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["reward-model"]))
def test_a_reward_models_own_normalisation_is_an_option(name: str) -> None:
    found = [
        nodes(graph(name, "--reward-model", "a/reward/model", *more), RewardModel)[0].normalise
        for more in ((), ("--reward-model.normalise", "True"), ("--reward-model.normalise", "False"))
    ]
    assert found == [name == "ppo", True, False]


def test_a_number_of_prompts_is_that_of_the_source() -> None:
    assert graph("grpo", "--num-prompts", "5").nodes["prompts"].num_prompts == 5  # type: ignore[attr-defined]


REFUSED = {
    ("dapo", "--reference.dtype bfloat16"): "--reference.dtype: this run has no reference; give it a KL, as with",
    ("grpo", "--reference.gpus 1 --reference.token-budget 9"): "--reference.gpus and --reference.token-budget: this",
    ("rloo", "--kl-coef 0 --reference.cpus 2"): "--reference.cpus: this run has no reference",
    ("grpo", "--lora.rank 4 --objective.kl-coef 0.1 --reference.gpus 1"): "a trainer of adapters has the reference in",
    ("iterative_dpo", "--reference.dtype bfloat16"): "this run has no reference; take --reference.weights initial",
    ("grpo", "--reward-kl k2"): "--reward-kl: there is no KL in the reward; give --reward-kl-coef too",
    ("ppo", "--kl-coef 0 --kl-estimator k2"): "--kl-estimator: --kl-coef is 0",
    ("rloo", "--kl-coef 0 --kl-target 1"): "--kl-target: --kl-coef is 0",
    ("reinforce_pp", "--baseline --kl-target 1"): "--kl-target: there is no KL in the reward with --baseline",
    ("grpo", "--objective.kl-estimator k2"): "there is no KL in the loss; give --objective.kl-coef too",
    ("dapo", "--overlong-buffer 0 --overlong-factor 2"): "--overlong-factor: there is no penalty on long responses",
    ("grpo", "--of-steps mean"): "--of-steps: responses are scored as a whole; give --step-separator",
    (
        "custom_node",
        "--evaluate-every 3 --evaluate-also arithmetic",
    ): "--evaluate-every and --evaluate-also: nothing is",
    ("grpo", "--evaluate 0 --evaluate-samples 2"): "--evaluate-samples: nothing is evaluated, for --evaluate is 0",
    ("grpo", "--evaluate 0 --evaluate-task a.jsonl --evaluate-also arithmetic"): "--evaluate-also asks",
    ("sft", "--answer-tokens 9 --stop-strings x"): "--stop-strings and --answer-tokens: nothing is evaluated",
    ("dpo", "--evaluate 0 --engine.concurrency 9"): "--engine.concurrency: nothing is evaluated",
    ("kto", "--held-out 0 --judge-every 3"): "--judge-every: there is nothing to measure on",
    ("agent_tools", "--evaluate-also arithmetic"): "held-out episodes are those of the environment; name sets of",
    ("self_play", "--evaluate-max-prompt-tokens 9"): "an episode's first prompt is bounded as",
    ("distill", "--max-answer-tokens 9"): "every prompt has answers of the student, for --lmbda is 1",
    ("distill", "--lmbda 0 --beta 0 --group-size 3 --staleness 2"): "--group-size and --staleness: nothing is sampled",
    ("distill", "--lmbda 0 --beta 0 --evaluate 0 --max-tokens 3"): "--max-tokens: nothing is evaluated",
    ("raft", "--objective.dual-clip 3"): "dual_clip is for kind ppo and gspo, and kind is 'reinforce'",
    (
        "grpo",
        "--objective.kind reinforce --objective.clip-high 0.3",
    ): "and clip_cov, and kind is 'reinforce'",
    ("grpo", "--objective.length 3"): "length is for aggregation='constant'",
    ("grpo", "--max-filtered-per-step 3"): "give --dynamic-sampling or --mean-between too",
    ("reinforce_pp", "--baseline --objective.kl-coef 0.1"): "with --baseline the KL in the loss is --kl-coef",
    ("distill", "--exact --objective.dual-clip 3"): "--exact trains the reverse KL itself",
    ("distill", "--task.reward a.py:b --evaluate 0"): "--task.reward scores held-out answers here",
    ("self_play", "--dynamic-sampling"): "every seat has its own here",
    ("agent_tools", "--task.template Q:{}"): "an environment words its questions",
    ("agent_openai", "--task.reward a.py:b"): "an episode is scored by its environment or agent",
    ("dapo", "--clip-high 0.3"): "did you mean --objective.clip_high?",
}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_a_graph_cannot_do_is_one_sentence(given: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        graph(given[0], *given[1].split())
    assert REFUSED[given] in str(raised.value)


@pytest.mark.parametrize("name", ["dapo", "agent_tools"])
def test_adapters_have_the_reference_in_themselves(name: str) -> None:
    assert problems(name, "--objective.kl-coef", "0.1", "--lora.rank", "4") == ()


def nodes_behind(of: Graph, name: str) -> list[str]:
    return [port_name(edge.into) for edge in of.edges if port_name(edge.out).startswith(f"{name}.")]


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["objective.kl-coef"]))
def test_a_kl_in_the_loss_adds_the_reference(name: str) -> None:
    own = ("--kl-coef", "0") if "kl-coef" in options(name) else ()
    assert "reference" not in graph(name, *own).nodes
    given = ("--objective.kl-coef", "0.1", "--reference.dtype", "bfloat16", "--reference.refresh-every", "2")
    made = graph(name, *own, *given, "--reference.mixup", "0.5")
    reference = made.nodes["reference"]
    assert isinstance(reference, Reference) and isinstance(reference, EpisodeReference) is (name in AGENTS)
    assert (reference.dtype, reference.refresh_every, reference.mixup) == ("bfloat16", 2, 0.5)
    assert nodes(made, Trainer)[0].objective.kl_coef == 0.1
    assert made.admission is not None and reference.weights in made.admission.until
    assert len(nodes_behind(made, "reference")) == 1
    assert check(made, CLUSTER).problems == ()
    assert any("reference" in names for names in made.time_shared)
    adapters = graph(name, *own, *given[:2], "--lora.rank", "4")
    assert "reference" not in adapters.nodes and check(adapters, CLUSTER).problems == ()


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["reward-kl-coef"]))
def test_a_kl_in_the_reward_is_the_same_everywhere(name: str) -> None:
    made = graph(name, "--reward-kl-coef", "0.1", "--reward-kl", "k3", "--kl-before-baseline", "--kl-target", "2")
    assert "reference" in made.nodes and check(made, CLUSTER).problems == ()
    (advantage,), (batcher,) = nodes(made, GroupAdvantage), nodes(made, TokenBatch)
    for estimate in (advantage.estimate, batcher.estimate):
        assert (estimate.kl_coef, estimate.kl_estimator, estimate.kl_before_baseline) == (0.1, "k3", True)
    assert batcher.adaptive_kl == AdaptiveKL(2.0)


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["whiten"]))
def test_advantages_are_whitened_where_the_estimator_needs_it_or_somebody_asks(name: str) -> None:
    usual = "full" if name in ("ppo", "reinforce_pp") else "off"
    assert [node.whiten for node in nodes(graph(name), TokenBatch)] == [usual]
    assert [node.whiten for node in nodes(graph(name, "--whiten", "mean"), TokenBatch)] == ["mean"]
    if "advantage" in options(name):
        made = graph(name, "--advantage", "reinforce_baseline")
        assert [node.whiten for node in nodes(made, TokenBatch)] == ["full"], "else it would be dr_grpo"


@pytest.mark.parametrize("name", AGENTS)
def test_rewards_of_episodes_are_shaped_and_their_rows_counted(name: str) -> None:
    made = graph(name, "--reward-clip", "-1", "2", "--stop-penalty", "0.5", "--num-prompts", "5")
    players = nodes(made, EpisodeNode)
    assert players and all((one.shaping.clip, one.shaping.stop_penalty) == ((-1.0, 2.0), 0.5) for one in players)
    assert made.nodes["prompts"].num_prompts == 5  # type: ignore[attr-defined]


def test_further_tasks_are_given_to_agents() -> None:
    (found,) = nodes(graph("agent_openai", "--evaluate-also", "arithmetic:max_value=9"), Evaluation)
    assert [one.name for one in found.agent_sets] == ["arithmetic:min_value=30", "arithmetic:max_value=9"]
    with pytest.raises(ConfigError, match="one of verifiers has its own questions"):
        graph("agent_openai", "--agent", "verifiers/reverse_text", "--evaluate-also", "arithmetic")


def test_ppo_without_a_kl_has_no_reference() -> None:
    made = graph("ppo", "--kl-coef", "0")
    assert "reference" not in made.nodes and check(made, CLUSTER).problems == ()


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(
    ("given", "window", "ahead"),
    [
        ("--groups-per-step 1", 1, 2),
        ("--groups-per-step 3", 3, 1),
        ("--groups-per-step 4", 4, 1),
        ("--groups-per-step 16", 16, 1),
        ("--groups-per-step 16 --staleness 3", 16, 2),
        ("--groups-per-step 4 --staleness 1", 1, 1),
        ("--groups-per-step 4 --staleness 0", 1, 0),
        ("--groups-per-step 4 --look-ahead 2", 2, 1),
    ],
)
def test_episodes_look_ahead_by_the_groups_of_a_step(name: str, given: str, window: int, ahead: int) -> None:
    """A window of one step costs one version: it never makes a run synchronous that was not meant to be."""
    found = check(graph(name, *given.split()), CLUSTER)
    assert not [text for text in found.problems if "look_ahead" in text]
    assert (found.plan.numbers.window, found.plan.numbers.ahead) == (window, ahead)


@pytest.mark.parametrize("name", AGENTS)
def test_the_bounds_of_processes_reach_every_node_with_episodes(name: str) -> None:
    given = "--memory-gb 0.5 --processes 7 --episodes-per-process 3 --keep-variables OWN_KEY --limits.turns 5"
    made = graph(name, *given.split())
    players = nodes(made, EpisodeNode)
    assert len(players) == (2 if name == "self_play" else 1)
    given_to = {
        (one.memory_bytes, one.processes, one.episodes_per_process, one.keep_variables, one.limits.turns)
        for one in players
    }
    assert given_to == {(GB // 2, 7, 3, ("OWN_KEY",), 5)}
    assert nodes(graph(name), EpisodeNode)[0].memory_bytes == GB
    with pytest.raises(ConfigError, match=r"--memory-gb is 0\.0; it has to be above 0"):
        graph(name, "--memory-gb", "0")


@pytest.mark.parametrize("name", AGENTS)
def test_vllms_parsers_reach_every_generator_of_episodes(name: str) -> None:
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "qwen3", "--probe-tolerance", "0.5")
    made = graph(name, *parsers, *(("--opponent-every", "1") if name == "self_play" else ()))
    generators = nodes(made, Generator)
    assert len(generators) == (3 if name == "self_play" else 1)
    assert {(one.tool_parser, one.reasoning_parser, one.probe_tolerance) for one in generators} == {
        ("hermes", "qwen3", 0.5)
    }
    (text,) = problems(name, "--tool-parser", "herms")[:1]
    assert "vLLM has no tool_parser 'herms'; it has apertus, " in text and text.endswith("Did you mean hermes?")
    assert "vLLM has no reasoning_parser 'r2'; it has cohere_command3" in problems(name, "--reasoning-parser", "r2")[0]


@pytest.mark.parametrize("name", AGENTS)
def test_episodes_can_be_masked_at_the_limit(name: str) -> None:
    made = graph(name, "--on-limit", "mask", "--evaluate", "0")
    assert made.admission is not None and made.admission.look_ahead == 1
    assert not nodes(made, Evaluation) and check(made, CLUSTER).problems == ()
    assert any("look_ahead" in one for one in problems(name, "--on-limit", "mask", "--look-ahead", "3"))
