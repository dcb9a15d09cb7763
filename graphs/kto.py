"""KTO on completions that are each labelled desirable or not; the graph is that of dpo.

flowrl run kto --steps 60
flowrl run kto --policy smollm2 --labelled judged.jsonl --evaluate 0 --steps 200
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.options import EpochOptions, PreferenceData
from flowrl.recipes.dpo import ReferencedPreferences, preference_graph
from flowrl.training.loss.preference_objectives import KTOObjective


@dataclass(frozen=True)
class KTO(ReferencedPreferences):
    help_texts = {"batch": "Number of completions in one step, 2 or more."}

    data: PreferenceData = PreferenceData(held_out=512)
    epochs: EpochOptions = EpochOptions(batch=64)

    labelled: str = ""
    """Rows with `prompt`, `completion` and `label` (true or false), or pairs; empty: the task's own pairs."""
    desirable_weight: float = 1.0
    """λ_D, the weight of the losses of desirable completions."""
    undesirable_weight: float = 1.0
    """λ_U. The paper keeps λ_D · desirable : λ_U · undesirable between 1 and 4/3."""


def graph(cfg: KTO) -> Graph:
    objective = KTOObjective(
        beta=cfg.beta, desirable_weight=cfg.desirable_weight, undesirable_weight=cfg.undesirable_weight
    )
    return preference_graph("kto", cfg, cfg.data.build(cfg.model, cfg.labelled, "labelled"), objective)
