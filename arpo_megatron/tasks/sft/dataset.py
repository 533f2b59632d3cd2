"""Conversations for supervised training: the rows of a file as trees of one path, and the order of training.

rows.py checks a row; chat_template.py finds its trained tokens.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import BadRow
from arpo_megatron.tasks.sft.chat_template import ChatEncoder, path_tree
from arpo_megatron.tasks.sft.reflections import has_tokens, tokens_tree
from arpo_megatron.tasks.sft.rows import check_row, conversation_rows
from arpo_megatron.tree import RolloutTree
from arpo_megatron.utils.table_reader import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOG_EVERY_ROWS = 1000
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Conversations:
    """The usable rows of a file as trees of one path, in its order, and the bad rows."""

    trees: tuple[RolloutTree, ...]
    bad_rows: tuple[BadRow, ...]

    def split(self, held_out: float, seed: int) -> tuple[list[RolloutTree], list[RolloutTree]]:
        """Split into conversations to train on and held-out ones, drawn by the seed because a file may be sorted by
        source.

        Args:
            held_out: share that is held out, in [0, 1); at least one conversation if it is not 0.
            seed: together with the number of usable rows it determines the draw.

        Raises:
            UserError: nothing is left to train on.
        """
        count = max(1, round(held_out * len(self.trees))) if held_out else 0
        if count >= len(self.trees):
            raise UserError(
                f"sft.held_out_share={held_out} leaves none of {len(self.trees)} conversations to learn from"
            )
        kept = set(random.Random(f"held-out-conversations-{seed}").sample(range(len(self.trees)), count))
        train = [tree for index, tree in enumerate(self.trees) if index not in kept]
        return train, [self.trees[index] for index in sorted(kept)]


def read_conversations(
    path: Path,
    tokenizer: "PreTrainedTokenizerFast",
    max_tokens: int,
    *,
    vocabulary: int | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Conversations:
    """Read a .jsonl, .json or .parquet file.

    Args:
        path: the file.
        tokenizer: a tokenizer with a chat template.
        max_tokens: a longer conversation is a bad row.
        vocabulary: rows of the model's embedding; a token beyond it makes a bad row.
        log: receives a progress line now and then.

    Raises:
        UserError: the file or the chat template is missing, or no row is usable.
    """
    without_template = getattr(tokenizer, "chat_template", None) is None
    encoder = ChatEncoder(tokenizer)
    trees: list[RolloutTree] = []
    bad_rows: list[BadRow] = []
    for row in conversation_rows(path):
        if row.number and row.number % LOG_EVERY_ROWS == 0:
            log(f"{row.number} conversations read, {len(bad_rows)} of them bad rows")
        if without_template and not has_tokens(row.value()):
            raise UserError(
                f"sft.data={path} needs a tokenizer with a chat template: give model.path=DIR of a chat model"
            )
        try:
            tree = conversation_tree(row.value(), encoder, max_tokens, f"row-{row.number}")
            _check_vocabulary(tree, vocabulary)
            trees.append(tree)
        except BadRowError as error:
            bad_rows.append(BadRow(row.number, str(error)))
    if not trees:
        first = f"; the first: {bad_rows[0].reason}" if bad_rows else ""
        raise UserError(f"sft.data={path}: none of its {len(bad_rows)} rows can be used{first}")
    return Conversations(tuple(trees), tuple(bad_rows))


def draw_batch(conversations: Sequence[Item], size: int, *, seed: int, update: int) -> list[Item]:
    """Return the conversations of an update: shuffled epochs, a pure function of seed and update number.

    A batch may start in one epoch and end in the next, or hold several.
    """
    drawn: list[Item] = []
    position = update * size
    while len(drawn) < size:
        epoch, offset = divmod(position + len(drawn), len(conversations))
        order = _epoch_order(len(conversations), seed, epoch)
        drawn += [conversations[index] for index in order[offset : offset + size - len(drawn)]]
    return drawn


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"conversations-{seed}-{epoch}").shuffle(order)
    return order


def conversation_tree(row: Any, encoder: ChatEncoder, max_tokens: int, name: str = "conversation") -> RolloutTree:
    """Return one row as a path: PROMPT, then MODEL segments with TOOL segments (any context) between them.

    A row with "tokens" has the path itself (`reflections.tokens_tree`).

    Raises:
        BadRowError: the row cannot be used; the message is the reason.
    """
    tree = tokens_tree(row, name) if has_tokens(row) else path_tree(name, encoder.encode(check_row(row)))
    if tree.unique_tokens > max_tokens:
        raise BadRowError(f"{tree.unique_tokens} tokens, more than {max_tokens}")
    return tree


def _check_vocabulary(tree: RolloutTree, vocabulary: int | None) -> None:
    largest = max(int(segment.token_ids.max(initial=0)) for segment in tree.segments)
    if vocabulary is not None and largest >= vocabulary:
        raise BadRowError(f"token {largest} is beyond the model's vocabulary of {vocabulary}")
