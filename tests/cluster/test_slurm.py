"""Calls of Slurm's commands."""

import signal

from arpo_megatron.cluster import slurm


def test_a_closed_connection_does_not_kill_the_command() -> None:
    # With SIGPIPE at its default, a munged that closes each connection kills scontrol without a message.
    status = slurm.call("grep", "SigIgn", "/proc/self/status")
    assert int(status.split()[1], 16) & 1 << (signal.SIGPIPE - 1)
