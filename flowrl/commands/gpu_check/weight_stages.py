"""Stages about weights on their way to vLLM, through vLLM's own classes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import make_small_model
from flowrl.graph.routes import WeightRoute, WeightTransport
from flowrl.messages import Weights
from flowrl.weights.probe import probe_sequences
from flowrl.weights.publish import Publisher

if TYPE_CHECKING:
    from flowrl.nodes.generation.vllm_sampler import VllmSampler
    from flowrl.weights.receive import Receiver

GIB = 1 << 30
GAP_LIMIT = 2e-3
"""Limit of the mean difference of a float32 logprob from vLLM's, whose attention may compute in TF32."""
READER = "generator/0"
UTILIZATION = 0.4
ENGINE: dict[str, Any] = {"concurrency": 8, "max_model_len": 256, "dtype": "float32"}


class ModelSource:
    """A whole model as the source from which a trainer publishes."""

    rank = 0

    def __init__(self, path: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
        self.vocab_size = int(self.model.config.vocab_size)

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        for name, parameter in self.model.named_parameters():
            yield (name,), (parameter.detach(),)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs from transformers, with whole logits in float32."""
        return [self._score_once(list(sequence)) for sequence in sequences]

    def _score_once(self, sequence: list[int]) -> list[float]:
        ids = torch.tensor([sequence], device=self.model.device)
        with torch.no_grad():
            logprobs = self.model(ids).logits[0, :-1].float().log_softmax(-1)
        found: list[float] = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found


def shared_memory(bench: Bench) -> None:
    """vLLM starts with other weights, takes the published ones, and on a GPU sleeps and takes the next ones."""
    old = make_small_model(bench.directory / "old", seed=1)
    source = ModelSource(make_small_model(bench.directory / "new", seed=2), "cpu")
    publisher = Publisher(source, "policy", run_id=f"gpu-check-{os.getpid()}", probe_every=1)
    try:
        asyncio.run(_through_shared_memory(bench, old, source, publisher))
    finally:
        publisher.close()


async def _through_shared_memory(bench: Bench, old: Path, source: ModelSource, publisher: Publisher) -> None:
    from flowrl.weights.receive import make_receiver

    taker = make_receiver((), READER, "gpu-check")
    sampler = await started(bench, old, taker)
    try:
        await _take_weights(bench, sampler, taker, publisher.publish_version(0), "first update")
        if bench.on_gpu:
            await _sleep(bench, sampler)
            with torch.no_grad():
                for parameter in source.model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            await sampler.wake()
            bench.figure("free with weights alone", _free_memory())
            await _take_weights(bench, sampler, taker, publisher.publish_version(1), "update after sleep")
            bench.figure("free with the KV cache", _free_memory())
    finally:
        await asyncio.to_thread(sampler.close)
        taker.close()


async def started(bench: Bench, path: Path, taker: Receiver, **engine: Any) -> VllmSampler:
    """vLLM with the model in `path`; `engine` has further options, which replace the defaults here, such as float32."""
    from flowrl.nodes.engine_options import Engine
    from flowrl.nodes.generation.vllm_sampler import VllmSampler

    share = UTILIZATION if bench.on_gpu else None
    sampler = await asyncio.to_thread(
        VllmSampler.start,
        str(path),
        cores=() if bench.on_gpu else (min(os.sched_getaffinity(0)),),
        num_gpus=int(bench.on_gpu),
        sleeps=bench.on_gpu,
        transfer=taker.engine,
        engine=Engine(**{**ENGINE, "gpu_memory_utilization": share, **engine}),
    )
    await sampler.listen()
    return sampler


async def _take_weights(
    bench: Bench, sampler: VllmSampler, taker: Receiver, manifest: Weights | None, name: str, *, joins: bool = False
) -> None:
    """Do one update, and check the probe."""
    assert manifest is not None
    if joins:
        info = taker.join_engine(manifest)
        assert info is not None
        await sampler.join_transfer(info)
    await update(bench, sampler, taker, manifest, name)
    found = await sampler.score_sequences(manifest.probe_token_ids)
    gap = mean_gap(found, manifest.probe_logprobs)
    bench.figure(f"{name}, probe", f"{gap:.1e}")
    bench.require(gap <= GAP_LIMIT, f"{name}: vLLM's logprobs differ from the published ones by {gap:.2e} on average")


async def update(bench: Bench, sampler: VllmSampler, taker: Receiver, manifest: Weights, name: str) -> None:
    """Do one update in the same way as a generator."""
    fetched = await asyncio.to_thread(taker.fetch_version, manifest)
    try:
        began = time.perf_counter()
        await sampler.pause()
        await sampler.load_version(fetched.update, manifest)
        await sampler.label_tokens(manifest.version)
        await sampler.resume()
        bench.figure(f"{name}, pause", f"{1000 * (time.perf_counter() - began):.0f} ms")
    finally:
        fetched.close()


def mean_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference of logprobs."""
    pairs = [abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(pairs) / len(pairs)


async def _sleep(bench: Bench, sampler: VllmSampler) -> None:
    awake = torch.cuda.mem_get_info()[0]
    await sampler.sleep()
    gained = torch.cuda.mem_get_info()[0] - awake
    whole = torch.cuda.mem_get_info()[1]
    bench.figure("freed by sleep", f"{gained / GIB:.1f} GiB of {whole / GIB:.1f}")
    bench.require(gained > 0.5 * UTILIZATION * whole, f"asleep, vLLM gave back {gained / GIB:.1f} GiB only")


def _free_memory() -> str:
    return f"{torch.cuda.mem_get_info()[0] / GIB:.1f} GiB"


class RecordingGroup:
    """A stand-in for NCCL's group: keeps what is broadcast, in order."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        self.sent.append(tensor.clone())

    def destroy(self) -> None:
        """There is nothing to destroy."""


class RepeatingGroup(RecordingGroup):
    """Fills the receiver's buffers with what another group has kept."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._left = list(kept)

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        tensor.copy_(self._left.pop(0))


def nccl_packing(bench: Bench) -> None:
    """vLLM's sender and receiver with a group that only records: on one GPU, without NCCL."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    from flowrl.weights.device import Announced, ZeroSource

    buffer_bytes = 600_000  # gives several buffers, which end within a bucket of the trainer
    model = ModelSource(make_small_model(bench.directory / "model", seed=3), bench.device)
    source = ZeroSource(model, bucket_bytes=1 << 17)
    engine = NCCLTrainerWeightTransferEngine(
        client=Announced(), source=source, packed=True, packed_buffer_size_bytes=buffer_bytes
    )
    group = engine.model_update_group = RecordingGroup()
    engine.send_weights()
    rows = [(meta.name, (list(meta.shape), meta.dtype)) for meta in source.metadata()]
    found: dict[str, Tensor] = {}
    packed_nccl_broadcast_consumer(
        iterator=iter(rows),
        group=RepeatingGroup(group.sent),
        src=0,
        post_unpack_func=lambda tensors: found.update({name: tensor.clone() for name, tensor in tensors}),
        buffer_size_bytes=buffer_bytes,
        device=torch.device(bench.device),
    )
    wanted = dict(model.model.named_parameters())
    bench.figure("broadcasts", str(len(group.sent)))
    bench.require(found.keys() == wanted.keys(), f"{len(found)} of {len(wanted)} parameters arrived")
    different = [name for name, parameter in wanted.items() if not torch.equal(found[name], parameter)]
    bench.require(not different, f"{len(different)} parameters arrived with other values, such as {different[:1]}")


def nccl(bench: Bench) -> None:
    """The trainer's side in this process on GPU 0, vLLM's engine on GPU 1."""
    asyncio.run(_over_nccl(bench))


async def _over_nccl(bench: Bench) -> None:
    from flowrl.weights.receive import make_receiver

    old = make_small_model(bench.directory / "old", seed=1)
    source = ModelSource(make_small_model(bench.directory / "new", seed=2), "cuda:0")
    routes = (WeightRoute(READER, WeightTransport.NCCL, 1),)
    publisher = Publisher(source, "policy", run_id="gpu-check", routes=routes, probe_every=1)
    taker = make_receiver(routes, READER, "gpu-check")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = named.split(",")[1] if named else "1"  # affects only vLLM's process, not this
    sampler = await started(bench, old, taker)
    try:
        for version in range(2):
            manifest = await asyncio.to_thread(publisher.publish_version, version)
            taking = _take_weights(bench, sampler, taker, manifest, f"broadcast {version}", joins=version == 0)
            await asyncio.gather(taking, asyncio.to_thread(publisher.transmit_tensors))
        bench.figure("sequences of the probe", str(len(probe_sequences(source.vocab_size))))
    finally:
        await asyncio.to_thread(sampler.close)
        publisher.close()
