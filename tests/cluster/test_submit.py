"""What is submitted is exactly what was said, printed before it is done, and holds no secret."""

import subprocess
from pathlib import Path

import pytest
import yaml

from arpo_megatron import resolve
from arpo_megatron.cluster.code import snapshot
from arpo_megatron.cluster.profile import (
    DIRECTORY,
    ClusterProfile,
    check_profile,
    load_profile,
    profile_names,
    save_profile,
)
from arpo_megatron.cluster.submit import dry_run, prepare_submission, submit
from arpo_megatron.doctor.slurm import seconds
from arpo_megatron.errors import UserError

PLAIN = {"account": "research", "runs": "/shared/runs", "gpus_per_node": 8}


def profile(**values: object) -> ClusterProfile:
    return check_profile({**PLAIN, **values}, "here.yaml")


def sbatch_lines(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}


@pytest.mark.parametrize("recipe", resolve.recipe_names())
def test_every_recipe_dry_runs(recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    text = dry_run(prepare_submission(resolve.resolve(recipe), load_profile("onebox"), nodes=None))
    assert {"--partition=batch", "--time=00:20:00", "--exclusive"} <= sbatch_lines(text)
    assert "# trainer   node" in text
    assert not list(tmp_path.iterdir()), "a dry run leaves nothing behind"


def test_a_job_that_does_not_fit_its_gpus_is_refused_before_it_waits_in_a_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=8", "engine.replicas=1"]
    small = profile(gpu="h100-80", runs=str(tmp_path))
    job = prepare_submission(resolve.resolve("deepsearch_14b", words=words), small, nodes=None)
    assert "# not submitted as it is: training needs" in dry_run(job)
    monkeypatch.setattr("arpo_megatron.cluster.submit.check_files", lambda config: None)  # its weights are not here
    with pytest.raises(UserError, match=r"the job does not fit: training needs .* --force submits it"):
        submit(job)
    assert not list(tmp_path.iterdir())
    whole = prepare_submission(resolve.resolve("deepsearch_14b"), small, nodes=None)
    assert whole.forecast is not None and whole.forecast.fits
    with pytest.raises(UserError, match="gpu: 'h1000' is none that `arpo plan` knows"):
        profile(gpu="h1000")


def test_a_profile_decides_everything_about_the_cluster(tmp_path: Path) -> None:
    cluster = profile(
        partition="h100",
        qos="high",
        time="1-00:00:00",
        gpu_request="gres",
        gpu_type="h100",
        signal_s=600,
        sbatch={"constraint": "rail"},
        environment={"NOTE": "two words"},
        secrets={"WANDB_API_KEY": "env"},
    )
    config = resolve.resolve("quickstart", words=["parallel.data=16", "engine.replicas=8", f"run_dir={tmp_path}/a"])
    text = dry_run(prepare_submission(config, cluster, nodes=3, chain=2))
    assert sbatch_lines(text) >= {
        "--account=research",
        "--partition=h100",
        "--qos=high",
        "--time=1-00:00:00",
        "--gres=gpu:h100:8",
        "--nodes=3",
        "--signal=USR1@600",
        "--constraint=rail",
        "--dependency=singleton",
        "--ntasks-per-node=8",
        "--mem=0",
    }
    assert "export NOTE='two words'" in text
    assert "WANDB_API_KEY" not in text
    assert "# trainer   nodes 0 to 1" in text
    assert "# engine-7  node 2, GPU 7" in text


def test_colocated_engines_on_several_nodes_are_sent_their_weights() -> None:
    config = resolve.resolve(
        "quickstart", words=["parallel.data=16", "engine.placement=colocated", "engine.replicas=8"]
    )
    settled = prepare_submission(config, profile(), nodes=None).config
    assert (settled.engine.placement, settled.sync.transport) == ("colocated", "broadcast")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpus_pernode": 4}, "unknown key gpus_pernode; did you mean gpus_per_node?"),
        ({"gpus_per_node": -1}, "gpus_per_node: "),
        ({"time": "tomorrow"}, "time: "),
        ({"ports": [7000, 7010]}, "at least 64"),
        ({"secrets": {"A B": "env"}}, "cannot be the name of a variable"),
        ({"environment": {"KEY": "1"}, "secrets": {"KEY": "env"}}, "KEY is listed under environment and under secrets"),
        ({"runs": "$NOT_SET_ANYWHERE/runs"}, r"the variable \$NOT_SET_ANYWHERE is not set"),
    ],
)
def test_a_wrong_profile_is_one_line(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=f"^here.yaml: .*{said}"):
        profile(**values)


def test_every_profile_that_ships_can_be_read_and_survives_the_way_to_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in profile_names():
        for word in ("USER", "SCRATCH", "PWD"):
            monkeypatch.setenv(word, "/somewhere")
        read = load_profile(name)
        save_profile(read, tmp_path / "cluster.yaml")
        assert load_profile(str(tmp_path / "cluster.yaml")) == read
        keys = yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text())
        assert all(str(key) in ClusterProfile.__dataclass_fields__ for key in keys)
    with pytest.raises(UserError, match="unknown cluster 'oneboxx'"):
        load_profile("oneboxx")


def test_code_is_submitted_as_it_lies_there(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "-q")
    for name, text in {"kept.py": "1\n", "changed.py": "1\n", "gone.py": "1\n", ".gitignore": "out/\n"}.items():
        (tmp_path / name).write_text(text)
    git("add", ".")
    git("commit", "-qm", "first")
    assert snapshot(tmp_path).diff == ""
    (tmp_path / "changed.py").write_text("2\n")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("3\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "big").write_text("4\n")
    before = git("status", "--short")
    code = snapshot(tmp_path)
    assert git("ls-tree", "-r", "--name-only", code.tree).split() == [".gitignore", "changed.py", "kept.py", "new.py"]
    assert git("show", f"{code.tree}:changed.py") == "2\n"
    assert code.commit == git("rev-parse", "HEAD").strip()
    assert all(line in code.diff for line in ("+2", "+3", "deleted file mode"))
    assert git("status", "--short") == before
    with pytest.raises(UserError, match="no git clone"):
        snapshot(tmp_path / "out")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("30", 1800), ("2:30", 150), ("04:00:00", 14400), ("1-00:00:00", 86400), ("2-12", 216000)],
)
def test_time_limits_are_read_as_slurm_reads_them(limit: str, expected: int) -> None:
    assert seconds(limit) == expected
