"""What is put before the model: one wording for each of the three kinds of row in the paper's table."""

from collections.abc import Mapping
from enum import StrEnum

from arpo_megatron.tasks.base import Message


class Tools(StrEnum):
    """How the model comes to its tools."""

    NONE = "none"  # no tools: direct reasoning
    PROMPT = "prompt"  # a model that was not trained for it is told how (tool-integrated reasoning by prompting)
    TRAINED = "trained"  # a model that was trained on the tag protocol


SYSTEM: Mapping[Tools, str] = {
    Tools.NONE: (
        "Solve the question step by step. State the final answer, and nothing else, inside \\boxed{} at the end."
    ),
    Tools.PROMPT: (
        "Solve the question step by step. You can use two tools while you reason.\n"
        "To search, write a query between <search> and </search>. To compute, write a Python program that prints what "
        "you want to know between <python> and </python>. Stop after the closing tag: the output of the tool follows "
        "between <result> and </result>, and you go on from there. Use a tool as often as it helps, a few times at "
        "most, and never write a <result> yourself.\n"
        "Put your reasoning between <think> and </think>. When you are sure, write <answer>...</answer> with the final "
        "answer, and nothing else, inside \\boxed{}.\n"
        "Example: <think>I need the product.</think> <python>print(12 * 34)</python> <result>\n408\n</result> "
        "<think>That is it.</think> <answer>\\boxed{408}</answer>"
    ),
    Tools.TRAINED: (
        "Answer the question. Reason between <think> and </think>; call a tool with <search>query</search> or "
        "<python>code</python> and read what it says between <result> and </result>; give the final answer as "
        "<answer>\\boxed{answer}</answer>."
    ),
}
"""Of `TRAINED`: what a model is shown whose training prompt is not known; a run's own is used where there is one."""


def messages(question: str, tools: Tools, system: str | None) -> tuple[Message, ...]:
    """The conversation before the model's turn. `system` takes the place of the wording above where it is given."""
    return (
        {"role": "system", "content": SYSTEM[tools] if system is None else system},
        {"role": "user", "content": question},
    )
