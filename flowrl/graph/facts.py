"""A node's declaration about itself, with which `flowrl check` can check a graph without running it.

A node overrides `Node.facts()`. Every process that builds the graph calls it, so it may only read the
node's own settings: no files, no heavy imports. `None` means "does not apply here".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """One node's declaration; the default of every field states nothing."""

    group_size: int | None = None
    """K. A source: members it sends per group. A node that collects groups: members it waits for."""
    groups_per_batch: int | None = None
    """P. Batchers: groups in one batch."""
    token_budget: int | None = None
    """Batchers and trainers: tokens in one micro-batch; no sample may be longer."""
    longest_prompt: int | None = None
    """Tokens of the longest prompt this node lets through."""
    longest_context: int | None = None
    """Nodes that call a generator: most tokens of what it is to continue; None: what they let through decides."""
    longest_response: int | None = None
    """Most policy tokens this node samples for one prompt."""
    concurrency: int | None = None
    """Items that one replica works on at a time (a generator's slots); `flowrl check` warns if some stay idle."""
    episodes: int | None = None
    """Episodes that one replica plays at a time; `flowrl check` warns if more than these are admitted."""
    processes: int | None = None
    """Episodes that one replica has a process for, or a worker outside, at a time; None: for all."""
    expected_s: float | None = None
    """Seconds that an episode takes on average, by the user's estimate."""
    publish_every: int = 1
    """Trainers: every nth version is published."""
    adapter_rank: int | None = None
    """Trainers and generators: rank of the LoRA adapters that versions are sent as, 0 for whole weights."""
    saves: str | None = None
    """Trainers: the name of their model's directory in a checkpoint."""
    layout: str | None = None
    """Batchers: how they pack micro-batches. Trainers: what they can compute. rows: one row for each sequence."""
    ranks_per_part: int = 1
    """Gangs: consecutive ranks that take the same part of each message; it has to divide their number."""
    parted_by: str = "sequence_parallel_size"
    """Gangs: the argument that says so."""
    accumulate: str = ""
    """Trainers: whether they begin with the groups of a batch that are there: auto, on or off."""
    whole_batches: str | None = None
    """Batchers and trainers: why a batch has to be whole, "" if it may come in pieces; None: it comes whole."""
    drops: bool = False
    """May drop, filter or fail samples: `flowrl check` shows on which branches this ends them."""
    trains: bool = False
    """Records steps in the ledger. Gangs and nodes that send weights count as trainers; any other has to declare it."""
    sharded: bool = False
    """Sources: each replica sends its own groups, so there may be several replicas."""
    joins: tuple[str, ...] = ()
    """In ports whose messages are matched by sample: they must come from one fan-out."""
    keeps_lineage: bool = True
    """One message out for one in, of the same sample. False: merges, splits or renames samples."""
    optional: tuple[str, ...] = ()
    """Ports that may stay unconnected."""
    unconnected: Mapping[str, str] = field(default_factory=dict)
    """Port -> what to say if it has no edge, ignored or not, because the node's settings need one."""
    weights_in_host_memory: bool = False
    """Readers of weights: takes them from host memory even on a GPU, because it is not a vLLM engine."""
    weights_dtype: str = ""
    """Readers of weights: dtype of their parameters; auto: the one in the model's config.json. "": not known."""
    takes_every: int = 0
    """Readers of weights: every nth version is taken for certain; the trainer takes no batch until it is held."""
    without_devices: tuple[str, ...] = ()
    """In ports whose items are handled without the devices that the node has in turns: they wait for no turn."""
    fixed_weights: str = ""
    """Readers of weights: why this node cannot take any, "" if it can."""
    quantization: str = ""
    """Generators: how the engine's weights are quantized. It samples from another policy than the trainer's weights."""
    least_capability: float = 0.0
    """Compute capability that each GPU of the node has to have."""
    cpu_flags: frozenset[str] = frozenset()
    """Without GPUs: what the node's CPU has to have one of, by the kernel's names, for its KV cache in fp8."""
    stands_in: bool = False
    """Servers: each replica can answer what another one was asked whose process has died (`analysis.stand_ins`). Of a
    turn that is not held out, it reports the request before it answers (`context.ledger.request`)."""
    correction: str | None = None
    """Nodes that take a sample's behavior logprobs for those of a policy: what corrects the gap between the two, "" if
    nothing does; None: the gap does not matter to it."""
    correct_by: str = "set --objective.correction tis, or weigh the tokens in your own loss by behavior_logprobs"
    """The change that corrects it."""
    as_data: bool = False
    """What it lets through is learnt like data, whoever has sampled it: a loss that gets all its samples from behind
    such nodes needs no correction."""
    memory_bytes: int = 0
    """Host memory of one replica, 0 if unknown."""
    message_bytes: Mapping[str, int] = field(default_factory=dict)
    """Largest message by Out port, if the default estimate (from the token lengths) is far off."""
