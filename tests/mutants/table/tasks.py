"""Faults in flowrl.tasks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="array_number_cut",
        fault="a number at the end of what has been read is taken before its fraction",
        function="ArrayScan.take_element",
        before="if end + EXPONENT <= len(self._text) or not self._read_more():  # a number may continue",
        after="if end < len(self._text) or not self._read_more():  # a number may continue",
        test="tests/tasks/test_tasks_rows_of_formats.py::test_elements_are_those_of_the_array",
    ),
    Mutant(
        name="copy_of_another_time",
        fault="a copy outlives the file of which it is one",
        function="plain_file",
        before='"modified_ns": max((one.st_mtime_ns for one in stats), default=0),',
        after='"modified_ns": 0,',
        test="tests/tasks/test_tasks_rows_of_formats.py::test_a_copy_is_made_once_and_anew_for_a_file_that_has_changed",
    ),
    Mutant(
        name="mixture_in_the_order_of_its_files",
        fault="on disk the rows of a mixture have another order than in memory",
        function="scan_source",
        before="return found.pick_rows(taken[trained_first]), len(found) - len(taken)",
        after="return found.pick_rows(taken), len(found) - len(taken)",
        test="tests/tasks/test_tasks_on_disk.py::test_mixtures_are_the_same",
    ),
    Mutant(
        name="openrlhf_queries_lack_the_response",
        fault="OpenRLHF's queries are prompts alone",
        function="foreign_arguments",
        before="queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]",
        after="queries = [prompt + response[:0] for prompt, response in zip(prompts, responses, strict=True)]",
        test="tests/tasks/test_rewards_conventions.py::test_openrlhf_gets_queries_prompts_and_labels_at_once",
    ),
    Mutant(
        name="part_of_a_preference_by_its_completions",
        fault="on disk a preference is held out by its completions, too, so a prompt is trained and held out",
        function="part_rows",
        before="held_out = found.asked[indices] % HELD_OUT_ONE_IN == 0",
        after="held_out = found.ids[indices] % HELD_OUT_ONE_IN == 0",
        test="tests/tasks/test_tasks_on_disk.py::test_preferences_are_the_same",
    ),
    Mutant(
        name="weights_of_the_server_forgotten",
        fault="heads that the client does not weigh weigh 1, whatever the server was told",
        function="Verdicts.weighted",
        before="return replace(self, heads={name: weights.get(name, weight) for name, weight in self.heads.items()}).summed()",
        after="return replace(self, heads={name: weights.get(name, 1.0) for name, weight in self.heads.items()}).summed()",
        test="tests/tasks/test_rewards_http.py::test_weights_are_told_to_the_server_or_by_the_one_who_asks",
    ),
)
