"""What is meant for the user: a single line that says what, where and how to mend it."""

import difflib
from collections.abc import Sequence

USER_ERROR_EXIT_CODE = 2


class UserError(Exception):
    """Something the user can mend. The command line prints its one line, without a traceback, and exits with 2."""


def did_you_mean(word: str, names: Sequence[str], prefix: str = "") -> str:
    """The end of an error message: "; did you mean {prefix}NAME?", or nothing where none is near."""
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
