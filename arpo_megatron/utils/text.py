"""Text that every tokenizer and file accepts, and tables."""

import re
from collections.abc import Sequence

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """Return the text with U+FFFD for each unpaired surrogate.

    JSON may hold one (an emoji that was cut in the middle); tokenizers and files accept none.
    """
    return _HALF_CHARACTER.sub("\ufffd", text)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with a head and rows of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
