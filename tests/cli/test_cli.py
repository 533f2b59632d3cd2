"""The command line: a user error is one line and exit code 2, before any process starts."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from arpo_megatron.__main__ import main
from arpo_megatron.config import ParallelConfig
from arpo_megatron.plan import report

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
        (["plan", "deepsearch_14b", "--gpu", "h300"], "unknown GPU 'h300'; known: h100-80, h200, a100-80"),
        (["plan", "deepsearch_14b", "--nodes", "5", "parallel.tensor=16"], "cannot be divided"),
        (["plan", "deepsearch_14b", "model.hub_id=some/model"], "sizes are not known without its files"),
        (["train", "quickstart", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["sft", "reasoning_tiny", "data.path=x"], "sft.steps"),
        (["sft", "reasoning_tiny", "sft.steps=3"], "needs sft.data=FILE"),
        (["sft", "quickstart", "sft.data=x.jsonl"], "sft.data needs model.path=DIR"),
        (["sft", "quickstart", "sft.held_out=0.1"], "sft.held_out=0.1 needs sft.data=FILE"),
        (["sft", "quickstart", "sft.max_tokens=9"], "sft.max_tokens=9 needs sft.data=FILE"),
        (["sft", "quickstart", "model.path=m", "sft.data=x.jsonl", "sft.max_tokens=9000"], "exceeds model.max_length"),
        (["train", "quickstart", "sft.steps=0", "sft.data=x.jsonl"], "sft.data is not read with sft.steps=0"),
        (["eval", "nowhere"], "neither a run directory"),
        (["export", "nowhere", "--out", "out"], "not a run directory"),
        (["trees", "nowhere"], "not a run directory"),
        (["train", "reasoning_tiny", f"data.path={__file__}"], "not a readable parquet file"),
    ],
)
def test_user_error_is_one_line_and_writes_nothing(arpo: Arpo, arguments: list[str], line: str, tmp_path: Path) -> None:
    code, output, error = arpo(*arguments)
    assert code == 2
    assert line in error
    assert len(error.splitlines()) == 1
    assert output == ""
    assert not list(tmp_path.iterdir())


def test_help_lists_commands(arpo: Arpo) -> None:
    code, output, _ = arpo("--help")
    assert code == 0
    for command in ("demo", "train", "sft", "eval", "export", "trees", "replay-tree", "recipes", "show", "plan"):
        assert command in output


def test_dry_run_prints_config_and_plan_and_writes_nothing(arpo: Arpo, tmp_path: Path) -> None:
    code, output, _ = arpo("train", "quickstart", "train.steps=3", "--dry-run")
    assert code == 0
    assert "  steps: 3\n" in output
    assert "# plan: a new run in runs/quickstart-arpo-seed1\n" in output
    assert "#   trainer  1 rank(s)\n" in output
    assert not list(tmp_path.iterdir())


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
