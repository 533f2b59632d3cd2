"""The doctor as the first step of a job: one task on every node, then what the nodes say of each other."""

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
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.processes import ManagedProcess, ManagedProcesses, ProcessDiedError, stop_groups

START_S = 300.0
"""For a first report: all nodes start Python and import torch, perhaps from a cold filesystem, and have checked."""
IMAGE_S = 900.0
"""The same in a container, whose image may have to be fetched."""
LAST_S = 10.0
"""From the first report to the last: nodes write theirs right after the meeting, which is over for all at once."""
_NO_REPORT = "report"
"""The check of a node that has left none."""
_FAILURE = re.compile(r"^(\S+): failure +(\S+) +(.+)$", re.MULTILINE)
"""A line of `show` on a node: its name, the check, what was found and how to fix it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one node has found.

    Attributes:
        findings: in the order of the checks.
        clock: seconds since the epoch, right after the meeting.
        ports: free there.
    """

    findings: tuple[CheckResult, ...]
    clock: float
    ports: list[int]


def examine_nodes(backend: SlurmBackend, processes: ManagedProcesses, port: int, poll: Callable[[], None]) -> None:
    """Run `doctor.node` on every node, print what was found, and note the ports that are free there.

    Args:
        backend: whose `free_ports` are set.
        processes: the step becomes one of them.
        port: of node 0, where the nodes meet.
        poll: called meanwhile.

    Raises:
        UserError: a check has failed; the line names it, its node and what to do.
        SilentNodeError: a node did not report, and nothing else has failed.
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
    step = processes.start("doctor", backend.step("doctor", backend.nodes, 1, command), env=variables)
    limit_s = START_S if backend.profile.container is None else IMAGE_S
    died: ProcessDiedError | None = None
    try:
        processes.wait(step, poll=_until_late(step, limit_s, poll))
    except ProcessDiedError as error:
        died = error
    except _LateError:  # who is late has left no report
        stop_groups([step.process])
        processes.running.remove(step)
    reports = {name: found for name in names if (found := _report(backend.run, name))}
    reported = [(name, item) for name in reports for item in reports[name].findings]
    logged = _logged(step) if died else []
    findings = [*logged, *reported, *([] if died else judged(reports, names))]
    for name, item in findings:
        show([item], f"{name}: ")
    if died and not logged:
        raise SilentNodeError(f"doctor: a node cannot even run it: {died}")
    if worst := guilty(findings):
        name, item = worst
        kind = SilentNodeError if item.name == _NO_REPORT else UserError
        raise kind(f"doctor: {item.name} on {name}: {item.text}{f': {item.fix}' if item.fix else ''}")
    backend.free_ports.update({name: reports[name].ports for name in names})


def _logged(step: ManagedProcess) -> list[tuple[str, CheckResult]]:
    """The failures that nodes could only write to the step's log: they do not see the supervisor's filesystem."""
    said = step.log.read_bytes()[step.log_start :].decode(errors="replace")
    return [(name, failure(check, text)) for name, check, text in _FAILURE.findall(said)]


class _LateError(Exception):
    """A node has not reported in time."""


def _until_late(step: ManagedProcess, limit_s: float, poll: Callable[[], None]) -> Callable[[], None]:
    """A `poll` that raises _LateError when the first report, or after it the last one, takes too long."""
    deadline, reported = time.monotonic() + limit_s, False

    def check() -> None:
        nonlocal deadline, reported
        poll()
        if not reported and REPORTED.encode() in step.log.read_bytes()[step.log_start :]:
            reported, deadline = True, time.monotonic() + LAST_S
        if time.monotonic() > deadline:
            raise _LateError

    return check


def judged(reports: Mapping[str, Report], names: list[str]) -> list[tuple[str, CheckResult]]:
    """What the reports of all nodes say together: who left none, and whether clocks agree.

    Clocks can be compared only where the nodes have met: otherwise each was read when its node gave up waiting.
    """
    found = [
        (
            name,
            failure(
                _NO_REPORT,
                "the node left none: it hangs, or is far behind the others",
                "look at its load and filesystems",
            ),
        )
        for name in names
        if name not in reports
    ]
    met = not found and all(item.level == "ok" for item in _meetings(reports))
    if not met:
        text = "not compared: the nodes have not met"
        return [*found, ("all nodes", warning("clock", text, "fix what kept them from it"))]
    clocks = [report.clock for report in reports.values()]
    skew = max(clocks) - min(clocks)
    text = f"{skew:.2f} s between the nodes"
    if skew < CLOCK_SKEW_S:
        return [("all nodes", ok("clock", text))]
    return [("all nodes", failure("clock", text, "have the clocks set (chrony, ntp)"))]


def guilty(findings: list[tuple[str, CheckResult]]) -> tuple[str, CheckResult] | None:
    """The failure that ends the job: the first, but a node that was waited for in vain is blamed before the network."""
    failed = [found for found in findings if found[1].level == "failure"]
    return min(failed, key=lambda found: found[1].name == "network", default=None)


def _meetings(reports: Mapping[str, Report]) -> list[CheckResult]:
    return [item for report in reports.values() for item in report.findings if item.name == "network"]


def _report(run: RunDirectory, name: str) -> Report | None:
    file = run.doctor / f"{name}.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return Report(tuple(CheckResult(**item) for item in found["findings"]), found["clock"], found["ports"])
