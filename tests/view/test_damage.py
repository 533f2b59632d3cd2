"""Damaged files of a run: what can be read is shown, the rest is left out, counted and named on the page."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from arpo_megatron.cli.main import app
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog, EventReader
from arpo_megatron.monitor.tree_store import step_file
from arpo_megatron.view.export import write_html
from arpo_megatron.view.pages import Pages
from arpo_megatron.view.server import application
from tests.view.stored_run import STEPS, make_run

EVENT = {"time": 1.7e9, "kind": "note", "text": "a note"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def run(whole: RunDirectory, tmp_path: Path) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(whole.path, tmp_path / "run")))


def get(run: RunDirectory, address: str = "run") -> Any:
    """Return an answer of the server, which raises what it does not turn into an answer."""
    with TestClient(application(Pages({"run": run}), None, "127.0.0.1"), base_url="http://127.0.0.1:8750") as client:
        answer = client.get(f"/data/{address}")
        assert answer.status_code == 200, answer.text
        return answer.json()


def append(path: Path, *lines: object) -> None:
    with path.open("ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode())
            file.write(b"\n")


def test_damaged_rows_of_metrics_are_left_out_and_counted(run: RunDirectory) -> None:
    append(
        run.path / "metrics.jsonl",
        *(b'{"step": 5, "rew', b"\xff\xfe", b"[" * 100_000, [], {"reward": 1.0}, {"step": "5"}, {"step": None}),
        *({"step": 5, "reward": "high"}, {"step": 5, "reward": [1]}, {"step": 5, "seconds/update": {}}),
        *(b'{"step": 5, "reward": 1e999}', {"step": 5, "reward": 10**400}),
    )
    page = get(run)
    assert page["step"] == STEPS and len(page["metrics"]["reward"]) == STEPS
    (damage,) = page["damaged"]
    assert (damage["file"], damage["rows"], damage["reason"]) == ("metrics.jsonl", 12, "line 5: no JSON object")


def test_damaged_events_are_left_out_and_counted(run: RunDirectory) -> None:
    reader = EventReader(run.events)
    append(
        run.events,
        *(b"{", {"kind": "note"}, EVENT | {"time": "now"}, EVENT | {"time": 1e300}, EVENT | {"kind": 3}),
        *({**EVENT, "text": None}, {"time": 1.7e9, "kind": "phase"}, {"time": 1.7e9, "kind": "step", "step": "x"}),
        *({"time": 1.7e9, "kind": "evaluation", "when": "after", "success": "all"}, {**EVENT, "kind": "restart"}),
        EVENT,
    )
    page = get(run)
    assert page["last_event"]["text"] == "a note"
    (damage,) = page["damaged"]
    assert (damage["file"], damage["rows"]) == ("events.jsonl", 10)
    assert reader.new()[-1] == EVENT, "a terminal that follows the file shows the rest, too"
    shown = CliRunner().invoke(app, ["logs", str(run.path)])
    assert shown.exit_code == 0 and "a note" in shown.output
    shown = CliRunner().invoke(app, ["status", str(run.path)])
    assert shown.exit_code == 0 and "events.jsonl: 10 rows are left out; the first is line" in shown.output


def test_status_has_dashes_for_values_that_the_config_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("algorithm: {samples: 4}\n")  # a key of an earlier version
    shown = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert shown.exit_code == 0 and "  -, -, seed -; held-out success -" in shown.output


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "train: ["),
        ("config.yaml", "train:\n  steps: .nan\n"),
        ("config.yaml", "train: &a\n  steps: *a\n"),
        ("result.json", '{"step": null}'),
        ("inputs.json", '{"model": 3}'),
        ("held_out/step_000009.json", '{"step": 9, "success": NaN}'),
        ("held_out/step_000009.json", '{"step": 9, "success": 1, "tool_calls": {"ok": "x"}}'),
        ("trees/step_000004.parquet", "PAR1"),
    ],
)
def test_damaged_file_is_named_and_the_others_are_shown(run: RunDirectory, name: str, content: str) -> None:
    (run.path / name).write_text(content)
    page = get(run)
    assert page["metrics"]["step"] == [1, 2, 3, 4]
    (damage,) = page["damaged"]
    assert damage["file"] == name and "\n" not in damage["reason"]


def test_value_that_is_no_number_is_no_damage(run: RunDirectory) -> None:
    """A step without a measured fork has no `fork_chance`."""
    EventLog(run.events).emit("step", step=5, fork_chance=math.nan)
    assert b"NaN" not in run.events.read_bytes()
    append(run.events, b'{"time": 1.7e9, "kind": "step", "step": 6, "fork_chance": NaN}')
    append(run.path / "metrics.jsonl", b'{"step": 5, "fork_chance": Infinity}')
    page = get(run)
    assert page["damaged"] == [] and page["metrics"]["fork_chance"][-1] is None


def test_file_without_damage_is_not_named(run: RunDirectory) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # as a reader may find it while it is written
    assert get(run)["damaged"] == []


def edit(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


@pytest.mark.parametrize("column", ["task_id", "leaves", "rewards", "forks", "segments", "grow_seconds"])
def test_damaged_tree_is_listed_as_such(run: RunDirectory, column: str, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[1][column] = None

    edit(step_file(run, STEPS), change)
    rows = get(run, f"run/trees/{STEPS}")
    assert [row["number"] for row in rows if "damaged" not in row] == [0, 2]
    assert rows[1] == {"number": 1, "damaged": f"{column} is null"}
    (damage,) = get(run)["damaged"]
    assert damage == {"file": f"trees/step_{STEPS:06d}.parquet", "rows": 1, "reason": f"row 1: {column} is null"}
    assert {each["step"] for each in get(run, "run/task/sum-1")} == {"1", "2", "3", "4"}
    assert write_html(Pages({"run": run}), tmp_path / "page.html", trees=20) > 0


def set_leaves(row: dict[str, Any]) -> None:
    row["leaves"] = [0, 99, 7]


def set_parent(row: dict[str, Any]) -> None:
    row["segments"][1]["parent"] = 40


def set_logprobs(row: dict[str, Any]) -> None:
    row["segments"][1]["trainer_logprobs"] = [0.5]


def set_text(row: dict[str, Any]) -> None:
    row["segments"][1]["text"] = None


def set_terms(row: dict[str, Any]) -> None:
    row["terms"][0]["values"] = None


@pytest.mark.parametrize("damage", [set_leaves, set_parent, set_logprobs, set_text, set_terms])
def test_tree_that_cannot_be_drawn_is_one_line(
    run: RunDirectory, damage: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    edit(step_file(run, 1), lambda rows: damage(rows[0]))
    with TestClient(application(Pages({"run": run}), None, "127.0.0.1"), base_url="http://127.0.0.1:8750") as client:
        answer = client.get("/data/run/trees/1/0")
    assert answer.status_code == 404
    assert "row 0" in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert write_html(Pages({"run": run}), tmp_path / "page.html", trees=20) > 0


def test_column_of_another_type_is_one_line(run: RunDirectory, tmp_path: Path) -> None:
    path = step_file(run, 1)
    table = pq.read_table(path)
    place = table.schema.get_field_index("rewards")
    texts = pa.array([["high"]] * table.num_rows, pa.list_(pa.string()))
    pq.write_table(table.set_column(place, "rewards", texts), path)
    with TestClient(application(Pages({"run": run}), None, "127.0.0.1"), base_url="http://127.0.0.1:8750") as client:
        answer = client.get("/data/run/trees/1")
    assert answer.status_code == 404 and "rewards" in answer.json()["error"]
    assert get(run, "run/task/sum-1")[0]["step"] == "2"
    assert write_html(Pages({"run": run}), tmp_path / "page.html", trees=20) > 0
