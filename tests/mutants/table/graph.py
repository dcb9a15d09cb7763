"""Faults in flowrl.graph."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="own_default_of_part_lost",
        fault="an option of a part gets the part's default, and not that which the configuration gives to the part",
        function="_declared_options",
        before="value = _default_value(field) if values is dataclasses.MISSING else getattr(values, field.name)",
        after="value = _default_value(field)",
        test="tests/recipes/test_option_parts.py::test_a_part_is_checked_within_its_configuration",
    ),
    Mutant(
        name="broadcast_in_turns",
        fault="a reader that waits for its GPU is part of a broadcast",
        function="_plan_weights",
        before="can_broadcast = bool(trainer.gpus and reader.gpus) and apart and not reader.lease",
        after="can_broadcast = bool(trainer.gpus and reader.gpus) and apart",
        test="tests/weights/test_weights_routes.py::test_a_reader_in_turns_with_another_node_than_the_trainer_reads_host_memory",
    ),
    Mutant(
        name="broadcast_on_one_gpu",
        fault="a reader on the trainer's GPU is part of a broadcast",
        function="_plan_weights",
        before="apart = trainer.machine != reader.machine or not set(trainer.gpus) & set(reader.gpus)",
        after="apart = True",
        test="tests/weights/test_weights_routes.py::test_readers_that_cannot_all_take_part_in_a_broadcast_read_host_memory",
    ),
    Mutant(
        name="full_device_accepted",
        fault="nodes that do not fit on their device are not refused",
        function="memory_problems",
        before="if device.num_bytes and device.peak_bytes > device.num_bytes and there not in told:",
        after="if False and there not in told:",
        test="tests/graph/test_graph_memory.py::test_what_does_not_fit_is_refused",
    ),
    Mutant(
        name="one_worker_a_generator",
        fault="a generator on two GPUs is one rank of a broadcast",
        function="routes_of",
        before="WeightRoute(reader, way.transport, len(plan.host_of(reader).gpus) or 1, way.dtype)",
        after="WeightRoute(reader, way.transport, 1, way.dtype)",
        test="tests/nodes/generation/test_generator_parallel.py::test_two_gpus_of_a_generator_are_two_ranks_beside_the_trainer",
    ),
    Mutant(
        name="ranks_on_one_gpu",
        fault="ranks of a gang may be on one GPU",
        function="place_replicas",
        before="apart = slots if unit.gang else []",
        after="apart = slots if False else []",
        test="tests/runtime/driver/test_runtime_devices.py::test_ranks_of_a_gang_are_on_different_gpus_though_half_a_one_would_do",
    ),
    Mutant(
        name="transports_mixed",
        fault="readers of one trainer get weights in different ways",
        function="_plan_weights",
        before="elif lane.producer in in_host_memory:",
        after="elif not (trainer.gpus and reader.gpus) or reader.lease or set(trainer.gpus) & set(reader.gpus):",
        test="tests/weights/test_weights_routes.py::test_readers_that_cannot_all_take_part_in_a_broadcast_read_host_memory",
    ),
    Mutant(
        name="turns_add_up",
        fault="what nodes in turns have on a device is added up",
        function="DeviceUse.peak_bytes",
        before="max(sizes) for sizes in by_lease.values()",
        after="sum(sizes) for sizes in by_lease.values()",
        test="tests/graph/test_graph_memory.py::test_every_device_says_who_is_there_when",
    ),
    Mutant(
        name="turns_all_at_once",
        fault="the models of a lease are counted as if they were on the device at the same time",
        function="DeviceUse.peak_bytes",
        before="max(sizes) for sizes in by_lease.values()",
        after="sum(sizes) for sizes in by_lease.values()",
        test="tests/graph/test_graph_memory.py::test_every_device_says_who_is_there_when",
    ),
    Mutant(
        name="derived_counted_unevenly",
        fault="ways past a deriving node and around it meet where samples are counted",
        function="_uneven_problems",
        before="if len(paths) > 1:",
        after="if len(paths) > 2:",
        test="tests/graph/test_derived_check.py::test_where_samples_are_counted_all_have_come_past_the_same_deriving_nodes",
    ),
    Mutant(
        name="derived_of_derived_add_up",
        fault="places of what is derived from derived samples are added, not multiplied",
        function="Branches.num_members",
        before="math.prod(1 + sum(",
        after="1 + sum(sum(",
        test="tests/graph/test_derived_check.py::test_what_is_derived_from_derived_samples_multiplies",
    ),
)
