"""Containers of a profile: the options of each step, paths on both sides of a mount, and the checks of the doctor."""

from pathlib import Path

import pytest

from arpo_megatron.cluster import slurm_checks
from arpo_megatron.cluster.backend import SlurmBackend
from arpo_megatron.cluster.mounts import in_container, on_host, outside_of_mounts, with_files_mounted
from arpo_megatron.cluster.slurm import Node
from arpo_megatron.cluster.submit import prepare_submission, submit_jobs
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.paths import PATHS, paths_of
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.plan.node_layout import NodeLayout
from tests.cluster.stand_in import profile

MOUNTED = {"container": "/images/arpo.sqsh", "mounts": ["/lustre/models:/models", "/lustre:/data"]}


@pytest.fixture(scope="module")
def config() -> JobConfig:
    overrides = ["model.path=/lustre/models/14b", "data.path=/lustre/x.parquet"]
    return resolve.resolve("deepsearch_14b", overrides=overrides)


def test_steps_share_one_unpacked_container_with_the_variables_of_the_profile(tmp_path: Path) -> None:
    values = {**MOUNTED, "environment": {"NCCL_DEBUG": "WARN"}, "secrets": {"KEY": "env"}, "srun_args": ["--mpi=none"]}
    layout = NodeLayout(1, 8, 1, 8, 1, 1, True)
    backend = SlurmBackend(profile(**values), layout, [Node("n1", "127.0.0.11")], RunDirectory(tmp_path), "7")
    step = backend.step("x", backend.nodes, 1, ["true"])
    wanted = {"--mpi=none", "--container-name=arpo-7:no_exec", "--no-container-mount-home"}
    assert wanted <= set(step)
    assert "--container-env=KEY,NCCL_DEBUG,PYTHONDONTWRITEBYTECODE,PYTHONPATH" in step
    assert not [word for word in backend.step("x", backend.nodes, 1, ["true"], inside=False) if "container" in word]
    for option in ("--nodes=3", "-N3", "--container-image=x"):
        with pytest.raises(UserError, match="is not an option, or one that the job sets itself"):
            profile(srun_args=[option])


def test_paths_of_a_submitted_config_are_those_of_the_container(config: JobConfig, tmp_path: Path) -> None:
    place = profile(**MOUNTED, runs=str(tmp_path))
    inside = prepare_submission(config, place, nodes=None).config
    assert (str(inside.model.path), str(inside.data.path)) == ("/models/14b", "/data/x.parquet")
    assert in_container(inside, place) == inside, "a resumed run"
    assert on_host(inside, place).model == config.model
    assert in_container(config, profile(mounts=MOUNTED["mounts"])) == config, "without a container"
    assert not outside_of_mounts(config, place)


def test_every_path_of_a_config_is_mapped_and_checked(config: JobConfig) -> None:
    overrides = [f"{key}=/lustre/models/{key}" for key in PATHS]
    every = resolve.with_overrides(config, [*overrides, "sync.transport=disk", "sft.steps=1"])
    place = profile(**MOUNTED)
    assert paths_of(in_container(every, place)) == {key: Path("/models", key) for key in PATHS} | {
        "data.path": Path("/data/x.parquet")
    }
    assert on_host(in_container(every, place), place) == every
    hidden = resolve.with_overrides(every, [f"{key}=/home/{key}" for key in PATHS])
    assert outside_of_mounts(hidden, place) == {key: Path("/home", key) for key in PATHS}
    crossed = profile(container="/i.sqsh", mounts=["/a/b/c:/x", "/d:/x/y"])
    inside = resolve.with_overrides(config, ["model.path=/x/y/z"])
    assert on_host(inside, crossed).model.path == Path("/d/z")


def test_files_of_components_and_parameters_are_mounted_at_their_own_paths(config: JobConfig, tmp_path: Path) -> None:
    """The supervisor reads them outside the container, and the ranks inside."""
    (code := tmp_path / "own.py").write_text("from arpo_megatron.algorithms.losses.ppo import Ppo as Own\n")
    (prompts := tmp_path / "prompts.txt").write_text("Answer.\n---\nThink.\n")
    overrides = [f"algorithm.loss={code}:Own", f"algorithm.params.prompt_file={prompts}"]
    overrides += [f"rollout.system_prompt={prompts}", "algorithm.selector=prompts"]
    job = resolve.with_overrides(config, overrides)
    own = (f"{code}:{code}", f"{prompts}:{prompts}")

    def mounts(*given: str) -> tuple[str, ...]:
        place = profile(container="/i.sqsh", mounts=list(given), runs=str(tmp_path))
        submission = prepare_submission(job, place, nodes=None)
        assert submission.config.algorithm == job.algorithm
        assert with_files_mounted(job, submission.profile) == submission.profile, "a resumed run"
        return submission.profile.mounts[len(given) :]

    assert mounts() == mounts(f"{tmp_path}:/elsewhere") == mounts("/:/", f"/usr:{tmp_path}") == own
    assert mounts(f"{tmp_path}:{tmp_path}") == mounts("/:/") == ()
    assert with_files_mounted(job, profile()).mounts == (), "without a container"
    (odd := tmp_path / "a,b.txt").write_text("Answer.")
    with pytest.raises(UserError, match=r"a,b\.txt cannot be mounted in the container: rename it without"):
        with_files_mounted(resolve.with_overrides(job, [f"rollout.system_prompt={odd}"]), profile(container="/i.sqsh"))


def test_signal_that_comes_too_late_is_refused(
    config: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo_megatron.cluster.submit.check_files", lambda *_: None)  # the weights are not here
    late = prepare_submission(config, profile(gpu="h100-80", signal_s=30, runs=str(tmp_path)), nodes=None)
    with pytest.raises(UserError, match=r"signal_s=30 is shorter than a step of \d+ s and a save of .* set signal_s"):
        submit_jobs(late)
    assert not prepare_submission(config, profile(gpu="h100-80", signal_s=900), nodes=None).too_late


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"container": "/nowhere/image.sqsh"}, "/nowhere/image.sqsh does not exist"),
        ({"mounts": ["/nowhere:/models"]}, "/nowhere does not exist here"),
        ({"mounts": ["/usr:/models", "/bin:/models"]}, "two mounts end at /models"),
        ({"python": "/nowhere/python"}, "/nowhere/python is not an executable file here"),
        ({"account": "other"}, "does not accept other (AllowAccounts=research)"),
        ({"qos": "gold"}, "the partition accepts normal, not gold"),
    ],
)
def test_doctor_names_what_would_end_a_job(
    values: dict[str, object], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*command: str, **_: object) -> str:
        if command[0] == "sinfo":
            return "batch*|up\n"
        return "AllowAccounts=research AllowQos=normal\nAccountingStorageType = accounting_storage/none\n"

    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", call)
    names = ("account", "qos", "image", "mounts", "job_python")
    found = [getattr(slurm_checks, f"check_{name}")(profile(**values)) for name in names]
    (failed,) = [each for each in found if each.level == "failure"]
    assert fault in failed.text
    assert all(getattr(slurm_checks, f"check_{name}")(profile()).level == "ok" for name in names)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"nodes": 4}, None),
        ({"nodes": 4, "qos": "gold"}, "4 node(s) take gres/gpu=32, and qos gold allows 16"),
        ({"nodes": 3, "partition": "small"}, "3 node(s), and the partition has MaxNodes=2"),
        ({"nodes": 9}, "9 node(s), and the partition has TotalNodes=8"),
        ({"nodes": 8}, "8 node(s) take gres/gpu=64, and account research allows 48"),
        ({"nodes": 5, "qos": "gold", "gpus_per_node": 0}, None),
    ],
)
def test_doctor_finds_limits_that_a_job_exceeds(
    values: dict[str, object], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real Slurm needs a database of accounts for such limits."""

    def call(*command: str, **_: object) -> str:
        if command[0] == "sinfo":
            return "batch*|up\nsmall|up\n" if len(command) == 4 else "small|up\n"
        if command[:3] == ("scontrol", "show", "config"):
            return "AccountingStorageType = accounting_storage/slurmdbd\n"
        if command[0] == "scontrol":
            return f"QoS=N/A MaxNodes={2 if command[3] == 'small' else 'UNLIMITED'} TotalNodes=8\n"
        return "gres/gpu=16|cpu=900,node=6||\n" if "qos" in command else "|gres/gpu=48\n"

    monkeypatch.setattr("arpo_megatron.cluster.slurm.call", call)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    found = slurm_checks.check_limits(profile(**values))
    assert found.level == ("failure" if fault else "ok"), found
    assert fault is None or found.text == fault
