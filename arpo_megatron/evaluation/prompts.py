"""Prompts of an evaluation: one wording for each kind of row in the paper's tables."""

from collections.abc import Mapping
from enum import StrEnum

from arpo_megatron.tasks.base import Message


class Tools(StrEnum):
    """How the model knows its tools."""

    NONE = "none"  # no tools: direct reasoning
    PROMPT = "prompt"  # the prompt explains the protocol to a model that was not trained on it
    TRAINED = "trained"  # the model was trained on the tag protocol


SYSTEM: Mapping[Tools, str] = {
    Tools.NONE: (
        "Solve the question step by step. State the final answer, and nothing else, inside \\boxed{} at the end."
    ),
    Tools.PROMPT: (
        "Solve the question step by step. You can use two tools while you reason.\n"
        "To search, write a query between <search> and </search>. To compute, write a Python program that prints what "
        "you want to know between <python> and </python>. Stop after the closing tag: the output of the tool follows "
        "between <result> and </result>, and you continue from there. Use a tool as often as it helps, a few times at "
        "most, and never write a <result> yourself.\n"
        "Put your reasoning between <think> and </think>. When you are sure, write <answer>...</answer> with the final "
        "answer, and nothing else, inside \\boxed{}.\n"
        "Example: <think>I need the product.</think> <python>print(12 * 34)</python> <result>\n408\n</result> "
        "<think>That is it.</think> <answer>\\boxed{408}</answer>"
    ),
    Tools.TRAINED: (
        "Answer the question. Reason between <think> and </think>; call a tool with <search>query</search> or "
        "<python>code</python> and read its answer between <result> and </result>; give the final answer as "
        "<answer>\\boxed{answer}</answer>."
    ),
}
"""Default system prompts. `TRAINED` is for models whose training prompt is unknown; a run uses its own."""


def messages(question: str, tools: Tools, system: str | None) -> tuple[Message, ...]:
    """Return the conversation before the model's turn, with `system` instead of the default if it is not None."""
    return (
        {"role": "system", "content": SYSTEM[tools] if system is None else system},
        {"role": "user", "content": question},
    )
