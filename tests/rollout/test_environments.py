"""Trees grow in environments: each trajectory is one that a fresh environment would have given, and is trained so."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from arpo_megatron.algorithms.advantages.rloo import LeaveOneOut
from arpo_megatron.algorithms.base import Group, LossBatch
from arpo_megatron.algorithms.branching import BranchPolicy
from arpo_megatron.algorithms.credit import TreeShape, leaf_weights
from arpo_megatron.algorithms.losses.ppo import Ppo
from arpo_megatron.engine.client import EngineClient
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rewards.base import group_of
from arpo_megatron.rewards.environment import EnvironmentReward
from arpo_megatron.rollout.context import RolloutContext
from arpo_megatron.rollout.environments import EnvironmentStateError, TreeEnvironments
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.messages import CollectTrees, LiveTree, RolloutSettings, StartTrees
from arpo_megatron.rollout.pool import TreePool
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.base import MakeEnvironment, Step
from arpo_megatron.tasks.environments.protocol import EnvironmentProtocol
from arpo_megatron.tasks.environments.scripted_user import ScriptedUser
from arpo_megatron.tasks.environments.sql import SqlDatabase
from arpo_megatron.tasks.protocols.base import ResultFrame
from arpo_megatron.tree import Finish, Role, RolloutTree
from tests.algorithms import flat
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import CODEC, LIMITS, PROMPT, SEED, arpo
from tests.tools_sandbox.helpers.services import wait_until

Start = Callable[[ScriptedEngine], ScriptedEngine]
NOWHERE = "http://127.0.0.1:9"
SCRIPT = "CREATE TABLE t (x INTEGER); INSERT INTO t VALUES (1);"
STATEMENTS = (
    *("INSERT INTO t VALUES ({})", "SELECT sum(x) FROM t", "UPDATE t SET x = x + {}", "SELECT y FROM t"),
    # State of the connection, which a snapshot of the database would not have.
    *("CREATE TEMP TABLE u AS SELECT {} AS y", "SELECT y FROM u", "SAVEPOINT s", "ROLLBACK TO s"),
    *("SELECT last_insert_rowid()", "SELECT total_changes()", "SELECT changes()"),
)
QUESTIONS = ("Which colour?", "Which size?", "And the colour and the size?", "Well, {}?")
SQL = "sql", lambda: SqlDatabase(SCRIPT, error_penalty=-0.25)
USER = "user", lambda: ScriptedUser({"colour": "Red.", "size": "Large."}, turn_penalty=-0.125)
TASK = Task("task-1", ({"role": "user", "content": PROMPT},), "3", "qa", PROMPT)


class Framed(EnvironmentProtocol):
    """The protocol with a frame of its own, since the tokens of these tests are characters."""

    def result_frame(self) -> ResultFrame:
        return ResultFrame("[user]", "[/user]assistant\n")


SETTINGS = replace(LIMITS, protocol=Framed(), max_tool_calls=5, max_response_tokens=2000, max_length=2500)


def policy_of(kind: str) -> Callable[[str, int], str]:
    """Return a seeded engine: one to four actions, then an answer, which is right at times."""

    def follow(text: str, seed: int) -> str:
        *answered, current = text.removeprefix(PROMPT).split("assistant\n")
        drawn = random.Random(f"{seed}/{len(answered)}")
        if len(answered) > drawn.randrange(1, 4):
            part = f"<answer>{drawn.randrange(2, 4)}</answer>"
        else:
            action = drawn.choice(STATEMENTS if kind == "sql" else QUESTIONS).format(drawn.randrange(9))
            part = f"<sql>{action}</sql>" if kind == "sql" else action
        return part[len(current) :] if part.startswith(current) else f" {drawn.randrange(9)}"

    return follow


def grow(
    url: str,
    policy: BranchPolicy,
    make: MakeEnvironment,
    *,
    entries: Sequence[bytes] = (),
    record: Callable[[bytes], None] = lambda _entry: None,
) -> RolloutTree:
    async def run() -> RolloutTree:
        async with EngineClient(url, retry_for_s=5.0) as engine, ToolClient(NOWHERE, retry_for_s=0.1) as tools:
            context = RolloutContext(
                engine,
                tools,
                CODEC,
                policy,
                Sampling(),
                SETTINGS,
                SEED,
                3,
                lambda _tokens: None,
                environments=TreeEnvironments(make, TASK, 20.0),
            )
            prompt = np.array(CODEC.encode(PROMPT), np.int32)
            return await TreeGrower("task-1", prompt, context, entries=entries, record=record).grow()

    return asyncio.run(run())


def forking() -> BranchPolicy:
    return arpo(8, 2, k=3, branch_probability=1.0, beam_size=3)


def replayed(tree: RolloutTree, leaf: int, make: MakeEnvironment) -> None:
    """Execute the actions of a trajectory in a fresh environment, and compare everything that follows them."""
    world, path = make(), tree.path(leaf)
    world.reset(TASK)
    text = ""
    for index, following in zip(path[1:], [*path[2:], None], strict=True):
        segment = tree.segments[index]
        if segment.role is Role.TOOL:
            text = ""
            continue
        text += CODEC.decode(segment.token_ids.tolist())
        if segment.rewards is None:
            assert following is None and segment.finish in (Finish.LENGTH, Finish.CALL_LIMIT)
            break
        step = world.step(text.rstrip("\0"))
        assert step.rewards == segment.rewards and step.done == (following is None)
        if following is not None:
            shown = CODEC.decode(tree.segments[following].token_ids.tolist())
            assert shown == f"[user]{step.observation}[/user]assistant\n"
    world.close()


@pytest.mark.parametrize(("kind", "make"), [SQL, USER])
def test_forked_trajectory_is_that_of_a_fresh_environment(
    scripted_engine: Start, kind: str, make: MakeEnvironment
) -> None:
    engine = scripted_engine(ScriptedEngine(lambda _text: "", seeded=policy_of(kind)))
    entries: list[bytes] = []
    tree = grow(engine.url, forking(), make, record=entries.append)
    assert tree.forks >= 3 and len(tree.leaves()) == 8
    for leaf in tree.leaves():
        replayed(tree, leaf, make)
    part = grow(engine.url, forking(), make, entries=entries[: len(entries) // 2])
    unlike = {"tool": None, "ended_s": None}
    segments = [[each | unlike for each in found.to_dict()["segments"]] for found in (tree, part)]
    assert segments[0] == segments[1], "a resumed tree rebuilds the states from its record"
    assert RolloutTree.from_dict(tree.to_dict()).to_dict() == tree.to_dict()


def test_resumed_tree_fails_if_its_actions_lead_to_another_state(scripted_engine: Start) -> None:
    """The observation of such a statement is the same each time."""

    def follow(text: str, seed: int) -> str:
        said, random = policy_of("sql")(text, seed), "INSERT INTO t SELECT random() % "
        return said.replace("UPDATE t SET x = x +", random).replace("INSERT INTO t VALUES ", random)

    engine = scripted_engine(ScriptedEngine(lambda _text: "", seeded=follow))
    entries: list[bytes] = []
    grow(engine.url, forking(), SQL[1], record=entries.append)
    with pytest.raises(EnvironmentStateError, match="another state when its actions are replayed"):
        for kept in range(1, len(entries)):
            grow(engine.url, forking(), SQL[1], entries=entries[:kept])


def test_database_of_statements_is_bounded() -> None:
    world = SqlDatabase(SCRIPT)
    world.reset(TASK)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000)"
    statement = f"<sql>CREATE TABLE b AS {numbers} SELECT zeroblob(90000) FROM n</sql>"
    assert world.step(statement).observation == "Error: database or disk is full"
    world.restore(world.snapshot())
    assert world.step(statement).observation == "Error: database or disk is full"
    world.close()


@pytest.mark.parametrize(("kind", "make"), [SQL, USER])
def test_tree_gradient_is_that_of_the_flattened_trajectories(
    scripted_engine: Start, kind: str, make: MakeEnvironment
) -> None:
    engine = scripted_engine(ScriptedEngine(lambda _text: "", seeded=policy_of(kind)))
    tree = grow(engine.url, forking(), make)
    scores = EnvironmentReward().score_group(group_of(tree, TASK, CODEC.decode))
    rewards = np.array([score.reward for score in scores])
    assert rewards.std() > 0.1 and tree.unique_tokens < tree.flat_tokens
    advantages = LeaveOneOut()([Group(tree, rewards, rewards.clip(0, 1))])
    shape, rng = TreeShape(tree), np.random.default_rng(0)
    model = shape.spread(shape.is_model.astype(float)) > 0
    old = np.where(model, rng.normal(-1, 0.3, len(model)), np.nan)
    new, entropies = old + rng.normal(0, 0.5, len(old)), np.where(model, 1.0, np.nan)
    factors = [np.ones(len(shape.leaves))]
    weights = leaf_weights([shape], "token-mean", factors)
    batch = LossBatch([tree], advantages, weights, factors, [old], [new], [old], [entropies])
    parameters = [torch.from_numpy(np.nan_to_num(new)).requires_grad_()]
    case = flat.Case(batch, "token-mean", parameters, [torch.from_numpy(np.nan_to_num(entropies))])

    def ppo(_new: Any, ratio: Any, _entropy: Any, advantage: float) -> Any:
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return torch.maximum(clipped, torch.full_like(ratio, 3.0 * advantage)) if advantage < 0 else clipped

    flat.assert_same(case, Ppo(0.2, 0.2, 3.0), flat.flat_loss(case, ppo))


class Forgetful(SqlDatabase):
    """Loses what it restores."""

    def restore(self, state: bytes) -> None:
        assert self._database is not None
        self._database.execute("INSERT INTO t VALUES (99)")


class Moody(ScriptedUser):
    """Gives every object of the class other replies."""

    moods = iter(range(1000))

    def reset(self, task: Task) -> Any:
        self.otherwise = f"Mood {next(Moody.moods)}"
        return super().reset(task)


@pytest.mark.parametrize(("kind", "make"), [("sql", lambda: Forgetful(SCRIPT)), ("user", Moody)])
def test_state_that_differs_after_a_fork_fails_the_tree(
    scripted_engine: Start, kind: str, make: MakeEnvironment
) -> None:
    engine = scripted_engine(ScriptedEngine(lambda _text: "", seeded=policy_of(kind)))
    with pytest.raises(EnvironmentStateError, match="another"):
        grow(engine.url, forking(), make)


class Broken(ScriptedUser):
    """Raises an error at its second action."""

    closed: ClassVar[list[int]] = []

    def step(self, action: str) -> Step:
        if self.otherwise == "again":
            raise RuntimeError("out of order")
        self.otherwise = "again"
        return super().step(action)

    def close(self) -> None:
        Broken.closed.append(id(self))


def test_environment_that_fails_is_closed(scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(lambda _text: "", seeded=policy_of("user")))
    Broken.closed.clear()
    with pytest.raises(RuntimeError, match="out of order"):
        grow(engine.url, forking(), Broken)
    wait_until(lambda: bool(Broken.closed))


class Unbounded(ScriptedUser):
    """Gives no number as a reward."""

    def step(self, action: str) -> Step:
        return replace(super().step(action), rewards={"part": float("nan")})


def test_reward_that_is_no_number_fails_the_tree(scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(lambda _text: "", seeded=policy_of("user")))
    with pytest.raises(ValueError, match=r"not finite: \{'part': nan\}"):
        grow(engine.url, forking(), Unbounded)


class Empty(ScriptedUser):
    """Has a length of 0, so it is false as a condition."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [ScriptedUser, Empty])
def test_environment_that_can_be_neither_restored_nor_replayed_has_no_forks(
    scripted_engine: Start, kind: type[ScriptedUser]
) -> None:
    engine = scripted_engine(ScriptedEngine(lambda _text: "", seeded=policy_of("user")))

    def once() -> ScriptedUser:
        return kind({"colour": "Red."}, replayable=False)

    async def run() -> RolloutTree:
        async with EngineClient(engine.url, retry_for_s=5.0) as client, ToolClient(NOWHERE) as tools:
            pool = TreePool(
                client,
                tools,
                CODEC,
                SEED,
                lambda _settings: forking(),
                lambda _progress: None,
                lambda *_entry: None,
                protocol=SETTINGS.protocol,
                make_environment=once,
            )
            live = LiveTree(0, "training", TASK, 0, 0, RolloutSettings(None, 8, Sampling(), SETTINGS))
            await pool.start(StartTrees((live,), 0))
            report = await pool.collect(CollectTrees("training"))
            await pool.close()
            assert not report.failed
            return report.trees[0]

    tree = asyncio.run(run())
    assert tree.forks == 0 and len(tree.leaves()) == 8
