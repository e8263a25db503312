"""Where the site's pages come from, and where links between files of the repository lead on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = "recipes/results"

ADOPTED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "recipes/README.md": "recipes/index.md",
    "recipes/results/README.md": "benchmarks/notes.md",
    "data_prep/README.md": "corpora.md",
    "bundled/tiny/README.md": "bundled-target.md",
    "bundled/artifacts/README.md": "bundled-artifacts.md",
    "notebooks/train_a_draft.ipynb": "notebooks/train_a_draft.md",
    "notebooks/evict_a_cache.ipynb": "notebooks/evict_a_cache.md",
}
"""File of the repository -> the site's page that shows it. Files in docs/ are pages by themselves."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(?ms)^(?P<mark>```|~~~).*?^(?P=mark)[ \t]*$")


def page_of(path: str) -> str | None:
    """The site's page that shows a file of the repository; None where it has none."""
    if path in ADOPTED:
        return ADOPTED[path]
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return None


def source_of(page: str) -> str:
    """The file that a page comes from; pages that are generated have their links as seen from docs/."""
    return next((path for path, shown in ADOPTED.items() if shown == page), f"docs/{page}")


def anchor(name: str) -> str:
    """The heading of one file of figures on its benchmark page, as a link needs it."""
    return re.sub(r"[^\w]+", "-", name.removesuffix(".json")).strip("-").lower()


def group(result: str) -> str:
    """The benchmark page of a file of figures: its folder, or its own name where it lies at the top."""
    return result.split("/")[0].removesuffix(".json").removesuffix(".train")


def results() -> list[str]:
    """Every file of figures, relative to `recipes/results`."""
    folder = ROOT / RESULTS
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.json"))


def links(text: str) -> Iterator[tuple[int, int, str, str, str]]:
    """Links outside of fenced code: start, end, `!` for pictures, words, address."""
    fenced = [match.span() for match in _FENCE.finditer(text)]
    for match in _LINK.finditer(text):
        if not any(start <= match.start() < end for start, end in fenced):
            yield match.start(), match.end(), *match.groups()


def target_of(address: str, source: str) -> tuple[str, str] | None:
    """The file or folder of the repository that an address means, and what follows `#`.

    Args:
        address: as the link has it.
        source: the file that holds the link.

    Returns:
        None for addresses of the web and of places in the same page.
    """
    path, _, place = address.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), place


def on_site(path: str, place: str, *, raw: bool = False) -> str | None:
    """Where a file of the repository is on the site, from its root; None for folders and what is missing.

    Args:
        path: relative to the repository.
        place: what follows `#`, or nothing.
        raw: the file itself rather than the page that shows it.
    """
    suffix = f"#{place}" if place else ""
    if not raw and (page := page_of(path)):
        return page + suffix
    inside = path.removeprefix(f"{RESULTS}/")
    if not raw and inside != path and inside.endswith(".json") and (ROOT / path).is_file():
        return f"benchmarks/{group(inside)}.md#{anchor(inside)}"
    return f"files/{path}" if (ROOT / path).is_file() else None


def relink(text: str, page: str) -> str:
    """A page's text with links that lead to the site's pages and files.

    A link to a folder that no page shows becomes its words; one to a missing file stays, and mkdocs
    refuses it.
    """
    parts, done = [], 0
    for start, end, picture, words, address in links(text):
        found = target_of(address, source_of(page))
        if found is None:
            continue
        path, place = found
        where = on_site(path, place, raw=bool(picture) or place == "raw")
        if where is not None:
            link = f"{picture}[{words}]({posixpath.relpath(where, posixpath.dirname(page) or '.')})"
        elif (ROOT / path).is_dir():
            link = words
        else:
            continue
        parts += [text[done:start], link]
        done = end
    return "".join([*parts, text[done:]])


def files_needed(text: str, page: str) -> set[str]:
    """Files of the repository that a page links to and no page shows: they are copied beside the site."""
    found = set()
    for _, _, picture, _, address in links(text):
        if target := target_of(address, source_of(page)):
            path, place = target
            where = on_site(path, place, raw=bool(picture) or place == "raw")
            if where and where.startswith("files/"):
                found.add(path)
    return found
