"""`Node`: the base class of every role, built-in or user-defined.

A node is a plain class with annotated ports and `async def run(self)`:

    class LengthFilter(Node):
        samples: In[Scored]
        kept: Out[Scored]

        async def run(self) -> None:
            async for sample in self.samples:
                if sample.response_tokens > 4:
                    await self.kept.send(sample)
                else:
                    self.samples.drop(sample, "too_short", state="filtered")

Every process that builds the graph creates the instances (the command line, `flowrl check`, every host),
so `__init__` only stores settings. Imports of heavy packages and other expensive work belong in `setup`.

A node tells about itself without being run: `Node.facts()` is what `flowrl check` needs to know, `Node.footprint` the
memory that a replica takes, predicted from sizes by the formulas of docs/memory.md. Every process that builds the
graph calls both, so they only read the node's own settings: no files, no heavy imports. `None` in `Facts` means "does
not apply here".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    get_args,
    get_origin,
)

from flowrl.graph.annotations import declared_types
from flowrl.graph.ports import Ask, Call, In, Out, Port, Serve
from flowrl.graph.routes import WeightTransport
from flowrl.messages import Column, Prompt, Sample

if TYPE_CHECKING:
    from flowrl.graph.routes import WeightRoute


MemoryPlace = Literal["device", "host", "shm"]
"""device: the memory of each GPU of the replica, or of the machine if the replica has no GPU; host: the memory of the
machine; shm: the machine's /dev/shm."""
Stay = Literal["always", "lease", "away", "loading", "export"]
"""When a term takes memory. always; lease: while the replica holds its lease, or always if it shares no devices; away:
while it does not hold the lease; loading: while it loads; export: while a checkpoint is exported."""


@dataclass(frozen=True)
class MemoryTerm:
    """One thing that takes memory."""

    name: str
    num_bytes: int
    place: MemoryPlace = "device"
    stay: Stay = "always"


@dataclass(frozen=True)
class Share:
    """What is known about a replica's place when its memory is predicted."""

    replicas: int
    first: bool
    """Whether it is replica 0, which publishes and exports for its gang."""
    gpus: float
    device_bytes: int
    """Memory of each of its GPUs; 0: it has none, or that is unknown."""
    time_shared: bool
    token_budget: int | None
    """The most tokens of a micro-batch that it receives; None: no node declares a number."""
    longest_sample: int | None
    longest_asked: int | None = None
    """Tokens of the longest prompt or context that it is asked to continue; None: unknown."""
    sends: tuple[WeightTransport, ...] = ()
    """The transport to each reader of its weights."""
    readers: tuple[str, ...] = ()
    """Dtypes of the readers' parameters, as `Facts.weights_dtype` says."""
    receives: tuple[WeightTransport, ...] = ()


@dataclass(frozen=True)
class Footprint:
    """The memory of one replica."""

    terms: tuple[MemoryTerm, ...]
    problems: tuple[str, ...] = ()
    """Problems that exist even if no other replica takes memory, as complete sentences."""

    def num_bytes(self, *stays: Stay, place: MemoryPlace = "device") -> int:
        return sum(term.num_bytes for term in self.terms if term.place == place and term.stay in stays)


@dataclass(frozen=True)
class Facts:
    """One node's declaration; the default of every field states nothing."""

    group_size: int | None = None
    """K. A source: members it sends per group. A node that collects groups: members it waits for."""
    groups_per_batch: int | None = None
    """P. Batchers: groups in one batch."""
    token_budget: int | None = None
    """Batchers and trainers: tokens in one micro-batch; no sample may be longer."""
    longest_prompt: int | None = None
    """Tokens of the longest prompt this node lets through."""
    longest_context: int | None = None
    """Nodes that call a generator: the most tokens that they ask it to continue; None: `longest_prompt` applies."""
    context_by: str = "max_prompt_tokens"
    """Nodes that call a generator: the option that sets `longest_context` or `longest_prompt`."""
    context_with_reply: bool = False
    """Nodes that call a generator: whether `longest_context` limits a context and the reply to it together."""
    longest_response: int | None = None
    """The most policy tokens that this node samples for one prompt."""
    longest_answer: int | None = None
    """Generators: the most tokens that are sampled at once, held-out answers included; None: `longest_response`."""
    max_model_len: int | None = None
    """Generators: the most tokens of prompt and response together, if a user has set it."""
    concurrency: int | None = None
    """Items that one replica works on at a time (a generator's slots); `flowrl check` warns if some stay idle."""
    episodes: int | None = None
    """Episodes that one replica plays at a time; `flowrl check` warns if more than these are admitted."""
    processes: int | None = None
    """Episodes for which one replica has a process, or an outside worker, at a time; None: for all."""
    expected_s: float | None = None
    """Seconds that an episode takes on average, by the user's estimate."""
    publish_every: int = 1
    """Trainers: every nth version is published."""
    adapter_rank: int | None = None
    """Trainers and generators: versions are sent as LoRA adapters of this rank; 0: as whole weights."""
    saves: str | None = None
    """Trainers: the name of their model's directory in a checkpoint."""
    held_out_sets: tuple[str, ...] = ()
    """Evaluations: the names under which answers are recorded; two nodes of a graph may not share one."""
    max_uses: int | None = None
    """Batchers: how often a sample is trained, if it may be trained more than once."""
    max_reuse_age: int = 0
    """Batchers: the most versions between the first and the last use of a sample."""
    layout: str | None = None
    """Batchers: how they pack micro-batches. Trainers: which packing they compute. rows: one row for each sequence."""
    ranks_per_part: int = 1
    """Gangs: number of consecutive ranks that take the same part of each message; must divide the number of ranks."""
    parted_by: str = "sequence_parallel_size"
    """Gangs: the name of the argument that sets `ranks_per_part`."""
    accumulate: str = ""
    """Trainers: whether they begin with those groups of a batch that have arrived: auto, on or off."""
    whole_batches: str | None = None
    """Batchers and trainers: why a batch has to be whole, "" if it may come in pieces; None: it always comes whole."""
    drops: bool = False
    """Whether it may drop, filter or fail samples: `flowrl check` shows on which branches a loss ends a sample."""
    trains: bool = False
    """Whether it records steps in the ledger. Gangs and nodes that send weights count as trainers; any other trainer
    has to declare this."""
    asks: int = 0
    """Sources: the most further groups that are admitted because of one sample, which waits for them (`Out.admit`)."""
    sharded: bool = False
    """Sources: each replica sends its own groups, so there may be several replicas."""
    derives: Mapping[str, int] = field(default_factory=dict)
    """Label -> the most samples that the node derives under it from one (`Context.derive`). Nodes downstream count
    these places in every group, whether or not they are used."""
    joins: tuple[str, ...] = ()
    """In ports whose messages are matched by sample: they must come from one fan-out."""
    keeps_lineage: bool = True
    """True: sends one message for each that it takes, of the same sample. False: merges, splits or renames samples."""
    optional: tuple[str, ...] = ()
    """Ports that may stay unconnected."""
    unconnected: Mapping[str, str] = field(default_factory=dict)
    """Port -> the error if it has no edge, even if it is ignored, because the node's settings need an edge."""
    weights_in_host_memory: bool = False
    """Readers of weights: the node takes them from host memory even on a GPU, because it is not a vLLM engine."""
    weights_dtype: str = ""
    """Readers of weights: dtype of their parameters; auto: the one in the model's config.json. "": not known."""
    takes_every: int = 0
    """Readers of weights: the node takes every nth version without fail; the trainer waits until the node holds it."""
    without_devices: tuple[str, ...] = ()
    """In ports whose items are handled without the node's time-shared devices, so they do not wait for the lease."""
    fixed_weights: str = ""
    """Readers of weights: why this node cannot take any, "" if it can."""
    quantization: str = ""
    """Generators: how the engine's weights are quantized, so that it samples from another policy than the trainer's."""
    least_capability: float = 0.0
    """The least compute capability that each GPU of the node has to have."""
    cpu_flags: frozenset[str] = frozenset()
    """Without GPUs: flags, by the kernel's names, of which the node's CPU needs one or more for its KV cache in fp8."""
    asks_schema: bool = False
    """Nodes with an Ask port: whether they ask with a schema."""
    takes_schema: bool = False
    """Generators: whether they can force a reply into a schema."""
    stands_in: bool = False
    """Servers: each replica can answer the requests of another replica whose process has died (`analysis.stand_ins`).
    For a turn that is not held out, it reports the request before it answers (`context.ledger.request`)."""
    correction: str | None = None
    """Nodes that take a sample's behavior logprobs for those of a policy: what corrects the gap between the two, "" if
    nothing does; None: the gap does not matter to the node."""
    correct_by: str = "set --objective.correction tis, or weigh the tokens in your own loss by behavior_logprobs"
    """The change that would correct the gap."""
    as_data: bool = False
    """Samples that the node lets through are learned like data, whichever policy has sampled them: a loss that gets all
    its samples from such nodes, directly or through others, needs no correction."""
    memory_bytes: int = 0
    """Host memory of one replica, 0 if unknown."""
    columns: tuple[Column, ...] = ()
    """Columns that the node adds to the samples that it sends (`Sample.with_column`)."""
    needed_columns: tuple[Column, ...] = ()
    """Columns that the node reads of its samples: some node before it has to add them."""
    message_bytes: Mapping[str, int] = field(default_factory=dict)
    """Largest message by Out port, if the default estimate (from the token lengths) is far off."""


P = ParamSpec("P")
R = TypeVar("R")
METRIC_NAMES = (
    "step",
    "optimizer_steps",
    "time_s",
    "reward_mean",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "clip_fraction",
    "staleness_mean",
    "staleness_max",
    "logprob_mismatch",
    "behavior_gap",
    "tokens_generated",
    "tokens_trained",
    "response_tokens_mean",
    "generator_busy_s",
    "trainer_busy_s",
    "weight_update_pause_s",
    "ledger_head",
)
"""Figures of every line of metrics.jsonl; nodes give their own counters other names."""
PORT_KINDS = (In, Out, Call, Serve)


class Context(Protocol):
    """The host's description of the node's place in the run. Attached before `setup`."""

    replica: int
    num_replicas: int
    run_dir: str
    run_id: str
    seed: int
    steps: int | None
    """Total number of steps of this run, None if the data determine it."""
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    time_shared: bool
    """Whether the node uses its cores and GPUs alternately with others (`g.time_share`)."""
    resume_dir: str | None
    """Checkpoint to load, None for a fresh start."""
    start_version: int
    max_staleness: int | None
    """Hard bound on the age of a trained token, None if the graph declares none."""
    max_reused_age: int | None
    """Hard bound on the age of a token that is trained again, None if none is."""
    window: int | None
    """Number of finished groups, in admission order, from which a batcher may choose; 0: any, None: no admission."""
    longest_asked: int | None
    """Tokens of the longest prompt or context that this node is asked to continue, None if a caller declares none."""
    own_clock: bool
    """Whether this trainer's versions differ from those of the tokens, because it gets other batches than the main
    trainer."""
    in_pieces: bool
    """Whether this batcher sends the groups of a batch as they finish, because its trainers accumulate gradients."""
    has_leftovers: bool
    """Whether groups may reach this node that the main trainer's steps do not need, because samples ask for them."""
    others_stand_in: bool
    """Whether the other replicas can do everything that this one does, so that the run continues without it."""
    gang_address: str
    """"host:port" at which the ranks of this gang meet, "" if the node is not a gang."""
    weight_routes: tuple[WeightRoute, ...]
    """The readers of this trainer's weights, or of the weights that this generator reads."""
    keep_episodes: bool
    """Whether the run keeps episodes: whether `episode` is to be called."""
    ledger: Any
    """Ledger events, see flowrl.runtime.ledger.ledger_client.LedgerClient."""
    samples: Any
    """Samples that the run keeps, see flowrl.runtime.samples.sample_notes.SampleNotes."""

    async def derive(self, sample: Prompt | Sample, number: int, label: str = "") -> list[Prompt]:
        """Make `number` further samples from one that this node works on, as prompts: members of its group, under its
        ticket, with its prompt and columns, each with an id and a seed of its own.

        The node sends something made from each of them, or drops it, as it does with the samples that it takes: a
        prompt to a generator, or a rollout that it made of replies to its requests. `flowrl check` has to know the
        label and the largest number (`Facts.derives`); with one label it may be left out. Call this before anything is
        sent of `sample`. The prompts are in the ledger when this returns; a repeated call returns them again. Raises
        FlowrlError where a sample could not be booked.
        """
        ...

    async def blocking(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    def metric(self, name: str, value: float) -> None: ...
    def gauge(self, name: str, value: float) -> None: ...
    def progress(self, text: str) -> None: ...
    def episode(self, sample_id: str, line: str, *, failed: bool) -> None: ...
    def judged(self, version: int, figures: Mapping[str, Any]) -> None: ...
    def busy(self, name: str) -> Any: ...
    def exclusive(self, name: str) -> Any: ...
    def on_devices(self) -> Any: ...
    def waiting(self, what: str) -> Any: ...
    def outside(self, what: str) -> Any: ...
    async def step_done(self, version: int) -> None: ...


@functools.cache
def _port_hints(kind: type[Node]) -> Mapping[str, Any]:
    """The ports that a node class declares. Cached: reading annotations is most of the cost of making a node."""
    hints = declared_types(kind).items()
    return {name: hint for name, hint in hints if get_origin(hint) in PORT_KINDS or hint is Ask}


@dataclass(frozen=True)
class Saved:
    """The saved state that a node of a resumed run would continue from."""

    directory: Path
    """The checkpoint."""
    num_replicas: int
    """Number of replicas of the node in the saved run."""
    seed: int
    """Seed of the saved run."""
    states: Mapping[int, Mapping[str, Any]]
    """What `state` returned, by replica."""


class Node:
    """A role in the graph. Class attributes give the defaults that `Graph.add` can override."""

    cpus: ClassVar[float] = 0
    """Cores that a replica needs exclusively. 0: cheap, shares a host with other cheap nodes."""
    gpus: float = 0
    """GPUs of a replica; in a graph, the number that `Graph.add` was given, if any."""
    gang: ClassVar[bool] = False
    """Replicas run in lockstep (ZeRO ranks); incoming edges need `dispatch="gang"`."""
    keyed_state: ClassVar[bool] = False
    """The node keeps items by group, so with several replicas it needs `dispatch="key"`."""

    name: str = ""
    """The name in the graph; `Graph.add` sets it."""
    graph: str | None = None
    """The graph that the node was added to."""
    ports: Mapping[str, Port]
    context: Context

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        node = super().__new__(cls)
        ports: dict[str, Port] = {}
        for name, hint in _port_hints(cls).items():  # type: ignore[arg-type]  # a class can be hashed
            ports[name] = Ask(node, name) if hint is Ask else get_origin(hint)(node, name, get_args(hint))
            setattr(node, name, ports[name])
        node.ports = ports
        return node

    def preload(self) -> None:
        """Import the heavy packages that `setup` uses; blocking. In a process with several nodes, this comes before any
        set-up, one node after the other: imports in two threads, or in a process that is being forked, break.
        """

    async def setup(self) -> None:
        """Do expensive loading. Runs in the host with CPUs already pinned, before any message arrives."""

    async def run(self) -> None:
        """The node's body. Returning closes the out ports; raising fails the run."""
        raise NotImplementedError(f"{type(self).__name__} needs `async def run(self)`")

    async def close(self) -> None:
        """Release the resources that `setup` acquired. Runs at every orderly end, also after a failure elsewhere.

        An exception raised here is reported as a warning, because the run has ended and its records are complete.
        """

    def facts(self) -> Facts:
        """The facts that `flowrl check` needs about this node. Reads the node's settings only."""
        return Facts()

    def footprint(self, share: Share) -> Footprint | None:
        """The memory that one replica takes, predicted from sizes; None: it has no model, or its size is unknown.

        May read small files, such as a model's config.json.
        """
        return None

    async def on_acquire(self) -> None:
        """Called when this node gets its shared devices (`g.time_share`) back: restore what they held.

        The node's invocations begin after this call. Work outside of an invocation needs
        `async with self.context.on_devices():`.
        """

    async def on_release(self) -> None:
        """Called before another process gets the devices: move what they hold elsewhere."""

    def check(self, facts: Any) -> list[str]:
        """Problems of this node's own settings, as complete sentences; see flowrl.graph.analysis.check."""
        return []

    def notes(self) -> list[str]:
        """Sentences about the node's settings that `flowrl check` prints with the plan."""
        return []

    def preflight(self) -> str | None:
        """Cheap checks on the driver before Ray starts (files, tokenizer, imports). Raises ConfigError.

        The returned text is printed as a line of the run's set-up.
        """
        return None

    def check_resume(self, saved: Saved) -> list[str]:
        """Reasons why this node cannot continue from `saved`, as sentences. Called on the driver before Ray starts."""
        return []

    async def checkpoint(self, path: str) -> None:
        """Write large state (weights, optimizer) below `path`. Called on every replica while admission is closed."""

    def state(self) -> Mapping[str, Any]:
        """State that a checkpoint has to keep in addition to messages: scalars, strings, tuples, mappings, arrays.

        Called while the body is waiting. If the body waits in a send outside of an invocation, that send is repeated.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned at the checkpoint."""

    async def blocking(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking function in this node's own thread, off the event loop."""
        return await self.context.blocking(fn, *args, **kwargs)
