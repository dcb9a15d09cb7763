"""Supervised fine-tuning on a task's own answers.

flowrl run sft --policy smollm2 --task questions.jsonl --steps 100
flowrl run sft --evaluate 256 --steps 100
flowrl run sft --pretrain-mode wrapped --task 'texts/*.jsonl' --max-tokens 2048 --steps 100
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from flowrl import Graph
from flowrl.blocks import ANSWERING, DatasetOptions, EvaluationOptions, evaluate_offline
from flowrl.models import Policy
from flowrl.nodes import (
    Demonstrations,
    DemonstrationSource,
    HeldOutDemonstrations,
    PromptSource,
    RowPart,
    Sampling,
    TextDataset,
    Texts,
    TextSource,
    TokenBatch,
    TooLong,
)
from flowrl.role_options import too_low, unused
from flowrl.training.loss.token_objectives import SFTObjective


@dataclass(frozen=True)
class SFT(EvaluationOptions, DatasetOptions):
    policy: str = "tiny"
    """tiny (with random weights), smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub."""
    batch: int = 64
    """Number of conversations in one step."""
    lr: float = 5e-4
    evaluate: int = 0
    """Held-out prompts that are answered before and after training; 0: none, and no generator."""

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
            yield from unused(self, ("judge_every",), "there is nothing to measure on; give --held-out too")
        if self.pretrain_mode == "off":
            return
        of_task = ("system_prompt", "template", "reasoning")
        others = {"too_long": "drop", "assistant": "all", **{f"task.{name}": "" for name in of_task}}
        values = {f"task.{name}": getattr(self.task, name) for name in of_task}
        for name, plain in others.items():
            if values.get(name, getattr(self, name, plain)) != plain:
                yield f"{name} is for conversations, and pretrain_mode has texts without roles; leave it out"
        if self.evaluate and not self.evaluate_task:
            yield f"evaluate is {self.evaluate}, but texts have no prompts to ask; name some with --evaluate-task"

    @property
    def of_evaluations(self) -> tuple[str, ...]:
        return (*super().of_evaluations, *ANSWERING, "answer_tokens")

    @property
    def trained_part(self) -> RowPart:
        """All rows, unless some are held out."""
        return "train" if self.held_out else super().trained_part

    @property
    def model(self) -> Policy:
        """The policy without a warm start on the task, because this graph trains on the task itself."""
        return replace(super().model, task=None)


def sources(cfg: SFT) -> tuple[PromptSource, Demonstrations | TextDataset]:
    """The nodes that read rows and make samples of them: conversations, or texts without roles."""
    part = cfg.trained_part
    if cfg.pretrain_mode != "off":
        texts = Texts(cfg.task, cfg.model, max_tokens=cfg.max_tokens, cut=cfg.pretrain_mode, part=part)
        return TextSource(texts, epochs=cfg.epochs), TextDataset(texts)
    limits: dict[str, Any] = {"max_tokens": cfg.max_tokens, "part": part, "too_long": cfg.too_long}
    source = DemonstrationSource(cfg.task, cfg.model, epochs=cfg.epochs, **limits)
    return source, Demonstrations(cfg.task, cfg.model, trained=cfg.assistant, **limits)


def graph(cfg: SFT) -> Graph:
    g = Graph("sft")
    source, data = sources(cfg)
    prompts = g.add("prompts", source)
    dataset = g.add("dataset", data)
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget, layout=cfg.packed_as))
    trainer = g.add("trainer", cfg.make_trainer(SFTObjective(), judge_every=cfg.judge_every), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    if cfg.held_out:
        judged = HeldOutDemonstrations(data, num_rows=cfg.held_out, token_budget=cfg.token_budget)
        held_out = g.add("held_out", judged)
        g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    sampling = Sampling(max_tokens=cfg.answer_tokens, stop=cfg.stop_strings)
    evaluate_offline(g, cfg, trainer=trainer, prompts=prompts, sampling=sampling, text=cfg.pretrain_mode != "off")
    cfg.share_devices(g)
    return g
