"""Preflight checks as the first step of a job: a task for each GPU, then a comparison of the nodes' reports."""

import json
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from arpo_megatron.cluster.backend import NodeError, SlurmBackend
from arpo_megatron.cluster.mounts import on_host
from arpo_megatron.cluster.preflight_node import REPORTED
from arpo_megatron.hardware.specs import GB
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.launch.preflight.bandwidth import SLOW_SHARE, NetworkSpeeds, judge_network
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, show, warning
from arpo_megatron.launch.preflight.machine import CLOCK_SKEW_S
from arpo_megatron.launch.supervisor import SupervisedProcess, Supervisor
from arpo_megatron.models.known import load_spec
from arpo_megatron.monitor.progress import longest_step_s
from arpo_megatron.plan.memory import checkpoint_bytes
from arpo_megatron.plan.shares import LINK_SHARE
from arpo_megatron.utils.atomic import write_json
from arpo_megatron.utils.processes import ProcessDiedError

START_S = 300.0
"""Limit for the first report: all nodes start Python, import torch, perhaps from a cold filesystem, and run checks."""
IMAGE_S = 900.0
"""Limit for unpacking a container's image on all nodes, before that; it may have to be downloaded."""
LAST_S = 10.0
"""Limit from the first to the last report. Nodes write theirs after the all-reduce, which ends for all at once."""
_OF_THE_NODE = "gpu health"
"""Check whose failure is that of the node even if all nodes fail it."""
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
    network: NetworkSpeeds | None = None
    """Speeds that all ranks measured together; None if they did not."""
    disk_gb_s: float | None = None
    """GB/s from this node to the run directory while all nodes write."""


def examine_nodes(backend: SlurmBackend, supervisor: Supervisor, port: int, poll: Callable[[], None]) -> None:
    """Check every node (`preflight_node`), print the results, and set `backend.free_ports`.

    Args:
        backend: nodes of the job.
        supervisor: receives the step.
        port: TCP port of node 0 for the all-reduce.
        poll: called while waiting.

    Raises:
        NodeError: a check failed or a node did not report. The message has the check, its node and the fix.
    """
    if backend.profile.container is not None:
        _unpack_image(backend, supervisor, poll)
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
    tasks = max(1, backend.layout.gpus)
    step = supervisor.start("doctor", backend.step("doctor", backend.nodes, tasks, command), env=variables)
    died: ProcessDiedError | None = None
    try:
        supervisor.wait(step, poll=_until_late(step, START_S, poll))
    except ProcessDiedError as error:
        died = error
    except _LateError:  # the late nodes have left no report
        supervisor.end(step)
    reports = {name: found for name in names if (found := _report(backend.run, name))}
    reported = [(name, item) for name in reports for item in reports[name].findings]
    logged = _logged(step) if died else []
    compared = [] if died else compare_reports(reports, names)
    if not died and len(reports) == len(names):
        compared += judge_speeds(backend, [reports[name] for name in names])
    findings = [*logged, *reported, *compared]
    for name, item in findings:
        show([item], f"{name}: ")
    if died and not logged:
        raise NodeError(f"doctor: a node cannot run the checks: {died}")
    if worst := worst_failure(findings):
        name, item = worst
        guilty = [] if died else guilty_nodes(item.name, findings, names)
        raise NodeError(f"doctor: {item.name} on {name}: {item.text}{f': {item.fix}' if item.fix else ''}", guilty)
    backend.free_ports.update({name: reports[name].ports for name in names})


def _unpack_image(backend: SlurmBackend, supervisor: Supervisor, poll: Callable[[], None]) -> None:
    """Unpack the image on all nodes. Later steps have time limits, and tasks that wait for each other."""
    step = supervisor.start("image", backend.step("image", backend.nodes, 1, ["true"]))
    try:
        supervisor.wait(step, poll=_until_late(step, IMAGE_S, poll))
    except ProcessDiedError as error:
        raise NodeError(f"doctor: a node cannot start the container: {error}") from None
    except _LateError:
        supervisor.end(step)
        raise NodeError(f"doctor: not all nodes have unpacked the container's image after {IMAGE_S:g} s") from None


def _logged(step: SupervisedProcess) -> list[tuple[str, CheckResult]]:
    """Return the failures that nodes wrote to the step's log because they do not see the supervisor's filesystem."""
    return [(name, failure(check, text)) for name, check, text in _FAILURE.findall("".join(step.log_lines()))]


class _LateError(Exception):
    """A node did not report in time."""


def _until_late(step: SupervisedProcess, limit_s: float, poll: Callable[[], None]) -> Callable[[], None]:
    """Return a `poll` that raises _LateError if the first report, or the last one after it, takes too long."""
    deadline, reported = time.monotonic() + limit_s, False

    def check() -> None:
        nonlocal deadline, reported
        poll()
        if not reported and any(REPORTED in line for line in step.log_lines()):
            reported, deadline = True, time.monotonic() + LAST_S
        if time.monotonic() > deadline:
            raise _LateError

    return check


def compare_reports(reports: Mapping[str, Report], names: list[str]) -> list[tuple[str, CheckResult]]:
    """Return the results that need all reports: missing reports, and the difference between the nodes' clocks.

    Clocks are only compared if the all-reduce succeeded. Otherwise each was read when its node stopped waiting.
    """
    text, fix = "no report: the node hangs or is much slower than the others", "look at its load and filesystems"
    missing = [(name, failure("report", text, fix)) for name in names if name not in reports]
    if missing or any(item.level != "ok" for item in _network_checks(reports)):
        text = "not compared, because the all-reduce failed"
        return [*missing, ("all nodes", warning("clock", text, "fix the other failures first"))]
    clocks = [report.clock for report in reports.values()]
    skew = max(clocks) - min(clocks)
    text = f"{skew:.2f} s between the nodes"
    if skew < CLOCK_SKEW_S:
        return [("all nodes", ok("clock", text))]
    return [("all nodes", failure("clock", text, "synchronize the clocks (chrony, ntp)"))]


def judge_speeds(backend: SlurmBackend, reports: Sequence[Report]) -> list[tuple[str, CheckResult]]:
    """Return the results of network, disk and `signal_s`, from the reports of all nodes in their order."""
    profile, config, everywhere = backend.profile, resolve.load(backend.run.config), "all nodes"
    found: list[tuple[str, CheckResult]] = []
    if (speeds := reports[0].network) is not None:
        hardware, gpus = profile.hardware(), backend.layout.gpus
        expected = hardware.network * LINK_SHARE * gpus / GB if hardware is not None and gpus else None
        found += judge_network([node.name for node in backend.nodes], speeds, expected)
    written = [report.disk_gb_s for report in reports if report.disk_gb_s]
    if not written:
        return found
    together = sum(written)
    text = f"{together:.3g} GB/s from all nodes to {backend.run.path}"
    if backend.layout.gpus and together < profile.filesystem_gb_s * SLOW_SHARE:
        text += f", filesystem_gb_s={profile.filesystem_gb_s:g}"
        found.append((everywhere, warning("disk speed", text, "look at the filesystem, or measure it again")))
    else:
        found.append((everywhere, ok("disk speed", text)))
    longest_s = longest_step_s(backend.run.metrics)
    if longest_s:
        save_s = checkpoint_bytes(config, load_spec(on_host(config, profile).model)) / GB / together
        found.append((everywhere, _judge_signal(profile.signal_s, longest_s, save_s)))
    return found


def _judge_signal(signal_s: int, longest_s: float, save_s: float) -> CheckResult:
    text = f"signal_s={signal_s}; the longest step took {longest_s:.0f} s, a save takes {save_s:.0f} s"
    if longest_s + save_s <= signal_s:
        return ok("signal", text)
    return warning("signal", text, "set signal_s in the profile above their sum, and submit again with arpo resume")


def worst_failure(findings: list[tuple[str, CheckResult]]) -> tuple[str, CheckResult] | None:
    """Return the failure that ends the job: the first, but a network failure only if it is the only kind.

    A node that does not take part in the all-reduce fails the network check of all others.
    """
    failed = [found for found in findings if found[1].level == "failure"]
    return min(failed, key=lambda found: found[1].name == "network", default=None)


def guilty_nodes(check: str, findings: list[tuple[str, CheckResult]], names: list[str]) -> list[str]:
    """Return the nodes without which a job may pass a check that failed: [] if no other node passed it."""
    failed = [name for name, item in findings if (item.name, item.level) == (check, "failure") and name in names]
    return failed if len(failed) < len(names) or check == _OF_THE_NODE else []


def _network_checks(reports: Mapping[str, Report]) -> list[CheckResult]:
    return [item for report in reports.values() for item in report.findings if item.name == "network"]


def _report(run: RunDirectory, name: str) -> Report | None:
    file = run.doctor / f"{name}.json"
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    findings, network = tuple(CheckResult(**item) for item in found["findings"]), found.get("network")
    speeds = network and NetworkSpeeds(network["all_reduce_gb_s"], tuple(network["node_gb_s"]))
    return Report(findings, found["clock"], found["ports"], speeds, found.get("disk_gb_s"))
