"""Temporary folders of a job's processes."""

from tempfile import gettempdir

from arpo_megatron.errors import UserError
from tools_sandbox.utils.temporary import TemporaryFolder


def temporary_folder(prefix: str) -> TemporaryFolder:
    """Return a new folder in TMPDIR. Raises UserError if there is no room for it, or no file locks."""
    try:
        return TemporaryFolder(prefix)
    except OSError as error:
        why = error.strerror or error
        raise UserError(
            f"no temporary directory in {gettempdir()} ({why}): set TMPDIR to a local filesystem with room"
        ) from None
