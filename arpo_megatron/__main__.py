"""Entry point of `arpo` and `python -m arpo_megatron`.

Signal handlers are installed before anything slow is imported, so that a ctrl-C prints one line at any moment.
"""

import sys

from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.utils.processes import ProcessDiedError
from arpo_megatron.utils.signals import Interrupted, end_on_signals, interrupt_on_signals

_RESUME = "the same command with --resume continues from the last step"


def _resume_hint() -> str:
    """Return how to continue an interrupted or failed command; empty if it starts from the beginning."""
    command = sys.argv[1:2]
    if command == ["study"]:
        return "the same command continues"
    return _RESUME if command in (["demo"], ["train"], ["sft"]) else ""


def main() -> None:
    """Entry point. A `UserError` is one line on standard error and exit code 2; ctrl-C is exit code 130."""
    interrupt_on_signals()
    try:
        try:
            from arpo_megatron.cli.main import run_command

            sys.exit(run_command(sys.argv[1:]))
        finally:
            end_on_signals()
    except UserError as error:
        print(f"arpo: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
    except ProcessDiedError as error:
        print(f"arpo: {str(error).rstrip()}", file=sys.stderr)  # the log of a killed process may be empty
        if hint := _resume_hint():
            print(f"arpo: after fixing the cause, {hint}", file=sys.stderr)
        sys.exit(1)
    except Interrupted as interrupt:
        hint = str(interrupt) or _resume_hint()
        print(f"arpo: interrupted{f'; {hint}' if hint else ''}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
