"""Preflight checks as the first step of a job: one task per node, then a comparison of their reports."""

import json
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arpo_megatron.cluster.backend import SilentNodeError, SlurmBackend
from arpo_megatron.cluster.preflight_node import REPORTED
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, show, warning
from arpo_megatron.launch.preflight.machine import CLOCK_SKEW_S
from arpo_megatron.launch.supervisor import SupervisedProcess, Supervisor
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.processes import ProcessDiedError

START_S = 300.0
"""Limit for the first report: all nodes start Python, import torch, perhaps from a cold filesystem, and run checks."""
IMAGE_S = 900.0
"""The same limit in a container, whose image may have to be downloaded."""
LAST_S = 10.0
"""Limit from the first to the last report. Nodes write theirs after the all-reduce, which ends for all at once."""
_NO_REPORT = "report"
"""Name of the failure for a node without a report."""
_FAILURE = re.compile(r"^(\S+): failure +(\S+) +(.+)$", re.MULTILINE)
"""A failure in a node's log: name of the node, name of the check, text and fix."""


@dataclass(frozen=True, slots=True)
class Report:
    """Check results, clock and free ports of one node."""

    findings: tuple[CheckResult, ...]
    """Results in the order of the checks."""
    clock: float
    """Unix time right after the all-reduce, in seconds."""
    ports: list[int]
    """Free TCP ports."""


def examine_nodes(backend: SlurmBackend, supervisor: Supervisor, port: int, poll: Callable[[], None]) -> None:
    """Check every node (`preflight_node`), print the results, and set `backend.free_ports`.

    Args:
        backend: nodes of the job.
        supervisor: receives the step.
        port: TCP port of node 0 for the all-reduce.
        poll: called while waiting.

    Raises:
        UserError: a check failed; the message has the check, its node and the fix.
        SilentNodeError: a node did not report, and no other check failed.
    """
    folder, token = backend.run.doctor, secrets.token_hex(8)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "canary", {"token": token})
    addresses = ",".join(node.address for node in backend.nodes)
    command = backend.python(
        [sys.executable, "-m", "arpo_megatron.cluster.preflight_node", str(backend.run.path), token]
    )
    variables = {"ARPO_NODE_ADDRESSES": addresses, "MASTER_PORT": str(port)}
    names = [node.name for node in backend.nodes]
    step = supervisor.start("doctor", backend.step("doctor", backend.nodes, 1, command), env=variables)
    limit_s = START_S if backend.profile.container is None else IMAGE_S
    died: ProcessDiedError | None = None
    try:
        supervisor.wait(step, poll=_until_late(step, limit_s, poll))
    except ProcessDiedError as error:
        died = error
    except _LateError:  # the late nodes have left no report
        supervisor.end(step)
    reports = {name: found for name in names if (found := _report(backend.run, name))}
    reported = [(name, item) for name in reports for item in reports[name].findings]
    logged = _logged(step) if died else []
    findings = [*logged, *reported, *([] if died else compare_reports(reports, names))]
    for name, item in findings:
        show([item], f"{name}: ")
    if died and not logged:
        raise SilentNodeError(f"doctor: a node cannot run the checks: {died}")
    if worst := worst_failure(findings):
        name, item = worst
        kind = SilentNodeError if item.name == _NO_REPORT else UserError
        raise kind(f"doctor: {item.name} on {name}: {item.text}{f': {item.fix}' if item.fix else ''}")
    backend.free_ports.update({name: reports[name].ports for name in names})


def _logged(step: SupervisedProcess) -> list[tuple[str, CheckResult]]:
    """Return the failures that nodes wrote to the step's log because they do not see the supervisor's filesystem."""
    log = step.log.read_bytes()[step.log_start :].decode(errors="replace")
    return [(name, failure(check, text)) for name, check, text in _FAILURE.findall(log)]


class _LateError(Exception):
    """A node did not report in time."""


def _until_late(step: SupervisedProcess, limit_s: float, poll: Callable[[], None]) -> Callable[[], None]:
    """Return a `poll` that raises _LateError if the first report, or the last one after it, takes too long."""
    deadline, reported = time.monotonic() + limit_s, False

    def check() -> None:
        nonlocal deadline, reported
        poll()
        if not reported and REPORTED.encode() in step.log.read_bytes()[step.log_start :]:
            reported, deadline = True, time.monotonic() + LAST_S
        if time.monotonic() > deadline:
            raise _LateError

    return check


def compare_reports(reports: Mapping[str, Report], names: list[str]) -> list[tuple[str, CheckResult]]:
    """Return the results that need all reports: missing reports, and the difference between the nodes' clocks.

    Clocks are only compared if the all-reduce succeeded. Otherwise each was read when its node stopped waiting.
    """
    text, fix = "no report: the node hangs or is much slower than the others", "look at its load and filesystems"
    missing = [(name, failure(_NO_REPORT, text, fix)) for name in names if name not in reports]
    if missing or any(item.level != "ok" for item in _network_checks(reports)):
        text = "not compared, because the all-reduce failed"
        return [*missing, ("all nodes", warning("clock", text, "fix the other failures first"))]
    clocks = [report.clock for report in reports.values()]
    skew = max(clocks) - min(clocks)
    text = f"{skew:.2f} s between the nodes"
    if skew < CLOCK_SKEW_S:
        return [("all nodes", ok("clock", text))]
    return [("all nodes", failure("clock", text, "have the clocks set (chrony, ntp)"))]


def worst_failure(findings: list[tuple[str, CheckResult]]) -> tuple[str, CheckResult] | None:
    """Return the failure that ends the job: the first, but a network failure only if it is the only kind.

    A node that does not take part in the all-reduce fails the network check of all others.
    """
    failed = [found for found in findings if found[1].level == "failure"]
    return min(failed, key=lambda found: found[1].name == "network", default=None)


def _network_checks(reports: Mapping[str, Report]) -> list[CheckResult]:
    return [item for report in reports.values() for item in report.findings if item.name == "network"]


def _report(run: RunDirectory, name: str) -> Report | None:
    file = run.doctor / f"{name}.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return Report(tuple(CheckResult(**item) for item in found["findings"]), found["clock"], found["ports"])
