"""What a graph's configuration is made of: parts, each with the options of one subject.

A part checks its own values when it is made, and what concerns several parts when the configuration is made. Its
options are named as its fields are, without the part's name: the field `trust_remote_code` of the part `policy` is
--trust-remote-code. A graph may give a part other defaults, and its options other help texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from inspect import get_annotations
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar, TypeVar

from flowrl.errors import ConfigError
from flowrl.graph.analysis.numbers import derive_numbers
from flowrl.graph.graph import Graph, port_owner
from flowrl.graph.option_types import named
from flowrl.models import Policy, TokenizerOptions
from flowrl.models.model_size import Learning
from flowrl.nodes import Engine, Generator, Sampling, Trainer
from flowrl.options.sizes import Size, size_problems, sizes_of, too_low
from flowrl.tasks import Task

P = TypeVar("P", bound="ConfigPart")


def _refuse_names_of_methods(cls: type[Any]) -> None:
    """Raise ConfigError if an option would replace a method or property of a base."""
    for name in get_annotations(cls):
        if isinstance(getattr(super(cls, cls), name, None), property | FunctionType):
            raise ConfigError(
                f"the option {name} of {cls.__name__} has the name of a method that it inherits; rename it"
            )


@dataclass(frozen=True)
class ConfigPart:
    """Options of one subject. Values out of range raise ConfigError when the part is made."""

    is_part: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        _refuse_names_of_methods(cls)

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ConfigError(problem)

    def problems(self) -> Iterator[str]:
        """Sentences that name an option of this part and say what is wrong with its value. Subclasses add theirs."""
        yield from ()

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        """Sentences about this part's options beside the others of the configuration."""
        yield from ()


@dataclass(frozen=True)
class PolicyOptions(ConfigPart):
    """The policy: the model that answers, and how text is written for it."""

    name: str = named("policy", "tiny")
    """tiny, smollm2, the path of a Hugging Face model directory, or OWNER/NAME[@REVISION] on the Hugging Face Hub."""
    trust_remote_code: bool = False
    """Run the Python files that come with models; applies to every model and library of the run."""
    chat_template: str = ""
    """File of a Jinja template to use in place of the policy's own; none: the last message's text, without a
    template."""
    chat_template_kwargs: str = ""
    """Values of the chat template's variables, such as enable_thinking=false."""
    tokenizer: TokenizerOptions = TokenizerOptions()
    """Another tokenizer than the policy's own, or other special tokens."""

    def build(self, task: Task | None) -> Policy:
        """The policy as nodes take it; `task` is what `tiny` is warm-started on, None: nothing."""
        return Policy(
            self.name,
            task=task,
            trust_remote_code=self.trust_remote_code,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            tokenizer=self.tokenizer,
        )


@dataclass(frozen=True)
class DataOptions(ConfigPart):
    """The task: what is asked or shown."""

    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""


@dataclass(frozen=True)
class GeneratorOptions(ConfigPart):
    """The generators: processes with a copy of the policy that answers."""

    size: Size = named("generator", Size())
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
    def engine_size(self) -> Size:
        """The size, with the GPUs that the engine asks for unless the size says how many."""
        asked = self.engine.model_parallel_gpus
        return self.size if self.size.gpus is not None or asked == 1 else replace(self.size, gpus=asked)


@dataclass(frozen=True)
class SamplingOptions(ConfigPart):
    """How many answers the policy gives to a prompt, and how they are sampled."""

    max_tokens: int = 32
    """Maximum number of tokens in a response."""
    temperature: float = 1.0
    """Sampling temperature."""
    group_size: int = 8
    """Number of samples for one prompt."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_tokens=1, group_size=1)
        if not self.temperature > 0 and not self.is_greedy:
            yield f"--temperature is {self.temperature}; it has to be above 0, or the samples of a prompt are all equal"

    @property
    def is_greedy(self) -> bool:
        """Whether the only answer to a prompt may have the likeliest tokens: not if it is trained on."""
        return False

    def build(self, stop: tuple[str, ...], truncation: TruncationOptions | None = None) -> Sampling:
        """How a generator samples; `stop` are the texts that end a response."""
        sampling = Sampling(temperature=self.temperature, max_tokens=self.max_tokens, stop=stop)
        return replace(sampling, top_p=truncation.top_p, top_k=truncation.top_k) if truncation else sampling


@dataclass(frozen=True)
class AnswerOptions(SamplingOptions):
    """How answers are sampled that nothing is trained on, so that they may be greedy."""

    group_size: int = 1
    """Number of responses to one prompt. A single one may be greedy, with --temperature 0."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 and self.group_size == 1

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if self.is_greedy:
            yield from cfg.get_part(TruncationOptions).untruncated_problems()


@dataclass(frozen=True)
class TruncationOptions(ConfigPart):
    """From which part of the distribution answers are sampled, where nothing is trained on them."""

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
class PlacementOptions(ConfigPart):
    """Which nodes share devices."""

    time_share: tuple[str, ...] | None = None
    """Names of the nodes that use the same cores and GPUs, one at a time, such as: generator trainer reference. None:
    models that only score share those of the trainer, and on CPUs a generator and a trainer that never work at the
    same time (staleness 0) share theirs; without any name, no nodes share."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.time_share is not None and len(self.time_share) == 1:
            yield f"--time-share names only {self.time_share[0]}; name at least one more node to share its devices with"


@dataclass(frozen=True)
class GraphConfig:
    """The configuration of a graph: the parts of every graph; a subclass adds further parts and options of its own."""

    learning: ClassVar[Learning | None] = None
    """What the graph learns from, for defaults by the model's size; None: it has none of those."""
    help_texts: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Option -> what it means in this graph, for options whose part says it too generally."""

    policy: PolicyOptions = PolicyOptions()
    data: DataOptions = DataOptions()
    placement: PlacementOptions = PlacementOptions()

    def __init_subclass__(cls) -> None:
        _refuse_names_of_methods(cls)

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise ConfigError(problem)

    def problems(self) -> Iterator[str]:
        """Sentences that name an option and say what is wrong with its value. Subclasses add theirs."""
        yield from size_problems(self)
        for part in self.parts:
            yield from part.problems_within(self)

    @property
    def parts(self) -> tuple[ConfigPart, ...]:
        """The parts, in the order of their fields."""
        values = (getattr(self, one.name) for one in fields(self))
        return tuple(value for value in values if isinstance(value, ConfigPart))

    def find_part(self, kind: type[P]) -> P | None:
        """The part of that type, or of a subclass; None if this configuration has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def get_part(self, kind: type[P]) -> P:
        """The part of that type, or of a subclass. Raises ConfigError if this configuration has none."""
        if (found := self.find_part(kind)) is None:
            name = kind.__name__
            raise ConfigError(f"{type(self).__name__} has no {name}; give it a field, as in: part: {name} = {name}()")
        return found

    @property
    def model(self) -> Policy:
        """The policy as nodes take it."""
        return self.policy.build(self.data.task)

    @property
    def asks_functions(self) -> bool:
        """Whether reward functions or servers are asked about more than the reward of a sample."""
        return False

    @property
    def of_evaluations(self) -> tuple[str, ...]:
        """The options that only evaluations use; they are refused in a run without evaluations."""
        return "evaluate_samples", "evaluate_every", "evaluate_also", "evaluate_max_prompt_tokens"

    @property
    def uses_gpus(self) -> bool:
        """Whether any role asks for GPUs. If so, roles that do not say get GPUs as well."""
        generator = self.find_part(GeneratorOptions)
        sizes = [*sizes_of(self).values(), *([] if generator is None else [generator.engine_size])]
        return any(size.gpus for size in sizes)

    def place(self, size: Size, *, cpus: float | None = None) -> dict[str, Any]:
        """The arguments of `Graph.add` for a role of this size, with `cpus` cores if the size does not say."""
        gpus = size.gpus if size.gpus is not None else float(self.uses_gpus)
        return {"replicas": size.replicas, "cpus": cpus if size.cpus is None else size.cpus, "gpus": gpus}

    def place_generator(self) -> dict[str, Any]:
        """The arguments of `Graph.add` for a generator; by default it has the GPUs that its engine asks for."""
        return self.place(self.get_part(GeneratorOptions).engine_size)

    def share_devices(self, g: Graph, *default: tuple[str, ...]) -> None:
        """Let the nodes of --time-share use the same devices, one at a time. Without the option, do this for the nodes
        of each tuple in `default` that are in the graph, and on CPUs for the generator and the trainers as well, if
        they never work at the same time. Call this after the last call of any other method of the graph."""
        asked = self.placement.time_share
        heavy = [name for name, placed in g.placed.items() if placed.heavy]
        if strange := [name for name in asked or () if name not in heavy]:
            raise ConfigError(
                f"--time-share names {strange[0]}, which is no node with cores or GPUs of its own; in this graph "
                f"these are {', '.join(heavy)}"
            )
        if asked is None and (in_turns := self._never_at_once(g)):
            asked = tuple(name for name in heavy if name in {*in_turns, *(name for names in default for name in names)})
            for name in asked:  # a graph's own numbers are for nodes that work at the same time
                g.placed[name] = replace(g.placed[name], cpus=None)
        for names in default if asked is None else (asked,):
            nodes = [g.nodes[name] for name in names if name in heavy]
            if len(nodes) > 1:
                g.time_share(*nodes)

    def _never_at_once(self, g: Graph) -> tuple[str, ...]:
        """The generator and the trainers, if each batch is sampled after the step before it and trained on after its
        last sample: one of them always waits, so in turns each can have the cores of both. None of them if there are
        GPUs, if anybody said how many cores a role gets or that a trainer accumulates, and if there are several
        generators, which would wait for each other within every episode."""
        admission = g.admission
        if admission is None or admission.on_limit != "wait" or derive_numbers(g).ahead != 0 or self.uses_gpus:
            return ()
        trainers = [name for name, node in g.nodes.items() if isinstance(node, Trainer)]
        asked = (edge.into for edge in g.edges if edge.into.name in ("prompts", "turns"))
        generators = list(dict.fromkeys(port_owner(port) for port in asked if isinstance(port.node, Generator)))
        accumulates = any(g.nodes[name].facts().accumulate == "on" for name in trainers)
        if len(generators) != 1 or not trainers or accumulates:
            return ()
        return () if any(size.cpus is not None for size in sizes_of(self).values()) else (*generators, *trainers)
