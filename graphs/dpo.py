"""DPO, IPO and conservative DPO on preference pairs; the reference's logprobs are computed once and kept on disk.

flowrl run graphs/dpo.py --steps 60
flowrl run graphs/dpo.py --policy smollm2 --pairs pairs.jsonl --evaluate 0 --steps 200
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
from flowrl.training.loss.preference_objectives import DPO as DPOObjective
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class DPO:
    policy: str = "tiny"
    """tiny, smollm2, or the path of a Hugging Face model directory. It is the reference, too."""
    task: Task = Task("arithmetic")
    """What the result is judged on: arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory."""
    pairs: str = ""
    """Rows with `prompt`, `chosen` and `rejected` (text or messages); empty: the task's own pairs."""
    lr: float = 5e-5
    max_length: int = 1024
    """Longest conversation; rows with a longer one are dropped."""
    batch: int = 32
    """Pairs of one step."""
    epochs: int | None = None
    """None: as many as the steps need, one if no number of steps is given."""
    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    kind: Literal["dpo", "ipo", "cdpo"] = "dpo"
    label_smoothing: float = 0.0
    """Of cdpo: the share of pairs taken to be the wrong way round."""
    nll_coef: float = 0.0
    """Weight of the chosen completions' negative log likelihood."""
    held_out: int = 256
    """Held-out pairs on which accuracy and logprob changes are measured; 0 for none."""
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
    """Most tokens of a micro-batch, padding included; a pair is never cut."""
    lora: LoRA = LoRA()
    """Train adapters instead of all weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the trainer."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the learning rate."""


def graph(cfg: DPO) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    data = Preferences(replace(cfg.task, name=cfg.pairs) if cfg.pairs else cfg.task, policy, max_tokens=cfg.max_length)
    objective = DPOObjective(beta=cfg.beta, kind=cfg.kind, label_smoothing=cfg.label_smoothing, nll_coef=cfg.nll_coef)

    g = Graph("dpo")
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
