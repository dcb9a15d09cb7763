"""What would fit: variations of a graph's options, the cheapest in speed first, until one passes the checks.

The order: a narrower dtype, gradient checkpointing, tensor parallel parts for the generator, more ranks, generator and
trainer in turns on the same GPUs; then the same with offload of the optimizer, and of all. None of them changes what is
learnt, except for the rounding of bfloat16.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.analysis.check import check
from flowrl.graph.load import GraphFile
from flowrl.graph.machine import Cluster

Overrides = dict[str, Any]
"""Option -> value, as "zero.offload" -> "optimizer"."""
CHECKPOINTED: Overrides = {"zero.gradient_checkpointing": True}
MEMORY: tuple[tuple[Overrides, ...], ...] = (
    ({}, CHECKPOINTED),
    (CHECKPOINTED | {"zero.offload": "optimizer"},),
    (CHECKPOINTED | {"zero.offload": "all"},),
)
"""Ways of saving memory, the fast ones before those through host memory."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
SHARES = (None, 0.85)
"""Values of gpu_memory_utilization for an engine that has a GPU in turns with others: vLLM's own, and one that leaves
room for the contexts of many processes."""


def fitting(file: GraphFile, cfg: Any, cluster: Cluster) -> Overrides | None:
    """Overrides of `cfg` with which the graph passes every check on `cluster`; None if none of those tried does."""
    for overrides in _candidates(cfg, cluster):
        try:
            changed = changed_config(cfg, overrides)
            if check(file.build(changed), cluster).ok:
                return overrides
        except ConfigError:
            continue
    return None


def option_text(overrides: Mapping[str, Any]) -> str:
    """The overrides as they are written on the command line."""
    return " ".join(_written(name.replace("_", "-"), value) for name, value in overrides.items())


def _written(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def changed_config(cfg: Any, overrides: Mapping[str, Any]) -> Any:
    """`cfg` with these values of its options. Raises ConfigError if one of them is refused."""
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        head, _, rest = name.partition(".")
        nested.setdefault(head, {})[rest] = value
    changes = {
        head: given[""] if "" in given else changed_config(getattr(cfg, head), given) for head, given in nested.items()
    }
    return dataclasses.replace(cfg, **changes)


def _candidates(cfg: Any, cluster: Cluster) -> Iterator[Overrides]:
    gpus = cluster.num_gpus
    dtypes = [{}, {"dtype": "bfloat16"}] if _has(cfg, "dtype") and cfg.dtype != "bfloat16" and gpus else [{}]
    ranks = _more(cfg, "trainer.replicas", gpus)
    parts = _more(cfg, "engine.tensor_parallel_size", min(8, gpus))
    for ways, sharing in itertools.product(MEMORY, [*_sharing(cfg, cluster)]):
        for count, tensor, memory, dtype in itertools.product(ranks, parts, ways, dtypes):
            if all(_has(cfg, name) for name in memory):
                sized = {"generator.gpus": tensor["engine.tensor_parallel_size"]} if tensor else {}
                yield {**dtype, **memory, **count, **tensor, **sized, **sharing}


def _more(cfg: Any, name: str, most: int) -> list[Overrides]:
    """The option as it is, and larger values of it."""
    if not _has(cfg, name):
        return [{}]
    now = _value(cfg, name) or 1
    return [{}, *({name: count} for count in COUNTS if now < count <= most)]


def _sharing(cfg: Any, cluster: Cluster) -> Iterator[Overrides]:
    """Everybody apart, and generator and trainer in turns."""
    yield {}
    if cluster.num_gpus and _has(cfg, "engine.gpu_memory_utilization") and _has(cfg, "trainer.replicas"):
        for share in SHARES:
            room = {} if share is None else {"engine.gpu_memory_utilization": share}
            yield {"time_share": ("generator", "trainer"), **room}


def _has(cfg: Any, name: str) -> bool:
    try:
        _value(cfg, name)
    except AttributeError:
        return False
    return True


def _value(cfg: Any, name: str) -> Any:
    for part in name.split("."):
        cfg = getattr(cfg, part)
    return cfg
