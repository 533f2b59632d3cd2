"""Stored decisions follow from tree, entropies and seed for each policy; changes are found."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from arpo_megatron.algorithms.branching import BranchPolicy, make_branch_policy
from arpo_megatron.algorithms.branching.random_forks import at_rate
from arpo_megatron.cli.main import app
from arpo_megatron.config import AlgorithmConfig, JobConfig, ModelConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import step_file, write_trees
from arpo_megatron.rewards.scored_tree import ScoredTree
from arpo_megatron.rollout.replay_decisions import DecisionMismatchError, replay_decisions
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import Role, RolloutTree
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, SEED, any_of, fork_points, grow, planned

Grown = tuple[RolloutTree, BranchPolicy]
VOCABULARY = 50
POLICIES: dict[str, dict[str, Any]] = {
    "arpo": {},
    "arpo with a threshold": {"threshold": 0.45},
    "arpo with a wide beam": {"beam_size": 4, "initial_rollouts": 2},
    "arpo from one trajectory": {"initial_rollouts": 1},
    "arpo that never forks": {"branch_probability": 0.0, "entropy_weight": 0.0},
    "arpo without a beam": {"beam_size": 1},
    "arpo_released": {"entropy_weight": 2.0},
    "random": {},
    "grpo": {},
    "aepo": {"branch_probability": 0.8, "params": {"streak_penalty": 0.4}},
    "aepo that begins with few": {"params": {"probe_slope": 50.0}},
    "aepo_released": {"entropy_weight": 2.0},
    "aepo_scripts": {"entropy_weight": 2.0, "branch_probability": 0.8},
}


def config(name: str) -> AlgorithmConfig:
    fields: dict[str, Any] = {
        "branching": name.split(maxsplit=1)[0],
        "group_size": 12,
        "initial_rollouts": 4,
        "entropy_tokens": 6,
    }
    return AlgorithmConfig(**fields | POLICIES[name])


def grown_by(policy: BranchPolicy, start: Callable[[ScriptedEngine], ScriptedEngine], sandbox_url: str) -> Grown:
    engine = start(ScriptedEngine(planned(""), seeded=any_of))
    return grow(engine.url, sandbox_url, policy, slow_tools=random.Random(1))[0], policy


@pytest.mark.parametrize("name", POLICIES)
def test_replay_derives_every_decision(
    scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], sandbox_url: str, name: str
) -> None:
    policy = make_branch_policy(config(name), vocabulary_size=VOCABULARY, seed=SEED)
    tree, _ = grown_by(policy, scripted_engine, sandbox_url)
    stored = RolloutTree.from_dict(json.loads(json.dumps(tree.to_dict())))
    assert replay_decisions(stored, policy) == sum(segment.branch is not None for segment in tree.segments)
    if name == "grpo" or "never" in name or "without" in name:
        assert max(fork_points(tree)) == 1
        return
    assert max(fork_points(tree)) > 1
    with pytest.raises(DecisionMismatchError, match="draw"):
        replay_decisions(stored, make_branch_policy(config(name), vocabulary_size=VOCABULARY, seed=SEED + 1))


@pytest.fixture
def tree(scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], sandbox_url: str) -> Iterator[RolloutTree]:
    yield grown_by(POLICY, scripted_engine, sandbox_url)[0]


POLICY = make_branch_policy(config("arpo"), vocabulary_size=VOCABULARY, seed=SEED)


def decided(data: dict[str, Any], *, forked: bool = False) -> int:
    """Return a segment with a decision; with `forked`, one that forked."""
    segments = data["segments"]
    parents = [segment["parent"] for segment in segments]
    return next(
        index
        for index, segment in enumerate(segments)
        if "branch" in segment and (not forked or parents.count(segment["parent"]) > 1)
    )


def another_draw(data: dict[str, Any]) -> None:
    data["segments"][decided(data)]["branch"]["draw"] += 1e-12


def another_rise(data: dict[str, Any]) -> None:
    data["segments"][decided(data)]["branch"]["dH"] += 1e-6


def another_probability(data: dict[str, Any]) -> None:
    data["segments"][decided(data)]["branch"]["probability"] += 1e-6


def another_rule(data: dict[str, Any]) -> None:
    data["segments"][decided(data)]["branch"]["why"] = "threshold"


def another_entropy(data: dict[str, Any]) -> None:
    entropies = data["segments"][decided(data)]["entropies"]
    entropies[0] = float(np.nextafter(np.float32(entropies[0]), np.float32(9))) + 1e-3


def another_start(data: dict[str, Any]) -> None:
    data["segments"][1]["entropies"][2] += 0.5


def no_decision(data: dict[str, Any]) -> None:
    del data["segments"][decided(data)]["branch"]


def forged(data: dict[str, Any], at: int) -> None:
    data["segments"][at]["branch"] = dict(data["segments"][decided(data)]["branch"])


def a_decision_at_the_beginning(data: dict[str, Any]) -> None:
    forged(data, 1)


def a_decision_of_a_sibling(data: dict[str, Any]) -> None:
    parent = data["segments"][decided(data, forked=True)]["parent"]
    forged(data, max(index for index, segment in enumerate(data["segments"]) if segment["parent"] == parent))


def a_decision_of_a_fresh_trajectory(data: dict[str, Any]) -> None:
    forged(data, max(index for index, segment in enumerate(data["segments"]) if segment["parent"] == 0))


def a_decision_of_a_continuation(data: dict[str, Any]) -> None:
    """Newer weights continue the first answer."""
    last = next(index for index, segment in enumerate(data["segments"]) if segment.get("finish") == "end")
    newer = {"parent": last, "role": "model", "token_ids": [3], "entropies": [0.5], "policy_version": 1}
    data["segments"].append(newer)
    forged(data, len(data["segments"]) - 1)


def two_continuations(data: dict[str, Any]) -> None:
    a_decision_of_a_continuation(data)
    del data["segments"][-1]["branch"]
    data["segments"].append(data["segments"][-1])


def one_sibling_more(data: dict[str, Any]) -> None:
    sampled = {**data["segments"][decided(data)]}
    sampled.pop("branch")
    data["segments"].append(sampled)


def one_sibling_less(data: dict[str, Any]) -> None:
    """Turn the last child of the fork, with all below it, into a fresh trajectory."""
    parent = data["segments"][decided(data, forked=True)]["parent"]
    last = max(index for index, segment in enumerate(data["segments"]) if segment["parent"] == parent)
    data["segments"][last]["parent"] = 0


def one_trajectory_more(data: dict[str, Any]) -> None:
    data["segments"].append({"parent": 0, "role": "model", "token_ids": [3], "entropies": [0.5], "policy_version": 0})


def another_step(data: dict[str, Any]) -> None:
    data["step"] += 1


def another_task(data: dict[str, Any]) -> None:
    data["task_id"] += "x"


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (another_draw, "draw"),
        (another_rise, "dH"),
        (another_probability, "probability"),
        (another_rule, "why"),
        (another_entropy, "dH"),
        (another_start, "dH"),
        (no_decision, "decision None"),
        (a_decision_at_the_beginning, "segment 1: stored decision BranchRecord.*derived None"),
        (a_decision_of_a_sibling, "decision BranchRecord.*derived None"),
        (a_decision_of_a_fresh_trajectory, "decision BranchRecord.*derived None"),
        (a_decision_of_a_continuation, "decision BranchRecord.*derived None"),
        (two_continuations, "2 continuations, expected one"),
        (one_sibling_more, "forks are stored"),
        (one_sibling_less, "forks are stored|decision|trajectories"),
        (one_trajectory_more, "trajectories start here"),
        (another_step, "draw"),
        (another_task, "draw"),
    ],
)
def test_replay_finds_a_changed_tree(tree: RolloutTree, tamper: Callable[[dict[str, Any]], None], found: str) -> None:
    data = tree.to_dict()
    assert replay_decisions(RolloutTree.from_dict(data), POLICY) > 0
    tamper(data)
    with pytest.raises(DecisionMismatchError, match=found):
        replay_decisions(RolloutTree.from_dict(data), POLICY)


@pytest.mark.parametrize("name", ["branch", "entropies", "finish", "tool", "colour"])
def test_prompt_with_fields_of_sampled_segments_is_refused(tree: RolloutTree, name: str) -> None:
    data = tree.to_dict()
    data["segments"][0][name] = next((segment[name] for segment in data["segments"] if name in segment), "red")
    with pytest.raises(ValueError, match=f"segment 0 is a PROMPT, which has no {name}"):
        RolloutTree.from_dict(data)


def test_replay_treats_continuations_as_one_segment(tree: RolloutTree) -> None:
    """Cutting every MODEL segment in two, as pushes do, changes no decision."""
    pieces, moved = RolloutTree(tree.task_id, tree.prompt_ids, step=tree.step), {0: 0}
    for index, segment in enumerate(tree.segments[1:], start=1):
        parent, ids, half = moved[segment.parent], segment.token_ids, len(segment) // 2
        if segment.role is Role.TOOL or not half:
            moved[index] = pieces.add(parent, segment.role, ids, entropies=segment.entropies, branch=segment.branch)
            continue
        assert segment.entropies is not None
        first = pieces.add(
            parent, Role.MODEL, ids[:half], entropies=segment.entropies[:half], branch=segment.branch, policy_version=1
        )
        moved[index] = pieces.add(first, Role.MODEL, ids[half:], entropies=segment.entropies[half:], policy_version=2)
    assert len(pieces.segments) > len(tree.segments)
    assert replay_decisions(pieces, POLICY) == replay_decisions(tree, POLICY)


def test_replay_tree_on_the_command_line(tree: RolloutTree, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    words = {f"word{number}": number for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(tokenizer / "tokenizer.json"))
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    job = JobConfig(name="test", seed=SEED, algorithm=config("arpo"), model=ModelConfig(path=tokenizer))
    save_config(job, run.config)
    data = tree.to_dict()
    another_draw(data)
    path = step_file(run, 1)
    scored = ScoredTree(Task("task-1", (), "4", "math", ""), tree, np.ones(12), np.ones(12), np.ones(12, bool))
    write_trees(path, 1, [scored, scored], CODEC.decode)

    def replay(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["replay-tree", *options])
        return done.exit_code, done.output

    code, output = replay(str(path))
    assert (code, "2 trees" in output, "all follow" in output) == (0, True, True)
    write_trees(path, 1, [scored, ScoredTree.incomplete(scored.task, tree, "failed")], CODEC.decode)
    code, output = replay(str(path))
    assert (code, "1 trees, " in output, "1 trees were dropped" in output) == (0, True, True)
    write_trees(path, 1, [scored, replace(scored, tree=RolloutTree.from_dict(data))], CODEC.decode)
    code, output = replay(str(path))
    assert code == 1
    assert output.startswith("tree 1 (task-1): segment ")
    assert replay(str(path), "--tree", "0")[0] == 0
    assert replay(str(path), "--tree", "1")[0] == 1
    elsewhere = tmp_path / "elsewhere.parquet"
    elsewhere.write_bytes(path.read_bytes())
    assert replay(str(elsewhere), "--tree", "0", "--config", str(run.config))[0] == 0
    code = CliRunner().invoke(app, ["replay-tree", str(elsewhere)]).exception
    assert "give the run's config" in str(code)
    for rewards, dropped in (([], None), ([1.0], None), ([1.0], "failed")):
        unrewarded = replace(scored, rewards=np.array(rewards), dropped=dropped)
        write_trees(path, 1, [scored, unrewarded], CODEC.decode)
        code, output = replay(str(path))
        assert (code, output.splitlines()[0]) == (1, f"tree 1 (task-1): {len(rewards)} rewards for 12 trajectories")


def test_replay_tree_reads_a_matched_fork_rate_from_the_tree(
    scripted_engine: Callable[[ScriptedEngine], ScriptedEngine], sandbox_url: str, tmp_path: Path
) -> None:
    random_arm = config("random")
    policy = make_branch_policy(at_rate(random_arm, 0.8), vocabulary_size=VOCABULARY, seed=SEED)
    tree, _ = grown_by(policy, scripted_engine, sandbox_url)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    words = {f"word{number}": number for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(tokenizer / "tokenizer.json"))
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    save_config(JobConfig("test", seed=SEED, algorithm=random_arm, model=ModelConfig(path=tokenizer)), run.config)
    path = step_file(run, 1)
    scored = ScoredTree(Task("task-1", (), "4", "math", ""), tree, np.ones(12), np.ones(12), np.ones(12, bool))
    write_trees(path, 1, [scored], CODEC.decode)
    done = CliRunner().invoke(app, ["replay-tree", str(path)])
    assert (done.exit_code, "all follow" in done.output) == (0, True), done.output
