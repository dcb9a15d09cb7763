"""A process reward model: a language model with a scalar head, trained to say for each step whether it is right.

flowrl run process_reward_model --task steps.jsonl --steps 300 --run-dir runs/prm
flowrl run grpo --reward-model runs/prm/checkpoints/step_000300 --step-separator '\\n'
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.blocks import DatasetOptions
from flowrl.models import Policy
from flowrl.nodes import DemonstrationSource, HeldOutSteps, StepDataset, TokenBatch, TooLong
from flowrl.role_options import too_low, unused
from flowrl.training.loss.token_objectives import StepCorrectness


@dataclass(frozen=True)
class ProcessRewardModel(DatasetOptions):
    policy: str = "tiny"
    """tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the initial model, which gets a new
    head."""
    lr: float = 5e-4
    batch: int = 64
    """Number of responses in one training step."""

    step_separator: str = "\\n"
    """Text that ends a step of a response."""
    max_length: int = 1024
    """Maximum number of tokens in a conversation."""
    too_long: TooLong = "drop"
    """Longer conversations are dropped and counted, lose the beginning of their prompt, or are an error before
    training."""
    held_out: int = 256
    """Held-out rows on which the accuracy is measured; 0: none."""
    judge_every: int = 50
    """Steps between these measurements; 0: only before and after training."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_length=2, held_out=0, judge_every=0)
        if not self.held_out:
            yield from unused(self, ("judge_every",), "there is nothing to measure on, for --held-out is 0")

    @property
    def model(self) -> Policy:
        """The initial model, without a warm start on the task."""
        return replace(super().model, task=None)


def graph(cfg: ProcessRewardModel) -> Graph:
    data = StepDataset(
        cfg.task, cfg.model, separator=cfg.step_separator, max_tokens=cfg.max_length, too_long=cfg.too_long
    )
    source = DemonstrationSource(
        cfg.task, cfg.model, epochs=cfg.epochs, max_tokens=cfg.max_length, too_long=cfg.too_long
    )

    g = Graph("process_reward_model")
    prompts = g.add("prompts", source)
    dataset = g.add("dataset", data)
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget, layout=cfg.packed_as))
    learner = cfg.make_trainer(StepCorrectness(), judge_every=cfg.judge_every)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    if cfg.held_out:
        held_out = g.add("held_out", HeldOutSteps(data, num_rows=cfg.held_out, token_budget=cfg.token_budget))
        g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    g.ignore(trainer.weights)
    cfg.share_devices(g)
    return g
