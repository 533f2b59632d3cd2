"""The one exception that is meant for the user: a single line that says what, where and how to mend it."""

USER_ERROR_EXIT_CODE = 2


class UserError(Exception):
    """Something the user can mend. The command line prints its one line, without a traceback, and exits with 2."""
