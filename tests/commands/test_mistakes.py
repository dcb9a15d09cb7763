"""What a new user gets wrong: each answered by one message and status 2, before Ray is touched."""

from __future__ import annotations

import fcntl
import json
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.models import Policy
from flowrl.nodes import Generator, Sampling
from flowrl.runtime.checkpoints import checkpoint, snapshots
from flowrl.runtime.driver.ray_cluster import RayCluster

ROOT = Path(__file__).parents[2]
GRPO = str(ROOT / "graphs" / "grpo.py")
SMALL = ("--task", "arithmetic:max_value=20", "--evaluate", "1")
"""A task of few rows: reading it takes no time."""


class Told:
    """Runs the command and returns what it told a user who erred."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> str:
        status = main([str(arg) for arg in args])
        out, err = self._capsys.readouterr()
        assert status == 2
        assert out == "", "nothing but the message"
        assert err.startswith("flowrl: ")
        assert "Traceback" not in err
        if "problems:\n" not in err:
            assert err.count("\n") <= 1 + err.count("\n- "), "one message is one line"
        return err


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Told]:
    """The command in an empty directory, on a machine where Ray cannot be started."""

    def refuse(cluster: RayCluster, **options: object) -> None:
        raise AssertionError("the mistake was not found before Ray was started")

    monkeypatch.setattr(RayCluster, "start", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    yield Told(capsys)
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    assert list(tmp_path.glob("runs/*")) == [], "a run that never began leaves no directory"


# Options

WRONG_VALUES = {
    "--staleness -1": "--staleness is -1; it has to be 0 or more",
    "--group-size 0": "--group-size is 0; it has to be 1 or more",
    "--group-size 1": "compares the members of a group, but the group size is 1",
    "--groups-per-step 0": "--groups-per-step is 0; it has to be 1 or more",
    "--look-ahead 0": "--look-ahead is 0; it has to be 1 or more",
    "--optimizer-steps 0": "--optimizer-steps is 0; it has to be 1 or more",
    "--token-budget 100": "a sample can be 544 tokens long",
    "--token-budget 0": "--token-budget is 0; it has to be 1 or more",
    "--generator.gpus 4096": "the graph needs 4097 GPUs",
    "--generator.gpus -1": "--generator.gpus is -1.0; it has to be 0 or more",
    "--generator.cpus 4096": "the graph needs 4097 cores",
    "--generator.cpus 0": "'generator' has cpus=0 and no gpus, but a Generator needs a process of its own",
    "--generator.replicas 0": "--generator.replicas is 0; it has to be 1 or more",
    "--trainer.replicas 0": "--trainer.replicas is 0; it has to be 1 or more",
    "--trainer.sequence-parallel-size 0": "--trainer.sequence-parallel-size is 0; it has to be 1 or more",
    "--trainer.sequence-parallel-size 2": "trainer has 1 rank, which cannot be divided into groups of 2 that share "
    "their micro-batches; give it 2 replicas, or another sequence_parallel_size",
    "--trainer.replicas 3 --trainer.sequence-parallel-size 3": "sequence_parallel_size is 3, but the model has 4 "
    "attention heads, which the ranks have to share equally; choose one of 1, 2, 4",
    "--trainer.replicas 2 --trainer.sequence-parallel-size 2 --zero.attention flex_attention": "sequence_parallel_size "
    "is 2, but attention 'flex_attention' needs a mask over all positions",
    "--trainer.sequence-parallel-kind ring": "sequence_parallel_kind is 'ring', but sequence_parallel_size is 1",
    "--trainer.replicas 3 --trainer.sequence-parallel-size 3 --trainer.sequence-parallel-kind ring --zero.attention "
    "eager": "attention is 'eager', but ring attention has its own kernels; leave it out",
    "--trainer.tensor-parallel-size 0": "--trainer.tensor-parallel-size is 0; it has to be 1 or more",
    "--zero.stage 1 --trainer.tensor-parallel-size 2": "trainer has 1 rank, which cannot be divided into groups of 2 "
    "that share their micro-batches; give it 2 replicas, or another tensor_parallel_size",
    "--trainer.replicas 2 --trainer.tensor-parallel-size 2": "tensor_parallel_size is 2, but ZeRO stage 3 shards every "
    "weight itself; set the stage to 2, 1 or 0",
    "--trainer.replicas 3 --trainer.tensor-parallel-size 3 --zero.stage 1": "tensor_parallel_size is 3, but the model "
    "has 4 attention heads, 4 heads of keys and 256 features in a feed-forward layer, which the ranks "
    "have to share equally; choose one of 1, 2, 4",
    "--zero.deepspeed tensor_parallel.autotp_size=2": "--zero.deepspeed sets 'tensor_parallel', which a run decides "
    "itself; leave it out, and see --trainer.tensor-parallel-size",
    "--reference.token-budget 0": "--reference.token-budget is 0; it has to be 1 or more",
    "--gpus 1": "no option --gpus; did you mean --generator.gpus, --reward_model.gpus or --trainer.gpus?",
    "--time-share generator": "--time-share names only generator; name at least one more node to share its devices",
    "--time-share generator trainr": "--time-share names trainr, which is no node with cores or GPUs of its own; in "
    "this graph these are generator, trainer",
    "--engine.tensor-parallel-size 0": "--engine.tensor-parallel-size is 0; it has to be 1 or more",
    "--engine.gpu-memory-utilization 1.5": "--engine.gpu-memory-utilization is 1.5; it is a share",
    "--engine.gpu-memory-utilization 0.5": "--engine.gpu-memory-utilization is 0.5, but the generator has no GPUs",
    "--engine.quantization mxfp8": "its engine is quantized (mxfp8), and of vLLM's methods only fp8, fp8_per_block, ",
    "--engine.quantization fp8": "but the engine's dtype is float32; add --engine.dtype bfloat16",
    "--engine.quantization fp8_per_tensor --engine.dtype bfloat16": "which vLLM computes on GPUs, but the generator "
    "has none; write fp8, which is fp8_per_channel",
    "--engine.extra quantization_config={}": "by which layers may be quantized in ways that a weight update cannot",
    "--engine.extra max_num_batched_token=1": "not an option of vLLM's engine; did you mean max_num_batched_tokens?",
    "--engine.extra max_num_batched_tokens=many": "vLLM's max_num_batched_tokens needs an integer",
    "--engine.extra max_logprobs": "write NAME=VALUE",
    "--engine.extra model=x": "which flowrl sets itself: the policy decides",
    "--engine.extra kv_cache_memory_bytes=1": "has an option of its own; write --engine.kv-cache-bytes",
    "--lr -1": "--lr is -1.0; it has to be a finite number of at least 0",
    "--lr nan": "--lr is nan; it has to be a finite number of at least 0",
    "--objective foo": "kind is 'foo'; choose one of ppo, gspo, cispo, reinforce, sapo",
    "--objective cispo": "kind='cispo' needs clip_high",
    "--objective.length 3": "length is for aggregation='constant'",
    "--gamma 0.9": "gamma is 0.9; estimator 'group_norm' needs 1",
    "--kl-target 1": "--kl-target: there is no KL in the reward; give --reward-kl-coef too",
    "--reward-kl-coef -1": "kl_coef is -1.0; it has to be 0 or more",
    "--epochs 0": "--epochs is 0; it has to be 1 or more",
    "--objective.kl-coef -1": "kl_coef is -1.0; it has to be 0 or more",
    "--temperature 0": "--temperature is 0.0; it has to be above 0",
    "--max-tokens 0": "--max-tokens is 0; it has to be 1 or more",
    "--evaluate -1": "--evaluate is -1; it has to be 0 or more",
    "--evaluate-samples 0": "--evaluate-samples is 0; it has to be 1 or more",
    "--evaluate-every -1": "--evaluate-every is -1; it has to be 0 or more",
    "--steps 0": "--steps is 0; it needs at least 1",
    "--steps -3": "--steps is -3",
    "--steps many": "--steps is 'many'; it needs an integer, or None",
    "--steps": "--steps has no value",
    "--lr big": "--lr is 'big'; it needs a number",
    "--save-every -1": "--save-every is -1; it has to be 0 or more",
    "--keep -1": "--keep is -1",
    "--seed -1": "--seed is -1",
    "--alarms.kl -1": "--alarms.kl is -1.0; it has to be 0 (silent) or more",
    "--alarms.window 0": "--alarms.window is 0; it needs at least 1 line",
    "--stop.metric evaluation/score --stop.above 0.9": "--stop.metric evaluation/score has values only from",
    "--tracking.name first": "--tracking has no effect without --track",
    "--keep-token-ids --keep-samples off": "--keep-token-ids is for the samples of --keep-samples, which is off",
    "--stop.metric loss --stop.patience 3 --stop.for-values 2": "--stop.for-values is for",
    "--stop.metric loss --stop.below 3 --stop.best lowest": "--stop.best is for --stop.patience",
    "--keep-best --evaluate 0": "--keep-best needs held-out scores, but the graph evaluates nothing",
    "--track foo": "no metrics sink is called 'foo'; there are tensorboard, wandb, trackio",
    "--resume": "--resume needs to know which run",
    "--on-limit never": "--on-limit is 'never'; it needs one of 'wait', 'mask'",
    "--stalness 2": "there is no option --stalness; did you mean --staleness?",
    "-steps 4": "-steps, 4 belongs to no option",
    "stray": "stray belongs to no option",
}


@pytest.mark.parametrize("options", WRONG_VALUES)
def test_options_out_of_range(told: Told, options: str) -> None:
    assert WRONG_VALUES[options] in told("run", GRPO, *options.split())


@pytest.mark.parametrize("option", ["--steps", "--save-every"])
def test_a_graph_without_a_trainer_has_no_steps(told: Told, option: str) -> None:
    graph = ROOT / "graphs" / "pairs.py"
    assert f"{option} counts the batches of a trainer" in told("run", graph, "--pairs", "pairs.jsonl", option, 3)


def test_a_graph_without_a_trainer_has_no_best_checkpoint(told: Told) -> None:
    graph = ROOT / "graphs" / "evaluate.py"
    found = told("run", graph, "--task", "arithmetic:max_value=20", "--keep-best")
    assert "--keep-best chooses among the checkpoints of a trainer, and the graph has none" in found


NUMBERS = """\
from dataclasses import dataclass
from flowrl import Graph
from flowrl.nodes import Generator, GroupAdvantage, PromptSource, Reward, Sampling, TokenBatch, Trainer
from flowrl.models import Policy
from flowrl.tasks import Task


@dataclass(frozen=True)
class Numbers:
    group_size: int = 8
    groups_per_step: int = 4
    max_tokens: int = 32
    staleness: int = 1


def graph(cfg: Numbers) -> Graph:
    task, policy = Task("arithmetic"), Policy("tiny")
    g = Graph("numbers")
    prompts = g.add("prompts", PromptSource(task, policy, repeat=cfg.group_size))
    generator = g.add("generator", Generator(policy, sampling=Sampling(max_tokens=cfg.max_tokens)))
    reward = g.add("reward", Reward(task))
    advantage = g.add("advantage", GroupAdvantage("group_norm", size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step))
    trainer = g.add("trainer", Trainer(policy))
    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=cfg.staleness)
    return g
"""
"""A graph whose options nothing checks before the nodes do."""

UNCHECKED = {
    "--staleness -1": "g.admit has staleness=-1; it needs 0",
    "--group-size 0": "node prompts: repeat is 0; it needs at least 1",
    "--groups-per-step 0": "num_groups is 0; it needs at least 1",
    "--max-tokens 0": "max_tokens is 0; a response needs at least 1 token",
}


@pytest.mark.parametrize("options", UNCHECKED)
def test_a_number_is_complained_of_once_by_each_node(told: Told, tmp_path: Path, options: str) -> None:
    (tmp_path / "unchecked_graph.py").write_text(NUMBERS)
    text = told("run", tmp_path / "unchecked_graph.py", *options.split())
    nodes = [line.split(":")[0] for line in text.splitlines()[1:]]
    assert UNCHECKED[options] in text
    assert len(nodes) == len(set(nodes)) >= 1


@pytest.mark.parametrize("command", ["check", "run", "audit"])
def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert "flowrl run grpo --steps 20" in capsys.readouterr().out


# Graph files

FILES = {
    "x = 1": "is not a graph file: it has no function `graph`",
    "import nothing_of_that_name": "mine.py:1: ModuleNotFoundError",
    "def graph(cfg": "mine.py:1: SyntaxError",
}


@pytest.mark.parametrize("text", FILES)
@pytest.mark.parametrize("command", ["check", "run"])
def test_files_that_are_no_graph(told: Told, tmp_path: Path, command: str, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert FILES[text] in told(command, tmp_path / "mine.py")


def test_files_that_are_not_there(told: Told) -> None:
    assert "did you mean" in told("check", GRPO.replace("grpo", "gropo"))
    assert "is a directory; name a graph file" in told("run", ROOT / "graphs")


EDITS = {
    (
        "reward.scored, advantage.scored",
        "generator.rollouts, advantage.scored",
    ): "generator.rollouts sends Sample but advantage.scored takes Scored",
    ("    g.connect(advantage.groups, batcher.groups)\n", ""): "advantage.groups, an Out[Group] port, is not connected",
    (
        "g.latest(trainer.weights, generator",
        "g.connect(trainer.weights, generator",
    ): "has no latest edge and will fill up and stop; connect it with g.latest(trainer.weights,",
    ("reward.scored, advantage", "reward.score, advantage"): "AttributeError: 'Reward' object has no attribute 'score'",
    ('"reward", Reward', '"trainer", Reward'): "g.add was called twice with the name 'trainer'",
}
"""Edits of `NUMBERS`, which wires its nodes itself."""


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_wrong_wiring(told: Told, tmp_path: Path, old: str, new: str) -> None:
    assert NUMBERS.count(old) == 1
    (tmp_path / "mine.py").write_text(NUMBERS.replace(old, new))
    assert EDITS[old, new] in told("run", tmp_path / "mine.py")


EDITS_OF_GRPO = {
    ("reward, advantage, batcher", "reward, batcher, advantage"): "'TokenBatch' object has no attribute 'scored'",
    ("make_batcher(cfg, estimate)", "make_batcher(cfg, estimates)"): "name 'estimates' is not defined",
    ('"reward", make', '"trainer", make'): "g.add was called twice with the name 'trainer'",
    ("cfg.sampling.group_size", "cfg.group_size"): "'GRPO' object has no attribute 'group_size'",
}


@pytest.mark.parametrize(("old", "new"), EDITS_OF_GRPO)
def test_a_mistake_in_a_copy_of_grpo(told: Told, tmp_path: Path, old: str, new: str) -> None:
    source = Path(GRPO).read_text()
    assert source.count(old) == 1
    (tmp_path / "mine.py").write_text(source.replace(old, new))
    assert EDITS_OF_GRPO[old, new] in told("run", tmp_path / "mine.py")


# Models


def weights(path: Path, *, tensors: int = 0) -> None:
    """A safetensors file of one tensor of `tensors` bytes that are not there."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [tensors], "data_offsets": [0, tensors]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def a_model(path: Path, case: str) -> None:
    """A directory that is a model but for `case`."""
    path.mkdir()
    configs = {"broken": "{broken", "list": "[]", "no type": "{}"}
    if case != "no config":
        (path / "config.json").write_text(configs.get(case, '{"model_type": "llama"}'))
    if case == "pointer":
        (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    elif case == "shard":
        shards = {"weight_map": {"a": "model-1.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(shards))
    elif case != "no weights":
        weights(path / "model.safetensors", tensors=16 if case == "cut off" else 0)


MODELS = {
    "no config": "is no model directory: config.json is missing",
    "broken": "config.json is not valid JSON (Expecting property name",
    "list": "config.json holds a list, but an object was needed",
    "no type": "config.json names no model_type",
    "no weights": "holds no weights (*.safetensors, or else pytorch_model*.bin)",
    "pointer": "model.safetensors is no safetensors file (42 bytes); download the model again",
    "cut off": "model.safetensors is cut off",
    "shard": "lacks model-1.safetensors, which its model.safetensors.index.json names",
}


@pytest.mark.parametrize("case", MODELS)
def test_directories_that_are_no_model(told: Told, tmp_path: Path, case: str) -> None:
    a_model(tmp_path / "model", case)
    assert MODELS[case] in told("run", GRPO, *SMALL, "--policy", tmp_path / "model")


NOT_THERE = {
    "/nowhere/model": "there is no model '/nowhere/model': it is neither tiny, tiny_teacher, tiny_agent nor smollm2",
    "Qwen/Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B is not on this machine, and the connection to http://127.0.0.1:9 was lost",
}


@pytest.mark.parametrize("name", NOT_THERE)
def test_models_that_are_not_there(told: Told, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert NOT_THERE[name] in told("run", GRPO, *SMALL, "--policy", name)


def test_everything_wrong_with_model_and_task_is_said_at_once(told: Told) -> None:
    text = told("run", GRPO, "--policy", "/nowhere", "--task", "nothing")
    assert text.splitlines()[0] == "flowrl: the run cannot start, 2 problems:"
    assert "there is no model" in text
    assert "there is no task" in text


# Tasks

TASKS = {
    "aritmetic": "there is no task 'aritmetic': it is neither arithmetic, nor",
    "arithmetic:max_val=3": "has no option 'max_val'; it has max_value, operators, seed",
    "arithmetic:max_value=x": "option max_value is 'x' and needs int",
    "reasoning_gym/chain_sums": "reasoning_gym has no task 'chain_sums' among its",
    "reasoning_gym/chain_sum:max_trms=3": "reasoning_gym refuses these options",
    "missing.jsonl": "missing.jsonl does not exist; correct the path",
    "": "names no source",
}


@pytest.mark.parametrize("task", TASKS)
def test_tasks_that_are_none(told: Told, task: str) -> None:
    if task.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    assert TASKS[task] in told("run", GRPO, "--task", task)


ROWS = {
    '{"prompt": "1+1=", "answer": "2"}\n{"prompt": broken\n': "rows.jsonl:2: invalid JSON",
    '{"question": "1+1=", "answer": "2"}\n': "no column 'prompt'; set prompt= to one of question, answer",
    '["1+1="]\n': "rows.jsonl:1: a list where an object was needed",
    '{"prompt": ""}\n': "rows.jsonl:1: the prompt is ''",
    "": "has no rows at all",
}


@pytest.mark.parametrize("text", ROWS)
def test_rows_that_cannot_be_read(told: Told, tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    assert ROWS[text] in told("run", GRPO, "--task", tmp_path / "rows.jsonl")


def test_a_row_without_answer(told: Told, tmp_path: Path) -> None:
    rows: list[dict[str, str]] = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(64)]
    del rows[40]["answer"]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = told("run", GRPO, "--task", tmp_path / "rows.jsonl", "--evaluate", 1)
    assert "rows.jsonl:41: the row has no answer to compare responses with (it has the prompt alone)" in text


def test_a_held_out_split_larger_than_the_data(told: Told) -> None:
    text = told("run", GRPO, "--task", "arithmetic:max_value=9")
    assert "held-out rows (one row in 8 is held out), but 512 are to be evaluated; ask for at most" in text


# Rewards

REWARDS = {
    "def f(prompts, responses): raise ValueError('boom')": "rewards.py:f raised ValueError: boom",
    "def f(prompts, responses): return 'great'": "returned rewards = 'great'; it needs a list of 1 number(s)",
    "def f(prompts, responses): return ['good'] * len(prompts)": "returned rewards with 'good'; it needs numbers",
    "def f(prompts, responses): return [1.0, 2.0, 3.0]": "returned 3 rewards for 1 response(s)",
    "def f(prompts, responses): return [float('nan')]": "returned rewards with nan; it needs finite numbers",
    "def f(prompt, response): return None": "returned rewards with None; it needs numbers",
    "def f(a, b): return [1.0]": "begins with the parameters (a, b); it needs (prompts, responses)",
    "def f(prompts, responses, level): return [1.0]": "needs the column level, but the task's rows have answer",
    "def f(prompts, responses): exit(4)": "ended its process (status 4)",
    "def g(prompts, responses): return [1.0]": "has no function 'f'; it has g",
    "import sys; sys.exit(0)": "rewards.py calls sys.exit(0) while it is imported",
    "import nothing_of_that_name": "does not import: ModuleNotFoundError: No module named 'nothing_of_that_name'",
    "def f(:": "does not import: SyntaxError",
}


@pytest.mark.parametrize("source", REWARDS)
def test_rewards_that_cannot_work(told: Told, tmp_path: Path, source: str) -> None:
    (tmp_path / "rewards.py").write_text(source)
    assert REWARDS[source] in told("run", GRPO, *SMALL, "--task.reward", tmp_path / "rewards.py:f")


def test_a_reward_server_that_is_not_there(told: Told, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}/score"
    text = told("run", GRPO, *SMALL, "--task.reward", f"verifier + 0.5*{url}")
    assert f"the trial reward failed: {url} cannot be reached" in text
    assert "start the server, or fix its answer" in text


SERVING = {
    "": "needs a reward model's directory or FILE.py:FUNCTION first",
    "nowhere": "'nowhere' is neither a directory of a reward model, nor a name on the Hub, nor a function",
    "nowhere.py": "the reward's file nowhere.py does not exist",
    "nowhere.py:f": "the reward's file nowhere.py does not exist",
    "nowhere.py:f --port 99999": "--port is 99999; it has to be in 0 to 65535",
    "nowhere.py:f --prt 1": "there is no option --prt; did you mean --port?",
}


@pytest.mark.parametrize("args", SERVING)
def test_what_cannot_be_served(told: Told, args: str) -> None:
    assert SERVING[args] in told("serve-reward", *args.split())


def test_rewards_that_are_not_there(told: Told) -> None:
    assert "the reward's file rewards.py does not exist" in told("run", GRPO, *SMALL, "--task.reward", "rewards.py")
    assert "the reward's file rewards.py does not exist" in told("run", GRPO, *SMALL, "--task.reward", "rewards.py:f")
    assert "'no_package.rewards' does not import" in told("run", GRPO, *SMALL, "--task.reward", "no_package.rewards:f")


# Run directories


def test_a_run_directory_in_use(told: Told, tmp_path: Path) -> None:
    (tmp_path / "busy").mkdir()
    with open(tmp_path / "busy" / ".lock", "w") as lock:
        lock.write("12345")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = told("run", GRPO, "--run-dir", tmp_path / "busy")
    assert "busy is in use by the run of process 12345; wait for it to end, or name another" in text


def test_a_run_directory_that_cannot_be_one(told: Told, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written: " in told("run", GRPO, "--run-dir", tmp_path / "file")
    assert "cannot be written" in told("run", GRPO, "--run-dir", "/proc/run")
    (tmp_path / "ledger.sqlite").touch()
    assert "holds a finished or interrupted run; continue it with" in told("run", GRPO, "--run-dir", tmp_path)


def a_finished_run(path: Path, *, step: int) -> None:
    """What `--resume` looks at."""
    directory = path / "checkpoints" / f"step_{step:06d}"
    directory.mkdir(parents=True)
    edge = {"name": "prompts.prompts -> other.prompts", "kind": "queue", "dispatch": "share"}
    snapshots.write_state(directory, snapshots.Snapshot(), {"seed": 0, "versions": {}, "graph": {"edges": [edge]}})
    checkpoint.write_manifest(directory, {"step": step}, threading.Event())
    (path / "config.json").write_text("{}")


def test_resume_of_what_cannot_go_on(told: Told, tmp_path: Path) -> None:
    assert "nowhere holds no run (no config.json there)" in told("run", GRPO, "--run-dir", "nowhere", "--resume")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_text("{}")
    assert "early has no finished checkpoint yet" in told("run", GRPO, "--run-dir", "early", "--resume")
    a_finished_run(tmp_path / "done", step=20)
    resume = ("run", GRPO, "--run-dir", "done", "--resume")
    assert "checkpoint is of step 20 and --steps is 10" in told(*resume, "--steps", 10)
    assert "is of another graph" in told(*resume, "--steps", 30)


def test_a_mistake_leaves_a_named_run_directory_as_it_was(told: Told, tmp_path: Path) -> None:
    told("run", GRPO, "--run-dir", "new", "--task", "nothing")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    told("run", GRPO, "--run-dir", "mine", "--task", "nothing")
    assert (tmp_path / "mine" / "notes.txt").exists()


# Audits


def test_audits_of_what_is_no_run(told: Told, tmp_path: Path) -> None:
    assert "there is no run directory nowhere" in told("audit", "nowhere")
    assert "holds no run; name a directory in which `flowrl run` has run" in told("audit", tmp_path)
    (tmp_path / "graph.json").write_text('{"tickets": 4, "max_staleness": 1}')
    assert "holds no ledger.sqlite" in told("audit", tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 1000)
    assert "ledger.sqlite is no ledger of flowrl: file is not a database" in told("audit", tmp_path)


# Machines


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_a_cluster_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, closed_port: int, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for address, text in (
        (f"127.0.0.1:{closed_port}", "no Ray cluster answers there"),
        ("ray://localhost:10001", "is no address of a cluster's head node; write HOST:6379"),
        ("localhost", "is no address of a cluster's head node; write HOST:6379"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert f"RAY_ADDRESS={address}" in (said := Told(capsys)("run", GRPO))
        assert text in said


def test_vllm_of_another_version(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.nodes.generation.vllm_processes.version", lambda package: "0.9.2")
    assert "vllm 0.9.2 is installed; flowrl's generator is built on vLLM 0.32.x" in told("run", GRPO, *SMALL)


def test_no_vllm(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("flowrl.nodes.generation.vllm_processes.version", version)
    assert "vLLM is not installed, and the generator needs it; pip install" in told("run", GRPO, *SMALL)


def test_an_answer_that_leaves_no_place_for_a_prompt(told: Told) -> None:
    says = "max_tokens is 5000, but the context of tiny has 2048 tokens"
    for graph in ("agent_game", "grpo", "agent_tools"):
        assert says in told("check", graph, "--policy", "tiny", "--max-tokens", "5000")
    engine = ("--engine.max-model-len", "300", "--max-tokens", "300")
    assert "but --engine.max-model-len has 300 tokens" in told("check", "agent_game", *engine)


def test_a_config_without_the_length_of_its_context_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 1024}', encoding="utf-8")
    generator = Generator(Policy(str(tmp_path)), sampling=Sampling(max_tokens=5000))
    assert not [problem for problem in generator.check(None) if "max_tokens" in problem]


def test_a_host_that_is_not_known(told: Told) -> None:
    said = told("check", "agent_openai", "--host", "no.such.host.invalid")
    assert "host is 'no.such.host.invalid', which is no address and no name that is known here" in said
    assert "take 127.0.0.1" in said
