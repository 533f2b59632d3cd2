"""Text that every tokenizer and file accepts."""

import re

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """Return the text with U+FFFD for each unpaired surrogate.

    JSON may hold one (an emoji that was cut in the middle); tokenizers and files accept none.
    """
    return _HALF_CHARACTER.sub("\ufffd", text)
