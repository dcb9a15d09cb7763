"""DPO, IPO and conservative DPO on preference pairs; the reference's logprobs are computed once and kept on disk.

    loss        −log σ(β·(log π/π_ref of the chosen completion − log π/π_ref of the rejected one)), mean over the pairs

flowrl run dpo --steps 60
flowrl run dpo --policy smollm2 --pairs pairs.jsonl --evaluate 0 --steps 200
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.nodes import PreferenceDataset, PreferenceReference, Preferences, PreferenceSource, Sampling
from flowrl.options import (
    ANSWERING,
    EpochOptions,
    EvaluationOptions,
    GeneratorOptions,
    GraphConfig,
    PreferenceData,
    PreferenceReferenceSize,
    TimedReward,
    TrainerOptions,
    add_offline_evaluation,
    too_low,
)
from flowrl.training.loss.objective import Objective
from flowrl.training.loss.preference_objectives import DPOObjective


@dataclass(frozen=True)
class ReferencedPreferences(GraphConfig):
    """The options that DPO and KTO share."""

    learning = "preferences"
    help_texts = {
        "policy": "tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub. Its initial weights are "
        "the reference, too, unless --reference.model names another model.",
        "task": "The task to evaluate, and the data if no file is named: arithmetic, reasoning_gym/NAME, a .jsonl file "
        "or a directory.",
    }

    data: PreferenceData = PreferenceData()
    epochs: EpochOptions = EpochOptions()
    trainer: TrainerOptions = TrainerOptions(lr=5e-5)
    evaluation: EvaluationOptions = EvaluationOptions()
    generator: GeneratorOptions = GeneratorOptions()
    reward: TimedReward = TimedReward()

    reference: PreferenceReferenceSize = PreferenceReferenceSize()
    """The reference, which has the policy's initial weights or is a model of its own."""
    beta: float = 0.1
    """Larger values keep the policy closer to the reference."""
    max_tokens: int = 32
    """Maximum number of tokens in an answer in evaluations."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_tokens=1)
        if self.reference.replicas != 1:
            yield "--reference.replicas: the reference's logprobs of a dataset are computed once, by one process; use 1"

    @property
    def of_evaluations(self) -> tuple[str, ...]:
        return (*super().of_evaluations, *ANSWERING, "max_tokens")


@dataclass(frozen=True)
class DPO(ReferencedPreferences):
    help_texts = {"batch": "Number of pairs in one step."}

    epochs: EpochOptions = EpochOptions(batch=32)

    pairs: str = ""
    """Rows with `prompt`, `chosen` and `rejected` (text or messages); empty: the task's own pairs."""
    kind: Literal["dpo", "ipo", "cdpo"] = "dpo"
    """The loss: DPO, IPO on means per token, or conservative DPO."""
    label_smoothing: float = 0.0
    """For cdpo: the assumed share of pairs with the wrong order."""
    nll_coef: float = 0.0
    """Weight of the negative log likelihood of the chosen completions."""


def graph(cfg: DPO) -> Graph:
    objective = DPOObjective(beta=cfg.beta, kind=cfg.kind, label_smoothing=cfg.label_smoothing, nll_coef=cfg.nll_coef)
    return preference_graph("dpo", cfg, cfg.data.build(cfg.model, cfg.pairs), objective)


def preference_graph(name: str, cfg: ReferencedPreferences, data: Preferences, objective: Objective) -> Graph:
    """The graph of objectives that compare the policy with a reference on `data`."""
    compared = cfg.model.with_model(cfg.reference.model) if cfg.reference.model else None
    held_out, scoring = cfg.data.held_out, cfg.trainer.scoring(cfg.reference)

    g = Graph(name)
    prompts = g.add("prompts", PreferenceSource(data, epochs=cfg.epochs.epochs))
    dataset = g.add("dataset", PreferenceDataset(data))
    judge = PreferenceReference(data, policy=compared, num_held_out=held_out, **scoring)
    reference = g.add("reference", judge, **cfg.place(cfg.reference))
    batcher = g.add("batcher", cfg.epochs.build(cfg.trainer, cfg.model))
    learner = cfg.trainer.build(cfg.model, objective, judge_every=cfg.data.judge_every)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, reference.groups)
    g.connect(reference.referenced, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.connect(reference.held_out, trainer.held_out, dispatch="gang")
    sampling = Sampling(max_tokens=cfg.max_tokens, stop=cfg.generator.stop_strings)
    add_offline_evaluation(g, cfg, trainer=trainer, prompts=prompts, sampling=sampling)
    cfg.share_devices(g, ("trainer", "reference"))
    return g
