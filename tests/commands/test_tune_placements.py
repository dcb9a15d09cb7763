"""The placements among which `flowrl tune` chooses, on machines that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from flowrl.commands.tune.calibration import Calibration, calibration_runs
from flowrl.commands.tune.measured_step import MeasuredStep
from flowrl.commands.tune.placements import find_placements
from flowrl.commands.tune.tune import TuneOptions
from flowrl.commands.tune.tuned_graph import TunedGraph
from flowrl.commands.tune.tuned_placement import TunedPlacement
from flowrl.errors import ConfigError
from flowrl.graph.analysis.check import check
from flowrl.graph.load import load_file, shipped_names
from flowrl.graph.machine import Cluster
from flowrl.graph.option_types import changed_config, options_of
from flowrl.runtime.driver.resources import ProcessSlot, process_environment

ROOT = Path(__file__).parents[2]
TWO = "1x cpus=2 memory=24"
GPUS = "1 x 4 x H100"


def tuned(graph: str, cluster: str, *args: str, fixed: Sequence[str] = (), most: int | None = None) -> TunedGraph:
    file = load_file(graph)
    return TunedGraph(file, file.parse(args), Cluster.parse(cluster), frozenset(fixed), most)


def words(found: Sequence[TunedPlacement]) -> list[str]:
    return [placement.in_words for placement in found]


def test_two_cores() -> None:
    assert words(find_placements(tuned("grpo", TWO))) == [
        "generator 1 x 1 core, trainer 1 x 1 core, staleness 1",
        "generator 1 x 2 cores, trainer 1 x 2 cores, in turns, staleness 0",
        "generator 1 x 1 core, trainer 1 x 2 cores, shared cores, staleness 0",
        "generator 1 x 1 core, trainer 1 x 2 cores, shared cores, staleness 1",
        "generator 1 x 1 core, trainer 1 x 1 core, staleness 0",
        "generator 1 x 2 cores, trainer 2 x 1 core, in turns, staleness 0",
        "generator 2 x 1 core, trainer 1 x 2 cores, in turns, staleness 0",
        "generator 2 x 1 core, trainer 2 x 1 core, in turns, staleness 0",
    ]


def test_the_default_is_first_and_has_no_options() -> None:
    default, *others = find_placements(tuned("grpo", TWO))
    assert default.is_default and default.options == {} and default.as_options == "as it is"
    assert not any(placement.is_default for placement in others)
    assert others[0].as_options == "--staleness 0", "a synchronous step has all cores in both halves by itself"
    assert others[3].as_options == "--generator.cpus 1 --trainer.cpus 1 --staleness 0"


@pytest.mark.parametrize("graph", ["grpo", "ppo", "dpo", "sft", "agent_tools"])
@pytest.mark.parametrize("cluster", [TWO, "1x cpus=3 memory=64", "1 x 2 x H100"])
def test_every_placement_passes_the_checks(graph: str, cluster: str) -> None:
    one = tuned(graph, cluster)
    found = find_placements(one)
    assert found
    assert len({placement.identity for placement in found}) == len(found)
    for placement in found:
        changed = one.file.build(changed_config(one.cfg, placement.options))
        assert check(changed, one.cluster).ok, placement.as_options


def test_no_placement_on_cores_uses_more_than_there_are_or_leaves_any() -> None:
    for placement in find_placements(tuned("grpo", "1x cpus=7 memory=64"))[1:]:
        assert {core for stage in placement.stages for _, core in stage.cores} == set(range(7)) or (
            not {"trainer.cpus", "trainer.replicas"} & placement.options.keys()
        ), placement.as_options


def test_models_beside_the_trainer_have_its_cores() -> None:
    found = find_placements(tuned("grpo", "1x cpus=8 memory=64", "--reward-kl-coef", "0.1"))
    sizes = {(p.options.get("trainer.cpus"), p.options.get("reference.cpus")) for p in found if p.num_lines == 2}
    assert (7.0, 7.0) in sizes
    assert all(one == other or one * 2 <= other for one, other in sizes if one and other)


def test_in_turns_every_stage_has_all_cores() -> None:
    found = find_placements(tuned("ppo", "1x cpus=4 memory=64"))
    turns = [placement for placement in found if placement.num_lines == 1]
    assert turns and all(s.size.units * s.size.replicas == 4 for p in turns for s in p.stages)
    assert {placement.staleness for placement in turns} == {0}


def test_what_was_given_stays() -> None:
    one = tuned("grpo", TWO, "--staleness", "1", "--generator.cpus", "1", fixed=("staleness", "generator.cpus"))
    assert words(find_placements(one)) == [
        "generator 1 x 1 core, trainer 1 x 1 core, staleness 1",
        "generator 2 x 1 core, trainer 1 x 2 cores, in turns, staleness 1",
        "generator 2 x 1 core, trainer 2 x 1 core, in turns, staleness 1",
    ]
    assert {placement.staleness for placement in find_placements(one, wide=True)} == {0, 1}


def test_staleness_up_to_a_limit_and_look_ahead_where_there_is_room() -> None:
    found = find_placements(tuned("grpo", TWO, "--groups-per-step", "4", most=2))
    apart = [p for p in found if p.num_lines == 2 and not p.shares_cores]
    assert sorted((p.staleness, p.look_ahead, p.ahead) for p in apart) == [(0, 1, 0), (1, 1, 1), (2, 1, 2), (2, 5, 1)]
    assert [p.window for p in apart if p.look_ahead > 1] == [True]


def test_gpus_by_replicas_and_tensor_parallel_parts() -> None:
    found = {placement.in_words for placement in find_placements(tuned("grpo", GPUS)) if placement.staleness == 0}
    assert found == {
        "generator 1 x 1 GPU, trainer 3 x 1 GPU, staleness 0",
        "generator 1 x 1 GPU, trainer 2 x 1 GPU, staleness 0",
        "generator 2 x 1 GPU, trainer 2 x 1 GPU, staleness 0",
        "generator 1 x 2 GPUs, trainer 2 x 1 GPU, staleness 0",
        "generator 4 x 1 GPU, trainer 4 x 1 GPU, in turns, staleness 0",
        "generator 2 x 2 GPUs, trainer 4 x 1 GPU, in turns, staleness 0",
        "generator 1 x 4 GPUs, trainer 4 x 1 GPU, in turns, staleness 0",
    }


def test_what_does_not_fit_a_card_is_left_out_or_saves_memory() -> None:
    seven = (
        "--policy",
        str(ROOT / "tests" / "graph" / "shapes" / "qwen2.5-7b.json"),
        "--dtype",
        "bfloat16",
        "--staleness",
        "0",
    )
    found = find_placements(tuned("grpo", "1 x 4 x 80GB", *seven, fixed=("staleness",)))
    assert found and all(p.options.get("zero.gradient_checkpointing") for p in found), words(found)
    assert any("in turns" in p.in_words for p in found)
    assert not any("trainer 1 x" in p.in_words and not p.options.get("zero.offload") for p in found), words(found)
    assert find_placements(tuned("grpo", "1 x 1 x 24GB", *seven, fixed=("staleness",))) == []


def test_threads_follow_the_cores() -> None:
    """Half a core is a thread; one and a half are two, of which one shares its core."""
    one = tuned("grpo", TWO, "--generator.cpus", "0.5", "--trainer.cpus", "1.5")
    hosts = {host.name: host for host in check(one.whole_graph, one.cluster).plan.hosts}
    threads = {
        name: process_environment(ProcessSlot(name, host.cpus, 0, host.cores))["OMP_NUM_THREADS"]
        for name, host in hosts.items()
    }
    assert (threads["generator/0"], threads["trainer/0"]) == ("1", "2")
    assert len(set(hosts["generator/0"].cores) & set(hosts["trainer/0"].cores)) == 1


def test_graphs_without_a_generator_have_ranks() -> None:
    assert words(find_placements(tuned("sft", "1x cpus=4 memory=24")))[1:] == [
        "trainer 1 x 4 cores",
        "trainer 2 x 2 cores",
        "trainer 4 x 1 core",
    ]
    evaluated = find_placements(tuned("sft", "1x cpus=3 memory=24", "--evaluate", "8"))
    assert words(evaluated)[1:] == ["trainer 1 x 2 cores", "trainer 2 x 1 core"], "its generator keeps a core"
    on_gpus = find_placements(tuned("dpo", GPUS, "--evaluate", "0"))
    assert [placement.options.get("trainer.replicas") for placement in on_gpus] == [None, 2, 4]


def test_a_graph_without_roles_in_its_options_has_staleness_and_turns() -> None:
    assert words(find_placements(tuned("benchmarks/runs/stages.py", TWO, most=2))) == [
        "generator 1 x 1 core, trainer 1 x 1 core, shared cores, staleness 1",
        "generator 1 x 1 core, trainer 1 x 1 core, shared cores, staleness 0",
        "generator 1 x 1 core, trainer 1 x 1 core, shared cores, staleness 2",
        "generator 1 x 2 cores, trainer 1 x 2 cores, in turns, staleness 0",
    ]


def test_a_graph_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="evaluate trains nothing"):
        _ = tuned("evaluate", TWO).trainer


@pytest.mark.parametrize("graph", shipped_names())
def test_every_graph_that_trains_has_placements_and_runs(graph: str) -> None:
    one = tuned(graph, TWO)
    assert {*options_of(type(one.cfg))}.isdisjoint(field.name for field in fields(TuneOptions))
    try:
        assert one.trainer
    except ConfigError:
        assert graph in ("evaluate", "generate", "pairs", "score")
        return
    found, runs = find_placements(one), calibration_runs(find_placements(one, wide=True))
    if graph in ("planner_executor", "proposer"):  # `flowrl tune` refuses them
        assert not runs
        return
    assert found[0].is_default and runs
    measured = Calibration(tuple((run, made_up(run)) for run in runs))
    assert all(measured.predict_placement(placement) is not None for placement in found), words(found)


def made_up(placement: TunedPlacement) -> MeasuredStep:
    each = {stage.node: 1.0 for stage in placement.stages}
    return MeasuredStep(len(each) + 0.5, 10, each, dict.fromkeys(each, 0.1), dict.fromkeys(each, 0.5))


def test_what_is_measured_tells_every_size() -> None:
    for cluster, most in ((TWO, 5), ("1x cpus=6 memory=64", 7), (GPUS, 6)):
        wide = find_placements(tuned("grpo", cluster), wide=True)
        runs = calibration_runs(wide)
        assert len(runs) <= most
        assert {(one.num_lines, bool(one.ahead)) for one in runs} == {(2, False), (2, True), (1, False)}
        for index, name in enumerate(("generator", "trainer")):
            sizes = {p.stages[index].size for p in wide if p.stages[index].size.on_gpus or cluster != GPUS}
            for part in ("replicas", "units"):
                measured = [getattr(one.stages[index].size, part) for one in runs]
                assert min(measured) == min(getattr(size, part) for size in sizes), (cluster, name, part)
                assert max(measured) == max(getattr(size, part) for size in sizes), (cluster, name, part)
