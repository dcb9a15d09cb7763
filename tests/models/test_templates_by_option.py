"""Templates that a user chooses: of a task's questions, and of the model's conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy, check_model, known_tokenizer
from flowrl.models.tokens.chat import Chat
from flowrl.nodes import PromptSource
from flowrl.tasks import Task, load_demonstrations, load_preferences, load_rows
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.testing import run_node

ASK = [{"role": "user", "content": "1+1"}]


def prompts(task: Task) -> list[str]:
    found = load_rows(task, whole=True)
    return sorted(row.prompt for row in (*found.train, *found.held_out))


def file_of(path: Path, **columns: object) -> str:
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": "a", **columns}) + "\n" for n in range(20)))
    return str(path)


def test_a_question_is_asked_as_the_task_says(tmp_path: Path) -> None:
    file = file_of(tmp_path / "rows.jsonl", context="c")
    asked = prompts(Task(file, template="Read {context}. {prompt}? Box it: \\boxed{} {answer}"))
    assert asked[0] == "Read c. q0? Box it: \\boxed{} {answer}", "other braces stay, and no answer is told"
    assert prompts(Task(file, template="Q: {}\nA:"))[0] == "Q: q0\nA:"
    assert prompts(Task(file, template="Read {context}. {}? \\boxed{}"))[0] == "Read c. q0? \\boxed{}"
    assert load_demonstrations(Task(file, template="Q: {}"), whole=True).train[0].prompt.startswith("Q: q")
    likewise = EvaluationSet.parse(file, like=Task("arithmetic", template="Q: {}"), samples=1)
    assert prompts(likewise.task)[0] == "Q: q0"
    with pytest.raises(ConfigError, match=r"has no place for the prompt; write \{prompt\} where it goes"):
        Task(file, template="Solve it")


def test_pairs_and_generated_tasks_have_the_template_too(tmp_path: Path) -> None:
    file = file_of(tmp_path / "rows.jsonl", chosen="x", rejected="y")
    assert load_preferences(Task(file, template="Q: {}"), "pairs").train[0].prompt.startswith("Q: q")
    assert prompts(Task("arithmetic:max_value=3", template="Add {prompt}"))[0].startswith("Add ")


def rendered(**options: str) -> str:
    policy = Policy("tiny", **options)  # type: ignore[arg-type]
    return Chat(known_tokenizer(policy)).encode_prompt(ASK)[0]


def test_the_chat_template_is_a_file_or_none(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}>")
    assert rendered() == "<|user|>1+1<|end|><|assistant|>"
    assert rendered(chat_template=str(file)) == "[1+1]>"
    assert rendered(chat_template="none") == "1+1"
    with pytest.raises(ConfigError, match=r"the chat template .*gone\.jinja cannot be read"):
        check_model(Policy("tiny", chat_template=str(tmp_path / "gone.jinja")))


def test_values_of_the_templates_variables_are_set(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{%- macro said(m) %}{{ m }}{{ '!' if shout }}{% endmacro %}{{ said(messages[0]['content']) }}{{ day }}"
    )
    own = {"chat_template": str(file)}
    assert rendered(**own) == "1+1"
    assert rendered(**own, chat_template_kwargs="shout=true,day='Mo, \"12\"'") == '1+1!Mo, "12"'
    assert rendered(**own, chat_template_kwargs="shout=False,day=3") == "1+13"
    for values, text in {
        "thinking=true": "does not read thinking",
        "shout": "is no option",
        "day=[1]": "it needs text, a number",
    }.items():
        with pytest.raises(ConfigError, match=text):
            rendered(**own, chat_template_kwargs=values)
    with pytest.raises(ConfigError, match="does not read thinking"):
        check_model(Policy("tiny", **own, chat_template_kwargs="thinking=true"))
    with pytest.raises(ConfigError, match="sets values of a chat template, and tiny has none"):
        rendered(chat_template="none", chat_template_kwargs="shout=true")


def test_prompts_are_rendered_by_the_chosen_template_and_other_models_have_their_own(tmp_path: Path) -> None:
    policy = Policy("tiny", chat_template="none")
    task = Task("arithmetic:max_value=3", template="Add {prompt}")
    asked = run_node(PromptSource(task, policy), name="prompts").sent("prompts")
    assert all(prompt.text.startswith("Add ") and "<|" not in prompt.text for prompt in asked)
    assert policy.with_model("tiny_teacher") == Policy("tiny_teacher")
