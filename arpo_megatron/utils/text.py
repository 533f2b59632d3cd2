"""Text that every tokenizer and file takes."""

import re

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone.

    JSON may hold one (an emoji that was cut in the middle); no tokenizer and no file takes it.
    """
    return _HALF_CHARACTER.sub("\ufffd", text)
