"""Upload of an exported model to the Hugging Face Hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from arpo_megatron.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def check_hub(repo: str) -> None:
    """Check what can be known before an export is made: the repository's name, and that the Hub knows the token.

    Raises:
        UserError: as `push_to_hub` does.
    """
    with _one_line(repo):
        _api(repo).whoami()


def push_to_hub(folder: Path, repo: str, *, private: bool) -> str:
    """Upload an export as one commit, and return the address of the commit.

    The Hub's address is HF_ENDPOINT, else the public one; the token is HF_TOKEN, else that of `hf auth login`.

    Args:
        folder: the exported directory, its model card included.
        repo: OWNER/NAME; it is created if it does not exist.
        private: whether a new repository is private.

    Raises:
        UserError: there is no token, the name is not valid, or the Hub refuses or cannot be reached.
    """
    with _one_line(repo):
        api = _api(repo)
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Export {folder.name}")
    return str(done.commit_url)


def _api(repo: str) -> "HfApi":
    """Return the Hub's interface. Raises UserError without a token, HFValidationError for a wrong name."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not in __all__

    validate_repo_id(repo)
    if "/" not in repo:
        raise UserError(f"--push-to-hub {repo}: write OWNER/NAME")
    if get_token() is None:
        raise UserError("no token for the Hub: set HF_TOKEN, or run `hf auth login`")
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


@contextmanager
def _one_line(repo: str) -> Iterator[None]:
    """Raise errors of the library inside the block as a UserError."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {repo}: {str(error).splitlines()[0]}") from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise UserError(f"the Hub refuses {repo} or cannot be reached: {str(error).strip().splitlines()[0]}") from None
