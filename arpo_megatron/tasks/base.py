"""A task: one question with its checkable answer, in the form every data source is brought to."""

from dataclasses import dataclass
from typing import TypedDict

from arpo_megatron.utils.text import whole_characters


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """A question and what counts as its answer. Its texts are made of `whole_characters`.

    Attributes:
        id: unique within a data set and stable between runs ("calc-17", "train-204").
        messages: the conversation before the model's turn.
        ground_truth: the expected content of the answer's box, always text.
        source: how an answer is verified: "math" (mathematical equality) or "qa" (token F1).
        prompt_text: the messages as the text that is tokenized and put before the model.
    """

    id: str
    messages: tuple[Message, ...]
    ground_truth: str
    source: str
    prompt_text: str

    def __post_init__(self) -> None:
        for name in ("id", "ground_truth", "source", "prompt_text"):
            object.__setattr__(self, name, whole_characters(getattr(self, name)))
        turns: tuple[Message, ...] = tuple(
            {"role": turn["role"], "content": whole_characters(turn["content"])} for turn in self.messages
        )
        object.__setattr__(self, "messages", turns)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of a data file that nothing was made of: its number from 0 and the reason in words."""

    row: int
    reason: str
