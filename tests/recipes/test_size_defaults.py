"""Defaults by the size of the model: read from its files, replaced where flowrl declares them, and nowhere else."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowrl.cli import CheckOptions, main
from flowrl.commands import prepare as preparing
from flowrl.commands.prepare import Prepared, prepare_graph
from flowrl.graph.load import shipped_names
from flowrl.graph.option_types import has_option, value_of
from flowrl.machine.cpu import describe_cpu, is_slow_in_bfloat16
from flowrl.models import Policy
from flowrl.models.model_size import TABLE, ModelSize, model_size, row_for
from flowrl.options import OnlineConfig, SamplingOptions, TrainerOptions
from flowrl.options.size_defaults import BY_SIZE, ENGINE_DTYPE, SLOW, TOKEN_BUDGET, size_defaults
from flowrl.runtime.driver.job import RunOptions

ROOT = Path(__file__).parents[2]


def a_model(place: Path, parameters: int, context: int = 32768) -> Path:
    """A directory whose weights have that many parameters by their header; there are no values."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": context}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [parameters // 10, 10], "data_offsets": [0, 0]}}).encode()
    (place / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return place


def checked(*args: object) -> Prepared:
    return prepare_graph("check", (CheckOptions,), [str(arg) for arg in args])


def run(*args: str) -> Prepared:
    return prepare_graph("run", (RunOptions,), ["grpo", *args])


def origin(prepared: Prepared, name: str) -> tuple[Any, str]:
    return prepared.origins[name]


@pytest.fixture(autouse=True)
def fast_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the CPU of this machine is."""
    monkeypatch.setattr(preparing, "is_slow_in_bfloat16", lambda: False)


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        ("flags\t\t: fpu sse4_2 avx avx2 fma", True),
        ("flags\t\t: fpu avx2 avx512f avx512dq avx512bw avx512vl", False),
        ("flags\t\t: fpu avx2 avx512f avx512dq avx512bw", True),
        ("Features\t: fp asimd bf16 i8mm", False),
        ("Features\t: fp asimd", True),
        ("model name\t: of a kind that lists no flags", False),
    ],
)
def test_the_kernel_tells_what_a_cpu_multiplies_fast(line: str, slow: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert is_slow_in_bfloat16(tmp_path / "cpuinfo") is slow
    assert not is_slow_in_bfloat16(tmp_path / "none")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("model name\t: AMD EPYC 7B13\nflags\t\t: avx2 fma\n", "AMD EPYC 7B13 without AVX512"),
        ("model name\t: X\nflags\t\t: avx2 avx512f amx_bf16\n", "X with AVX512 and AMX"),
        ("Features\t: fp asimd bf16\n", "CPU with bf16"),
        ("", "CPU"),
    ],
)
def test_a_cpu_is_described_by_what_makes_it_fast(lines: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(lines)
    assert describe_cpu(tmp_path / "cpuinfo") == told


def test_a_cpu_that_is_slow_in_bfloat16_trains_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "is_slow_in_bfloat16", lambda: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ["--policy", a_model(tmp_path / "m", 135_000_000)]
    size = "135 million parameters"
    why = f"default for {size} on a CPU that is slow in bfloat16"
    assert origin(checked("grpo", *options), "dtype") == ("float32", why)
    assert origin(checked("grpo", *options), "lr") == (5e-6, f"default for {size}")
    assert origin(checked("grpo", *options, "--dtype", "bfloat16"), "dtype") == ("bfloat16", "given")
    assert origin(checked("grpo", *options, "--cluster", "1 x 8 x H100"), "dtype")[0] == "bfloat16"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert origin(checked("grpo", *options), "dtype")[0] == "bfloat16"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ADDRESS", "host:6379")
    assert origin(checked("grpo", *options), "dtype")[0] == "bfloat16"


SAMPLED_AS_TRAINED = "the trainer's, on a CPU"


@pytest.mark.parametrize(
    ("graph", "given", "slow", "sampled"),
    [
        ("grpo", (), False, ("bfloat16", SAMPLED_AS_TRAINED)),
        ("grpo", (), True, ("float32", SAMPLED_AS_TRAINED)),
        ("grpo", ("--dtype", "float32"), False, ("float32", SAMPLED_AS_TRAINED)),
        ("grpo", ("--dtype=float32",), True, ("float32", SAMPLED_AS_TRAINED)),
        ("grpo", ("--dtype", "bfloat16"), True, ("float32", SLOW)),
        ("grpo", ("--zero.stage", "0"), False, ("float32", SAMPLED_AS_TRAINED)),
        ("sft", ("--dtype", "float32", "--evaluate", "8"), False, ("float32", SAMPLED_AS_TRAINED)),
        ("grpo", ("--engine.dtype", "float16"), True, ("float16", "given")),
        ("evaluate", (), True, ("float32", SLOW)),
        ("evaluate", (), False, ("auto", "what the model is stored in")),
        ("sft", ("--dtype", "float32"), False, ("auto", "what the model is stored in")),
        ("generate", ("--engine.quantization", "gptq"), True, ("auto", "what the model is stored in")),
        ("grpo", ("--cluster", "1 x 8 x H100"), True, ("auto", "what the model is stored in")),
    ],
)
def test_on_a_cpu_the_engine_samples_in_what_is_trained_and_fast(
    graph: str,
    given: tuple[str, ...],
    slow: bool,
    sampled: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own choice, the type that the model is stored in, is ten times slower on a CPU without AVX512."""
    monkeypatch.setattr(preparing, "is_slow_in_bfloat16", lambda: slow)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model = a_model(tmp_path / "m", 135_000_000)
    prepared = checked(graph, "--policy", model, "--task", "train.jsonl", *given)
    assert origin(prepared, ENGINE_DTYPE) == sampled
    assert prepared.cfg.generator.engine.dtype == sampled[0]
    if "--dtype" in given:
        assert origin(prepared, "dtype") == (given[1], "given")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    on_gpus = checked(graph, "--policy", model, "--task", "train.jsonl", *given)
    assert on_gpus.cfg.generator.engine.dtype == (sampled[0] if sampled[1] == "given" else "auto"), (
        "nothing changes on GPUs"
    )


def test_the_types_of_trainer_and_engine_are_told_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparing, "is_slow_in_bfloat16", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["check", "grpo", "--policy", str(a_model(tmp_path / "m", 135_000_000)), "--dtype", "bfloat16"]) == 0
    told = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(told) if line.startswith("  dtype "))
    assert [line.split(maxsplit=2) for line in told[at : at + 2]] == [
        ["dtype", "bfloat16", "given"],
        ["engine.dtype", "float32", SLOW],
    ]


def test_a_resumed_run_keeps_its_dtype_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run_dir = str(a_model(tmp_path / "m", 135_000_000)), tmp_path / "run"
    run_dir.mkdir()
    where = ("--policy", model, "--run-dir", str(run_dir))
    for slow, kept in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(preparing, "is_slow_in_bfloat16", lambda slow=slow: slow)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        (run_dir / "config.json").write_text(json.dumps({"config": {"dtype": kept, "engine": {"dtype": kept}}}))
        resumed = run(*where, "--resume")
        assert origin(resumed, "dtype") == origin(resumed, ENGINE_DTYPE) == (kept, "of the run that is resumed")
        assert origin(run(*where), "dtype")[0] != kept
        other = "float32" if kept == "bfloat16" else "bfloat16"
        assert origin(run(*where, "--resume", "--dtype", other), "dtype") == (other, "given")
    (run_dir / "config.json").write_text("{")
    assert origin(run(*where, "--resume"), "dtype")[0] == "float32"


def test_a_saved_run_file_leaves_the_machine_its_own_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "is_slow_in_bfloat16", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = a_model(tmp_path / "m", 135_000_000)
    lasting = checked("grpo", "--policy", model).lasting_options()
    assert "dtype" not in lasting and "dtype" not in lasting["engine"] and "concurrency" in lasting["engine"]
    assert checked("grpo", "--policy", model, "--dtype", "float32").lasting_options()["dtype"] == "float32"
    assert checked("grpo").lasting_options()["dtype"] == "float32", "tiny's own"


def test_a_micro_batch_on_a_cpu_is_as_small_as_the_longest_sample_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on GPUs it stays large. A run that is resumed keeps its own, and a run file leaves it to the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model, run_dir = str(a_model(tmp_path / "m", 135_000_000)), tmp_path / "run"
    why = f"default for {model_size(Policy(model))}"
    chosen = checked("grpo", "--policy", model, "--max-tokens", "24")
    assert origin(chosen, TOKEN_BUDGET) == (24 + 1024, f"{why} on a CPU")
    assert TOKEN_BUDGET not in chosen.lasting_options()
    assert checked("grpo", "--policy", model, "--token-budget", "500").lasting_options()[TOKEN_BUDGET] == 500
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"config": {TOKEN_BUDGET: 8192}}))
    where = ("--policy", model, "--run-dir", str(run_dir))
    assert origin(run(*where, "--resume"), TOKEN_BUDGET) == (8192, "of the run that is resumed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert origin(checked("grpo", "--policy", model), TOKEN_BUDGET) == (8192, why)


def test_a_size_is_counted_or_told_by_the_name(tmp_path: Path) -> None:
    assert model_size(Policy(str(a_model(tmp_path / "m", 8_000_000_000)))) == ModelSize(8_000_000_000)
    assert model_size(Policy("acme/Some-0.6B-it")) == ModelSize(600_000_000, "by its name")
    assert model_size(Policy("acme/SmolLM2-135M-Instruct")).parameters == 135_000_000
    assert model_size(Policy("acme/v2-base")) == ModelSize(None)
    assert str(ModelSize(8_190_000_000)) == "8.19 billion parameters"
    assert str(ModelSize(600_000_000, "by its name")) == "600 million parameters (by its name)"
    assert row_for(0.5e9) is TABLE[0] and row_for(0.6e9) is TABLE[1] and row_for(None) is TABLE[2]


def test_tiny_keeps_what_the_graphs_declare() -> None:
    prepared = checked("grpo")
    assert (prepared.cfg.trainer.lr, prepared.cfg.sampling.max_tokens, prepared.cfg.trainer.dtype) == (
        1e-4,
        32,
        "float32",
    )
    assert origin(prepared, "lr") == (1e-4, "tiny's own")


def test_the_line_of_the_readme_runs_sensibly(tmp_path: Path) -> None:
    """Its model of eight billion parameters, with nothing said but where it is."""
    model = a_model(tmp_path / "Qwen3-8B", 8_190_000_000)
    cfg = checked("grpo", "--policy", model, "--task", "train.jsonl", "--cluster", "1 x 8 x H100").cfg
    assert (cfg.trainer.lr, cfg.trainer.dtype, cfg.sampling.max_tokens, cfg.data.max_prompt_tokens) == (
        1e-6,
        "bfloat16",
        2048,
        2048,
    )
    assert (cfg.sampling.group_size, cfg.steps.groups_per_step, cfg.evaluation.evaluate, cfg.trainer.token_budget) == (
        8,
        64,
        256,
        8192,
    )


def test_what_is_given_wins_and_others_follow_it(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m", 8_000_000_000)
    options = ["--policy", model, "--max_tokens=7000", "--lora.rank", "16", "--dtype", "float32"]
    prepared = checked("grpo", *options)
    cfg = prepared.cfg
    assert (cfg.sampling.max_tokens, cfg.trainer.dtype, cfg.trainer.token_budget) == (7000, "float32", 7000 + 2048)
    assert cfg.trainer.lr == pytest.approx(1e-5), "ten times that of all weights, for an adapter"
    assert origin(prepared, "max_tokens") == (7000, "given")
    assert origin(prepared, "lr")[1] == "default for 8 billion parameters"
    assert checked("grpo", "--policy", model, "--zero.stage", 0).cfg.trainer.dtype == "float32"


def test_a_run_file_gives_too(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m", 1_000_000_000)
    (tmp_path / "run.yaml").write_text(f"graph: grpo\npolicy: {model}\nlr: 3.0e-4\n")
    prepared = checked("--config", tmp_path / "run.yaml")
    assert prepared.cfg.trainer.lr == 3e-4 and origin(prepared, "lr")[1] == "given"
    assert prepared.cfg.sampling.max_tokens == 1024


def test_lengths_fit_the_context(tmp_path: Path) -> None:
    cfg = checked("grpo", "--policy", a_model(tmp_path / "m", 1_000_000_000, context=1024)).cfg
    assert (cfg.data.max_prompt_tokens, cfg.sampling.max_tokens) == (384, 384)
    episodes = checked("agent_game", "--policy", tmp_path / "m").cfg
    assert (episodes.episodes.limits.tokens, episodes.sampling.max_tokens) == (1024, 384)


@pytest.mark.parametrize("graph", shipped_names())
def test_every_graph_takes_the_defaults_of_a_model(graph: str, tmp_path: Path) -> None:
    """All options of the table that the graph has are set by it, or kept at 0 where that means none."""
    prepared = checked(graph, "--policy", a_model(tmp_path / "m", 8_000_000_000), "--task", "train.jsonl")
    found = {name: why for name, (_, why) in prepared.origins.items() if name != ENGINE_DTYPE}
    kept = {name for name, why in found.items() if not why.startswith("default for 8 billion")}
    assert kept <= {"evaluate", "token_budget", "group_size", "overlong_buffer", "answer_tokens"}
    assert ("answer_tokens" in kept) is (graph == "sft"), "nothing is answered unless it evaluates"
    assert bool(prepared.origins) is (graph != "score")
    if has_option(prepared.cfg, "max_tokens"):
        assert value_of(prepared.cfg, "max_tokens") >= 512
    if has_option(prepared.cfg, "overlong_buffer"):  # of these graphs DAPO alone has one by itself
        longest = value_of(prepared.cfg, "max_tokens")
        assert value_of(prepared.cfg, "overlong_buffer") == (longest // 8 if graph == "dapo" else 0)
    learnt = {"sft": 1e-5, "dpo": 5e-7, "kto": 5e-7, "reward_model": 1e-5, "process_reward_model": 1e-5}
    if has_option(prepared.cfg, "lr"):
        assert prepared.cfg.trainer.lr == learnt.get(graph, 1e-6)


def test_the_table_names_options_that_some_graph_has(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m", 8_000_000_000)
    prepared = [checked(graph, "--policy", model, "--task", "train.jsonl") for graph in shipped_names()]
    assert {*BY_SIZE, ENGINE_DTYPE} == {name for one in prepared for name in one.origins}
    found = [size_defaults(type(one.cfg), {"policy": str(model), "evaluate_task": "a.jsonl"}) for one in prepared]
    assert {*BY_SIZE} == {name for one in found for name in one.values}


@pytest.mark.parametrize(
    ("given", "length"),
    [
        (("sft", "--evaluate", 0), "answer_tokens"),
        (("dpo", "--evaluate", 0), "max_tokens"),
        (("kto", "--evaluate", 0), "max_tokens"),
        (("distill", "--evaluate", 0, "--lmbda", 0, "--beta", 0), "max_tokens"),
    ],
)
def test_nothing_has_the_length_of_an_answer_where_none_is_given(
    given: tuple[str, ...], length: str, tmp_path: Path
) -> None:
    """A default by size would be refused, as what a user sets is, for nothing uses it."""
    where = ("--policy", a_model(tmp_path / "m", 8_000_000_000), "--task", "train.jsonl")
    assert not origin(checked(*given, *where), length)[1].startswith("default for")
    asking = [8 if one == 0 else one for one in given[:3]]
    assert origin(checked(*asking, *given[3:], *where), length)[1].startswith("default for")


def test_a_teacher_has_the_type_of_the_trainer(tmp_path: Path) -> None:
    model = a_model(tmp_path / "m", 8_000_000_000)
    types = []
    for given in ((), ("--policy", model), ("--policy", model, "--teacher.dtype", "float32")):
        cfg = checked("distill", *given).cfg
        types.append((cfg.trainer.dtype, cfg.trainer.scoring(cfg.teacher)["dtype"]))
    assert types == [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


@dataclass(frozen=True)
class Own(OnlineConfig):
    trainer: TrainerOptions = TrainerOptions(lr=7e-7)


@dataclass(frozen=True)
class Short(SamplingOptions):
    """A part of one's own."""

    max_tokens: int = 32


@dataclass(frozen=True)
class Shorter(OnlineConfig):
    sampling: Short = Short()


def test_a_default_of_ones_own_graph_is_kept() -> None:
    values = size_defaults(Own, {"policy": "acme/x-8B"}).values
    assert "lr" not in values and values["dtype"] == "bfloat16"
    assert size_defaults(Own, {}).values == {}
    values = size_defaults(Shorter, {"policy": "acme/x-8B"}).values
    assert "max_tokens" not in values and values["group_size"] == 8, "declared in a part of one's own"


def test_the_documented_table_is_the_one_that_is_used() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [re.findall(r"[\d.]+e-\d+|\d+", line) for line in text.splitlines() if re.match(r"\| (up to|above) ", line)]
    numbers = [[float(number) for number in row[-7:]] for row in rows]
    assert numbers == [
        [row.samples, row.rows, row.preferences, row.rewards, row.response, row.prompt, row.groups] for row in TABLE
    ]


QWEN2_HALF_BILLION = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("named", ["model", "model/config.json"])
def test_a_config_alone_gives_size_context_and_layout(tmp_path: Path, named: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN2_HALF_BILLION))
    found = checked("grpo", "--policy", tmp_path / named, "--cluster", "1 x 8 x H100")
    why = "default for 494 million parameters (by its config.json)"
    assert origin(found, "lr") == (5e-6, why) and origin(found, "groups_per_step") == (32, why)
    assert origin(found, "max_tokens")[0] + origin(found, "max_prompt_tokens")[0] <= 1024, "they fit into the context"
    notes = " ".join(note for node in found.graph.nodes.values() for note in node.notes())
    assert "cannot be read" not in notes
