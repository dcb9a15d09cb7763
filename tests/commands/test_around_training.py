"""Commands around training: what is written, how a second run goes on, merging, exporting, chatting."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flowrl import Cluster, Machine, check
from flowrl.cli import main
from flowrl.commands import export as export_module
from flowrl.commands import merge_adapter as merge_module
from flowrl.commands.model_directories import model_dir
from flowrl.commands.talk import ChatOptions, Talk
from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.models import Chat, Policy, TokenizerOptions
from flowrl.models.model_files import context_length
from flowrl.nodes import GivenResponses, ProcessReward, RemainingPrompts, ResponseWriter
from flowrl.nodes.scoring import reward
from flowrl.nodes.scoring.reward import Comparisons
from flowrl.nodes.writers import Written
from flowrl.options import PolicyOptions
from flowrl.runtime.driver.driver import Outcome
from flowrl.runtime.driver.launch import Launch, Result
from flowrl.tasks import Task, load_demonstrations, load_rows
from flowrl.tasks.row_reading.rows_on_disk import IndexedRows
from flowrl.testing import run_node, scored
from tests.models.word_policy import make_policy

MACHINE = Cluster((Machine(cores=(0, 1, 2, 3), memory_bytes=16 << 30),))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    long = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    rows: list[Any] = [{"prompt": f"{n}+1=", "answer": str(n + 1), "response": f"r{n}"} for n in range(9)]
    rows.append({"prompt": long, "answer": "4", "response": "r"})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Task(str(tmp_path / "rows.jsonl"))


def answers(task: Task, number: int) -> list[Any]:
    """Two answers to each of the first prompts, the second one better."""
    rows = load_rows(task, whole=True)
    return [
        scored(member, float(member), group=row.prompt_id, prompt_id=row.prompt_id, response_text=f"é{member}")
        for row in (*rows.train, *rows.held_out)[:number]
        for member in range(2)
    ]


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["generate", "pairs", "score"])
def test_a_reward_model_scores_where_nothing_is_trained(name: str) -> None:
    file = load_file(name)
    options = ["--reward-model", "a_model", "--reward-model.dtype", "bfloat16", "--of-steps", "mean"]
    scorer = file.build(file.parse([*options, "--step-separator", ";"])).nodes["reward"]
    assert isinstance(scorer, ProcessReward)
    assert (scorer.model, scorer.separator, scorer.of_steps, scorer.dtype) == ("a_model", ";", "mean", "bfloat16")


# Files of responses


def test_every_response_is_written_with_its_prompt_and_reward(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    record = run_node(ResponseWriter(str(out), task, size=2), {"samples": answers(task, 10)})
    lines = written(out)
    assert len(lines) == 20 and [line["reward"] for line in lines[:2]] == [0.0, 1.0]
    assert {line["response"] for line in lines} == {"é0", "é1"}
    assert sum(isinstance(line["prompt"], list) for line in lines) == 2, "the longer conversation"
    assert record.reasons() == [("dropped", "written")] * 20


def test_the_best_of_a_group_alone(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run_node(ResponseWriter(str(out), task, size=2, best=True), {"samples": answers(task, 4)})
    assert [(line["response"], line["member"]) for line in written(out)] == [("é1", 1)] * 4


def test_the_writer_says_how_many_of_how_many_responses_there_are(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run_node(ResponseWriter(str(out), task, size=2), {"samples": answers(task, 4)})
    file = load_file("generate")
    built = file.build(file.parse(["--task", task.name, "--out", str(out), "--group-size", "2"]))
    record = run_node(built.nodes["writer"], {"samples": answers(task, 10)[8:]})
    assert record.progress == [f"12 of 12 responses in {out}"], "without those that the file had"
    best = file.build(file.parse(["--task", task.name, "--out", f"{out}l.jsonl", "--group-size", "2", "--best"]))
    record = run_node(best.nodes["writer"], {"samples": answers(task, 10)})
    assert record.progress == [f"10 of 10 responses in {out}l.jsonl"]


@pytest.mark.parametrize("cut", [1, 10, 70])
def test_a_second_run_goes_on_behind_the_last_whole_group(task: Task, tmp_path: Path, cut: int) -> None:
    out = tmp_path / "out.jsonl"
    run_node(ResponseWriter(str(out), task, size=2), {"samples": answers(task, 4)})
    whole = out.read_bytes()
    out.write_bytes(whole[:-cut])
    assert len(Written.read_file(out, 2).prompt_ids) == 3
    source = RemainingPrompts(task, Policy("tiny"), part="all", repeat=2, out=str(out), per_group=2)
    assert len(run_node(source, name="prompts").groups("prompts")) == 10 - 3
    run_node(ResponseWriter(str(out), task, size=2), {"samples": answers(task, 4)[6:]})
    assert out.read_bytes() == whole


def test_a_file_of_somebody_else_is_not_touched(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text('{"prompt": "1+1="}\n')
    with pytest.raises(ConfigError, match=r"out.jsonl:1 was not written by flowrl"):
        ResponseWriter(str(out), task, size=1).preflight()
    assert out.read_text() == '{"prompt": "1+1="}\n'


def test_a_file_that_has_everything_is_told(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run_node(ResponseWriter(str(out), task, size=2), {"samples": answers(task, 10)})
    source = RemainingPrompts(task, Policy("tiny"), part="all", repeat=2, out=str(out), per_group=2)
    with pytest.raises(ConfigError, match="has all 10 prompts already"):
        source.preflight()


def test_no_row_on_disk_is_read_to_find_those_that_are_left(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, on_disk = tmp_path / "out.jsonl", Task(f"{task.name}:rows=disk")
    run_node(ResponseWriter(str(out), task, size=2), {"samples": answers(task, 4)})
    source = RemainingPrompts(on_disk, Policy("tiny"), part="all", repeat=2, out=str(out), per_group=2)
    source._rows, source._seed = source.rows(), 3
    monkeypatch.setattr(IndexedRows, "__getitem__", None)
    assert len(source._epoch_order(0)) == 6
    monkeypatch.undo()
    read: list[int] = []

    async def no_trial(*args: object) -> None: ...

    monkeypatch.setattr(Comparisons, "_try_comparison", no_trial)
    monkeypatch.setattr(IndexedRows, "__getitem__", lambda rows, index: read.append(index) or rows.read_row(index))
    monkeypatch.setattr(reward, "check_reward", lambda parts, rows: ())
    Comparisons("rules.py:longer", on_disk).preflight()
    assert read == [0], "one row to try the reward on"


def test_a_mixture_goes_on_with_what_its_epoch_lacks(tmp_path: Path) -> None:
    for name, number in (("a", 40), ("b", 8)):
        lines = [json.dumps({"prompt": f"{n}+{name}=", "answer": "1"}) for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    task, out = Task(f"0.5*{tmp_path}/a.jsonl + 0.5*{tmp_path}/b.jsonl"), tmp_path / "out.jsonl"

    def asked() -> list[str]:
        source = RemainingPrompts(task, Policy("tiny"), part="all", epochs=1, out=str(out), per_group=1)
        return [group[0].prompt_id for group in run_node(source, name="prompts").groups("prompts")]

    def write(*ids: str) -> None:
        run_node(
            ResponseWriter(str(out), task, size=1), {"samples": [scored(0, 1.0, group=p, prompt_id=p) for p in ids]}
        )

    ids = asked()
    assert len(ids) == 16, "eight of each"
    write(*ids[:5], *ids[6:])
    assert asked() == [ids[5]]
    write(ids[5])
    with pytest.raises(ConfigError, match="has all prompts of an epoch already; an epoch is a part of the mixture"):
        asked()


def test_responses_of_a_file_become_samples(task: Task) -> None:
    from flowrl.messages import Prompt
    from tests.commands.test_samples import sample

    row = load_demonstrations(task, whole=True).train[0]
    like = sample()
    fields = {name: getattr(like, name) for name in ("sample_id", "group_id", "epoch", "member", "group_size")}
    prompt = Prompt(**fields, prompt_id=row.prompt_id, seed=0, text="1", token_ids=like.token_ids, columns=row.columns)
    record = run_node(GivenResponses(task, Policy("tiny")), {"prompts": [prompt]})
    (found,) = record.sent("rollouts")
    assert found.response_text == row.columns["response"] and "response" not in found.columns
    assert int(found.policy_mask.sum()) == len(found.response_text) + 1, "its characters and its end"


def test_rows_without_a_response_are_told(task: Task) -> None:
    with pytest.raises(
        ConfigError, match=r"10 of 10 rows of '\S+\.jsonl' have no text to be scored in the column 'said'"
    ):
        GivenResponses(Task(f"{task.name}:score=-"), Policy("tiny"), column="said").preflight()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (("generate",), False),
        (("generate", "--score"), True),
        (("generate", "--best", "--group-size", "2"), True),
        (("generate", "--reward-model", "a_model"), False),
        (("generate", "--reward-model", "a_model", "--task.reward", "reward_model + verifier"), True),
        (("generate", "--score", "--task.reward", "{folder}/rules.py:short"), False),
        (("grpo", "--evaluate", "0"), True),
        (("grpo", "--evaluate", "0", "--reward-model", "a_model"), False),
        (("score", "--policy", "tiny", "--reward-model", "a_model"), False),
    ],
)
def test_answers_that_nothing_compares_may_be_of_any_form(
    options: tuple[str, ...], refused: bool, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": ["a", n], "response": "r"} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "rules.py").write_text("def short(prompt, response):\n    return -len(response)\n")
    name, *rest = (option.format(folder=tmp_path) for option in options)
    file = load_file(name)
    out = [] if name == "grpo" else ["--out", str(tmp_path / "out.jsonl")]
    source = file.build(file.parse(["--task", str(tmp_path / "rows.jsonl"), *rest, *out])).nodes["prompts"]
    if refused:
        with pytest.raises(ConfigError, match=r"rows.jsonl:\d+: the answer is .* check=exact compares with a text"):
            source.preflight()
    else:
        source.preflight()


def test_each_file_of_a_mixture_is_scored_whatever_its_column_score_has(tmp_path: Path) -> None:
    file = load_file("score")
    options = ["--task", "0.5*a.jsonl:prompt=q as first + b.jsonl + c.jsonl:score=mark + d.jsonl:min_score=1 + sticks"]
    source = file.build(file.parse(options)).nodes["prompts"]
    assert isinstance(source, RemainingPrompts)
    assert source.task.name == (
        "0.5*a.jsonl:prompt=q,score=- as first + b.jsonl:score=- + c.jsonl:score=mark + d.jsonl:min_score=1 + sticks"
    )


def test_min_score_says_which_responses_are_scored(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}+1=", "response": "r", "score": n / 10} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    file = load_file("score")
    nodes = file.build(file.parse(["--task", f"{tmp_path}/rows.jsonl:min_score=0.5", "--policy", "tiny"])).nodes
    prompts, responses = nodes["prompts"], nodes["responses"]
    assert isinstance(prompts, RemainingPrompts)
    assert len(prompts.rows()) == 5
    responses.preflight()


@pytest.mark.parametrize("task", ["arithmetic", "sticks:most=9", "reasoning_gym/chain_sum"])
def test_a_task_that_makes_its_rows_has_no_responses_to_score(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "score", "--task", task, "--out", str(tmp_path / "out.jsonl"), "--preflight"]) == 2
    said = f"flowrl: {task} makes its rows, which have no responses to be scored; name a file of responses with --task"
    assert capsys.readouterr().err.strip() == said


@pytest.mark.parametrize("command", ["generate", "score", "evaluate"])
def test_a_command_takes_the_run_files_and_the_dry_run_of_flowrl_run(
    command: str, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[Launch] = []
    outcome = Outcome(0, {"before": {"exact_match": 0.5}}, interrupted=False, seconds=1.0)
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch) or Result(tmp_path, outcome, None))
    monkeypatch.setattr("flowrl.runtime.driver.launch.preflight", lambda graph, file: {})
    file, first = str(tmp_path / "run.yaml"), task.name if command == "score" else "tiny_teacher"
    scored = ["--score"] if command == "generate" else []
    own = [*scored, "--reward-timeout-s", "33", "--max-hours", "2"]
    assert main([command, first, *own, "--save-config", file]) == 0
    assert f"graph: {command}" in (tmp_path / "run.yaml").read_text()
    assert main([command, "--config", file]) == 0
    before, after = launched
    assert (before.config, before.options) == (after.config, after.options)
    assert (after.config.reward.reward_timeout_s, after.options.max_hours) == (33.0, 2.0)
    assert first in (after.config.policy.name, after.config.data.task.name)
    capsys.readouterr()
    assert main([command, first, "--dry-run"]) == 0
    assert len(launched) == 2 and capsys.readouterr().out.endswith("nothing was started\n")


@pytest.mark.parametrize("command", ["generate", "score", "evaluate", "chat", "merge", "export", "samples"])
def test_what_a_command_needs_first_is_told(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert f"flowrl {command} needs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate", "pairs"])
def test_answers_that_are_not_trained_on_may_be_truncated(name: str) -> None:
    file = load_file(name)
    graph = file.build(file.parse(["--top-p", "0.9", "--top-k", "5", "--temperature", "0.5"]))
    sampling = graph.nodes["generator"].sampling  # type: ignore[attr-defined]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert check(graph, MACHINE).problems == ()


def test_one_answer_may_be_greedy() -> None:
    file = load_file("generate")
    assert check(file.build(file.parse(["--temperature", "0"])), MACHINE).problems == ()
    for given, said in {
        ("--temperature", "0", "--group-size", "2"): "the samples of a prompt are all equal",
        ("--temperature", "0", "--top-p", "0.5"): "change nothing in greedy answers",
        ("--temperature", "-1"): "it has to be above 0",
    }.items():
        with pytest.raises(ConfigError, match=said):
            file.parse(given)
    for name in ("pairs", "grpo"):
        with pytest.raises(ConfigError, match="the samples of a prompt are all equal"):
            load_file(name).parse(["--temperature", "0"])


def test_the_best_of_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "generate", "--best"]) == 2
    assert "--best chooses among --group-size responses, which is 1" in capsys.readouterr().err


# Models


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy", pad="<pad>")


def test_a_run_stands_for_its_best_or_newest_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        (tmp_path / "checkpoints" / f"step_{step:06}").mkdir(parents=True)
    assert model_dir(tmp_path).name == "step_000010"
    (tmp_path / "best.json").write_text('{"step": 2, "score": 1.0, "checkpoint": "checkpoints/step_000002"}')
    assert model_dir(tmp_path).name == "step_000002"
    with pytest.raises(ConfigError, match="is no model directory"):
        model_dir(tmp_path / "checkpoints")


def test_an_adapter_is_merged_into_its_base(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(policy)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "step" / "adapter")
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = adapted.eval()(ids).logits
    config = tmp_path / "step" / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(policy)}))
    out = tmp_path / "merged"
    leave = tmp_path / ".merged.tmp" / "model.safetensors"  # as a killed command does
    leave.parent.mkdir()
    leave.write_text("half")
    assert main(["merge", str(tmp_path / "step"), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["loading", "merging", "writing", "wrote"]
    assert not leave.parent.exists()
    found = AutoModelForCausalLM.from_pretrained(out).eval()(ids).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, AutoModelForCausalLM.from_pretrained(policy).eval()(ids).logits, atol=1e-3)
    assert (out / "tokenizer.json").is_file()
    assert main(["merge", str(tmp_path / "step"), "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "step"), "--out", str(tmp_path / "other"), "--base", str(tmp_path)]) == 2
    assert "is no model directory here; name it with --base" in capsys.readouterr().err


def adapter(home: Path, base: Path, **described: Any) -> Path:
    """An adapter by its configuration alone: what is wrong with its base is told before its weights are read."""
    home.mkdir()
    (home / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), **described}))
    return home


def test_a_base_with_code_of_its_own_is_refused_until_it_is_trusted(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}))
    command = ["merge", str(adapter(tmp_path / "adapter", policy)), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "add --trust-remote-code" in capsys.readouterr().err
    assert main([*command, "--trust-remote-code"]) == 2
    err = capsys.readouterr().err
    assert f"the base model {policy} cannot be loaded" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_merge_that_fails_while_it_writes_can_be_run_again(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Merged:
        def parameters(self) -> list[Any]:
            return []

        def save_pretrained(self, target: Path) -> None:
            (target / "model.safetensors").write_text("half")
            raise KeyboardInterrupt

    monkeypatch.setattr(merge_module, "_merge_weights", lambda *args, **options: Merged())
    with pytest.raises(KeyboardInterrupt):
        merge_module.write_merged(tmp_path, policy, tmp_path / "out", "auto")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy"]
    monkeypatch.setattr(Merged, "save_pretrained", lambda self, target: None)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "tokenizer_config.json").write_text('{"of": "adapter"}')
    merge_module.write_merged(tmp_path / "adapter", policy, tmp_path / "out", "auto")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"of": "adapter"}


@pytest.mark.parametrize(
    "command", ["chat {}", "check generate --preflight --policy {}", "check grpo --preflight --policy {}"]
)
def test_an_adapter_in_place_of_a_model_is_told_how_to_be_merged(
    command: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = adapter(tmp_path / "adapter", policy)
    assert main(command.format(path).split()) == 2
    said = f"{path} is a PEFT adapter without its base model; put it into the base's weights with `flowrl merge {path} "
    assert said in capsys.readouterr().err


def checkpoint(policy: Path) -> Path:
    """`policy` with what a checkpoint has beside a model."""
    for name in export_module.LEFT_OUT:
        (policy / name).write_text("x")
    (policy / "trainer_state").mkdir()
    (policy / "trainer_state" / "zero.pt").write_text("x")
    (policy / "config.json").chmod(0o600)  # as in a run's directory
    (policy / "adapter").mkdir()
    (policy / "adapter" / "adapter_config.json").write_text("{}")
    return policy


def test_an_export_has_the_model_alone(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    monkeypatch.setattr(export_module, "LARGE_BYTES", (policy / "model.safetensors").stat().st_size)
    assert main(["export", str(checkpoint(policy)), "--name", str(out)]) == 0
    (large,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("copied")]
    assert large.startswith("copied model.safetensors: ") and " of " in large
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "adapter/adapter_config.json"} <= found
    assert not found & {*export_module.LEFT_OUT, "trainer_state/zero.pt"}
    umask = os.umask(0)
    os.umask(umask)
    modes = {file.stat().st_mode & 0o777 for file in out.rglob("*") if file.is_file()}
    assert modes == {0o666 & ~umask}, "a checkpoint is its user's alone, what is exported is for others too"
    assert main(["export", str(policy), "--name", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_an_upload_makes_a_private_repository_and_tells_a_refusal(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import httpx2
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, name: str, **how: Any) -> Any:
            calls.append((name, how))
            if name == "me/closed":
                raise OSError("401 Client Error")
            if name == "me/away":
                raise httpx2.ConnectError("Name or service not known")
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, **how: Any) -> None:
            calls.append(("upload", how))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert main(["export", str(checkpoint(policy)), "--to", "hub", "--name", "me/mine"]) == 0
    (_, made), (_, uploaded) = calls
    assert made == {"private": True, "exist_ok": True} and uploaded["repo_id"] == "me/mine"
    assert "model.safetensors" in uploaded["allow_patterns"] and "ledger.sqlite" not in uploaded["allow_patterns"]
    assert "uploaded to https://huggingface.co/me/mine" in capsys.readouterr().out
    assert main(["export", str(policy), "--to", "hub", "--name", "me/closed"]) == 2
    assert "cannot be uploaded: 401 Client Error; log in with hf auth login" in capsys.readouterr().err
    assert main(["export", str(policy), "--to", "hub", "--name", "me/away"]) == 2
    assert "me/away cannot be uploaded: Name or service not known; the connection failed" in capsys.readouterr().err


@pytest.fixture
def talker(policy: Path) -> Path:
    """A model with a chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{% for m in messages %}w5 {{ m.content }} {% endfor %}w6"
    tokenizer.save_pretrained(policy)
    return policy


def test_a_chat_keeps_the_conversation_until_it_is_reset(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w1\n\nw1\n/reset\nw1\n/exit\nw9\n"))
    assert main(["chat", str(talker), "--temperature", "0", "--max-tokens", "4"]) == 0
    replies = capsys.readouterr().out.splitlines()
    assert len(replies) == 3 and replies[0] == replies[2] and all(reply.startswith("w") for reply in replies)


def test_a_chat_names_a_command_that_there_is_not_and_a_context_that_is_full(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/rest\n{'w1 ' * context_length(talker)}\nw1\n"))
    assert main(["chat", str(talker), "--temperature", "0", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert "there is no /rest; /reset begins anew" in err
    assert "the conversation fills the model's" in err
    assert len(out.splitlines()) == 1, "the line that was too long is no part of the conversation"


def test_a_reply_ends_at_every_end_that_the_model_names(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = replied(talker)
    config = json.loads((talker / "generation_config.json").read_text())
    second = int(said.split()[1].removeprefix("w"))
    (talker / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [second]}))
    shorter = replied(talker)
    assert said.startswith(shorter) and len(shorter.split()) < len(said.split())


def replied(talker: Path, **options: Any) -> str:
    told = ChatOptions(temperature=0, max_tokens=4, **options)
    return "".join(Talk(told.make_policy(str(talker)), told).stream_reply("w1"))


def test_a_chat_has_the_tokenizer_and_template_of_its_options(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    said = replied(talker)
    second = said.split()[1]
    assert said.startswith(shorter := replied(talker, tokenizer=TokenizerOptions(eos=(second,)))) and shorter != said
    template = tmp_path / "own.jinja"
    template.write_text("{{ word }} {{ messages[-1].content }} w6")
    prompts: list[str] = []
    render = Chat.encode_prompt

    def seen(chat: Chat, turns: Any) -> Any:
        prompts.append(render(chat, turns)[0])
        return render(chat, turns)

    monkeypatch.setattr(Chat, "encode_prompt", seen)
    monkeypatch.setattr("sys.stdin", io.StringIO("w1\n"))
    own = ("--chat-template", str(template), "--chat-template-kwargs", "word=w7")
    assert main(["chat", str(talker), "--max-tokens", "4", *own]) == 0
    assert prompts == ["w7 w1 w6"]
    assert main(["chat", str(talker), "--chat-template-kwargs", "enable_thinking=false"]) == 2
    assert f"the chat template of {talker} does not read enable_thinking" in capsys.readouterr().err
    shared = {field.name: field for field in dataclasses.fields(PolicyOptions)}
    for name in ("trust_remote_code", "chat_template", "chat_template_kwargs", "tokenizer"):
        assert shared[name].default == getattr(ChatOptions(), name), "graphs have the same option"


@pytest.mark.timeout(60)
def test_a_model_that_fails_ends_a_chat_in_one_sentence(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("transformers.GenerationMixin.generate", broken)
    monkeypatch.setattr("sys.stdin", io.StringIO("w1\n"))
    assert main(["chat", str(talker)]) == 2
    assert "the model could not answer: out of memory" in capsys.readouterr().err
