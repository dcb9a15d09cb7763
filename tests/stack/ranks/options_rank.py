"""One ZeRO rank of the options test, started by `tests.stack.ranks.ranks` with DISK as its argument or without.

Trains every option, writes the weights before and after every batch, exports, and resumes from a
checkpoint made before the last batch. With DISK, a directory, it trains what is offloaded to it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.training.engine.gang import Gang
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.learner import Learner
from flowrl.training.loss.objective import loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.settings import LoRA, ZeroSettings
from tests.stack.ranks.options_cases import BATCHES, OPTIONS, Option, offloaded
from tests.stack.ranks.ranks import as_rank
from tests.stack.ranks.training_rank import EVERYTHING_SHARDED
from tests.training.pieces import train_in_pieces
from tests.training.training_cases import TEMPERATURE, make_batch


def start(option: Option, gang: Gang, directory: Path) -> ZeroEngine:
    settings = ZeroSettings(attention="sdpa", deepspeed=EVERYTHING_SHARDED, **option.settings)
    torch.manual_seed(7)
    return ZeroEngine(directory / option.base, settings, gang, lora=LoRA(**option.lora))


def weights(engine: ZeroEngine) -> dict[str, Tensor]:
    return {n: t.clone() for names, ts in engine.weight_buckets(2000) for n, t in zip(names, ts, strict=True)}


def adapter(engine: ZeroEngine) -> dict[str, Tensor]:
    return {n: t.clone() for names, ts in engine.adapter_buckets(2000) for n, t in zip(names, ts, strict=True)}


def update(engine: ZeroEngine, option: Option, version: int) -> None:
    batch = make_batch(version, option.case)
    if option.lora:
        batch = replace(batch, samples=tuple(replace(s, ref_logprobs=None) for s in batch.samples))
    learner = Learner(engine, PolicyObjective(**option.objective), temperature=TEMPERATURE, max_staleness=2)
    if option.pieces:
        train_in_pieces(learner, batch, option.pieces[version], version, option.lr)
        return
    part = batch.split(engine.gang.size)[engine.rank]
    learner.train_piece(part, loss_masks(part.samples, part.mask_staleness, version), version, option.lr)


def train(option: Option, gang: Gang, directory: Path) -> None:
    out = directory / option.name
    engine = start(option, gang, directory)
    engine.export_model(out / "start")
    history, adapters = [weights(engine)], [adapter(engine)]
    for version in range(BATCHES):
        if version == BATCHES - 1:
            engine.save_state(out / "state")
        update(engine, option, version)
        history.append(weights(engine))
        adapters.append(adapter(engine))
    engine.export_model(out / "end")
    disk = option.settings.get("nvme_path")
    on_disk = sum(path.stat().st_size for path in Path(disk).rglob("*.swp")) if disk else 0
    resumed = start(option, gang, directory)
    resumed.load_state(out / "state")
    update(resumed, option, BATCHES - 1)
    resumed.export_model(out / "resumed")
    with engine.adapter_off():
        base = engine.score([[1, 2, 3, 4, 5]])
    if gang.rank == 0:
        torch.save({"history": history, "adapters": adapters, "base": base, "on_disk": on_disk}, out / "found.pt")


def train_all(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    """`in memory` and names of options, or `on disk` and the directory of what is offloaded to it."""
    where, *rest = arguments
    options = offloaded(*rest) if where == "on disk" else [option for option in OPTIONS if option.name in rest]
    for option in options:
        train(option, gang, directory)


if __name__ == "__main__":
    as_rank(train_all)
