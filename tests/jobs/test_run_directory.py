"""Run directories are never overwritten, and resuming finds the right one."""

from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve, run_directory
from arpo_megatron.launch.job import opened


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_fresh_runs_never_share_a_directory_and_resume_takes_the_newest() -> None:
    config = resolve.resolve("quickstart")
    paths = [run_directory.fresh(config).path for _ in range(11)]
    assert [path.name for path in paths[:3]] == [f"quickstart-arpo-seed1{end}" for end in ("", "-2", "-3")]
    assert len(set(paths)) == 11
    assert run_directory.existing(config).path == paths[-1]


def test_seed_1_and_seed_11_are_different_runs() -> None:
    first = run_directory.fresh(resolve.resolve("quickstart", overrides=["seed=1"]))
    run_directory.fresh(resolve.resolve("quickstart", overrides=["seed=11"]))
    assert run_directory.existing(resolve.resolve("quickstart", overrides=["seed=1"])).path == first.path


def test_resuming_another_config_names_the_key_that_differs() -> None:
    run_directory.fresh(resolve.resolve("quickstart"))
    with pytest.raises(UserError, match=r"algorithm\.beam_size was 2, now 3"):
        run_directory.existing(resolve.resolve("quickstart", overrides=["algorithm.beam_size=3"]))


def test_a_run_may_be_resumed_for_more_steps() -> None:
    run = run_directory.fresh(resolve.resolve("quickstart"))
    longer = resolve.resolve("quickstart", overrides=["train.steps=99", "engine.max_running_requests=3"])
    assert run_directory.existing(longer) == run


def test_a_refused_second_job_changes_nothing_of_the_running_one() -> None:
    run = run_directory.fresh(resolve.resolve("quickstart"))
    before = run.config.read_bytes()
    with (
        run.locked(),
        pytest.raises(UserError, match="in use"),
        opened(resolve.resolve("quickstart", overrides=["train.steps=99"]), resume=True),
    ):
        pass
    assert run.config.read_bytes() == before


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.tmp").write_text("precious")
    with pytest.raises(UserError, match=r"holds files that are no run's \(notes\.tmp"):
        run_directory.fresh(resolve.resolve("quickstart", overrides=[f"run_dir={mine}"]))
    assert [path.name for path in mine.iterdir()] == ["notes.tmp"]


def test_only_what_a_job_was_writing_is_removed(tmp_path: Path) -> None:
    run = run_directory.fresh(resolve.resolve("quickstart"))
    partial = [run.checkpoints / "step_3.tmp", run.path / "export.tmp"]
    for path in [*partial, run.path / "notes.tmp", run.checkpoints / "step_2"]:
        path.mkdir(parents=True)
    run.remove_partial()
    assert not any(path.exists() for path in partial)
    assert (run.path / "notes.tmp").exists() and (run.checkpoints / "step_2").exists()


def test_resuming_nothing_is_one_line() -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        run_directory.existing(resolve.resolve("quickstart"))
    with pytest.raises(UserError, match=r"nothing to resume at .*other: no run was started there") as refused:
        run_directory.existing(resolve.resolve("quickstart", overrides=["run_dir=other"]))
    assert "--resume" not in str(refused.value), "`arpo resume` has no such option"


def test_a_named_directory_with_a_run_is_not_overwritten() -> None:
    config = resolve.resolve("quickstart", overrides=["run_dir=here"])
    run_directory.fresh(config)
    with pytest.raises(UserError, match="--resume"):
        run_directory.fresh(config)


def test_an_unwritable_place_is_one_line() -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match="cannot make the run directory"):
        run_directory.fresh(resolve.resolve("quickstart", overrides=["run_dir=file/run"]))


def test_two_jobs_cannot_hold_one_directory() -> None:
    run = run_directory.fresh(resolve.resolve("quickstart"))
    with run.locked(), pytest.raises(UserError, match="in use"), run.locked():
        pass


def test_two_commands_that_find_the_same_name_free_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve.resolve("quickstart")
    found, free = [Path("runs/quickstart-arpo-seed1")] * 2, run_directory._next_free
    monkeypatch.setattr(run_directory, "_next_free", lambda base: found.pop() if found else free(base))
    first, second = run_directory.fresh(config), run_directory.fresh(config)
    assert (first.path.name, second.path.name) == ("quickstart-arpo-seed1", "quickstart-arpo-seed1-2")
