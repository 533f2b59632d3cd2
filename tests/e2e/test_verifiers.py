"""Environments of the published `verifiers` package in an interpreter of their own: their episodes, and a whole job."""

import json
import os
import random
import signal
import subprocess
import venv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from arpo_megatron.cli.doctor import check_job_tools
from arpo_megatron.jobs import resolve
from arpo_megatron.launch.preflight.check import run_checks
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.verifiers.environment import VerifiersEnvironment, worker_of
from arpo_megatron.tasks.environments.verifiers.process import VerifiersError
from arpo_megatron.tree import Role
from tests.e2e.chat_jobs import Turns, check_figures, prepare, texts_of
from tests.e2e.jobs import ARPO, quickstart, run_to_end, trained

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow_campaign]

SYSTEM, FIRST = "One number a turn.", "Guess my number."
TOWNS = '<tool_call>\n{"name": "people", "arguments": {"town": "Arl"}}\n</tool_call>'


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with verifiers and the tasksets of these tests."""
    folder = tmp_path_factory.mktemp("verifiers") / "venv"
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    subprocess.run([interpreter, "-m", "pip", "install", "-q", "verifiers==0.4.0", "uv"], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "tasksets_of_tests.pth").write_text(str(Path(__file__).with_name("verifiers_tasks")))
    return interpreter


def config_of(folder: Path, taskset: str, agent: str) -> Path:
    path = folder / f"{taskset}.toml"
    path.write_text(
        f'[taskset]\nid = "{taskset}"\n[{agent}.harness]\nid = "null"\n[{agent}.runtime]\ntype = "subprocess"\n'
    )
    return path


def tasks_of(config: Path, python: Path, *options: str) -> list[Task]:
    """Return what `arpo data from-verifiers` writes."""
    file = config.with_suffix(".jsonl")
    command = [*ARPO, "data", "from-verifiers", config, "--python", python, "-o", file, *options]
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [Task(f"task-{number}", tuple(row["prompt"]), row["answer"], "math", "") for number, row in enumerate(rows)]


@pytest.fixture
def guess(tmp_path: Path, python: Path) -> Iterator[tuple[VerifiersEnvironment, list[Task]]]:
    config = config_of(tmp_path, "guess_number", "player")
    environment = VerifiersEnvironment(str(config), str(python), accuracy="found", replayable=True)
    yield environment, tasks_of(config, python, "--limit", "6")
    environment.close()


def test_an_episode_gives_observations_and_weighted_rewards(
    guess: tuple[VerifiersEnvironment, list[Task]],
) -> None:
    environment, tasks = guess
    assert [task.ground_truth for task in tasks] == [str(number) for number in range(6)]
    opening = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST})
    assert environment.reset(tasks[5]) == opening
    assert environment.step("3").observation == "higher"
    assert environment.step("7").observation == "lower"
    last = environment.step("5")
    assert last.done and last.rewards == {"correct": 1.0, "guesses": -0.375}


def test_episodes_of_one_process_do_not_disturb_each_other(guess: tuple[VerifiersEnvironment, list[Task]]) -> None:
    first, tasks = guess
    second = VerifiersEnvironment(first.config, first.python)
    first.reset(tasks[1])
    second.reset(tasks[4])
    assert [each.step("2").observation for each in (first, second)] == ["lower", "higher"]
    first.close()
    assert second.step("4").rewards == {"found": 1.0, "guesses": -0.25}


def test_a_killed_process_fails_its_episodes_and_is_started_again(
    guess: tuple[VerifiersEnvironment, list[Task]],
) -> None:
    environment, tasks = guess
    environment.reset(tasks[1])
    environment.step("2")
    os.kill(worker_of(environment.config, environment.python).pid, signal.SIGKILL)
    with pytest.raises(VerifiersError, match="ended with status -9"):
        environment.step("1")
    environment.close()
    environment.reset(tasks[1])
    assert environment.step("0").observation == "higher"


def test_a_row_of_another_taskset_is_refused(guess: tuple[VerifiersEnvironment, list[Task]]) -> None:
    environment, _ = guess
    environment.reset(Task("task-0", ({"role": "user", "content": "1+1?"},), "0", "math", ""))
    with pytest.raises(VerifiersError, match="begins differently from its row"):
        environment.step("2")


def test_the_policy_calls_tools_of_a_taskset(tmp_path: Path, python: Path) -> None:
    config = config_of(tmp_path, "town_people", "agent")
    arl, _ = tasks_of(config, python)
    assert '"name": "people"' in arl.messages[0]["content"] and "# Tools" in arl.messages[0]["content"]
    environment = VerifiersEnvironment(str(config), str(python))
    environment.reset(arl)
    assert environment.step(TOWNS).observation == "<tool_response>\n52\n</tool_response>"
    assert "not a JSON object" in environment.step("<tool_call>{people}</tool_call>").observation
    assert environment.step("There are 52.").rewards == {"correct": 1.0}


def test_doctor_loads_the_environment_and_names_one_that_is_not_installed(tmp_path: Path, python: Path) -> None:
    found = []
    for taskset in ("guess_number", "no_such_taskset"):
        params = f"{{config: {config_of(tmp_path, taskset, 'player')}, python: {python}}}"
        overrides = ["rollout.environment=verifiers", f"rollout.environment_params={params}", "reward.kind=environment"]
        job = resolve.resolve("quickstart", overrides=overrides)
        found += run_checks([("tools", partial(check_job_tools, job))], 200.0, 200.0)
    assert [each.level for each in found] == ["ok", "failure"]
    assert "no_such_taskset" in found[1].text and "\n" not in found[1].text


def search_number(rng: random.Random) -> tuple[str, str, Turns]:
    """Return a search for a number by halves, with one guess that may be wasted."""
    number, low, high, turns = rng.randrange(8), 0, 7, Turns()
    while True:
        guess = rng.randint(low, high)
        turns.append(("assistant", str(guess)))
        if guess == number:
            return FIRST, str(number), turns
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        turns.append(("user", "higher" if guess < number else "lower"))


def test_job_trains_in_a_verifiers_environment_with_forks(tmp_path: Path, python: Path) -> None:
    run, config = tmp_path / "run", config_of(tmp_path, "guess_number", "player")
    tasks_of(config, python)
    overrides = prepare(tmp_path, search_number, SYSTEM)
    params = f"{{config: {config}, python: {python}, accuracy: found, replayable: true}}"
    overrides += [
        f"data.path={config.with_suffix('.jsonl')}",
        *("rollout.environment=verifiers", f"rollout.environment_params={params}", "reward.kind=environment"),
        *("rollout.max_tool_calls=6", "rollout.tool_timeout_s=120"),
    ]
    run_to_end(quickstart("train", run, *overrides), run)
    check_figures(run, ["guesses"])
    assert any(reward > 0 for item in trained(run) for reward in item.rewards), "some number was found"
    for turns, shown in zip(texts_of(run, Role.MODEL), texts_of(run, Role.TOOL), strict=True):
        for turn, answer in zip(turns, shown, strict=False):
            assert ("higher" in answer) != ("lower" in answer), f"{turn!r} is answered with {answer!r}"
