"""`arpo doctor`: this machine, a recipe's files, and a cluster as it looks from its login node."""

from arpo_megatron.cluster.plan import plan_roles
from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.config import JobConfig
from arpo_megatron.doctor.finding import Finding, ok, run_checks, show
from arpo_megatron.doctor.machine import Check, check_python, job_checks, machine_checks
from arpo_megatron.doctor.slurm import cluster_checks
from arpo_megatron.machine import gpu_count
from arpo_megatron.preparation import check_files, check_inputs
from arpo_megatron.run_directory import RUNS


def examine(config: JobConfig | None, profile: ClusterProfile | None) -> bool:
    """Print one line a check; whether none has failed."""
    checks: list[Check] = []
    if profile is None:
        checks += machine_checks(gpus=gpu_count("auto"))
    else:  # a login node has neither GPUs nor the packages of the roles
        checks += [("python", check_python), *cluster_checks(profile)]
    if config is not None:
        checks += job_checks(config, profile.runs.expanduser() if profile else config.run_dir or RUNS)
        checks.append(("recipe", lambda: _check_recipe(config, profile)))
    return show(run_checks(checks))


def _check_recipe(config: JobConfig, profile: ClusterProfile | None) -> Finding:
    """Its inputs are there, and its roles fit."""
    if profile is None:
        check_inputs(config)
        return ok("recipe", f"{config.name} can run on this machine")
    check_files(config)
    plan = plan_roles(config, profile.gpus_per_node, profile.nodes)
    return ok("recipe", f"{config.name} on {plan.nodes} node(s): {'; '.join(plan.describe())}")
