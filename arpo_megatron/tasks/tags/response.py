r"""The tag format of a finished trajectory, and its answer.

<think>..</think> <search>query</search> <result>..</result> <python>code</python> <result>..</result>
<answer>..\boxed{x}..</answer>
"""

import re
from collections.abc import Sequence

from arpo_megatron.config.validation import PROTOCOL_TAGS
from arpo_megatron.tasks.protocols.base import Parsed
from arpo_megatron.tasks.protocols.tools import DEFAULT_NAMES

_RESULT = re.compile(r"\s*<result>")
_BOX = re.compile(r"\\boxed\s*\{")


def parse_response(text: str, tools: Sequence[str] = DEFAULT_NAMES) -> Parsed:
    r"""Check the rules of the ARPO protocol on a whole response.

    The response needs at least one paired <think>, exactly one <answer>, a <result> after every call of one of the
    `tools` (names), and a \boxed{} in the answer. A <result> must follow a call, and text in a result or a call is not
    read as tags: a web page or a program may contain any text. A thought may name a tool's tag without calling it.
    """
    scan = _Scan(text, tools)
    reason = scan.run()
    if reason:
        return Parsed(reason, None, frozenset(scan.tools))
    if scan.thoughts == 0:
        return Parsed("no <think>", None, frozenset(scan.tools))
    if len(scan.answers) != 1:
        return Parsed(f"{len(scan.answers)} answers instead of one", None, frozenset(scan.tools))
    answer = last_boxed(scan.answers[0])
    return Parsed("" if answer is not None else "no \\boxed{} in the answer", answer, frozenset(scan.tools))


def parse_last_turn(text: str, called: frozenset[str]) -> Parsed:
    r"""Check the last turn of a response whose calls are turns of their own: exactly one <answer> with a \boxed{}.

    A chat template may begin the turn inside a thought, so only what follows the last </think> counts.
    """
    answer_part = text.rpartition("</think>")[2]
    if "<think>" in answer_part:
        return Parsed("<think> is not paired", None, called)
    scan = _Scan(answer_part, ())
    reason = scan.run()
    if not reason and len(scan.answers) != 1:
        reason = f"{len(scan.answers)} answers instead of one"
    if reason:
        return Parsed(reason, None, called)
    answer = last_boxed(scan.answers[0])
    return Parsed("" if answer is not None else "no \\boxed{} in the answer", answer, called)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} with balanced braces, or None. A space may precede the brace."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


class _Scan:
    """A scan over the tags from left to right."""

    def __init__(self, text: str, tools: Sequence[str]) -> None:
        self._names = frozenset(tools)
        self._tag = re.compile(rf"<(/?)({'|'.join(map(re.escape, (*PROTOCOL_TAGS, *tools)))})>")
        self.thoughts = 0
        self.answers: list[str] = []
        self.tools: set[str] = set()
        self._text = text
        self._position = 0

    def run(self) -> str:
        """Return the broken rule, or an empty string."""
        thinking = False
        while match := self._tag.search(self._text, self._position):
            self._position = match.end()
            closing, name = match[1] == "/", match[2]
            if name == "think":
                if closing != thinking:
                    return "<think> is not paired"
                thinking = not closing
                self.thoughts += closing
            elif closing:
                return f"</{name}> without <{name}>"
            elif name == "result":
                return "<result> without a call"
            elif thinking and name in self._names and not self._closed_before(f"</{name}>", "</think>"):
                continue
            elif problem := self._block(name):
                return problem
        return "<think> is not paired" if thinking else ""

    def _block(self, name: str) -> str:
        """Skip a call with its result, or the answer."""
        content = self._until(f"</{name}>")
        if content is None:
            return f"<{name}> is not closed"
        if name == "answer":
            if "<answer>" in content:
                return "<answer> inside an answer"
            self.answers.append(content)
            return ""
        if not _RESULT.match(self._text, self._position):
            return f"<{name}> without a <result>"
        if self._until("</result>") is None:
            return "<result> is not closed"
        self.tools.add(name)
        return ""

    def _closed_before(self, tag: str, end: str) -> bool:
        """Whether `tag` follows, and comes before `end`."""
        place, limit = self._text.find(tag, self._position), self._text.find(end, self._position)
        return place >= 0 and (limit < 0 or place < limit)

    def _until(self, tag: str) -> str | None:
        """Return the text up to `tag` and move past it; None if it does not follow."""
        end = self._text.find(tag, self._position)
        if end < 0:
            return None
        content = self._text[self._position : end]
        self._position = end + len(tag)
        return content
