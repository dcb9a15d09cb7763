"""A reward model: a language model with a scalar head, trained to score the chosen answer of a pair above the rejected
one.

    loss        −log σ(score of the chosen answer − score of the rejected one − margin) + centring·(sum of the scores)²

flowrl run pairs --pairs pairs.jsonl
flowrl run reward_model --pairs pairs.jsonl --steps 300 --run-dir runs/reward_model
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.nodes import HeldOutBatch, PreferenceDataset, PreferenceSource
from flowrl.options import EpochOptions, GraphConfig, PreferenceData, TrainerOptions, too_low
from flowrl.training.loss.preference_objectives import BradleyTerry
from flowrl.training.settings import Schedule


@dataclass(frozen=True)
class RewardModelTraining(GraphConfig):
    learning = "rewards"  # a new head in addition to the policy's weights
    help_texts = {
        "policy": "tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the initial model, which "
        "gets a new head.",
        "task": "The task that `tiny` was warm-started on. Its own pairs are the data if `pairs` is empty.",
        "batch": "Number of pairs in one step.",
        "held_out": "Held-out pairs on which accuracy and the scores' mean and standard deviation are measured.",
    }

    data: PreferenceData = PreferenceData(held_out=1024, judge_every=50)
    epochs: EpochOptions = EpochOptions()
    trainer: TrainerOptions = TrainerOptions(lr=5e-4, schedule=Schedule(warmup_steps=10))

    pairs: str = ""
    """File or dataset of rows with `prompt`, `chosen` and `rejected`, such as the graph pairs writes."""
    margin: bool = False
    """The chosen answer's score has to exceed the rejected one's by the row's `margin`."""
    centring: float = 0.001
    """Weight of the penalty that keeps scores around 0."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self.data, held_out=1)


def graph(cfg: RewardModelTraining) -> Graph:
    data = replace(cfg.data.build(cfg.model, cfg.pairs), scored=True)
    objective = BradleyTerry(margin=cfg.margin, centring=cfg.centring)
    judged = HeldOutBatch(data, num_rows=cfg.data.held_out, token_budget=cfg.trainer.token_budget)

    g = Graph("reward_model")
    prompts = g.add("prompts", PreferenceSource(data, epochs=cfg.epochs.epochs))
    dataset = g.add("dataset", PreferenceDataset(data))
    batcher = g.add("batcher", cfg.epochs.build(cfg.trainer, cfg.model))
    held_out = g.add("held_out", judged)
    learner = cfg.trainer.build(cfg.model, objective, judge_every=cfg.data.judge_every)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    g.ignore(trainer.weights)
    cfg.share_devices(g)
    return g
