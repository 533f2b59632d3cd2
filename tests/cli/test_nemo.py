"""Recipes for nemo-run: factories in Python, and jobs from the nemorun command line."""

import importlib
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from arpo_megatron.cluster.executor_tasks import check_launcher
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve

run = pytest.importorskip("nemo_run", reason="nemo-run is not installed (the `slurm` extra)")
ROOT = Path(__file__).resolve().parents[2]


def test_factory_builds_the_recipe_and_accepts_changes() -> None:
    import fiddle

    from arpo_megatron.cli.nemo import factories

    assert list(factories) == resolve.recipe_names()
    for name, factory in factories.items():
        assert fiddle.build(factory()) == resolve.resolve(name)
    job = factories["deepsearch_14b"](variants="4nodes+fp8")
    job.train.steps = 3
    built = fiddle.build(job)
    assert built == resolve.resolve("deepsearch_14b+4nodes+fp8", overrides=["train.steps=3"])
    job.train.steps = -3
    with pytest.raises(ValueError, match="greater than 0"):
        fiddle.build(job)


def test_every_recipe_survives_nemo_runs_serializers() -> None:
    from nemo_run.core.serialization.yaml import YamlSerializer
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    from arpo_megatron.cli import nemo

    for factory in nemo.factories.values():
        job = factory()
        job.model.path = Path("/models/mine")
        for function, more in ((nemo.train, {}), (nemo.sft, {}), (nemo.submit, {"cluster": "h100"})):
            task = run.Partial(function, job=job, **more)
            assert ZlibJSONSerializer().deserialize(ZlibJSONSerializer().serialize(task)) == task
            assert "path: /models/mine\n" in YamlSerializer().serialize(task)


def test_factory_applies_a_preset_and_refuses_a_later_change_of_its_name() -> None:
    import fiddle

    from arpo_megatron.cli.nemo import factories

    for recipe, preset in (("quickstart", "grpo"), ("reasoning_7b", "dapo")):
        laid = resolve.resolve(recipe, overrides=[f"algorithm.name={preset}"])
        job = factories[recipe](preset=preset)
        assert fiddle.build(job) == laid
        job.algorithm.clip_high = 0.3
        assert fiddle.build(job) == resolve.with_overrides(laid, ["algorithm.clip_high=0.3"])
        job = factories[recipe]()
        job.algorithm.name = preset
        with pytest.raises(UserError, match=rf"cannot replace the preset arpo .* job=RECIPE\(preset='{preset}'\)"):
            fiddle.build(job)


def test_built_jobs_are_validated() -> None:
    import fiddle

    from arpo_megatron.cli import nemo

    job = nemo.factories["quickstart"]()
    job.reward.terms = {"bogus": 1.0}
    with pytest.raises(UserError, match="bogus"):
        fiddle.build(job)
    job = nemo.factories["quickstart"]()
    job.algorithm.loss = "bogus"
    with pytest.raises(UserError, match="unknown loss 'bogus'; known: "):
        fiddle.build(job)
    by_hand = replace(resolve.resolve("quickstart"), algorithm=AlgorithmConfig(loss="bogus"))
    for run_it in (nemo.train, nemo.sft):  # a job may come from no factory
        with pytest.raises(UserError, match="unknown loss 'bogus'"):
            run_it(by_hand)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment with the entry points of pyproject.toml installed, like after `pip install .`."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "installed" / "arpo_megatron_here-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: arpo-megatron-here\nVersion: 0\n")
    lines = [
        line for group, names in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{info.parent}",
        "COLUMNS": "200",
        "NEMORUN_HOME": str(tmp_path / "nemo"),
    }


def nemorun(*arguments: str, environment: dict[str, str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from nemo_run.__main__ import app; app()", "arpo", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)


def test_nemorun_accepts_recipe_variants_preset_and_overrides(environment: dict[str, str], tmp_path: Path) -> None:
    arguments = [
        "job=deepsearch_14b(variants='4nodes+fp8',preset='grpo')",
        "job.model.path=/models/14b",
        "job.optimizer.lr=2e-6",
    ]
    done = nemorun("train", "--dryrun", *arguments, environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("PosixPath('/models/14b')", "fp8='blockwise'", "data=8", "lr=2e-06", "branching='grpo'"):
        assert text in done.stdout
    assert not list(tmp_path.glob("runs"))


def test_plug_in_of_an_experiment_changes_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from arpo_megatron.cli import nemo

    class Longer(run.Plugin):
        def setup(self, task: run.Partial, executor: run.Executor) -> None:
            task.job.train.steps = 7
            executor.env_vars["NOTE"] = "of a plug-in"

    experiments = importlib.import_module("nemo_run.run.experiment")  # `nemo_run.run` is also a function
    monkeypatch.setattr(experiments, "get_nemorun_home", lambda: str(tmp_path))
    task, executor = run.Partial(nemo.train, job=nemo.factories["quickstart"]()), run.LocalExecutor()
    with run.Experiment("here", skip_status_at_exit=True) as experiment:
        experiment.add(task, executor=executor, plugins=[Longer()], name="job")
        (added,) = experiment.jobs
    assert added.task.job.train.steps == 7
    assert added.executor.env_vars == {"NOTE": "of a plug-in"}


def test_task_of_a_refused_launcher_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from arpo_megatron.cli import nemo

    monkeypatch.setenv("FAULT_TOL_CFG_PATH", "/nemo_run/ft.yml")
    for start in (lambda: nemo.train(resolve.resolve("quickstart")), lambda: nemo.export("runs/none")):
        with pytest.raises(UserError, match=r"nemo-run's launcher ft cannot start a job: .* Leave out launcher="):
            start()


@pytest.mark.parametrize(
    ("launcher", "refused"),
    [
        ("slurm_ray", True),
        (run.SlurmTemplate(template_inline="{{command}}"), True),
        ("torchrun", False),
        (None, False),
    ],
)
def test_task_of_a_launcher_without_variables_finds_its_executor(
    launcher: object, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arpo_megatron.cli import nemo

    executor = run.SlurmExecutor(
        account="root", tunnel=run.LocalTunnel(job_dir=""), packager=run.Packager(), container_image=None
    )
    executor.launcher = launcher
    experiments = importlib.import_module("nemo_run.run.experiment")
    monkeypatch.setattr(experiments, "get_nemorun_home", lambda: str(tmp_path))
    with Path(os.devnull).open() as nothing, run.Experiment("here", skip_status_at_exit=True) as experiment:
        monkeypatch.setattr(sys, "stdin", nothing)  # nemo-run's commands read it
        experiment.add(run.Partial(nemo.export, run_dir="runs/x"), executor=executor, name="job")
        experiment.dryrun(log=False, delete_exp_dir=False)
    (task,) = tmp_path.rglob("job_fn_or_script")
    monkeypatch.setattr(sys, "argv", ["fdl_runner.py", "-n", "job", str(task)])
    if not refused:
        check_launcher()
        return
    with pytest.raises(UserError, match=r"nemo-run's launcher slurm_\w+ cannot start a job: it"):
        check_launcher()


def test_torchrun_on_several_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    check_launcher()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="nemo-run's launcher torchrun cannot start a job on several nodes: "):
        check_launcher()


def test_nemorun_parses_the_other_commands() -> None:
    from arpo_megatron.cli import nemo

    words = {
        nemo.export: ["run_dir=runs/x", "step=3", "out=there", "cluster=h100"],
        nemo.evaluate: ["target=runs/x", "overrides=['evaluation.temperature=0']", "k=2", "suite=deepsearch,gaia"],
        nemo.submit: ["job=quickstart", "cluster=h100", "nodes=2", "then=export,eval"],
    }
    export, evaluation, submit = (function.cli_entrypoint.parse_partial(each) for function, each in words.items())
    assert (export.step, export.out, export.cluster) == (3, "there", "h100")
    assert (evaluation.overrides, evaluation.suite) == (["evaluation.temperature=0"], "deepsearch,gaia")
    assert (submit.nodes, submit.then, submit.job.name) == (2, "export,eval", "quickstart")
    assert [function.cli_entrypoint.name for function in words] == ["export", "eval", "submit"]


def test_nemorun_reports_why_a_job_cannot_start(environment: dict[str, str], tmp_path: Path) -> None:
    done = nemorun("train", "--yes", "job=deepsearch_14b", environment=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "model.path is missing: fetch Qwen/Qwen3-14B" in done.stdout + done.stderr
