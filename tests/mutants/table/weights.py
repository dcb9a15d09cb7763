"""Faults in flowrl.weights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="buffers_of_vllms_size",
        fault="a broadcast takes the buffers that vLLM takes by default",
        function="NcclSender._open_engine",
        before="packed_buffer_size_bytes=PACKED_BYTES,",
        after="packed=True,",
        test="tests/weights/test_weights_routes.py::test_a_sender_gives_vllm_synchronized_copies",
    ),
    Mutant(
        name="copied_too_early",
        fault="weights are copied before they are gathered",
        function="copy_tensors",
        before="for names, tensors in source.buckets(bucket_bytes):\n        synchronize()",
        after="for names, tensors in source.buckets(bucket_bytes):\n        pass",
        test="tests/weights/test_weights_routes.py::test_tensors_are_copied_between_synchronizations",
    ),
    Mutant(
        name="gathered_too_early",
        fault="weights are gathered while the optimizer's stream is at work",
        function="copy_tensors",
        before='"""\n    synchronize()\n    for',
        after='"""\n    pass\n    for',
        test="tests/weights/test_weights_routes.py::test_tensors_are_copied_between_synchronizations",
    ),
    Mutant(
        name="probe_by_own_dtype",
        fault="a probe knows the generator's dtype alone",
        function="coarser_dtype",
        before="known = {dtype, *manifest.tensors.dtypes} & TOLERANCE.keys()",
        after="known = {dtype}",
        test="tests/weights/test_weights_publish.py::test_the_coarser_dtype_decides_whichever_side_has_it",
    ),
    Mutant(
        name="probe_tolerance_ignored",
        fault="the tolerance that was asked for is ignored",
        function="ProbeCheck._find_limit",
        before="if self.tolerance is not None:",
        after="if False:",
        test="tests/weights/test_weights_publish.py::test_an_own_tolerance_replaces_all_others",
    ),
    Mutant(
        name="probe_without_level",
        fault="a later probe may not differ in proportion to the first",
        function="ProbeCheck._find_limit",
        before="if self.first is not None and DRIFT * self.first > limit:",
        after="if False:",
        test="tests/weights/test_weights_publish.py::test_later_probes_are_compared_with_the_first",
    ),
    Mutant(
        name="probe_without_tf32",
        fault="a probe of an engine in float32 on a GPU does not expect TF32",
        function="ProbeCheck._find_limit",
        before='if dtype == "float32" and self.on_gpu:',
        after="if False:",
        test="tests/weights/test_weights_publish.py::test_float32_on_a_gpu_may_be_tf32",
    ),
    Mutant(
        name="released_too_early",
        fault="a bucket is released before its copies are made",
        function="copy_tensors",
        before="yield name, tensor.to(narrowing.narrow_dtype(name, tensor.dtype), copy=True)\n        synchronize()",
        after="yield name, tensor.to(narrowing.narrow_dtype(name, tensor.dtype), copy=True)\n        pass",
        test="tests/weights/test_weights_routes.py::test_tensors_are_copied_between_synchronizations",
    ),
    Mutant(
        name="scales_are_missed",
        fault="the scales that layers make themselves are missed in an update",
        function="checkpoint_parameters",
        before="return {name for name, _ in model.named_parameters()} - made",
        after="return {name for name, _ in model.named_parameters()}",
        test="tests/stack/test_fp8_layers.py::test_through_host_memory[Layers-fp8]",
    ),
    Mutant(
        name="synchronizes_nothing",
        fault="copies for a broadcast do not wait for the device",
        function="_synchronize",
        before="torch.cuda.synchronize()",
        after="pass",
        test="tests/weights/test_weights_routes.py::test_a_sender_gives_vllm_synchronized_copies",
    ),
    Mutant(
        name="unchanged_is_transmitted",
        fault="an unchanged version is transmitted, for which no reader takes part",
        function="Publisher.transmit_tensors",
        before="if self._untransmitted:",
        after="if True:",
        test="tests/weights/test_weights_routes.py::test_nobody_waits_for_readers_of_an_unchanged_version",
    ),
    Mutant(
        name="views_of_a_bucket",
        fault="tensors of a bucket are handed on, and no copies of them",
        function="copy_tensors",
        before="yield name, tensor.to(narrowing.narrow_dtype(name, tensor.dtype), copy=True)",
        after="yield name, tensor.to(narrowing.narrow_dtype(name, tensor.dtype))",
        test="tests/weights/test_weights_routes.py::test_tensors_are_copied_between_synchronizations",
    ),
)
