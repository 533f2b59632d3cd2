"""A drawn tree shows its forks, its uncertainty, the tool results and the rewards."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from arpo_megatron.models.tiny import generated_tokenizer
from arpo_megatron.monitor.tree_view import LEGEND, render_tree, save_svg
from arpo_megatron.tree import BranchRecord, Finish, Role, RolloutTree, ToolRecord

TOKENIZER = generated_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids))


def forked() -> RolloutTree:
    tree = RolloutTree("train-7-calc", np.array(ids("question: 12*34 ?"), np.int32))
    call = tree.add(0, Role.MODEL, ids("<think>calculate</think><python>12*34</python>"), finish=Finish.TOOL_CALL)
    record = ToolRecord("python", {"code": "12*34"}, "ok", seconds=0.012, cached=False)
    result = tree.add(call, Role.TOOL, ids(" <result>\n408\n</result>"), tool=record)
    answer = ids("<answer>\\boxed{408}</answer><eos>")
    branch = BranchRecord(dH=0.125, probability=0.53, draw=0.21, why="draw")
    tree.add(result, Role.MODEL, answer, entropies=[0.1, 0.5, 2.0], finish=Finish.END, branch=branch)
    tree.add(result, Role.MODEL, ids("<answer>\\boxed{77}"), finish=Finish.LENGTH)
    return tree


def drawn(renderable: RenderableType, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tree_view_shows_forks_uncertainty_results_and_rewards() -> None:
    text = drawn(render_tree(forked(), decode, [1.0, -1.0]))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0].startswith("train-7-calc: 2 trajectories, 1 right, forks after tool results: 1")
    assert lines[1] == "question: 12*34 ?"
    assert "└── <think>calculate</think><python>12*34</python>" in lines
    assert "    → 408  (python, 12 ms)" in lines
    assert "    ├── H 0.87 ▁▃█  dH +0.125  P 0.53  draw 0.21 < P  draw" in lines
    assert "    │   ✓ reward +1.00" in lines
    assert "        ✗ reward -1.00  ended by length" in lines
    assert lines[-1] == LEGEND


def test_tree_view_marks_failed_and_cached_tools() -> None:
    tree = RolloutTree("t", np.array(ids("question: "), np.int32))
    call = tree.add(0, Role.MODEL, ids("<search>qzlf</search>"))
    record = ToolRecord("search", {"query": "qzlf"}, "timeout", seconds=30.0, cached=True)
    tree.add(call, Role.TOOL, ids(" <result>\nError: late\n</result>"), tool=record)
    assert "→ Error: late  (search, from cache, timeout)" in drawn(render_tree(tree, decode, [0.0]))


def test_tree_view_cuts_long_texts_and_escapes_markup() -> None:
    tree = RolloutTree("t", np.array(ids("[bold]x[/nonsense]"), np.int32))
    tree.add(0, Role.MODEL, ids("y" * 500))
    text = drawn(render_tree(tree, decode, [0.0], max_characters=20))
    assert "[bold]x[/nonsense]" in text
    assert "yyyyyyyyyy … yyyyyyyyyy" in text


def test_tree_view_draws_a_very_deep_tree() -> None:
    tree = RolloutTree("t", np.array(ids("q"), np.int32))
    last = 0
    for _ in range(3000):
        last = tree.add(last, Role.MODEL, ids("x"))
    assert "reward" in drawn(render_tree(tree, decode, [1.0]))


def test_tree_view_refuses_rewards_that_do_not_fit_the_leaves() -> None:
    with pytest.raises(ValueError, match="1 rewards for 2 leaves"):
        render_tree(forked(), decode, [1.0])


def test_tree_view_writes_svg(tmp_path: Path) -> None:
    path = tmp_path / "tree.svg"
    save_svg(render_tree(forked(), decode, [1.0, 0.0]), path, title="one question, two answers")
    text = path.read_text()
    assert text.startswith("<svg")
    assert "one&#160;question" in text
    assert "408" in text
    save_svg(render_tree(forked(), decode, [1.0, 0.0]), tmp_path / "again.svg", title="one question, two answers")
    assert (tmp_path / "again.svg").read_text() == text
