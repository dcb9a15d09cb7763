"""The blocks of options of graphs that have a policy, a generator of its responses, and sampled responses.

They are public in `flowrl.blocks`, which says how blocks are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import get_annotations
from types import FunctionType
from typing import Any, ClassVar

from flowrl.errors import ConfigError
from flowrl.graph.graph import Graph
from flowrl.models import Policy, TokenizerOptions
from flowrl.models.sizes.size_table import Learning
from flowrl.nodes import Engine, Sampling
from flowrl.role_options import Size, size_problems, sizes_of, too_low
from flowrl.tasks import Task


@dataclass(frozen=True)
class PolicyOptions:
    """Options of every graph."""

    policy: str = "tiny"
    """tiny, smollm2, the path of a Hugging Face model directory, or OWNER/NAME[@REVISION] on the Hugging Face Hub."""
    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""
    time_share: tuple[str, ...] | None = None
    """Names of the nodes that use the same cores and GPUs, one at a time, such as: generator trainer reference. None:
    models that only score share those of the trainer, and on CPUs a generator and a trainer that never work at the
    same time (staleness 0) share theirs; without any name, no nodes share."""
    trust_remote_code: bool = False
    """Run the Python files that come with models; applies to every model and library of the run."""
    chat_template: str = ""
    """File of a Jinja template to use in place of the policy's own; none: the last message's text, without a
    template."""
    chat_template_kwargs: str = ""
    """Values of the chat template's variables, such as enable_thinking=false."""
    tokenizer: TokenizerOptions = TokenizerOptions()
    """Another tokenizer than the policy's own, or other special tokens."""

    def __init_subclass__(cls) -> None:
        for name in get_annotations(cls):
            if isinstance(getattr(super(cls, cls), name, None), property | FunctionType):
                raise ConfigError(f"the option {name} of {cls.__name__} has the name of a block's method; rename it")

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ConfigError(problem)

    def problems(self) -> Iterator[str]:
        """Sentences that name an option and say what is wrong with its value. Subclasses add theirs."""
        yield from size_problems(self)
        if self.time_share is not None and len(self.time_share) == 1:
            yield f"--time-share names only {self.time_share[0]}; name at least one more node to share its devices with"

    @property
    def uses_gpus(self) -> bool:
        """Whether any role asks for GPUs. If so, roles that do not say get GPUs as well."""
        return any(size.gpus for size in sizes_of(self).values())

    def place(self, size: Size, *, cpus: float | None = None) -> dict[str, Any]:
        """The arguments of `Graph.add` for a role of this size, with `cpus` cores if the size does not say."""
        gpus = size.gpus if size.gpus is not None else float(self.uses_gpus)
        return {"replicas": size.replicas, "cpus": cpus if size.cpus is None else size.cpus, "gpus": gpus}

    def share_devices(self, g: Graph, *default: tuple[str, ...]) -> None:
        """Let the nodes of --time-share use the same devices, one at a time. Without the option, do this for the nodes
        of each tuple in `default` that are in the graph. Call this after all nodes have been added."""
        heavy = [name for name, placed in g.placed.items() if placed.heavy]
        if strange := [name for name in self.time_share or () if name not in heavy]:
            raise ConfigError(
                f"--time-share names {strange[0]}, which is no node with cores or GPUs of its own; in this graph "
                f"these are {', '.join(heavy)}"
            )
        for names in default if self.time_share is None else (self.time_share,):
            nodes = [g.nodes[name] for name in names if name in heavy]
            if len(nodes) > 1:
                g.time_share(*nodes)

    @property
    def model(self) -> Policy:
        """The policy as nodes take it."""
        return Policy(
            self.policy,
            task=self.task,
            trust_remote_code=self.trust_remote_code,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            tokenizer=self.tokenizer,
        )


@dataclass(frozen=True)
class GeneratorOptions(PolicyOptions):
    """Options of graphs with a generator."""

    generator: Size = Size()
    """Generators, each with a copy of the policy."""
    engine: Engine = Engine()
    """How vLLM runs each generator."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response and stay in it, such as '</answer>'."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if "" in self.stop_strings:
            yield "--stop-strings has an empty text, which would end every response at once; leave it out"

    @property
    def uses_gpus(self) -> bool:
        return super().uses_gpus or (self.engine.model_parallel_gpus > 1 and self.generator.gpus is None)

    def place_generator(self) -> dict[str, Any]:
        """The arguments of `Graph.add` for a generator; by default it has the GPUs that its engine asks for."""
        placed = self.place(self.generator)
        asked = self.engine.model_parallel_gpus
        return placed if self.generator.gpus is not None or asked == 1 else placed | {"gpus": asked}


@dataclass(frozen=True)
class SamplingOptions(GeneratorOptions):
    """Options of graphs that sample from the policy."""

    learning: ClassVar[Learning] = "samples"

    max_tokens: int = 32
    """Maximum number of tokens in a response."""
    temperature: float = 1.0
    """Sampling temperature."""
    group_size: int = 8
    """Number of samples for one prompt."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_tokens=1, group_size=1)
        yield from self.temperature_problems()

    def temperature_problems(self) -> Iterator[str]:
        """A sentence if the temperature is out of range."""
        if not self.temperature > 0:
            yield f"--temperature is {self.temperature}; it has to be above 0, or the samples of a prompt are all equal"

    @property
    def sampling(self) -> Sampling:
        """How responses are sampled."""
        return Sampling(temperature=self.temperature, max_tokens=self.max_tokens, stop=self.stop_strings)


@dataclass(frozen=True)
class TruncationOptions(GeneratorOptions):
    """Options of graphs that do not train on the answers, so that these may be sampled from a part of the
    distribution."""

    top_p: float = 1.0
    """Sample among the likeliest tokens whose probabilities sum up to this; 1: among all."""
    top_k: int = 0
    """Sample among this many of the likeliest tokens; 0: among all."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, top_k=0)
        if not 0 < self.top_p <= 1:
            yield f"--top-p is {self.top_p}; it has to be above 0 and at most 1"

    def untruncated_problems(self) -> Iterator[str]:
        """A sentence if --top-p or --top-k is set although answers are greedy."""
        if self.top_p != 1 or self.top_k:
            yield "--top-p and --top-k change nothing in greedy answers; leave them out, or set --temperature above 0"


@dataclass(frozen=True)
class AnswerOptions(TruncationOptions, SamplingOptions):
    """Options of graphs that sample from the policy and do not train on the samples."""

    def temperature_problems(self) -> Iterator[str]:
        if self.temperature == 0 and self.group_size == 1:
            yield from self.untruncated_problems()
        else:
            yield from super().temperature_problems()

    @property
    def sampling(self) -> Sampling:
        return replace(super().sampling, top_p=self.top_p, top_k=self.top_k)
