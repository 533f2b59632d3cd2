"""A conversation as tokens: exactly those of the model's chat template, and which of them are trained.

The trained tokens of an assistant turn are those that the model would sample: everything after the generation prompt up
to and including the token that ends the turn. A template that marks them itself (`{% generation %}`) is followed. With
any other template the conversation is rendered up to each turn, and every such beginning must be a token prefix of the
whole. If it is not, because the template rewrites earlier turns, the trained tokens are unknown and the row is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arpo_megatron.tasks.sft.rows import Conversation
from arpo_megatron.tree import Int32Array, Role, RolloutTree
from arpo_megatron.utils.table_reader import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """A run of tokens of one role."""

    role: Role
    token_ids: Int32Array


class ChatEncoder:
    """Renders and tokenizes conversations with a tokenizer's chat template.

    Args:
        tokenizer: a fast tokenizer with a chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = set(added)
        self._special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    def encode(self, conversation: Conversation) -> list[TemplatePart]:
        """Return PROMPT, then MODEL and TOOL (context without loss) in turn, up to the last token with loss.

        Tokens after that one have no effect, so they are left out.

        Raises:
            BadRowError: the template refuses the conversation, or does not show where the trained turns are.
        """
        try:
            tools = _dicts(conversation.tools or ()) or None
            if _GENERATION.search(str(self._tokenizer.get_chat_template(tools=tools))):
                ids, spans = self._marked(conversation)
            else:
                ids, spans = self._incremental(conversation)
        except BadRowError:
            raise
        except Exception as error:  # templates raise anything: jinja2's errors, TypeError, KeyError, ...
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BadRowError(f"the chat template refuses the conversation: {reason}") from error
        if spans[0][0] == 0:
            raise BadRowError("no token comes before the first trained one")
        return _parts(ids, spans)

    def _marked(self, conversation: Conversation) -> tuple[list[int], list[Span]]:
        """Find the trained spans by the template's own marks; add the end-of-turn token if they leave it out."""
        ids, runs = self._with_mask(conversation.messages, conversation.tools)
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(runs) != len(turns):
            raise BadRowError(f"the chat template marks {len(runs)} spans for {len(turns)} assistant messages")
        # A special token that follows the last turn is the end-of-turn token.
        last, last_runs = self._with_mask(conversation.messages[: turns[-1] + 1], conversation.tools)
        after = last[last_runs[-1][1] :]
        end = after[0] if after and after[0] in self._special else None
        runs = [(low, high + (ids[high : high + 1] == [end])) for low, high in runs]
        return ids, [run for run, turn in zip(runs, turns, strict=True) if conversation.trained[turn]]

    def _with_mask(self, messages: Messages, tools: Any) -> tuple[list[int], list[Span]]:
        found: Any = self._tokenizer.apply_chat_template(
            _dicts(messages),
            tools=None if tools is None else list(tools),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False, "return_offsets_mapping": True},
        )
        mask, offsets = list(found["assistant_masks"]), found["offset_mapping"]
        for i in range(1, len(mask)):
            # If the last character takes several tokens, transformers marks only the first of them.
            mask[i] = mask[i] or int(mask[i - 1] and offsets[i][0] < offsets[i - 1][1])
        edges = np.flatnonzero(np.diff([0, *mask, 0]))
        return list(found["input_ids"]), [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

    def _incremental(self, conversation: Conversation) -> tuple[list[int], list[Span]]:
        """Find the trained spans by rendering the conversation up to and including each trained turn."""
        messages, tools = conversation.messages, conversation.tools
        turns = [i for i, trained in enumerate(conversation.trained) if trained]
        texts = [self._render(messages, tools)]
        for turn in turns:
            texts.append(self._render(messages[:turn], tools, prompt=True))
            texts.append(self._render(messages[: turn + 1], tools))
        whole, *beginnings = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        spans = []
        for number, turn in enumerate(turns):
            before, through = beginnings[2 * number : 2 * number + 2]
            if whole[: len(before)] != before:
                if texts[0].startswith(texts[1 + 2 * number]):
                    raise BadRowError(f"the tokenizer joins the beginning of message {turn} with what is before it")
                raise BadRowError(f"the chat template renders the turns before message {turn} differently in the whole")
            spans.append((len(before), self._end(turn, whole, len(before), through)))
        return whole, spans

    def _render(self, messages: Messages, tools: Any, *, prompt: bool = False) -> str:
        if not messages:
            return ""
        return str(
            self._tokenizer.apply_chat_template(
                _dicts(messages),
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=prompt,
            )
        )

    def _end(self, turn: int, whole: list[int], start: int, through: list[int]) -> int:
        """Return the end of a turn that starts at `start`; `through` is the conversation rendered up to it."""
        own = through[start:]
        stop = next((i + 1 for i in reversed(range(len(own))) if own[i] in self._special), 0)
        if stop and not self._decode(own[stop:]).strip():
            own = own[:stop]  # what follows the end-of-turn token belongs to the template, not to the model
        if whole[start : start + len(own)] == own:
            if whole[:start] != through[:start]:
                raise BadRowError(f"the chat template renders the turns before message {turn} differently in the whole")
            return start + len(own)
        # Qwen3 shows an empty thinking block in the last turn only, so tags without text may be missing in the whole.
        for skipped in range(1, len(own)):
            if own[skipped - 1] not in self._added and self._decode(own[skipped - 1 : skipped]).strip():
                break
            if whole[start : start + len(own) - skipped] == own[skipped:]:
                return start + len(own) - skipped
        raise BadRowError(
            f"the chat template renders the turns before message {turn + 1} differently in the whole "
            "(templates that leave out earlier reasoning do)"
        )

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def path_tree(task_id: str, parts: Sequence[TemplatePart]) -> RolloutTree:
    """Build a tree of one path."""
    tree = RolloutTree(task_id, parts[0].token_ids)
    for above, part in enumerate(parts[1:]):
        tree.add(above, part.role, part.token_ids)
    return tree


def _dicts(items: Messages) -> list[dict[str, Any]]:
    """Return messages or tools in the form that transformers takes."""
    return [dict(item) for item in items]


def _parts(ids: list[int], spans: Sequence[Span]) -> list[TemplatePart]:
    parts: list[TemplatePart] = []
    done = 0
    for low, high in spans:
        if low > done or not parts:
            role = Role.TOOL if parts else Role.PROMPT
            parts.append(TemplatePart(role, np.array(ids[done:low], np.int32)))
        parts.append(TemplatePart(Role.MODEL, np.array(ids[low:high], np.int32)))
        done = high
    return parts
