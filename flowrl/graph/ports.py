"""Ports: the connection points between a node's body and its edges.

A port is declared by annotation (`rollouts: In[Sample]`); `Node` creates one per instance. Before the
run a port only carries names and types. The host process attaches the live side (`port.live`).

`In` is invariant and `Out` is covariant, so mypy rejects an edge whose message types do not match.

When an item is "finished": in `async for x in self.port`, item x is finished when the body asks for the
next item and the next process has accepted everything sent meanwhile. In `each`, an item is finished when
its task has returned. An item put on `hold` is finished by the `send(..., made_from=[x, ...])` that
consumes it, or by `drop(x, reason)`. An item that ends without send, hold or drop is an error that names
the node, unless the node has no out port.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Int32, Message, Prompt, Record, Sample, Tombstone
from flowrl.messages.episode import Reply, Turn
from flowrl.messages.sampling import ReplySchema, Sampling

T = TypeVar("T", bound=Message)
T_co = TypeVar("T_co", bound=Message, covariant=True)
Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
U = TypeVar("U", bound=Message)
V = TypeVar("V", bound=Message)
M = TypeVar("M")


@dataclass(frozen=True)
class Members(Generic[M]):
    """The outcome of one group: `items` in member order, and the tombstones of the other members.

    For joined ports each item is a tuple with one message per port.
    """

    group_id: str
    ticket: int
    size: int
    items: tuple[M, ...]
    lost: tuple[Tombstone, ...]


class LiveIn(Protocol):
    """The live side that the host attaches to an In port."""

    def iterate(self) -> AsyncIterator[Any]: ...
    async def each(self, body: Callable[[Any], Awaitable[None]], concurrency: int) -> None: ...
    def groups(self, size: int) -> AsyncIterator[Members[Any]]: ...
    def ordered(self) -> AsyncIterator[Any]: ...
    def hold(self, item: Message) -> None: ...
    def drop(self, item: Message, reason: str, state: str, *, group: bool = False) -> None: ...
    def finish(self, item: Message) -> None: ...
    def keep(self, item: Message, record: Callable[[], Record]) -> None: ...
    def newest(self) -> Any: ...
    def ticket(self, item: Message) -> int: ...
    def join(self, others: Sequence[Any]) -> LiveJoin: ...


class LiveJoin(Protocol):
    """The live side that the host creates for several joined In ports."""

    def iterate(self) -> AsyncIterator[Any]: ...
    def groups(self, size: int) -> AsyncIterator[Members[Any]]: ...


class LiveOut(Protocol):
    """The live side that the host attaches to an Out port."""

    async def send(self, item: Message, made_from: Sequence[Message] | None) -> None: ...
    async def admit(self, items: Sequence[Message], asks: int, asked_by: str | None) -> bool: ...
    def was_sent(self, made_from: Sequence[Message] | None) -> bool: ...
    @property
    def num_untaken(self) -> int: ...
    @property
    def num_unfinished(self) -> int: ...
    def close(self) -> None: ...


class LiveAsk(Protocol):
    """The live side that the host attaches to an Ask port."""

    async def ask(self, question: PolicyQuestion) -> Reply: ...
    async def ask_turn(self, turn: Turn) -> Reply: ...
    def make_sample(self, prompt: Prompt, replies: Sequence[Reply], content: Mapping[str, object]) -> Sample: ...
    def forget(self, session: str) -> None: ...


@dataclass(frozen=True)
class PolicyQuestion:
    """What `Ask.ask` was given: token ids, or messages, which follow the ids if both are there."""

    messages: tuple[Mapping[str, object], ...]
    token_ids: Int32 | None
    after: Reply | None
    sample: Prompt | None
    trained: bool
    sampling: Sampling | None
    schema: ReplySchema | None
    tools: tuple[Mapping[str, object], ...]


class Port:
    """Common part: the owner's name, the port's name and the message types."""

    def __init__(self, node: object, name: str, types: tuple[type[Message], ...]) -> None:
        self.node = node
        self.name = name
        self.types = types
        self.live: Any = None
        self.connected = False
        """True if the running graph has an edge here; the same for all replicas, even for one without own lanes."""

    def __repr__(self) -> str:
        names = ", ".join(t.__name__ for t in self.types)
        owner = getattr(self.node, "name", "") or type(self.node).__name__
        return f"{owner}.{self.name}: {type(self).__name__}[{names}]"


class In(Port, Generic[T]):
    """Messages enter the node here."""

    live: LiveIn

    def __aiter__(self) -> AsyncIterator[T]:
        """Yield items in order of arrival until every producer has closed. One consumer at a time."""
        return self.live.iterate()

    async def each(self, body: Callable[[T], Awaitable[None]], *, concurrency: int = 1) -> None:
        """Run `body(item)` for every item, at most `concurrency` at a time, until end of stream.

        An exception in a body fails the node, except `SampleFailed`, which turns its item into a tombstone.
        """
        await self.live.each(body, concurrency)

    def groups(self, size: int) -> AsyncIterator[Members[T]]:
        """Yield whole groups, each when all its `size` members have arrived or are known to be lost.

        Every member is on hold until a send names it or it is dropped. Needs keyed or single input.
        """
        return self.live.groups(size)

    def ordered(self) -> AsyncIterator[tuple[int, T | None]]:
        """Yield (ticket, item) in order of arrival; item is None if the ticket's group was dropped.

        Every item is on hold. For nodes that form batches by admission order.
        """
        return self.live.ordered()

    def hold(self, item: T) -> None:
        """Keep `item` unfinished past the end of its invocation. Raises ValueError if it is not open."""
        self.live.hold(item)

    def drop(self, item: T, reason: str, *, state: str = "dropped", group: bool = False) -> None:
        """End `item` without a send; `state` is "dropped" or "filtered" in the ledger.

        `reason` is one word (a_word_like_this); the drop is counted under that name. With `group` the item's whole
        group is dropped: members in progress in other nodes, also in vLLM, are cancelled and end with the same reason.
        """
        self.live.drop(item, reason, state, group=group)

    def finish(self, item: T) -> None:
        """End `item` immediately, whether or not a message was made from it.

        For a node whose effect is not a message (a trainer's weights, a file): every later checkpoint
        records the item as done, although the body continues.
        """
        self.live.finish(item)

    def keep(self, item: T, record: Callable[[], Record]) -> None:
        """Store `record()` with `item` in every checkpoint that finds the item unfinished.

        The resumed run begins the invocation again, with the record in the item's field `record`; a class without
        this field raises ValueError. `record` must not wait. It is called while the invocation waits. The checkpoint
        also has what the node reported to the ledger until then. A second `keep` replaces the first.
        """
        self.live.keep(item, record)

    def newest(self) -> T | None:
        """Return the newest message so far, None before the first. For `latest` edges only."""
        return self.live.newest()  # type: ignore[no-any-return]

    def ticket(self, item: T) -> int:
        """The ticket under which `item` was admitted, -1 if it has none."""
        return self.live.ticket(item)


class Join(Generic[M]):
    """Several In ports of one node, matched by sample; created by `join`. Iterate it once; do not iterate its ports.

    All messages of a sample are handled together: `send` inside an invocation counts as made from all of them, and
    naming one in `made_from`, `hold` or `drop` means all. A sample that was lost on any branch is not yielded.
    """

    def __init__(self, ports: Sequence[In[Any]]) -> None:
        self._ports = tuple(ports)

    def __aiter__(self) -> AsyncIterator[M]:
        """Yield a tuple for each sample, in order of completion, until every producer of every port has closed."""
        return self._live().iterate()

    def groups(self, size: int) -> AsyncIterator[Members[M]]:
        """Like `In.groups`, for joined samples."""
        return self._live().groups(size)

    def _live(self) -> LiveJoin:
        first, *others = self._ports
        return first.live.join([port.live for port in others])


@overload
def join(first: In[T], second: In[U], /) -> Join[tuple[T, U]]: ...
@overload
def join(first: In[T], second: In[U], third: In[V], /) -> Join[tuple[T, U, V]]: ...
def join(*ports: In[Any]) -> Join[Any]:
    """Match the messages that arrive on these ports of a node by sample: `async for scored, valued in join(a, b):`.

    One Out port has to feed all of them, over branches that keep samples apart. Name the ports in
    `facts().joins`, so that `flowrl check` enforces this.
    """
    return Join(ports)


class Out(Port, Generic[T_co]):
    """Messages leave the node here."""

    live: LiveOut

    async def send(self, item: T_co, *, made_from: Sequence[Message] | None = None) -> None:  # type: ignore[misc]
        """Send one message; waits for a credit. `item` must not be changed afterwards.

        Its id derives from the items it was made from: `made_from` if given, else the current item of
        the invocation. Cancelling a waiting send sends nothing.
        """
        await self.live.send(item, made_from)

    async def admit(self, items: Sequence[T_co], *, asks: int = 0, asked_by: str | None = None) -> bool:
        """Send the members of one new group as soon as a ticket is free. For sources only.

        Waits for the ticket; the group is recorded in the ledger before its first message leaves. Returns
        False when no further group is needed (`--steps` is reached, or the run is ending). Raises FlowrlError if
        `items` are not the prompts of one group.

        From the call until all members are sent, the group belongs to every checkpoint, and the resumed run admits it
        first, whether or not the source calls `admit` for it again; a call for the same group then returns its result.
        So a source may change its state before the call or after it.

        `asks`: how many further groups may be admitted because of each of these samples before it has its reward, those
        included that they ask for in turn; the source declares the largest number as `Facts.asks`. Tickets are kept for
        these groups. `asked_by` names the sample because of which this group is admitted: it takes one of the tickets
        kept for that sample, at once.
        """
        groups = {item.group_id if isinstance(item, Prompt) else None for item in items}
        if len(groups) != 1 or None in groups:
            kinds = ", ".join(sorted({type(item).__name__ for item in items})) or "none"
            raise FlowrlError(
                f"admit on the port {self.name!r} takes the prompts of one group; it got {len(items)} messages "
                f"({kinds}) of {len(groups - {None})} groups"
            )
        return await self.live.admit(items, asks, asked_by)

    def was_sent(self, *, made_from: Sequence[Message] | None = None) -> bool:
        """Whether the next message of this invocation is already among the messages that a resumed run started with.

        `made_from`: as in `send`, which a node that sends several samples in one invocation has to name.

        A checkpoint may be taken while an invocation waits for credit in a send. The checkpoint keeps the message;
        the resumed run restarts the invocation, and its `send` skips the message. An invocation that produces nothing
        else calls this first and returns if it is True, which saves the work.
        """
        return self.live.was_sent(made_from)

    @property
    def num_untaken(self) -> int:
        """Messages sent here that a consumer has not taken in yet; with several consumers, the largest count."""
        return self.live.num_untaken

    @property
    def num_unfinished(self) -> int:
        """Messages sent here that a consumer has not finished yet; with several consumers, the largest count."""
        return self.live.num_unfinished

    def close(self) -> None:
        """End this stream before `run` returns, if the node continues with other work. May be called repeatedly."""
        self.live.close()


class Call(Port, Generic[Req, Rep]):
    """The requesting end of a request/reply edge."""

    server: object = None
    """The node that answers, once `g.call` has named its port."""

    async def __call__(
        self,
        request: Req,
        *,
        session: str = "",
        group: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Rep:
        """Send a request and wait for the reply. Cancelling this cancels the work at the other end.

        With an `affinity_margin` on the edge, the requests of a `session` go to one replica, and so do the sessions of
        a `group`, while the margin allows it; call `forget` when a session ends. Among requests that wait, those with
        the smallest `priority` are answered first, then in order of arrival. Raises SampleFailed with the remote
        reason, or TimeoutError.
        """
        return await self.live.call(  # type: ignore[no-any-return]
            request, session=session, group=group, priority=priority, timeout_s=timeout_s
        )

    def forget(self, session: str) -> None:
        """The session has ended: the next request under this name begins a new one."""
        self.live.forget(session)


class Ask(Call[Turn, Reply]):
    """Asks a policy. Declare it as `policy: Ask`, and connect it by `g.call(node.policy, generator.turns)`.

    Each ask waits for its place by the ticket of the item that it is made for, the oldest first; those of one item go
    to one replica, which has their common prefix in its cache. A checkpoint keeps the replies for items that are not
    finished: when a resumed run begins the item again, the same asks get the same replies at once.
    """

    live: LiveAsk

    def __init__(self, node: object, name: str) -> None:
        super().__init__(node, name, (Turn, Reply))

    async def ask(
        self,
        asked: str | Sequence[Mapping[str, object]] | Int32,
        *,
        trained: bool = False,
        sampling: Sampling | None = None,
        schema: ReplySchema | Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
        after: Reply | None = None,
        sample: Prompt | None = None,
    ) -> Reply:
        """The policy's reply to messages (a text is one message of the user), or its continuation of token ids.

        With `after`, the messages follow that reply: the context is its own, token by token, and what the chat template
        writes between. `sampling` replaces the generator's own. A `schema` (a mapping is a JSON schema) forces the
        reply's form. `tools` are those that the policy may call.

        With `trained`, the tokens are booked for the sample of the current item, which is a Prompt, or for `sample`;
        `make_sample` makes it of the replies. Otherwise the tokens are counted apart and belong to no sample.

        Cancelling this cancels the request. Raises SampleFailed if the generator refuses it, such as a context that is
        too long, and FlowrlError for what the ledger could not prove.
        """
        said: Sequence[Mapping[str, object]] = ()
        if isinstance(asked, str):
            said = ({"role": "user", "content": asked},)
        elif not isinstance(asked, np.ndarray):
            said = asked
        ids = asked if isinstance(asked, np.ndarray) else None
        form = ReplySchema(json=schema) if isinstance(schema, Mapping) else schema
        told = (tuple(said), ids, after, sample, trained, sampling, form, tuple(tools))
        return await self.live.ask(PolicyQuestion(*told))

    def make_sample(self, prompt: Prompt, replies: Sequence[Reply], **content: object) -> Sample:
        """The sample of `prompt` that consists of these replies; `content` sets further fields of `Sample`.

        A reply whose context continues an earlier reply's sequence is added to it, any other begins a further sequence
        (`Sample.branches`). The ledger gets the sample as an episode of this node. Replies that were asked for the
        prompt and are left out are booked as redone. Call it once for each prompt.
        """
        return self.live.make_sample(prompt, replies, content)

    async def ask_turn(self, turn: Turn) -> Reply:
        """The reply to a turn of an episode, which the caller has numbered. A cancelled turn is booked as abandoned."""
        return await self.live.ask_turn(turn)


class Serve(Port, Generic[Req, Rep]):
    """The answering end of a request/reply edge."""

    async def each(self, body: Callable[[Req], Awaitable[Rep]], *, concurrency: int = 64) -> None:
        """Answer every request with `body(request)` until every caller has closed.

        A cancelled or abandoned request cancels its body. A body that raises `flowrl.errors.OutOfService` takes this
        replica out of service: its request and all later ones go to the other replicas.
        """
        await self.live.serve(body, concurrency)
