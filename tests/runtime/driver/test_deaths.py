"""What a user reads about a process that Ray reports as dead."""

from __future__ import annotations

from ray.exceptions import OutOfMemoryError

from flowrl.runtime.driver.run_processes import death_errors, rays_detail

MEMORY = """\
4 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 84) is low.
OOM kill reason: Memory usage 24061833216B exceeded threshold of 24012687360B (95.0% of 25276514304B limit)
Object store memory usage: [- objects spillable: 0
- bytes spillable: 0
]
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
19313\t7.25\tray::ProcessActor
21348\t2.85\tVLLM::EngineCore
14419\t1.22\tpython -m pytest
14422\t1.07\tpython -m something.else
Refer to the documentation on how to address the out of memory issue.
"""


def test_memory_that_has_run_out_is_told_in_one_clause() -> None:
    error = OutOfMemoryError(MEMORY)
    assert isinstance(error, death_errors())
    assert rays_detail(error) == (
        " (Ray killed it because 24.1 of 25.3 GB of the machine's memory were used, most of it by "
        "ray::ProcessActor 7.25 GB, VLLM::EngineCore 2.85 GB, python -m pytest 1.22 GB)"
    )
    without_users = OutOfMemoryError(MEMORY.partition("Top 10")[0])
    assert rays_detail(without_users).endswith("of the machine's memory were used)")


def test_of_other_deaths_rays_detail_is_repeated_without_its_guesses() -> None:
    text = "The actor died.\n\tWorker exit detail: exit code 1. Some common causes include: (1) memory.\n\tmore"
    assert rays_detail(RuntimeError(text)) == " (exit code 1)"
    assert rays_detail(RuntimeError("nothing known")) == ""
