"""Upload of an exported model to the Hugging Face Hub."""

import os
from pathlib import Path

from arpo_megatron.errors import UserError


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
    import httpx
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if get_token() is None:
        raise UserError("no token for the Hub: set HF_TOKEN, or run `hf auth login`")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Export {folder.name}")
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {repo}: {str(error).splitlines()[0]}") from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise UserError(f"the Hub refuses {repo} or cannot be reached: {str(error).strip().splitlines()[0]}") from None
    return str(done.commit_url)
