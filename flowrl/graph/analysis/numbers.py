"""The numbers derived from a declaration: tickets, window, bound, capacities, message sizes.

With P groups per batch and look-ahead W there are B = (S + 1)·P tickets. S is the declared staleness
minus the versions that overtaking can cost: S = staleness − ceil((W − 1) / P). The bound on the
staleness of a trained token is S + ceil((W − 1) / P), and 0 when S = 0. `on_limit="mask"` has no
window: S = staleness, and the mask enforces the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.graph.analysis.branches import Branches, reachable_nodes
from flowrl.graph.graph import Edge, Graph, carried_type, port_owner
from flowrl.graph.node import Facts
from flowrl.graph.ports import In
from flowrl.messages import Batch, Column, Group, Message, Prompt, Sample, Trainable, Weights

SMALL_MESSAGE_BYTES = 1 << 10
UNKNOWN_MESSAGE_BYTES = 4 << 10
MANIFEST_BYTES = 64 << 10
LANE_MESSAGES = 32
OPEN_REQUESTS = 64
TEXT_BYTES = 4
"""A token's share of the text."""


@dataclass(frozen=True)
class Numbers:
    """Derived numbers of a graph; None if the declaration they derive from is missing."""

    group_size: int | None = None
    """K"""
    groups_per_batch: int | None = None
    """P"""
    ahead: int | None = None
    """S: the number of batches by which admission may run ahead."""
    tickets: int | None = None
    """(S + 1)·P, the most groups in flight; None without admission."""
    window: int | None = None
    """Groups among which the batcher may choose; 0: any (`on_limit="mask"`)."""
    max_staleness: int | None = None
    """No token older than this enters a gradient."""
    max_uses: int | None = None
    """How often a sample is trained at most; None: once."""
    max_reused_age: int | None = None
    """No token older than this is trained again; None: no token is."""
    publish_every: int = 1
    longest_sample: int | None = None
    """Tokens of the longest prompt and response together."""
    token_budget: int | None = None
    """The smallest token budget of a micro-batch."""
    derives: Mapping[str, int] = field(default_factory=dict)
    """Label -> the most samples derived under it from one."""
    members_each: int = 1
    """The most members that a group has anywhere for each that was admitted, because of `derives`."""

    @property
    def most_members(self) -> int:
        """The most members of a group, derived ones included; 1 without groups."""
        return (self.group_size or 1) * self.members_each

    @property
    def samples_in_flight(self) -> int:
        """The most samples in flight; 0: not known."""
        return (self.tickets or 0) * self.most_members


def derive_numbers(graph: Graph) -> Numbers:
    """The numbers of `graph`; `check` reports contradictions between nodes."""
    facts = [node.facts() for node in graph.nodes.values()]
    group_size = next((fact.group_size for fact in facts if fact.group_size is not None), None)
    groups = next((fact.groups_per_batch for fact in facts if fact.groups_per_batch is not None), None)
    uses = next((fact.max_uses for fact in facts if fact.max_uses is not None), None)
    admission = graph.admission
    ahead = window = bound = None
    if admission is not None and admission.on_limit == "mask":
        ahead, window, bound = admission.staleness, 0, admission.staleness
    elif admission is not None:
        window = admission.look_ahead
        if groups is not None and groups >= 1:
            overtaken = versions_overtaken(window, groups)
            ahead = admission.staleness - overtaken
            bound = ahead + overtaken if ahead > 0 else 0

    # The nodes whose weights end tickets; if there are none, all nodes that send weights.
    latest = [edge for edge in graph.edges if edge.kind == "latest"]
    until = () if admission is None else admission.until
    ending = [edge for edge in latest if any(edge.into is port for port in until)] or latest

    prompts = [fact.longest_prompt for fact in facts if fact.longest_prompt is not None]
    responses = [fact.longest_response for fact in facts if fact.longest_response is not None]
    longest = max(prompts, default=0) + max(responses, default=0) if prompts or responses else None
    return Numbers(
        group_size=group_size,
        groups_per_batch=groups,
        ahead=ahead,
        tickets=None if ahead is None or groups is None else (ahead + 1) * groups,
        window=window,
        max_staleness=bound,
        max_uses=uses,
        max_reused_age=None if uses is None or bound is None else bound + max(fact.max_reuse_age for fact in facts),
        publish_every=max((graph.nodes[port_owner(edge.out)].facts().publish_every for edge in ending), default=1),
        longest_sample=longest,
        token_budget=min((fact.token_budget for fact in facts if fact.token_budget is not None), default=None),
        **_derived_numbers(graph, facts),
    )


def _derived_numbers(graph: Graph, facts: Iterable[Facts]) -> dict[str, Any]:
    """`derives`, and what follows from it."""
    derives = {label: most for fact in facts for label, most in fact.derives.items()}
    if not derives:
        return {}
    branches = Branches(graph)
    ports = [port for node in graph.nodes.values() for port in node.ports.values() if isinstance(port, In)]
    return {"derives": derives, "members_each": max(branches.num_members(port) for port in ports)}


def versions_overtaken(look_ahead: int, groups_per_batch: int) -> int:
    """ceil((W − 1) / P): versions by which overtaking in the window can age a group."""
    return -(-(look_ahead - 1) // groups_per_batch)


def longest_asked(graph: Graph, name: str) -> int | None:
    """Tokens of the longest prompt or context that the node `name` has to continue; None if a caller declares none."""
    lengths = [_context_of(graph.nodes[asker].facts()) for asker in nodes_that_ask(graph, name)]
    known = [length for length in lengths if length is not None]
    return max(known) if known and len(known) == len(lengths) else None


def nodes_that_ask(graph: Graph, name: str) -> list[str]:
    """The nodes whose messages or calls the node `name` answers."""
    edges = [edge for edge in graph.edges if port_owner(edge.into) == name and edge.kind != "latest"]
    return list(dict.fromkeys(port_owner(edge.out) for edge in edges))


def longest_sequence_for(graph: Graph, name: str, asker: str) -> int | None:
    """Tokens of the longest prompt of `asker` and its answer by the node `name` together; None if one is not known."""
    facts, answering = graph.nodes[asker].facts(), graph.nodes[name].facts()
    context = _context_of(facts)
    answer = answering.longest_response if answering.longest_answer is None else answering.longest_answer
    if context is None or facts.context_with_reply:
        return context
    return None if answer is None else context + answer


def _context_of(facts: Facts) -> int | None:
    return facts.longest_prompt if facts.longest_context is None else facts.longest_context


def lane_capacity(graph: Graph, edge: Edge, numbers: Numbers) -> int:
    """Messages that one lane of `edge` holds: the user's value, else enough to keep both ends busy.

    The default is one batch, or the groups of one batch, or the samples of two groups and at least 32, but never
    more than can be in flight. For a call edge it is the number of requests that the server handles at a time.
    """
    if edge.capacity is not None:
        return edge.capacity
    if edge.kind == "call":
        return graph.nodes[port_owner(edge.into)].facts().concurrency or OPEN_REQUESTS
    message = carried_type(edge.out)
    if edge.kind == "latest" or issubclass(message, Batch):
        return 1
    if issubclass(message, Group):
        return max(1, numbers.groups_per_batch or 1)
    samples = max(LANE_MESSAGES, 2 * numbers.most_members)
    return max(1, min(samples, in_flight(message, numbers) or samples))


def in_flight(message: type[Message], numbers: Numbers) -> int | None:
    """The maximum number of messages of this type between admission and weights; None without admission."""
    if numbers.tickets is None or numbers.ahead is None:
        return None
    if issubclass(message, Batch):
        return numbers.ahead + 1
    return numbers.tickets * (1 if issubclass(message, Group) else numbers.most_members)


def message_bytes(graph: Graph, edge: Edge, numbers: Numbers) -> int:
    """The size of the largest message on `edge`: declared by the node, else estimated from the token lengths."""
    declared = graph.nodes[port_owner(edge.out)].facts().message_bytes.get(edge.out.name)
    if declared is not None:
        return declared
    message = carried_type(edge.out)
    if issubclass(message, Weights):
        return MANIFEST_BYTES
    kind = Trainable if issubclass(message, Group | Batch) else message
    if not issubclass(kind, Prompt | Sample) or numbers.longest_sample is None:
        return UNKNOWN_MESSAGE_BYTES

    per_token, per_sample = 2 * TEXT_BYTES, SMALL_MESSAGE_BYTES  # of a prompt: an id, as large as the text
    if issubclass(kind, Sample):
        # Of the columns that nodes may leave out, those of a Trainable count; the others are rare.
        known = [column for column in kind.token_columns if column.in_branches or column not in Sample.token_columns]
        per_token = -(-(TEXT_BYTES + sum(column.value_bytes for column in known)) // 8) * 8
        for column in added_columns(graph, port_owner(edge.out)):
            per_token += column.value_bytes if column.per == "token" else 0
            per_sample += column.value_bytes if column.per == "sample" else 0
    samples = 1 if issubclass(message, Prompt | Sample) else numbers.most_members
    if issubclass(message, Batch):
        samples *= numbers.groups_per_batch or 1
    return samples * (per_sample + per_token * numbers.longest_sample)


def added_columns(graph: Graph, node: str) -> dict[Column, str]:
    """The columns that the samples sent by `node` may have -> the node that adds the column."""
    return {
        column: name
        for name, adds in graph.nodes.items()
        if (columns := adds.facts().columns) and node in reachable_nodes(graph, name)
        for column in columns
    }
