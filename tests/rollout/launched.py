"""A rollout process for tests, without a supervisor."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arpo_megatron.engine.launch import SCRATCH_PREFIX
from arpo_megatron.rollout.handle import RolloutHandle
from arpo_megatron.rollout.messages import ServiceSettings
from arpo_megatron.rollout.service import rollout_service, rollout_socket
from arpo_megatron.utils.ports import free_ports
from arpo_megatron.utils.processes import stop_groups
from tools_sandbox.utils.temporary import TemporaryFolder

STARTUP_S = 180.0


@contextmanager
def launched_rollouts(settings: ServiceSettings) -> Iterator[RolloutHandle]:
    """Start a rollout process without a supervisor for the time of the `with` block.

    Args:
        settings: addresses, tokenizer, seed.

    Raises:
        UserError: `tokenizer_path` holds no tokenizer.json.
        RolloutError: the process could not start.
    """
    scratch = TemporaryFolder(SCRATCH_PREFIX)
    directory = scratch.path
    log = Path(os.devnull)
    process = rollout_service(directory, free_ports(1)[0], log_path=log, hang_timeout_s=STARTUP_S).start()
    try:
        with RolloutHandle.connect(rollout_socket(directory), settings, patience_s=STARTUP_S) as handle:
            yield handle
    finally:
        stop_groups([process], 0.0)
        scratch.remove()
