"""`flowrl doctor`: what this machine or a cluster can do; every line with a problem has a remedy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from flowrl.commands.finding import Finding, as_text
from flowrl.runtime.telemetry.standard_streams import print_text


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `flowrl doctor`."""

    address: str = ""
    """Head of a Ray cluster to join, HOST:6379; empty: RAY_ADDRESS if it is set, else start a local Ray."""
    ray: bool = True
    """Start or join Ray."""
    json: bool = False
    """Print a JSON object instead of lines."""


def print_findings(options: DoctorOptions) -> int:
    """Print the findings; returns the exit status: 0, or 1 if something failed."""
    from flowrl.commands.cluster_findings import ray_findings
    from flowrl.commands.machine_findings import machine_findings

    parts: Iterable[Finding] = machine_findings()
    if options.ray:
        parts = itertools.chain(parts, ray_findings(options.address))
    findings = list(parts)
    failed = sum(finding.status == "failed" for finding in findings)
    if options.json:
        print_text(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print_text(as_text(findings))
        print_text(f"doctor: {f'{failed} failed' if failed else 'ok'}")
    return 1 if failed else 0
