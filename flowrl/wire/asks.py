"""The live side of an Ask port: questions become turns under the ticket of the item that they are asked for.

Invariants
- What the ledger could not prove is refused here, before anything is sampled: a trained ask that belongs to no sample,
  or to one that is made already; other sampling than training's, or a schema, for tokens that are trained.
- The trained asks of a sample are turns of its one attempt, numbered from 0. When the sample's item ends, they are in
  the sample (`make_sample`), or abandoned, or, if the sample was lost, void with its attempt.
- A reply that a checkpoint has is not asked for again: it is found by a digest of what was asked, so that a repeated
  invocation may ask in another order. What it no longer asks is left out of its sample.
- A request is a function of the run's seed, of the item and of what is asked, whatever replica asks and when.

Waits: an ask waits for a place on its edge and for its reply. Cancelling it cancels the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from flowrl.errors import FlowrlError, SampleFailed
from flowrl.graph.ports import PolicyQuestion
from flowrl.messages import Prompt, Sample, no_ids
from flowrl.messages.episode import Reply, Turn, make_sample
from flowrl.messages.sampling import Sampling
from flowrl.wire.activity import in_invocation
from flowrl.wire.items import Item, ItemAsks, OpenItems, asking, at_hand
from flowrl.wire.requests import LiveCall

OF_BEHAVIOR = ("temperature", "top_p", "top_k")
"""Options of sampling that decide which distribution behavior logprobs are of: the trainer knows one."""


class AskReports(Protocol):
    """What an Ask port tells the ledger."""

    def cancelled(self, turn: Turn) -> None: ...
    def sampled(self, sample: Sample, replies: Sequence[Reply], unused: Collection[str], seconds: float) -> None: ...
    def attempt_void(self, sample_id: str, attempt: int, cause: str) -> None: ...


class PolicyCall(LiveCall):
    """One Ask port of one replica; `call` is what a LiveCall is made of. `server` is the node that is asked, `seed` the
    run's."""

    def __init__(self, *call: Any, server: Any, open_items: OpenItems, reports: AskReports, seed: int) -> None:
        super().__init__(*call)
        self._server = server
        self._open_items = open_items
        self._reports = reports
        self._seed = seed
        self._held_out: dict[str, ItemAsks] = {}
        """Sample without a ticket that is not made yet -> its asks, which no checkpoint keeps."""
        self._numbers = itertools.count()
        """The numbers of asks that are made for no item."""

    async def ask_turn(self, turn: Turn) -> Reply:
        """The reply to a turn. If this is cancelled, the turn is booked as abandoned."""
        try:
            reply: Reply = await self.call(
                turn, session=turn.sample_id, group=turn.group_id, priority=turn.priority, timeout_s=None
            )
        except asyncio.CancelledError:
            self._reports.cancelled(turn)
            raise
        return reply

    async def ask(self, question: PolicyQuestion) -> Reply:
        if not question.messages and question.token_ids is None and question.after is None:
            raise FlowrlError(f"{self.port} was asked nothing; give it a text, messages or token ids")
        item = self._item_for(question.sample)
        asks = self._asks_for(item, question.sample)
        prompt = self._require_trainable(question, item, asks) if question.trained else None
        call = asks.name_call(digest_question(self.port, question))
        if (known := asks.take_known(call)) is not None:
            return known
        turn = self._make_turn(question, item, asks, prompt, call)
        if prompt is not None:
            asks.unsampled.setdefault(prompt.sample_id, {})[turn.request_id] = None
        try:
            reply = await self.ask_turn(turn)
        except (asyncio.CancelledError, SampleFailed) as end:
            if prompt is not None:
                del asks.unsampled[prompt.sample_id][turn.request_id]
            if isinstance(end, SampleFailed):  # a refused request keeps its number, too
                self._reports.cancelled(turn)
            raise
        reply = replace(
            reply,
            token_ids=reply.token_ids.copy(),
            behavior_logprobs=reply.behavior_logprobs.copy(),
            versions=reply.versions.copy(),
            columns={name: values.copy() for name, values in reply.columns.items()},
            context_ids=(reply.context_ids if turn.messages else turn.token_ids).copy(),
            sample_id="" if prompt is None else prompt.sample_id,
        )
        if item is not None:
            asks.note_reply(call, reply)
        return reply

    def make_sample(self, prompt: Prompt, replies: Sequence[Reply], content: Mapping[str, object]) -> Sample:
        item, name = self._item_for(prompt), prompt.sample_id
        asks = self._asks_for(item, prompt)
        self._held_out.pop(name, None)
        if name in asks.sampled:
            raise FlowrlError(f"{self.port} made sample {name!r} a second time; call make_sample once")
        sample = make_sample(prompt, replies, **content)
        asked, used = asks.unsampled.pop(name, {}), tuple(reply.request_id for reply in replies)
        asks.sampled[name] = used
        is_derived = self._open_items.find_derived(prompt) is not None
        if name in asks.sampled_before and not is_derived:  # the checkpoint's ledger has it already
            if used != asks.sampled_before[name]:
                raise FlowrlError(
                    f"{self.port} made sample {name!r} of other replies than before the checkpoint; let the same "
                    "prompt and replies lead to the same sample"
                )
        elif self._ticket_of(item) >= 0:
            unused = [request_id for request_id in asked if request_id not in used]
            self._reports.sampled(sample, replies, unused, time.monotonic() - asks.began_s)
        return sample

    def end_asks(self, item: Item) -> None:
        """The item has ended. Raises FlowrlError if it was not lost, and a sample that was asked for is not made."""
        asks = item.asks
        if asks is None:
            return
        self.forget(_name_item(item))
        for sample_id in [*asks.unsampled]:
            self.forget(sample_id)
            del asks.unsampled[sample_id]
            lost = self._open_items.derived.get(sample_id, item).lost or item.lost
            if lost is None:
                raise FlowrlError(
                    f"it asked with trained=True for sample {sample_id!r}, whose item has ended without the sample; "
                    "make it of the replies with make_sample and send it, or drop the prompt"
                )
            self._reports.attempt_void(sample_id, 0, lost.reason)

    def _item_for(self, sample: Prompt | None) -> Item | None:
        """The open item of `sample`, or the one that the current invocation asks for.

        What is asked for a derived sample is kept with the item that it was derived from: a checkpoint has that one.
        """
        found = None if sample is None else self._open_items.find_item(sample) or self._open_items.find_derived(sample)
        item = found or asking.get()
        return item if item is None or item.derived_from is None else item.derived_from

    def _asks_for(self, item: Item | None, sample: Prompt | None) -> ItemAsks:
        if item is not None:
            return self._open_items.asks_of(item)
        return ItemAsks() if sample is None else self._held_out.setdefault(sample.sample_id, ItemAsks())

    def _ticket_of(self, item: Item | None) -> int:
        return at_hand.get() if item is None else item.envelope.ticket

    def _require_trainable(self, question: PolicyQuestion, item: Item | None, asks: ItemAsks) -> Prompt:
        """The prompt of the sample that trained tokens belong to. Raises FlowrlError for what could not be proven."""
        prompt: Any = question.sample if question.sample is not None or item is None else item.body
        if not isinstance(prompt, Prompt) or in_invocation.get() is None:
            found = "no item" if prompt is None or in_invocation.get() is None else f"a {type(prompt).__name__}"
            raise FlowrlError(
                f"{self.port} was asked with trained=True for {found}; tokens are trained as those of a Prompt: ask in "
                "the invocation of one, or name it with sample=, or ask with trained=False"
            )
        if question.schema is not None:
            raise FlowrlError(
                f"{self.port} was asked with trained=True and a schema, under which tokens come from a masked "
                "distribution that the trainer does not compute; ask with trained=False, or without a schema"
            )
        if prompt.sample_id in asks.sampled:
            raise FlowrlError(
                f"{self.port} was asked with trained=True for sample {prompt.sample_id!r} after make_sample; ask before"
            )
        if not getattr(self._server, "trained", True):
            raise FlowrlError(f"{self.port} was asked with trained=True, but {self._server.name} has trained=False")
        own: Sampling | None = getattr(self._server, "sampling", None)
        for name in OF_BEHAVIOR if question.sampling is not None and own is not None else ():
            asked, usual = getattr(question.sampling, name), getattr(own, name)
            if asked != usual:
                raise FlowrlError(
                    f"{self.port} was asked with trained=True and {name}={asked}, but the trainer takes its tokens for "
                    f"those of {name}={usual}, as {self._server.name} has it; leave it out, or set it there"
                )
        return prompt

    def _make_turn(
        self, question: PolicyQuestion, item: Item | None, asks: ItemAsks, prompt: Prompt | None, call: bytes
    ) -> Turn:
        about = f"{self.port}/{next(self._numbers)}" if item is None else _name_item(item)
        place = f"{about}/{call.hex()}"
        seed = f"{self._seed}/{place}"
        if prompt is not None:  # held-out samples are drawn alike whenever they are asked for
            seed = f"{prompt.seed}/{call.hex()}"
        number = 0 if prompt is None else asks.next_turn(prompt.sample_id)
        ids, messages, num_reply = question.token_ids, question.messages, 0
        if (after := question.after) is not None:
            ids = np.concatenate([after.context_ids, after.token_ids, no_ids() if ids is None else ids])
            if messages:
                messages, num_reply = (after.message, *messages), after.token_ids.size
        return Turn(
            request_id=place if prompt is None else f"{prompt.sample_id}/0.{number}",
            sample_id=about if prompt is None else prompt.sample_id,
            group_id="" if item is None else item.envelope.group_id,
            turn=number,
            attempt=0,
            ticket=self._ticket_of(item),
            seed=hash_seed(seed),
            token_ids=no_ids() if ids is None else np.asarray(ids, np.int32),
            max_tokens=MOST_TOKENS if question.sampling is None else question.sampling.max_tokens,
            tools=question.tools,
            trained=prompt is not None,
            sampling=question.sampling,
            schema=question.schema,
            messages=messages,
            reply_tokens=num_reply,
        )


MOST_TOKENS = (1 << 31) - 1
"""The limit of a turn whose reply is as long as the generator's own sampling allows."""


def _name_item(item: Item) -> str:
    """The name under which the asks of an item go to one replica: its sample's id, or else its message's."""
    return getattr(item.body, "sample_id", "") or item.envelope.id.hex()


def digest_question(port: str, question: PolicyQuestion) -> bytes:
    """What makes two asks of a port the same."""
    after = question.after
    given = (
        port,
        question.trained,
        question.sampling,
        question.sample.sample_id if question.sample is not None else "",
    )
    form = None if question.schema is None else question.schema.vllm_arguments()
    text = json.dumps([question.messages, question.tools, form], sort_keys=True, default=repr)
    digest = hashlib.blake2b(f"{given!r}{text}".encode("utf-8", "surrogatepass"), digest_size=16)
    for ids in (question.token_ids, *(() if after is None else (after.context_ids, after.token_ids))):
        digest.update(b"none" if ids is None else np.ascontiguousarray(ids, "<i4").tobytes() + b";")
    return digest.digest()


def hash_seed(text: str) -> int:
    """A sampler's seed: 63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
