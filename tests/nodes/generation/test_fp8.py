"""`--engine.quantization fp8` before a start: what is refused, what the plan says of the gap, memory, and the probe."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl import Cluster, ConfigError, Facts, Graph
from flowrl.graph.analysis.check import Report, check
from flowrl.graph.analysis.size_rules import gap_findings
from flowrl.graph.machine import CAPABILITIES, CARDS
from flowrl.models import Policy
from flowrl.models.model_layout import SMOLLM2_SHAPE
from flowrl.nodes import BestOfN, Generator
from flowrl.nodes.engine_options import FP8, Engine
from flowrl.training.loss.function_objective import FunctionObjective
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.weights.probe import ProbeCheck, ProbeMismatch
from tests.graph import graph_nodes
from tests.graph.test_graph_memory import BF16, SEVEN, SMALL, graph, report
from tests.weights.test_weights_publish import off_by

EIGHT = "1 x 8 x H100"
ENGINE = ("--engine.quantization", "fp8", "--engine.dtype", "bfloat16")


def asked(name: str = "grpo", *options: str, cluster: str = "cpus=8 memory=64") -> Report:
    return report(cluster, *ENGINE, *options, name=name)


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "rloo", "distill", "agent_game", "iterative_dpo", "pairs"])
def test_engines_in_fp8_are_taken_by_every_graph_with_generators(name: str) -> None:
    assert asked(name).problems == ()


def test_vllm_is_given_the_name_that_it_quantizes_by() -> None:
    found = {name: Engine(quantization=name).vllm_arguments(on_gpu=True)["quantization"] for name in FP8}
    assert found.pop("fp8") == "fp8_per_channel" and found == {name: name for name in found}
    assert Engine(quantization="awq").vllm_arguments(on_gpu=True)["quantization"] == "awq"


@pytest.mark.parametrize(("method", "fixed"), [("mxfp8", True), ("experts_int8", True), ("fp8_per_block", False)])
def test_other_methods_are_for_generators_without_weights(method: str, fixed: bool) -> None:
    options = ("--engine.quantization", method, "--engine.dtype", "bfloat16", "--generator.gpus", "1")
    refused = [one for one in report(EIGHT, *options).problems if "only fp8, fp8_per_block, fp8_per_channel" in one]
    assert bool(refused) == fixed
    assert not any("takes none" in problem for problem in report(EIGHT, *options, name="pairs").problems)


def test_a_model_that_is_stored_quantized_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"is quantized \(fp8\), and weight updates lack the scales \(weight_scale\)"):
        Generator(Policy(str(tmp_path))).preflight()


def test_a_model_of_float32_needs_another_dtype_beside_fp8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(Path(SMALL).read_text()), "dtype": "float32"}))
    with pytest.raises(ConfigError, match=r"dtype is float32; add --engine\.dtype bfloat16"):
        Generator(Policy(str(tmp_path)), engine=Engine(quantization="fp8")).preflight()
    Generator(Policy(str(tmp_path)), engine=Engine(quantization="fp8", dtype="float16")).preflight()


def test_experts_in_fp8_need_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(Path(SMALL).read_text()), "num_experts": 4}))
    engine, policy = Engine(quantization="fp8", dtype="bfloat16"), Policy(str(tmp_path))
    g = Graph("one")
    alone = g.add("generator", Generator(policy, engine=engine))
    with pytest.raises(ConfigError, match="vLLM computes experts in fp8 only on GPUs"):
        alone.preflight()
    assert any("computes experts in fp8 only on GPUs" in text for text in alone.check(None))
    g.add("other", Generator(policy, engine=engine), gpus=1).preflight()


@pytest.mark.parametrize(
    ("cluster", "refused"),
    [("1 x 8 x A100", True), ("2x cpus=32 gpus=8 gpu=A10 memory=256", True), (EIGHT, False), ("1 x 8 x 80GB", False)],
)
def test_gpus_that_are_known_to_be_too_old_are_refused(cluster: str, refused: bool) -> None:
    found = asked("grpo", "--generator.gpus", "1", cluster=cluster).problems
    assert [problem for problem in found if "needs GPUs of compute capability 8.9 or more" in problem] == list(found)
    assert bool(found) == refused
    assert report(cluster, "--generator.gpus", "1").problems == ()


@pytest.mark.parametrize(
    ("flags", "placement", "refused"),
    [
        ({"avx2", "fma"}, (), True),
        ({"avx2", "avx512f"}, (), False),
        ({"avx2", "amx_tile"}, (), False),
        (set(), (), False),  # of machines that are described, or reached by Ray, it is not known
        ({"avx2", "fma"}, ("--generator.gpus", "1"), False),
    ],
)
def test_a_cpu_that_cannot_hold_the_kv_cache_in_fp8_is_refused(
    flags: set[str], placement: tuple[str, ...], refused: bool
) -> None:
    gpus = 2 if placement else 0
    machine = replace(Cluster.parse(f"cpus=8 gpus={gpus} memory=64").machines[0], cpu_flags=frozenset(flags))
    for cache in ("auto", "fp8", "fp8_e5m2"):
        found = check(graph("grpo", "--engine.kv-cache-dtype", cache, *placement), Cluster((machine,))).problems
        told = [problem for problem in found if "which vLLM does on GPUs and on CPUs with AVX512 or AMX" in problem]
        assert told == list(found) and bool(told) == (refused and cache != "auto")


def test_this_machine_knows_what_its_cpu_can_do() -> None:
    told = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert told and Cluster.here().machines[0].cpu_flags == {*told[1].split()} != set()


def test_every_card_has_a_capability() -> None:
    assert CAPABILITIES.keys() == CARDS.keys()


@pytest.mark.parametrize(
    ("told", "size", "capability"),
    [("81559, 9.0\n40960, 8.0\n", 40960 << 20, 8.0), ("81559, [N/A]\n", 81559 << 20, 0.0), ("No devices\n", 0, 0.0)],
)
def test_this_machines_gpus_are_as_nvidia_smi_tells(
    told: str, size: int, capability: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{told.encode('unicode_escape').decode()}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (here,) = Cluster.here().machines
    assert (here.gpus, here.gpu_bytes, here.capability) == (2, size, capability)


# The gap


def said(found: Report) -> list[str]:
    return [text for text in (*found.notes, *found.warnings) if "samples in fp8" in text]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ((), "trainer: generator samples in fp8, .* the loss corrects that by tis \\(the default\\)"),
        (("--objective.correction", "icepop"), "the loss corrects that by icepop"),
        (
            ("--objective.correction", "None", "--objective.old", "behavior"),
            "corrects that by its ratio to the behavior policy \\(old='behavior'\\)",
        ),
        (
            ("--objective.correction", "None"),
            "and trainer takes them for the trainer's without a correction; set --objective.correction tis, .*",
        ),
    ],
)
def test_the_plan_says_what_corrects_the_gap(options: tuple[str, ...], end: str) -> None:
    found = asked("grpo", *options)
    (text,) = said(found)
    assert re.search(f"{end}$", text), text
    assert (text in found.warnings) == ("without a correction" in text)
    assert not said(report("cpus=8 memory=64", *options)), "an engine in 16 bits has no such gap"


@pytest.mark.parametrize(
    ("name", "who", "warned"),
    [
        ("ppo", ["actor"], False),
        ("self_play", ["trainer"], False),
        ("iterative_dpo", ["pairs"], True),
        ("raft", [], False),
        ("distill --exact", [], False),
    ],
)
def test_only_those_are_named_to_whom_it_matters_who_has_sampled(name: str, who: list[str], warned: bool) -> None:
    graph, *options = name.split()
    found = asked(graph, *options)
    texts = said(found)
    assert len(texts) == len(who) and all(one in text for one, text in zip(who, texts, strict=True))
    assert bool([text for text in found.warnings if "samples in fp8" in text]) == warned
    if warned:
        assert texts[0].endswith("compare with another reference (--reference.weights initial).")
        assert not said(asked(graph, "--reference.weights", "initial"))


class Fp8Generator(graph_nodes.Generator):
    def facts(self) -> Facts:
        return replace(super().facts(), quantization="fp8")


class UncorrectedTrainer(graph_nodes.Trainer):
    def facts(self) -> Facts:
        return replace(super().facts(), correction="")


@pytest.mark.parametrize(
    ("trained", "imitated", "warned"),
    [
        ("advantage", "best", ["trainer"]),
        ("advantage best", "best", ["trainer"]),
        ("best", "advantage best", ["imitator"]),
        ("advantage", "advantage", ["trainer", "imitator"]),
        ("best", "best", []),
    ],
)
def test_samples_are_data_on_the_paths_through_a_selection_alone(
    trained: str, imitated: str, warned: list[str]
) -> None:
    """Two trainers, each behind one or both of two branches: advantages, and the best of every group as data."""
    g = Graph("two")
    generator, reward = g.add("generator", Fp8Generator()), g.add("reward", graph_nodes.Reward())
    branches = {"advantage": g.add("advantage", graph_nodes.Advantage()), "best": g.add("best", BestOfN(size=4))}
    g.connect(generator.rollouts, reward.rollouts)
    for branch in branches.values():
        g.connect(reward.scored, branch.scored)
    trainers = {name: g.add(name, UncorrectedTrainer()) for name in ("trainer", "imitator")}
    for (name, trainer), behind in zip(trainers.items(), (trained, imitated), strict=True):
        batcher = g.add(f"{name}_batcher", graph_nodes.Batcher())
        g.connect(batcher.batches, trainer.batches, dispatch="gang")
        for branch in behind.split():
            g.connect(branches[branch].groups, batcher.groups)
    g.latest(trainers["trainer"].weights, generator.weights)
    _, found = gap_findings(g)
    assert len(found) == len(warned)
    assert all(f"and {name} takes them" in text for name, text in zip(warned, found, strict=True))


def test_a_loss_of_the_users_corrects_if_it_reads_behavior_logprobs() -> None:
    def loss(inputs: Any) -> Any:
        return inputs

    names = [
        FunctionObjective(loss, columns=columns).correction_name for columns in ("advantages", "behavior_logprobs")
    ]
    assert [*names, FunctionObjective(loss, offline=True).correction_name] == ["", None, None]
    assert PolicyObjective(kind="reinforce", correction=None).correction_name == ""


# Memory


def generator_weights(*options: str) -> int:
    found = report(EIGHT, "--policy", SEVEN, *BF16, "--trainer.replicas", "4", "--evaluate", "0", *options)
    (one,) = (resident for resident in found.residents if resident.replica == "generator/0")
    return sum(term.num_bytes for term in one.footprint.terms if term.name == "weights")


def test_weights_in_fp8_are_a_byte_for_each_element_of_the_layers_matrices() -> None:
    whole, quantized = generator_weights(), generator_weights(*ENGINE)
    hidden, layers, wide, key, vocab = 3584, 28, 18944, 512, 152064
    outputs = hidden + 2 * key + hidden + 2 * wide + hidden
    matrices = layers * (2 * hidden * hidden + 2 * hidden * key + 3 * hidden * wide)
    assert whole - quantized == matrices - 4 * layers * outputs
    assert quantized > 2 * 2 * vocab * hidden and 0.5 < quantized / whole < 0.6
    (cpu,) = (r for r in asked("grpo", "--policy", "smollm2").residents if r.replica == "generator/0")
    weights = next(term.num_bytes for term in cpu.footprint.terms if term.name == "weights")
    assert 0.5 < weights / (2 * SMOLLM2_SHAPE.num_parameters) < 0.65


# The probe


def test_the_first_probe_of_an_fp8_engine_may_differ_more_and_later_ones_are_held_to_it() -> None:
    probes = ProbeCheck("g/0", "bfloat16", quantization="fp8")
    for difference in (0.4, 1.1, 0.2):
        probes.check(*off_by(difference, "bfloat16"))
    with pytest.raises(ProbeMismatch, match=r"first probe differed by 0\.4, which explains up to 1\.2"):
        probes.check(*off_by(1.3, "bfloat16"))
    with pytest.raises(ProbeMismatch, match=r"with weights in fp8, rounding explains up to 2\. .*different models"):
        replace(probes, first=None).check(*off_by(2.5, "bfloat16"))
    small = ProbeCheck("g/0", "bfloat16", quantization="fp8")
    for difference in (0.01, 0.2):
        small.check(*off_by(difference, "bfloat16"))
    with pytest.raises(ProbeMismatch, match=r"with bfloat16, rounding explains up to 0\.25"):
        small.check(*off_by(0.3, "bfloat16"))
    assert replace(small, tolerance=3.0).check(*off_by(2.5, "bfloat16")) == pytest.approx(2.5)
