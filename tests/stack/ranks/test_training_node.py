"""The trainer node on a real one-rank engine: versions, publications, records, and the staleness bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flowrl.errors import FlowrlError
from flowrl.messages import Batch, Mismatched, Weights
from flowrl.models import Policy
from flowrl.nodes.trainer import Trainer
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.training.loss.function_objective import FunctionObjective
from flowrl.training.loss.objective import LossInputs, Objective
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import KTOObjective
from flowrl.training.settings import ZeroSettings
from tests.training.training_cases import CASES, LR, TEMPERATURE, make_batch, make_model

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.slow

STALE = next(case for case in CASES if case.name == "stale_masked")


@dataclass
class Recorder:
    """Stands for the host: context, ledger and both ports. `events` has everything in order."""

    batches: Sequence[Batch]
    events: list[tuple[str, Any]] = field(default_factory=list)
    manifests: list[Weights] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    uses: list[Sequence[Use]] = field(default_factory=list)

    replica = 0
    num_replicas = 1
    run_id = "trainer-test"
    seed = 1
    steps = None
    cores = (0,)
    gpus = ()
    resume_dir = None
    start_version = 0
    max_staleness = 2
    max_reused_age = None
    own_clock = False
    gang_address = ""
    weight_routes = ()

    @property
    def ledger(self) -> Recorder:
        return self

    async def blocking(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def progress(self, text: str) -> None:
        pass

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        yield

    def on_devices(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def step_done(self, version: int) -> None:
        self.events.append(("done", version))

    def step(self, record: dict[str, Any], uses: Sequence[Use], *, policy: str) -> None:
        assert policy == "trainer"
        self.events.append(("booked", record["step"]))
        self.records.append(record)
        self.uses.append(uses)

    async def iterate(self) -> AsyncIterator[Batch]:
        for batch in self.batches:
            yield batch

    def finish(self, batch: Batch) -> None:
        self.events.append(("finished", next(i for i, b in enumerate(self.batches) if b is batch) + 1))

    async def send(self, manifest: Weights, made_from: Any) -> None:
        self.events.append(("sent", manifest.version))
        self.manifests.append(manifest)


def poisoned(batch: Batch) -> Batch:
    """A batch whose gradient is not a number."""
    samples = tuple(replace(s, advantages=np.where(s.policy_mask, np.float32("nan"), 0)) for s in batch.samples)
    return replace(batch, samples=samples)


def aged(batch: Batch, by: int) -> Batch:
    return replace(batch, samples=tuple(replace(s, versions=s.versions - by) for s in batch.samples))


def of_versions(batch: Batch) -> Batch:
    """The same with no token older than version 0: below, tokens are data."""
    samples = (replace(s, versions=np.where(s.policy_mask, np.maximum(s.versions, 0), -1)) for s in batch.samples)
    return replace(batch, samples=tuple(replace(s, versions=s.versions.astype(np.int32)) for s in samples))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Recorder, Trainer]]:
    """Five batches: plain, all masked for age, gradient not finite, partly masked, plain.

    The process group stays: DeepSpeed keeps it, for the next test in this process that trains, too.
    """
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, tied=True)
    plain = CASES[0]
    batches = [
        of_versions(make_batch(0, plain)),
        replace(of_versions(aged(make_batch(1, STALE), 5)), mask_staleness=0),
        poisoned(make_batch(2, plain)),
        make_batch(3, STALE),
        replace(make_batch(4, plain), metrics={"filtered_groups": 2.0}),
    ]
    host = Recorder(batches)
    trainer = Trainer(
        Policy(str(directory)), lr=0.01, temperature=TEMPERATURE, zero=ZeroSettings(optimizer="sgd"), probe_every=2
    )
    trainer.name = "trainer"
    trainer.context = host  # type: ignore[assignment]
    trainer.batches.live = trainer.weights.live = host  # type: ignore[assignment]
    trainer.weights.connected = True

    async def life() -> None:
        await trainer.setup()
        await trainer.run()

    asyncio.run(life())
    yield host, trainer
    asyncio.run(trainer.close())


def test_every_batch_makes_a_version_and_is_finished_before_the_checkpoint(ran: tuple[Recorder, Trainer]) -> None:
    host, trainer = ran
    assert host.events[0] == ("sent", 0)
    assert host.events[1:] == [(what, v) for v in range(1, 6) for what in ("booked", "sent", "finished", "done")]
    assert trainer.version == 5


def test_batches_without_an_update_are_published_as_unchanged(ran: tuple[Recorder, Trainer]) -> None:
    host, _ = ran
    assert [m.kind for m in host.manifests] == ["full", "full", "unchanged", "unchanged", "full", "full"]
    assert [r["unchanged"] for r in host.records] == [False, True, True, False, False]
    assert [r["optimizer_steps"] for r in host.records] == [1, 0, 0, 1, 1]
    assert [r["skipped_steps"] for r in host.records] == [0, 0, 1, 0, 0]
    checksums = [m.checksum for m in host.manifests]
    assert checksums[1] == checksums[2] == checksums[3]
    assert len(set(checksums)) == 4


def test_the_probe_comes_with_every_second_publication(ran: tuple[Recorder, Trainer]) -> None:
    host, _ = ran
    assert [bool(m.probe_logprobs) for m in host.manifests] == [True, False, False, False, True, False]


def test_the_books_get_every_token(ran: tuple[Recorder, Trainer]) -> None:
    host, _ = ran
    for batch, uses, record in zip(host.batches, host.uses, host.records, strict=True):
        by_id = {use.sample_id: use for use in uses}
        assert by_id.keys() == {s.sample_id for s in batch.samples}
        for sample in batch.samples:
            use = by_id[sample.sample_id]
            assert use.tokens + use.stale_tokens == sample.response_tokens
        assert record["tokens_trained"] == sum(use.tokens for use in uses)
    assert host.records[1]["tokens_trained"] == 0
    assert 0 < host.records[3]["tokens_trained"] < sum(s.response_tokens for s in host.batches[3].samples)
    assert host.records[3]["staleness_max"] == 1


def test_the_record_tells_the_batch(ran: tuple[Recorder, Trainer]) -> None:
    host, _ = ran
    record, batch = host.records[4], host.batches[4]
    versions = np.concatenate([s.versions[s.policy_mask] for s in batch.samples])
    assert record["staleness_mean"] == pytest.approx(4 - versions.mean())
    assert record["staleness_max"] == 4 - versions.min() == 2
    assert record["response_tokens_mean"] == pytest.approx(np.mean([s.response_tokens for s in batch.samples]))
    assert record["lr"] == 0.01
    assert set(record["behavior_gap_by_staleness"]) == {"0", "1", "2"}
    for name in ("loss", "kl", "entropy", "grad_norm", "clip_fraction", "behavior_gap"):
        assert np.isfinite(record[name]), name
    assert host.records[4]["filtered_groups"] == 2.0


def test_a_token_beyond_the_bound_never_reaches_a_gradient(ran: tuple[Recorder, Trainer]) -> None:
    _, trainer = ran
    batch = aged(make_batch(5, CASES[0]), 1)
    before = [t.clone() for _, ts in trainer._learner.engine.buckets(1 << 20) for t in ts]
    with pytest.raises(
        FlowrlError, match=r"sample '5-\d-\d' has tokens of version 2, .* a staleness of 3, but the graph allows"
    ):
        trainer._train_piece(batch)
    after = [t for _, ts in trainer._learner.engine.buckets(1 << 20) for t in ts]
    assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))


def test_checkpoint_is_a_model_directory_with_the_published_weights(
    ran: tuple[Recorder, Trainer], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    _, trainer = ran
    asyncio.run(trainer.checkpoint(str(tmp_path)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = {n: t for ns, ts in trainer._learner.engine.buckets(1 << 20) for n, t in zip(ns, ts, strict=True)}
    assert {n: bool((p == ours[n]).all()) for n, p in model.named_parameters()} == dict.fromkeys(ours, True)


def test_master_weights_keep_what_bfloat16_would_lose(ran: tuple[Recorder, Trainer]) -> None:
    """Steps far below half a unit in the last place of any weight add up all the same."""
    import torch

    from flowrl.training.engine.zero import ZeroEngine
    from flowrl.training.learner import Learner
    from flowrl.training.loss.objective import loss_masks

    _, trainer = ran
    gang = trainer._learner.engine.gang
    engine = ZeroEngine(trainer.policy.model, ZeroSettings(optimizer="sgd", dtype="bfloat16", clip_grad_norm=0.1), gang)
    learner = Learner(engine, trainer.objective, temperature=TEMPERATURE)
    part = make_batch(0, CASES[0]).split(1)[0]

    def head() -> torch.Tensor:
        return next(ts[0].float().clone() for _, ts in engine.buckets(1))

    start, moved = head(), []
    for _ in range(24):
        learner.train_piece(part, loss_masks(part.samples, -1, 0), 0, lr=2e-3)
        moved.append(float((head() - start).abs().max()))
    assert moved[0] < moved[-1]
    assert moved[-1] > 4 * moved[0] or moved[0] == 0.0


def reinforce(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    gain_BT = inputs.columns["advantages"] * inputs.logprobs_BT
    loss = -gain_BT[inputs.mask_BT].sum() / inputs.totals.num_tokens
    return loss, {"policy_loss": loss.detach()}


def test_a_loss_of_ones_own_trains_as_the_shipped_one(ran: tuple[Recorder, Trainer]) -> None:
    """The same weights after three batches, each of two optimizer steps in several micro-batches."""
    import torch

    from flowrl.training.engine.zero import ZeroEngine
    from flowrl.training.learner import Learner
    from flowrl.training.loss.objective import loss_masks

    _, trainer = ran
    gang = trainer._learner.engine.gang
    case = replace(CASES[0], optimizer_steps=2, token_budget=35)

    def trained(objective: Objective) -> tuple[list[float | None], dict[str, torch.Tensor]]:
        engine = ZeroEngine(trainer.policy.model, ZeroSettings(optimizer="sgd"), gang)
        learner = Learner(engine, objective, temperature=TEMPERATURE)
        losses = []
        for number in range(3):
            part = make_batch(number, case).split(1)[0]
            assert len(part.micro_batches) > len(part.step_ends) == 2
            update = learner.train_piece(part, loss_masks(part.samples, -1, number), number, lr=LR)
            losses.append(update.stats["policy_loss"])
            assert update.grad_norm and update.grad_norm > 0.01
        return losses, {n: t.clone() for ns, ts in engine.buckets(1 << 20) for n, t in zip(ns, ts, strict=True)}

    own_losses, own = trained(FunctionObjective(reinforce, columns=("advantages",), stats=("policy_loss",)))
    losses, shipped = trained(PolicyObjective(kind="reinforce", correction=None))
    assert own_losses == pytest.approx(losses, rel=1e-5)
    assert own.keys() == shipped.keys()
    for name, weight in own.items():
        torch.testing.assert_close(weight, shipped[name])


def test_a_completion_that_is_alone_in_its_batch_is_booked_without_tokens(
    ran: tuple[Recorder, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """KTO's baseline needs the completion of another prompt: the last batch of the data may have none."""
    from flowrl.training.learner import Learner

    _, trainer = ran
    learner = Learner(trainer._learner.engine, KTOObjective())
    monkeypatch.setattr(trainer, "objective", learner.objective)
    monkeypatch.setattr(trainer, "_learner", learner)
    batch = replace(of_versions(make_batch(0, CASES[0])), mask_staleness=-1)
    samples = [
        replace(s, label=1, mismatched=Mismatched(s.token_ids, s.policy_mask, s.ref_logprobs)) for s in batch.samples
    ]
    for count in (2, 1):
        rows = tuple((n,) for n in range(count))
        few = replace(batch, samples=tuple(samples[:count]), micro_batches=rows, step_ends=(count,))
        found = trainer._train_piece(few)
        assert found is not None
        record, uses, changed = found
        told = [(use.tokens, use.stale_tokens, use.masked_tokens) for use in uses]
        sizes = [sample.response_tokens for sample in few.samples]
        assert told == [(size, 0, 0) if count == 2 else (0, 0, size) for size in sizes]
        assert (changed, record["optimizer_steps"]) == (count == 2, count - 1)
        assert record["tokens_trained"] == (sum(sizes) if count == 2 else 0)


def test_a_stat_that_no_metrics_line_would_contain_is_an_error(ran: tuple[Recorder, Trainer]) -> None:
    from flowrl.training.learner import Learner
    from flowrl.training.loss.objective import loss_masks

    _, trainer = ran
    learner = Learner(trainer._learner.engine, FunctionObjective(reinforce, columns=("advantages",)))
    part = make_batch(0, CASES[0]).split(1)[0]
    with pytest.raises(
        FlowrlError, match=r"FunctionObjective\.loss returned the stats policy_loss, which its `stats` do"
    ):
        learner.train_piece(part, loss_masks(part.samples, -1, 0), 0, lr=0.0)
