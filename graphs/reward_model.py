"""A reward model: a language model with a scalar head, trained to score the chosen answer of a pair above the rejected
one.

flowrl run pairs --pairs pairs.jsonl
flowrl run reward_model --pairs pairs.jsonl --steps 300 --run-dir runs/reward_model
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.blocks import PreferenceOptions
from flowrl.nodes import HeldOutPreferences, PreferenceDataset, PreferenceSource, TokenBatch
from flowrl.role_options import too_low
from flowrl.tasks import Task
from flowrl.training.loss.preference_objectives import BradleyTerry
from flowrl.training.settings import Schedule


@dataclass(frozen=True)
class RewardModelTraining(PreferenceOptions):
    learning = "rewards"  # a new head in addition to the policy's weights
    policy: str = "tiny"
    """tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the initial model, which gets a new
    head."""
    task: Task = Task("arithmetic")
    """The task that `tiny` was warm-started on. Its own pairs are the data if `pairs` is empty."""
    lr: float = 5e-4
    batch: int = 64
    """Number of pairs in one step."""
    held_out: int = 1024
    """Held-out pairs on which accuracy and the scores' mean and standard deviation are measured."""
    judge_every: int = 50
    schedule: Schedule = Schedule(warmup_steps=10)

    pairs: str = ""
    """File or dataset of rows with `prompt`, `chosen` and `rejected`, such as the graph pairs writes."""
    margin: bool = False
    """The chosen answer's score has to exceed the rejected one's by the row's `margin`."""
    centring: float = 0.001
    """Weight of the penalty that keeps scores around 0."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, held_out=1)


def graph(cfg: RewardModelTraining) -> Graph:
    data = replace(cfg.preferences(cfg.pairs), scored=True)
    objective = BradleyTerry(margin=cfg.margin, centring=cfg.centring)

    g = Graph("reward_model")
    prompts = g.add("prompts", PreferenceSource(data, epochs=cfg.epochs))
    dataset = g.add("dataset", PreferenceDataset(data))
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget, layout=cfg.packed_as))
    held_out = g.add("held_out", HeldOutPreferences(data, num_rows=cfg.held_out, token_budget=cfg.token_budget))
    learner = cfg.make_trainer(objective, judge_every=cfg.judge_every)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    g.ignore(trainer.weights)
    cfg.share_devices(g)
    return g
