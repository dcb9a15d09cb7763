"""The trainer's side of the weights edge.

`publish_version` and `transmit_tensors` are collective: every rank calls them with the same arguments, because
gathering ZeRO-3 shards and scoring the probe are collectives. The order in a trainer is

    manifest = publisher.publish_version(version)  # all ranks, off the event loop
    if manifest is not None:
        await self.weights.send(manifest)          # rank 0
    publisher.transmit_tensors()                   # all ranks, off the event loop

With shared memory nothing waits for a generator. On GPUs a broadcast ends only when every generator has received it,
so `transmit_tensors` has to come after `send`, and ends with the slowest generator.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowrl.graph.routes import WeightRoute, WeightTransport, common_transport, through_hosts
from flowrl.messages import Weights
from flowrl.weights.probe import probe_sequences
from flowrl.weights.send import AS_IT_IS, Narrowing, SegmentSender, Sender, Source


@dataclass(frozen=True)
class PublishTimes:
    """Seconds that the last publication spent gathering shards, copying into the transport and scoring the probe."""

    gather_s: float = 0.0
    copy_s: float = 0.0
    probe_s: float = 0.0


class Publisher:
    """Publishes the versions of one policy.

    `probe_every=n` adds the probe to every nth publication, the first included; 0 leaves it out.
    `routes` lead to its readers and determine the transport; without routes it is shared memory. `narrowing` says in
    which dtype tensors are sent. If `adapter` is given, the source's tensors are those of a LoRA adapter, and `adapter`
    holds what else the readers need; adapters are sent through host memory, whatever the routes are.
    """

    def __init__(
        self,
        source: Source,
        policy: str,
        *,
        run_id: str,
        routes: Sequence[WeightRoute] = (),
        narrowing: Narrowing = AS_IT_IS,
        adapter: Mapping[str, Any] | None = None,
        probe_every: int = 10,
    ) -> None:
        self.policy = policy
        self.times = PublishTimes()
        self._source = source
        self._sender = make_sender(through_hosts(routes) if adapter else routes, run_id, policy, narrowing=narrowing)
        self._adapter = adapter
        self._probe_every = probe_every
        self._num_published = 0
        self._untransmitted = False
        """Whether receivers wait for staged tensors. False after an unchanged version, whose tensors they have."""
        self._last: Weights | None = None

    def publish_version(self, version: int, kind: str = "full") -> Weights | None:
        """Make `version` readable; collective. Returns the manifest on rank 0, None on other ranks.

        `kind` "unchanged" publishes the last content again under a new number, for a batch without an update.
        """
        if kind not in ("full", "unchanged"):
            raise ValueError(f"found kind {kind!r}; this publisher knows 'full' and 'unchanged'")
        if kind == "full" or not self._num_published:
            began = time.perf_counter()
            manifest = self._sender.stage_version(self._source, self.policy, version)
            self._untransmitted = True
            if manifest is not None and self._adapter is not None:
                manifest = replace(manifest, kind="adapter", adapter=self._adapter)
            staged = time.perf_counter()
            if self._probe_every and self._num_published % self._probe_every == 0:
                sequences = probe_sequences(self._source.vocab_size)
                logprobs = self._source.score(sequences)
                if manifest is not None:
                    scored = tuple(tuple(float(p) for p in row) for row in logprobs)
                    manifest = replace(manifest, probe_token_ids=sequences, probe_logprobs=scored)
            copy_s = self._sender.copy_s
            self.times = PublishTimes(staged - began - copy_s, copy_s, time.perf_counter() - staged)
            self._last = manifest
        elif self._last is not None:
            self._last = replace(self._last, version=version, kind="unchanged", probe_token_ids=(), probe_logprobs=())
        self._num_published += 1
        return self._last

    def transmit_tensors(self) -> None:
        """Move the tensors, if the receivers have to take part; collective. Call it after sending the manifest.

        Does nothing after an unchanged version, for which receivers do not take part either.
        """
        if self._untransmitted:
            self._untransmitted = False
            self._sender.transmit_tensors()

    def close(self) -> None:
        """Remove what the transport provides for readers."""
        self._sender.close()


def make_sender(routes: Sequence[WeightRoute], run_id: str, policy: str, *, narrowing: Narrowing) -> Sender:
    """The trainer's end of the backend that serves all readers. Raises ConfigError if none does.

    Both ends get the same routes, so they choose the same backend (`flowrl.weights.receive.make_receiver`).
    """
    transport = common_transport(routes)
    if transport is WeightTransport.NCCL:
        from flowrl.weights.device import NcclSender  # needs vLLM

        return NcclSender(routes, narrowing=narrowing)
    serve = transport is WeightTransport.TCP  # then readers copy segments before they use them, and do not say when
    return SegmentSender(run_id, policy, narrowing=narrowing, serve=serve, readers=0 if serve else len(routes))
