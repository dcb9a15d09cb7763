"""Supervised fine-tuning on a task's own answers.

flowrl run sft --policy smollm2 --task questions.jsonl --steps 100
flowrl run sft --evaluate 256 --steps 100
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from flowrl import Graph
from flowrl.blocks import DatasetOptions, EvaluationOptions, evaluate_offline, too_low
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, DemonstrationSource, HeldOutDemonstrations, Sampling, TokenBatch
from flowrl.nodes.row_source import Part
from flowrl.nodes.source import TooLong
from flowrl.training.loss.sft_objective import SFT as SFTObjective


@dataclass(frozen=True)
class SFT(EvaluationOptions, DatasetOptions):
    policy: str = "tiny"
    """tiny (with random weights), smollm2, or the path of a Hugging Face model directory."""
    batch: int = 64
    """Conversations of one step."""
    lr: float = 5e-4
    evaluate: int = 0
    """Held-out prompts that are answered before and after training; 0: none, and no generator."""

    max_tokens: int = 1024
    """Most tokens of a conversation."""
    too_long: TooLong = "drop"
    """Longer conversations are dropped and counted, lose their beginning, or are an error before training."""
    assistant: Literal["all", "last"] = "all"
    """Train every assistant turn of a conversation, or the last alone."""
    held_out: int = 0
    """Held-out rows on which the loss is measured, before training and at its end; 0: none."""
    judge_every: int = 0
    """Steps between further measurements of that loss; 0: none."""
    answer_tokens: int = 32
    """Most tokens of an answer in evaluations."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_tokens=2, answer_tokens=1, held_out=0, judge_every=0)

    @property
    def trained_part(self) -> Part:
        """All rows, unless some are held out."""
        return "train" if self.held_out else super().trained_part

    @property
    def model(self) -> Policy:
        """The policy without a warm start on the task, which is what is trained here."""
        return replace(super().model, task=None)


def graph(cfg: SFT) -> Graph:
    g = Graph("sft")
    source = DemonstrationSource(
        cfg.task, cfg.model, epochs=cfg.epochs, max_tokens=cfg.max_tokens, part=cfg.trained_part, too_long=cfg.too_long
    )
    answers = Demonstrations(
        cfg.task,
        cfg.model,
        max_tokens=cfg.max_tokens,
        part=cfg.trained_part,
        trained=cfg.assistant,
        too_long=cfg.too_long,
    )
    prompts = g.add("prompts", source)
    dataset = g.add("dataset", answers)
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget, layout=cfg.packed_as))
    trainer = g.add("trainer", cfg.make_trainer(SFTObjective(), judge_every=cfg.judge_every), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    if cfg.held_out:
        judged = HeldOutDemonstrations(answers, num_rows=cfg.held_out, token_budget=cfg.token_budget)
        held_out = g.add("held_out", judged)
        g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    sampling = Sampling(max_tokens=cfg.answer_tokens, stop=cfg.stop_strings)
    evaluate_offline(g, cfg, trainer=trainer, prompts=prompts, sampling=sampling)
    cfg.take_turns(g)
    return g
