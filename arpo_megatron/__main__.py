"""`arpo` and `python -m arpo_megatron`: the command line's beginning and end.

Signals have their handlers before anything slow is imported, so a ctrl-C is one line from the first moment on.
"""

import sys

from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.utils.processes import ProcessDiedError
from arpo_megatron.utils.signals import Interrupted, interrupt_on_signals

_RESUME = "the same command with --resume goes on from the last step"


def _how_to_go_on() -> str:
    """What to do after an interrupted or failed command; empty for one that begins anew."""
    command = sys.argv[1:2]
    if command == ["study"]:
        return "the same command goes on with what is missing"
    return _RESUME if command in (["demo"], ["train"], ["sft"]) else ""


def main() -> None:
    """Entry point. A `UserError` is one line on standard error and exit code 2; ctrl-C is exit code 130."""
    try:
        interrupt_on_signals()
        from arpo_megatron.cli.main import app

        app()
    except UserError as error:
        print(f"arpo: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
    except ProcessDiedError as error:
        print(f"arpo: {error}", file=sys.stderr)
        if hint := _how_to_go_on():
            print(f"arpo: with the cause mended, {hint}", file=sys.stderr)
        sys.exit(1)
    except Interrupted as interrupt:
        hint = str(interrupt) or _how_to_go_on()
        print(f"arpo: interrupted{f'; {hint}' if hint else ''}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
