"""Reflection data: which branches are spliced, what of them is learned, and how supervised training reads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from arpo_megatron.cli.main import app
from arpo_megatron.config import JobConfig, ModelConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import step_file, write_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.sft.dataset import read_conversations
from arpo_megatron.tasks.sft.reflections import reflection_rows, tokens_tree
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.utils.table_reader import BadRowError


def searched() -> tuple[RolloutTree, list[bool]]:
    """After the first result [5]: a branch that fails by its call, one that answers wrongly, and two right ones."""
    tree = RolloutTree("t", [1, 2])
    result = tree.add(tree.add(0, Role.MODEL, [3, 4]), Role.TOOL, [5])
    wrong = tree.add(tree.add(result, Role.MODEL, [60]), Role.MODEL, [61])  # continued by newer weights
    tree.add(tree.add(wrong, Role.TOOL, [7]), Role.MODEL, [8])
    tree.add(result, Role.MODEL, [9])
    long = tree.add(tree.add(result, Role.MODEL, [10]), Role.TOOL, [11])
    tree.add(long, Role.MODEL, [12, 12, 12])
    tree.add(tree.add(tree.add(result, Role.MODEL, [13]), Role.TOOL, [14]), Role.MODEL, [15])
    return tree, [leaf in (tree.leaves()[2], tree.leaves()[3]) for leaf in tree.leaves()]


def test_wrong_turn_is_followed_by_the_shortest_success_from_its_fork() -> None:
    tree, solved = searched()
    (row,) = reflection_rows(tree, solved, [90, 91])
    assert row == {
        "id": "t",
        "tokens": [
            {"role": "context", "ids": [1, 2, 3, 4, 5, 60, 61, 7]},
            {"role": "model", "ids": [90, 91]},
            {"role": "model", "ids": [13]},
            {"role": "context", "ids": [14]},
            {"role": "model", "ids": [15]},
        ],
    }
    path = tokens_tree(row, "row-0")
    (leaf,) = path.leaves()
    learned = path.trajectory(leaf)
    assert learned.token_ids[learned.loss_mask == 1].tolist() == [90, 91, 13, 15]


@pytest.mark.parametrize("value", [True, False])
def test_trees_without_both_outcomes_give_nothing(value: bool) -> None:
    tree, solved = searched()
    assert not list(reflection_rows(tree, [value] * len(solved), [90]))


def test_sft_reads_token_rows_without_a_chat_template(tmp_path: Path) -> None:
    tree, solved = searched()
    file = tmp_path / "again.jsonl"
    rows = [*reflection_rows(tree, solved, [90]), {"tokens": [{"role": "context", "ids": [1]}]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    plain: Any = type("Plain", (), {"chat_template": None, "added_tokens_decoder": {}, "all_special_ids": []})()
    found = read_conversations(file, plain, 100, vocabulary=100)
    assert [own.path_tokens(own.leaves()[0]).tolist() for own in found.trees] == [
        [1, 2, 3, 4, 5, 60, 61, 7, 90, 13, 14, 15]
    ]
    assert [bad.row for bad in found.bad_rows] == [1]


def test_command_writes_the_failed_branches_of_all_stored_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    model = tmp_path / "model"
    model.mkdir()
    words = {f"word{number}": number for number in range(100)}
    words_tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    words_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words_tokenizer.save(str(model / "tokenizer.json"))
    run.path.mkdir()
    save_config(JobConfig("test", model=ModelConfig(path=model)), run.config)
    tree, solved = searched()
    rewards = np.array(solved, float)
    scored = ScoredTree(Task("t", (), "4", "math", ""), tree, rewards, rewards, rewards > 0)
    for step in (1, 2):
        write_trees(step_file(run, step), step, [scored], lambda ids: " ".join(f"word{own}" for own in ids))
    file = tmp_path / "again.jsonl"
    options = ["trees", str(run.path), "--reflections", str(file), "--reflection", "word90 word91"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "2 failed branches" in done.output
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        *reflection_rows(tree, solved, [90, 91])
    ] * 2
    done = CliRunner().invoke(app, [*options[:3], str(tmp_path / "again.txt")])
    assert "must end in .jsonl" in str(done.exception)


@pytest.mark.parametrize(
    "tokens",
    [
        "text",
        [{"role": "context", "ids": [1]}],
        [{"role": "model", "ids": [1]}, {"role": "model", "ids": [2]}],
        [{"role": "context", "ids": [1]}, {"role": "model", "ids": []}],
        [{"role": "context", "ids": [1]}, {"role": "model", "ids": [-1]}],
        [{"role": "context", "ids": [1]}, {"role": "user", "ids": [2]}],
    ],
)
def test_malformed_token_rows_are_bad_rows(tokens: Any) -> None:
    with pytest.raises(BadRowError):
        tokens_tree({"tokens": tokens}, "row-0")
