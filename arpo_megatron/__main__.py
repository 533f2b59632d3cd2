"""`arpo` and `python -m arpo_megatron`: the command line's beginning and end.

Signals have their handlers before anything slow is imported, so a ctrl-C is one line from the first moment on.
"""

import sys

from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.processes import Interrupted, RoleDiedError, interrupt_on_signals

_RESUME = "the same command with --resume goes on from the last step"


def _resumable() -> bool:
    return sys.argv[1:2] in (["demo"], ["train"], ["sft"])


def main() -> None:
    """Entry point. A `UserError` is one line on standard error and exit code 2; ctrl-C is exit code 130."""
    try:
        interrupt_on_signals()
        from arpo_megatron.cli import app

        app()
    except UserError as error:
        print(f"arpo: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
    except RoleDiedError as error:
        print(f"arpo: {error}", file=sys.stderr)
        if _resumable():
            print(f"arpo: with the cause mended, {_RESUME}", file=sys.stderr)
        sys.exit(1)
    except Interrupted:
        print(f"arpo: interrupted{f'; {_RESUME}' if _resumable() else ''}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
