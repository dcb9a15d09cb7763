"""The training state of a rank beyond its model: master weights, their moving average, and the optimizer's state in a
checkpoint, in a form that any number of ranks at ZeRO stage 1, 2 or 3 can load.

Every rank writes the flat fp32 tensors that ZeRO gave it, bit by bit, and where in them each parameter's elements are
(`ShardPart`). A rank that loads looks up its own parts in the files of all ranks, which are memory-mapped, and copies
the ranges that overlap. So a checkpoint needs no conversion, and nothing is gathered.

This form is not used at stage 0, which has no flat tensors, for Muon, whose state ZeRO orders by whole matrices, or for
tensors that are swapped to a disk. The first two use DeepSpeed's own checkpoints, the last uses `save_offloaded`.

For weights and optimizer state on a disk (`nvme_path`), DeepSpeed's own checkpoints copy only the swap files: after
loading, the model computes with its initial weights until the next step. Here every sub-group is fetched as before a
step, saved or overwritten, and put back as after a step. Only one sub-group at a time is in memory.

The exponential moving average of the master weights is sharded in the same way. After every applied optimizer step:
average ← decay · average + (1 − decay) · master, in fp32, on each rank for its own part. Only `exchange_weights` reads
it: within that context the average is in the place where DeepSpeed keeps the master weights, so the same code gathers
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import ConfigError, FlowrlError
from flowrl.training.engine.requirements import SHARDS


class Ema:
    """The average of one rank's master weights; it starts from their current values.

    `decay` is what remains of the old average after an optimizer step.
    """

    def __init__(self, engine: Any, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self.averages = [tensor.clone() for tensor in master_weights(engine)]
        """The flat tensors of the average, one for each flat tensor of the master weights."""

    def add_weights(self) -> None:
        """Add the weights that an optimizer step just made to the average."""
        for average, master in zip(self.averages, master_weights(self._engine), strict=True):
            average.lerp_(master, 1.0 - self._decay)

    @contextmanager
    def exchange_weights(self) -> Iterator[None]:
        """Within this context average and master weights are exchanged."""
        self._swap_contents()
        try:
            yield
        finally:
            self._swap_contents()

    def _swap_contents(self) -> None:
        """Swap the contents, in place: DeepSpeed keeps its own references to the master tensors."""
        for average, master in zip(self.averages, master_weights(self._engine), strict=True):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)

    def save_average(self, path: Path, rank: int) -> None:
        """Write this rank's part into the directory `path` of a checkpoint."""
        torch.save(self.averages, path / f"ema_rank_{rank}.pt")

    def load_average(self, path: Path, rank: int) -> None:
        """Load what `save_average` wrote; without a file (ema_decay is new), start from the weights just loaded."""
        file = path / f"ema_rank_{rank}.pt"
        found = torch.load(file) if file.exists() else master_weights(self._engine)
        for average, tensor in zip(self.averages, found, strict=True):
            average.copy_(tensor)


MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Where DeepSpeed's optimizers keep this rank's fp32 weights: stage 3, stages 1 and 2, stage 1 with bfloat16."""


def master_weights(engine: Any) -> list[Tensor]:
    """This rank's fp32 weights, as DeepSpeed's optimizer holds them, detached from the autograd graph."""
    optimizer = engine.optimizer
    for name in MASTERS:
        if hasattr(optimizer, name):
            return [tensor.detach() for tensor in getattr(optimizer, name)]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FlowrlError(
            f"ema_decay: DeepSpeed's {type(optimizer).__name__} keeps its fp32 weights where flowrl does not find "
            "them; leave ema_decay out, or the deepspeed settings that choose this optimizer"
        )
    return [p.detach() for p in engine.module.parameters() if p.requires_grad]


def whole_master_weight(parameter: torch.nn.Parameter) -> Tensor:
    """The master weight of one parameter, gathered; collective. A frozen parameter is its own master weight."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad:
        return parameter.detach()
    found = safe_get_full_fp32_param(parameter)
    return parameter.detach() if found is None else found


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


def save_shards(engine: Any, path: Path, rank: int, averages: Sequence[Tensor], *, optimizer: bool) -> None:
    """Write this rank's file into the directory `path`. Without `optimizer`, the optimizer's state is left out.

    `averages` are further flat tensors (a moving average), one for each group, or none.
    """
    path.mkdir(parents=True, exist_ok=True)
    groups, scalars = [], []
    for number, flat in enumerate(flat_masters(engine)):
        state = engine.optimizer.optimizer.state.get(flat, {}) if optimizer else {}
        kept = {MASTER: flat.detach(), **({AVERAGE: averages[number]} if averages else {})}
        kept |= {name: value for name, value in state.items() if _is_like(value, flat)}
        groups.append({name: own_storage(value) for name, value in kept.items()})
        others = {name: value for name, value in state.items() if not _is_like(value, flat)}
        scalars.append({name: value.cpu() if isinstance(value, Tensor) else value for name, value in others.items()})
    content = {"parts": [astuple(one) for one in list_shard_parts(engine)], "groups": groups, "scalars": scalars}
    torch.save(content, path / SHARDS.format(rank=rank))


def load_shards(engine: Any, path: Path, averages: Sequence[Tensor], *, optimizer: bool) -> None:
    """Load what any number of ranks wrote with `save_shards`; collective. `optimizer`: also load the optimizer's state.

    State that the checkpoint lacks is left as it is; averages that it lacks start as the weights. Raises ConfigError if
    the checkpoint lacks elements of a parameter.
    """
    saved = _Saved(path)
    begun = prepare_for_masters(engine)
    flats = flat_masters(engine)
    for part in list_shard_parts(engine):
        flat = flats[part.group]
        targets = {MASTER: flat.detach()}
        if averages:
            targets[AVERAGE] = averages[part.group]
        if optimizer:
            state = engine.optimizer.optimizer.state[flat]
            saved.complete_state(state, part.name, flat)
            targets |= {name: value for name, value in state.items() if _is_like(value, flat)}
        saved.fill_part(part, targets)
    if optimizer and saved.has_optimizer and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # below stage 3: parameters find their moments
    begun()


def flat_masters(engine: Any) -> list[Any]:
    """This rank's flat fp32 tensors, the objects by which the optimizer knows them."""
    return list(next(getattr(engine.optimizer, name) for name in MASTERS if hasattr(engine.optimizer, name)))


def list_shard_parts(engine: Any) -> list[ShardPart]:
    """Which elements of which parameters this rank's flat tensors have, and where; padding is left out."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer, found = engine.optimizer, []
    if shards_parameters(optimizer):
        for parameter in (parameter for group in optimizer.fp16_groups for parameter in group):
            number, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = torch.distributed.get_rank() * size
            length = min(size, parameter.ds_numel - start)
            if length > 0:
                found.append(ShardPart(names[id(parameter)], number, offset, start, length))
        return found
    groups = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
    for parameter in (parameter for group in groups for parameter in group):
        mapping = parameter._hp_mapping
        if mapping is not None:  # None: other ranks have all of it
            flat, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
            part = ShardPart(names[id(parameter)], mapping.param_group_index, flat.start, whole.start, flat.numel)
            found.append(part)
    return found


def shards_parameters(optimizer: Any) -> bool:
    """Whether this is DeepSpeed's optimizer of stage 3."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def prepare_for_masters(engine: Any) -> Any:
    """Prepare the engine for new masters. The returned function makes the weights from them; it is collective."""
    optimizer = engine.optimizer
    if not shards_parameters(optimizer):
        return optimizer.update_lp_params
    optimizer._partition_all_parameters()

    def make_weights() -> None:
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer._post_step(set())

    return make_weights


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

    def fill_part(self, mine: ShardPart, targets: Mapping[str, Tensor]) -> None:
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

    def complete_state(self, state: dict[str, Any], name: str, flat: Tensor) -> None:
        """Add to the `state` of an optimizer that has not stepped what the saved state has for the parameter's group.

        Below stage 3 there is no state before the first step. Tensors like `flat` are added as zeros, which `fill_part`
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


def own_storage(tensor: Tensor) -> Tensor:
    """The tensor in host memory, with a storage of its own: a file would contain all of a larger, shared storage."""
    here = tensor.cpu()
    return here.clone() if here.untyped_storage().nbytes() > here.nbytes else here


def _is_like(value: object, flat: Tensor) -> bool:
    """Whether `value` is a tensor with one number for each element of `flat`."""
    return isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0


WEIGHT = "weight"


def save_offloaded(optimizer: Any, path: Path, rank: int) -> None:
    """Save this rank's shards, one file per sub-group of a DeepSpeed ZeRO-3 optimizer."""
    directory = path / f"on_disk_rank_{rank}"
    directory.mkdir(parents=True, exist_ok=True)
    for index, weight, state in _sub_groups(optimizer, changed=False):
        torch.save({WEIGHT: weight.detach(), **state}, directory / f"sub_group_{index}.pt")


def load_offloaded(optimizer: Any, path: Path, rank: int) -> None:
    """Load what `save_offloaded` wrote into an optimizer of the same model, ranks and settings; collective."""
    for index, weight, state in _sub_groups(optimizer, changed=True):
        saved = torch.load(path / f"on_disk_rank_{rank}" / f"sub_group_{index}.pt")
        weight.detach().copy_(saved.pop(WEIGHT))
        for name, value in saved.items():
            if isinstance(state.get(name), Tensor):
                state[name].copy_(value)
            else:
                state[name] = value


def _sub_groups(optimizer: Any, *, changed: bool) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
    """Yield (number, fp32 weights, optimizer state) of each sub-group; with `changed`, both are written back."""
    timers: set[str] = set()
    if changed:
        optimizer._partition_all_parameters()
    for index, weight in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer._prepare_sub_group(index, timers)
        yield index, weight, optimizer.optimizer.state[weight]
        if changed:
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer._release_sub_group(index, timers)
    if changed:
        optimizer._post_step(timers)
