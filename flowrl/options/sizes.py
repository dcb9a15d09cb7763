"""The sizes of a graph's roles: replicas, GPUs and cores, and for models that only score their dtype and token budget.

A role has the same block under the same name in every graph that has it: `--generator.replicas`, `--reference.gpus`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from flowrl.graph.option_types import options_of
from flowrl.training.settings import Dtype, SequenceKind


def too_low(options: object, **least: float) -> Iterator[str]:
    """A sentence for each option whose value is below the one given in `least`. None is never too low."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and not value >= low:
            yield f"--{name.replace('_', '-')} is {value}; it has to be {low} or more"


def find_unused(cfg: object, names: Iterable[str], why: str) -> Iterator[str]:
    """A sentence if any of these options of a configuration, which nothing uses now, differs from its default.

    A name is that of an option (`engine.dtype`), or that of a block, which means all of its options.
    """
    options, given = options_of(type(cfg)), list[str]()
    for name in names:
        one = options[name.partition(".")[0]]
        changed = _changed_options(one.name, one.value_in(cfg), one.default)
        given += [f"--{found.replace('_', '-')}" for found in changed if f"{found}.".startswith(f"{name}.")]
    if given:
        yield f"{' and '.join(filter(None, (', '.join(given[:-1]), given[-1])))}: {why}"


def _changed_options(name: str, value: Any, default: Any) -> Iterator[str]:
    """The name of the option, or of each option in a block, whose value is not the default."""
    if is_dataclass(value):
        for one in fields(value):
            yield from _changed_options(f"{name}.{one.name}", getattr(value, one.name), getattr(default, one.name))
    elif value != default:
        yield name


@dataclass(frozen=True)
class Size:
    """How large a role is."""

    replicas: int = 1
    """Number of processes of this role; for a trainer, its ZeRO ranks."""
    gpus: float | None = None
    """GPUs of each process; None: one if any role of the graph has GPUs, else 0. With several, a generator splits its
    model among them, and a model that only scores is sharded over them; each rank of a trainer has one."""
    cpus: float | None = None
    """Cores of each process; None: depends on the role."""


@dataclass(frozen=True)
class TrainerSize(Size):
    """The size of the policy's trainer."""

    sequence_parallel_size: int = 1
    """Number of consecutive ranks that share each micro-batch: each rank has a slice of the positions. It has to divide
    the number of ranks and, with ulysses, the number of the model's attention heads."""
    tensor_parallel_size: int = 1
    """Number of consecutive ranks that share each micro-batch and each have an equal part of every matrix of the
    layers, at ZeRO stage 0, 1 or 2. It has to divide the number of ranks and the numbers of the model's attention heads
    and key heads."""
    sequence_parallel_kind: SequenceKind = "ulysses"
    """How ranks that share positions compute attention. ulysses: they exchange data, and each has all positions of some
    heads. ring: keys and values travel from rank to rank, for any number of heads; batches are packed as rows."""


@dataclass(frozen=True)
class CriticTrainerSize:
    """The size of the critic's trainer."""

    replicas: int | None = None
    """ZeRO ranks; None: as many as the policy's trainer."""
    sequence_parallel_size: int | None = None
    """Number of consecutive ranks that share each micro-batch; None: as many as in the policy's trainer."""
    tensor_parallel_size: int | None = None
    """Number of consecutive ranks that each have a part of every matrix; None: as many as in the policy's trainer."""
    sequence_parallel_kind: SequenceKind | None = None
    """Attention of ranks that share each micro-batch; None: that of the policy's trainer."""
    gpus: float | None = None
    """GPUs of each process; None: one if any role of the graph has GPUs, else 0."""
    cpus: float | None = None
    """Cores of each process; None: depends on the role."""

    def sized(self, like: TrainerSize) -> TrainerSize:
        """This size, with fields that are None taken from `like`, the size of the policy's trainer."""
        shared, divided = self.sequence_parallel_size, self.tensor_parallel_size
        size = TrainerSize(
            like.replicas if self.replicas is None else self.replicas,
            self.gpus,
            self.cpus,
            like.sequence_parallel_size if shared is None else shared,
            like.tensor_parallel_size if divided is None else divided,
        )
        taken = like.sequence_parallel_kind if size.sequence_parallel_size > 1 else size.sequence_parallel_kind
        return replace(size, sequence_parallel_kind=self.sequence_parallel_kind or taken)


@dataclass(frozen=True)
class ScoringSize(Size):
    """The size of a role whose model only scores."""

    dtype: Dtype | None = None
    """Type of weights and computation; None: that of the trainer."""
    token_budget: int | None = None
    """Maximum number of tokens in one pass, padding included; None: that of the trainer."""

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of a node whose model only scores, in a graph without a trainer: options that are None are left
        out."""
        said = {"dtype": self.dtype, "token_budget": self.token_budget}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True)
class ReferenceSize(ScoringSize):
    """The reference."""

    refresh_every: int = 0
    """The reference takes the policy's weights each time after this many steps; 0: it keeps its initial weights."""
    mixup: float = 1.0
    """Share of the policy's weights in what the reference then takes; the rest is from its own weights."""


@dataclass(frozen=True)
class _Model:
    model: str = ""
    """Directory of the model; empty: none."""


@dataclass(frozen=True)
class PreferenceReferenceSize(ScoringSize, _Model):
    """The reference of preferences in a dataset."""

    model: str = ""
    """The model that the policy is compared with, with the policy's vocabulary; empty: the policy's initial weights."""


@dataclass(frozen=True)
class RewardModelSize(ScoringSize, _Model):
    """The reward model."""

    model: str = ""
    """Directory of a trained reward model, which scores responses in place of the task's own reward; empty: none. It is
    part of a sum with functions if --task.reward says so: verifier + 0.5*reward_model."""
    normalise: bool | None = None
    """Normalise its scores by the mean and standard deviation that it has stored; None: only in ppo."""
    label: str = ""
    """For a model with several labels: the one that is the score, by name or number; or a weighted sum of them, such as
    helpfulness=0.8,verbosity=-0.2. Each label is logged."""


@dataclass(frozen=True)
class CriticSize(ScoringSize, _Model):
    """The critic."""

    model: str = ""
    """Initial model of the critic; empty: the policy. A reward model keeps its head, others get a new one."""


@dataclass(frozen=True)
class _Weights:
    weights: Literal["round", "initial"] = "round"
    """round: the weights that sampled the round. initial: the initial weights, which adds a node."""


@dataclass(frozen=True)
class PairReferenceSize(ReferenceSize, _Weights):
    """The reference of pairs that were sampled by the policy."""


@dataclass(frozen=True)
class TeacherSize(ScoringSize, _Model):
    """The teacher."""

    model: str = "tiny_teacher"
    """tiny_teacher (for tiny), a model directory, or OWNER/NAME of the Hub, with the student's vocabulary."""


def sizes_of(cfg: object) -> dict[str, Size | CriticTrainerSize]:
    """Role -> its size, for every role in the options of a configuration."""
    values = {name: one.value_in(cfg) for name, one in options_of(type(cfg)).items()}
    return {name: value for name, value in values.items() if isinstance(value, Size | CriticTrainerSize)}


def size_problems(cfg: object) -> Iterator[str]:
    """A sentence for each size of a configuration that is out of range."""
    for role, size in sizes_of(cfg).items():
        name = f"--{role.replace('_', '-')}"
        if size.replicas is not None and size.replicas < 1:
            yield f"{name}.replicas is {size.replicas}; it has to be 1 or more"
        for field_name in ("gpus", "cpus"):
            value = getattr(size, field_name)
            if value is not None and not value >= 0:
                yield f"{name}.{field_name} is {value}; it has to be 0 or more"
        for field_name in ("sequence_parallel_size", "tensor_parallel_size"):
            value = getattr(size, field_name, None)
            if value is not None and value < 1:
                yield f"{name}.{field_name.replace('_', '-')} is {value}; it has to be 1 or more"
        if isinstance(size, ReferenceSize):
            if size.refresh_every < 0:
                yield f"{name}.refresh-every is {size.refresh_every}; it has to be 0 or more"
            if not 0 < size.mixup <= 1:
                yield f"{name}.mixup is {size.mixup}; it has to be above 0, and at most 1"
            if size.mixup != 1 and not size.refresh_every:
                yield f"{name}.mixup is for references that take the policy's weights; give {name}.refresh-every too"
        budget = getattr(size, "token_budget", None)
        if budget is not None and budget < 1:
            yield f"{name}.token-budget is {budget}; it has to be 1 or more"
