"""`python -m arpo_megatron.engine.server.router ARGS`: SGLang's router, with the token of its engines.

The token (`push_gate.ENGINE_TOKEN`) is taken from the environment: arguments are seen by all users of a machine. The
router asks for it and bears it to the engines. ARGS are those of `sglang_router.launch_router`.
"""

import os
import sys


def main() -> None:
    """Route until a signal comes."""
    from sglang_router.launch_router import launch_router, parse_router_args

    from arpo_megatron.engine.server.gate import ENGINE_TOKEN

    arguments = parse_router_args(sys.argv[1:])
    arguments.api_key = os.environ.get(ENGINE_TOKEN) or None  # an empty one would be asked for, too
    launch_router(arguments)


if __name__ == "__main__":
    main()
