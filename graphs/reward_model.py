"""A reward model: a language model with a scalar head that scores the chosen one of each pair above the rejected.

flowrl run graphs/pairs.py --pairs pairs.jsonl
flowrl run graphs/reward_model.py --pairs pairs.jsonl --steps 300
"""

from dataclasses import dataclass, replace
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    HeldOutPreferences,
    PreferenceDataset,
    Preferences,
    PreferenceSource,
    TokenBatch,
    Trainer,
)
from flowrl.tasks import Task
from flowrl.training.loss.reward_objective import BradleyTerry
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class RewardModel:
    policy: str = "tiny"
    """tiny, smollm2, or the path of a Hugging Face model directory: what it starts from, with a new head."""
    task: Task = Task("arithmetic")
    """What `tiny` was warm-started on, and whose pairs are learnt from where `pairs` names none."""
    pairs: str = ""
    """File or dataset of rows with `prompt`, `chosen` and `rejected`, such as graphs/pairs.py writes."""
    lr: float = 5e-4
    max_length: int = 1024
    """Longest conversation; rows with a longer one are dropped."""
    batch: int = 64
    """Pairs of one step."""
    epochs: int | None = None
    """None: as many as the steps need, one if no number of steps is given."""
    margin: bool = False
    """Chosen has to be above rejected by the row's `margin`."""
    centring: float = 0.001
    """Weight of the penalty that keeps scores around 0."""
    held_out: int = 1024
    """Held-out pairs on which accuracy and the scores' mean and deviation are measured."""
    judge_every: int = 50
    """Steps between these measurements; 0: only before and after."""
    num_trainers: int = 1
    """ZeRO ranks."""
    gpus: float = 0
    """GPUs of each trainer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations."""
    token_budget: int = 8192
    """Most tokens of a micro-batch, padding included; a pair is never cut."""
    lora: LoRA = LoRA()
    """Train adapters instead of all weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the trainer."""
    schedule: Schedule = Schedule(warmup_steps=10)
    """Warm-up and decay of the learning rate."""


def graph(cfg: RewardModel) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    pairs = replace(cfg.task, name=cfg.pairs) if cfg.pairs else cfg.task
    data = Preferences(pairs, policy, max_tokens=cfg.max_length)
    trainer_node = Trainer(
        policy,
        objective=BradleyTerry(margin=cfg.margin, centring=cfg.centring),
        lr=cfg.lr,
        schedule=cfg.schedule,
        zero=cfg.zero.with_dtype(cfg.dtype),
        lora=cfg.lora,
        judge_every=cfg.judge_every,
    )

    g = Graph("reward_model")
    prompts = g.add("prompts", PreferenceSource(data, epochs=cfg.epochs))
    dataset = g.add("dataset", PreferenceDataset(data))
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget))
    held_out = g.add("held_out", HeldOutPreferences(data, num_rows=cfg.held_out, token_budget=cfg.token_budget))
    trainer = g.add("trainer", trainer_node, replicas=cfg.num_trainers, gpus=cfg.gpus)

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.connect(held_out.batch, trainer.held_out, dispatch="gang")
    g.ignore(trainer.weights)
    return g
