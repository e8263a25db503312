"""Uploads to and downloads from the Hub through `huggingface_hub`; printed messages never contain tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from longtrain.errors import ArtifactError, ConfigError, first_line
from longtrain.provenance import redact

REPO = r"[\w.-]+/[\w.-]+"
SLUG = re.compile(rf"{REPO}-[0-9a-f]{{24}}")
"""Slug of a collection, as in the Hub's URLs; any other name is a title."""

SAID = {
    "RepositoryNotFoundError": "it has no such repository, or one that this login may not read",
    "RevisionNotFoundError": "the repository has no such revision",
    "GatedRepoError": "its owners give access on request; ask for it on its page",
    "LocalEntryNotFoundError": "it was not fetched before, and the Hub is switched off or cannot be reached",
}
"""Error classes of the library with long messages -> message in one line."""


def upload(
    folder: Path,
    repo: str,
    *,
    patterns: Sequence[str],
    private: bool = True,
    collection: str | None = None,
) -> str:
    """Create the repository if need be, upload the folder, and add it to a collection.

    An interrupted upload continues where it was, because the Hub stores each completed file. What cannot
    work is refused before, by `check_push`.

    Args:
        folder: folder of an artifact.
        repo: ORG/NAME.
        patterns: patterns of the files to upload.
        private: make a new repository or collection visible to its owners only.
        collection: slug of a collection, or ORG/TITLE of one that is created if it is missing; None: none.

    Returns:
        The URL of the commit.

    Raises:
        ArtifactError: the Hub refused or cannot be reached.
    """
    import huggingface_hub as hub

    api = hub.HfApi(endpoint=endpoint(), library_name="longtrain")
    with _hub_errors(f"did not take {repo}", "what it has whole is kept; the same command goes on"):
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(patterns),
            commit_message="Upload with longtrain",
        )
    if collection is not None:
        with _hub_errors(f"has {repo} now and did not add it to the collection {collection}", "try again"):
            slug = collection
            if not SLUG.fullmatch(collection):
                owner, _, title = collection.partition("/")
                slug = api.create_collection(title, namespace=owner, private=private, exists_ok=True).slug
            api.add_collection_item(slug, repo, "model", exists_ok=True)
    return str(commit.commit_url)


def check_push(repo: str, collection: str | None = None) -> None:
    """Refuse an upload that cannot work, without a network request.

    Raises:
        ConfigError: `repo` is not ORG/NAME, `collection` has no owner, the Hub is switched off, or the user
            is not logged in.
    """
    import huggingface_hub as hub

    if not re.fullmatch(REPO, repo):
        raise ConfigError(f"push={repo} is no repository name; allowed: ORG/NAME")
    if collection is not None and not re.fullmatch(r"[\w.-]+/[^/]+", collection):
        raise ConfigError(
            f"collection={collection} is no collection; allowed: ORG/TITLE, or ORG/SLUG of its address"
        )
    if hub.is_offline_mode():
        raise ConfigError(f"cannot push to {repo}: HF_HUB_OFFLINE is set; run: unset HF_HUB_OFFLINE")
    if hub.get_token() is None:
        raise ConfigError(
            f"cannot push to {repo}: not logged in to {endpoint()}; run: hf auth login, or set HF_TOKEN"
        )


def download(repo: str, *, revision: str | None = None, patterns: Sequence[str], elsewhere: str = "") -> Path:
    """Download an artifact's files, or take them from the local cache.

    Args:
        repo: ORG/NAME.
        revision: a branch, tag or commit; None: the newest.
        patterns: patterns of the files to download.
        elsewhere: places searched before, for the error message.

    Raises:
        ArtifactError: the artifact does not exist, or the Hub cannot be reached.
    """
    import huggingface_hub as hub

    named = repo if revision is None else f"{repo}@{revision}"
    with _hub_errors("did not give it", before=f"no artifact '{named}': {elsewhere}"):
        return Path(
            hub.snapshot_download(repo, revision=revision, allow_patterns=list(patterns), endpoint=endpoint())
        )


def endpoint() -> str:
    """Return the URL of the Hub (`HF_ENDPOINT`, if set)."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@contextmanager
def _hub_errors(what: str, remedy: str = "", *, before: str = "") -> Iterator[None]:
    """Context manager that turns any error into one line, without tokens and signed URLs.

    Raises:
        ArtifactError: the block failed.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HTTPError  # from httpx or httpx2, depending on the library's version

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        known = (text for kind, text in SAID.items() if type(error).__name__ == kind)
        said = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", next(known, first_line(error)))
        if token := hub.get_token():
            said = said.replace(token, "***")
        line = f"{before}{endpoint()} {what}: {redact(said)}{f'; {remedy}' if remedy else ''}"
        raise ArtifactError(line) from None
