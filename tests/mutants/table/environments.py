"""Faults in flowrl.environments."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="garbage_outlives_an_episode",
        fault="garbage of an episode counts for the memory limit of the next one",
        function="_left_nothing",
        before="gc.collect()  # garbage would count towards the limit of the next episode",
        after="pass",
        test="tests/environments/test_environments_reuse.py::test_garbage_of_an_episode_does_not_count_for_the_next_one",
    ),
    Mutant(
        name="output_outlives_an_episode",
        fault="an error quotes what an earlier episode of its process printed",
        function="EpisodeProcess.begin_episode",
        before="self._output.forget_output()",
        after="pass",
        test="tests/environments/test_environments_reuse.py::test_the_text_of_an_error_has_only_what_its_own_episode_printed",
    ),
    Mutant(
        name="process_that_failed_plays_on",
        fault="a process plays another episode after one that failed",
        function="_play_one",
        before='if episode.closed and request["again"] and not failed:',
        after='if episode.closed and request["again"]:',
        test="tests/environments/test_environments_reuse.py::test_a_process_that_failed_plays_no_other_episode",
    ),
    Mutant(
        name="process_with_threads_plays_on",
        fault="a process plays another episode beside what an earlier one left running",
        function="_left_nothing",
        before="return one_thread_left(until_s - time.monotonic()) and not child_pids()",
        after="return not child_pids()",
        test="tests/environments/test_environments_reuse.py::test_a_process_in_which_something_still_runs_plays_no_other_episode",
    ),
    Mutant(
        name="variables_outlive_an_episode",
        fault="environment variables of an episode are there in the next one",
        function="ProcessState.put_back",
        before="os.environ.clear()",
        after="pass",
        test="tests/environments/test_environments_reuse.py::test_the_next_episode_has_only_what_modules_keep",
    ),
    Mutant(
        name="waiting_process_keeps_its_place",
        fault="a process that has played and waits counts as playing",
        function="Episodes._keep_process",
        before="self._free.release()",
        after="pass",
        test="tests/environments/test_environments_reuse.py::test_those_that_wait_are_among_the_processes_that_may_be_alive",
    ),
)
