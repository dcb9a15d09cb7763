"""A node's declaration about itself, which lets `flowrl check` check a graph without running it.

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
    """Nodes that call a generator: the most tokens that they ask it to continue; None: `longest_prompt` applies."""
    context_by: str = "max_prompt_tokens"
    """Nodes that call a generator: the option that sets `longest_context` or `longest_prompt`."""
    context_with_reply: bool = False
    """Nodes that call a generator: whether `longest_context` limits a context and the reply to it together."""
    longest_response: int | None = None
    """The most policy tokens that this node samples for one prompt."""
    longest_answer: int | None = None
    """Generators: the most tokens that are sampled at once, held-out answers included; None: `longest_response`."""
    max_model_len: int | None = None
    """Generators: the most tokens of prompt and response together, if a user has set it."""
    concurrency: int | None = None
    """Items that one replica works on at a time (a generator's slots); `flowrl check` warns if some stay idle."""
    episodes: int | None = None
    """Episodes that one replica plays at a time; `flowrl check` warns if more than these are admitted."""
    processes: int | None = None
    """Episodes for which one replica has a process, or an outside worker, at a time; None: for all."""
    expected_s: float | None = None
    """Seconds that an episode takes on average, by the user's estimate."""
    publish_every: int = 1
    """Trainers: every nth version is published."""
    adapter_rank: int | None = None
    """Trainers and generators: versions are sent as LoRA adapters of this rank; 0: as whole weights."""
    saves: str | None = None
    """Trainers: the name of their model's directory in a checkpoint."""
    held_out_sets: tuple[str, ...] = ()
    """Evaluations: the names under which answers are recorded; two nodes of a graph may not share one."""
    layout: str | None = None
    """Batchers: how they pack micro-batches. Trainers: which packing they compute. rows: one row for each sequence."""
    ranks_per_part: int = 1
    """Gangs: number of consecutive ranks that take the same part of each message; must divide the number of ranks."""
    parted_by: str = "sequence_parallel_size"
    """Gangs: the name of the argument that sets `ranks_per_part`."""
    accumulate: str = ""
    """Trainers: whether they begin with those groups of a batch that have arrived: auto, on or off."""
    whole_batches: str | None = None
    """Batchers and trainers: why a batch has to be whole, "" if it may come in pieces; None: it always comes whole."""
    drops: bool = False
    """Whether it may drop, filter or fail samples: `flowrl check` shows on which branches a loss ends a sample."""
    trains: bool = False
    """Whether it records steps in the ledger. Gangs and nodes that send weights count as trainers; any other trainer
    has to declare this."""
    sharded: bool = False
    """Sources: each replica sends its own groups, so there may be several replicas."""
    joins: tuple[str, ...] = ()
    """In ports whose messages are matched by sample: they must come from one fan-out."""
    keeps_lineage: bool = True
    """True: sends one message for each that it takes, of the same sample. False: merges, splits or renames samples."""
    optional: tuple[str, ...] = ()
    """Ports that may stay unconnected."""
    unconnected: Mapping[str, str] = field(default_factory=dict)
    """Port -> the error if it has no edge, even if it is ignored, because the node's settings need an edge."""
    weights_in_host_memory: bool = False
    """Readers of weights: the node takes them from host memory even on a GPU, because it is not a vLLM engine."""
    weights_dtype: str = ""
    """Readers of weights: dtype of their parameters; auto: the one in the model's config.json. "": not known."""
    takes_every: int = 0
    """Readers of weights: the node takes every nth version without fail; the trainer waits until the node holds it."""
    without_devices: tuple[str, ...] = ()
    """In ports whose items are handled without the node's time-shared devices, so they do not wait for the lease."""
    fixed_weights: str = ""
    """Readers of weights: why this node cannot take any, "" if it can."""
    quantization: str = ""
    """Generators: how the engine's weights are quantized, so that it samples from another policy than the trainer's."""
    least_capability: float = 0.0
    """The least compute capability that each GPU of the node has to have."""
    cpu_flags: frozenset[str] = frozenset()
    """Without GPUs: flags, by the kernel's names, of which the node's CPU needs one or more for its KV cache in fp8."""
    stands_in: bool = False
    """Servers: each replica can answer the requests of another replica whose process has died (`analysis.stand_ins`).
    For a turn that is not held out, it reports the request before it answers (`context.ledger.request`)."""
    correction: str | None = None
    """Nodes that take a sample's behavior logprobs for those of a policy: what corrects the gap between the two, "" if
    nothing does; None: the gap does not matter to the node."""
    correct_by: str = "set --objective.correction tis, or weigh the tokens in your own loss by behavior_logprobs"
    """The change that would correct the gap."""
    as_data: bool = False
    """Samples that the node lets through are learned like data, whichever policy has sampled them: a loss that gets all
    its samples from such nodes, directly or through others, needs no correction."""
    memory_bytes: int = 0
    """Host memory of one replica, 0 if unknown."""
    message_bytes: Mapping[str, int] = field(default_factory=dict)
    """Largest message by Out port, if the default estimate (from the token lengths) is far off."""
