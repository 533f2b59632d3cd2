"""Selectors by difficulty: tasks left out or preferred, no task twice in a batch, the same draws after a resume."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task, VariesTasks
from arpo_megatron.tasks.files.mixture import MixedTasks
from arpo_megatron.tasks.selectors.base import TaskSelector, make_task_selector
from arpo_megatron.tasks.selectors.failures import ReplayedFailures
from arpo_megatron.tasks.selectors.hinted import HintedTasks
from arpo_megatron.tasks.selectors.prompts import PromptPopulation
from arpo_megatron.tasks.selectors.solvable import SolvableTasks
from arpo_megatron.tasks.selectors.targeted import TargetedTasks
from arpo_megatron.tasks.selectors.unsaturated import UnsaturatedTasks

TASKS = [Task(f"t{number}", (), "", "math", "") for number in range(6)]
SOLVED = {"t0": 0.0, "t1": 0.6, "t2": 0.9, "t3": 1.0, "t4": 0.4, "t5": 0.8}
"""Share of the trajectories of each task that solve it."""


def drawn(selector: TaskSelector, count: int, solved: dict[str, float] = SOLVED) -> list[str]:
    ids = [task.id for task in selector.next_batch(count)]
    assert len(set(ids)) == count
    for task_id in ids:
        right = round(10 * solved[task_id])
        selector.record_result(task_id, [1.0] * right + [0.0] * (10 - right))
    return ids


def test_unsaturated_tasks_prune_saturated_ones() -> None:
    selector = UnsaturatedTasks(TASKS, 3)
    assert sorted(drawn(selector, 6)) == [task.id for task in TASKS]
    for _ in range(5):
        assert set(drawn(selector, 4)) == {"t0", "t1", "t4", "t5"}
    assert selector.metrics()["selector/pruned"] == 2
    drawn(selector, 4, dict.fromkeys(SOLVED, 1.0))  # now all are, and batches are filled up
    assert len(drawn(selector, 5)) == 5
    assert selector.metrics() == {"selector/left_out": 6, "selector/pruned": 6}


def test_targeted_tasks_are_all_tried_first() -> None:
    selector = TargetedTasks(TASKS, 1, difficulty_temperature=0.01)
    assert sorted(drawn(selector, 3) + drawn(selector, 3)) == [task.id for task in TASKS]
    for _ in range(10):
        assert set(drawn(selector, 2)) == {"t1", "t4"}
    assert selector.metrics() == {"selector/tried": 6, "selector/distance": pytest.approx(1.9 / 6)}


def test_targeted_draws_follow_their_weights() -> None:
    """A single draw from all tasks follows the softmax."""
    selector = TargetedTasks(TASKS, 5, difficulty_temperature=0.2)
    drawn(selector, 6)
    counts = Counter(drawn(selector, 1)[0] for _ in range(4000))
    weights = {name: math.exp(-abs(success - 0.5) / 0.2) for name, success in SOLVED.items()}
    for name, weight in weights.items():
        assert counts[name] / 4000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_targeted_tasks_in_flight_are_drawn_last() -> None:
    selector = TargetedTasks(TASKS, 2)
    first = {task.id for task in selector.next_batch(3)}
    second = {task.id for task in selector.next_batch(3)}
    assert not first & second
    assert {task.id for task in selector.next_batch(3)} == first  # the longest in flight


@pytest.mark.parametrize("kind", [ReplayedFailures, SolvableTasks, TargetedTasks, UnsaturatedTasks])
@pytest.mark.parametrize("seed", range(4))
def test_refills_of_a_step_never_repeat_a_task(kind: type, seed: int) -> None:
    selector = kind(TASKS, seed)
    drawn(selector, 3)
    for _ in range(6):
        begun: list[str] = []
        for wanted, found in ((2, 2), (3, 3), (2, 1), (1, 0)):  # the previous step has recorded all its trees
            more = [task.id for task in selector.next_batch(wanted, begun)]
            assert len(more) == found
            begun += more
        assert sorted(begun) == [task.id for task in TASKS]
        for task_id in begun:
            selector.record_result(task_id, [SOLVED[task_id]])


@pytest.mark.parametrize("kind", [ReplayedFailures, TargetedTasks, UnsaturatedTasks])
def test_resumed_selector_draws_the_same(kind: type) -> None:
    selector = kind(TASKS, 1)
    for _ in range(4):
        drawn(selector, 2)
    selector.next_batch(2)
    resumed = kind(TASKS, 1)
    resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert [drawn(selector, 2) for _ in range(4)] == [drawn(resumed, 2) for _ in range(4)]


@pytest.mark.parametrize("kind", [TargetedTasks, UnsaturatedTasks])
def test_selector_errors_are_one_line(kind: type) -> None:
    with pytest.raises(UserError, match="only 6 training tasks"):
        kind(TASKS, 1).next_batch(7)
    with pytest.raises(UserError, match="other tasks" if kind is TargetedTasks else "with 6 tasks"):
        kind(TASKS[:5], 1).load_state_dict(kind(TASKS, 1).state_dict())


def hinted_tasks(count: int, hint: str = "abcdefgh") -> list[Task]:
    return [
        Task(
            f"t{number}",
            ({"role": "user", "content": f" What is {number}? "},),
            str(number),
            "math",
            f"<user>What is {number}?</user><assistant>",
            hint=hint,
        )
        for number in range(count)
    ]


def test_failed_task_comes_again_with_more_of_its_solution() -> None:
    """It is among the first of the next batch, with a quarter, a half and three quarters of the solution."""
    selector = HintedTasks(hinted_tasks(5), 1)
    (first,) = selector.next_batch(1)
    shown = []
    for _ in range(3):
        selector.record_result(selector.variant(first.id).id, [0.0, 0.0])
        again, other = selector.next_batch(2, begun=["of another batch"])
        assert other.id in {f"t{number}" for number in range(5)}
        question, text = again.messages[-1]["content"].split("\nThe solution begins like this:\n")
        assert question == f"What is {first.ground_truth}?"
        assert again.prompt_text == f"<user>{again.messages[-1]['content']}</user><assistant>"
        shown.append(text)
        first = again
    assert shown == ["ab", "abcd", "abcdef"]
    assert first.id.endswith("#hint3")
    selector.record_result(first.id, [0.0])
    assert selector.metrics() == {"selector/hinted": 1, "selector/failed": 0}, "no more is shown"


def test_solved_and_unhinted_tasks_do_not_come_again() -> None:
    tasks = [*hinted_tasks(1), *(Task(f"u{n}", (), "", "math", "") for n in range(2))]
    selector = HintedTasks(tasks, 1)
    selector.record_result("t0", [0.0, 1.0])
    selector.record_result("u0", [0.0])
    assert [task.id for task in selector.next_batch(3)].count("t0") == 1
    assert selector.metrics() == {"selector/hinted": 0, "selector/failed": 0}
    with pytest.raises(UserError, match=r"needs hints: set data\.columns\.hint"):
        HintedTasks(TASKS, 1)


def test_hint_needs_a_question_that_the_prompt_contains() -> None:
    tasks = [replace(hinted_tasks(1)[0], prompt_text="another text")]
    selector = HintedTasks(tasks, 1)
    selector.record_result("t0", [0.0])
    with pytest.raises(UserError, match="the prompt of t0 does not contain its question"):
        selector.next_batch(1)


def test_hinted_tasks_resume_with_the_same_draws() -> None:
    """Also as a part of a mixture, which passes ids on to the selector that has drawn them."""
    for tasks in (hinted_tasks(6), MixedTasks([(1.0, hinted_tasks(6))])):
        config = AlgorithmConfig(selector="hinted")
        selector = make_task_selector(config, tasks, 3)
        for task in selector.next_batch(4):
            selector.record_result(task.id, [0.0])
        (drawn,) = selector.next_batch(1)
        state = json.loads(json.dumps(selector.state_dict()))
        resumed = make_task_selector(config, tasks, 3)
        resumed.load_state_dict(state)
        assert isinstance(resumed, VariesTasks)
        assert (resumed.variant(drawn.id), drawn.id[-6:]) == (drawn, "#hint1")
        assert resumed.next_batch(5) == selector.next_batch(5)
        with pytest.raises(KeyError):
            resumed.variant("unknown#hint1")


def test_failures_are_replayed_up_to_their_share() -> None:
    tasks = [Task(f"t{number}", (), "", "math", "") for number in range(40)]
    selector = ReplayedFailures(tasks, 1, failure_share=0.25)
    first = [task.id for task in selector.next_batch(8)]
    for number, name in enumerate(first):
        selector.record_result(name, [0.0, 0.0] if number < 5 else [0.0, 1.0])
    second = [task.id for task in selector.next_batch(8)]
    assert second[:2] == first[:2], "those that have waited longest come first"
    assert not set(second[2:]) & set(first)
    selector.record_result(first[0], [0.0])
    selector.record_result(first[2], [1.0])
    assert selector.metrics() == {"selector/replayed": 2, "selector/failed": 3}
    assert [task.id for task in selector.next_batch(8)][:2] == [first[3], first[4]]


def prompted_tasks(count: int) -> list[Task]:
    system = {"role": "system", "content": "the old one"}
    text = "<system>the old one</system><user>{}</user>"
    return [
        Task(f"t{n}", (system, {"role": "user", "content": str(n)}), "", "math", text.format(n))  # type: ignore[arg-type]
        for n in range(count)
    ]


def population(path: Path, count: int = 400, **params: Any) -> PromptPopulation:
    file = path / "prompts.txt"
    file.write_text("Be brief.\n---\nThink\nfirst.\n---\nGuess.\n")
    return PromptPopulation(prompted_tasks(count), 1, str(file), **params)


def test_prompts_are_drawn_by_the_softmax_of_what_they_have_earned(tmp_path: Path) -> None:
    selector = population(tmp_path, 4000, prompt_temperature=0.5, prompt_memory=1.0)
    earned = [0.1, 0.9, 0.4]
    for number, mean in enumerate(earned):
        selector.record_result(f"t0#prompt{number}", [mean - 0.1, mean + 0.1])
    counts = Counter(task.id.rpartition("#prompt")[2] for task in selector.next_batch(4000))
    weights = [math.exp(mean / 0.5) for mean in earned]
    for number, weight in enumerate(weights):
        assert counts[str(number)] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_task_gets_the_prompt_of_its_id(tmp_path: Path) -> None:
    (task,) = population(tmp_path).next_batch(1)
    name, _, prompt = task.id.rpartition("#prompt")
    text = ("Be brief.", "Think\nfirst.", "Guess.")[int(prompt)]
    assert task.messages[0]["content"] == text
    assert task.prompt_text == f"<system>{text}</system><user>{name[1:]}</user>"


def test_worst_prompt_leaves_until_enough_remain(tmp_path: Path) -> None:
    selector = population(tmp_path, prompt_every=4, prompt_keep=2)
    for _ in range(8):
        for task in selector.next_batch(2):
            selector.record_result(task.id, [float(task.id.endswith("#prompt1")), 0.5 * task.id.endswith("#prompt2")])
    assert set(selector.metrics()) == {"selector/prompt_1", "selector/prompt_2"}
    selector.record_result("t0#prompt0", [1.0])  # a tree that was in flight when its prompt left
    state = json.loads(json.dumps(selector.state_dict()))
    resumed = population(tmp_path, prompt_every=4, prompt_keep=2)
    resumed.load_state_dict(state)
    assert resumed.next_batch(20) == selector.next_batch(20)
    (tmp_path / "prompts.txt").write_text("Be brief.\n---\nGuess.")
    with pytest.raises(UserError, match="other prompts"):
        PromptPopulation(prompted_tasks(400), 1, str(tmp_path / "prompts.txt")).load_state_dict(state)


def test_prompt_population_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("Be brief.")
    with pytest.raises(UserError, match="needs two prompts"):
        PromptPopulation(prompted_tasks(4), 1, str(tmp_path / "one.txt"))
    with pytest.raises(UserError, match=r"needs a file of prompts: set algorithm\.params\.prompt_file"):
        PromptPopulation(prompted_tasks(4), 1)
    with pytest.raises(UserError, match=r"prompt_file=/nowhere: No such file"):
        PromptPopulation(prompted_tasks(4), 1, "/nowhere")
    selector = population(tmp_path)
    selector.tasks = TASKS
    with pytest.raises(UserError, match="no system prompt that could be replaced"):
        selector.variant("t0#prompt0")
