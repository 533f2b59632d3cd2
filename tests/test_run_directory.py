"""Run directories are never overwritten, and resuming finds the right one."""

from pathlib import Path

import pytest

from arpo_megatron import resolve, run_directory
from arpo_megatron.errors import UserError


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
    first = run_directory.fresh(resolve.resolve("quickstart", words=["seed=1"]))
    run_directory.fresh(resolve.resolve("quickstart", words=["seed=11"]))
    assert run_directory.existing(resolve.resolve("quickstart", words=["seed=1"])).path == first.path


def test_resuming_another_config_names_the_key_that_differs() -> None:
    run_directory.fresh(resolve.resolve("quickstart"))
    with pytest.raises(UserError, match=r"algorithm\.beam was 2, now 3"):
        run_directory.existing(resolve.resolve("quickstart", words=["algorithm.beam=3"]))


def test_a_run_may_be_resumed_for_more_steps() -> None:
    run = run_directory.fresh(resolve.resolve("quickstart"))
    longer = resolve.resolve("quickstart", words=["train.steps=99", "engine.max_running_requests=3"])
    assert run_directory.existing(longer) == run
    assert resolve.load(run.config) == longer


def test_resuming_nothing_is_one_line() -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        run_directory.existing(resolve.resolve("quickstart"))


def test_a_named_directory_with_a_run_is_not_overwritten() -> None:
    config = resolve.resolve("quickstart", words=["run_dir=here"])
    run_directory.fresh(config)
    with pytest.raises(UserError, match="--resume"):
        run_directory.fresh(config)


def test_an_unwritable_place_is_one_line() -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match="cannot make the run directory"):
        run_directory.fresh(resolve.resolve("quickstart", words=["run_dir=file/run"]))


def test_two_jobs_cannot_hold_one_directory() -> None:
    run = run_directory.fresh(resolve.resolve("quickstart"))
    with run.locked(), pytest.raises(UserError, match="in use"), run.locked():
        pass
