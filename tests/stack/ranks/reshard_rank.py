"""One rank that saves a trainer's state, or loads one that other numbers of ranks have saved; see `ranks`.

Arguments: names of cases to save, then "from", and names of states to load. What the masters, moments and averages are
is read off with DeepSpeed's own functions, gathered from all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowrl.training.engine.gang import Gang
from flowrl.training.engine.training_state import whole_master_weight
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.learner import Learner
from flowrl.training.loss.objective import loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.settings import LoRA, ZeroSettings
from tests.stack.ranks.ranks import as_rank
from tests.training.training_cases import TEMPERATURE, Case, make_batch

SMALL_SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 200}}
"""Some parameters are whole on every rank, others are not."""
FULL = ZeroSettings(stage=3, ema_decay=0.9, weight_decay=0.1, deepspeed=SMALL_SHARDED)
SETTINGS = {
    "full": (FULL, LoRA()),
    "half": (ZeroSettings(stage=1, dtype="bfloat16"), LoRA()),
    "adapter": (ZeroSettings(stage=3, offload="optimizer"), LoRA(rank=2)),
    "bare": (ZeroSettings(stage=2, keep_optimizer=False), LoRA()),
}


def opened(name: str, gang: Gang, source: Path, **changes: Any) -> ZeroEngine:
    settings, lora = SETTINGS[name]
    return ZeroEngine(source, dataclasses.replace(settings, **changes), gang, lora=lora)


def trained(engine: ZeroEngine, gang: Gang) -> None:
    learner = Learner(engine, PolicyObjective(), temperature=TEMPERATURE)
    for version in range(2):
        part = make_batch(version, Case("any", mask_staleness=-1)).split(gang.size)[gang.rank]
        learner.train_piece(part, loss_masks(part.samples, part.mask_staleness, version), version, 1e-2)


def state_of(engine: ZeroEngine) -> dict[str, Any]:
    """Everything that a checkpoint keeps, whole."""
    from deepspeed.utils import safe_get_full_optimizer_state

    named = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
    found: dict[str, Any] = {"master": {name: whole_master_weight(p).clone() for name, p in named}}
    states = [state for state in engine._engine.optimizer.optimizer.state.values() if state]
    optimizer = engine._engine.optimizer
    if states and hasattr(optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links the moments of all groups after it has stepped the first one: the others have none yet.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for key in ("exp_avg", "exp_avg_sq") if states else ():
        found[key] = {name: safe_get_full_optimizer_state(p, key).clone() for name, p in named}
    if states:
        found["step"] = {"all": torch.stack([torch.as_tensor(state["step"]) for state in states]).unique()}
    if engine._ema is not None:
        with engine._ema.exchange_weights():
            found["average"] = {name: whole_master_weight(p).clone() for name, p in named}
    buckets = engine.buckets(9999)
    found["weights"] = {n: t.clone() for ns, ts in buckets for n, t in zip(ns, ts, strict=True)}
    return found


def work(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    place = arguments.index("from")
    for name in arguments[:place]:
        torch.manual_seed(0)
        engine = opened(name, gang, directory / "model")
        trained(engine, gang)
        state = state_of(engine)
        engine.export_model(directory / f"{name}-model")
        engine.save_state(directory / f"{name}-state")
        if gang.rank == 0:
            torch.save(state, directory / f"{name}.pt")
    for asked in arguments[place + 1 :]:
        name, _, stage = asked.partition(":")
        source = directory / ("model" if SETTINGS[name][1].rank else f"{name}-model")
        engine = opened(name, gang, source, **({"stage": int(stage)} if stage else {}))
        engine.load_state(directory / f"{name}-state")
        state = state_of(engine)
        trained(engine, gang)
        if gang.rank == 0:
            torch.save(state, directory / f"{name}-{gang.size}.pt")


if __name__ == "__main__":
    as_rank(work)
