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
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    get_args,
    get_origin,
)

from flowrl.graph.annotations import declared_types
from flowrl.graph.facts import Facts
from flowrl.graph.footprint import Footprint, Share
from flowrl.graph.ports import Call, In, Out, Port, Serve

if TYPE_CHECKING:
    from flowrl.graph.routes import WeightRoute

P = ParamSpec("P")
R = TypeVar("R")
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
    window: int | None
    """Number of finished groups, in admission order, from which a batcher may choose; 0: any, None: no admission."""
    longest_asked: int | None
    """Tokens of the longest prompt or context that this node is asked to continue, None if a caller declares none."""
    own_clock: bool
    """Whether this trainer's versions differ from those of the tokens, because it gets other batches than the main
    trainer."""
    in_pieces: bool
    """Whether this batcher sends the groups of a batch as they finish, because its trainers accumulate gradients."""
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
    return {name: hint for name, hint in declared_types(kind).items() if get_origin(hint) in PORT_KINDS}


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
    ports: Mapping[str, Port]
    context: Context

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        node = super().__new__(cls)
        ports: dict[str, Port] = {}
        for name, hint in _port_hints(cls).items():  # type: ignore[arg-type]  # a class can be hashed
            ports[name] = get_origin(hint)(node, name, get_args(hint))
            setattr(node, name, ports[name])
        node.ports = ports
        return node

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
