"""What mkdocs calls while it builds the site: pages made of the repository's files, figures and links."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import benchmarks
import equations
import figures
import knobs
import messages
import notebook_pages
import recipe_pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from repository import ADOPTED, ROOT, files_needed, relink


def on_config(config: Any) -> Any:
    """Put every benchmark page into the menu."""
    for entry in config["nav"]:
        if "Benchmarks" in entry:
            entry["Benchmarks"] += sorted(
                page for page in benchmarks.pages() if not page.endswith("/index.md")
            )
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other files, and the files that pages link to."""
    made: dict[str, str] = {
        page: notebook_pages.page(source)
        if source.endswith(".ipynb")
        else (ROOT / source).read_text(encoding="utf-8")
        for source, page in ADOPTED.items()
    }
    made |= benchmarks.pages()
    made["recipes/provenance.md"] = recipe_pages.page()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    needed: set[str] = set()
    for file in [*files.documentation_pages()]:
        needed |= files_needed(_filled(file.content_string, file.src_uri), file.src_uri)
    for path in sorted(needed):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page's text with figures, settings, messages, equations and links as the site has them."""
    return relink(_filled(markdown, page.file.src_uri), page.file.src_uri)


def _filled(text: str, page: str) -> str:
    """A page's text with what stands between double braces.

    Raises:
        PluginError: a figure is not where the page says.
    """
    try:
        text = equations.shown(figures.fill(text, page.count("/")))
        text = re.sub(r"\{\{ settings: (\w+) \}\}", lambda mark: knobs.table(mark[1]), text)
    except LookupError as error:
        raise PluginError(f"{page}: {error}") from error
    return text.replace("{{ messages }}", messages.table()) if "{{ messages }}" in text else text
