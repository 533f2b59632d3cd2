"""Stored trees: lossless, readable by polars and pandas, replaced by a resumed step, and a full disk."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from arpo_megatron.cli.trees import show_trees
from arpo_megatron.config import JobConfig, ModelConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import (
    TreeLog,
    rank_for_display,
    read_summaries,
    read_trees,
    step_file,
    stored_steps,
    write_trees,
)
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import BranchRecord, Finish, Role, RolloutTree, ToolRecord
from tests.faults import FULL, small_disk

DRAW = BranchRecord(dH=-0.25, probability=0.1, draw=0.30000000000000004, why="draw")


def decode(ids: Sequence[int]) -> str:
    return bytes(number % 256 for number in ids).decode(errors="replace")


def grown(number: int = 0, *, results: int = 2, long: int = 4) -> RolloutTree:
    """A fork after a tool result, with a different prompt for each number."""
    rng = np.random.default_rng(number)
    tree = RolloutTree(f"task-{number}", [*b"What? ", number], step=number // 2, seconds=1.5 + number)

    def model(parent: int, text: bytes, **fields: Any) -> int:
        ids = list(text) * long
        floats = rng.normal(size=len(ids)).astype(np.float32)
        routes = rng.permuted(np.broadcast_to(np.arange(300), (len(ids), 2, 300)), axis=-1)[..., :3]
        return tree.add(parent, Role.MODEL, ids, logprobs=-abs(floats), entropies=abs(floats), routes=routes, **fields)

    call = model(0, b"<python>2</python>", finish=Finish.TOOL_CALL, policy_version=3, rewards={"turn": number / 3})
    record = ToolRecord("python", {"code": "2 # \u00fc\ud800"}, "ok", 0.125, cached=False)
    tool = tree.add(call, Role.TOOL, list(b" <result>\n2\n</result>"), tool=record)
    for place in range(results):
        model(tool, b"4\xf0\x9f", finish=Finish.END, policy_version=4, branch=DRAW if place == 0 else None)
    return tree


def scored(tree: RolloutTree) -> ScoredTree:
    leaves = len(tree.leaves())
    task = Task(tree.task_id, (), "4", "math", "What?\n")
    rewards = np.linspace(-1, 1, leaves)
    terms = {"verified": rewards.clip(0), "overlong": np.full(leaves, -0.5)}
    return ScoredTree(task, tree, rewards, rewards.clip(0), np.ones(leaves, bool), terms=terms)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_tree_files_are_lossless(run: RunDirectory) -> None:
    trees = [grown(number, results=number % 3 + 1) for number in range(40)]  # more than a row group
    write_trees(step_file(run, 3), 3, [scored(tree) for tree in trees], decode)
    stored = read_trees(step_file(run, 3))
    assert [item.tree.to_dict() for item in stored] == [tree.to_dict() for tree in trees]
    assert [item.rewards for item in stored] == [scored(tree).rewards.tolist() for tree in trees]
    assert stored[0].ground_truth == "4"
    (terms,) = pq.read_table(step_file(run, 3), columns=["terms"])["terms"].to_pylist()[:1]
    assert [part["name"] for part in terms] == ["verified", "overlong"]
    assert terms[1]["values"] == [-0.5] * len(stored[0].rewards)
    assert stored_steps(run) == [3]
    assert [path.name for path in run.trees.iterdir()] == ["step_000003.parquet"]


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32, allow_subnormal=False)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), numbers), max_size=20), st.text(), st.floats(0, 1))
def test_tree_files_keep_any_tokens_numbers_and_texts(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[tuple[int, float]], text: str, draw: float
) -> None:
    tree = RolloutTree(text, [0])
    ids, values = [token for token, _ in tokens], [value for _, value in tokens]
    record = BranchRecord(dH=draw / 3, probability=1 - draw, draw=draw, why=text)
    node = tree.add(0, Role.MODEL, ids, logprobs=values, entropies=values, branch=record)
    tree.add(node, Role.TOOL, ids, tool=ToolRecord(text, {"code": text}, "ok", draw, cached=True))
    path = tmp_path_factory.mktemp("trees") / "step_000001.parquet"
    write_trees(path, 1, [scored(tree)], decode)
    assert read_trees(path)[0].tree.to_dict() == tree.to_dict()


def test_tree_files_are_readable_by_polars(run: RunDirectory) -> None:
    for step in (1, 2):
        write_trees(step_file(run, step), step, [scored(grown(2 * step)), scored(grown(2 * step + 1))], decode)
    frame = pl.read_parquet(run.trees / "*.parquet")
    assert frame["step"].to_list() == [1, 1, 2, 2]
    assert frame["begun_in_step"].to_list() == [1, 1, 2, 2]
    segments = frame.explode("segments").unnest("segments")
    calls = segments.filter(pl.col("role") == "tool").unnest("tool")
    assert calls["arguments"].str.json_path_match("$.code").str.starts_with("2").all()
    assert calls["seconds"].to_list() == [0.125] * 4
    sampled = segments.filter(pl.col("role") == "model")
    assert sampled["policy_version"].to_list() == [3, 4, 4] * 4
    assert sampled["text"].to_list()[1] == decode(list(b"4\xf0\x9f") * 4)
    assert sampled["logprobs"].list.len().to_list() == sampled["token_ids"].list.len().to_list()
    assert sampled["branch"].struct.field("draw").drop_nulls().to_list() == [DRAW.draw] * 4


def test_tree_files_are_readable_by_pandas(run: RunDirectory) -> None:
    pandas = pytest.importorskip("pandas")
    write_trees(step_file(run, 1), 1, [scored(grown())], decode)
    frame = pandas.read_parquet(run.trees)
    assert frame.explode("segments")["segments"].map(lambda segment: segment["role"]).tolist()[0] == "prompt"


def test_repeated_step_replaces_its_tree_file(run: RunDirectory) -> None:
    for number in (1, 2):
        write_trees(step_file(run, 5), 5, [scored(grown(number))], decode)
    assert [item.tree.task_id for item in read_trees(step_file(run, 5))] == ["task-2"]
    assert len(list(run.trees.iterdir())) == 1


def test_kill_leaves_the_old_tree_file_or_the_new_one(run: RunDirectory) -> None:
    """Kill -9 at several moments of a loop that writes two versions of one step in turn.

    The writers are forked from one process that has loaded the trees and has written nothing itself.
    """
    script = """
import os, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tests.monitor.test_tree_store import decode, grown, scored
from arpo_megatron.monitor.tree_store import write_trees
trees = [[scored(grown(version, long=2000))] * 8 for version in (1, 2)]
for seconds in sys.stdin:
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        for turn in range(10**6):
            write_trees(Path(sys.argv[1]), 1, trees[turn % 2], decode)
            os.write(theirs, b".")
    os.close(theirs)
    assert os.read(ours, 1) + os.read(ours, 1) == b".."
    time.sleep(float(seconds))
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(ours)
    print("killed", flush=True)
"""
    path = step_file(run, 1)
    command = [sys.executable, "-c", script, str(path), str(Path(__file__).resolve().parents[2]), *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for moment in range(4):
            print(0.02 * moment, file=process.stdin, flush=True)
            assert process.stdout.readline() == "killed\n"
            stored = read_trees(path)
            assert len(stored) == 8
            assert {item.tree.task_id for item in stored} in ({"task-1"}, {"task-2"})


@pytest.mark.parametrize("kind", FULL)
def test_trees_that_a_full_disk_refuses_are_counted_and_leave_no_file(run: RunDirectory, kind: str) -> None:
    lines: list[str] = []
    log = TreeLog(run, lines.append)
    many = [scored(grown(number, long=300)) for number in range(9)]
    run.trees.mkdir(parents=True)
    with small_disk(run.trees, 3 * 2**14, kind) as full:
        assert log.store(1, [scored(grown())], decode) == 0
        assert [log.store(step, many, decode) for step in (2, 3)] == [9, 9]
        assert [path.name for path in run.trees.iterdir()] == ["step_000001.parquet"]  # the room is free again
        assert log.store(4, [scored(grown(1))], decode) == 0
        assert stored_steps(run) == [1, 4]
    assert len(lines) == 1
    assert "the trees of step 2 are not stored" in lines[0]
    assert full in lines[0]


def test_damaged_tree_file_is_one_line_and_other_files_are_ignored(run: RunDirectory) -> None:
    path = step_file(run, 1)
    write_trees(path, 1, [scored(grown(number)) for number in range(3)], decode)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    (run.trees / "step_000001 (copy).parquet").write_bytes(whole)
    assert stored_steps(run) == [1]
    rng = np.random.default_rng(1)
    for _ in range(40):
        damaged = bytearray(whole)
        damaged[rng.integers(4, footer)] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with suppress(UserError):  # a page header may be changed without consequence; a value may not
            assert [item.tree.to_dict() for item in read_trees(path)] == [
                grown(number).to_dict() for number in range(3)
            ]
    rows = pq.read_table(step_file(run, 1).with_name("step_000001 (copy).parquet")).to_pylist()
    rows[0]["segments"][1]["parent"] = 7
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(UserError, match="is not a file of trees"):
        read_trees(path)
    pq.write_table(pa.table({"task_id": ["a"]}), path)
    with pytest.raises(UserError, match="is not a file of trees"):
        read_summaries(path)


def negative_step(row: dict[str, Any]) -> None:
    row["begun_in_step"] = -1


def no_task(row: dict[str, Any]) -> None:
    row["task_id"] = None


def no_rewards(row: dict[str, Any]) -> None:
    row["rewards"] = None


def no_reward(row: dict[str, Any]) -> None:
    row["rewards"][0] = None


def too_many_replayed(row: dict[str, Any]) -> None:
    row["replayed"] = 3


def no_segment(row: dict[str, Any]) -> None:
    row["segments"][2] = None


def no_root(row: dict[str, Any]) -> None:
    row["segments"][0] = None


def no_rise(row: dict[str, Any]) -> None:
    branched(row)["branch"]["dH"] = None


def no_rule(row: dict[str, Any]) -> None:
    branched(row)["branch"]["why"] = None


def no_tool_name(row: dict[str, Any]) -> None:
    row["segments"][2]["tool"]["name"] = None


def a_decision_of_the_prompt(row: dict[str, Any]) -> None:
    row["segments"][0]["branch"] = branched(row)["branch"]


def branched(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(segment for segment in row["segments"] if segment["branch"])
    return found


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (negative_step, "begun in step -1"),
        (no_task, "task None"),
        (no_rewards, ""),
        (no_reward, ""),
        (too_many_replayed, "3 of 2 trajectories"),
        (no_segment, "segment 2 is null"),
        (no_root, "segment 0 is null"),
        (no_rise, "a BranchRecord without dH"),
        (no_rule, "a BranchRecord without why"),
        (no_tool_name, "a ToolRecord without name"),
        (a_decision_of_the_prompt, "segment 0 is a PROMPT, which has no branch"),
    ],
)
def test_damaged_row_is_named_in_one_line(
    run: RunDirectory, tamper: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = step_file(run, 1)
    write_trees(path, 1, [scored(grown(number)) for number in range(2)], decode)
    table = pq.read_table(path)
    rows = table.to_pylist()
    tamper(rows[1])
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(UserError, match=rf"step_000001\.parquet is not a file of trees: row 1 .*{message}") as logged:
        read_trees(path)
    assert "\n" not in str(logged.value)


def test_control_characters_are_escaped(
    run: RunDirectory, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.path.mkdir()
    save_config(replace(JobConfig(name="test"), model=ModelConfig(path=tiny_tokenizer)), run.config)
    tree = RolloutTree("[/x]\x1b[2J", [*range(300)], step=0, seconds=1.0)
    tree.add(0, Role.MODEL, [5], logprobs=[-1.0], finish=Finish.END)
    write_trees(step_file(run, 1), 1, [scored(tree)], lambda _ids: "\x1b]0;name\x07")
    show_trees(run, step=None, tree=None, count=1, svg=None)
    shown = capsys.readouterr().out
    assert "[/x]\\x1b[2J: 1 trajectories" in shown
    assert not [letter for letter in shown if ord(letter) < 32 and letter != "\n"]


def test_other_files_given_as_tree_files_are_one_line(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="no trees at"):
        read_trees(step_file(run, 1))
    with pytest.raises(UserError, match="holds no trees yet"):
        stored_steps(run)
    run.trees.mkdir(parents=True)
    step_file(run, 1).write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="is not a file of trees"):
        read_trees(step_file(run, 1))


def test_trees_command_lists_and_draws(
    run: RunDirectory, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.path.mkdir()
    save_config(replace(JobConfig(name="test"), model=ModelConfig(path=tiny_tokenizer)), run.config)
    for step in (1, 2):
        trees = [grown(number, results=number + 1) for number in range(3)]
        write_trees(step_file(run, step), step, [scored(tree) for tree in trees], decode)
    show_trees(run, step=None, tree=None, count=0, svg=None)
    listed = capsys.readouterr().out
    assert "steps 1 to 2" in listed
    for number, row in enumerate(read_summaries(step_file(run, 2))):
        (line,) = [line for line in listed.splitlines() if f"task-{number}" in line]
        for value in (number, 2, number + 1, row["forks"], f"{row['unique_tokens']}/{row['flat_tokens']}"):
            assert f" {value} " in line
    assert "trajectories" not in listed
    show_trees(run, step=1, tree=2, count=1, svg=None)
    assert "task-2: 3 trajectories" in capsys.readouterr().out
    show_trees(run, step=1, tree=2, count=1, svg=run.path / "tree.svg")
    assert "<svg" in (run.path / "tree.svg").read_text()
    with pytest.raises(UserError, match="no tree 3"):
        show_trees(run, step=1, tree=3, count=1, svg=None)


def test_dropped_trees_are_stored_and_shown_with_the_reason(
    run: RunDirectory, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.path.mkdir()
    save_config(replace(JobConfig(name="test"), model=ModelConfig(path=tiny_tokenizer)), run.config)
    kept, level = scored(grown(0)), replace(scored(grown(1)), dropped="no_signal")
    cut = ScoredTree.incomplete(scored(grown(2)).task, grown(2), "failed")
    write_trees(step_file(run, 1), 1, [kept, level, cut], decode)
    assert pl.read_parquet(step_file(run, 1))["dropped"].to_list() == [None, "no_signal", "failed"]
    stored = read_trees(step_file(run, 1))
    assert [(item.dropped, item.complete) for item in stored] == [
        (None, True),
        ("no_signal", True),
        ("failed", False),
    ]
    assert stored[2].tree.to_dict() == grown(2).to_dict()
    assert [item.dropped for item in rank_for_display(stored)] == [None, "no_signal"]
    show_trees(run, step=None, tree=None, count=3, svg=None)
    listed = capsys.readouterr().out
    assert [reason in listed for reason in ("no_signal", "failed")] == [True, True]
    show_trees(run, step=None, tree=2, count=1, svg=None)
    assert "task-2" in capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a byte-level tokenizer."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(sorted(alphabet))}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
