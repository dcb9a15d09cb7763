"""Iterative DPO: the best and the worst answer to a prompt make a pair; each round is sampled by the last one.

flowrl run graphs/iterative_dpo.py --steps 60
flowrl run graphs/iterative_dpo.py --judge runs/reward_model/checkpoints/step_000200 --steps 60
flowrl run graphs/iterative_dpo.py --reference initial --kind ipo --steps 60
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import (
    Evaluation,
    Generator,
    PairMaker,
    PromptSource,
    Reference,
    Reward,
    RewardModel,
    Sampling,
    Shaping,
    TokenBatch,
    Trainer,
)
from flowrl.tasks import Task
from flowrl.training.loss.preference_objectives import DPO
from flowrl.training.schedule import Schedule
from flowrl.training.settings import LoRA, ZeroSettings


@dataclass(frozen=True)
class IterativeDPO:
    policy: str = "tiny"
    """tiny, smollm2, or the path of a Hugging Face model directory."""
    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""
    lr: float = 1e-4
    max_tokens: int = 32
    """Longest response."""
    temperature: float = 1.0
    staleness: int = 0
    """0: a round is admitted when the last one's weights are everywhere. Above, rounds overlap by that many."""
    group_size: int = 8
    """Samples of one prompt."""
    groups_per_step: int = 32
    """Prompts of one batch, which is a round."""
    evaluate: int = 512
    """Held-out prompts asked before and after; 0 for none."""
    evaluate_samples: int = 1
    """Answers to each of them: one is greedy, several are sampled at `temperature`."""
    evaluate_every: int = 0
    """Steps between evaluations during training; 0 for none."""
    evaluate_also: tuple[str, ...] = ()
    """Further tasks that are asked then, each judged by its own verifier."""
    num_generators: int = 1
    num_trainers: int = 1
    """ZeRO ranks."""
    gpus: float = 0
    """GPUs of each generator and trainer, of a reference and a trained judge."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's parameters and activations."""
    token_budget: int = 8192
    """Most tokens of a micro-batch, padding included."""
    negate_rewards: bool = False
    """A control: every reward's sign turned. The policy must get worse."""
    lora: LoRA = LoRA()
    """Train adapters instead of all weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and the like of the trainer."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the learning rate."""

    judge: str = ""
    """Directory of a trained reward model, which judges in the place of the task's own reward; "": none."""
    reference: Literal["round", "initial"] = "round"
    """What DPO is held to: the weights that sampled the round, or those at the start (adds a reference node)."""
    beta: float = 0.1
    """How strongly."""
    kind: Literal["dpo", "ipo", "cdpo"] = "dpo"
    label_smoothing: float = 0.0
    """Of cdpo: the share of pairs taken to be the wrong way round."""
    nll_coef: float = 0.0
    """Weight of the chosen answers' negative log likelihood."""
    optimizer_steps: int = 4
    """Mini-batches into which a round is cut."""


def graph(cfg: IterativeDPO) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens)
    evaluated = sampling if cfg.evaluate_samples > 1 else None
    objective = DPO(
        beta=cfg.beta,
        kind=cfg.kind,
        label_smoothing=cfg.label_smoothing,
        nll_coef=cfg.nll_coef,
        online=True,
    )
    shaping = Shaping(negate=cfg.negate_rewards)
    judge: Reward | RewardModel = (
        RewardModel(cfg.judge, policy, cfg.task, shaping=shaping) if cfg.judge else Reward(cfg.task, shaping=shaping)
    )

    g = Graph("iterative_dpo")
    prompts = g.add("prompts", PromptSource(cfg.task, policy, repeat=cfg.group_size))
    generator = g.add(
        "generator",
        Generator(policy, sampling=sampling, evaluation=evaluated, lora=cfg.lora),
        replicas=cfg.num_generators,
        gpus=cfg.gpus,
    )
    reward = g.add("reward", judge, gpus=cfg.gpus if cfg.judge else 0)
    pairs = g.add("pairs", PairMaker(size=cfg.group_size, reference=cfg.reference))
    batcher = g.add(
        "batcher",
        TokenBatch(cfg.groups_per_step, token_budget=cfg.token_budget, optimizer_steps=cfg.optimizer_steps),
    )
    trainer = g.add(
        "trainer",
        Trainer(
            policy,
            objective=objective,
            lr=cfg.lr,
            temperature=cfg.temperature,
            schedule=cfg.schedule,
            zero=cfg.zero.with_dtype(cfg.dtype),
            lora=cfg.lora,
        ),
        replicas=cfg.num_trainers,
        gpus=cfg.gpus,
    )
    if cfg.judge:
        g.time_share(trainer, reward)

    g.connect(prompts.prompts, generator.prompts)
    if cfg.reference == "initial":
        reference = g.add("reference", Reference(policy, temperature=cfg.temperature, dtype=cfg.dtype), gpus=cfg.gpus)
        g.connect(generator.rollouts, reference.rollouts)
        g.connect(reference.referenced, reward.rollouts)
        g.time_share(trainer, reference)
    else:
        g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, pairs.scored)
    g.connect(pairs.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=cfg.staleness)

    if cfg.evaluate:
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
    return g
