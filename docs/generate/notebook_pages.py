"""A notebook as a page: its words and its code. What the code shows is seen by running it."""

from __future__ import annotations

import json

from repository import ROOT


def page(source: str) -> str:
    """The page's Markdown.

    Args:
        source: the notebook, relative to the repository.
    """
    cells = json.loads((ROOT / source).read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    name = source.rpartition("/")[2]
    parts.insert(
        1, f"`pip install -e '.[notebooks]'`, then open [{name}]({name}#raw) in Jupyter or an editor."
    )
    return "\n\n".join(parts) + "\n"
