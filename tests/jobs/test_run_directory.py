"""Run directories are never overwritten, and resuming finds the right one."""

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import choose_run, resolve
from arpo_megatron.launch import ranks
from arpo_megatron.launch.backend import LocalBackend
from arpo_megatron.launch.job import open_job


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_fresh_runs_get_new_directories_and_resume_takes_the_newest() -> None:
    config = resolve.resolve("quickstart")
    paths = [choose_run.fresh(config).path for _ in range(11)]
    assert [path.name for path in paths[:3]] == [f"quickstart-arpo-seed1{end}" for end in ("", "-2", "-3")]
    assert len(set(paths)) == 11
    assert choose_run.existing(config).path == paths[-1]


def test_new_run_directories_are_private() -> None:
    named = resolve.resolve("quickstart", overrides=["run_dir=mine"])
    for config in (resolve.resolve("quickstart"), named):
        assert stat.S_IMODE(choose_run.fresh(config).path.stat().st_mode) == 0o700


def test_runs_of_seed_1_and_seed_11_are_distinct() -> None:
    first = choose_run.fresh(resolve.resolve("quickstart", overrides=["seed=1"]))
    choose_run.fresh(resolve.resolve("quickstart", overrides=["seed=11"]))
    assert choose_run.existing(resolve.resolve("quickstart", overrides=["seed=1"])).path == first.path


def test_resume_with_another_config_reports_the_differing_key() -> None:
    choose_run.fresh(resolve.resolve("quickstart"))
    with pytest.raises(UserError, match=r"algorithm\.beam_size was 2, now 3"):
        choose_run.existing(resolve.resolve("quickstart", overrides=["algorithm.beam_size=3"]))


def test_resume_takes_the_newest_run_of_the_same_config() -> None:
    wide = resolve.resolve("quickstart", overrides=["algorithm.beam_size=3"])
    runs = [choose_run.fresh(config) for config in (wide, resolve.resolve("quickstart"))]
    assert choose_run.existing(wide) == runs[0]
    with pytest.raises(UserError, match="name another run with run_dir="):
        choose_run.existing(resolve.resolve("quickstart", overrides=["algorithm.beam_size=4"]))


def test_run_can_be_resumed_for_more_steps() -> None:
    run = choose_run.fresh(resolve.resolve("quickstart"))
    longer = resolve.resolve("quickstart", overrides=["train.steps=99", "engine.max_running_requests=3"])
    assert choose_run.existing(longer) == run


def test_refused_second_job_does_not_change_the_run() -> None:
    run = choose_run.fresh(resolve.resolve("quickstart"))
    before = run.config.read_bytes()
    with (
        run.locked(),
        pytest.raises(UserError, match="in use"),
        open_job(resolve.resolve("quickstart", overrides=["train.steps=99"]), resume=True),
    ):
        pass
    assert run.config.read_bytes() == before


def test_lock_that_the_filesystem_does_not_offer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = choose_run.fresh(resolve.resolve("quickstart"))

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match=r"without file locks \(No locks available\): mount it with them"), run.locked():
        pass
    with pytest.raises(UserError, match=r"no temporary directory in .* \(No locks available\): set TMPDIR"):
        LocalBackend().scratch().__enter__()
    monkeypatch.setattr("sys.argv", ["ranks", "2", "arpo_megatron.sft"])
    monkeypatch.setattr(ranks, "interrupt_on_signals", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        ranks.main()
    assert re.fullmatch(
        r"arpo: no temporary directory in .* \(No locks available\): set TMPDIR.*\n", capsys.readouterr().err
    )


@pytest.mark.parametrize("content", ["", '{"st'])
def test_damaged_result_refuses_a_resume_with_the_fix(content: str) -> None:
    run = choose_run.fresh(resolve.resolve("quickstart"))
    run.result.write_text(content)
    with pytest.raises(UserError, match=r"result\.json cannot be read .*: delete it, then --resume exports again"):
        _ = run.steps_done


def test_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.tmp").write_text("precious")
    with pytest.raises(UserError, match=r"holds other files \(notes\.tmp"):
        choose_run.fresh(resolve.resolve("quickstart", overrides=[f"run_dir={mine}"]))
    assert [path.name for path in mine.iterdir()] == ["notes.tmp"]


def test_remove_partial_deletes_only_partial_files(tmp_path: Path) -> None:
    run = choose_run.fresh(resolve.resolve("quickstart"))
    partial = [run.checkpoints / "step_3.tmp", run.path / "export.tmp"]
    for path in [*partial, run.path / "notes.tmp", run.checkpoints / "step_2"]:
        path.mkdir(parents=True)
    run.remove_partial()
    assert not any(path.exists() for path in partial)
    assert (run.path / "notes.tmp").exists() and (run.checkpoints / "step_2").exists()


def test_resume_without_a_run_is_one_line() -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        choose_run.existing(resolve.resolve("quickstart"))
    with pytest.raises(UserError, match=r"nothing to resume at .*other: there is no run") as refused:
        choose_run.existing(resolve.resolve("quickstart", overrides=["run_dir=other"]))
    assert "--resume" not in str(refused.value), "`arpo resume` has no such option"


def test_fresh_run_does_not_overwrite_run_dir() -> None:
    config = resolve.resolve("quickstart", overrides=["run_dir=here"])
    choose_run.fresh(config)
    with pytest.raises(UserError, match="--resume"):
        choose_run.fresh(config)


def test_unwritable_run_dir_is_one_line() -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match="cannot create the run directory"):
        choose_run.fresh(resolve.resolve("quickstart", overrides=["run_dir=file/run"]))


def test_run_directory_is_locked_by_one_job() -> None:
    run = choose_run.fresh(resolve.resolve("quickstart"))
    with run.locked(), pytest.raises(UserError, match="in use"), run.locked():
        pass


def test_commands_that_choose_the_same_name_get_distinct_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve.resolve("quickstart")
    found, free = [Path("runs/quickstart-arpo-seed1")] * 2, choose_run._next_free
    monkeypatch.setattr(choose_run, "_next_free", lambda base: found.pop() if found else free(base))
    first, second = choose_run.fresh(config), choose_run.fresh(config)
    assert (first.path.name, second.path.name) == ("quickstart-arpo-seed1", "quickstart-arpo-seed1-2")
