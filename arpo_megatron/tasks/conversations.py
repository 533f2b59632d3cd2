"""Conversations for supervised training: message lists in the customary form, token-exact to the model's chat template.

A row is {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": str, "train": bool}, ...]}, with an
optional "tools" list for the template; `train` is optional and only of an assistant's messages. What the model is to
learn are the assistant's tokens, the end-of-turn token included; everything else is context.

Which tokens those are is asked of the template itself: where it marks them ({% generation %}), by its mask; otherwise
by rendering the conversation up to each turn. A conversation whose rendered beginning is not a beginning of the whole
(templates that rewrite earlier turns) has no such answer and counts as a bad row, like every other that cannot be used.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import BadRow
from arpo_megatron.tree import Role, RolloutTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("system", "user", "assistant", "tool")
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass(frozen=True, slots=True)
class Conversations:
    """The usable rows of a file as trees of one path, in its order, and those that are not."""

    trees: tuple[RolloutTree, ...]
    bad_rows: tuple[BadRow, ...]


def read_conversations(path: Path, tokenizer: "PreTrainedTokenizerFast", max_tokens: int) -> Conversations:
    """Read a .jsonl or .parquet file.

    Args:
        path: of the file.
        tokenizer: with a chat template.
        max_tokens: a longer conversation is a bad row.

    Raises:
        UserError: the file or the chat template is missing, or no row is usable.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"sft.data={path} needs a tokenizer with a chat template: give model.path=DIR of a chat model")
    trees, bad_rows = [], []
    for number, row in enumerate(_rows(path)):
        try:
            if isinstance(row, ValueError):
                raise row
            trees.append(conversation_tree(row, tokenizer, max_tokens, name=f"row-{number}"))
        except ValueError as error:
            bad_rows.append(BadRow(number, str(error)))
    if not trees:
        first = f"; the first: {bad_rows[0].reason}" if bad_rows else ""
        raise UserError(f"sft.data={path}: none of its {len(bad_rows)} rows can be used{first}")
    return Conversations(tuple(trees), tuple(bad_rows))


def check_conversations(path: Path) -> None:
    """Raises UserError unless `path` is a file of a kind that `read_conversations` reads."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"sft.data={path}: conversations are read from .jsonl or .parquet files")
    if not path.is_file():
        raise UserError(f"sft.data={path}: no such file")


def batch(conversations: Sequence[RolloutTree], size: int, *, seed: int, update: int) -> list[RolloutTree]:
    """The conversations of an update: shuffled epochs, a pure function of seed and update number."""
    drawn: list[RolloutTree] = []
    position = update * size
    while len(drawn) < size:
        epoch, offset = divmod(position + len(drawn), len(conversations))
        order = list(range(len(conversations)))
        random.Random(f"conversations-{seed}-{epoch}").shuffle(order)
        drawn += [conversations[index] for index in order[offset : offset + size - len(drawn)]]
    return drawn


def conversation_tree(
    row: Any, tokenizer: "PreTrainedTokenizerFast", max_tokens: int, *, name: str = "conversation"
) -> RolloutTree:
    """One row as a path: PROMPT, then MODEL segments with TOOL segments (any context) between them.

    Raises:
        ValueError: it cannot be used; the message says why.
    """
    messages = _checked(row)
    try:
        token_ids, trained = _render(messages, row.get("tools"), tokenizer)
    except ValueError:
        raise
    except Exception as error:  # templates raise whatever they like about roles they do not want
        raise ValueError(f"the chat template refuses it: {str(error).splitlines()[0]}") from error
    if len(token_ids) > max_tokens:
        raise ValueError(f"{len(token_ids)} tokens, more than {max_tokens}")
    if not any(trained):
        raise ValueError("no assistant turn to learn")
    if trained[0]:
        raise ValueError("the template puts nothing before the first assistant turn that could predict it")
    edges = [0, *(i for i in range(1, len(trained)) if trained[i] != trained[i - 1]), len(trained)]
    tree, parent = RolloutTree(name, token_ids[: edges[1]]), 0
    last = max(i for i, flag in enumerate(trained) if flag)
    for start, stop in pairwise(edges[1:]):
        if start <= last:
            parent = tree.add(parent, Role.MODEL if trained[start] else Role.TOOL, token_ids[start:stop])
    return tree


def _rows(path: Path) -> Iterator[Any]:
    """Each row, a ValueError in the place of one that is no JSON."""
    check_conversations(path)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield from pq.read_table(path).to_pylist()
        except pa.ArrowInvalid as error:
            raise UserError(f"sft.data={path}: not a readable parquet file: {str(error).splitlines()[0]}") from None
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError as error:
                yield ValueError(f"no JSON: {error}")


def _checked(row: Any) -> list[dict[str, Any]]:
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('no "messages" list')
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"message {place} has no role of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {place} has no content")
        if not isinstance(message.get("train", True), bool | None):
            raise ValueError(f"message {place}: train is neither true nor false")
    return messages


def _render(messages: Sequence[dict[str, Any]], tools: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids of the whole conversation, and which of them are to be learnt."""
    plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    skipped = any(message.get("train") is False for message in messages)
    if _GENERATION.search(str(tokenizer.chat_template)) and not skipped:
        made = tokenizer.apply_chat_template(
            plain, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(made["input_ids"]), [bool(flag) for flag in made["assistant_masks"]]

    def ids(count: int, *, prompt: bool = False) -> list[int]:
        made = tokenizer.apply_chat_template(
            plain[:count], tools=tools, tokenize=True, return_dict=True, add_generation_prompt=prompt
        )
        return list(made["input_ids"])

    whole = ids(len(plain))
    trained = [False] * len(whole)
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("train") is False:
            continue
        before, through = ids(place, prompt=True), ids(place + 1)
        if through[: len(before)] != before or whole[: len(through)] != through:
            raise ValueError(f"the chat template renders the turns before message {place} otherwise in the whole")
        stop = len(through)
        # What follows the end-of-turn token (a line break, say) is the template's, not the model's.
        ends = [i for i in range(len(before), stop) if through[i] in special]
        stop = ends[-1] + 1 if ends else stop
        trained[len(before) : stop] = [True] * (stop - len(before))
    return whole, trained
