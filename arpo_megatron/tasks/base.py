"""A task: one question with its checkable answer, the form to which every data source is converted."""

from dataclasses import dataclass, field
from typing import Protocol, TypedDict, runtime_checkable

from arpo_megatron.utils.text import whole_characters


class Message(TypedDict):
    """Role and text of one turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its expected answer. Its texts are made of `whole_characters`."""

    id: str
    """Unique within a data set and stable between runs ("calc-17", "train-204")."""
    messages: tuple[Message, ...]
    """The conversation before the model's turn."""
    ground_truth: str
    """Expected content of the answer's box, always text."""
    source: str
    """How an answer is verified: "math" (mathematical equality) or "qa" (token F1)."""
    prompt_text: str
    """The messages as the text that the model is prompted with."""
    aliases: tuple[str, ...] = ()
    """Other answers that are as right as `ground_truth`."""
    hint: str = ""
    """A worked solution, whose beginning a selector may show (`tasks/selectors/hinted.py`); "": there is none."""

    @property
    def answers(self) -> tuple[str, ...]:
        """All right answers."""
        return (self.ground_truth, *self.aliases)

    def __post_init__(self) -> None:
        for name in ("id", "ground_truth", "source", "prompt_text", "hint"):
            object.__setattr__(self, name, whole_characters(getattr(self, name)))
        object.__setattr__(self, "aliases", tuple(map(whole_characters, self.aliases)))
        turns: tuple[Message, ...] = tuple(
            {"role": turn["role"], "content": whole_characters(turn["content"])} for turn in self.messages
        )
        object.__setattr__(self, "messages", turns)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of a data file that could not be used: its number from 0 and the reason."""

    row: int
    reason: str
    where: str = field(default="", compare=False)
    """File and line, for messages."""


@runtime_checkable
class VariesTasks(Protocol):
    """Implemented by task selectors that draw tasks with changed prompts and ids of their own."""

    def variant(self, task_id: str) -> Task:
        """Return the drawn task with this id, for a resumed run; KeyError for an unknown id."""
