"""The recipes of docs/clusters: they parse, and name options and commands that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from flowrl.commands.prepare import prepare_graph
from flowrl.graph.load import load_file
from flowrl.runtime.driver.job import RunOptions

ENDS_WITHIN_S = 5
"""How long a run takes to end once --term-minutes are over."""
RECIPES = Path(__file__).parents[2] / "docs" / "clusters"


def test_the_slurm_script_parses() -> None:
    done = subprocess.run(["bash", "-n", RECIPES / "flowrl.sbatch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


STUB = """#!/bin/bash
case $(basename "$0") in
  scontrol) echo machine-1 ;;
  srun) [ "${*: -1}" = --ip-address ] && echo 10.0.0.1 ;;
  flowrl) [ "$1" = run ] && printf '%s\\n' "$@" > "$FOUND" ;;
esac
exit 0
"""


def run_of_slurm(tmp_path: Path, *words: str) -> list[str]:
    """The words that the script runs flowrl with; stubs stand for Slurm, Ray and the waits."""
    for name in ("scontrol", "srun", "ray", "sleep", "flowrl"):
        stub = tmp_path / name
        stub.write_text(STUB)
        stub.chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "m[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FOUND": str(tmp_path / "found"), **slurm}
    subprocess.run(["bash", RECIPES / "flowrl.sbatch", *words], env=environment, check=True, timeout=20)
    return (tmp_path / "found").read_text().split()


def test_a_job_of_slurm_runs_with_the_options_that_it_is_given(tmp_path: Path) -> None:
    """In the directory that they name: a further job with --resume has another id, and has to find the same run."""
    given = ["grpo", "--steps", "200", "--run-dir", "/shared/a", "--resume"]
    run, *words = run_of_slurm(tmp_path, *given)
    (options,) = prepare_graph("run", (RunOptions,), words).own
    assert (run, str(options.run_dir), options.resume, options.steps) == ("run", "/shared/a", True, 200)
    told = re.search(r"--signal=B:TERM@(\d+)", (RECIPES / "flowrl.sbatch").read_text())
    assert told is not None and 60 * options.term_minutes + ENDS_WITHIN_S <= int(told[1])


def test_the_ray_job_has_what_a_run_needs() -> None:
    job = yaml.safe_load((RECIPES / "raycluster.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        spec = pod["template"]["spec"]
        (container,) = spec["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert mounts["/shared"] in volumes
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["flowrl", "run", "grpo"]
    (options,) = prepare_graph("run", (RunOptions,), words[2:]).own
    until_kill_s = int(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert 60 * options.term_minutes + ENDS_WITHIN_S <= until_kill_s
    for pod in pods:
        assert until_kill_s < pod["template"]["spec"]["terminationGracePeriodSeconds"]
    (head,) = pods[0]["template"]["spec"]["containers"]
    assert head["lifecycle"]["preStop"]["exec"]["command"][-1] == job["spec"]["jobId"]
    own = {"--steps", "--run-dir", "--term-minutes"}
    given = [(name, value) for name, value in zip(words[3::2], words[4::2], strict=True) if name not in own]
    cfg = load_file("grpo").parse([text for pair in given for text in pair])
    asked = cfg.generator.size.replicas * cfg.generator.size.gpus + cfg.trainer.size.replicas
    workers = cluster["workerGroupSpecs"][0]
    each = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert asked == workers["replicas"] * each, "the run uses every GPU of the manifest"


def test_the_image_has_no_finding_of_a_linter() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, RECIPES / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_made_of_steps_that_docker_knows() -> None:
    text = (RECIPES / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert steps[0] == "FROM" and set(steps) <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    assert re.search(r"pip install .*\[gpu", text) and "python3-dev" in text
