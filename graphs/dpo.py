"""DPO, IPO and conservative DPO on preference pairs; the reference's logprobs are computed once and kept on disk.

flowrl run dpo --steps 60
flowrl run dpo --policy smollm2 --pairs pairs.jsonl --evaluate 0 --steps 200
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import ANSWERING, EvaluationOptions, PreferenceOptions, evaluate_offline
from flowrl.nodes import PreferenceDataset, PreferenceReference, Preferences, PreferenceSource, Sampling, TokenBatch
from flowrl.role_options import PreferenceReferenceSize, too_low
from flowrl.tasks import Task
from flowrl.training.loss.objective import Objective
from flowrl.training.loss.preference_objectives import DPOObjective


@dataclass(frozen=True)
class ReferencedPreferences(EvaluationOptions, PreferenceOptions):
    """The options that DPO and KTO share."""

    policy: str = "tiny"
    """tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub. Its initial weights are the reference,
    too, unless --reference.model names another model."""
    task: Task = Task("arithmetic")
    """The task to evaluate, and the data if no file is named: arithmetic, reasoning_gym/NAME, a .jsonl file or a
    directory."""
    lr: float = 5e-5

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
    batch: int = 32
    """Number of pairs in one step."""

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
    return preference_graph("dpo", cfg, cfg.preferences(cfg.pairs), objective)


def preference_graph(name: str, cfg: ReferencedPreferences, data: Preferences, objective: Objective) -> Graph:
    """The graph of objectives that compare the policy with a reference on `data`."""
    compared = cfg.model.like(cfg.reference.model) if cfg.reference.model else None

    g = Graph(name)
    prompts = g.add("prompts", PreferenceSource(data, epochs=cfg.epochs))
    dataset = g.add("dataset", PreferenceDataset(data))
    reference = g.add(
        "reference",
        PreferenceReference(data, policy=compared, num_held_out=cfg.held_out, **cfg.scoring(cfg.reference)),
        **cfg.place(cfg.reference),
    )
    batcher = g.add("batcher", TokenBatch(cfg.batch, token_budget=cfg.token_budget, layout=cfg.packed_as))
    learner = cfg.make_trainer(objective, judge_every=cfg.judge_every)
    trainer = g.add("trainer", learner, **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, dataset.prompts)
    g.connect(dataset.groups, reference.groups)
    g.connect(reference.referenced, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.connect(reference.held_out, trainer.held_out, dispatch="gang")
    sampling = Sampling(max_tokens=cfg.max_tokens, stop=cfg.stop_strings)
    evaluate_offline(g, cfg, trainer=trainer, prompts=prompts, sampling=sampling)
    cfg.share_devices(g, ("trainer", "reference"))
    return g
