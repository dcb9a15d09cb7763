"""Which cores the processes of a real run have."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from flowrl.runtime.driver.resources import HOST_VARIABLE
from tests.rigs.run_process import ROOT, Run, pids_of

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(400)]
SMALL = ("--groups-per-step", "2", "--group-size", "4", "--evaluate", "0", "--steps", "2")


def cores_and_threads(mark: str) -> dict[str, set[tuple[int, str]]]:
    """Host -> (number of cores of all its threads together, OMP_NUM_THREADS) of each of its processes."""
    found = defaultdict(set)
    for pid in pids_of(mark):
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        variables = dict(pair.partition("=")[::2] for pair in raw.split("\0"))
        threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
        cores = set[int]().union(*(os.sched_getaffinity(thread) for thread in threads))
        found[variables.get(HOST_VARIABLE, "")].add((len(cores), variables.get("OMP_NUM_THREADS", "")))
    return found


@pytest.mark.parametrize("staleness", ["0", "1"])
def test_engine_and_trainer_have_all_cores_in_turns_or_a_core_each(tmp_path: Path, staleness: str) -> None:
    cores = len(os.sched_getaffinity(0)) if staleness == "0" else 1
    run = Run(ROOT / "graphs" / "grpo.py", tmp_path / "run", *SMALL, "--staleness", staleness, timeout_s=380)
    run.until("driver: training")
    found = cores_and_threads(run.mark)
    assert run.wait() == 0, run.stdout + run.stderr
    assert found["generator/0"] == found["trainer/0"] == {(cores, str(cores))}
    assert "audit: ok" in run.stdout
