"""Supervised fine-tuning on a task's own answers.

    loss        −Σ log π(token) / number of trained tokens

flowrl run sft --policy smollm2 --task questions.jsonl --steps 100
flowrl run sft --evaluate 256 --steps 100
flowrl run sft --pretrain-mode wrapped --task 'texts/*.jsonl' --max-tokens 2048 --steps 100
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    Demonstrations,
    DemonstrationSource,
    HeldOutBatch,
    PromptSource,
    RowPart,
    Sampling,
    TextDataset,
    Texts,
    TextSource,
    TooLong,
)
from flowrl.options import (
    ANSWERING,
    EpochOptions,
    EvaluationOptions,
    GeneratorOptions,
    GraphConfig,
    TimedReward,
    TrainerOptions,
    add_offline_evaluation,
    find_unused,
    too_low,
)
from flowrl.training.loss.token_objectives import SFTObjective


@dataclass(frozen=True)
class SFT(GraphConfig):
    learning = "rows"
    help_texts = {
        "policy": "tiny (with random weights), smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub.",
        "batch": "Number of conversations in one step.",
        "evaluate": "Held-out prompts that are answered before and after training; 0: none, and no generator.",
    }

    epochs: EpochOptions = EpochOptions()
    trainer: TrainerOptions = TrainerOptions(lr=5e-4)
    evaluation: EvaluationOptions = EvaluationOptions(evaluate=0)
    generator: GeneratorOptions = GeneratorOptions()
    reward: TimedReward = TimedReward()

    max_tokens: int = 1024
    """Maximum number of tokens in a conversation, or in a sequence of texts."""
    pretrain_mode: Literal["off", "split", "wrapped"] = "off"
    """Train every token of texts without roles, from the column text. split cuts a long text into several sequences;
    wrapped fills sequences of --max-tokens with one text after the other."""
    too_long: TooLong = "drop"
    """Longer conversations are dropped and counted, lose their beginning, or are an error before training."""
    assistant: Literal["all", "last"] = "all"
    """Train every assistant turn of a conversation, or only the last."""
    held_out: int = 0
    """Held-out rows (of texts: sequences) on which the loss is measured, before and after training; 0: none."""
    judge_every: int = 0
    """Steps between further measurements of that loss; 0: none."""
    answer_tokens: int = 32
    """Maximum number of tokens in an answer in evaluations."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_tokens=2, answer_tokens=1, held_out=0, judge_every=0)
        if not self.held_out:
            yield from find_unused(self, ("judge_every",), "there is nothing to measure on; give --held-out too")
        if self.pretrain_mode == "off":
            return
        of_task = ("system_prompt", "template", "reasoning")
        others = {"too_long": "drop", "assistant": "all", **{f"task.{name}": "" for name in of_task}}
        values = {f"task.{name}": getattr(self.data.task, name) for name in of_task}
        for name, plain in others.items():
            if values.get(name, getattr(self, name, plain)) != plain:
                yield f"{name} is for conversations, and pretrain_mode has texts without roles; leave it out"
        asked = self.evaluation
        if asked.evaluate and not asked.evaluate_task:
            yield f"evaluate is {asked.evaluate}, but texts have no prompts to ask; name some with --evaluate-task"

    @property
    def of_evaluations(self) -> tuple[str, ...]:
        return (*super().of_evaluations, *ANSWERING, "answer_tokens")

    @property
    def trained_part(self) -> RowPart:
        """All rows, unless some are held out."""
        return "train" if self.held_out else self.evaluation.trained_part(self.data.task)

    @property
    def model(self) -> Policy:
        """The policy without a warm start on the task, because this graph trains on the task itself."""
        return self.policy.build(None)


def sources(cfg: SFT) -> tuple[PromptSource, Demonstrations | TextDataset]:
    """The nodes that read rows and make samples of them: conversations, or texts without roles."""
    task, part, epochs = cfg.data.task, cfg.trained_part, cfg.epochs.epochs
    if cfg.pretrain_mode != "off":
        texts = Texts(task, cfg.model, max_tokens=cfg.max_tokens, cut=cfg.pretrain_mode, part=part)
        return TextSource(texts, epochs=epochs), TextDataset(texts)
    limits: dict[str, Any] = {"max_tokens": cfg.max_tokens, "part": part, "too_long": cfg.too_long}
    source = DemonstrationSource(task, cfg.model, epochs=epochs, **limits)
    return source, Demonstrations(task, cfg.model, trained=cfg.assistant, **limits)


def graph(cfg: SFT) -> Graph:
    g = Graph("sft")
    source, data = sources(cfg)
    prompts = g.add("prompts", source)
    dataset = g.add("dataset", data)
    batcher = g.add("batcher", cfg.epochs.build(cfg.trainer, cfg.model))
    learner = cfg.trainer.build(cfg.model, SFTObjective(), judge_every=cfg.judge_every)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    if cfg.held_out:
        judged = HeldOutBatch(data, num_rows=cfg.held_out, token_budget=cfg.trainer.token_budget)
        held_out = g.add("held_out", judged)
        g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    sampling = Sampling(max_tokens=cfg.answer_tokens, stop=cfg.generator.stop_strings)
    text = cfg.pretrain_mode != "off"
    add_offline_evaluation(g, cfg, trainer=trainer, prompts=prompts, sampling=sampling, text=text)
    cfg.share_devices(g)
    return g
