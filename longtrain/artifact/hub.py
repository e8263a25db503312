"""Artifacts on the Hub, through `huggingface_hub`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from longtrain.errors import ArtifactError, ConfigError


def upload(folder: Path, repo: str, *, patterns: Sequence[str], private: bool | None = None) -> str:
    """Create the repository if need be and upload the folder in one commit.

    Args:
        folder: an artifact.
        repo: ORG/NAME.
        patterns: file names to upload; anything else in the folder stays.
        private: of a new repository; None: the account's default.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: `repo` is not ORG/NAME, the Hub is switched off, or nobody is logged in.
        ArtifactError: the Hub refused or cannot be reached.
    """
    import httpx
    import huggingface_hub as hub

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"push={repo} is no repository name; allowed: ORG/NAME")
    endpoint = _endpoint()
    if hub.is_offline_mode():
        raise ConfigError(f"cannot push to {repo}: HF_HUB_OFFLINE is set; run: unset HF_HUB_OFFLINE")
    if hub.get_token() is None:
        raise ConfigError(
            f"cannot push to {repo}: not logged in to {endpoint}; run: hf auth login, or set HF_TOKEN"
        )
    api = hub.HfApi(endpoint=endpoint, library_name="longtrain")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(patterns),
            commit_message="Upload with longtrain",
        )
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise ArtifactError(f"{endpoint} did not take {repo}: {_first_line(error)}") from None
    return str(commit.commit_url)


def download(repo: str, *, patterns: Sequence[str], known: Sequence[str] = ()) -> Path:
    """Fetch an artifact's files, from the local copy where there is one.

    Args:
        repo: ORG/NAME.
        patterns: file names to fetch; nothing else is.
        known: local artifacts, named in the error.

    Raises:
        ArtifactError: it is not there, or the Hub cannot be reached.
    """
    import httpx
    import huggingface_hub as hub

    endpoint = _endpoint()
    try:
        folder = Path(hub.snapshot_download(repo, allow_patterns=list(patterns), endpoint=endpoint))
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise ArtifactError(
            f"no artifact '{repo}': not a folder, not under checkpoints/ (there: "
            f"{', '.join(known) or 'none'}), and {endpoint} did not give it: {_first_line(error)}"
        ) from None
    if not (folder / "longtrain.json").is_file():
        raise ArtifactError(f"{repo} on {endpoint} is no longtrain artifact: it has no longtrain.json")
    return folder


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
