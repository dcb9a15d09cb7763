"""The training state in a checkpoint, in a form that any number of ranks at ZeRO stage 1, 2 or 3 can load.

Every rank writes the flat fp32 tensors that ZeRO gave it, bit by bit, and where in them each parameter's elements are
(`ShardPart`). A rank that loads looks up its own parts in the files of all ranks, which are memory-mapped, and copies
the ranges that overlap. So a checkpoint needs no conversion, and nothing is gathered.

This form is not used at stage 0, which has no flat tensors, for Muon, whose state ZeRO orders by whole matrices, or for
tensors that are swapped to a disk. The first two use DeepSpeed's own checkpoints, the last uses `on_disk`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.training.engine.ema import MASTERS
from flowrl.training.engine.requirements import SHARDS

MASTER, AVERAGE = "master", "average"


@dataclass(frozen=True)
class ShardPart:
    """Where a range of one parameter's elements is in this rank's flat tensors."""

    name: str
    group: int
    """Index of the flat tensor."""
    offset: int
    """Where the range starts in the flat tensor, in elements; `start` is where it starts in the flattened parameter."""
    start: int
    length: int


def save(engine: Any, path: Path, rank: int, averages: Sequence[Tensor], *, optimizer: bool) -> None:
    """Write this rank's file into the directory `path`. Without `optimizer`, the optimizer's state is left out.

    `averages` are further flat tensors (a moving average), one for each group, or none.
    """
    path.mkdir(parents=True, exist_ok=True)
    groups, scalars = [], []
    for number, flat in enumerate(flat_masters(engine)):
        state = engine.optimizer.optimizer.state.get(flat, {}) if optimizer else {}
        kept = {MASTER: flat.detach(), **({AVERAGE: averages[number]} if averages else {})}
        kept |= {name: value for name, value in state.items() if _is_like(value, flat)}
        groups.append({name: _alone(value) for name, value in kept.items()})
        others = {name: value for name, value in state.items() if not _is_like(value, flat)}
        scalars.append({name: value.cpu() if isinstance(value, Tensor) else value for name, value in others.items()})
    content = {"parts": [astuple(one) for one in parts(engine)], "groups": groups, "scalars": scalars}
    torch.save(content, path / SHARDS.format(rank=rank))


def load(engine: Any, path: Path, averages: Sequence[Tensor], *, optimizer: bool) -> None:
    """Load what any number of ranks wrote with `save`; collective. With `optimizer`, also load the optimizer's state.

    State that the checkpoint lacks is left as it is; averages that it lacks start as the weights. Raises ConfigError if
    the checkpoint lacks elements of a parameter.
    """
    saved = _Saved(path)
    begun = _ready(engine)
    flats = flat_masters(engine)
    for part in parts(engine):
        flat = flats[part.group]
        targets = {MASTER: flat.detach()}
        if averages:
            targets[AVERAGE] = averages[part.group]
        if optimizer:
            state = engine.optimizer.optimizer.state[flat]
            saved.complete(state, part.name, flat)
            targets |= {name: value for name, value in state.items() if _is_like(value, flat)}
        saved.fill(part, targets)
    if optimizer and saved.has_optimizer and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # below stage 3: parameters find their moments
    begun()


def flat_masters(engine: Any) -> list[Any]:
    """This rank's flat fp32 tensors, the objects by which the optimizer knows them."""
    return list(next(getattr(engine.optimizer, name) for name in MASTERS if hasattr(engine.optimizer, name)))


def parts(engine: Any) -> list[ShardPart]:
    """Which elements of which parameters this rank's flat tensors have, and where; padding is left out."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = _stage_3 if _shards_parameters(engine.optimizer) else _below_stage_3
    return list(found(engine.optimizer, names))


def _shards_parameters(optimizer: Any) -> bool:
    """Whether this is DeepSpeed's optimizer of stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def _stage_3(optimizer: Any, names: Mapping[int, str]) -> Iterator[ShardPart]:
    for group in optimizer.fp16_groups:
        for parameter in group:
            number, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = torch.distributed.get_rank() * size
            length = min(size, parameter.ds_numel - start)
            if length > 0:
                yield ShardPart(names[id(parameter)], number, offset, start, length)


def _below_stage_3(optimizer: Any, names: Mapping[int, str]) -> Iterator[ShardPart]:
    for group in optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups:
        for parameter in group:
            mapping = parameter._hp_mapping
            if mapping is not None:  # None: other ranks have all of it
                flat, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield ShardPart(names[id(parameter)], mapping.param_group_index, flat.start, whole.start, flat.numel)


def _ready(engine: Any) -> Any:
    """Prepare the engine for new masters. The returned function makes the weights from them; it is collective."""
    optimizer = engine.optimizer
    if not _shards_parameters(optimizer):
        return optimizer.update_lp_params
    optimizer._partition_all_parameters()

    def weights() -> None:
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer._post_step(set())

    return weights


class _Saved:
    """The files of all ranks that saved."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob(SHARDS.format(rank="*")))
        self._contents = [torch.load(file, mmap=True) for file in files]
        self._path = path
        self._by_name: dict[str, list[tuple[int, ShardPart]]] = defaultdict(list)
        for number, content in enumerate(self._contents):
            for row in content["parts"]:
                part = ShardPart(*row)
                self._by_name[part.name].append((number, part))

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer's state was saved."""
        return any(group.keys() - {MASTER, AVERAGE} for content in self._contents for group in content["groups"])

    def fill(self, mine: ShardPart, targets: Mapping[str, Tensor]) -> None:
        """Copy the saved values of the part `mine` into the flat tensors `targets`, by name."""
        filled = 0
        for number, theirs in self._by_name.get(mine.name, ()):
            start = max(mine.start, theirs.start)
            length = min(mine.start + mine.length, theirs.start + theirs.length) - start
            if length <= 0:
                continue
            filled += length
            group = self._contents[number]["groups"][theirs.group]
            for name, target in targets.items():
                source = group.get(MASTER if name == AVERAGE and AVERAGE not in group else name)
                if source is not None:
                    part = source.narrow(0, theirs.offset + start - theirs.start, length)
                    target.narrow(0, mine.offset + start - mine.start, length).copy_(part)
        if filled != mine.length:
            raise ConfigError(
                f"the checkpoint {self._path} has {filled} of {mine.length} elements of {mine.name!r}; it is of "
                "another model, or not complete: resume from another checkpoint"
            )

    def complete(self, state: dict[str, Any], name: str, flat: Tensor) -> None:
        """Add to the `state` of an optimizer that has not stepped what the saved state has for the parameter's group.

        Below stage 3 there is no state before the first step. Tensors like `flat` are added as zeros, which `fill`
        overwrites; values that apply to the whole group are copied.
        """
        number, theirs = self._by_name[name][0] if self._by_name.get(name) else (0, None)
        if theirs is None:
            return
        content = self._contents[number]
        for key in content["groups"][theirs.group].keys() - {MASTER, AVERAGE} - state.keys():
            state[key] = torch.zeros_like(flat)
        for key, value in content["scalars"][theirs.group].items():
            state[key] = value.clone().to(flat.device) if isinstance(value, Tensor) else value


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in host memory, with a storage of its own: a file would contain all of a larger, shared storage."""
    here = tensor.cpu()
    return here.clone() if here.untyped_storage().nbytes() > here.nbytes else here


def _is_like(value: object, flat: Tensor) -> bool:
    """Whether `value` is a tensor with one number for each element of `flat`."""
    return isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0
