"""The commands of every tutorial work as printed; those that train run in the campaigns."""

import os
from pathlib import Path

import pytest

from tests.tutorials.page_runner import blocks, run_page

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorials").glob("*.md"))
DATA = Path(os.environ.get("ARPO_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
TRAINING = [page for page in PAGES if any(block.when == "trains" for block in blocks(page.read_text()))]


CHEAP = [
    page for page in PAGES if page.stem in ("coming-from", "data-and-reward", "first-run", "qwen3", "slurm", "tool")
]
"""Pages whose commands, up to the first that trains, take a few seconds in all."""


@pytest.mark.parametrize("page", CHEAP, ids=lambda page: page.stem)
def test_commands_before_the_training_work(page: Path, tmp_path: Path) -> None:
    assert run_page(page.read_text(), tmp_path, train=False)


@pytest.mark.slow_campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", TRAINING, ids=lambda page: page.stem)
def test_whole_tutorial_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "$ARPO_DATA" in page.read_text():
        if not (DATA / "train_10k.parquet").is_file():
            pytest.skip("no released ARPO files: set ARPO_DATA to their directory")
        monkeypatch.setenv("ARPO_DATA", str(DATA.resolve()))
    assert run_page(page.read_text(), tmp_path, train=True)


def test_own_tool_reward_and_data_take_at_most_40_lines() -> None:
    page = (PAGES[0].parent / "data-and-reward.md").read_text()
    files = {block.file: block.content for block in blocks(page) if block.file}
    lines = [line for name in ("questions.py", "mine.py", "tools.yaml") for line in files[name].splitlines()]
    assert len([line for line in lines if line.strip()]) <= 40


def test_wrong_output_fails(tmp_path: Path) -> None:
    page = "```console\n$ echo one two; echo three\none ...\nfour\n```\n"
    with pytest.raises(AssertionError, match="no line 'four'"):
        run_page(page, tmp_path, train=False)
    with pytest.raises(AssertionError, match="exit code 0"):
        run_page(page.replace("console", "console fails").replace("four", "three"), tmp_path, train=False)
    assert run_page(page.replace("four", "three"), tmp_path, train=False) == 1
