"""The ten checks: each wrong graph has exactly the problem it was made for, with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flowrl import Call, Cluster, Facts, Graph, In, Machine, Out, Prompt, Sample, Scored, Serve, Weights
from flowrl.graph.analysis.check import check
from flowrl.graph.machine import GB
from tests.graph.graph_nodes import (
    MACHINE,
    Advantage,
    Evaluation,
    Filter,
    Generator,
    Grpo,
    Idle,
    JoinedAdvantage,
    Prompts,
    Reward,
    Teacher,
    Trainer,
    grpo,
)


def has(problem: str, *fragments: str) -> None:
    for fragment in fragments:
        assert fragment in problem, problem


# 1. types


def test_wrong_type_on_an_edge_names_a_port_that_fits() -> None:
    parts = grpo()
    parts.cut(parts.reward.scored)
    parts.graph.connect(parts.generator.rollouts, parts.advantage.scored)  # type: ignore[misc]
    has(
        "\n".join(parts.problems),
        "generator.rollouts sends Sample but advantage.scored takes Scored; connect reward.scored instead.",
    )


def test_an_out_port_may_send_a_subclass() -> None:
    class TakesSamples(Idle):
        samples: In[Sample]

    parts = grpo()
    parts.graph.connect(parts.reward.scored, parts.graph.add("sink", TakesSamples()).samples)
    assert parts.problems == ()


def test_request_and_reply_have_to_be_equal() -> None:
    class Asker(Idle):
        ask: Call[Prompt, Scored]

    parts = grpo()
    parts.graph.call(parts.graph.add("asker", Asker()).ask, parts.generator.requests)  # type: ignore[misc]
    has(parts.problem(), "asker.ask is a Call[Prompt, Scored]", "is a Serve[Prompt, Sample]", "declare both")


def test_a_port_that_carries_no_message() -> None:
    class Bare(Idle):
        numbers: Out[int]  # type: ignore[type-var]
        samples: In  # type: ignore[type-arg]

    g = Graph("one")
    g.ignore(g.add("bare", Bare()).numbers)
    first, second = check(g, MACHINE).problems
    has(first, "bare.samples is declared as In without a message type; write it as in In[Sample].")
    has(second, "bare.numbers is declared with <class 'int'>, which is not a message class; use a subclass of Message")


# 2. connected or dropped


def test_unconnected_ports_name_their_partners() -> None:
    parts = grpo()
    parts.cut(parts.reward.scored)
    texts = "\n".join(parts.problems)
    has(
        texts,
        "reward.scored, an Out[Scored] port, is not connected; connect it with g.connect (advantage.scored would fit)",
    )
    has(
        texts,
        "advantage.scored, an In[Scored] port, is not connected; connect it with g.connect (reward.scored would fit)",
    )
    has(texts, "or write g.ignore(reward.scored)")


def test_an_ignored_or_optional_port_may_stay_unconnected() -> None:
    parts = grpo()
    assert "requests" in parts.generator.facts().optional
    evaluation = parts.graph.add("evaluation", Evaluation())
    has(parts.problem(), "evaluation.generate, a Call[Prompt, Sample] port", "generator.requests would fit")
    parts.graph.ignore(evaluation.generate)
    assert parts.problems == ()


def test_ignored_and_connected() -> None:
    parts = grpo()
    parts.graph.ignore(parts.reward.scored)
    has(parts.problem(), "reward.scored is both connected and ignored")


def test_the_same_edge_twice() -> None:
    parts = grpo()
    parts.graph.connect(parts.prompts.prompts, parts.generator.prompts)
    has(parts.problems[0], "prompts.prompts -> generator.prompts is declared 2 times; keep one of these edges.")


def test_one_latest_port_keeps_one_producer() -> None:
    parts = grpo()
    other = parts.graph.add("other", Trainer())
    parts.graph.connect(parts.batcher.batches, other.batches, dispatch="gang")
    parts.graph.latest(other.weights, parts.generator.weights)
    has(
        parts.problem(),
        "generator.weights keeps only the newest message, but trainer.weights, other.weights send to it",
    )


# 3. cycles


def test_weights_on_a_queue_edge_are_told_with_the_whole_cycle() -> None:
    parts = grpo(latest=False)
    parts.graph.connect(parts.trainer.weights, parts.generator.weights)
    cycle = next(text for text in parts.problems if "cycle" in text)
    has(cycle, "connect it with g.latest(trainer.weights, generator.weights)")
    for edge in parts.graph.edges[1:]:
        assert edge.name in cycle


class Environment(Idle):
    """Plays several turns with the generator over two queue edges."""

    prompts: In[Prompt]
    requests: Out[Prompt]
    turns: In[Sample]
    episodes: Out[Sample]


def test_samples_that_would_go_round_are_refused_with_the_whole_cycle() -> None:
    parts = grpo()
    parts.cut(parts.prompts.prompts)
    parts.cut(parts.generator.rollouts)
    env = parts.graph.add("env", Environment())
    parts.graph.connect(parts.prompts.prompts, env.prompts)
    parts.graph.connect(env.requests, parts.generator.prompts)
    parts.graph.connect(parts.generator.rollouts, env.turns)
    parts.graph.connect(env.episodes, parts.reward.rollouts)
    has(
        parts.problems[0],
        "the cycle env.requests -> generator.prompts, generator.rollouts -> env.turns has no latest edge",
        "let env send a request with g.call and wait for the reply",
    )


def test_requests_in_a_circle() -> None:
    class Both(Idle):
        ask: Call[Prompt, Sample]
        answer: Serve[Prompt, Sample]

    g = Graph("circle")
    one, other = g.add("one", Both()), g.add("other", Both())
    g.call(one.ask, other.answer)
    g.call(other.ask, one.answer)
    (problem,) = check(g, MACHINE).problems
    has(problem, "one.ask -> other.answer, other.ask -> one.answer wait for each other")


# 4. feedback and admission


def test_feedback_without_admission_suggests_the_call() -> None:
    has(
        grpo(admit=False).problem(),
        "trainer.weights -> generator.weights makes a feedback loop",
        "write g.admit(prompts.prompts, until=generator.weights, staleness=1)",
    )


def test_every_feedback_edge_is_counted() -> None:
    class Critic(Idle):
        samples: In[Scored]
        valued: Out[Scored]
        weights: In[Weights]

    parts = grpo()
    parts.cut(parts.reward.scored)
    critic = parts.graph.add("critic", Critic())
    trainer = parts.graph.add("critic_trainer", Trainer())
    parts.graph.connect(parts.reward.scored, critic.samples)
    parts.graph.connect(critic.valued, parts.advantage.scored)
    parts.graph.connect(parts.batcher.batches, trainer.batches, dispatch="gang")
    parts.graph.latest(trainer.weights, critic.weights)
    has(parts.problem(), "write until=(generator.weights, critic.weights)")


def test_feedback_is_found_through_requests_and_replies() -> None:
    class Player(Idle):
        prompts: In[Prompt]
        ask: Call[Prompt, Sample]
        episodes: Out[Sample]

    parts = grpo(admit=False)
    parts.cut(parts.prompts.prompts)
    parts.cut(parts.generator.rollouts)
    player = parts.graph.add("player", Player())
    parts.graph.connect(parts.prompts.prompts, player.prompts)
    parts.graph.call(player.ask, parts.generator.requests)
    parts.graph.connect(player.episodes, parts.reward.rollouts)
    for port in (parts.generator.prompts, parts.generator.rollouts):
        parts.graph.ignore(port)
    has(
        parts.problem(), "makes a feedback loop", "write g.admit(prompts.prompts, until=generator.weights, staleness=1)"
    )
    parts.graph.admit(parts.prompts.prompts, until=parts.generator.weights, staleness=1)
    assert parts.problems == ()


def test_weights_that_do_not_come_back_need_no_admission() -> None:
    class Mirror(Idle):
        weights: In[Weights]

    parts = grpo()
    parts.graph.latest(parts.trainer.weights, parts.graph.add("mirror", Mirror()).weights)
    assert parts.problems == ()


def test_until_has_to_be_the_end_of_a_latest_edge() -> None:
    parts = grpo(admit=False)
    parts.graph.admit(parts.prompts.prompts, until=parts.reward.rollouts, staleness=1)
    texts = "\n".join(parts.problems)
    has(texts, "waits until reward.rollouts, which is not the end of a latest edge; name generator.weights.")


def test_a_second_source_has_to_be_admitted_too() -> None:
    parts = grpo()
    parts.graph.connect(parts.graph.add("more", Prompts()).prompts, parts.generator.prompts)
    has(parts.problem(), "more.prompts also feeds trainer", "only prompts.prompts is admitted", "mix both sources")


def test_a_source_that_feeds_no_trainer_needs_no_ticket() -> None:
    class Display(Idle):
        prompts: In[Prompt]

    parts = grpo()
    display = parts.graph.add("display", Display())
    parts.graph.connect(parts.graph.add("more", Prompts()).prompts, display.prompts)
    assert parts.problems == ()


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"staleness": -1}, "staleness=-1; it needs 0 (synchronous) or more"),
        ({"on_limit": "drop"}, "on_limit='drop'; it needs one of wait, mask"),
        ({"look_ahead": 0}, "look_ahead=0; it needs 1"),
        ({"look_ahead": 2, "on_limit": "mask"}, "has no window; leave look_ahead out"),
        ({"look_ahead": 6, "staleness": 1}, "use look_ahead=5 at most, or staleness=2 at least"),
    ],
)
def test_arguments_of_admit(settings: dict[str, Any], fragment: str) -> None:
    has(grpo(**settings).problem(), fragment)


def test_admission_without_a_batcher_has_no_tickets() -> None:
    parts = grpo()
    parts.batcher.facts = Facts  # type: ignore[method-assign]
    has(parts.problem(), "no node declares how many groups make a batch")


# 5. tickets


@pytest.mark.parametrize(("every", "staleness", "fine"), [(1, 0, True), (2, 0, False), (3, 2, True), (4, 2, False)])
def test_publish_every_needs_tickets(every: int, staleness: int, fine: bool) -> None:
    parts = grpo(publish_every=every, staleness=staleness)
    if fine:
        assert parts.problems == ()
    else:
        has(
            parts.problem(),
            f"publish_every={every}",
            f"use publish_every={staleness + 1} at most",
            "raise staleness by 1",
        )


@pytest.mark.parametrize("every", [0, -2])
def test_publish_every_is_at_least_one(every: int) -> None:
    """Every check runs on such a graph, and none divides by the number."""
    has(grpo(publish_every=every).problem(), f"publish_every={every}; it needs at least 1")


def test_a_node_may_drop_on_a_branch_that_no_trainer_is_on() -> None:
    parts = grpo()
    beside = parts.graph.add("beside", Filter())
    parts.graph.connect(parts.reward.scored, beside.scored)
    parts.graph.ignore(beside.kept)
    assert parts.problems == ()


# 6. groups and lineage


def test_group_sizes_have_to_agree() -> None:
    has(grpo(group_size=4, collected=8).problem(), "samples a group", "prompts has 4, advantage has 8")


def joined(first: Callable[[Grpo], Any], second: Callable[[Grpo], Any]) -> Grpo:
    """The usual graph with an advantage node that joins two branches."""
    parts = grpo()
    parts.cut(parts.reward.scored)
    parts.cut(parts.advantage.groups)
    for table in (parts.graph.nodes, parts.graph.placed):
        table.pop("advantage")
    advantage = parts.graph.add("advantage", JoinedAdvantage())
    parts.advantage = advantage
    parts.graph.connect(advantage.groups, parts.batcher.groups)
    parts.graph.connect(first(parts), advantage.scored)
    parts.graph.connect(second(parts), advantage.rated)
    return parts


def teacher(parts: Grpo) -> Any:
    node = parts.graph.add("teacher", Teacher())
    parts.graph.connect(parts.generator.rollouts, node.rollouts)
    return node.rated


def test_branches_of_one_fan_out_may_meet_in_a_join() -> None:
    assert joined(lambda p: p.reward.scored, teacher).problems == ()


def test_a_join_needs_one_fan_out_behind_it() -> None:
    class Elsewhere(Idle):
        rated: Out[Sample]

    parts = joined(lambda p: p.reward.scored, lambda p: p.graph.add("elsewhere", Elsewhere()).rated)
    has("\n".join(parts.problems), "advantage matches advantage.scored, advantage.rated by sample, but no Out port")


def test_a_branch_that_renames_samples_cannot_be_joined() -> None:
    class Merging(Teacher):
        def facts(self) -> Facts:
            return Facts(keeps_lineage=False)

    def merging(parts: Grpo) -> Any:
        node = parts.graph.add("merging", Merging())
        parts.graph.connect(parts.generator.rollouts, node.rollouts)
        return node.rated

    has(
        joined(lambda p: p.reward.scored, merging).problem(), "merging on the path to advantage.rated merges or renames"
    )


def test_branches_that_meet_in_one_port_double_every_sample() -> None:
    parts = grpo()
    second = parts.graph.add("second", Reward())
    parts.graph.connect(parts.generator.rollouts, second.rollouts)
    parts.graph.connect(second.scored, parts.advantage.scored)
    has(
        parts.problem(),
        "advantage.scored receives every message of generator.rollouts 2 times",
        "reward.scored -> advantage.scored and second.scored -> advantage.scored",
    )


# 7. tokens and ranks


def test_token_budget_below_the_longest_sample() -> None:
    has(
        grpo(token_budget=191).problem(),
        "batcher has token_budget=191, but a sample can be 192 tokens long",
        "prompts: prompt 64, generator: response 128",
        "raise token_budget to 192",
    )
    assert grpo(token_budget=192).problems == ()


def test_every_rank_gets_a_sequence() -> None:
    parts = grpo(group_size=1, groups=2, num_trainers=3)
    has(parts.problem(), "a batch has 2 sequences (2 groups × 1), but trainer has 3 ranks")


def test_the_part_of_a_rank_fits_into_a_message() -> None:
    parts = grpo(group_size=16, groups=2_001, num_trainers=2)
    has(parts.problem(), "a batch has 32016 sequences (2001 groups × 16), 16008 for each of the 2 parts that trainer")
    assert grpo(group_size=16, groups=2_000, num_trainers=2).problems == ()


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"group_size": 0}, "node prompts has group_size=0; it needs at least 1"),
        ({"groups": 0}, "node batcher has groups_per_batch=0; it needs at least 1"),
        ({"token_budget": 0}, "node batcher has token_budget=0; it needs at least 1"),
    ],
)
def test_counts_are_at_least_one(settings: dict[str, Any], fragment: str) -> None:
    assert fragment in "\n".join(grpo(**settings).problems)


# 8. dispatch


def test_keyed_state_with_replicas_needs_key_dispatch() -> None:
    parts = grpo()
    parts.graph.placed["advantage"] = replace(parts.graph.placed["advantage"], replicas=2)
    has(parts.problem(), "advantage keeps items by group and has 2 replicas", 'give that edge dispatch="key"')
    parts.cut(parts.reward.scored)
    parts.graph.connect(parts.reward.scored, parts.advantage.scored, dispatch="key")
    assert parts.problems == ()


def test_a_gang_needs_gang_dispatch() -> None:
    parts = grpo(num_trainers=2)
    parts.cut(parts.batcher.batches)
    parts.graph.connect(parts.batcher.batches, parts.trainer.batches)
    has(parts.problem(), "the 2 ranks of trainer work in lockstep", 'give that edge dispatch="gang"')


@pytest.mark.parametrize(
    ("dispatch", "fragments"),
    [
        ("gang", ("but reward is not a gang", "Sample has no split(n)")),
        ("key", ()),
    ],
)
def test_dispatch_fits_node_and_message(dispatch: Any, fragments: tuple[str, ...]) -> None:
    parts = grpo()
    parts.cut(parts.generator.rollouts)
    parts.graph.connect(parts.generator.rollouts, parts.reward.rollouts, dispatch=dispatch)
    assert len(parts.problems) == len(fragments)
    has("\n".join(parts.problems), *fragments)


def test_key_dispatch_needs_a_group() -> None:
    parts = grpo()
    parts.cut(parts.batcher.batches)
    parts.graph.connect(parts.batcher.batches, parts.trainer.batches, dispatch="key")
    has(parts.problem(), "Batch has no field group_id")


def test_capacity_is_at_least_one() -> None:
    parts = grpo()
    parts.cut(parts.generator.rollouts)
    parts.graph.connect(parts.generator.rollouts, parts.reward.rollouts, capacity=0)
    has(parts.problem(), "generator.rollouts -> reward.rollouts has capacity=0; it needs at least 1")


@pytest.mark.parametrize("margin", [-1, True, 1.5])
def test_a_margin_of_sessions_is_a_whole_number_of_at_least_0(margin: Any) -> None:
    parts = grpo()
    evaluation = parts.graph.add("evaluation", Evaluation())
    parts.graph.call(evaluation.generate, parts.generator.requests, affinity_margin=margin)
    edge = "evaluation.generate -> generator.requests"
    has(parts.problem(), f"{edge} has affinity_margin={margin}; it needs a whole number of at least 0", "move freely")


@pytest.mark.parametrize("margin", [0, 2, 1000, None])
def test_other_margins_are_fine(margin: int | None) -> None:
    parts = grpo()
    evaluation = parts.graph.add("evaluation", Evaluation())
    parts.graph.call(evaluation.generate, parts.generator.requests, affinity_margin=margin)
    assert parts.problems == ()


def test_capacity_of_a_call_is_at_least_one() -> None:
    parts = grpo()
    evaluation = parts.graph.add("evaluation", Evaluation())
    parts.graph.call(evaluation.generate, parts.generator.requests, capacity=0)
    has(parts.problem(), "evaluation.generate -> generator.requests has capacity=0; it needs at least 1")


# 9. resources


def test_more_gpus_than_there_are() -> None:
    parts = grpo()
    parts.graph.placed["generator"] = replace(parts.graph.placed["generator"], gpus=2, replicas=2)
    parts.graph.placed["trainer"] = replace(parts.graph.placed["trainer"], gpus=1)
    has(parts.problem(), "needs 5 GPUs (generator: 2 × 2, trainer: 1 × 1) but this machine has 0", "--cluster")


def test_more_cores_than_there_are() -> None:
    parts = grpo(num_generators=8)
    has(parts.problem(), "needs 9 cores (generator: 8 × 1, trainer: 1 × 1) but this machine has 8", "g.time_share(...)")


def test_what_fits_in_sum_but_on_no_machine() -> None:
    parts = grpo()
    parts.graph.placed["trainer"] = replace(parts.graph.placed["trainer"], cpus=3)
    two = Cluster((Machine((0, 1)), Machine((0, 1))))
    (problem,) = check(parts.graph, two).problems
    has(problem, "no single machine has enough left for trainer/0")


def test_more_memory_than_there_is() -> None:
    class Large(Generator):
        def facts(self) -> Facts:
            return replace(super().facts(), memory_bytes=9 * GB)

    parts = grpo()
    large = parts.graph.add("large", Large(), replicas=2)
    parts.graph.connect(parts.prompts.prompts, large.prompts)
    parts.graph.ignore(large.rollouts)
    parts.graph.latest(parts.trainer.weights, large.weights)
    has(parts.problem(), "the nodes need 18.0 GiB of memory (large: 18.0) but this machine has 16.0")


def test_no_weight_transport_from_cpu_to_gpu() -> None:
    parts = grpo()
    parts.graph.placed["generator"] = replace(parts.graph.placed["generator"], gpus=1)
    (problem,) = check(parts.graph, Cluster((Machine((0, 1, 2, 3), gpus=1),))).problems
    has(problem, "trainer/0 trains on CPU and generator/0 runs on a GPU", "give gpus= to both or to neither")


def test_sharing_and_turns() -> None:
    parts = grpo(num_generators=2)
    parts.graph.together(parts.generator, parts.trainer)
    parts.graph.time_share(parts.generator, parts.trainer)
    parts.graph.time_share(parts.generator, parts.reward)
    texts = "\n".join(parts.problems)
    has(texts, "g.together needs the same number of replicas of each node, but generator has 2, trainer has 1")
    has(texts, "generator and trainer are in g.together and in g.time_share")
    has(texts, "g.time_share names reward, which needs no cpus and no gpus")


# 10. warnings


def test_idle_generators_are_a_warning() -> None:
    report = check(grpo(staleness=0, num_generators=2).graph, MACHINE)
    assert report.ok
    synchronous, slots = report.warnings
    has(synchronous, "staleness 0 is synchronous: generator and the trainer work alternately")
    has(slots, "can work on 32 samples at a time but at most 16 are in flight (4 tickets × 4)", "16 slots stay idle")
    assert check(grpo(staleness=1).graph, MACHINE).warnings == ()
    assert len(check(grpo(staleness=0).graph, MACHINE).warnings) == 1  # 16 slots, 16 samples


def test_edges_that_hold_more_than_the_machine_are_a_warning() -> None:
    class Images(Prompts):
        def facts(self) -> Facts:
            return replace(super().facts(), message_bytes={"prompts": GB})

    parts = grpo()
    parts.prompts.facts = Images().facts  # type: ignore[method-assign]
    (warning,) = check(parts.graph, MACHINE).warnings
    has(warning, "the edges may hold 32.", "most of it prompts.prompts -> generator.prompts (32.0)")


# all together


def test_all_problems_are_reported_at_once() -> None:
    parts = grpo(staleness=-1, token_budget=10, collected=5, num_generators=20)
    parts.graph.add("advantage", Advantage())
    texts = parts.problems
    assert len(texts) == 5
    for word in ("called twice", "staleness=-1", "disagree", "token_budget=10", "needs 21 cores"):
        assert any(word in text for text in texts), word


def test_a_nodes_own_check_is_heard() -> None:
    class Picky(Filter):
        def check(self, facts: Any) -> list[str]:
            return [f"{facts.tickets} tickets are too many; use 4."]

    parts = grpo()
    parts.cut(parts.reward.scored)
    picky = parts.graph.add("picky", Picky())
    parts.graph.connect(parts.reward.scored, picky.scored)
    parts.graph.connect(picky.kept, parts.advantage.scored)
    assert parts.problem() == "node picky: 8 tickets are too many; use 4."


def test_an_empty_graph() -> None:
    (problem,) = check(Graph("nothing"), MACHINE).problems
    assert problem == "the graph 'nothing' has no nodes; add them with g.add."
