"""`python -m arpo_megatron.engine.server.router ARGS`: SGLang's router with the bearer token of its engines.

ARGS are those of `sglang_router.launch_router`. The token comes from the environment, because every user of a machine
can read a process's arguments. The router requires the token from its clients and sends it to the engines.
"""

import os
import sys


def main() -> None:
    """Route requests until a signal ends the process."""
    from sglang_router.launch_router import launch_router, parse_router_args

    from arpo_megatron.engine.wire.endpoints import ENGINE_TOKEN_VARIABLE
    from arpo_megatron.utils.processes import raise_file_limit

    raise_file_limit()  # each waiting request has a connection to its client and one to its engine
    arguments = parse_router_args(sys.argv[1:])
    arguments.api_key = os.environ.get(ENGINE_TOKEN_VARIABLE) or None  # an empty token would be required, too
    launch_router(arguments)


if __name__ == "__main__":
    main()
