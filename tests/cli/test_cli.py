"""The command line: a user error is one line and exit code 2, before any process starts."""

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from arpo_megatron.__main__ import main
from arpo_megatron.cli.main import app
from arpo_megatron.cli.options import complete_override, complete_recipe
from arpo_megatron.config import ParallelConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.resolve import load, read, resolve
from arpo_megatron.launch.supervisor import Supervisor
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.plan import report
from tests.tools_sandbox.test_added_tools import SERVER
from tests.view.stored_run import STEPS, make_run

Arpo = Callable[..., tuple[int, str, str]]


@pytest.fixture
def arpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Arpo:
    """Run a command in this process and in an empty directory; return exit code, standard output and error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("arpo_megatron.__main__.interrupt_on_signals", lambda: None)
        monkeypatch.setattr(sys, "argv", ["arpo", *arguments])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


FP8 = ["engine.quantization=fp8", "model.dtype=bfloat16"]
"""No FP8 engine can hold the quickstart's small heads."""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "quickstart", "algorithm.entropy_wieght=0.3"], "did you mean algorithm.entropy_weight?"),
        (["demo", "algorithm.entropy_wieght=0.3"], "did you mean algorithm.entropy_weight?"),
        (["demo", "--algorithm", "gripo"], "unknown preset 'gripo'; did you mean grpo?"),
        (["train", "quikstart"], "did you mean quickstart?"),
        (["train", "reasoning_tiny", "data.path=nowhere.parquet"], "nowhere.parquet: no such file"),
        (["train", "reasoning_tiny"], "train_10k.parquet: no such file"),
        (["train", "quickstart", "model.path=nowhere"], "no Hugging Face model there"),
        (["train", "quickstart", "--resume"], "nothing to resume"),
        (["train", "deepsearch_14b"], "model.path is missing: fetch Qwen/Qwen3-14B"),
        (["train", "deepsearch_14b+8nodes"], "variants: 1node, 2nodes, 4nodes, 16nodes"),
        (["show", "deepsearch_14b", "train.stepz=3"], "did you mean train.steps?"),
        (["show", "deepsearch_14b", "sandbox.file=no.yaml"], "no.yaml: No such file or directory"),
        (["plan", "deepsearch_14b", "sandbox.file=no.yaml"], "no.yaml: No such file or directory"),
        (["plan", "deepsearch_14b", "--gpu", "h300"], "unknown GPU 'h300'; known: h100-80, h200, a100-80, l40s"),
        (["plan", "deepsearch_14b", "--nodes", "5", "parallel.tensor=16"], "cannot be divided"),
        (["plan", "deepsearch_14b", "parallel.recompute_layers=41"], "give parallel.recompute_layers=40 or null"),
        (
            ["train", "quickstart", "--dry-run", "parallel.recompute=full", "parallel.recompute_layers=99"],
            "recompute_layers=99 exceeds the layers of a model chunk: give parallel.recompute_layers=4 or null",
        ),
        (["plan", "deepsearch_14b", "model.hub_id=some/model"], "sizes are not known without its files"),
        (["plan", "sft_7b", "--simulate"], "only does supervised training, which has no rollouts"),
        (["train", "quickstart", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["sft", "reasoning_tiny", "data.path=x"], "sft.steps"),
        (["sft", "reasoning_tiny", "sft.steps=3"], "needs sft.data=FILE"),
        (["sft", "quickstart", "sft.data=x.jsonl"], "sft.data needs model.path=DIR"),
        (["sft", "quickstart", "sft.held_out_share=0.1"], "sft.held_out_share=0.1 needs sft.data=FILE"),
        (["sft", "quickstart", "sft.max_tokens=9"], "sft.max_tokens=9 needs sft.data=FILE"),
        (["sft", "quickstart", "model.path=m", "sft.data=x.jsonl", "sft.max_tokens=9000"], "exceeds model.max_length"),
        (["train", "quickstart", "sft.steps=0", "sft.data=x.jsonl"], "sft.data is not read with sft.steps=0"),
        (["eval", "nowhere"], "neither a run directory"),
        (["export", "nowhere", "--out", "out"], "not a run directory"),
        (["export", "run", "--public"], "name it with --push-to-hub"),
        (["trees", "nowhere"], "not a run directory"),
        (["train", "reasoning_tiny", f"data.path={__file__}"], "rows can be used; the first: not JSON"),
        (["train", "quickstart", "--train.steps=3"], "write train.steps=3"),
        (
            ["train", "quickstart", "--train.steps", "3"],
            "--train.steps 3: an override has no dashes: write train.steps=3",
        ),
        (["train", "quickstart", "--train.steps"], "--train.steps: an override has no dashes: write train.steps=VALUE"),
        (["train", "quickstart", "--dryrun"], "no such option: --dryrun (Possible options: --dry-run)"),
        (["train"], "missing argument 'recipe'; see `arpo train --help`"),
        (["trian", "quickstart"], "Did you mean 'train'?"),
        (["train", "quickstart", "algorithm.name=gpro"], "did you mean grpo?"),
        (["train", "quickstart", "model.path=Qwen/Qwen3-0.6B"], "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        (["list", "metrics", "nonsense"], "no metric has the words nonsense"),
        (["list", "runs"], "runs has no runs: start one with `arpo demo`"),
        (["compare", "nowhere"], "needs two run directories"),
        (["serve", "nowhere"], "neither a run directory (config.yaml) nor a Hugging Face directory (config.json)\n"),
        (["serve", "oracle"], "neither a run directory (config.yaml) nor a Hugging Face directory (config.json)\n"),
        (["chat", "nowhere"], "nor a Hugging Face directory (config.json), nor a URL\n"),
        (["chat", "oracle", "--dry-run"], "nor a Hugging Face directory (config.json), nor a URL\n"),
        (["bench", "sync", "--json", "--directory", "nowhere"], "--directory nowhere: no such directory"),
        (["bench", "sync", "--megabytes", "30"], "invalid value for '--megabytes'"),
        (["bench", "controller", "--trees", "0"], "invalid value for '--trees'"),
        (["train", "quickstart", *FP8], "the head size of engine ranks (32) is not a multiple of 128"),
        (["train", "quickstart", *FP8, "--dry-run"], "the head size of engine ranks (32) is not a multiple of 128"),
        (["demo", *FP8], "the head size of engine ranks (32) is not a multiple of 128"),
        (["serve", "http://127.0.0.1:9"], "cannot be served: name a run directory"),
        (["chat", "http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1 does not answer as a chat server"),
    ],
)
def test_user_error_is_one_line_and_writes_nothing(arpo: Arpo, arguments: list[str], line: str, tmp_path: Path) -> None:
    code, output, error = arpo(*arguments)
    assert code == 2
    assert line in error
    assert len(error.splitlines()) == 1
    assert output == ""
    assert not list(tmp_path.iterdir())


PANELS = {
    "Start": ("demo", "show", "plan", "data", "list", "doctor"),
    "Train": ("train", "sft", "export"),
    "Look": ("status", "logs", "health", "compare", "trees", "view"),
    "Evaluate": ("eval", "eval-report", "judge-report", "decontaminate", "serve", "chat"),
    "On a cluster": ("submit", "resume", "cancel"),
    "Measure and check": ("bench", "study", "replay-tree", "recompute-update"),
}


def test_help_has_every_command_in_its_panel(arpo: Arpo) -> None:
    code, output, _ = arpo("--help")
    assert code == 0
    titles = list(re.finditer(r"^╭─ ([\w ]+) ─+╮$", output, re.MULTILINE))[1:]  # without the options
    assert [title[1] for title in titles] == list(PANELS)
    ends = [title.start() for title in titles[1:]] + [len(output)]
    for title, end in zip(titles, ends, strict=True):
        commands = re.findall(r"^│ ([a-z-]+) ", output[title.end() : end], re.MULTILINE)
        assert sorted(commands) == sorted(PANELS[title[1]])


@pytest.mark.parametrize("group", [[], ["list"], ["bench"], ["bench", "gpu"], ["study"], ["data"]])
def test_group_without_a_command_prints_its_help(arpo: Arpo, group: list[str]) -> None:
    code, output, error = arpo(*group)
    assert code == 2 and "Traceback" not in error
    assert f"Usage: {' '.join(['arpo', *group])}" in output + error


KILLED = """
import os, signal
print("no memory left", flush=True)
import some_library
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_cause_of_a_failed_job_stands_last(arpo: Arpo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real process is killed; a double starts it, because a job would take minutes."""
    library = tmp_path / "site-packages" / "some_library.py"
    library.parent.mkdir()
    library.write_text("import warnings\nfor i in range(20):\n    warnings.warn(f'kernel {i} is not installed')\n")

    def fail(_: object) -> int:
        with Supervisor(tmp_path / "logs") as supervisor:
            environment = {"PYTHONPATH": str(library.parent)}
            supervisor.wait(supervisor.start("train", [sys.executable, "-c", KILLED], env=environment))
        return 0

    monkeypatch.setattr("arpo_megatron.cli.main.run_command", fail)
    code, _, error = arpo("train", "quickstart")
    assert code == 1
    assert error == (
        f"arpo: train was killed by SIGKILL; log: {tmp_path}/logs/train.log\n"
        "  | no memory left\n"
        "arpo: after fixing the cause, the same command with --resume continues from the last step\n"
    )
    assert (tmp_path / "logs" / "train.log").read_text().count("UserWarning: kernel") == 20


def test_version_names_the_commit(arpo: Arpo) -> None:
    _, output, _ = arpo("--version")
    assert re.fullmatch(r"arpo-megatron [\d.]+, (commit [0-9a-f]{12}(-dirty)?|version .+)\n", output)


COMPLETED = [
    (["train", "quick"], ["quickstart"]),
    (["train", "quickstart", "train.st"], ["train.steps="]),
    (["view", "runs/"], ["runs/archive/", "runs/mine"]),
    (["view", "runs/mine", "runs/archive/"], ["runs/archive/old"]),
    (["status", "mi"], ["mine"]),
    (["chat", "runs/mi"], ["runs/mine"]),
]


@pytest.fixture
def runs_here(tmp_path: Path) -> Path:
    for place in ("runs/mine", "runs/archive/old", "runs/.hidden"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.yaml").write_text("name: test\n")
    (tmp_path / "runs" / "note.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize(("words", "found"), COMPLETED)
def test_shell_completes_recipes_runs_and_keys(
    runs_here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], found: list[str]
) -> None:
    monkeypatch.chdir(runs_here)
    variables = {"COMP_WORDS": " ".join(["arpo", *words]), "COMP_CWORD": str(len(words))}
    answer = CliRunner().invoke(app, env={"_ARPO_COMPLETE": "complete_bash", **variables}, prog_name="arpo")
    assert answer.output.split() == found


def test_bash_completes_a_run(runs_here: Path) -> None:
    script = """
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 arpo --show-completion bash)"
        COMP_WORDS=(arpo view runs/m) COMP_CWORD=2
        "$(complete -p arpo | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" arpo
        echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=runs_here, env=environment, capture_output=True, text=True)
    assert done.stdout == "runs/mine\n", done.stderr


def test_completion_knows_recipes_variants_and_keys() -> None:
    assert complete_recipe("quick") == ["quickstart"]
    assert "deepsearch_14b+4nodes" in complete_recipe("deepsearch_14b+")
    assert complete_override("algorithm.entropy_we") == ["algorithm.entropy_weight="]


@pytest.mark.parametrize(
    ("kind", "name", "meaning"),
    [
        ("methods", "dapo", "arXiv 2503.14476"),
        ("metrics", "logprob_gap", "trainer"),
        ("tools", "python", "Run Python code"),
        ("benchmarks", "aime24", "reasoning"),
    ],
)
def test_list_has_one_line_per_name_and_ends_with_the_next_command(
    arpo: Arpo, kind: str, name: str, meaning: str
) -> None:
    _, output, error = arpo("list", kind)
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [name]]
    assert meaning in line
    assert error.startswith("next: arpo ") and len(error.splitlines()) == 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "stored").path


def test_local_run_has_status_logs_and_a_place_in_the_list(arpo: Arpo, stored: Path) -> None:
    _, output, error = arpo("status", str(stored))
    assert f"{stored}: finished" in output and f"step {STEPS} of" in output
    assert error == f"next: arpo view {stored}\n"
    _, shown, after = arpo("logs", str(stored))
    assert f" step {STEPS}/{STEPS} | reward 0.800 | log-prob gap 4.0e-05 | 3.0 s\n" in shown
    assert after == f"next: arpo status {stored}\n"
    assert "\x1b" not in output + shown, "the text of an event reaches no terminal as a command"
    _, output, _ = arpo("list", "runs", str(stored.parent))
    assert output.splitlines()[-1].split()[0] == "stored"
    (profile := stored.parent / "here.yaml").write_text(f"account: a\nruns: {stored.parent}\n")
    there = arpo("list", "runs", "--cluster", str(profile))[1]
    assert there.rpartition("  ")[0] == output.rpartition("  ")[0], "the last column is the time since its last sign"


def test_followed_log_of_a_local_run_ends_with_its_last_lines(
    arpo: Arpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps=1, last=False)

    def ends(_: object) -> bool:
        EventLog(run.events).emit("note", text="exported to the end")
        return False

    monkeypatch.setattr("arpo_megatron.view.runs.is_training", ends)
    assert arpo("logs", str(run.path), "--follow")[1].endswith(" exported to the end\n")


def test_comparison_of_a_run_without_steps_has_no_gap(arpo: Arpo, stored: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0, last=False)
    shown = arpo("compare", str(stored), str(run.path))[1]
    assert next(line for line in shown.splitlines() if "log-prob gap" in line).split()[-1] == "-"


def test_status_without_a_run_names_the_command_that_starts_one(arpo: Arpo, stored: Path, tmp_path: Path) -> None:
    assert arpo("status") == (
        0,
        "no run exists in runs, and none was submitted: `arpo demo` starts one\n",
        "next: arpo demo\n",
    )
    (tmp_path / "empty").mkdir()
    assert arpo("status", "empty") == (0, "no run exists in empty: `arpo demo` starts one\n", "next: arpo demo\n")
    code, output, error = arpo("status", str(stored.parent))
    assert code == 0 and output.splitlines()[-1].split()[0] == "stored"
    assert error == f"next: arpo status {stored}\n"
    (tmp_path / "runs").symlink_to(stored.parent)
    code, output, error = arpo("status")
    assert code == 0 and "no run" not in output and error == "next: arpo status runs/stored\n"


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_commands_that_look_at_a_run_unpickle_nothing_of_it(arpo: Arpo, tmp_path: Path) -> None:
    """Resume and export read checkpoints: tests/actor/test_restricted_load.py."""
    run, mark = make_run(tmp_path / "foreign"), tmp_path / "the code ran"
    code = pickle.dumps(_Touch(mark))
    for folder in (run.checkpoints / f"step_{STEPS}", run.weights / f"step_{STEPS}", run.path / "skipped_updates"):
        (folder / "actor").mkdir(parents=True)
        for name in (".metadata", "common.pt", "manifest.json", "state.json", "__0_0.distcp", "step_1.npz"):
            for place in (folder, folder / "actor"):
                (place / name).write_bytes(code)
    run.step_journal.write_bytes(code)
    for command in ("status", "health", "logs", "trees", "view", "compare", "export", "eval", "recompute-update"):
        dump = [str(run.path / "skipped_updates" / "step_1.npz")]
        more = {"view": ["--html", "page.html"], "compare": [str(run.path)]}.get(command, [])
        more += ["--dry-run"] if command in ("export", "eval") else []
        exit_code, _, error = arpo(command, *(dump if command == "recompute-update" else [str(run.path)]), *more)
        assert "Traceback" not in error and not mark.exists(), command
        assert exit_code == 0 or len(error.splitlines()) == 1, error
    pickle.loads(code)
    assert mark.exists()


def test_commands_that_look_at_a_run_import_no_file_that_it_names(arpo: Arpo, tmp_path: Path) -> None:
    run, mark, code = make_run(tmp_path / "foreign"), tmp_path / "the code ran", tmp_path / "code.py"
    code.write_text(f"open({str(mark)!r}, 'w')\n")
    named = f"{code}:Any"
    config = read(run.config)
    data = replace(config.data, kind="files", path=code, reader=named, max_prompt_tokens=9)
    config = replace(config, reward=replace(config.reward, kind=named), data=data, sft=replace(config.sft, steps=0))
    save_config(replace(config, rollout=replace(config.rollout, protocol=named)), run.config)
    (run.checkpoints / f"step_{STEPS}").mkdir(parents=True)
    for command in ("status", "health", "logs", "trees", "view", "compare", "export"):
        more = {"view": ["--html", "page.html"], "compare": [str(run.path)], "export": ["--dry-run"]}.get(command, [])
        exit_code, _, error = arpo(command, str(run.path), *more)
        assert not mark.exists(), command
        assert exit_code == 0 or command in ("health", "export"), error
    with pytest.raises(UserError):
        load(run.config)
    assert mark.exists()


def test_status_waits_for_no_writer_of_a_pipe_in_a_run(arpo: Arpo, tmp_path: Path) -> None:
    run = make_run(tmp_path / "foreign")
    for path in (run.events, run.metrics, run.result, run.inputs, run.health):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert arpo("status", str(run.path))[0] == 0


def test_log_of_an_unknown_service_names_the_others(arpo: Arpo, stored: Path) -> None:
    (stored / "logs").mkdir(exist_ok=True)
    (stored / "logs" / "train.log").write_text("one\ntwo\n")
    _, output, _ = arpo("logs", str(stored), "--service", "train", "--lines", "1")
    assert output == "two\n"
    code, _, error = arpo("logs", str(stored), "--service", "trainer")
    assert code == 2 and "it has: job, train" in error


def test_compare_shows_differing_values_and_both_results(arpo: Arpo, stored: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", seed=5).path
    _, output, error = arpo("compare", str(stored), str(other))
    lines = [line.split() for line in output.splitlines()]
    assert ["seed", "1", "5"] in lines
    assert not [line for line in lines if line[:1] == ["run_dir"]]
    assert [line for line in lines if line[:1] == ["step"]]
    assert error == f"next: arpo view {stored} {other}\n"


def test_every_command_that_looks_at_a_run_knows_its_name(arpo: Arpo, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine")
    assert arpo("compare", "mine", "mine")[0] == 0
    assert arpo("view", "mine", "--html", "mine.html")[0] == 0
    assert "runs/mine/trees/step_" in arpo("trees", "mine", "--count", "0")[1].replace("\n", "")
    assert "runs/mine/export is not a Hugging Face model" in arpo("serve", "mine", "--dry-run")[2]


def test_view_of_a_cluster_listens_on_this_machine_only(arpo: Arpo) -> None:
    code, _, error = arpo("view", "run", "--cluster", "c", "--host", "0.0.0.0")
    assert code == 2 and error == "arpo: --cluster shows the page on this machine: leave out --host\n"


def test_list_of_tools_names_mcp_servers_and_the_file(arpo: Arpo, tmp_path: Path) -> None:
    server = {**SERVER, "tools": ["reverse"]}
    plugin = f"{Path(__file__).parents[2]}/examples/count_words_tool/src/count_words_tool/__init__.py:CountWords"
    text = json.dumps({"mcp": {"arithmetic": server}, "plugins": [{"name": plugin}]})
    (tmp_path / "tools.yaml").write_text(text)
    code, listed, following = arpo("list", "tools", "--file", "tools.yaml")
    assert code == 0 and re.search("^ *reverse +text", listed, re.MULTILINE) and "count_words" in listed
    assert following == "next: arpo train RECIPE sandbox.file=tools.yaml 'rollout.tools=[count_words,reverse,python]'\n"
    assert arpo("list", "tools")[2] == "next: arpo train RECIPE 'rollout.tools=[python]'\n", "search is off"
    (tmp_path / "tools.yaml").write_text("plugins: [{name: count_wrods}]\n")
    code, _, error = arpo("list", "tools", "--file", "tools.yaml")
    assert (code, '--file tools.yaml: plugins: no installed package offers "count_wrods"' in error) == (2, True)


@pytest.mark.parametrize("command", ["status", "logs"])
def test_name_of_no_run_names_the_folder_and_the_nearest_run(arpo: Arpo, command: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart-arpo-seed1"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    code, _, error = arpo(command, "quickstart-arpo-seed2")
    assert code == 2 and f"no run in {tmp_path}/runs or of the submitted ones (none) is called" in error
    assert "; did you mean quickstart-arpo-seed1?" in error


@pytest.mark.parametrize("command", ["resume", "cancel"])
@pytest.mark.parametrize("name", ["quickstart-arpo-seed1", "runs/quickstart-arpo-seed1"])
def test_cluster_command_for_a_local_run_says_what_continues_it(
    arpo: Arpo, command: str, name: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "quickstart-arpo-seed1"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    code, _, error = arpo(command, name)
    assert code == 2 and "was not submitted to a cluster: `arpo train RECIPE --resume` continues it" in error


def test_empty_log_is_reported(arpo: Arpo, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "train.log").touch()
    assert "run/logs/train.log is empty\n" in arpo("logs", "run", "--service", "train")[2]


def test_dry_run_refuses_a_tool_that_does_not_exist(arpo: Arpo) -> None:
    code, _, error = arpo("train", "quickstart", "rollout.tools=[serch]", "--dry-run")
    assert (code, "does not offer 'serch'" in error) == (2, True)


def test_dry_run_prints_config_and_plan_and_writes_nothing(arpo: Arpo, tmp_path: Path) -> None:
    code, output, _ = arpo("train", "quickstart", "train.steps=3", "--dry-run")
    assert code == 0
    assert "  steps: 3\n" in output
    assert "# plan: a new run in runs/quickstart-arpo-seed1\n" in output
    assert "#   trainer  1 rank(s)\n" in output
    assert not list(tmp_path.iterdir())


def test_dry_run_of_a_resume_checks_the_run(arpo: Arpo, tmp_path: Path) -> None:
    run, command = tmp_path / "run", ("train", "quickstart", "run_dir=run", "--dry-run")
    code, _, error = arpo(*command, "--resume")
    assert (code, error) == (
        2,
        "arpo: nothing to resume at run: there is no run. Start one, or set run_dir to an existing run\n",
    )
    run.mkdir()
    save_config(resolve("quickstart", overrides=["run_dir=run"]), run / "config.yaml")
    code, output, _ = arpo(*command, "--resume", "train.steps=99")
    assert (code, "# plan: run, resumed\n" in output) == (0, True)
    code, _, error = arpo(*command)
    assert (code, "run already holds a run" in error) == (2, True)
    code, _, error = arpo(*command, "--resume", "seed=5")
    assert (code, "was started with another config: seed was" in error) == (2, True)
    for broken in ("train: {stepz: 3}\n", "train: [\n", ""):
        (run / "config.yaml").write_text(broken)
        code, output, error = arpo(*command, "--resume")
        assert (code, output, len(error.splitlines())) == (2, "", 1) and "run/config.yaml" in error
    code, _, error = arpo("train", "quickstart", "--resume", "--cluster", "here.yaml")
    assert (code, "`arpo resume RUN`" in error) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["demo", "train.steps=3"], "steps: 3"),
        (["bench", "pack", "--mix", "reasoning"], "  seconds: 10.0\n"),
        (["bench", "gpu", "kernels"], "errors against float64"),
        (["bench", "soak", "--steps", "20", "train.tasks_per_step=4"], "train quickstart for 20 steps"),
        (["cancel", "my-run"], "  run: my-run\n"),
        (["doctor", "--cluster", "profile.yaml", "--measure"], "  measure: True\n"),
        (["data", "from-verifiers", "env.toml", "--python", "p", "--output", "q.jsonl"], "  output: q.jsonl\n"),
        (["judge-report", "reasoning_7b", "--labels", "labels.jsonl"], "  labels: labels.jsonl\n"),
        (["eval-report", "one", "two", "--out", "table"], "  directories: one two\n"),
        (["study", "information", "trails", "model.path=m", "--out", "o"], "  overrides: model.path=m\n"),
        (["study", "entropy", "run", "--out", "o"], "  runs: run\n"),
        (["trees", "run", "--svg", "tree.svg"], "  svg: tree.svg\n"),
    ],
)
def test_dry_run_does_nothing_and_names_the_command_without_it(
    arpo: Arpo, arguments: list[str], shown: str, tmp_path: Path
) -> None:
    code, output, error = arpo(*arguments, "--dry-run")
    assert code == 0 and shown in output
    assert error == f"next: {' '.join(['arpo', *arguments])}\n"
    assert not list(tmp_path.iterdir())


def test_dry_run_of_view_checks_its_arguments(arpo: Arpo, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert "nowhere is not a run directory" in arpo("view", "nowhere", "--dry-run")[2]
    assert "--trees is the number of trees in the file of --html" in arpo("view", "run", "--trees", "3")[2]
    assert "--grow needs a server" in arpo("view", "run", "--html", "a.html", "--grow", "run", "--dry-run")[2]
    code, output, error = arpo("view", "run", "--html", "run.html", "--dry-run")
    assert (code, output) == (0, "show run\nwrite run.html, at most 24 trees of each run\n")
    assert error == "next: arpo view run --html run.html\n" and not (tmp_path / "run.html").exists()


READS_ONLY = {
    *("compare", "data check", "decontaminate", "health", "list benchmarks", "list methods", "list metrics"),
    *("list recipes", "list runs", "list tools", "logs", "plan", "recipes", "recompute-update", "replay-tree"),
    *("show", "status"),
}
"""Commands that write nothing, submit no job and cost nothing."""


def _commands(group: TyperGroup, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_every_command_that_writes_submits_or_pays_has_a_dry_run() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    without = {
        name
        for name, command in _commands(root)
        if not any("--dry-run" in parameter.opts for parameter in command.params)
    }
    assert without == READS_ONLY


@pytest.mark.parametrize(
    ("arguments", "following"),
    [
        (
            ["show", "deepsearch_8b", "--seed", "3", "data.path={a b.jsonl: 1.0}"],
            "arpo plan deepsearch_8b 'data.path={a b.jsonl: 1.0}' seed=3",
        ),
        (
            ["plan", "deepsearch_8b", "train.steps=7", "--nodes", "1", "--no-search"],
            "arpo submit deepsearch_8b train.steps=7 --cluster NAME --nodes 1 --dry-run",
        ),
        (
            ["data", "check", "my questions.jsonl", "rollout.temperature=0.9"],
            "arpo train reasoning_7b data.kind=files 'data.path=my questions.jsonl' rollout.temperature=0.9 --dry-run",
        ),
    ],
)
def test_next_command_repeats_the_job_and_can_be_pasted(
    arpo: Arpo, arguments: list[str], following: str, tmp_path: Path
) -> None:
    rows = [{"question": f"{n} + {n}?", "answer": 2 * n} for n in range(9)]
    (tmp_path / "my questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, _, error = arpo(*arguments)
    assert (code, error.splitlines()[-1]) == (0, f"next: {following}")


def test_failed_check_names_the_next_command(arpo: Arpo) -> None:
    command = ["plan", "deepsearch_14b", "--nodes", "1", "--gpu", "l40s", "--no-search"]
    code, output, error = arpo(*command)
    assert code == 1 and "does not fit" in output
    assert error == f"next: {' '.join(['arpo', *command])} --nodes 2\n"


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({}, ""),
        ({"data": 2}, "data 2"),
        ({"tensor": 2, "context": 4, "data": 3, "expert": 8}, "tensor 2 x context 4 x data 3, expert 8"),
        ({"pipeline": 2, "virtual_pipeline": 4}, "pipeline 2, virtual pipeline 4"),
    ],
)
def test_plan_lists_dimensions_other_than_1(layout: dict[str, int], text: str) -> None:
    assert report.layout(ParallelConfig(**layout)) == text


def test_recipes_command_lists_model_nodes_memory_and_variants(arpo: Arpo) -> None:
    _, output, _ = arpo("recipes")
    assert "quickstart" in output
    assert "reasoning_tiny" in output
    line = next(line for line in output.splitlines() if line.startswith("deepsearch_14b"))
    name, model, nodes, gib, *variants = line.split()
    assert (name, model, nodes) == ("deepsearch_14b", "Qwen/Qwen3-14B", "2")
    assert 40 < int(gib) < 80 and "fp8" in variants


INTERRUPTED_IMPORT = """
import signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from arpo_megatron.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "arpo_megatron.cli.main"])
def test_ctrl_c_during_an_import_is_one_line(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "recipes", module]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (130, "arpo: interrupted\n")


def test_package_runs_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "arpo_megatron", "show", "quickstart"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "name: quickstart" in done.stdout
