"""The files that RULER's published prompts are made of, told by their hash."""

from __future__ import annotations

import gzip
import hashlib
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

SHA256 = {
    "haystack": (
        "8d31e1b660e0f2180bcca6d238e18f77921df9d158611582b860da1762b6d3dd",  # as RULER's script writes it
        "c991a4f897d482a4c845028f5bd3aa8951569b1ab1708723bcc6ec72e66b9446",  # ShadowKV's copy
    ),
    "squad": ("80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",),
    "hotpotqa": (
        "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",  # the authors' own file
        "e3da074df24e8369009918aa5cdbdd254dadcde4c63f7569d36afd6f2268caa8",  # the mirror that RULER fetches
    ),
    "more_words": ("affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca",),
}
"""What -> hashes of the unpacked file: PaulGrahamEssays.json, dev-v2.0.json, hotpot_dev_distractor_v1.json,
english_words.json."""

_OPEN: dict[str, Callable[..., IO[Any]]] = {".xz": lzma.open, ".gz": gzip.open}
_CHUNK = 1 << 20


def is_published(what: str, path: Path) -> bool:
    """Whether a file (plain, .xz or .gz) is the one that RULER's published prompts are made of.

    Args:
        what: a key of `SHA256`.
        path: that exists; a folder is no published file.
    """
    if not path.is_file():
        return False
    digest = hashlib.sha256()
    with _OPEN.get(path.suffix, open)(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() in SHA256[what]
