"""One page with every recipe: where its numbers come from, and its text."""

from __future__ import annotations

from repository import ROOT


def page() -> str:
    """The page's Markdown; its order is that of the file names."""
    lines = [
        "# Every recipe, and where its numbers come from",
        "",
        "Made of the files in `recipes/` when the site is built. "
        "[Which recipe for what](../../recipes/README.md).",
        "",
    ]
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        head = []
        for line in text.splitlines():
            if not line.startswith("#"):
                break
            head.append(line.removeprefix("#").strip())
        title, *rest = head or [""]
        lines += [f"## {file.stem}", "", f"{title}", ""]
        lines += [_plain(" ".join(rest).strip()), ""] if any(rest) else []
        lines += [
            f'??? note "{file.name}"',
            "",
            "    ```yaml",
            *(f"    {line}".rstrip() for line in text.splitlines()),
            "    ```",
            "",
        ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A comment as Markdown: signs that Markdown would read are kept as signs."""
    return (
        text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
        if "`" not in text
        else text
    )
