"""KTO on completions that are each labelled desirable or not; the reference's logprobs are kept on disk.

flowrl run graphs/kto.py --steps 60
flowrl run graphs/kto.py --policy smollm2 --labelled judged.jsonl --evaluate 0 --steps 200
"""

from dataclasses import dataclass, replace
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    Evaluation,
    Generator,
    PreferenceDataset,
    PreferenceReference,
    Preferences,
    PreferenceSource,
    Sampling,
    TokenBatch,
    Trainer,
)
from flowrl.tasks import Task
from flowrl.training.loss.preference_objectives import KTO as KTOObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class KTO:
    policy: str = "tiny"
    """tiny, smollm2, or the path of a Hugging Face model directory. It is the reference, too."""
    task: Task = Task("arithmetic")
    """What the result is judged on: arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory."""
    labelled: str = ""
    """Rows with `prompt`, `completion` and `label` (true or false), or pairs; empty: the task's own pairs."""
    lr: float = 5e-5
    max_length: int = 1024
    """Longest conversation; rows with a longer one are dropped."""
    batch: int = 64
    """Completions of one step, 2 or more."""
    epochs: int | None = None
    """None: as many as the steps need, one if no number of steps is given."""
    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    desirable_weight: float = 1.0
    """λ_D, of the desirable completions' losses."""
    undesirable_weight: float = 1.0
    """λ_U. The paper keeps λ_D · desirable : λ_U · undesirable between 1 and 4/3."""
    held_out: int = 512
    """Held-out completions on which accuracy and logprob changes are measured; 0 for none."""
    judge_every: int = 10
    """Steps between these measurements; 0: only before and after."""
    max_tokens: int = 32
    """Longest answer when evaluated."""
    evaluate: int = 512
    """Held-out prompts of the task asked before and after; 0 for none, and no generator."""
    evaluate_samples: int = 1
    """Answers to each of them: one is greedy, several are sampled."""
    evaluate_every: int = 0
    """Steps between evaluations during training; 0 for none."""
    evaluate_also: tuple[str, ...] = ()
    """Further tasks that are asked then, each judged by its own verifier."""
    num_trainers: int = 1
    """ZeRO ranks."""
    gpus: float = 0
    """GPUs of each trainer, reference and generator."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations."""
    token_budget: int = 8192
    """Most tokens of a micro-batch, padding included."""
    lora: LoRA = LoRA()
    """Train adapters instead of all weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the trainer."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the learning rate."""


def graph(cfg: KTO) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    data = Preferences(
        replace(cfg.task, name=cfg.labelled) if cfg.labelled else cfg.task,
        policy,
        kind="labelled",
        max_tokens=cfg.max_length,
    )
    objective = KTOObjective(
        beta=cfg.beta, desirable_weight=cfg.desirable_weight, undesirable_weight=cfg.undesirable_weight
    )

    g = Graph("kto")
    prompts = g.add("prompts", PreferenceSource(data, epochs=cfg.epochs))
    dataset = g.add("dataset", PreferenceDataset(data))
    reference = g.add(
        "reference",
        PreferenceReference(data, dtype=cfg.dtype, token_budget=cfg.token_budget, num_held_out=cfg.held_out),
        gpus=cfg.gpus,
    )
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget))
    trainer = g.add(
        "trainer",
        Trainer(
            policy,
            objective=objective,
            lr=cfg.lr,
            schedule=cfg.schedule,
            zero=cfg.zero.with_dtype(cfg.dtype),
            lora=cfg.lora,
            judge_every=cfg.judge_every,
        ),
        replicas=cfg.num_trainers,
        gpus=cfg.gpus,
    )

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, reference.groups)
    g.connect(reference.referenced, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.connect(reference.held_out, trainer.held_out, dispatch="gang")
    g.time_share(trainer, reference)

    if cfg.evaluate:
        answers = Sampling(max_tokens=cfg.max_tokens)
        generator = g.add(
            "generator",
            Generator(
                policy, sampling=answers, evaluation=answers if cfg.evaluate_samples > 1 else None, lora=cfg.lora
            ),
            gpus=cfg.gpus,
        )
        held_out = Evaluation(
            cfg.task,
            policy,
            num_prompts=cfg.evaluate,
            num_samples=cfg.evaluate_samples,
            every=cfg.evaluate_every,
            also=cfg.evaluate_also,
        )
        evaluation = g.add("evaluation", held_out)
        g.call(evaluation.generate, generator.requests)
        g.latest(trainer.weights, generator.weights)
        g.admit(prompts.prompts, until=generator.weights, staleness=1)
        g.ignore(generator.prompts)
        g.ignore(generator.rollouts)
    else:
        g.ignore(trainer.weights)
    return g
