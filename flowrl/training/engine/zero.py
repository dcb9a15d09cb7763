"""flowrl's interface to DeepSpeed ZeRO: one engine per rank; the caller controls gradient accumulation.

Invariants
- Gradients are sums. The caller divides its loss by global denominators, or divides the whole gradient in
  `step_optimizer`. DeepSpeed averages over the copies of the model, so `add_gradient` multiplies by the number of
  copies. The accumulation boundary is set explicitly for every micro-batch, because the number of micro-batches varies
  by step.
- Every method is collective, because ZeRO gathers and reduces inside. Exceptions are the properties, `num_computed`,
  `adapter_off`, `set_lr` and `record_scores`.
- Master weights, accumulated gradients and their reduction are fp32 for every dtype of the model.
- A step whose gradient is not finite is not applied, and its result reports that.

Mixtures of experts under ZeRO-3, whose ranks have to gather the same parameters in the same order.

If the experts of a layer are a list of modules, a rank runs only the experts that its tokens are routed to, so ranks
would wait for each other in different collectives. DeepSpeed gathers all parameters of a leaf module at once, before
its forward, and reduces a zero gradient for those that were not used. Experts that are stored in one tensor, as in
transformers' own classes, are gathered whole anyway.

A Hugging Face directory is written shard by shard (`ModelWriter`): only the weights of one file are in host memory at a
time.

Every shard goes through transformers' own `save_pretrained`, which knows the names and formats of the files; then the
shard is moved to its place.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.optimizer import (
    allocate_moments,
    divide_gradient,
    make_optimizer,
    share_masters,
    sum_at_once,
)
from flowrl.training.engine.requirements import (
    TAG,
    build_async_io,
    is_sharded,
    part_path,
    resume_problems,
    saves_in_shards,
)
from flowrl.training.engine.training_state import (
    Ema,
    load_offloaded,
    load_shards,
    save_offloaded,
    save_shards,
    whole_master_weight,
)
from flowrl.training.layouts import (
    Placing,
    decide_trainer,
    explain_refused_tree,
    sequence_problems,
    tensor_problems,
)
from flowrl.training.model.adapter import adapter_off, write_adapter
from flowrl.training.model.policy_model import (
    PolicyModel,
    Wrapped,
    choose_attention,
    find_balance,
    load_policy_model,
    make_bare_model,
    read_companions,
    read_config,
    splits_packed_rows,
)
from flowrl.training.model.products import multiply_fast
from flowrl.training.model.row_layout import (
    RowLayout,
    compute_in_slices,
    lay_out,
    num_sliced,
    require_slices,
    require_trees,
)
from flowrl.training.model.sequence_attention import make_exchanging
from flowrl.training.model.tensors import (
    Entry,
    adapted_layers,
    adapter_weights,
    gather_whole,
    partition_config,
    split_in_buckets,
    whole_norm,
    whole_weights,
)
from flowrl.training.model.value_model import ScalarModel, load_scalar_model
from flowrl.training.settings import Head, LoRA, Start, ZeroSettings

BUCKET_ELEMENTS = 50_000_000


@contextmanager
def sharded_loading(config: dict[str, Any]) -> Iterator[None]:
    """Within this context transformers shards every weight as it loads it, one parameter at a time."""
    from transformers import modeling_utils
    from transformers.integrations import HfDeepSpeedConfig

    load_all = modeling_utils._load_state_dict_into_zero3_model
    modeling_utils._load_state_dict_into_zero3_model = functools.partial(_load_by_parameter, load_all)
    sharded = HfDeepSpeedConfig(config)  # transformers shards while this object exists
    try:
        yield
    finally:
        modeling_utils._load_state_dict_into_zero3_model = load_all
        del sharded


def _load_by_parameter(
    load_all: Callable[..., tuple[list[str], set[str]]], model: Any, tensors: dict[str, Tensor], load_config: Any = None
) -> tuple[list[str], set[str]]:
    """(errors, names of parameters for which nothing was found) of `load_all`, in pieces.

    Files have a tensor for each expert, the model one for all experts of a layer. transformers makes these for all
    layers at once, and in every rank. Here one exists at a time, and only in rank 0, whose values are used.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = getattr(load_config, "weight_mapping", None) or []
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    if not converters:
        return load_all(model, tensors, load_config)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    known, first = model.state_dict(), torch.distributed.get_rank() == 0
    plain: dict[str, Tensor] = {}
    made_from: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, source = rename_source_key(
            name, renamings, converters, base_model_prefix=model.base_model_prefix, meta_state_dict=known
        )
        if source is None:
            plain[name] = tensor
        else:
            shaped = tensor if first else torch.empty_like(tensor, device="meta")
            made_from.setdefault(parameter, {})[name] = shaped
    errors, missing = load_all(model, plain, load_config)
    for sources in made_from.values():
        found, absent = load_all(model, sources, load_config)
        errors, missing = errors + found, missing & absent
    return errors, missing


def deepspeed_config(settings: ZeroSettings, num_ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration for our settings; `settings.deepspeed` overrides it."""
    zero: dict[str, Any] = {
        "stage": settings.effective_stage(num_ranks),
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
    }
    place: dict[str, Any] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if settings.nvme_path:
        place |= {"device": "nvme", "nvme_path": settings.nvme_path}
    if settings.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = place
    if settings.offload == "all":
        zero["offload_param"] = place
    if settings.optimizer == "muon":
        zero["reduce_scatter"] = False  # Muon orthogonalizes whole gradients
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.largest_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    return _laid_over(config, settings.deepspeed)


def _laid_over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in top.items():
        below = merged.get(name)
        merged[name] = _laid_over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


@dataclass(frozen=True)
class ZeroStep:
    """The result of one optimizer step."""

    applied: bool
    grad_norm: float
    """Norm before clipping; infinite if the gradient was not finite. With muon: norm of the orthogonalized update."""


class ZeroEngine:
    """One rank of a model in training.

    With `head="scalar"` the model is a critic or a reward model; see `load_scalar_model` for `start`. With a `lora` of
    rank 1 or more the engine trains an adapter, and the loaded weights stay unchanged. With `balanced`, passes with
    gradients also return the load-balancing loss of the model's experts.
    """

    model: PolicyModel | ScalarModel

    def __init__(
        self,
        path: str | Path,
        settings: ZeroSettings,
        gang: Gang,
        *,
        head: Head = "lm",
        start: Start = "policy",
        lora: LoRA | None = None,
        trust_remote_code: bool = False,
        balanced: bool = False,
    ) -> None:
        import deepspeed

        self.gang = gang
        self.settings = settings
        self.lora = lora or LoRA()
        self.source = Path(path)
        self._beside = read_companions(path) if gang.rank == 0 else {}
        architecture = read_config(path, trust_remote_code=trust_remote_code).to_dict()
        trees = decide_trainer(settings, architecture, gang.sequence_kind)
        for problem in (
            *explain_refused_tree(settings.layout, trees),
            *sequence_problems(gang.sequence_size, settings, architecture, kind=gang.sequence_kind),
            *tensor_problems(gang.tensor_size, settings, self.lora, architecture, sequence=gang.sequence_size),
        ):
            raise ConfigError(problem)
        own_kernels = trees.has_trees or gang.sequence_kind == "ring"
        attention = "sdpa" if own_kernels else choose_attention(settings.attention, gang.device, settings.dtype)
        packed = splits_packed_rows(attention) if settings.packing is None else settings.packing
        self.layout: Placing = trees.layout if trees.layout != "rows" else "packed" if packed else "padded"
        config = deepspeed_config(settings, gang.size)
        self._stage: int = config["zero_optimization"]["stage"]
        if settings.nvme_path:
            build_async_io()
        options: dict[str, Any] = {
            "dtype": settings.dtype,
            "attention": attention,
            "gradient_checkpointing": settings.gradient_checkpointing,
            "lora": self.lora,
            "trust_remote_code": trust_remote_code,
            "layout": trees.layout,
            "tries": False,
        }
        with sharded_loading(config) if self._stage == 3 else nullcontext():
            if head == "scalar":
                self.model = load_scalar_model(path, start=start, seed=torch.initial_seed(), **options)
            else:
                self.model = load_policy_model(path, **options)
        if balanced and isinstance(self.model, PolicyModel):
            self.model.balance = find_balance(self.model.network)
        if gang.sequence is not None:
            make_exchanging(self.model.network.config._attn_implementation)
        if self._stage == 3:
            gather_at_once(self.model)
        if gang.tensor_size > 1:
            about = partition_config(self.model.network, gang.tensor_size)
            config["tensor_parallel"] = {"autotp_size": gang.tensor_size, "partition_config": about}
        optimizer = make_optimizer(self.model, settings)
        self._engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        if gang.tensor_size > 1:
            # This check compares the arguments of the first pass across ranks, and fails on objects that hold tensors.
            self._engine.first_dataloader_check.remove()
        multiply_fast(self.model.network)
        share_masters(self._engine.optimizer)
        allocate_moments(self._engine.optimizer)
        if gang.size == 1:
            sum_at_once(self._engine.optimizer)
        self._ema = Ema(self._engine, settings.ema_decay) if settings.ema_decay else None
        model_facts: dict[str, Any] = {
            "name": type(self.model.network).__name__,
            "vocab_size": self.vocab_size,
            "dtype": settings.dtype,
            "device": gang.device,
        }
        if gang.sequence is not None:
            require_slices(
                lambda rows: compute_in_slices(self._engine, rows, None)[0],  # each rank computes all positions itself
                self._compute_scores,
                layout=self.layout,
                **model_facts,
            )
        if trees.has_trees:
            require_trees(self._compute_scores, **model_facts)

    def _compute_scores(self, rows: RowLayout) -> Tensor:
        """Values of a scalar head, or logprobs of a language model at temperature 1."""
        return compute_in_slices(self._engine, rows, self.gang.sequence)[0]

    @property
    def rank(self) -> int:
        return self.gang.rank

    @property
    def device(self) -> torch.device:
        return self.gang.device

    @property
    def vocab_size(self) -> int:
        return int(self.model.network.config.vocab_size)

    # Training

    def forward(self, rows: RowLayout, *, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropies_N) of the policy tokens, with an autograd graph except under `torch.no_grad`."""
        logprobs_N, entropies_N, *_ = self.compute_outputs(rows, temperature, entropy_gradient)
        return logprobs_N, entropies_N

    def compute_outputs(self, rows: RowLayout, temperature: float, entropy_gradient: bool) -> tuple[Tensor, ...]:
        """As `forward`; a `balanced` engine with gradients also returns the load-balancing loss of the pass."""
        return compute_in_slices(self._engine, rows, self.gang.sequence, temperature, entropy_gradient)

    def compute_values(self, rows: RowLayout) -> Tensor:
        """The scalar head's values at the rows' places, [N], with an autograd graph except under `torch.no_grad`."""
        (values_N,) = compute_in_slices(self._engine, rows, self.gang.sequence)
        return values_N

    def num_computed(self, rows: RowLayout) -> int:
        """Tokens that a pass over `rows` computes, on all ranks that share it, padding included."""
        return rows.num_computed if self.gang.sequence is None else num_sliced(rows, self.gang.sequence)

    def add_gradient(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of a loss with global denominators; `last`: it is the last of its optimizer step."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.gang.num_copies, scale_wrt_gas=False)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Within this context `forward` uses the base model without the adapter."""
        with adapter_off(self.model):
            yield

    def step_optimizer(self, *, divide_by: float = 1.0) -> ZeroStep:
        """Divide the gradient, clip it and update the weights, after a backward with `last`.

        `divide_by` is the same on all ranks: 1, or the batch's count of tokens, sequences or pairs if the losses were
        sums. The norm is that of the divided gradient, before clipping. If it is not finite, weights and EMA stay
        unchanged.
        """
        with divide_gradient(self._engine, divide_by):
            if self._stage > 0:
                self._engine.step()
                step = ZeroStep(bool(self._engine.was_step_applied()), float(self._engine.get_global_grad_norm()))
            else:  # DeepSpeed neither reports the norm nor checks that it is finite
                parameters = list(self.model.parameters())
                if self.gang.tensor_size > 1:
                    norm = float(whole_norm(parameters))
                else:
                    norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
                step = ZeroStep(True, norm) if np.isfinite(norm) else ZeroStep(False, float("inf"))
                (self._engine.step if step.applied else self._engine.zero_grad)()
        if self._ema is not None and step.applied:
            self._ema.add_weights()
        return step

    def set_lr(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * self.settings.muon_lr_factor if group.get("use_muon") else lr

    # Weight output

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        """Yield what generators receive of a version: all weights, or only the adapter."""
        return self.adapter_buckets(max_bytes) if self.lora.synced_rank else self.weight_buckets(max_bytes)

    def weight_buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        """Yield whole parameters under their Hugging Face names, valid until the next bucket; tied ones only once.

        An adapter is merged into the weights it adapts.
        """
        return self._gather_entries(whole_weights(self.model.network), max_bytes)

    def adapter_buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        """Yield the adapter's tensors under the names that PEFT uses in files."""
        return self._gather_entries(adapter_weights(self.model.network), max_bytes)

    def _gather_entries(
        self, entries: Sequence[Entry], max_bytes: int
    ) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        for bucket in split_in_buckets(entries, max_bytes):
            with self._gather_parameters([parameter for entry in bucket for parameter in entry.parameters]):
                yield (
                    [entry.name for entry in bucket],
                    [entry.make(*(gather_whole(p.detach(), p) for p in entry.parameters)) for entry in bucket],
                )

    def _gather_parameters(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[object]:
        if self._stage != 3 or not parameters:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(parameters)
        return gathered

    def _gather_averages(self, entries: Sequence[Entry]) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        """Like `_gather_entries`, tensor by tensor, with the moving average for the weights, in the weights' dtype."""
        assert self._ema is not None
        with self._ema.exchange_weights():
            for entry in entries:
                trained = [p for p in entry.parameters if p.requires_grad]
                average = {id(p): gather_whole(whole_master_weight(p), p).to(p.dtype) for p in trained}
                with self._gather_parameters([p for p in entry.parameters if not p.requires_grad]):
                    values = [average.get(id(p), p.detach()) for p in entry.parameters]
                    yield [entry.name], [entry.make(*values)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token t | tokens before t) at temperature 1 for t = 1 ... T-1 of each sequence.

        With a scalar head, returns V before token t instead.
        """
        token_ids = [np.array(sequence, np.int32) for sequence in sequences]
        rows = lay_out(
            token_ids, [np.ones(len(t), np.bool_) for t in token_ids], layout=self.layout, device=self.device
        )
        with torch.no_grad():
            scores_N = self._compute_scores(rows)
        lengths = [len(tokens) - 1 for tokens in token_ids]
        return [part.tolist() for part in torch.split(scores_N.float().cpu(), lengths)]

    def record_scores(self, mean: float, std: float) -> None:
        """Set mean and std of a reward model's scores, for the config.json of the next export."""
        self.model.network.config.reward_mean, self.model.network.config.reward_std = mean, std

    def export_model(self, path: str | Path) -> None:
        """Write a Hugging Face model directory, tokenizer included; complete when any rank returns.

        With LoRA the adapter is merged in and also saved separately in `adapter`; the moving average is in `ema`.
        """
        self._write_model(self.weight_buckets(1 << 30), Path(path))
        if self.lora.rank:
            state: dict[str, Tensor] = {}
            for names, tensors in self.adapter_buckets(1 << 30):
                if self.rank == 0:
                    state |= {n: t.to("cpu", copy=True) for n, t in zip(names, tensors, strict=True)}
            if self.rank == 0:
                write_adapter(self.model.network, self.lora, state, self.source, Path(path) / "adapter")
        if self._ema is not None:
            self._write_model(self._gather_averages(whole_weights(self.model.network)), Path(path) / "ema")

    def _write_model(self, buckets: Iterator[tuple[Sequence[str], Sequence[Tensor]]], path: Path) -> None:
        writer = ModelWriter(self.model, self._beside, path) if self.rank == 0 else None
        for names, tensors in buckets:
            if writer is not None:
                writer.add_tensors(names, tensors)
        if writer is not None:
            writer.close()
        self.gang.gather_objects(None)

    # Checkpoints

    def save_state(self, path: str | Path) -> None:
        """Write master weights and optimizer state, a few files per rank. A frozen base is not included."""
        if self.settings.nvme_path:
            save_offloaded(self._engine.optimizer, Path(path) / TAG, self.rank)
        elif saves_in_shards(self.settings, self.gang.size):
            averages = self._ema.averages if self._ema is not None else ()
            kept = self.settings.keep_optimizer
            save_shards(self._engine, self._part_path(path), self.rank, averages, optimizer=kept)
            self.gang.gather_objects(None)
            return
        else:
            self._engine.save_checkpoint(
                str(path), tag=TAG, save_latest=False, exclude_frozen_parameters=bool(self.lora.rank)
            )
        if self._ema is not None:
            self._ema.save_average(Path(path), self.rank)

    def _part_path(self, path: str | Path) -> Path:
        return part_path(Path(path) / TAG, self.gang.rank % self.gang.tensor_size, self.gang.tensor_size)

    def load_state(self, path: str | Path) -> None:
        """Load what `save_state` wrote, with any number of ranks where that is possible (`resume_problems`)."""
        for problem in resume_problems(Path(path) / TAG, self.settings, self.gang.size, self.gang.tensor_size):
            raise ConfigError(problem)
        if saves_in_shards(self.settings, self.gang.size) and is_sharded(self._part_path(path)):
            averages = self._ema.averages if self._ema is not None else ()
            load_shards(self._engine, self._part_path(path), averages, optimizer=self.settings.optimizer == "adamw")
            return
        if self.settings.nvme_path:
            load_offloaded(self._engine.optimizer, Path(path) / TAG, self.rank)
        else:
            self._engine.load_checkpoint(
                str(path), tag=TAG, load_lr_scheduler_states=False, load_module_strict=not self.lora.rank
            )
        if self._ema is not None:
            self._ema.load_average(Path(path), self.rank)


def expert_layers(network: nn.Module) -> list[nn.Module]:
    """The layers of `network` that choose among a list of experts."""
    lists = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2]
    ]
    return [network.get_submodule(name.rpartition(".")[0]) for name in lists]


def gather_at_once(network: nn.Module) -> None:
    """Make ZeRO-3 treat the `expert_layers` as leaves. Call this before DeepSpeed puts its hooks on the model."""
    from deepspeed.utils import set_z3_leaf_modules

    if kinds := {type(layer) for layer in expert_layers(network)}:
        set_z3_leaf_modules(network, list(kinds))


SHARD_BYTES = 2 << 30
"""Most bytes of a file; a larger tensor has a file of its own."""
WEIGHTS = "model.safetensors"
SHARD = ".shard"
"""Folder in which a shard is written, and prefix of its file's name until the number of shards is known."""


class ModelWriter:
    """Takes the weights of `model` in any order, each once, and writes them to the directory `path`.

    `beside` are further files (`read_companions`); those that transformers has not written are added. A model of at
    most `shard_bytes` becomes one file, as `save_pretrained` would write it.
    """

    def __init__(
        self, model: Wrapped, beside: Mapping[str, bytes], path: str | Path, *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._model, self._beside, self._target = model, beside, Path(path)
        self._written = make_bare_model(model.network) if adapted_layers(model.network) else model.network
        self._most = None if needs_whole_state(self._written) else shard_bytes
        self._state: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards: list[dict[str, int]] = []
        """One mapping for each shard: name of a tensor -> bytes."""

    def add_tensors(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Copy these tensors, which may change afterwards."""
        for name, tensor in zip(names, tensors, strict=True):
            if self._most is not None and self._state and self._bytes + tensor.nbytes > self._most:
                self._write_shard()
            self._state[name] = tensor.to("cpu", copy=True)
            self._bytes += tensor.nbytes

    def close(self) -> None:
        """Write the last shard, an index if there are several shards, and the files of `beside`."""
        if isinstance(self._model, ScalarModel) and self._model.tokenizer is not None:
            self._target.mkdir(parents=True, exist_ok=True)
            self._model.tokenizer.save_pretrained(self._target)
        self._write_shard()
        num = len(self._shards)
        files = [WEIGHTS] if num == 1 else [f"model-{n:05d}-of-{num:05d}.safetensors" for n in range(1, num + 1)]
        for number, file in enumerate(files):
            (self._target / f"{SHARD}-{number}").replace(self._target / file)
        if num > 1:
            index = {
                "metadata": {"total_size": sum(sum(shard.values()) for shard in self._shards)},
                "weight_map": {name: file for shard, file in zip(self._shards, files, strict=True) for name in shard},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._target / f"{WEIGHTS}.index.json").write_text(text, encoding="utf-8")
        for name, content in self._beside.items():
            if not (self._target / name).exists():
                (self._target / name).write_bytes(content)

    def _write_shard(self) -> None:
        folder = self._target / SHARD
        shutil.rmtree(folder, ignore_errors=True)
        state, self._state, self._bytes = self._state, {}, 0
        self._written.save_pretrained(folder, state_dict=state, max_shard_size=1 << 60)
        del state
        shard = folder / WEIGHTS
        with shard.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        places = {name: about["data_offsets"] for name, about in header.items() if name != "__metadata__"}
        self._shards.append({name: end - start for name, (start, end) in places.items()})
        shard.replace(self._target / f"{SHARD}-{len(self._shards) - 1}")
        if len(self._shards) == 1:
            shutil.copytree(folder, self._target, dirs_exist_ok=True)  # the config, and the model's own code
        shutil.rmtree(folder)


def needs_whole_state(network: Any) -> bool:
    """Whether a tensor in the files is made from several tensors of the model, which are then needed together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = getattr(network, "_weight_conversions", None)
    if found is None:
        found = get_model_conversion_mapping(network, add_legacy=False)
    return any(isinstance(one, WeightConverter) and len(one.target_patterns) > 1 for one in found or ())
