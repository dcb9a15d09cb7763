"""Ports: where a node's body meets its edges.

A port is declared by annotation (`rollouts: In[Sample]`); `Node` makes one per instance. Before the
run a port only carries names and types. The host process attaches the live side (`port.live`).

`In` is invariant and `Out` covariant: so mypy refuses an edge whose message types do not fit.

What "finished" means. In `async for x in self.port` item x is finished when the next one is asked
for and everything sent meanwhile has been taken in by the next process. In `each`, when its task has
returned. An item put on `hold` is finished by the `send(..., made_from=[x, ...])` that uses it up,
or by `drop(x, reason)`. An item that ends with neither send, hold nor drop is an error that names the
node, unless the node has no out port.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, overload

from flowrl.messages import Message, Tombstone

T = TypeVar("T", bound=Message)
T_co = TypeVar("T_co", bound=Message, covariant=True)
Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
U = TypeVar("U", bound=Message)
V = TypeVar("V", bound=Message)
M = TypeVar("M")


@dataclass(frozen=True)
class Members(Generic[M]):
    """All that came of one group: `items` in member order, and the tombstones of the others.

    Of joined ports an item is a tuple, the message of each port.
    """

    group_id: str
    ticket: int
    size: int
    items: tuple[M, ...]
    lost: tuple[Tombstone, ...]


class LiveIn(Protocol):
    """What the host attaches to an In port."""

    def iterate(self) -> AsyncIterator[Any]: ...
    async def each(self, body: Callable[[Any], Awaitable[None]], concurrency: int) -> None: ...
    def groups(self, size: int) -> AsyncIterator[Members[Any]]: ...
    def ordered(self) -> AsyncIterator[Any]: ...
    def hold(self, item: Message) -> None: ...
    def drop(self, item: Message, reason: str, state: str, *, group: bool = False) -> None: ...
    def finish(self, item: Message) -> None: ...
    def newest(self) -> Any: ...
    def ticket(self, item: Message) -> int: ...
    def join(self, others: Sequence[Any]) -> LiveJoin: ...


class LiveJoin(Protocol):
    """What the host makes of several In ports that are joined."""

    def iterate(self) -> AsyncIterator[Any]: ...
    def groups(self, size: int) -> AsyncIterator[Members[Any]]: ...


class LiveOut(Protocol):
    """What the host attaches to an Out port."""

    async def send(self, item: Message, made_from: Sequence[Message] | None) -> None: ...
    async def admit(self, items: Sequence[Message]) -> bool: ...
    def was_sent(self) -> bool: ...
    def close(self) -> None: ...


class Port:
    """Common part: the owner's name, the port's name and the message types."""

    def __init__(self, node: object, name: str, types: tuple[type[Message], ...]) -> None:
        self.node = node
        self.name = name
        self.types = types
        self.live: Any = None
        self.connected = False
        """The running graph has an edge here: the same for all replicas, also one whose own lanes are none."""

    def __repr__(self) -> str:
        names = ", ".join(t.__name__ for t in self.types)
        owner = getattr(self.node, "name", "") or type(self.node).__name__
        return f"{owner}.{self.name}: {type(self).__name__}[{names}]"


class In(Port, Generic[T]):
    """Messages enter the node here."""

    live: LiveIn

    def __aiter__(self) -> AsyncIterator[T]:
        """Items in order of arrival, until every producer has closed. One consumer at a time."""
        return self.live.iterate()

    async def each(self, body: Callable[[T], Awaitable[None]], *, concurrency: int = 1) -> None:
        """Run `body(item)` for every item, at most `concurrency` at a time, until end of stream.

        An exception in a body fails the node; `SampleFailed` makes a tombstone of its item instead.
        """
        await self.live.each(body, concurrency)

    def groups(self, size: int) -> AsyncIterator[Members[T]]:
        """Whole groups, each when its `size` members have come or are known to be lost.

        Every member is on hold until a send names it or it is dropped. Needs keyed or single input.
        """
        return self.live.groups(size)

    def ordered(self) -> AsyncIterator[tuple[int, T | None]]:
        """(ticket, item) in order of arrival, item None where the ticket's group was dropped.

        Every item is on hold. For nodes that form batches by admission order.
        """
        return self.live.ordered()

    def hold(self, item: T) -> None:
        """Keep `item` unfinished past the end of its invocation. Raises ValueError if it is not open."""
        self.live.hold(item)

    def drop(self, item: T, reason: str, *, state: str = "dropped", group: bool = False) -> None:
        """End `item` without a send; `state` is "dropped" or "filtered" in the ledger.

        `reason` is one word (a_word_like_this): it is counted under that name. With `group` the item's whole group is
        given up: members that are under way in other nodes are cancelled, in vLLM too, and end by the same reason.
        """
        self.live.drop(item, reason, state, group=group)

    def finish(self, item: T) -> None:
        """End `item` here and now, whether or not anything was made from it.

        For a node whose effect lies elsewhere (a trainer's weights, a file): a checkpoint from here on
        knows the item as done, although the body goes on.
        """
        self.live.finish(item)

    def newest(self) -> T | None:
        """Latest edges only: the newest message so far, None before the first."""
        return self.live.newest()  # type: ignore[no-any-return]

    def ticket(self, item: T) -> int:
        """The ticket under which `item` was admitted, -1 if it has none."""
        return self.live.ticket(item)


class Join(Generic[M]):
    """Several In ports of one node, matched by sample; made by `join`. Iterate it once, and not its ports.

    Every message of a sample shares its fate: `send` inside an invocation is made from all of them, and naming
    one in `made_from`, `hold` or `drop` means all. A sample that was lost on any branch does not come.
    """

    def __init__(self, ports: Sequence[In[Any]]) -> None:
        self._ports = tuple(ports)

    def __aiter__(self) -> AsyncIterator[M]:
        """A tuple for each sample, in order of completion, until every producer of every port has closed."""
        return self._live().iterate()

    def groups(self, size: int) -> AsyncIterator[Members[M]]:
        """As `In.groups`, of joined samples."""
        return self._live().groups(size)

    def _live(self) -> LiveJoin:
        first, *others = self._ports
        return first.live.join([port.live for port in others])


@overload
def join(first: In[T], second: In[U], /) -> Join[tuple[T, U]]: ...
@overload
def join(first: In[T], second: In[U], third: In[V], /) -> Join[tuple[T, U, V]]: ...
def join(*ports: In[Any]) -> Join[Any]:
    """Match what comes in on these ports of a node by sample: `async for scored, valued in join(a, b):`.

    The ports have to be fed, over branches that keep samples apart, by one Out port: name them in
    `facts().joins`, so that `flowrl check` holds the graph to it.
    """
    return Join(ports)


class Out(Port, Generic[T_co]):
    """Messages leave the node here."""

    live: LiveOut

    async def send(self, item: T_co, *, made_from: Sequence[Message] | None = None) -> None:  # type: ignore[misc]
        """Send one message; waits for a credit. `item` must not be changed afterwards.

        Its id derives from what it was made from: `made_from` if given, else the item being worked
        on. Cancelling a waiting send sends nothing.
        """
        await self.live.send(item, made_from)

    async def admit(self, items: Sequence[T_co]) -> bool:
        """Sources only: send the members of one new group once there is a ticket for it.

        Waits for the ticket; the group stands in the ledger before its first message leaves. Returns
        False when no further group is wanted (`--steps` is reached, or the run is ending).
        """
        return await self.live.admit(items)

    def was_sent(self) -> bool:
        """Whether the message that this invocation would send next is among those that a resumed run began with.

        A checkpoint may find an invocation in a send that waits for credit. It keeps the message, and the resumed
        run begins the invocation again, where `send` leaves the message out. An invocation that makes nothing else asks
        here first, returns if so, and spares the work.
        """
        return self.live.was_sent()

    def close(self) -> None:
        """End this stream before `run` returns, when the node goes on with other work. Once or more."""
        self.live.close()


class Call(Port, Generic[Req, Rep]):
    """The asking end of a request/reply edge."""

    async def __call__(
        self, request: Req, *, session: str = "", priority: int = 0, timeout_s: float | None = None
    ) -> Rep:
        """Ask and wait for the reply. Cancelling this cancels the work at the other end.

        `session` keeps requests of one session on one replica where the edge says so. Raises
        SampleFailed with the remote reason, or TimeoutError.
        """
        return await self.live.call(request, session=session, priority=priority, timeout_s=timeout_s)  # type: ignore[no-any-return]


class Serve(Port, Generic[Req, Rep]):
    """The answering end of a request/reply edge."""

    async def each(self, body: Callable[[Req], Awaitable[Rep]], *, concurrency: int = 64) -> None:
        """Answer every request with `body(request)` until every caller has closed.

        A cancelled or abandoned request cancels its body.
        """
        await self.live.serve(body, concurrency)
