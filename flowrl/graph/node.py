"""`Node`: the base class of every role, built-in or the user's own.

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

Instances are built wherever the graph is built (the command line, `flowrl check`, every host), so
`__init__` only stores settings. Imports of heavy packages and anything costly go into `setup`.
"""

from __future__ import annotations

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
    get_type_hints,
)

from flowrl.graph.facts import Facts
from flowrl.graph.ports import Call, In, Out, Port, Serve

if TYPE_CHECKING:
    from flowrl.graph.routes import WeightRoute

P = ParamSpec("P")
R = TypeVar("R")
PORT_KINDS = (In, Out, Call, Serve)


class Context(Protocol):
    """What the host tells a node about its place in the run. Attached before `setup`."""

    replica: int
    num_replicas: int
    run_dir: str
    run_id: str
    seed: int
    steps: int | None
    """Steps this run is to make in all, None if the data decide."""
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    resume_dir: str | None
    """Checkpoint to load, None for a fresh start."""
    start_version: int
    max_staleness: int | None
    """Hard bound of the age of a trained token, None where the graph declares none."""
    window: int | None
    """Finished groups among which a batcher may choose, by admission order; 0: any, None: no admission."""
    own_clock: bool
    """This trainer's versions are not those of the tokens: other batches come to it than to the main trainer."""
    gang_address: str
    """"host:port" at which the ranks of this gang meet, "" if the node is no gang."""
    weight_routes: tuple[WeightRoute, ...]
    """The readers of a trainer's weights, or of those this generator reads."""
    ledger: Any
    """Ledger events, see flowrl.runtime.accounting.LedgerClient."""

    async def blocking(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    def metric(self, name: str, value: float) -> None: ...
    def gauge(self, name: str, value: float) -> None: ...
    def progress(self, text: str) -> None: ...
    def busy(self, name: str) -> Any: ...
    def exclusive(self, name: str) -> Any: ...
    def waiting(self, what: str) -> Any: ...
    def outside(self, what: str) -> Any: ...
    async def step_done(self, version: int) -> None: ...


@dataclass(frozen=True)
class Saved:
    """What a node would go on from, and as what, when a run is resumed."""

    directory: Path
    """The checkpoint."""
    num_replicas: int
    """Of the node in the run that is to go on."""
    seed: int
    """Of that run."""
    states: Mapping[int, Mapping[str, Any]]
    """What `state` returned, by replica."""


class Node:
    """A role in the graph. Class attributes give the defaults that `Graph.add` can override."""

    cpus: ClassVar[float] = 0
    """Cores a replica needs for itself. 0: cheap, shares a host with other cheap nodes."""
    gpus: ClassVar[float] = 0
    gang: ClassVar[bool] = False
    """Replicas run in lockstep (ZeRO ranks): `dispatch="gang"` on the way in."""
    keyed_state: ClassVar[bool] = False
    """Remembers items by group: with several replicas needs `dispatch="key"`."""

    name: str = ""
    ports: Mapping[str, Port]
    context: Context

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        node = super().__new__(cls)
        ports: dict[str, Port] = {}
        for name, hint in get_type_hints(cls).items():
            kind = get_origin(hint)
            if kind in PORT_KINDS:
                ports[name] = kind(node, name, get_args(hint))
                setattr(node, name, ports[name])
        node.ports = ports
        return node

    async def setup(self) -> None:
        """Load what is costly. Runs in the host, CPUs already pinned, before any message."""

    async def run(self) -> None:
        """The body. Returning closes the out ports; raising fails the run."""
        raise NotImplementedError(f"{type(self).__name__} needs `async def run(self)`")

    async def close(self) -> None:
        """Release what `setup` took. Runs at every orderly end, also after a failure elsewhere.

        What it raises is told as a warning: the run has ended, with its records complete.
        """

    def facts(self) -> Facts:
        """What `flowrl check` has to know of this node. Looks at the node's settings only."""
        return Facts()

    async def on_acquire(self) -> None:
        """The devices that this node shares (`g.time_share`) are its own again: bring back what they held."""

    async def on_release(self) -> None:
        """Another process gets the devices now: move what they hold out of the way."""

    def check(self, facts: Any) -> list[str]:
        """Problems of this node's own settings, complete sentences; see flowrl.graph.check."""
        return []

    def preflight(self) -> None:
        """Cheap trial on the driver before Ray starts (files, tokenizer, imports). Raises ConfigError."""

    def check_resume(self, saved: Saved) -> list[str]:
        """Why this node cannot go on from `saved`, complete sentences. Asked on the driver before Ray starts."""
        return []

    async def checkpoint(self, path: str) -> None:
        """Write large state (weights, optimizer) below `path`. Called on every replica, admission closed."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint has to keep besides messages: scalars, strings, tuples, mappings, arrays.

        Asked for while the body stands in a wait. A send outside of invocations in which it stands is repeated.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned at the checkpoint."""

    async def blocking(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking function in this node's own thread, off the event loop."""
        return await self.context.blocking(fn, *args, **kwargs)
