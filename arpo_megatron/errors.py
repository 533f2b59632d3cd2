"""Errors that the command line turns into one line for the user."""

import difflib
from collections.abc import Sequence

USER_ERROR_EXIT_CODE = 2


class UserError(Exception):
    """A problem that the user can fix. The command line prints its one line, no traceback, and exits with code 2."""


class StoppedError(Exception):
    """The job was asked to end before it was done, and has saved its state."""


def did_you_mean(word: str, names: Sequence[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return "; did you mean {prefix}NAME?" for the closest name, or "" if none reaches the similarity `cutoff`."""
    near = difflib.get_close_matches(word, names, n=4, cutoff=cutoff)
    near.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters are the likeliest slip
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def first_error(error: BaseException) -> BaseException:
    """Return the first plain exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
