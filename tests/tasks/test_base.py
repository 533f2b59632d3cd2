"""A task holds text that tokenizers and files accept."""

from arpo_megatron.tasks.base import Task


def test_half_a_character_in_a_task_is_replaced() -> None:
    half = "a\ud83d"
    task = Task(half, ({"role": "user", "content": half},), half, "math", half)
    whole = "a\ufffd"
    assert task == Task(whole, ({"role": "user", "content": whole},), whole, "math", whole)
    "".join([task.id, task.ground_truth, task.prompt_text, task.messages[0]["content"]]).encode()
