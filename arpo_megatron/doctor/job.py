"""The doctor as the first step of a job: one task on every node, then what the nodes say of each other."""

import json
import secrets
import shutil
import sys
from collections.abc import Callable

from arpo_megatron.cluster.site import SlurmSite
from arpo_megatron.doctor.finding import Finding, failure, ok, show
from arpo_megatron.errors import UserError
from arpo_megatron.processes import RoleDiedError, Roles
from arpo_megatron.run_directory import write_json

CLOCK_SKEW_S = 5.0
"""Clocks further apart than this make logs, deadlines and wandb's curves lie."""


def examine_nodes(site: SlurmSite, roles: Roles, port: int, poll: Callable[[], None]) -> None:
    """Run `doctor.node` on every node, print what was found, and note the ports that are free there.

    Args:
        site: whose `free_ports` are set.
        roles: the step becomes one of them.
        port: of node 0, where the nodes meet.
        poll: called meanwhile.

    Raises:
        UserError: a check has failed; the line names it, its node and what to do.
    """
    folder, token = site.run.doctor, secrets.token_hex(8)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "canary", {"token": token})
    addresses = ",".join(node.address for node in site.nodes)
    command = site.python([sys.executable, "-m", "arpo_megatron.doctor.node", str(site.run.path), token])
    variables = {"ARPO_NODE_ADDRESSES": addresses, "MASTER_PORT": str(port)}
    try:
        roles.wait(roles.start("doctor", site.step("doctor", site.nodes, 1, command), env=variables), poll=poll)
    except RoleDiedError as error:
        raise UserError(f"doctor: a node cannot even run it: {error}") from None
    sound, clocks = True, []
    for node in site.nodes:
        report = folder / f"{node.name}.json"
        if not report.exists():
            raise UserError(f"doctor: {node.name} left no report in {folder}: `runs` must be shared by all nodes")
        found = json.loads(report.read_text(encoding="utf-8"))
        clocks.append(found["clock"])
        site.free_ports[node.name] = found["ports"]
        sound &= show([Finding(**item) for item in found["findings"]], f"{node.name}: ")
    skew = max(clocks) - min(clocks)
    fine = skew < CLOCK_SKEW_S
    text = f"{skew:.2f} s between the nodes"
    sound &= show([ok("clock", text) if fine else failure("clock", text, "have the clocks set (chrony, ntp)")])
    if not sound:
        bad = next(item for item in _all(site) if item[1].level == "failure") if fine else ("all nodes", None)
        what = "clock" if bad[1] is None else f"{bad[1].name} on {bad[0]}: {bad[1].text}: {bad[1].mend}"
        raise UserError(f"doctor: {what}")


def _all(site: SlurmSite) -> list[tuple[str, Finding]]:
    return [
        (node.name, Finding(**item))
        for node in site.nodes
        for item in json.loads((site.run.doctor / f"{node.name}.json").read_text(encoding="utf-8"))["findings"]
    ]
