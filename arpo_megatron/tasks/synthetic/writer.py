"""Writing of demonstrations: cut where sampling would cut, with the answers of the real tools."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.lookup import apply
from arpo_megatron.tree import Finish, Role, RolloutTree, ToolRecord

NOTHING_FOUND = "No results found."


class Encoder(Protocol):
    """The part of a transformers tokenizer that demonstrations need."""

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""


class Writer:
    """Writes one demonstration into a tree."""

    def __init__(self, task: Task, tokenizer: Encoder, facts: Mapping[str, str]) -> None:
        prompt_ids = tokenizer.encode(task.prompt_text, add_special_tokens=False)
        self.tree = RolloutTree(task.id, np.array(prompt_ids, np.int32))
        self._tokenizer = tokenizer
        self._facts = facts
        self._last = 0

    def python(self, left: int, operator: str, right: int) -> int:
        """Call python and return the number that it answers."""
        code = f"{left}{operator}{right}"
        value = apply(left, operator, right)
        self._call("calculate", "python", code, {"code": code}, str(value))
        return value

    def search(self, name: str) -> str | None:
        """Search for a name and return the text of its page, or None if nothing is found."""
        fact = self._facts.get(name)
        text = NOTHING_FOUND if fact is None else f"Page 1: {name} {fact}"
        self._call("look up", "search", name, {"query": name}, text)
        return fact

    def answer(self, text: str) -> None:
        """End with an answer, as the sampler would: the closing tag and the end-of-sequence token."""
        content = f"<answer>\\boxed{{{text}}}</answer>{self._tokenizer.eos_token}"
        self._add(Role.MODEL, content, finish=Finish.END)

    def _call(self, thought: str, tool: str, argument: str, arguments: dict[str, str], result: str) -> None:
        model_text = f"<think>{thought}</think><{tool}>{argument}</{tool}>"
        self._add(Role.MODEL, model_text, finish=Finish.TOOL_CALL)
        record = ToolRecord(tool, arguments, "ok", seconds=0.0, cached=False)
        self._add(Role.TOOL, f" <result>\n{result}\n</result>", tool=record)

    def _add(self, role: Role, text: str, *, finish: Finish | None = None, tool: ToolRecord | None = None) -> None:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        self._last = self.tree.add(self._last, role, ids, finish=finish, tool=tool)
