"""The curriculum: which prompts are asked, by simulated outcomes; what a source keeps of it, and what refuses it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from flowrl import Cluster, Graph, Machine, check
from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB
from flowrl.models import Policy
from flowrl.nodes import Curriculum, PromptSource
from flowrl.nodes.curriculum import GroupOutcome, PassRates
from flowrl.tasks import Task, load_rows
from flowrl.testing import GraphRun, run_graph, run_node
from tests.rigs.in_process import over_sockets

TASK = Task("arithmetic:max_value=3")
NAMES = [f"p{index}" for index in range(40)]
SKILL = {name: (0.0, 1.0, 0.5, 0.05)[index % 4] for index, name in enumerate(NAMES)}
"""The policy's pass rate: a quarter of the prompts each."""


def simulated(
    settings: Curriculum, *, groups: int, seed: int = 0, lag: int = 8, size: int = 8, stop: int | None = None
) -> tuple[list[str], list[bool], PassRates]:
    """(prompts asked, whether all rewards of their groups are equal, what is known); outcomes come `lag` groups later.

    With `stop`, the state is saved and loaded into another object after so many groups.
    """
    rates, rng = PassRates(settings, NAMES, None, seed=seed), random.Random(seed)
    asked: list[str] = []
    equal: list[bool] = []
    late: list[GroupOutcome] = []
    order = 0
    for number in range(groups):
        if number == stop:
            state, rates = rates.state(), PassRates(settings, NAMES, None, seed=seed)
            rates.load_state(state)
        found = rates.choose_row()
        row = order % len(NAMES) if found is None else found.row
        order += found is None
        rates.note_asked(row)
        rewards = tuple(float(rng.random() < SKILL[NAMES[row]]) for _ in range(size))
        late.append(GroupOutcome(NAMES[row], rates.num_visits(row) - 1, rewards))
        asked.append(NAMES[row])
        equal.append(len(set(rewards)) == 1)
        if len(late) > lag:
            assert rates.note_outcome(late.pop(0))
    return asked, equal, rates


def test_fewer_groups_are_all_equal_than_in_the_order_of_the_data() -> None:
    _, plain, _ = simulated(Curriculum(), groups=400)
    _, with_it, _ = simulated(Curriculum(chosen=0.7), groups=400)
    assert sum(plain[200:]) / 200 > 0.6
    assert sum(with_it[200:]) / 200 < 0.35


def test_prompts_near_one_half_are_preferred_and_none_starves() -> None:
    asked, _, rates = simulated(Curriculum(chosen=0.7, replayed=0.1), groups=1000)
    times = Counter(asked)
    of = {skill: sum(times[name] for name in NAMES if SKILL[name] == skill) for skill in (0.0, 1.0, 0.5, 0.05)}
    assert of[0.5] > of[0.05] > of[1.0], of
    assert min(times[name] for name in NAMES) >= 0.2 * 1000 // len(NAMES) - 1, "the floor is the share of the order"
    assert rates.num_at(1.0) >= 10 and rates.num_at(0.0) >= 10


def test_unsolved_prompts_are_replayed_after_a_while_the_longest_waiting_first() -> None:
    rates = PassRates(Curriculum(replayed=0.9, replay_after=3), ["a", "b", "c"], None, seed=0)
    for row, name in enumerate("abc"):
        rates.note_asked(row)
        rates.note_outcome(GroupOutcome(name, 0, (0.0, float(name == "c"))))
    picks = []
    for _ in range(12):
        found = rates.choose_row()
        picks.append("-" if found is None else "abc"[found.row])
        rates.note_asked(2 if found is None else found.row)
        if found is not None:
            rates.note_outcome(GroupOutcome(picks[-1], rates.num_visits(found.row) - 1, (0.0, 0.0)))
    replayed = [name for name in picks if name != "-"]
    assert replayed[:4] == ["a", "b", "a", "b"] and "c" not in replayed
    places = [number for number, name in enumerate(picks) if name == "a"]
    assert min(later - first for first, later in itertools.pairwise(places)) >= 3


def test_the_choice_follows_from_seed_and_history_also_through_a_checkpoint() -> None:
    settings = Curriculum(chosen=0.6, replayed=0.2, replay_after=20)
    first, *_ = simulated(settings, groups=300, seed=3)
    assert first == simulated(settings, groups=300, seed=3)[0]
    assert first == simulated(settings, groups=300, seed=3, stop=111)[0]
    assert first != simulated(settings, groups=300, seed=4)[0]


def test_an_outcome_counts_once_and_a_prompt_in_flight_is_not_chosen() -> None:
    rates = PassRates(Curriculum(chosen=0.999999), ["a"], None, seed=0)
    rates.note_asked(0)
    assert not rates.note_outcome(GroupOutcome("strange", 0, (1.0,)))
    assert rates.note_outcome(GroupOutcome("a", 0, (1.0, 0.0)))
    assert not rates.note_outcome(GroupOutcome("a", 0, (1.0, 1.0))), "repeated after a checkpoint"
    found = rates.choose_row()
    assert found is not None and found.pass_rate == 0.5
    rates.note_asked(0)
    assert rates.choose_row() is None


def test_rows_of_a_bucket_share_a_pass_rate_and_take_turns() -> None:
    names, levels = ["e0", "e1", "m0", "m1", "m2"], ["easy", "easy", "mid", "mid", "mid"]
    rates = PassRates(Curriculum(chosen=0.999999, by="level"), names, levels, seed=0)
    rates.note_asked(0)
    rates.note_outcome(GroupOutcome("e0", 0, (1.0, 1.0)))
    rates.note_asked(2)
    rates.note_outcome(GroupOutcome("m0", 0, (1.0, 0.0)))
    found = []
    for _ in range(2):
        choice = rates.choose_row()
        assert choice is not None
        found.append(names[choice.row])
        rates.note_asked(choice.row)
    assert sorted(found) == ["m1", "m2"], "asked before none of it was known, by what is known of m0"


def test_a_sample_passes_from_the_reward_that_is_said() -> None:
    for least, expected in ((None, 0), (0.4, 1)):
        rates = PassRates(Curriculum(chosen=0.5, pass_at=least), ["a"], None, seed=0)
        rates.note_asked(0)
        rates.note_outcome(GroupOutcome("a", 0, (0.5, 0.4)))
        assert rates.num_at(1.0) == expected


# In a run

SKILLS = Path(__file__).parent / "graphs_curriculum" / "skills.py"
WITH_IT = Curriculum(chosen=0.6, replayed=0.1, replay_after=20)


def filtered(ran: GraphRun) -> float:
    """The share of the groups that were filtered because all their rewards are equal."""
    states = ran.states()
    return states["filtered: all_equal"] / (states["filtered: all_equal"] + states["trained"])


def test_a_run_filters_fewer_groups_and_says_what_it_chose(tmp_path: Path) -> None:
    plain = run_graph(SKILLS, tmp_path / "plain", steps=14)
    with over_sockets():
        ran = run_graph(SKILLS, tmp_path / "run", {"curriculum": WITH_IT}, steps=14)
    assert ran.audit().ok and plain.audit().ok
    assert filtered(plain) > 0.6 and filtered(ran) < filtered(plain) - 0.1, (filtered(plain), filtered(ran))
    lines = ran.metrics()
    assert sum(line["prompts_chosen"] for line in lines) > 20
    assert sum(line["prompts_replayed"] for line in lines) > 0
    # A line has the mean of what was chosen since the line before it, and nothing if that is none.
    assert 0.2 < [line["chosen_pass_rate"] for line in lines if "chosen_pass_rate" in line][-1] < 0.8
    assert max(line["all_equal_share"] for line in lines) > 0 and lines[-1]["all_equal_share"] < 1
    assert lines[-1]["prompts_solved"] >= 5 and lines[-1]["prompts_unsolved"] >= 5
    assert "prompts_chosen" not in plain.metrics()[-1]


def test_a_resumed_run_goes_on_with_what_it_knew(tmp_path: Path) -> None:
    options = {"curriculum": WITH_IT, "group_size": 4}
    for steps in (3, 6, 9):
        ran = run_graph(SKILLS, tmp_path / "run", options, steps=steps, save_every=1, resume=steps > 3, seed=2)
    assert ran.audit().ok and len(ran.metrics()) == 9
    assert ran.rows("SELECT MAX(n) FROM (SELECT COUNT(*) n FROM samples GROUP BY group_id)") == [(4,)]
    asked = ran.rows("SELECT prompt_id, COUNT(DISTINCT epoch), MAX(epoch) FROM samples GROUP BY prompt_id")
    assert all(times == newest + 1 for _, times, newest in asked), "the visits of a prompt are numbered through"
    assert max(newest for *_, newest in asked) > 1


def test_the_group_that_waited_for_its_ticket_comes_first_after_a_resume() -> None:
    """What was heard meanwhile would choose another; but its first members may be on their way already."""

    def source() -> PromptSource:
        return PromptSource(TASK, Policy("tiny"), repeat=1, curriculum=Curriculum(chosen=0.999999))

    def sent(node: PromptSource, num_groups: int) -> list[str]:
        record = run_node(node, name="prompts", num_groups=num_groups, steps=99, seed=1)
        return [prompt.group_id for prompt in record.sent("prompts")]

    first = source()
    sent(first, 3)
    state = dict(first.state())
    (waiting,) = sent(source(), 4)[3:]
    assert state["waiting"] and state["curriculum"]["number"] == 4
    other = sorted(set(state["curriculum"]["known"]) - {waiting.split(":")[2]})[0]
    state["curriculum"]["known"][other] = [1.0, 0.0, 0.5, 0.0]
    state["curriculum"]["sums"][other] = [1.0, 2.0]
    again = source()
    again.load_state(state)
    assert sent(again, 2) == [waiting, f"prompts:1:{other}"]


def test_a_run_is_resumed_as_it_was_started(tmp_path: Path) -> None:
    run_graph(SKILLS, tmp_path / "run", steps=2, save_every=1)
    with pytest.raises(ConfigError, match="without one; resume it as it was started"):
        run_graph(SKILLS, tmp_path / "run", {"curriculum": WITH_IT}, steps=4, resume=True)


# What is refused

CLUSTER = Cluster((Machine(cores=(0, 1, 2, 3), memory_bytes=16 * GB),))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--curriculum.chosen 1", "--curriculum.chosen is 1.0; it has to be in [0, 1)"),
        ("--curriculum.chosen 0.6 --curriculum.replayed 0.5", "their sum has to be below 1"),
        ("--curriculum.by level", "neither curriculum.chosen nor curriculum.replayed is above 0"),
        ("--curriculum.chosen 0.5 --curriculum.replay-after -1", "replay_after is -1"),
        ("--curriculum.chosen 0.5 --reward-model a/model", "--curriculum.pass-at"),
    ],
)
def test_options_out_of_range_are_refused(options: str, problem: str) -> None:
    file = load_file("grpo")
    with pytest.raises(ConfigError) as refused:
        file.build(file.parse(options.split()))
    assert problem in str(refused.value)


@pytest.mark.parametrize("name", ["grpo", "ppo", "raft", "iterative_dpo", "custom_node", "agent_tools", "self_play"])
def test_a_graph_joins_what_collects_groups_to_its_source(name: str) -> None:
    file = load_file(name)
    with_it = file.build(file.parse(["--curriculum.chosen", "0.5"]))
    assert check(with_it, CLUSTER).problems == ()
    assert [edge.name for edge in with_it.edges if edge.into is with_it.nodes["prompts"].ports["outcomes"]]
    plain = file.build(file.parse([]))
    assert not [edge for edge in plain.edges if edge.into is plain.nodes["prompts"].ports["outcomes"]]


def test_a_source_with_a_curriculum_needs_the_edge_and_the_column() -> None:
    g = Graph("bare")
    g.add("prompts", PromptSource(TASK, Policy("tiny"), curriculum=WITH_IT))
    assert any("prompts.outcomes" in problem for problem in check(g, CLUSTER).problems)
    with pytest.raises(
        ConfigError, match=r"curriculum\.by is 'level', and no row has this column; choose one of answer"
    ):
        PromptSource(TASK, Policy("tiny"), curriculum=Curriculum(chosen=0.5, by="level")).preflight()


def test_a_column_that_questions_of_agents_lack_is_refused_before_a_run() -> None:
    file = load_file("agent_openai")
    graph = file.build(file.parse(["--curriculum.chosen", "0.5", "--curriculum.by", "level"]))
    with pytest.raises(ConfigError, match=r"curriculum\.by is 'level', and no row has this column"):
        graph.nodes["prompts"].preflight()


@pytest.mark.parametrize("name", ["agent_tools", "agent_game", "self_play"])
def test_rows_of_an_environment_have_no_columns_to_go_by(name: str) -> None:
    file = load_file(name)
    graph = file.build(file.parse(["--curriculum.chosen", "0.5", "--curriculum.by", "environment"]))
    (problem,) = check(graph, CLUSTER).problems
    assert "curriculum.by is 'environment', but rows of an environment differ only by their seed" in problem


def test_rows_of_a_generated_task_say_how_difficult_they_are() -> None:
    task = Task("reasoning_gym/chain_sum:size=20,max_terms=3")
    rows = load_rows(task).train
    levels = {row.columns["difficulty"] for row in rows}
    assert len(levels) > 2 and all(level.startswith("num_terms=") for level in levels)
    PromptSource(task, Policy("tiny"), curriculum=Curriculum(chosen=0.5, by="difficulty")).preflight()
