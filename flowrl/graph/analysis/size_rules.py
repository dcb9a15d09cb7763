"""Checks 5, 6, 7 and 9: tickets, groups, tokens, cores, GPUs and memory; 10: warnings.

Quantized generators: the hardware that they need, and what corrects the gap to the trainer's policy.

The least time of a step follows from the user's estimate of an episode's average time. A batch is P·K episodes, and
there are tickets for (S + 1) batches. If an episode takes T seconds and an update U, a ticket is in use for T + U, so
a step takes (T + U) / (S + 1), or U if that is longer: never less than T / (S + 1). The trainer waits for episodes if
S·U < T, because S batches are played while one is trained. With room for E episodes at a time, a step takes P·K·T / E
or more (Little's law); this bound is the larger one if E is less than the tickets allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from flowrl.graph.analysis.branches import nodes_past, reachable_nodes
from flowrl.graph.analysis.numbers import Numbers, added_columns, longest_sequence_for, nodes_that_ask
from flowrl.graph.analysis.place import device_pools, merge_units, unit_need
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.graph import Graph, port_owner
from flowrl.graph.machine import CLUSTER_EXAMPLE, GB, Cluster, files_problem
from flowrl.messages import Trainable

COUNTS = (
    "group_size",
    "groups_per_batch",
    "token_budget",
    "longest_prompt",
    "longest_response",
    "concurrency",
    "publish_every",
)


def count_problems(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Numbers that nodes declare have to be at least 1. A node that reports its own problems is skipped."""
    for name, node in graph.nodes.items():
        if node.check(numbers):
            continue
        for field in COUNTS:
            value = getattr(node.facts(), field)
            if value is not None and value < 1:
                yield f"node {name} has {field}={value}; it needs at least 1."


def ticket_problems(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Check 5: tickets return, so that admission never waits forever."""
    admission = graph.admission
    if admission is None:
        return
    for edge in graph.edges:
        every = graph.nodes[port_owner(edge.out)].facts().publish_every
        ends_tickets = any(edge.into is port for port in admission.until)
        if ends_tickets and numbers.ahead is not None and 0 <= numbers.ahead < every - 1:
            yield (
                f"{port_owner(edge.out)} has publish_every={every}, but there are only tickets for {numbers.ahead + 1} "
                f"batches, so the run would stop; use publish_every={numbers.ahead + 1} at most, or raise staleness "
                f"by {every - 1 - numbers.ahead}."
            )


def kept_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """Check 5: tickets for the groups that a group may ask for, beside those that may be out with no batch complete.

    A group takes a ticket only if there are tickets for itself and for all groups that it may ask for. Each trainer can
    hold the tickets of n batches minus one group, as in `trainer_problems`; then the next group has to fit.
    """
    numbers = plan.numbers
    name, asked = most_asked(graph)
    if not asked or numbers.tickets is None or numbers.groups_per_batch is None:
        return
    batches = numbers.publish_every + sum(graph.nodes[one].facts().publish_every for one in plan.own_clock)
    held = batches * numbers.groups_per_batch - 1 - len(plan.own_clock)
    missing = held + 1 + asked - numbers.tickets
    if missing > 0:
        yield (
            f"a group of {name} may ask for {asked} further groups while it waits (group_size × asks), but {held} of "
            f"the {numbers.tickets} tickets can be out before a batch is complete, and the next group with those that "
            f"it asks for needs {1 + asked}, so the run can stop; raise staleness by "
            f"{-(-missing // numbers.groups_per_batch)}."
        )


def kept_notes(graph: Graph) -> Iterator[str]:
    """How many tickets are kept for the groups that others ask for."""
    name, asked = most_asked(graph)
    if asked:
        yield f"{name}: each group in flight keeps up to {asked} tickets for the groups that its samples ask for"


def has_leftovers(graph: Graph, plan: Plan, node: str) -> bool:
    """Whether groups may reach `node`, on the way to the main trainer, that the steps do not need (`Out.admit`)."""
    main = plan.trainers[0] if plan.trainers else ""
    ports = (port for port in plan.ports if port.name.split(".")[0] == node)
    return most_asked(graph)[1] > 0 and any(main in port.trainers for port in ports)


def replay_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """Check 5: what is trained again stays within a bound, and the loss knows which policy has sampled it."""
    numbers = plan.numbers
    as_data = frozenset(name for name, node in graph.nodes.items() if node.facts().as_data)
    source = "" if graph.admission is None else port_owner(graph.admission.out)
    for name in [name for name, node in graph.nodes.items() if node.facts().max_uses is not None]:
        if numbers.max_staleness is None:
            yield (
                f"{name} replays groups, but without g.admit nothing bounds their age, so reuse cannot be proven; "
                "leave replay out (data have epochs)."
            )
            continue
        if numbers.window == 0:
            yield (
                f'{name} replays groups, but on_limit="mask" masks every token older than the staleness, and a reuse '
                'is older; use on_limit="wait" with a look_ahead, or leave replay out.'
            )
        for trainer in [one for one in plan.trainers if one in reachable_nodes(graph, name)]:
            facts = graph.nodes[trainer].facts()
            if trainer in plan.own_clock:
                yield (
                    f"{name} replays groups for {trainer}, whose versions are not those of the tokens, so the age of a "
                    "reuse cannot be proven; feed both trainers from one batcher, or leave replay out."
                )
            if facts.correction == "" and trainer in reachable_nodes(graph, source, not_past=as_data):
                yield (
                    f"{name} replays groups, but the loss of {trainer} takes every token for one of the newest policy, "
                    f"which in a reuse is up to {numbers.max_reused_age} versions newer; {facts.correct_by}."
                )


def replay_notes(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """What a loss does about the policy that has sampled what is trained again."""
    for name, node in graph.nodes.items():
        if node.facts().max_uses is None:
            continue
        for trainer in [one for one in graph.nodes if one in reachable_nodes(graph, name)]:
            if (by := graph.nodes[trainer].facts().correction) is not None and by:
                yield (
                    f"{trainer}: it trains a group up to {numbers.max_uses} times; the loss weighs what older policies "
                    f"sampled by {by}"
                )


def most_asked(graph: Graph) -> tuple[str, int]:
    """The source whose groups may ask for the most further groups, and how many."""
    facts = {name: node.facts() for name, node in graph.nodes.items()}
    asked = {name: (one.group_size or 1) * one.asks for name, one in facts.items()}
    name = max(asked, key=asked.__getitem__, default="")
    return name, asked.get(name, 0)


def trainer_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """Check 5: trainers that skip different groups must not together hold all tickets.

    Each can hold the tickets of n batches minus one group: n - 1 unpublished batches, and one that is not full.
    """
    numbers = plan.numbers
    if not plan.own_clock or numbers.groups_per_batch is None or numbers.tickets is None:
        return
    names = (plan.trainers[0], *plan.own_clock)
    batches = sum(graph.nodes[name].facts().publish_every for name in names)
    needed = batches * numbers.groups_per_batch - len(names) + 1
    if numbers.tickets < needed:
        yield (
            f"{' and '.join(names)} train on different batches and can hold {needed - 1} groups together without "
            f"completing a batch, but there are only {numbers.tickets} tickets, so the run can stop; raise staleness "
            f"by {-(-(needed - numbers.tickets) // numbers.groups_per_batch)}, or feed them from one port."
        )


def group_problems(graph: Graph) -> Iterator[str]:
    """Check 6: all nodes that declare a group size or a batch size declare the same one."""
    facts = {name: node.facts() for name, node in graph.nodes.items()}
    for field, word in (("group_size", "samples a group"), ("groups_per_batch", "groups a batch")):
        declared = {name: getattr(fact, field) for name, fact in facts.items() if getattr(fact, field) is not None}
        if len(set(declared.values())) > 1:
            each = ", ".join(f"{name} has {value}" for name, value in declared.items())
            yield f"the nodes disagree on the {word} ({field}): {each}; give all of them the same number."


def layout_problems(graph: Graph) -> Iterator[str]:
    """A trainer that computes rows cannot compute what its batcher packs into a tree."""
    for edge in graph.edges:
        batcher, trainer = (graph.nodes[port_owner(port)].facts() for port in (edge.out, edge.into))
        if batcher.layout in ("auto", "tree") and trainer.layout == "rows":
            yield (
                f"{port_owner(edge.out)} packs trees of shared prefixes (layout={batcher.layout!r}), but "
                f"{port_owner(edge.into)} computes rows; give {port_owner(edge.out)} layout='rows'."
            )


def column_problems(graph: Graph) -> Iterator[str]:
    """A column has one declaration and one node that adds it, and is there where it is read."""
    adders: dict[str, list[str]] = {}
    for name, node in graph.nodes.items():
        for column in node.facts().columns:
            adders.setdefault(column.name, []).append(name)
            if any(column.name == one.name for one in fields(Trainable)):
                yield f"{name} adds the column {column}, but samples have a field of this name; give it another name."
    for column_name, names in adders.items():
        if len(names) > 1:
            yield f"{' and '.join(names)} both add a column {column_name!r}; give one of the columns another name."
    for name, node in graph.nodes.items():
        known = {column.name: column for column in added_columns(graph, name)}
        for column in node.facts().needed_columns:
            if column.name not in known:
                yield (
                    f"{name} reads the column {column}, which no node before it adds; declare it in the facts of the "
                    f"node that adds it, Facts(columns=...), or leave it out of {name}."
                )
            elif known[column.name] != column:
                yield (
                    f"{name} reads the column {column}, but it is declared as {known[column.name]} where it is added; "
                    "use one declaration in both places."
                )


def shared_name_problems(graph: Graph) -> Iterator[str]:
    """The models of two trainers need two directories in a checkpoint; and the ledger has one answer to a prompt of a
    held-out set at a step, where two nodes that ask one set would record two."""
    savers: dict[str, list[str]] = {}
    askers: dict[str, list[str]] = {}
    for name, node in graph.nodes.items():
        facts = node.facts()
        if facts.saves is not None:
            savers.setdefault(facts.saves, []).append(name)
        for asked in dict.fromkeys(facts.held_out_sets):
            askers.setdefault(asked, []).append(name)
    for saves, names in savers.items():
        if len(names) > 1:
            yield (
                f"{' and '.join(names)} would both save their model as {saves!r} in a checkpoint; give all but one of "
                f"their policies a different name, as in Policy(..., name={names[-1]!r})."
            )
    for asked, names in askers.items():
        if len(names) > 1:
            yield (
                f"{' and '.join(names)} both ask the held-out set {asked!r}, so its answers would be recorded twice; "
                f"leave it out of {names[-1]}, or give it another name there, as in EvaluationSet('other', ...)."
            )


def engine_length_problems(graph: Graph) -> Iterator[str]:
    """A generator's engine has to take what it is asked: it refuses longer prompts, and cuts answers off."""
    for name, node in graph.nodes.items():
        most = node.facts().max_model_len
        for asker in nodes_that_ask(graph, name) if most is not None else ():
            longest, option = longest_sequence_for(graph, name, asker), graph.nodes[asker].facts().context_by
            if longest is not None and most is not None and longest > most:
                yield (
                    f"{name} takes sequences of at most {most} tokens (--engine.max-model-len), but a prompt of "
                    f"{asker} and its answer can have {longest} ({option}, max_tokens); raise --engine.max-model-len "
                    f"to {longest} or leave it out, or lower --{option.replace('_', '-')} or --max-tokens."
                )


MOST_SAMPLES = 16_000
"""The most samples in one rank's part of a batch, which is sent as one message. `flowrl.wire.encoding.cost` allows
somewhat more single-turn samples. It allows fewer episodes with dozens of rewards each; the sender then refuses the
message."""


def batch_problems(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Check 7: every sample fits into a micro-batch, every rank gets a sequence."""
    facts = {name: node.facts() for name, node in graph.nodes.items()}
    lengths = [f"{name}: prompt {f.longest_prompt}" for name, f in facts.items() if f.longest_prompt is not None]
    lengths += [f"{name}: response {f.longest_response}" for name, f in facts.items() if f.longest_response is not None]
    for name in facts:
        budget = facts[name].token_budget
        if budget is not None and numbers.longest_sample is not None and 0 < budget < numbers.longest_sample:
            yield (
                f"{name} has token_budget={budget}, but a sample can be {numbers.longest_sample} tokens long "
                f"({', '.join(lengths)}); raise token_budget to {numbers.longest_sample}, or shorten prompts or "
                f"responses."
            )

    members = 1 if numbers.group_size is None else numbers.group_size
    sequences = (numbers.groups_per_batch or 0) * members
    for placed in graph.placed.values():
        fed = any(edge.into.node is placed.node and edge.rule.splits for edge in graph.edges)
        if not placed.node.gang:
            continue
        shared = facts[placed.name].ranks_per_part
        parts, rest = divmod(placed.replicas, shared)
        if rest:
            yield (
                f"{placed.name} has {placed.replicas} {'rank' if placed.replicas == 1 else 'ranks'}, which cannot be "
                f"divided into groups of {shared} that share their micro-batches; give it "
                f"{shared * (parts + 1)} replicas, or another {facts[placed.name].parted_by}."
            )
        elif fed and 0 < sequences < parts:
            each = "" if shared == 1 else f" in groups of {shared}"
            yield (
                f"a batch has {sequences} sequences ({numbers.groups_per_batch} groups × {members}), "
                f"but {placed.name} has {placed.replicas} ranks{each}; use more groups a batch or fewer ranks."
            )
        elif fed and sequences > MOST_SAMPLES * parts:
            yield (
                f"a batch has {sequences} sequences ({numbers.groups_per_batch} groups × {members}), "
                f"{-(-sequences // parts)} for each of the {parts} parts that {placed.name} takes; one message holds "
                f"at most {MOST_SAMPLES}. Use fewer groups a batch or more ranks."
            )


def resource_problems(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Check 9: the cluster has what the hosts need."""
    pools = [units for _, units in device_pools(graph, cluster)]
    needs = [unit_need(units) for units in pools]
    cores, gpus = sum(cores for cores, _ in needs), sum(gpus for _, gpus in needs)
    where = "this machine" if len(cluster.machines) == 1 else f"the {len(cluster.machines)} machines"
    for field, word, needed, present in (
        ("gpus", "GPUs", gpus, cluster.num_gpus),
        ("cpus", "cores", cores, cluster.num_cores),
    ):
        if needed > present:
            asking = [(unit, getattr(unit, field)) for units in pools for unit in units if getattr(unit, field)]
            parts = ", ".join(f"{unit.name}: {unit.replicas} × {amount:g}" for unit, amount in asking)
            yield (
                f"the graph needs {needed:g} {word} ({parts}) but {where} has {present}; use fewer replicas, a smaller "
                f"{field}=, g.time_share(...) for nodes that may alternate, or declare a cluster "
                f'(--cluster "{CLUSTER_EXAMPLE}").'
            )
    for unit in (unit for units in pools for unit in units):
        if unit.gang and 0 < unit.gpus < 1 and unit.replicas > cluster.num_gpus:
            yield (
                f"the {unit.replicas} ranks of {unit.name} need different GPUs, and {where} has {cluster.num_gpus}; "
                "use fewer ranks, or declare a larger cluster."
            )
    if plan.homeless and gpus <= cluster.num_gpus and cores <= cluster.num_cores:
        yield (
            f"no single machine has enough left for {', '.join(plan.homeless)}, although all machines together do; "
            f"request less for each replica, or declare larger machines."
        )
    memory = {name: node.facts().memory_bytes * graph.placed[name].replicas for name, node in graph.nodes.items()}
    present_bytes = sum(machine.memory_bytes for machine in cluster.machines)
    if present_bytes and sum(memory.values()) > present_bytes:
        parts = ", ".join(f"{name}: {size / GB:.1f}" for name, size in memory.items() if size)
        yield (
            f"the nodes need {sum(memory.values()) / GB:.1f} GiB of memory ({parts}) but {where} has "
            f"{present_bytes / GB:.1f}; use fewer replicas or smaller models."
        )
    most = min((machine.max_files for machine in cluster.machines if machine.max_files), default=0)
    if most and (problem := files_problem(len(plan.hosts), most)):  # the peers: all hosts and the driver, less itself
        yield f"{problem}."


def sharing_problems(graph: Graph) -> Iterator[str]:
    """Check 9: nodes that share a process or devices can do so."""
    for names in merge_units(graph.sharing):
        counts = {name: graph.placed[name].replicas for name in names}
        if len(set(counts.values())) > 1 and any(graph.placed[name].heavy for name in names):
            each = ", ".join(f"{name} has {count}" for name, count in counts.items())
            yield f"g.together needs the same number of replicas of each node, but {each}; make them equal."
    for names in merge_units(graph.time_shared):
        for name in names:
            if not graph.placed[name].heavy:
                yield f"g.time_share names {name}, which needs no cpus and no gpus; leave it out, or give it cpus=."
        for shared in merge_units(graph.sharing):
            if len(both := [name for name in names if name in shared]) > 1:
                nodes = " and ".join(both)
                yield f"{nodes} are in g.together and in g.time_share; nodes of one process cannot alternate; keep one."


def idle_warnings(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Check 10: generators that have to be idle, at times or in part; admitted episodes that wait for a place, and
    become stale meanwhile."""
    if graph.admission is None or numbers.tickets is None:
        return
    samples = numbers.samples_in_flight
    feeders = {port_owner(port): None for port in graph.admission.until}
    if numbers.ahead == 0:
        yield f"staleness 0 is synchronous: {', '.join(feeders)} and the trainer work alternately."
    for name, node in graph.nodes.items():
        slots = (node.facts().concurrency or 0) * graph.placed[name].replicas
        if name in feeders and slots > samples > 0:
            yield (
                f"{name} can work on {slots} samples at a time but at most {samples} are in flight ({numbers.tickets} "
                f"tickets × {numbers.most_members}), so {slots - samples} slots stay idle; raise staleness or the "
                f"groups a batch."
            )
    for name, node in graph.nodes.items():
        at_once = node.facts().episodes
        if at_once is not None and (places := at_once * graph.placed[name].replicas) < samples:
            yield (
                f"{name} plays {places} episodes at a time but {samples} are admitted ({numbers.tickets} tickets × "
                f"{numbers.most_members}), so {samples - places} wait and grow old; raise limits.episodes, or "
                f"lower staleness or the groups a batch."
            )


def memory_warnings(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Check 10: edges that may hold more bytes than the machine's memory."""
    present = min((machine.memory_bytes for machine in cluster.machines), default=0)
    models = max((node.facts().memory_bytes for node in graph.nodes.values()), default=0)
    if present and plan.retained_bytes > present - models:
        worst = max(plan.edges, key=lambda edge: edge.retained_bytes)
        yield (
            f"the edges may hold {plan.retained_bytes / GB:.1f} GiB, most of it {worst.name} "
            f"({worst.retained_bytes / GB:.1f}), and a machine has {present / GB:.1f}; lower staleness, groups a batch "
            f"or capacity=."
        )


def capability_problems(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Nodes on GPUs or CPUs that are known to lack a capability that the node needs."""
    for host in plan.hosts:
        machine = cluster.machines[host.machine]
        has = machine.capability if host.gpus else 0.0
        for replica in host.nodes:
            name = replica.partition("/")[0]
            facts = graph.nodes[name].facts()
            if 0 < has < facts.least_capability:
                yield (
                    f"{name} computes in {facts.quantization}, which needs GPUs of compute capability "
                    f"{facts.least_capability} or more (L4, RTX4090, L40S, H100 and newer), but those of machine "
                    f"{host.machine} have {has}; leave --engine.quantization out, or choose other GPUs."
                )
            if facts.cpu_flags and machine.cpu_flags and not facts.cpu_flags & machine.cpu_flags:
                yield (
                    f"{name} keeps its KV cache in fp8, which vLLM does on GPUs and on CPUs with AVX512 or AMX, and "
                    f"the CPU of machine {host.machine} has neither; leave --engine.kv-cache-dtype out."
                )


def gap_findings(graph: Graph) -> tuple[list[str], list[str]]:
    """(notes, warnings) about nodes that take the logprobs of a quantized generator for the trainer's: what corrects
    the gap, as "node: note"; and a warning where nothing does.

    The gap matters to nodes that get samples of such a generator over a path on which no node makes data of them
    (`Facts.as_data`). A node that sends weights, but none to this generator, is left out.
    """
    notes, warnings = [], []
    weights = [(port_owner(edge.out), port_owner(edge.into)) for edge in graph.edges if edge.kind == "latest"]
    senders = {sender for sender, _ in weights}
    as_data = frozenset(name for name, node in graph.nodes.items() if node.facts().as_data)
    for generator in dict.fromkeys(into for _, into in weights):
        if not (quantization := graph.nodes[generator].facts().quantization):
            continue
        gap = f"{generator} samples in {quantization}, with other logprobs than the trainer's (behavior_gap)"
        reached = reachable_nodes(graph, generator, not_past=as_data)
        for name in (name for name in graph.nodes if name in reached):
            facts = graph.nodes[name].facts()
            if facts.correction is None or ((name, generator) not in weights and name in senders):
                continue
            if facts.correction:
                notes.append(f"{name}: {gap}; the loss corrects that by {facts.correction}")
            else:
                warnings.append(
                    f"{gap}, and {name} takes them for the trainer's without a correction; {facts.correct_by}."
                )
    return notes, warnings


@dataclass(frozen=True)
class EpisodeTime:
    """The time of the episodes that one node plays for the trainer."""

    node: str
    seconds: float
    """T"""
    places: int
    """E, at most the episodes of all tickets."""
    batch: int
    """P·K"""
    ahead: int
    """S"""

    @property
    def admitted(self) -> int:
        """The number of episodes for which there are tickets."""
        return (self.ahead + 1) * self.batch

    @property
    def step_s(self) -> float:
        """The least time of a step."""
        return self.batch * self.seconds / self.places

    @property
    def update_s(self) -> float | None:
        """If an update is shorter than this, the trainer waits for episodes. None: the trainer waits at every step."""
        return max(self.seconds / self.ahead, self.step_s) if self.ahead else None


def step_time_findings(graph: Graph, numbers: Numbers) -> tuple[list[str], list[str]]:
    """(notes, warnings): the time of a step, for each node whose episodes have an expected time; and check 10, episodes
    that wait for a place, although there are tickets for them."""
    notes: list[str] = []
    warnings: list[str] = []
    ahead, groups = numbers.ahead, numbers.groups_per_batch
    if graph.admission is None or ahead is None or ahead < 0 or not groups:
        return notes, warnings
    for name in sorted(nodes_past(graph, graph.admission.out)):
        facts, replicas = graph.nodes[name].facts(), graph.placed[name].replicas
        if facts.expected_s is None or facts.expected_s <= 0:
            continue
        batch = groups * (numbers.group_size or 1)
        rooms = [room * replicas for room in (facts.episodes, facts.processes) if room is not None]
        places = max(1, min([*rooms, (ahead + 1) * batch]))
        one = EpisodeTime(name, facts.expected_s, places, batch, ahead)
        step = (
            f"{name}: {places} episodes of {one.seconds:g} s at a time (limits.expected_s) give "
            f"{places / one.seconds:.2g} a second, so a step of {batch} takes {one.step_s:.3g} s or more"
        )
        if one.update_s is None:
            notes.append(f"{step}, and its update besides: with a staleness of 0 nothing is played meanwhile")
        else:
            notes.append(f"{step}; the trainer waits for episodes where an update takes less than {one.update_s:.3g} s")
        if places < one.admitted:
            warnings.append(
                f"{name} has places for {places} episodes at a time, of {one.seconds:g} s each, so a step of "
                f"{batch} takes {one.step_s:.3g} s or more, where its tickets allow "
                f"{one.seconds / (ahead + 1):.3g} s; raise limits.episodes and processes to {one.admitted}."
            )
    return notes, warnings
