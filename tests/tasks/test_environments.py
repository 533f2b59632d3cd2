"""The own environments: a database with snapshots, and a user who follows a script."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.base import Step, can_fork
from arpo_megatron.tasks.environments.build import environment_maker, environment_prompt, fork_note
from arpo_megatron.tasks.environments.scripted_user import ScriptedUser
from arpo_megatron.tasks.environments.sql import SqlDatabase
from arpo_megatron.testing import play

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "environments.md"
SCRIPT = "CREATE TABLE towns (name TEXT, people INTEGER); INSERT INTO towns VALUES ('Aa', 3), ('Bb', 5);"
TASK = Task("t", ({"role": "user", "content": "How many people?"},), "8", "qa", "")


def database(**params: object) -> SqlDatabase:
    made = SqlDatabase(SCRIPT, **params)  # type: ignore[arg-type]
    made.reset(TASK)
    return made


def sql(statement: str) -> str:
    return f"I look. <sql>{statement}</sql>"


def test_statements_return_rows_or_errors_and_the_answer_ends_the_task() -> None:
    world = database(error_penalty=-0.1, max_rows=1)
    messages = world.reset(TASK)
    assert "CREATE TABLE towns" in messages[0]["content"] and messages[1]["content"] == "How many people?"
    assert world.step(sql("SELECT sum(people), 'x' FROM towns")) == Step("8 | x")
    assert world.step(sql("SELECT name FROM towns")).observation == "Aa\n(the first 1 rows)"
    assert world.step(sql("UPDATE towns SET people = 0")).observation == "no rows; 2 rows changed"
    for action in (sql("SELECT * FROM nowhere"), "no statement", sql("SELECT 1; SELECT 2"), sql("PRAGMA user_version")):
        found = world.step(action)
        assert found.observation.startswith("Error: ") and found.rewards == {"error": -0.1} and not found.done
    assert world.step("<answer> 8 </answer>") == Step("", done=True, rewards={"correct": 1.0})
    assert world.step("<answer>9</answer>").rewards == {"correct": 0.0}
    world.reset(replace(TASK, aliases=("Eight",)))
    assert world.step("<answer>eight</answer>").rewards == {"correct": 1.0}


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH DATABASE '{}/other.db' AS other",
        "VACUUM INTO '{}/copy.db'",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
        "SELECT hex(zeroblob(100000000))",
        "CREATE TEMP TABLE big AS SELECT 1",
        "SAVEPOINT s",
        "SELECT last_insert_rowid()",
    ],
)
def test_statement_reaches_no_file_and_ends(statement: str, tmp_path: Path) -> None:
    assert database().step(sql(statement.format(tmp_path))).observation.startswith("Error: ")
    assert list(tmp_path.iterdir()) == []


def test_snapshot_of_a_database_restores_its_state() -> None:
    first, second = database(), database()
    first.step(sql("INSERT INTO towns VALUES ('Cc', random())"))
    state = first.snapshot()
    second.restore(state)
    assert second.snapshot() == state
    query = sql("SELECT * FROM towns")
    assert second.step(query) == first.step(query)
    second.step(sql("DELETE FROM towns"))
    assert first.snapshot() == state
    assert second.step(sql("ATTACH ':memory:' AS other")).observation.startswith("Error: ")


def test_scripted_user_gives_each_answer_once() -> None:
    user = ScriptedUser({"colour": "Red.", "size": "Large."}, turn_penalty=-0.2)
    assert user.reset(TASK)[1]["content"] == "How many people?"
    asked = ("Which COLOUR?", "Which colour or size?", "Which size?")
    assert [user.step(each).observation for each in asked] == ["Red.", "Large.", "I do not know."]
    assert user.step("Hm.").rewards == {"turns": -0.2}
    assert user.step("<answer>8</answer>") == Step("", done=True, rewards={"correct": 1.0})


def test_environment_is_made_by_name_and_begins_the_conversation() -> None:
    make = environment_maker("sql", {"script": SCRIPT})
    assert can_fork(make()) and fork_note("sql", make) is None
    task = environment_prompt(make, None)(TASK)
    assert "CREATE TABLE towns" in task.prompt_text and task.prompt_text.endswith("<|im_start|>assistant\n")
    with pytest.raises(UserError, match="environment sql has no 'scirpt'; did you mean script"):
        environment_maker("sql", {"scirpt": ""})
    with pytest.raises(UserError, match="environment sql: script: "):
        environment_maker("sql", {"script": "CREATE towns"})
    with pytest.raises(UserError, match="unknown environment 'slq'; did you mean sql"):
        environment_maker("slq", {})


BROKEN = """
from dataclasses import dataclass

@dataclass
class Broken:
    replayable: bool = True
    closes: bool = True

    def reset(self, task):
        raise RuntimeError("no database")

    def step(self, action): ...

    def close(self):
        assert self.closes

@dataclass
class Half:
    replayable: bool = True

@dataclass
class Snapshotted:
    def reset(self, task): ...
    def step(self, action): ...
    def close(self): ...
    def snapshot(self): ...
    def restore(self, state): ...
"""


def test_environment_that_does_not_work_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BROKEN)
    begin = environment_prompt(environment_maker(f"{path}:Broken", {}), None)
    with pytest.raises(UserError, match=r"environment Broken cannot begin with task t: RuntimeError\('no database'\)"):
        begin(TASK)
    with pytest.raises(UserError, match=r"close\(\) failed: AssertionError"):
        environment_maker(f"{path}:Broken", {"closes": False})
    with pytest.raises(UserError, match="has no reset, step, close"):
        environment_maker(f"{path}:Half", {})


def test_environment_with_snapshots_needs_no_replayable(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BROKEN)
    assert can_fork(environment_maker(f"{path}:Snapshotted", {})())


def test_listing_of_the_page_is_an_environment() -> None:
    (listing,) = re.findall(r"```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(listing, names)
    steps = play(names["HigherOrLower"], "Guess.", "8", ["9", "so", "3", " 8 ", "9"])
    assert [step.observation for step in steps] == ["lower", "higher", "higher", ""]
    assert steps[-1].done and steps[-1].rewards == {"correct": 1.0}


def test_played_actions_are_checked_in_copies() -> None:
    actions = [sql("INSERT INTO towns VALUES ('Cc', random())"), sql("SELECT sum(people) FROM towns WHERE name < 'C'")]
    assert play(lambda: SqlDatabase(SCRIPT), "?", "8", actions)[1].observation == "8"
    with pytest.raises(AssertionError, match="in a copy"):
        play(lambda: SqlDatabase(SCRIPT), "?", "8", [sql("SELECT random()")])
    with pytest.raises(AssertionError, match="neither snapshots nor replay"):
        play(lambda: ScriptedUser(replayable=False), "?", "8", [])
