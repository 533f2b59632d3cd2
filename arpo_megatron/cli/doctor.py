"""`arpo doctor`: check this machine, a recipe's files, and a cluster from its login node."""

from contextlib import suppress

from arpo_megatron.cluster.mounts import outside_of_mounts
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.cluster.slurm_checks import check_limits, cluster_checks
from arpo_megatron.cluster.submit import prepare_submission
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware.placement import gpu_count
from arpo_megatron.jobs import choose_run
from arpo_megatron.jobs.inputs import check_files, check_inputs
from arpo_megatron.jobs.run_directory import RUNS, RunDirectory
from arpo_megatron.launch.preflight.allreduce import check_local_all_reduce
from arpo_megatron.launch.preflight.check import CheckResult, failure, ok, run_checks, show, warning
from arpo_megatron.launch.preflight.exposure import check_exposure
from arpo_megatron.launch.preflight.machine import (
    PORTS,
    Check,
    check_clock,
    check_python,
    check_runs,
    job_checks,
    machine_checks,
)
from arpo_megatron.launch.tool_check import check_tools_of
from arpo_megatron.tasks.protocols.tools import tool_names
from arpo_megatron.utils.ports import free_ports

LOCAL_CHECK_S = 120.0
"""Seconds that one check may take."""


def examine(config: JobConfig | None, profile: ClusterProfile | None) -> bool:
    """Print one line per check and return whether none failed."""
    checks: list[Check] = []
    if profile is None:
        runs = (config.run_dir if config else None) or RUNS
        gpus = gpu_count("auto" if config is None else config.platform)
        checks += machine_checks(gpus=gpus, on_gpus=gpus > 0 or _wants_gpus(config), config=config)
        listening = set[str]()
        checks += [
            ("ports", _check_ports),
            ("network", lambda: check_local_all_reduce(gpus, free_ports(1)[0], listening)),
            ("exposure", lambda: check_exposure(listening)),
        ]
    else:  # a login node has neither GPUs nor the packages of the job's processes
        runs = profile.runs.expanduser()
        checks += [("python", check_python), *cluster_checks(profile)]
    checks += [("runs", lambda: check_runs(runs)), ("clock", lambda: check_clock(runs))]
    if config is not None:
        run = RunDirectory(choose_run.next_path(config, runs))
        checks += job_checks(config, run, profile.secrets if profile else {})
        if profile is None:
            checks.append(("tools", lambda: check_job_tools(config)))
        checks.append(("recipe", lambda: _check_recipe(config, profile)))
    return show(run_checks(checks, LOCAL_CHECK_S, len(checks) * LOCAL_CHECK_S))


def _wants_gpus(config: JobConfig | None) -> bool:
    """Return whether the job trains a downloaded model. Such a job needs GPUs even if this machine has none."""
    return config is not None and config.platform != "cpu" and not config.model.is_generated


def _check_ports() -> CheckResult:
    return ok("ports", f"{len(free_ports(PORTS))} free at 127.0.0.1")


def check_job_tools(config: JobConfig) -> CheckResult:
    """Start the tools of a job as the job would, and end them."""
    notes = check_tools_of(config)
    offered = config.rollout.environment or ", ".join(tool_names(config.rollout.tools))
    return warning("tools", notes[0], "name the tools in rollout.tools") if notes else ok("tools", offered)


def _check_recipe(config: JobConfig, profile: ClusterProfile | None) -> CheckResult:
    """Check the recipe's inputs, then whether this machine can run it or the cluster would accept it."""
    if profile is None:
        check_inputs(config)
        return ok("recipe", f"{config.name} can run on this machine")
    check_files(config)
    submission = prepare_submission(config, profile, nodes=None)
    forecast, layout = submission.forecast, submission.layout
    if forecast is not None and not forecast.fits:
        return failure("recipe", f"{config.name} does not fit: {forecast.reason}", "arpo plan shows layouts that do")
    if submission.too_late:
        return failure("recipe", submission.too_late, "or expect that steps are repeated after each job")
    with suppress(UserError):  # Slurm does not answer, which is a failure of its own
        if (limits := check_limits(profile, layout.nodes)).level != "ok":
            return failure("recipe", limits.text, limits.fix)
    if hidden := outside_of_mounts(config, profile):
        key, path = next(iter(hidden.items()))
        return failure("recipe", f"the container does not see {key}={path}", "add its directory to `mounts`")
    return ok("recipe", f"{config.name} on {layout.nodes} node(s): {'; '.join(layout.describe())}")
