"""The sizes of a graph's roles: replicas, GPUs and cores, and for models that only score their dtype and token budget.

A role has the same block under the same name in every graph that has it: `--generator.replicas`, `--reference.gpus`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from flowrl.training.settings import Dtype, SequenceKind


def too_low(options: object, **least: float) -> Iterator[str]:
    """A sentence for each option whose value is below the one given in `least`. None is never too low."""
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and not value >= low:
            yield f"--{name.replace('_', '-')} is {value}; it has to be {low} or more"


def unused(options: object, names: Iterable[str], why: str) -> Iterator[str]:
    """A sentence if some of these options, which nothing uses now, have another value than by default.

    A name is that of an option (`engine.dtype`), or of a block for all of its options.
    """
    defaults = {one.name: one.default for one in fields(options)}  # type: ignore[arg-type]
    given = []
    for name in names:
        first = name.partition(".")[0]
        changed = _changed(first, getattr(options, first), defaults[first])
        given += [f"--{one.replace('_', '-')}" for one in changed if f"{one}.".startswith(f"{name}.")]
    if given:
        yield f"{' and '.join(filter(None, (', '.join(given[:-1]), given[-1])))}: {why}"


def _changed(name: str, value: Any, default: Any) -> Iterator[str]:
    """The option, or of a block its options, whose value is not the default."""
    if is_dataclass(value):
        for one in fields(value):
            yield from _changed(f"{name}.{one.name}", getattr(value, one.name), getattr(default, one.name))
    elif value != default:
        yield name


@dataclass(frozen=True)
class TimedReward:
    """The time limit of a reward, wherever answers are scored."""

    reward_timeout_s: float | None = None
    """Seconds after which a call of a reward function or server has failed; None: 10, and 60 for a comparison of the
    answers to a prompt."""

    @property
    def timed(self) -> dict[str, Any]:
        """The argument of a node that scores answers; {} for its own default."""
        return {} if self.reward_timeout_s is None else {"timeout_s": self.reward_timeout_s}

    @property
    def held_out_asking(self) -> dict[str, Any]:
        """Arguments of the node that asks what scores held-out answers."""
        return self.timed

    def timeout_problems(self) -> Iterator[str]:
        """A sentence if the limit is out of range."""
        if self.reward_timeout_s is not None and not self.reward_timeout_s > 0:
            yield f"--reward-timeout-s is {self.reward_timeout_s}; it has to be above 0"


@dataclass(frozen=True)
class ShapedReward:
    """What becomes of a reward, wherever it is trained on."""

    reward_clip: tuple[float, float] | None = None
    """Bounds of the reward of a response or an episode, before it is compared with others; None: none."""
    stop_penalty: float | None = None
    """The reward of what was cut off (a response at `max_tokens`, an episode at a limit) is scaled by this, in [0, 1],
    or if below 0 is this."""


@dataclass(frozen=True)
class Size:
    """How large a role is."""

    replicas: int = 1
    """Processes of this role; of a trainer its ZeRO ranks."""
    gpus: float | None = None
    """GPUs of each; None: one if any role of the graph has GPUs, else 0. With several, a generator splits its model
    among them, and a model that only scores is sharded over them; a trainer's rank has one."""
    cpus: float | None = None
    """Cores of each; None: by role."""


@dataclass(frozen=True)
class TrainerSize(Size):
    """The size of the policy's trainer."""

    sequence_parallel_size: int = 1
    """Consecutive ranks that share each micro-batch: every one has a slice of its positions. Divides the number of
    ranks, and with ulysses the model's attention heads."""
    tensor_parallel_size: int = 1
    """Consecutive ranks that share each micro-batch and have an equal part of every matrix of the layers each, at ZeRO
    stage 0, 1 or 2. Divides the number of ranks, and the model's attention heads, those of keys included."""
    sequence_parallel_kind: SequenceKind = "ulysses"
    """Attention of such ranks. ulysses: they exchange, and each has all positions of some heads. ring: keys and values
    travel from rank to rank, for any number of heads, by rows."""


@dataclass(frozen=True)
class CriticTrainerSize:
    """The size of the critic's trainer."""

    replicas: int | None = None
    """ZeRO ranks; None: as many as the policy's trainer."""
    sequence_parallel_size: int | None = None
    """Consecutive ranks that share each micro-batch; None: as many as in the policy's trainer."""
    tensor_parallel_size: int | None = None
    """Consecutive ranks that have a part of every matrix each; None: as many as in the policy's trainer."""
    sequence_parallel_kind: SequenceKind | None = None
    """Attention of ranks that share each micro-batch; None: that of the policy's trainer."""
    gpus: float | None = None
    """GPUs of each; None: one if any role of the graph has GPUs, else 0."""
    cpus: float | None = None
    """Cores of each; None: by role."""

    def sized(self, like: TrainerSize) -> TrainerSize:
        """The size for a policy's trainer of size `like`."""
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
    """Most tokens of one pass, padding included; None: that of the trainer."""

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of a node whose model only scores, in a graph without a trainer: what is not said is left out."""
        said = {"dtype": self.dtype, "token_budget": self.token_budget}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True)
class ReferenceSize(ScoringSize):
    """The reference."""

    refresh_every: int = 0
    """Steps after which the reference takes the policy's weights, again and again; 0: it keeps the initial ones."""
    mixup: float = 1.0
    """What it then takes: this share of the policy's weights, and the rest of its own."""

    @property
    def refreshed(self) -> dict[str, Any]:
        """Arguments of a Reference."""
        return {"refresh_every": self.refresh_every, "mixup": self.mixup}


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
    """Directory of a trained reward model, which scores responses in place of the task's own reward; empty: none.
    In a sum with functions where --task.reward says so: verifier + 0.5*reward_model."""
    normalise: bool | None = None
    """Normalise its scores by the mean and standard deviation that it has stored; None: in ppo alone."""
    label: str = ""
    """For a model with several labels: the one that is the score, by name or number; or a weighted sum of them, as
    helpfulness=0.8,verbosity=-0.2. Each is logged."""


@dataclass(frozen=True)
class CriticSize(ScoringSize, _Model):
    """The critic."""

    model: str = ""
    """Initial model of the critic; empty: the policy. A reward model keeps its head, others get a new one."""


@dataclass(frozen=True)
class _Weights:
    weights: Literal["round", "initial"] = "round"
    """The weights that sampled the round, or the initial ones (adds a node)."""


@dataclass(frozen=True)
class PairReferenceSize(ReferenceSize, _Weights):
    """The reference of pairs that were sampled by the policy."""


@dataclass(frozen=True)
class TeacherSize(ScoringSize, _Model):
    """The teacher."""

    model: str = "tiny_teacher"
    """tiny_teacher (for tiny), a model directory, or OWNER/NAME of the Hub, with the student's vocabulary."""


def sizes_of(options: object) -> dict[str, Size | CriticTrainerSize]:
    """Role -> its size, for every role in `options`, a dataclass."""
    values = {one.name: getattr(options, one.name) for one in fields(options)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if isinstance(value, Size | CriticTrainerSize)}


def size_problems(options: object) -> Iterator[str]:
    """A sentence for each size in `options` that is out of range."""
    for role, size in sizes_of(options).items():
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
            yield from _refresh_problems(name, size)
        budget = getattr(size, "token_budget", None)
        if budget is not None and budget < 1:
            yield f"{name}.token-budget is {budget}; it has to be 1 or more"


def _refresh_problems(name: str, size: ReferenceSize) -> Iterator[str]:
    if size.refresh_every < 0:
        yield f"{name}.refresh-every is {size.refresh_every}; it has to be 0 or more"
    if not 0 < size.mixup <= 1:
        yield f"{name}.mixup is {size.mixup}; it has to be above 0, and at most 1"
    if size.mixup != 1 and not size.refresh_every:
        yield f"{name}.mixup is for references that take the policy's weights; give {name}.refresh-every too"
