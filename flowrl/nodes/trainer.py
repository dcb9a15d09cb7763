"""The trainer turns batches into versions. One replica is one ZeRO rank; all ranks run in lockstep.

A batch comes whole or in pieces: `Trainer.run` takes each piece, `Trainer._train_piece` has the learner add its
gradient (`flowrl.training.learner.Learner.train_piece`), and after the last piece books what the step was made of.

Invariants
- Every batch makes exactly one version, even a batch without an update (all tokens masked, or a gradient
  that is not finite). The version of such a batch is published as `unchanged`, so tickets return.
- The weights of `start_version` are published before the first batch, so generators hold exactly the
  trainer's weights before they sample.
- A batch is finished (acked) when its update is done and in the ledger, and before a checkpoint. If the batch comes in
  pieces, all pieces are finished together at that point.

All heavy work runs in the node's one blocking thread, in the same order on every rank; the event loop
stays free. The trainer waits for a batch (end of stream ends the run), for the other ranks inside
collectives (the supervisor handles a dead rank), and for a checkpoint at the end of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Footprint, Saved, Share
from flowrl.graph.ports import In, Out
from flowrl.graph.routes import readers_dtype
from flowrl.machine.disk import told_if_full
from flowrl.messages import Batch, Weights
from flowrl.models import Policy, check_model, known_directory, resolve
from flowrl.models.model_files import stored_dtype
from flowrl.models.model_layout import balance_problems, layout_note, shared_notes, shared_problems, trainer_layout
from flowrl.nodes.batch_records import BatchRecord, HeldOutFigures
from flowrl.nodes.model_memory import ResidentNode, trainer_footprint
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.training.batch_stats import BatchStats
from flowrl.training.engine.requirements import TAG, check_training, lora_problems, resume_problems, setting_problems
from flowrl.training.layouts import Decision, explain_refused_tree
from flowrl.training.loss.objective import Objective, loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.token_objectives import ReverseKL
from flowrl.training.model.trainable import check_trainable
from flowrl.training.settings import Accumulate, LoRA, Schedule, SequenceKind, Start, ZeroSettings, attention_problems

if TYPE_CHECKING:
    from flowrl.training.engine.zero import ZeroEngine
    from flowrl.training.learner import Learner, Update
    from flowrl.training.model.policy_model import OutputLayer
    from flowrl.weights.publish import Publisher

ROOM = "make room, or keep fewer with --keep; --resume goes on from the last checkpoint that is whole"


def explain_whole_batches(objective: object, zero: ZeroSettings, *, epochs: int, balance: float = 0.0) -> str:
    """What keeps a trainer from starting before the whole batch has arrived, "" if nothing does.

    `balance` is the weight of the load-balancing loss of a mixture of experts.
    """
    if not isinstance(objective, Objective):
        return "it has no objective"
    name = type(objective).__name__
    if epochs > 1:
        return f"it makes {epochs} passes over each batch"
    if objective.needs_mismatched:
        return f"the baseline of {name} is a mean over the whole batch"
    if objective.chooses_tokens:
        return f"{name} chooses among the tokens of a whole batch"
    if objective.offline:
        return "its batches come from data and are ready before it asks for them"
    if objective.mean_over is None:
        return f"{name} does not say what its loss is a mean over (mean_over)"
    if balance:
        return "the load-balancing loss of its experts is a mean over the whole batch"
    if zero.optimizer == "muon":
        return "muon averages gradients of several steps before they can be divided"
    return ""


class Trainer(ResidentNode):
    """Trains `policy` with `objective` under DeepSpeed ZeRO and publishes its weights.

    `lr` is the peak rate; `epochs` is the number of passes over each batch (the batcher's `optimizer_steps`
    splits a batch into several optimizer steps). `temperature` has to equal the generator's. With a `lora` of
    rank 1 or more the trainer trains an adapter and keeps the policy's own weights; a generator that receives
    adapters needs the same `lora`. `teacher` is the model that the objective `ReverseKL` compares the policy with.
    Every `sequence_parallel_size` consecutive ranks share their micro-batches: each rank has a slice of the positions,
    and `sequence_parallel_kind` is the kind of attention. Or every `tensor_parallel_size` consecutive ranks share them:
    each rank has a part of the layers' matrices. `router_aux_loss_coef` is the weight of the load-balancing loss of a
    mixture of experts. Every `publish_every`th version is published, every `probe_every`th publication carries the
    probe. The first `start_after` batches make versions without an update, for an actor that waits until its critic
    has learnt.

    With `accumulate` "auto" or "on", the trainer starts on the finished groups of a batch before the other groups are
    finished, if its batcher can send pieces. "on" is refused where batches have to be whole.

    Batches from `held_out` are never trained on. The metrics contain the objective's stats on them: as
    `held_out/NAME` for the last and for every `judge_every`th version, and as `held_out_before/NAME` in the
    first line for the weights at the start. If the batches end before `steps`, those of the last version are a line of
    `evaluations.jsonl` with the phase `end`, because the version's own line is booked before the trainer knows that.
    """

    cpus = 1
    gang = True

    batches: In[Batch]
    held_out: In[Batch]
    weights: Out[Weights]

    def __init__(
        self,
        policy: Policy,
        *,
        objective: Objective | None = None,
        lr: float = 1e-5,
        schedule: Schedule | None = None,
        epochs: int = 1,
        temperature: float = 1.0,
        zero: ZeroSettings | None = None,
        lora: LoRA | None = None,
        sequence_parallel_size: int = 1,
        sequence_parallel_kind: SequenceKind = "ulysses",
        tensor_parallel_size: int = 1,
        router_aux_loss_coef: float = 0.0,
        teacher: Policy | None = None,
        publish_every: int = 1,
        probe_every: int = 10,
        start_after: int = 0,
        judge_every: int = 0,
        accumulate: Accumulate = "auto",
    ) -> None:
        self.policy = policy
        self.objective: Objective = PolicyObjective() if objective is None else objective
        self.lr = lr
        self.schedule = schedule or Schedule()
        self.epochs = epochs
        self.temperature = temperature
        self.zero = zero or ZeroSettings()
        self.lora = lora or LoRA()
        self.sequence_parallel_size = sequence_parallel_size
        self.sequence_parallel_kind: SequenceKind = sequence_parallel_kind
        self.tensor_parallel_size = tensor_parallel_size
        self.router_aux_loss_coef = router_aux_loss_coef
        self.teacher = teacher
        self.publish_every = publish_every
        self.probe_every = probe_every
        self.start_after = start_after
        self.judge_every = judge_every
        self.accumulate: Accumulate = accumulate
        self._held_out = HeldOutFigures()
        self.version = 0
        self._published = -1
        self._record = BatchRecord()
        self._before: dict[str, Any] = {}
        """Figures of the held-out batch for the first line of the metrics."""
        self._pieces: list[Batch] = []
        """Pieces whose gradient is accumulated. They stay unfinished until their batch's step, so a snapshot between
        two pieces contains all of them, and a resumed run starts the batch again."""
        self._learner: Learner
        self._publisher: Publisher | None = None

    # Declarations for the graph

    def facts(self) -> Facts:
        return Facts(
            publish_every=self.publish_every,
            optional=("weights", "held_out"),
            adapter_rank=self.lora.synced_rank,
            saves=self.policy.name,
            layout=self._layout.layout,
            ranks_per_part=max(1, self.sequence_parallel_size, self.tensor_parallel_size),
            parted_by=("tensor" if self.tensor_parallel_size > 1 else "sequence") + "_parallel_size",
            accumulate=self.accumulate,
            correction=getattr(self.objective, "correction_name", None),
            needed_columns=getattr(self.objective, "needed_columns", ()),
            whole_batches=explain_whole_batches(
                self.objective, self.zero, epochs=self.epochs, balance=self.router_aux_loss_coef
            ),
        )

    def footprint(self, share: Share) -> Footprint | None:
        scalar = getattr(self.objective, "head", "lm") == "scalar"
        return trainer_footprint(self.policy, share, self.zero, self.lora, scalar=scalar, **self._shared)

    def check(self, facts: Any) -> list[str]:
        if not isinstance(self.objective, Objective):
            return [
                f"objective is {self.objective!r}, which is not an Objective; wrap a function as "
                "FunctionObjective(function, columns=(...)), or let a class inherit from Objective"
            ]
        least = dict.fromkeys(("sequence_parallel_size", "tensor_parallel_size", "epochs", "publish_every"), 1)
        least |= dict.fromkeys(("probe_every", "start_after", "judge_every"), 0)
        problems = [
            f"{name} is {getattr(self, name)}; it has to be {low} or more"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if not 0 <= self.lr < math.inf:
            problems.append(f"lr is {self.lr}; it has to be a finite number of at least 0")
        if self.objective.needs_mismatched and facts.groups_per_batch == 1:
            problems.append("KTO's baseline is a mean over a batch, but a batch is 1 completion; it needs 2 or more")
        if self.gpus > 1:
            problems.append(f"gpus is {self.gpus:g}, but a rank trains on one GPU; use more ranks (replicas=)")
        if self.temperature <= 0:
            problems.append(f"temperature is {self.temperature}; it has to be above 0, and the generator's")
        if self.accumulate not in get_args(Accumulate):
            problems.append(f"accumulate is {self.accumulate!r}; choose one of {', '.join(get_args(Accumulate))}")
        if isinstance(self.objective, ReverseKL) != (self.teacher is not None):
            problems.append("the objective ReverseKL and a teacher= go together; give both, or neither")
        problems += self._objective_problems() + attention_problems(self.zero.attention, self.zero.dtype)
        problems += explain_refused_tree(self.zero.layout, self._layout)
        problems += shared_problems(self.policy, self.zero, self.lora, **self._shared)
        ranks, coef = self.sequence_parallel_size, self.router_aux_loss_coef
        problems += balance_problems(self.policy, coef, self.objective.head, ranks)
        return problems + setting_problems(self.zero.deepspeed) + lora_problems(self.lora, self.zero)

    @property
    def _layout(self) -> Decision:
        return trainer_layout(self.policy, self.zero, self.sequence_parallel_kind)

    @property
    def _shared(self) -> dict[str, Any]:
        """How many ranks divide a micro-batch's positions, or the matrices, and the attention for divided positions."""
        kind = self.sequence_parallel_kind
        return {"sequence": self.sequence_parallel_size, "kind": kind, "tensor": self.tensor_parallel_size}

    def notes(self) -> list[str]:
        return [layout_note(self._layout), *shared_notes(**self._shared)]

    def preflight(self) -> None:
        check_model(self.policy)
        model_dir = known_directory(self.policy)
        if model_dir is not None:
            kind = {"trust_remote_code": self.policy.trust_remote_code, "balanced": self.router_aux_loss_coef > 0}
            check_trainable(model_dir, self.objective.head, **kind, tensor_size=self.tensor_parallel_size)
        check_training(self.zero, self.lora, model_dir=model_dir, trust_remote_code=self.policy.trust_remote_code)

    def _objective_problems(self) -> list[str]:
        """What the objective says of itself; the class of a user is tried on made-up data, which loads torch."""
        kind = type(self.objective)
        if kind.__module__.partition(".")[0] == "flowrl":
            return self.objective.problems()
        from flowrl.training.loss.function_trial import objective_problem

        problem = objective_problem(self.objective)
        found = [] if problem is None else [f"the objective {kind.__name__} {problem}"]
        return self.objective.problems() + found

    def check_resume(self, saved: Saved) -> list[str]:
        state = self._state_dir(str(saved.directory)) / TAG
        return resume_problems(state, self.zero, saved.num_replicas, self.tensor_parallel_size)

    # Lifecycle

    def preload(self) -> None:
        from flowrl.training.engine.gang import import_deepspeed

        import_deepspeed(on_cpu=not self.context.gpus)
        import flowrl.training.engine.zero
        import flowrl.training.learner  # noqa: F401  # for later

    async def setup(self) -> None:
        self.version = self.context.start_version
        if self.context.steps is None:
            self.schedule.rate_factor(self.version + 1, None)
        self._learner = await self.blocking(self._load_learner)

    def _load_learner(self) -> Learner:
        """The learner, and what publishes its weights; collective."""
        engine = self._open_engine()
        if self.weights.connected:
            self._publisher = self._make_publisher(engine)
        self.context.progress("ready")
        from flowrl.training.learner import Learner

        return Learner(
            engine,
            self.objective,
            epochs=self.epochs,
            temperature=self.temperature,
            max_staleness=None if self.context.own_clock else self.context.max_staleness,
            max_reused_age=self.context.max_reused_age,
            teacher=self._load_teacher(engine),
            router_aux_loss_coef=self.router_aux_loss_coef,
        )

    def _open_engine(self) -> ZeroEngine:
        """Meet the other ranks and load the model; collective."""
        progress = self.context.progress
        resumed = self.context.resume_dir
        if resumed is not None and not self.lora.rank:
            source = str(self._model_dir(resumed))
        else:  # a checkpoint of an adapter does not contain the base model
            source = resolve(self.policy, progress=progress)
        progress("importing torch and DeepSpeed")
        import torch

        from flowrl.training.engine.gang import Gang
        from flowrl.training.engine.requirements import is_built
        from flowrl.training.engine.zero import ZeroEngine
        from flowrl.training.model.scalar_head import has_scalar_head

        torch.set_num_threads(max(1, len(self.context.cores)))
        torch.manual_seed(self.context.seed)
        device = torch.device("cuda", 0) if self.context.gpus else torch.device("cpu")
        here = self.context
        gang = Gang.meet_ranks(here.replica, here.num_replicas, here.gang_address, device, **self._shared)
        if self.zero.nvme_path and not is_built():
            progress("compiling DeepSpeed's async_io: takes some minutes, once per machine")
        progress("loading the model")
        start: Start = "policy"  # how a scalar head is initialised: a model that already has one keeps it
        if self.objective.head == "scalar" and has_scalar_head(source):
            start = "reward_model"
        kind = {"trust_remote_code": self.policy.trust_remote_code, "balanced": self.router_aux_loss_coef > 0}
        engine = ZeroEngine(source, self.zero, gang, head=self.objective.head, start=start, lora=self.lora, **kind)
        if resumed is not None:
            engine.load_state(self._state_dir(resumed))
        return engine

    def _load_teacher(self, engine: ZeroEngine) -> OutputLayer | None:
        """The output layer of the model that the objective compares the policy with; None without one."""
        if self.teacher is None:
            return None
        from flowrl.training.model.policy_model import load_output_layer

        return load_output_layer(
            resolve(self.teacher, progress=self.context.progress),
            vocab_size=engine.vocab_size,
            dtype=engine.settings.dtype,
            device=engine.device,
            trust_remote_code=self.teacher.trust_remote_code,
            beta=self.objective.beta if isinstance(self.objective, ReverseKL) else 1.0,
        )

    def _make_publisher(self, engine: ZeroEngine) -> Publisher:
        """The publisher of the weights, in the form that their readers take."""
        from flowrl.training.model.adapter import vllm_adapter_config
        from flowrl.weights.publish import Publisher
        from flowrl.weights.send import Narrowing, kept_in_float32

        readers = (route.dtype for route in self.context.weight_routes)
        dtype = readers_dtype(readers, auto=stored_dtype(resolve(self.policy)))
        adapter = vllm_adapter_config(self.lora, engine.model.network) if self.lora.synced_rank else None
        return Publisher(
            engine,
            self.name,
            run_id=self.context.run_id,
            routes=self.context.weight_routes,
            narrowing=Narrowing(dtype, kept_in_float32(engine.model.network)),
            adapter=adapter,
            probe_every=self.probe_every,
        )

    async def run(self) -> None:
        await self._publish_version(changed=True)
        await self._held_out.collect_batches(self.held_out)
        async for batch in self.batches:
            await self._assert_bound(batch)
            with self.context.busy("train"):
                trained = await self.blocking(self._train_piece, batch)
            self._pieces.append(batch)
            if trained is None:
                self.batches.hold(batch)
                continue
            record, uses, changed = trained
            self.version += 1
            if self.context.replica == 0:
                self.context.ledger.step(record, uses, policy=self.name)
            if self.version % self.publish_every == 0:
                await self._publish_version(changed=changed)
            for piece in self._pieces:  # before `step_done`, where a checkpoint may be taken
                self.batches.finish(piece)
            self._pieces = []
            await self.context.step_done(self.version)
        if self._published != self.version:  # `publish_every` skipped the last version
            await self._publish_version(changed=True)
        if not self._held_out.lacks_report(self.version):
            return
        async with self.context.on_devices():
            with self.context.busy("judge"):
                figures = await self.blocking(self._held_out.report_figures, self.version, self._judge_batch)
        if self.context.replica == 0:
            self.context.judged(self.version, figures)

    async def _assert_bound(self, batch: Batch) -> None:
        """If the tokens' versions are not this trainer's, the ledger checks the age of the groups."""
        if self.context.own_clock and batch.samples:
            groups = dict.fromkeys(sample.group_id for sample in batch.samples)
            await self.context.ledger.assert_bound(self.name, self.version, tuple(groups))

    def find_resident(self) -> object:
        return self._learner

    async def close(self) -> None:
        await super().close()
        if self._publisher is not None:
            self._publisher.close()

    async def checkpoint(self, path: str) -> None:
        """Save the model as a Hugging Face directory, and each rank's master weights and optimizer state."""
        async with self.context.on_devices():
            await self.blocking(self._save_checkpoint, path)

    # Methods that run in the blocking thread; collective

    def _train_piece(self, piece: Batch) -> tuple[dict[str, Any], list[Use], bool] | None:
        """Train a piece of a batch, which may be all of it. At the batch's end return its metrics line, the uses of all
        ranks, and whether the weights changed; before that, return None."""
        part = self._own_part(piece)
        masks = loss_masks(part.samples, part.mask_staleness, self.version)
        step = self.version + 1
        lr = self.lr * self.schedule.rate_factor(step, self.context.steps)
        if self.version == 0 and not piece.piece:
            self._before = self._held_out.measure_figures(0, self._judge_batch, "held_out_before")
        rests = self.version < self.start_after
        if rests:
            update: Update | None = self._learner.skip_piece(part, masks, self.version)
        else:
            update = self._learner.train_piece(part, masks, self.version, lr)
        too_few = update is not None and update.without_a_step and not rests
        self._record.add_part(part, masks, self.version, too_few=too_few)
        if update is None or not piece.last:
            return None
        own = (BatchStats.add_up(self._record.stats), self._record.uses)
        all_stats, all_uses = zip(*self._learner.engine.gang.gather_parts(own), strict=True)
        stats, uses = BatchStats.add_up(all_stats), [use for of_rank in all_uses for use in of_rank]
        record = {"step": step, "lr": lr, "num_groups": self._record.num_groups}
        self._record = BatchRecord()
        if not self.objective.offline:  # offline data have no rewards that a batcher could report
            record |= piece.metrics
        record |= stats.make_metrics(offline=self.objective.offline) | update.metrics
        is_judged = step == self.context.steps or bool(self.judge_every and step % self.judge_every == 0)
        record |= self._before | (self._held_out.report_figures(step, self._judge_batch) if is_judged else {})
        self._before = {}
        return record, uses, update.changed

    def _own_part(self, batch: Batch) -> Batch:
        """This rank's part. Over an edge without gang dispatch a single rank receives the whole, which is not split."""
        if batch.step_ends:
            return batch
        if self.context.num_replicas > 1:
            raise ConfigError(
                f"node {self.name!r} has {self.context.num_replicas} ranks but received a batch that was not split; "
                'connect its batches with dispatch="gang"'
            )
        return batch.split(1)[0]

    def _judge_batch(self, batch: Batch) -> Mapping[str, Any]:
        return self._learner.judge_batch(self._own_part(batch))

    async def _publish_version(self, *, changed: bool) -> None:
        """Make the current version readable and announce it; all ranks."""
        publisher = self._publisher
        if publisher is None:
            self._published = self.version
            return
        skipped = self.version - self._published > 1  # versions that may have changed the weights
        async with self.context.on_devices():
            with self.context.busy("publish"):
                kind = "full" if changed or skipped else "unchanged"
                manifest = await self.blocking(publisher.publish_version, self.version, kind)
                if manifest is not None:
                    await self.weights.send(manifest)
                await self.blocking(publisher.transmit_tensors)
        self._published = self.version

    def _save_checkpoint(self, path: str) -> None:
        engine = self._learner.engine
        if self.objective.at_end:  # a reward model's directory has mean and std of its scores on the held-out batch
            judged = self._held_out.measure_figures(self.version, self._judge_batch)
            mean, square = judged.get("held_out/score_mean"), judged.get("held_out/score_square")
            if mean is not None and square is not None:
                engine.record_scores(mean, math.sqrt(max(0.0, square - mean**2)))
        with told_if_full("the checkpoint", Path(path), ROOM):
            engine.export_model(self._model_dir(path))
            engine.save_state(self._state_dir(path))

    def _model_dir(self, path: str) -> Path:
        """A checkpoint directory itself holds the policy's model; other models are in subdirectories."""
        return Path(path) if self.policy.name == Policy.name else Path(path) / self.policy.name

    def _state_dir(self, path: str) -> Path:
        return Path(path) / f"{self.name}_state"
