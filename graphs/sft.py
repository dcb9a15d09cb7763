"""Supervised fine-tuning on a task's own answers.

flowrl run graphs/sft.py --policy smollm2 --task questions.jsonl --steps 100
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, PromptSource, TokenBatch, Trainer
from flowrl.tasks import Task
from flowrl.training.loss.sft_objective import SFT as SFTObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class SFT:
    policy: str = "tiny"
    """tiny (from random weights), smollm2, or the path of a Hugging Face model directory."""
    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""
    batch: int = 64
    """Conversations of one step."""
    epochs: int | None = None
    """None: as many as the steps need, one if no number of steps is given."""
    lr: float = 5e-4
    max_tokens: int = 1024
    """Longer conversations are dropped."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    token_budget: int = 8192
    """Most tokens of a micro-batch, padding included."""
    lora: LoRA = LoRA()
    """Train adapters instead of all weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the trainer."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the learning rate."""
    num_trainers: int = 1
    """ZeRO ranks."""
    gpus: float = 0
    """GPUs of each trainer."""


def graph(cfg: SFT) -> Graph:
    policy = Policy(cfg.policy)
    trainer_node = Trainer(
        policy,
        objective=SFTObjective(),
        lr=cfg.lr,
        schedule=cfg.schedule,
        zero=cfg.zero.with_dtype(cfg.dtype),
        lora=cfg.lora,
    )

    g = Graph("sft")
    prompts = g.add("prompts", PromptSource(cfg.task, policy, epochs=cfg.epochs))
    dataset = g.add("dataset", Demonstrations(cfg.task, policy, max_tokens=cfg.max_tokens))
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget))
    trainer = g.add("trainer", trainer_node, replicas=cfg.num_trainers, gpus=cfg.gpus)

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.ignore(trainer.weights)
    return g
