"""A process reward model: a language model with a scalar head, trained to say for each step whether it is right.

    loss        −log p(label of a step), p = σ(score at the step's last token); mean over the steps

flowrl run process_reward_model --task steps.jsonl --steps 300 --run-dir runs/prm
flowrl run grpo --reward-model runs/prm/checkpoints/step_000300 --step-separator '\\n'
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import DemonstrationSource, HeldOutBatch, StepDataset, TooLong
from flowrl.options import EpochOptions, GraphConfig, TrainerOptions, find_unused, too_low
from flowrl.training.loss.token_objectives import StepCorrectness


@dataclass(frozen=True)
class ProcessRewardModel(GraphConfig):
    learning = "rows"
    help_texts = {
        "policy": "tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the initial model, which "
        "gets a new head.",
        "batch": "Number of responses in one training step.",
    }

    epochs: EpochOptions = EpochOptions()
    trainer: TrainerOptions = TrainerOptions(lr=5e-4)

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
            yield from find_unused(self, ("judge_every",), "there is nothing to measure on, for --held-out is 0")

    @property
    def model(self) -> Policy:
        """The initial model, without a warm start on the task."""
        return self.policy.build(None)


def graph(cfg: ProcessRewardModel) -> Graph:
    task, longest = cfg.data.task, cfg.max_length
    data = StepDataset(task, cfg.model, separator=cfg.step_separator, max_tokens=longest, too_long=cfg.too_long)
    epochs = cfg.epochs.epochs
    source = DemonstrationSource(task, cfg.model, epochs=epochs, max_tokens=longest, too_long=cfg.too_long)

    g = Graph("process_reward_model")
    prompts = g.add("prompts", source)
    dataset = g.add("dataset", data)
    batcher = g.add("batcher", cfg.epochs.build(cfg.trainer, cfg.model))
    learner = cfg.trainer.build(cfg.model, StepCorrectness(), judge_every=cfg.judge_every)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    if cfg.held_out:
        judged = HeldOutBatch(data, num_rows=cfg.held_out, token_budget=cfg.trainer.token_budget)
        held_out = g.add("held_out", judged)
        g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    g.ignore(trainer.weights)
    cfg.share_devices(g)
    return g
